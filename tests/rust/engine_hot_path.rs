//! A covered step allocates nothing on any rank: not where it is decided, launched, compared or
//! handed back. (What the kernel library does with memory of its own is not counted here.)

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use lowlat_engine::step::{
    RuntimeSettings, StepMode, StepPath, StepPlan, StepRequest, StepResult, StepRunner,
};

#[path = "support/engine.rs"]
mod support;
use support::{MODELS, library, settings, start};

static NUM_ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: every call goes on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        NUM_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn plan(mode: StepMode, start: i32, tokens: &[i32]) -> StepPlan {
    let request = StepRequest {
        uid: 0,
        first_row: 0,
        num_rows: tokens.len(),
        start,
        history: [0; 3],
        state_slot: 0,
        temperature: 0.7,
        draw: start as u64,
        wants_token: true,
    };
    StepPlan {
        mode,
        requests: vec![request],
        token_ids: tokens.to_vec(),
        page_table: (0..16).collect(),
        page_table_stride: 16,
        // The longest output, so that no vector grows later.
        simulated_accept: (mode == StepMode::Verify).then_some(5),
    }
}

#[test]
fn a_covered_step_allocates_nothing() {
    let Some(library) = library() else { return };
    for model in MODELS {
        allocates_nothing(&library, model);
    }
}

fn allocates_nothing(library: &std::path::Path, model: &str) {
    let mut runtime = start(RuntimeSettings {
        model: model.into(),
        tp_size: 2,
        ..settings(library)
    });
    let mut result = StepResult::new();
    runtime
        .run(&plan(StepMode::Extend, 0, &[5, 9, 11, 40]), &mut result)
        .unwrap();
    let mut verify = plan(StepMode::Verify, 4, &[7]);
    let mut step = |verify: &mut StepPlan| {
        runtime.run(verify, &mut result).unwrap();
        assert_eq!(
            (result.target, result.draft),
            (StepPath::Covered, Some(StepPath::Covered))
        );
        verify.requests[0].start += 6;
        verify.requests[0].draw += 1;
        verify.token_ids[0] = result.tokens[5];
    };
    for _ in 0..3 {
        step(&mut verify);
    }
    let before = NUM_ALLOCATIONS.load(Ordering::Relaxed);
    for _ in 0..10 {
        step(&mut verify);
    }
    assert_eq!(NUM_ALLOCATIONS.load(Ordering::Relaxed) - before, 0);
    // The counter does count.
    drop(std::hint::black_box(vec![1u8; 10]));
    assert_eq!(NUM_ALLOCATIONS.load(Ordering::Relaxed) - before, 1);
}
