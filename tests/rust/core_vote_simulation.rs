//! The vote and the groups that hold it, over seeded schedules of 2 to 64 ranks. Nothing waits:
//! time, delays, losses, duplicates, crashes, stops, restarts and clock jumps are drawn from the
//! seed.
//!
//! ```text
//! cargo test -p lowlat-core --test core_vote_simulation                          # 5,000
//! LOWLAT_SCHEDULES=100000 cargo test --release -p lowlat-core --test core_vote_simulation
//! LOWLAT_SEED=17 cargo test -p lowlat-core --test core_vote_simulation -- --nocapture
//! ```
//!
//! The last one runs one schedule and prints what happens in it; a schedule that fails says so.
//!
//! A rank number is held by one process after the other. Each joins the group that stands under
//! the one name, as [`Roll`] lets it, waits until the group has formed, votes on a few steps, and
//! leaves or starts again. Half of the schedules vote in memory ([`Board`]), half by messages and
//! a register ([`Round`], [`Registers`]). What is held:
//!
//! * all or none: every process of a group ends an epoch with one decision, agreed only where all
//!   cast the same, and so it ends forming;
//! * bounded: once the budget is spent by its own clock a process ends within three polls;
//! * never an old epoch: nobody enters a group in which a vote has begun, and no rank of a group
//!   has two processes that vote;
//! * after a fault nobody votes in that group again.
//!
//! | planted once | the first seed that fails |
//! |---|---|
//! | acting on the own proposal, not on what the register holds (`vote` below) | 4 |
//! | the same while a group forms (`form` below) | 328 |
//! | a dead rank's place in a formed group given to another (`Roll::admit`) | 6 |
//! | messages of an older group taken (`deliver` below) | 18 |
//! | a budget that a clock which runs backwards gives back (`Round::poll`) | 2736 |

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use lowlat_core::vote::{
    Admission, Decision, Member, Next, Registers, Roll, Round, Seat, StepBallot,
};
use lowlat_core::{Board, Epoch, InstantNs, TpRank};

/// SplitMix64: small, and good enough to draw schedules.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn chance(&mut self, of_10_000: u64) -> bool {
        self.below(10_000) < of_10_000
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

const BUDGET_NS: u64 = 1_000;
const JOIN_BUDGET_NS: u64 = 3_000;
const MAX_POLL_GAP_NS: u64 = 150;
const EPOCHS: usize = 3;
/// Processes that hold one rank's number, one after the other, at most.
const MAX_LIVES: u32 = 3;
/// Every clock begins here, so that a jump back has somewhere to go.
const CLOCK_BASE_NS: u64 = 1 << 40;
/// The epoch of the one decision in a group's register of forming.
const FORMING: Epoch = Epoch(1);

/// How hostile one schedule is.
struct Weather {
    in_memory: bool,
    max_delay_ns: u64,
    max_start_ns: u64,
    /// Chances of 10,000: of a message to be lost, or to come twice; of a poll to be a process's
    /// last, to be followed by a long stop, or by a clock that jumps.
    lost: u64,
    twice: u64,
    crash: u64,
    stop: u64,
    jump: u64,
    odd: u64,
    /// A second process has one rank's number.
    stray: u64,
    calm: bool,
}

impl Weather {
    fn draw(draw: &mut Draw) -> Self {
        let calm = draw.chance(1_000);
        let mut rate = |rates: &[u64]| if calm { 0 } else { draw.pick(rates) };
        Self {
            lost: rate(&[0, 0, 2, 100]),
            twice: rate(&[0, 500, 3_000]),
            crash: rate(&[0, 20, 100]),
            stop: rate(&[0, 0, 50]),
            jump: rate(&[0, 0, 100]),
            odd: rate(&[0, 2_000]),
            stray: rate(&[0, 0, 10_000]),
            max_delay_ns: 1 + rate(&[50, 300, 900, 2_500]),
            max_start_ns: 1 + rate(&[50, 400, 4_000]),
            in_memory: draw.chance(5_000),
            calm,
        }
    }
}

struct Group {
    board: Arc<Board>,
    /// What a message transport shares.
    registers: Registers,
    forming: Registers,
    /// What became of forming, as its first member saw it.
    formed: Option<Decision>,
    first: Epoch,
    members: Vec<Option<usize>>,
    closed: bool,
    /// What was cast in each epoch, and what became of it.
    casts: Vec<Vec<Option<u64>>>,
    ends: Vec<Option<Decision>>,
    /// The rank that is about to run another step, by epoch.
    odd: Vec<Option<usize>>,
}

impl Group {
    fn digest(&self, id: usize, epoch_idx: usize, rank: usize) -> u64 {
        let odd = u64::from(self.odd[epoch_idx] == Some(rank));
        (id as u64) << 32 | (epoch_idx as u64) << 8 | odd
    }
}

#[derive(Clone, Copy)]
struct Message {
    arrives_at: u64,
    group: usize,
    from: TpRank,
    epoch: Epoch,
    ballot: StepBallot,
}

// A few dozen of them live at a time, and nearly all of those vote.
#[allow(clippy::large_enum_variant)]
enum Doing {
    Joining {
        until: u64,
    },
    Forming {
        until: u64,
        proposal: Option<Decision>,
    },
    Voting(Vote),
    Left,
    Dead,
}

struct Vote {
    by: By,
    epoch_idx: usize,
    begun: bool,
    /// What of the budget is spent, by the process's own clock, and polls since it was all spent.
    spent_ns: u64,
    polls_late: u32,
}

enum By {
    Memory(Seat),
    Messages {
        round: Round<StepBallot>,
        /// Claimed a poll after it was proposed: the window in which another rank may be first.
        proposal: Option<Decision>,
    },
}

struct Process {
    rank: usize,
    life: u32,
    doing: Doing,
    group: usize,
    /// Its clock is the true time and this.
    clock_ns: u64,
    looked_at: u64,
}

/// What the schedules showed, so that the test can say that it saw every kind.
#[derive(Debug, Default)]
struct Seen {
    agreed: u32,
    differs: u32,
    missing: u32,
    not_formed: u32,
    /// Claims that found another decision standing.
    overruled: u32,
    /// Processes that entered another group than the one their rank's last process was in.
    fresh: u32,
    replaced: u32,
    waited: u32,
    in_use: u32,
    old_messages: u32,
}

struct World<'a> {
    seed: u64,
    says: bool,
    draw: Draw,
    weather: Weather,
    tp_size: usize,
    first: Epoch,
    now: u64,
    wakes: BinaryHeap<Reverse<(u64, usize)>>,
    processes: Vec<Process>,
    /// By rank number, whoever holds it: a network knows no more.
    inboxes: Vec<Vec<Message>>,
    groups: Vec<Group>,
    /// The group under the name.
    named: Option<usize>,
    seen: &'a mut Seen,
}

impl World<'_> {
    fn say(&self, idx: usize, words: impl FnOnce() -> String) {
        if self.says {
            let Process { rank, life, .. } = self.processes[idx];
            println!("{:>7} ns  rank {rank}, life {life}: {}", self.now, words());
        }
    }

    fn start(&mut self, rank: usize, life: u32, after_ns: u64) {
        let at = self.now + after_ns;
        self.wakes.push(Reverse((at, self.processes.len())));
        let clock_ns = CLOCK_BASE_NS + self.draw.below(CLOCK_BASE_NS);
        self.processes.push(Process {
            rank,
            life,
            doing: Doing::Joining {
                until: clock_ns + at + JOIN_BUDGET_NS,
            },
            group: usize::MAX,
            clock_ns,
            looked_at: clock_ns + at,
        });
    }

    /// A process ends; another may take its number.
    fn end(&mut self, idx: usize, how: Doing, words: &str) {
        self.say(idx, || words.to_owned());
        let Process { rank, life, .. } = self.processes[idx];
        self.processes[idx].doing = how;
        if life + 1 < MAX_LIVES && self.draw.chance(6_000) {
            let after_ns = 1 + self.draw.below(2_000);
            self.start(rank, life + 1, after_ns);
        }
    }

    fn leave(&mut self, idx: usize, words: &str) {
        let group = self.processes[idx].group;
        self.groups[group].closed = true;
        self.end(idx, Doing::Left, words);
    }

    fn wake(&mut self, idx: usize) {
        if self.draw.chance(self.weather.crash) {
            return self.end(idx, Doing::Dead, "dies");
        }
        if self.draw.chance(self.weather.jump) {
            let jump_ns = self.draw.below(2 * BUDGET_NS);
            let process = &mut self.processes[idx];
            if self.draw.chance(5_000) {
                process.clock_ns += jump_ns;
            } else {
                process.clock_ns -= jump_ns;
            }
            self.say(idx, || format!("its clock jumps by {jump_ns} ns"));
        }
        let own_now = self.processes[idx].clock_ns + self.now;
        let passed_ns = own_now.saturating_sub(self.processes[idx].looked_at);
        self.processes[idx].looked_at = own_now;
        match std::mem::replace(&mut self.processes[idx].doing, Doing::Dead) {
            Doing::Joining { until } => self.join(idx, until, own_now),
            Doing::Forming { until, proposal } => self.form(idx, until, proposal, own_now),
            Doing::Voting(vote) => self.vote(idx, vote, own_now, passed_ns),
            Doing::Left | Doing::Dead => unreachable!("nobody wakes it"),
        }
        if !matches!(self.processes[idx].doing, Doing::Left | Doing::Dead) {
            let mut gap_ns = 1 + self.draw.below(MAX_POLL_GAP_NS);
            if self.draw.chance(self.weather.stop) {
                gap_ns += self.draw.below(3 * BUDGET_NS);
                self.say(idx, || format!("is stopped for {gap_ns} ns"));
            }
            self.wakes.push(Reverse((self.now + gap_ns, idx)));
        }
    }

    fn member(&self, process: Option<usize>) -> Member {
        match process.map(|idx| &self.processes[idx].doing) {
            None => Member::Absent,
            Some(Doing::Dead) => Member::Dead,
            Some(_) => Member::Living,
        }
    }

    fn join(&mut self, idx: usize, until: u64, own_now: u64) {
        // Its place was emptied while it is looked at; it lives.
        self.processes[idx].doing = Doing::Joining { until };
        let rank = self.processes[idx].rank;
        let admission = self.named.map(|id| {
            let group = &self.groups[id];
            let members: Vec<Member> = group.members.iter().map(|&m| self.member(m)).collect();
            let roll = Roll {
                members: &members,
                settled: group.forming.decision(FORMING),
                closed: group.closed,
            };
            roll.admit(TpRank(rank as u32), self.tp_size as u32)
        });
        match admission {
            Some(Admission::Wait) if own_now < until => {
                self.seen.waited += 1;
                return;
            }
            Some(Admission::Wait | Admission::Refused(_)) => {
                self.seen.in_use += 1;
                return self.end(idx, Doing::Left, "is refused");
            }
            None | Some(Admission::Reclaim) => self.found(),
            Some(Admission::Enter) => {}
        }
        let id = self.named.expect("a group was made");
        let began = self.groups[id].casts.iter().flatten().any(Option::is_some);
        assert!(
            !began,
            "seed {}: rank {rank} joined an old epoch",
            self.seed
        );
        self.seen.replaced += u32::from(self.groups[id].members[rank].is_some());
        self.seen.fresh += u32::from(0 < id && 0 < self.processes[idx].life);
        self.groups[id].members[rank] = Some(idx);
        self.say(idx, || format!("enters group {id}"));
        self.processes[idx].group = id;
        self.processes[idx].doing = Doing::Forming {
            until,
            proposal: None,
        };
    }

    /// A fresh group takes the name.
    fn found(&mut self) {
        let odd = (0..EPOCHS).map(|_| {
            let odd = self.draw.below(self.tp_size as u64) as usize;
            self.draw.chance(self.weather.odd).then_some(odd)
        });
        let odd = odd.collect();
        self.named = Some(self.groups.len());
        self.groups.push(Group {
            board: Board::starting_at(self.tp_size as u32, self.first).unwrap(),
            registers: Registers::before(self.first),
            forming: Registers::before(FORMING),
            formed: None,
            first: self.first,
            members: vec![None; self.tp_size],
            closed: false,
            casts: vec![vec![None; self.tp_size]; EPOCHS],
            ends: vec![None; EPOCHS],
            odd,
        });
    }

    fn form(&mut self, idx: usize, until: u64, proposal: Option<Decision>, own_now: u64) {
        let group = &self.groups[self.processes[idx].group];
        let rank = TpRank(self.processes[idx].rank as u32);
        let stands = match proposal {
            Some(proposal) => {
                let stands = group.forming.claim(FORMING, proposal);
                self.seen.overruled += u32::from(stands != Some(proposal));
                stands
            }
            None => group.forming.decision(FORMING),
        };
        let (seed, id) = (self.seed, self.processes[idx].group);
        if let Some(stands) = stands {
            let formed = *self.groups[id].formed.get_or_insert(stands);
            assert_eq!(formed, stands, "seed {seed}: group {id} forms differently");
        }
        if let Some(Decision::Missing { rank }) = stands {
            self.seen.not_formed += 1;
            return self.leave(idx, &format!("leaves: {rank} did not join"));
        }
        let group = &self.groups[id];
        self.processes[idx].doing = if stands.is_some() {
            let by = if self.weather.in_memory {
                By::Memory(group.board.seat(rank).expect("one seat a rank"))
            } else {
                By::Messages {
                    round: Round::new(rank, self.tp_size as u32),
                    proposal: None,
                }
            };
            Doing::Voting(Vote {
                by,
                epoch_idx: 0,
                begun: false,
                spent_ns: 0,
                polls_late: 0,
            })
        } else {
            let absent = group.members.iter().position(Option::is_none);
            let proposal = match absent {
                None => Some(Decision::Agreed),
                Some(rank) => (until <= own_now).then_some(Decision::Missing {
                    rank: TpRank(rank as u32),
                }),
            };
            Doing::Forming { until, proposal }
        };
    }

    fn vote(&mut self, idx: usize, mut vote: Vote, own_now: u64, passed_ns: u64) {
        let now = InstantNs(own_now);
        let (id, rank) = (self.processes[idx].group, self.processes[idx].rank);
        let epoch_idx = vote.epoch_idx;
        let epoch = Epoch(self.groups[id].first.0.wrapping_add(epoch_idx as u32));
        if vote.begun {
            vote.spent_ns += passed_ns;
        } else {
            vote.begun = true;
            self.cast(id, rank, epoch_idx, epoch, &mut vote.by, now);
        }
        let decision = match &mut vote.by {
            By::Memory(seat) => seat.poll_step(now),
            By::Messages { round, proposal } => {
                let registers = &self.groups[id].registers;
                if let Some(proposal) = proposal.take() {
                    let stands = registers.claim(epoch, proposal);
                    let stands = stands.expect("nobody is left behind");
                    self.seen.overruled += u32::from(stands != proposal);
                    round.adopt(stands);
                } else if let Some(stands) = registers.decision(epoch) {
                    round.adopt(stands);
                }
                self.deliver(id, rank, round);
                match round.poll(now) {
                    Next::Wait => None,
                    Next::Propose(decision) => {
                        *proposal = Some(decision);
                        None
                    }
                    Next::Ended(decision) => Some(decision),
                }
            }
        };
        let Some(decision) = decision else {
            vote.polls_late += u32::from(BUDGET_NS <= vote.spent_ns);
            let (seed, late) = (self.seed, vote.polls_late);
            assert!(
                late < 3,
                "seed {seed}: rank {rank} polls on after its deadline"
            );
            self.processes[idx].doing = Doing::Voting(vote);
            return;
        };
        self.say(idx, || format!("ends {epoch} of group {id}: {decision:?}"));
        self.check(id, epoch_idx, decision);
        if matches!(decision, Decision::Missing { .. }) {
            return self.leave(idx, "leaves after a fault");
        }
        if epoch_idx + 1 == EPOCHS {
            return self.leave(idx, "leaves");
        }
        self.processes[idx].doing = Doing::Voting(Vote {
            by: vote.by,
            epoch_idx: epoch_idx + 1,
            begun: false,
            spent_ns: 0,
            polls_late: 0,
        });
    }

    fn cast(
        &mut self,
        id: usize,
        rank: usize,
        epoch_idx: usize,
        epoch: Epoch,
        by: &mut By,
        now: InstantNs,
    ) {
        let group = &mut self.groups[id];
        let digest = group.digest(id, epoch_idx, rank);
        let seed = self.seed;
        for end in &group.ends[..epoch_idx] {
            let goes_on = end.is_some_and(|end| !matches!(end, Decision::Missing { .. }));
            assert!(goes_on, "seed {seed}: rank {rank} votes after {end:?}");
        }
        let before = group.casts[epoch_idx][rank].replace(digest);
        assert_eq!(before, None, "seed {seed}: rank {rank} casts twice");
        match by {
            By::Memory(seat) => seat.begin_step(digest, BUDGET_NS, now),
            By::Messages { round, .. } => {
                round.begin(epoch, StepBallot(digest), now, BUDGET_NS);
                for to in (0..self.tp_size).filter(|&to| to != rank) {
                    let copies = 1 + u32::from(self.draw.chance(self.weather.twice));
                    for _ in 0..copies {
                        if self.draw.chance(self.weather.lost) {
                            continue;
                        }
                        self.inboxes[to].push(Message {
                            arrives_at: self.now + self.draw.below(self.weather.max_delay_ns),
                            group: id,
                            from: TpRank(rank as u32),
                            epoch,
                            ballot: StepBallot(digest),
                        });
                    }
                }
            }
        }
    }

    /// Gives `round` what has arrived for its rank, whoever that was meant for.
    fn deliver(&mut self, id: usize, rank: usize, round: &mut Round<StepBallot>) {
        let (now, seen) = (self.now, &mut *self.seen);
        self.inboxes[rank].retain(|message| {
            if now < message.arrives_at {
                return true;
            }
            if message.group == id {
                round.receive(message.from, message.epoch, message.ballot);
            } else {
                seen.old_messages += 1;
            }
            // One of the next epoch came early and is kept: its sender has settled this one.
            message.group == id && message.epoch.is_after(round.epoch())
        });
    }

    fn check(&mut self, id: usize, epoch_idx: usize, decision: Decision) {
        let (seed, group) = (self.seed, &mut self.groups[id]);
        let end = *group.ends[epoch_idx].get_or_insert(decision);
        assert_eq!(
            end, decision,
            "seed {seed}: group {id} ends an epoch differently"
        );
        let casts = &group.casts[epoch_idx];
        match decision {
            Decision::Agreed => {
                self.seen.agreed += 1;
                let same = casts.iter().all(|cast| cast.is_some() && *cast == casts[0]);
                assert!(same, "seed {seed}: group {id} agreed on {casts:?}");
            }
            Decision::Differs { rank, .. } => {
                self.seen.differs += 1;
                let differs = casts[rank.idx()].is_some() && casts[rank.idx()] != casts[0];
                assert!(differs, "seed {seed}: {rank} was named in {casts:?}");
            }
            Decision::Missing { .. } => self.seen.missing += 1,
            Decision::Declines { .. } => panic!("seed {seed}: nobody declined"),
        }
    }
}

fn run_schedule(seed: u64, says: bool, seen: &mut Seen) {
    let mut draw = Draw(seed);
    // Small groups mostly: their schedules are the many different ones.
    let most = 1 + draw.below(63);
    let tp_size = 2 + draw.below(most) as usize;
    let weather = Weather::draw(&mut draw);
    let first = draw.pick(&[
        Epoch(1),
        Epoch(u32::MAX - 1),
        Epoch(u32::MAX),
        Epoch(1 << 31),
    ]);
    let mut world = World {
        seed,
        says,
        draw,
        weather,
        tp_size,
        first,
        now: 0,
        wakes: BinaryHeap::new(),
        processes: Vec::new(),
        inboxes: vec![Vec::new(); tp_size],
        groups: Vec::new(),
        named: None,
        seen,
    };
    for rank in 0..tp_size {
        let after_ns = world.draw.below(world.weather.max_start_ns);
        world.start(rank, 0, after_ns);
    }
    if world.draw.chance(world.weather.stray) {
        let rank = world.draw.below(tp_size as u64) as usize;
        let after_ns = world.draw.below(3_000);
        world.start(rank, MAX_LIVES - 1, after_ns);
    }
    let mut wakes = 0;
    while let Some(Reverse((now, idx))) = world.wakes.pop() {
        world.now = now;
        world.wake(idx);
        wakes += 1;
        let bound = 1_000 * tp_size * MAX_LIVES as usize;
        assert!(wakes < bound, "seed {seed}: it does not end");
    }
    if world.weather.calm {
        // With all alive and every message in time, the first group agrees on everything.
        let agreed = world.groups[0]
            .ends
            .iter()
            .all(|end| *end == Some(Decision::Agreed));
        assert!(agreed, "seed {seed}: {:?}", world.groups[0].ends);
    }
}

fn number(name: &str) -> Option<u64> {
    Some(std::env::var(name).ok()?.parse().expect("a number"))
}

#[test]
fn all_or_none_over_every_schedule() {
    let mut seen = Seen::default();
    if let Some(seed) = number("LOWLAT_SEED") {
        return run_schedule(seed, true, &mut seen);
    }
    let schedules = number("LOWLAT_SCHEDULES").unwrap_or(5_000);
    for seed in 0..schedules {
        let ended = catch_unwind(AssertUnwindSafe(|| run_schedule(seed, false, &mut seen)));
        if let Err(panic) = ended {
            println!(
                "replay it: LOWLAT_SEED={seed} cargo test -p lowlat-core \
                 --test core_vote_simulation -- --nocapture"
            );
            resume_unwind(panic);
        }
    }
    println!("{schedules} schedules: {seen:?}");
    // They are worth something: each ending occurs often, the races too.
    let Seen {
        agreed,
        differs,
        missing,
        not_formed,
        overruled,
        fresh,
        replaced,
        waited,
        in_use,
        old_messages,
    } = seen;
    let often = [
        agreed, differs, missing, not_formed, overruled, fresh, waited, in_use,
    ];
    let least = u32::try_from(schedules / 10).unwrap();
    assert!(often.iter().all(|count| least < *count), "{seen:?}");
    assert!(
        least / 20 < replaced && least / 20 < old_messages,
        "{seen:?}"
    );
}
