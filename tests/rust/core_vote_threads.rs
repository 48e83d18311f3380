//! The vote among threads: who differs or is missing is named alike on every rank, in time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use lowlat_core::vote::{Bell, Decision, Next, Round, SeatError, StepBallot};
use lowlat_core::{
    Ballot, BallotParts, Board, Coverage, DeadlineLadder, Epoch, Facts, InstantNs, Reason,
    ReasonKind, Requirements, Seat, TpRank, guard,
};

const LONG_NS: u64 = 60_000_000_000;
const SHORT_NS: u64 = 50_000_000;

#[derive(Clone)]
struct Cast {
    widths: Vec<u32>,
    keys_digest: u64,
    geometry_digest: u64,
    catalogue_digest: u64,
    kernel_ns: u64,
    requirements: &'static str,
}

impl Default for Cast {
    fn default() -> Self {
        Self {
            widths: vec![6, 12, 18],
            keys_digest: 2,
            geometry_digest: 3,
            catalogue_digest: 1,
            kernel_ns: 1,
            requirements: "toy",
        }
    }
}

fn ballot(rank: u32, tp_size: u32, cast: &Cast) -> Ballot {
    let facts = Facts {
        isa: "scalar".into(),
        tp_size,
        ..Facts::default()
    };
    let servable = guard(&facts, &Requirements::new(cast.requirements, &["scalar"])).unwrap();
    let parts = BallotParts {
        widths: &cast.widths,
        keys_digest: cast.keys_digest,
        geometry_digest: cast.geometry_digest,
        catalogue_digest: cast.catalogue_digest,
        ladder: DeadlineLadder::new(cast.kernel_ns, 20, 30, 40).unwrap(),
    };
    Ballot::new(&servable, TpRank(rank), parts).unwrap()
}

/// Every rank in `casts` that is `Some` votes; the others keep silent.
fn vote(casts: &[Option<Cast>], budget_ns: u64) -> Vec<Option<Result<Coverage, String>>> {
    let tp_size = casts.len() as u32;
    let board = Board::new(tp_size).unwrap();
    let start = Instant::now();
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..)
            .zip(casts)
            .map(|(rank, cast)| {
                let cast = cast.clone()?;
                let mut seat = board.seat(TpRank(rank)).unwrap();
                Some(scope.spawn(move || {
                    let now = || InstantNs(start.elapsed().as_nanos() as u64);
                    let ballot = ballot(rank, tp_size, &cast);
                    seat.agree(&ballot, budget_ns, now)
                        .map_err(|refusal| refusal.to_string())
                }))
            })
            .collect();
        handles
            .into_iter()
            .map(|handle| Some(handle?.join().unwrap()))
            .collect()
    })
}

fn check_refusal(casts: &[Option<Cast>], budget_ns: u64, expected: &str) {
    for ended in vote(casts, budget_ns).into_iter().flatten() {
        assert_eq!(ended.unwrap_err(), expected);
    }
}

#[test]
fn equal_ballots_give_every_rank_the_same_coverage() {
    for tp_size in [1, 2, 4, 8] {
        let ended = vote(&vec![Some(Cast::default()); tp_size], LONG_NS);
        for (rank, ended) in ended.into_iter().enumerate() {
            let coverage = ended.unwrap().unwrap();
            assert_eq!(coverage.widths(), [6, 12, 18]);
            assert_eq!(
                (coverage.tp_rank().idx(), coverage.tp_size()),
                (rank, tp_size as u32)
            );
            assert_eq!((coverage.keys_digest(), coverage.epoch()), (2, Epoch(1)));
            assert_eq!(coverage.ladder().engine_ns(), 40);
        }
    }
}

#[test]
fn other_widths_are_told_by_value_before_what_follows_from_them() {
    let odd = Cast {
        widths: vec![6, 12],
        catalogue_digest: 9,
        ..Cast::default()
    };
    check_refusal(
        &[Some(Cast::default()), Some(odd)],
        LONG_NS,
        "[301] rank 1 covers widths [6, 12]; rank 0 covers [6, 12, 18]",
    );
}

#[test]
fn whatever_else_differs_is_named() {
    let base = Some(Cast::default());
    let odd = Some(Cast {
        keys_digest: 9,
        ..Cast::default()
    });
    check_refusal(
        &[base.clone(), odd],
        LONG_NS,
        "[302] rank 1 covers graph keys 0x0000000000000009; \
         rank 0 covers graph keys 0x0000000000000002",
    );
    let odd = Some(Cast {
        geometry_digest: 9,
        ..Cast::default()
    });
    check_refusal(
        &[base.clone(), odd],
        LONG_NS,
        "[303] rank 1 has launch geometry 0x0000000000000009; \
         rank 0 has launch geometry 0x0000000000000003",
    );
    let odd = Some(Cast {
        catalogue_digest: 9,
        ..Cast::default()
    });
    check_refusal(
        &[base.clone(), base.clone(), odd, base.clone()],
        LONG_NS,
        "[304] rank 2 carries kernel catalogue 0x0000000000000009; \
         rank 0 carries kernel catalogue 0x0000000000000001",
    );
    let odd = Some(Cast {
        kernel_ns: 2,
        ..Cast::default()
    });
    check_refusal(
        &[base.clone(), odd],
        LONG_NS,
        "[305] rank 1 has deadlines of kernel 2 ns, plugin 20 ns, collective 30 ns, engine 40 ns; \
         rank 0 has deadlines of kernel 1 ns, plugin 20 ns, collective 30 ns, engine 40 ns",
    );
    let odd = Some(Cast {
        requirements: "other",
        ..Cast::default()
    });
    let ended = vote(&[base, odd], LONG_NS);
    let text = ended[0].clone().unwrap().unwrap_err();
    assert!(
        text.starts_with("[309] rank 1 checked requirements and model 0x"),
        "{text}"
    );
}

#[test]
fn a_silent_rank_is_a_fault_that_names_it() {
    let base = Some(Cast::default());
    check_refusal(
        &[base.clone(), base.clone(), None, base],
        SHORT_NS,
        "[401] rank 2 did not answer the vote of epoch 1 by the deadline",
    );
}

/// A group of two in which both seats are driven by this thread, one after the other.
struct Pair {
    board: Arc<Board>,
    clock: Instant,
}

impl Pair {
    fn new() -> Self {
        Self {
            board: Board::new(2).unwrap(),
            clock: Instant::now(),
        }
    }

    fn now(&self) -> InstantNs {
        InstantNs(self.clock.elapsed().as_nanos() as u64)
    }
}

#[test]
fn a_late_rank_ends_like_those_who_gave_up_and_nobody_votes_again() {
    let pair = Pair::new();
    let mut early = pair.board.seat(TpRank(0)).unwrap();
    let mut late = pair.board.seat(TpRank(1)).unwrap();
    let missing = Decision::Missing { rank: TpRank(1) };
    assert_eq!(early.agree_step(7, 1, || pair.now()), missing);
    // The late rank has every ballot now, and still must not run the step.
    assert_eq!(late.agree_step(7, LONG_NS, || pair.now()), missing);
    for seat in [&mut early, &mut late] {
        assert_eq!(seat.agree_step(7, LONG_NS, || pair.now()), missing);
        let refusal = seat.agree(
            &ballot(seat.tp_rank().0, 2, &Cast::default()),
            LONG_NS,
            || pair.now(),
        );
        assert_eq!(refusal.unwrap_err().reason().kind(), ReasonKind::Fault);
    }
}

/// Planted once: a fault of the coverage vote that the seat does not keep.
#[test]
fn after_a_rank_was_missed_in_the_coverage_vote_nobody_votes_again() {
    let pair = Pair::new();
    let mut early = pair.board.seat(TpRank(0)).unwrap();
    let mut late = pair.board.seat(TpRank(1)).unwrap();
    let agree = |seat: &mut Seat, budget_ns| {
        let own = ballot(seat.tp_rank().0, 2, &Cast::default());
        seat.agree(&own, budget_ns, || pair.now()).unwrap_err()
    };
    let missing = Decision::Missing { rank: TpRank(1) };
    let first = agree(&mut early, 1);
    assert_eq!(first.decision, missing);
    assert_eq!(agree(&mut late, LONG_NS), first);
    for seat in [&mut early, &mut late] {
        assert_eq!(seat.fault(), Some(missing));
        assert_eq!(agree(seat, LONG_NS), first);
        assert_eq!(seat.agree_step(7, LONG_NS, || pair.now()), missing);
    }
}

/// A decision may already rest on the first. Planted once: the last one counts.
#[test]
fn the_first_ballot_of_a_rank_counts() {
    let mut round = Round::new(TpRank(0), 2);
    round.begin(Epoch(1), StepBallot(7), InstantNs(0), 100);
    round.receive(TpRank(1), Epoch(1), StepBallot(8));
    round.receive(TpRank(1), Epoch(1), StepBallot(7));
    round.receive(TpRank(2), Epoch(1), StepBallot(7));
    let differs = Decision::Differs {
        rank: TpRank(1),
        reason: Reason::VoteStep,
    };
    assert_eq!(round.poll(InstantNs(1)), Next::Propose(differs));
}

#[test]
fn a_rank_that_was_started_again_gets_no_seat() {
    let pair = Pair::new();
    drop(pair.board.seat(TpRank(1)).unwrap());
    assert_eq!(
        pair.board.seat(TpRank(1)).unwrap_err(),
        SeatError::Taken(TpRank(1))
    );
    let outside = SeatError::Outside {
        rank: 2,
        tp_size: 2,
    };
    assert_eq!(pair.board.seat(TpRank(2)).unwrap_err(), outside);
    assert_eq!(Board::new(0).unwrap_err(), SeatError::Size(0));
    assert_eq!(Board::new(65).unwrap_err(), SeatError::Size(65));
}

#[test]
fn a_declining_rank_takes_all_with_it_at_once() {
    let pair = Pair::new();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let pair = &pair;
            scope.spawn(move || {
                let mut seat = pair.board.seat(TpRank(rank)).unwrap();
                let ballot = match rank {
                    0 => ballot(0, 2, &Cast::default()),
                    _ => Ballot::declining(TpRank(1), 2, Reason::TensorLayout).unwrap(),
                };
                let refusal = seat.agree(&ballot, LONG_NS, || pair.now()).unwrap_err();
                assert_eq!(
                    refusal.to_string(),
                    "[307] rank 1 declines, so all do: a loaded tensor is laid out otherwise [113]"
                );
                assert_eq!(refusal.reason().kind(), ReasonKind::RanksDiffer);
            });
        }
    });
}

/// Steps in a row, across the wrap of epochs, with a step in between on which ranks differ.
#[test]
fn the_hot_vote_goes_on_after_a_difference() {
    let tp_size = 4;
    let board = Board::starting_at(tp_size, Epoch(u32::MAX - 50)).unwrap();
    let clock = Instant::now();
    std::thread::scope(|scope| {
        for rank in 0..tp_size {
            let mut seat = board.seat(TpRank(rank)).unwrap();
            scope.spawn(move || {
                let now = || InstantNs(clock.elapsed().as_nanos() as u64);
                for step in 0..200 {
                    let odd = step == 100 && rank == 2;
                    let decision = seat.agree_step(step + u64::from(odd), LONG_NS, now);
                    if step == 100 {
                        let reason = Reason::VoteStep;
                        assert_eq!(
                            decision,
                            Decision::Differs {
                                rank: TpRank(2),
                                reason
                            }
                        );
                        assert_eq!(
                            seat.step_refusal(decision).to_string(),
                            "[308] rank 2 is about to run step 0x0000000000000065; \
                             rank 0 is about to run step 0x0000000000000064"
                        );
                    } else {
                        assert_eq!(decision, Decision::Agreed);
                    }
                }
            });
        }
    });
}

#[test]
fn ballots_that_cannot_be_cast_are_refused_in_words() {
    let facts = Facts {
        isa: "scalar".into(),
        tp_size: 2,
        ..Facts::default()
    };
    let servable = guard(&facts, &Requirements::new("toy", &["scalar"])).unwrap();
    let ladder = DeadlineLadder::new(1, 2, 3, 4).unwrap();
    let cast = |rank, widths: &[u32]| {
        let parts = BallotParts {
            widths,
            keys_digest: 0,
            geometry_digest: 0,
            catalogue_digest: 0,
            ladder,
        };
        Ballot::new(&servable, TpRank(rank), parts).map_err(|error| error.to_string())
    };
    let needs = "a vote needs 1 to 32 ascending row counts above 0";
    let too_many: Vec<u32> = (1..=33).collect();
    for widths in [&[][..], &[0, 6], &[12, 6], &[6, 6], &too_many] {
        assert_eq!(
            cast(0, widths).unwrap_err(),
            format!("widths are {widths:?}; {needs}")
        );
    }
    assert_eq!(
        cast(2, &[6]).unwrap_err(),
        "tp_rank is 2; it must be below tp_size, 2"
    );
    let most: Vec<u32> = (1..=32).collect();
    assert_eq!(cast(1, &most).unwrap().widths(), most);
}

/// Counts in place of sleeping: who is to sleep comes back at once, which a bell may do.
#[derive(Clone, Debug, Default)]
struct Counting(Arc<[AtomicU32; 2]>);

impl Counting {
    fn counts(&self) -> [u32; 2] {
        [0, 1].map(|idx| self.0[idx].load(Ordering::SeqCst))
    }
}

impl Bell for Counting {
    fn tries(&self) -> u32 {
        3
    }

    fn sleep(&self, _word: &AtomicU32, _seen: u32, _budget_ns: u64) {
        self.0[0].fetch_add(1, Ordering::SeqCst);
    }

    fn wake(&self, _word: &AtomicU32) {
        self.0[1].fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_vote_that_need_not_wait_touches_no_bell() {
    let bell = Counting::default();
    let board = Board::with_bell(4, Epoch(1), Some(Box::new(bell.clone()))).unwrap();
    let mut seats: Vec<_> = (0..4)
        .map(|rank| board.seat(TpRank(rank)).unwrap())
        .collect();
    let (last, others) = seats.split_last_mut().unwrap();
    for step in 0..100 {
        for seat in &mut *others {
            seat.begin_step(step, LONG_NS, InstantNs(0));
        }
        let ended = last.agree_step(step, LONG_NS, || InstantNs(0));
        assert_eq!(ended, Decision::Agreed);
        for seat in &mut *others {
            assert_eq!(seat.poll_step(InstantNs(0)), Some(Decision::Agreed));
        }
    }
    assert_eq!(bell.counts(), [0, 0]);
}

#[test]
fn who_must_wait_sleeps_after_its_tries_and_for_no_longer_than_its_budget() {
    let bell = Counting::default();
    let board = Board::with_bell(2, Epoch(1), Some(Box::new(bell.clone()))).unwrap();
    let mut seat = board.seat(TpRank(0)).unwrap();
    let mut looks = 0;
    let ended = seat.agree_step(7, 10, || {
        looks += 1;
        InstantNs(looks)
    });
    assert_eq!(ended, Decision::Missing { rank: TpRank(1) });
    // One look begins the vote, ten spend the budget, of which three are tries; the one after the
    // claim ends it. Nobody sleeps, so nobody is woken.
    assert_eq!(bell.counts(), [6, 0]);
}
