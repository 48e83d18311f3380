//! The vote over 2,000 seeded schedules of 2 to 16 ranks: all or none, and bounded.
//!
//! Time, message delays, deaths and polls are drawn from a seed; nothing waits. Ranks share the
//! two registers as they share memory, one access at a time; ballots reach a peer after a delay.
//!
//! Planted once: acting on the own proposal instead of on what the register holds makes
//! `all_or_none_over_every_schedule` fail within the first hundred seeds.

use std::collections::BTreeSet;

use lowlat_core::vote::{Decision, Next, Register, Round, StepBallot};
use lowlat_core::{Epoch, InstantNs, TpRank};

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

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

const BUDGET_NS: u64 = 1_000;
const MAX_POLL_GAP_NS: u64 = 120;
const EPOCHS: u32 = 4;

struct Rank {
    round: Round<StepBallot>,
    /// Next poll; `None` when dead or done.
    wakes_at: Option<u64>,
    dies_at: u64,
    begun: bool,
    began_at: u64,
    /// Claims once proposed, a poll later: the window in which another rank may be first.
    proposal: Option<Decision>,
    /// What each epoch ended with, and when.
    ended: Vec<(Decision, u64)>,
}

struct Message {
    arrives_at: u64,
    to: usize,
    from: usize,
    epoch: Epoch,
    ballot: StepBallot,
}

/// What one schedule showed, so that the test can say that it saw every kind.
#[derive(Debug, Default)]
struct Seen {
    agreed: u32,
    differs: u32,
    missing: u32,
    /// Epochs in which a rank had another proposal than what stood.
    overruled: u32,
}

fn run_schedule(seed: u64, first: Epoch, seen: &mut Seen) {
    let mut draw = Draw(seed);
    let size = 2 + draw.below(15) as usize;
    let deaths = draw.chance(30);
    let differing = draw.chance(25);
    // Some schedules deliver everything well in time, some around the deadline.
    let max_delay_ns = [50, 400, 1_100, 2_500][draw.below(4) as usize];
    let max_start_ns = [50, 900][draw.below(2) as usize];

    let mut registers = [Register::before(first); 2];
    let mut messages: Vec<Message> = Vec::new();
    let mut ranks: Vec<Rank> = (0..size)
        .map(|rank| Rank {
            round: Round::new(TpRank(rank as u32), size as u32),
            wakes_at: Some(draw.below(max_start_ns)),
            dies_at: if deaths && draw.chance(20) {
                draw.below(3_000)
            } else {
                u64::MAX
            },
            begun: false,
            began_at: 0,
            proposal: None,
            ended: Vec::new(),
        })
        .collect();
    // What each rank casts in each epoch.
    let ballots: Vec<Vec<u64>> = (0..EPOCHS)
        .map(|epoch| {
            let odd = (differing && draw.chance(50)).then(|| draw.below(size as u64) as usize);
            let cast = |rank| u64::from(epoch) * 100 + u64::from(odd == Some(rank));
            (0..size).map(cast).collect()
        })
        .collect();

    while let Some((now, idx)) = (0..size)
        .filter_map(|i| Some((ranks[i].wakes_at?, i)))
        .min()
    {
        if ranks[idx].dies_at <= now {
            ranks[idx].wakes_at = None;
            continue;
        }
        let epoch_idx = ranks[idx].ended.len();
        let epoch = Epoch(first.0.wrapping_add(epoch_idx as u32));
        let register = epoch.0 as usize & 1;
        if !ranks[idx].begun {
            let ballot = StepBallot(ballots[epoch_idx][idx]);
            ranks[idx]
                .round
                .begin(epoch, ballot, InstantNs(now), BUDGET_NS);
            ranks[idx].begun = true;
            ranks[idx].began_at = now;
            for to in (0..size).filter(|&to| to != idx) {
                let arrives_at = now + draw.below(max_delay_ns);
                messages.push(Message {
                    arrives_at,
                    to,
                    from: idx,
                    epoch,
                    ballot,
                });
            }
        }
        if let Some(proposal) = ranks[idx].proposal.take() {
            let stands = match registers[register].claim(epoch, proposal) {
                Ok(claimed) => {
                    registers[register] = claimed;
                    proposal
                }
                Err(Some(stands)) => {
                    seen.overruled += u32::from(stands != proposal);
                    stands
                }
                Err(None) => panic!("seed {seed}: rank {idx} was left behind at {epoch}"),
            };
            ranks[idx].round.adopt(stands);
        } else if let Some(stands) = registers[register].decision(epoch) {
            ranks[idx].round.adopt(stands);
        }
        for message in messages
            .iter()
            .filter(|m| m.to == idx && m.arrives_at <= now)
        {
            let from = TpRank(message.from as u32);
            ranks[idx]
                .round
                .receive(from, message.epoch, message.ballot);
        }
        let mut again = Some(now + 1 + draw.below(MAX_POLL_GAP_NS));
        match ranks[idx].round.poll(InstantNs(now)) {
            Next::Wait => {}
            Next::Propose(decision) => ranks[idx].proposal = Some(decision),
            Next::Ended(decision) => {
                ranks[idx].ended.push((decision, now));
                let took_ns = now - ranks[idx].began_at;
                let bound_ns = BUDGET_NS + 3 * MAX_POLL_GAP_NS;
                assert!(took_ns <= bound_ns, "seed {seed}: {took_ns} ns for {epoch}");
                ranks[idx].begun = false;
                let over = ranks[idx].ended.len() == EPOCHS as usize;
                // After a fault a rank votes no more.
                if over || matches!(decision, Decision::Missing { .. }) {
                    again = None;
                }
            }
        }
        ranks[idx].wakes_at = again;
    }

    for (epoch_idx, cast) in ballots.iter().enumerate() {
        let ends: BTreeSet<String> = ranks
            .iter()
            .filter_map(|rank| rank.ended.get(epoch_idx))
            .map(|(decision, _)| format!("{decision:?}"))
            .collect();
        assert!(
            ends.len() <= 1,
            "seed {seed}: ranks ended an epoch differently: {ends:?}"
        );
        let ended = ranks.iter().find_map(|rank| rank.ended.get(epoch_idx));
        let Some(&(decision, _)) = ended else {
            continue;
        };
        match decision {
            Decision::Agreed => {
                seen.agreed += 1;
                assert!(
                    cast.iter().all(|ballot| *ballot == cast[0]),
                    "seed {seed}: differ"
                );
            }
            Decision::Differs { rank, .. } => {
                seen.differs += 1;
                assert_ne!(cast[rank.idx()], cast[0], "seed {seed}: {rank} was named");
            }
            Decision::Missing { .. } => seen.missing += 1,
            Decision::Declines { .. } => panic!("seed {seed}: nobody declined"),
        }
        // A rank that lives has ended every epoch that a living rank ended.
        for (idx, rank) in ranks
            .iter()
            .enumerate()
            .filter(|(_, rank)| rank.dies_at == u64::MAX)
        {
            assert!(
                rank.ended.len() > epoch_idx,
                "seed {seed}: rank {idx} never ended"
            );
        }
    }
    // With all alive and every message in time, nobody is missing.
    if !deaths && max_start_ns + max_delay_ns + 4 * MAX_POLL_GAP_NS < BUDGET_NS {
        for rank in &ranks {
            assert_eq!(rank.ended.len(), EPOCHS as usize, "seed {seed}");
        }
    }
}

#[test]
fn all_or_none_over_every_schedule() {
    let mut seen = Seen::default();
    for seed in 0..2_000 {
        run_schedule(seed, Epoch(1), &mut seen);
    }
    // The schedules are worth something: each ending occurs often, the race at the register too.
    let Seen {
        agreed,
        differs,
        missing,
        overruled,
    } = seen;
    assert!(
        500 < agreed && 100 < differs && 100 < missing && 50 < overruled,
        "{seen:?}"
    );
}

#[test]
fn all_or_none_across_the_wrap_of_epochs() {
    let mut seen = Seen::default();
    for seed in 10_000..10_200 {
        run_schedule(seed, Epoch(u32::MAX - 1), &mut seen);
    }
}
