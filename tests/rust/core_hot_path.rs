//! The hot path allocates nothing: the dispatcher's decision, the check of seals, the hot vote and
//! the watchdog, counted by an allocator that counts.
//!
//! Planted once: one `format!` in `Dispatcher::decide` is seen, and so is the counter itself, by
//! `the_counter_sees_an_allocation`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;

use lowlat_core::graph_key::{GraphKey, GraphMode, Path, Recorder, SealView, keys_digest};
use lowlat_core::vote::{self, agree};
use lowlat_core::{
    Ballot, BallotParts, Board, DeadlineLadder, Decision, Dispatcher, Facts, Health, InstantNs,
    Reason, Requirements, StepFacts, StepMode, TpRank, Watchdog, guard,
};

struct Counting;

thread_local! {
    /// Of this thread alone: the test harness has threads of its own.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call goes to `System` with the caller's own arguments, so its contract is ours.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller keeps `GlobalAlloc`'s contract for `layout`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `alloc` or `realloc` above, so from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: `pointer` came from `System`, and the caller keeps the contract for the sizes.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.with(Cell::get);
    work();
    ALLOCATIONS.with(Cell::get) - before
}

const SHAPE: [i64; 2] = [8, 64];

fn view(address: u64) -> SealView<'static> {
    SealView {
        name: "page_table",
        address,
        shape: &SHAPE,
        dtype: "i32",
    }
}

fn dispatcher() -> Dispatcher {
    let key = |mode, batch_size, tokens_per_request| GraphKey {
        mode,
        batch_size,
        tokens_per_request,
        width: batch_size * 6,
        shape: "tiny-v41".into(),
        isa: "scalar".into(),
        numerics_digest: 1,
        layout_digest: 2,
    };
    let mut keys = Vec::new();
    for batch_size in [1, 2, 4, 8] {
        keys.push(key(GraphMode::TargetVerify, batch_size, 6));
        keys.push(key(GraphMode::Draft, batch_size, 5));
    }
    let facts = Facts {
        isa: "scalar".into(),
        tp_size: 1,
        ..Facts::default()
    };
    let servable = guard(&facts, &Requirements::new("toy", &["scalar"])).unwrap();
    let parts = BallotParts {
        widths: &[6, 12, 24, 48],
        keys_digest: keys_digest(keys.iter().map(|key| (key, Path::Persistent))),
        geometry_digest: 0,
        catalogue_digest: 0,
        ladder: DeadlineLadder::new(1, 2, 3, 4).unwrap(),
    };
    let ballot = Ballot::new(&servable, TpRank(0), parts).unwrap();
    let coverage = agree(TpRank(0), &[ballot]).unwrap();
    let mut recorder = Recorder::new();
    for key in keys {
        recorder
            .note(key, Path::Persistent, &[view(0x1000), view(0x2000)])
            .unwrap();
    }
    Dispatcher::new(&coverage, recorder.finish()).unwrap()
}

#[test]
fn the_counter_sees_an_allocation() {
    assert_eq!(allocations(|| drop(black_box(Box::new(1_u64)))), 1);
    assert_eq!(allocations(|| drop(black_box(vec![1_u8; 3]))), 1);
    assert_eq!(allocations(|| {}), 0);
}

#[test]
fn a_decision_and_its_seals_allocate_nothing() {
    let mut dispatcher = dispatcher();
    let modes = [
        StepMode::Decode,
        StepMode::TargetVerify,
        StepMode::Draft,
        StepMode::Extend,
        StepMode::Mixed,
        StepMode::Idle,
    ];
    let mut covered = 0;
    let count = allocations(|| {
        for mode in modes {
            for batch_size in 0..10 {
                for tokens in [1, 5, 6] {
                    let step = StepFacts::uniform(mode, batch_size, tokens);
                    if let Decision::Replay { key, .. } = dispatcher.decide(&step) {
                        let seen = [view(0x1000), view(0x2000)];
                        dispatcher.record().check_seals(key, seen).unwrap();
                        covered += 1;
                    }
                }
            }
        }
        dispatcher.disarm(Reason::WaitExpired);
        let step = StepFacts::uniform(StepMode::TargetVerify, 1, 6);
        assert_eq!(dispatcher.decide(&step), Decision::Plain(Reason::Disarmed));
    });
    assert_eq!(count, 0);
    // Verify steps of 1 to 8 requests at 6 tokens, drafts of 1 to 8 at 5.
    assert_eq!(covered, 16);
}

#[test]
fn the_hot_vote_allocates_nothing() {
    let board = Board::new(1).unwrap();
    let mut seat = board.seat(TpRank(0)).unwrap();
    let count = allocations(|| {
        for step in 0..100 {
            let decision = seat.agree_step(step, 1, || InstantNs(0));
            assert_eq!(decision, vote::Decision::Agreed);
        }
    });
    assert_eq!(count, 0);

    // The same among threads, each counting its own.
    let board = Board::new(2).unwrap();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let mut seat = board.seat(TpRank(rank)).unwrap();
            scope.spawn(move || {
                let count = allocations(|| {
                    for step in 0..1_000 {
                        let decision = seat.agree_step(step, 1, || InstantNs(0));
                        assert_eq!(decision, vote::Decision::Agreed);
                    }
                });
                assert_eq!(count, 0);
            });
        }
    });
}

#[test]
fn the_watchdog_allocates_nothing() {
    let mut watchdog = Watchdog::new(10, 10);
    let count = allocations(|| {
        watchdog.arm(InstantNs(0));
        assert_eq!(watchdog.health(InstantNs(5)), Health::OnTime);
        watchdog.disarm();
    });
    assert_eq!(count, 0);
}
