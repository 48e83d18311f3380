//! The C face called at random: any function, with handles that live, that were destroyed, of
//! another kind or of no kind, and with numbers out of every range. A model of what lives says what
//! each call must answer; no call may crash, write an output that it refused, or lose a handle.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};
use std::ptr::{null, null_mut};
use std::sync::LazyLock;

use lowlat_capi::*;
use lowlat_fuzz::config as cases;
use proptest::prelude::*;

/// What a handle stands for; the names are the C types'.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Servable,
    Board,
    Seat,
    Coverage,
    Dispatcher,
    Watchdog,
    Recorder,
    Record,
}

const KINDS: [Kind; 8] = [
    Kind::Servable,
    Kind::Board,
    Kind::Seat,
    Kind::Coverage,
    Kind::Dispatcher,
    Kind::Watchdog,
    Kind::Recorder,
    Kind::Record,
];

/// One call: which, on which handles, with which numbers. All are taken modulo what there is.
#[derive(Clone, Copy, Debug)]
struct Call {
    which: u8,
    first: u16,
    second: u16,
    small: u8,
    big: u64,
}

fn call() -> impl Strategy<Value = Call> {
    let numbers = (
        any::<u8>(),
        any::<u16>(),
        any::<u16>(),
        any::<u8>(),
        any::<u64>(),
    );
    numbers.prop_map(|(which, first, second, small, big)| Call {
        which,
        first,
        second,
        small,
        big,
    })
}

/// Texts that a caller might hand over.
const TEXTS: [&CStr; 10] = [
    c"",
    c"x",
    c"{}",
    c"\xff\xfe",
    c"{\"name\": \"mine\", \"isas\": [\"cpu\"]}",
    c"{\"isa\": \"cpu\", \"tp_size\": 1}",
    c"{\"isa\": \"cpu\", \"tp_size\": 2}",
    c"{\"isa\": \"other\", \"tp_size\": 1}",
    c"{\"version\": 1, \"entries\": []}",
    c"a\nline",
];

const WIDTHS: [u32; 4] = [1, 2, 6, 12];

fn text(number: u64) -> *const c_char {
    match number as usize % (TEXTS.len() + 1) {
        idx if idx < TEXTS.len() => TEXTS[idx].as_ptr(),
        _ => null(),
    }
}

/// A model's configuration now and then, else any text.
fn config(number: u64) -> *const c_char {
    static TINY: LazyLock<CString> = LazyLock::new(|| {
        let text = lowlat_core::config::built_in("tiny-v41").expect("it is built in");
        CString::new(text).expect("it holds no NUL")
    });
    if number % 3 == 0 {
        TINY.as_ptr()
    } else {
        text(number)
    }
}

/// Names of groups that no other run has.
static GROUPS: LazyLock<[CString; 2]> = LazyLock::new(|| {
    ["a", "b"].map(|word| CString::new(format!("fuzz-{word}-{}", std::process::id())).unwrap())
});

/// What was given so far, and what of it lives.
#[derive(Default)]
struct World {
    given: Vec<(usize, Kind)>,
    living: BTreeMap<usize, Kind>,
}

impl World {
    /// Any handle: mostly one that was given, of any kind, alive or not.
    fn pick(&self, number: u16) -> usize {
        static STRANGER: u64 = 0;
        match number % 16 {
            0 => 0,
            1 => (&raw const STRANGER).addr(),
            2 => usize::from(number) << 4,
            3 => usize::MAX,
            _ if self.given.is_empty() => 0,
            _ => self.given[usize::from(number) % self.given.len()].0,
        }
    }

    /// A handle of that kind most of the time, so that calls also succeed.
    fn pick_kind(&self, number: u16, kind: Kind) -> usize {
        let of_kind: Vec<usize> = self
            .living
            .iter()
            .filter(|(_, seen)| **seen == kind)
            .map(|(handle, _)| *handle)
            .collect();
        if number % 4 == 0 || of_kind.is_empty() {
            return self.pick(number / 4);
        }
        of_kind[usize::from(number / 4) % of_kind.len()]
    }

    fn lives(&self, handle: usize, kind: Kind) -> bool {
        self.living.get(&handle) == Some(&kind)
    }

    /// A call that gives a handle: the model learns it, or sees that none was written.
    fn given<T>(&mut self, status: Status, out: *mut T, kind: Kind) {
        if status == Status::Ok {
            assert!(!out.is_null());
            let again = self.given.iter().any(|(handle, _)| *handle == out.addr());
            assert!(
                !again,
                "a handle was given twice, so a dead one looks alive"
            );
            self.living.insert(out.addr(), kind);
            self.given.push((out.addr(), kind));
        } else {
            assert!(out.is_null(), "a refused call wrote a handle");
        }
    }

    fn destroyed(&mut self, status: Status, handle: usize, kind: Kind) {
        let expected = handle == 0 || self.lives(handle, kind);
        assert_eq!(status == Status::Ok, expected, "destroy of {kind:?}");
        if expected {
            self.living.remove(&handle);
        }
    }
}

fn ptr<T>(handle: usize) -> *mut T {
    std::ptr::without_provenance_mut(handle)
}

/// A refusal has words, and only a handle that does not live may be called one.
fn answered(status: Status, needed: &[bool]) {
    // SAFETY: a terminated text until this thread's next call.
    let words = unsafe { CStr::from_ptr(lowlat_dispatch_last_error()) };
    if needed.contains(&false) {
        assert_eq!(status, Status::Invalid, "a handle that is none: {words:?}");
    }
    if status != Status::Ok {
        let words = words.to_str().expect("words are UTF-8");
        assert!(!words.is_empty());
        assert!(
            !words
                .chars()
                .any(|letter| letter.is_control() && letter != '\n')
        );
    }
    // Another record than the one agreed on is a bug of the caller's; nothing here may be ours.
    let ours = status == Status::Bug && !words.to_string_lossy().contains("all ranks agreed on");
    assert!(!ours, "{words:?}");
}

fn ballot(call: Call) -> BallotParts {
    let count = u32::from(call.small % 6);
    BallotParts {
        widths: if call.small == 255 {
            null()
        } else {
            WIDTHS.as_ptr()
        },
        // Only counts beyond the most are lies: what is within must be there, by contract.
        num_widths: if count == 5 {
            33 + call.big as u32 % 1000
        } else {
            count
        },
        // That of a record of nothing, which recorders often give.
        keys_digest: lowlat_core::graph_key::keys_digest([]) ^ (call.big & 1),
        geometry_digest: 2,
        catalogue_digest: 3,
        ladder: LadderBudgets {
            kernel_ns: 1000,
            plugin_ns: 2000,
            collective_ns: if call.small % 7 == 0 {
                0
            } else {
                1_000_000_000
            },
            engine_ns: 2_000_000_000,
        },
    }
}

/// Votes of a rank whose peers never come end by their budgets, so these are short.
fn budget(call: Call) -> u64 {
    [0, 1, 1000, 50_000, 1_000_000_000][usize::from(call.small) % 5].min(match call.big % 8 {
        0 => u64::MAX,
        _ => 50_000,
    })
}

#[allow(clippy::too_many_lines)] // One arm a function.
fn run(world: &mut World, call: Call) -> Status {
    let of = |kind| world.pick_kind(call.first, kind);
    let small = u32::from(call.small);
    match call.which % 32 {
        0 => {
            let mut out = null_mut();
            // SAFETY: texts are terminated, the output is valid.
            let status = unsafe { lowlat_guard(text(call.big), text(call.big >> 8), &mut out) };
            answered(status, &[]);
            world.given(status, out, Kind::Servable);
            status
        }
        1 => {
            let mut out = null_mut();
            // SAFETY: texts are terminated, the output is valid.
            let status = unsafe { lowlat_guard(TEXTS[4].as_ptr(), TEXTS[5].as_ptr(), &mut out) };
            assert_eq!(status, Status::Ok);
            world.given(status, out, Kind::Servable);
            status
        }
        2 => {
            let mut out = null_mut();
            // SAFETY: texts are terminated, the output is valid.
            let status =
                unsafe { lowlat_guard_model(config(call.big), text(call.big >> 8), &mut out) };
            answered(status, &[]);
            world.given(status, out, Kind::Servable);
            status
        }
        3 => {
            let mut out = null_mut();
            let tp_size = [0, 1, 1, 1, 2, 64, 65, u32::MAX][call.small as usize % 8];
            // SAFETY: the output is valid.
            let status = unsafe { lowlat_board_create(tp_size, &mut out) };
            assert_eq!(status == Status::Ok, (1..=64).contains(&tp_size));
            world.given(status, out, Kind::Board);
            status
        }
        4 | 5 => {
            let board = of(Kind::Board);
            let mut out = null_mut();
            // SAFETY: the output is valid.
            let status = unsafe { lowlat_board_seat(ptr(board), small % 3, &mut out) };
            answered(status, &[world.lives(board, Kind::Board)]);
            world.given(status, out, Kind::Seat);
            status
        }
        6 | 7 => {
            let (seat, servable) = (of(Kind::Seat), world.pick_kind(call.second, Kind::Servable));
            let mut out = null_mut();
            let parts = ballot(call);
            // SAFETY: the ballot and the output are valid.
            let status = unsafe {
                lowlat_seat_vote(ptr(seat), ptr(servable), &parts, budget(call), &mut out)
            };
            let needed = [
                world.lives(seat, Kind::Seat),
                world.lives(servable, Kind::Servable),
            ];
            answered(status, &needed);
            world.given(status, out, Kind::Coverage);
            status
        }
        8 => {
            let seat = of(Kind::Seat);
            let status = lowlat_seat_decline(ptr(seat), 100 + small % 20, budget(call));
            assert_ne!(status, Status::Ok);
            answered(status, &[world.lives(seat, Kind::Seat)]);
            status
        }
        9 => {
            let seat = of(Kind::Seat);
            let status = lowlat_seat_agree_step(ptr(seat), call.big, budget(call));
            answered(status, &[world.lives(seat, Kind::Seat)]);
            status
        }
        10 => {
            let servable = of(Kind::Servable);
            let parts = ballot(call);
            let mut words = [7; 27];
            // SAFETY: the ballot and the output are valid.
            let status = unsafe {
                lowlat_ballot_words(ptr(servable), small % 3, &parts, words.as_mut_ptr())
            };
            answered(status, &[world.lives(servable, Kind::Servable)]);
            assert_eq!(status == Status::Ok, words != [7; 27]);
            status
        }
        11 => {
            let mut words = vec![call.big; 27 * 3];
            let mut out = null_mut();
            if call.small % 2 == 1 {
                // A good ballot first, where there is a servable; it stays as it is elsewhere.
                let (servable, parts) = (of(Kind::Servable), ballot(call));
                // SAFETY: the ballot and the output are valid.
                unsafe { lowlat_ballot_words(ptr(servable), 0, &parts, words.as_mut_ptr()) };
            }
            let num_ranks = [0, 1, 2, 3, 65, u32::MAX][call.small as usize % 6];
            // SAFETY: three ballots are there, and more than 64 are refused before they are read.
            let status =
                unsafe { lowlat_ballots_agree(small / 6 % 4, words.as_ptr(), num_ranks, &mut out) };
            answered(status, &[]);
            world.given(status, out, Kind::Coverage);
            status
        }
        12 => {
            let coverage = of(Kind::Coverage);
            let mut epoch = 7;
            // SAFETY: the output is valid.
            let status = unsafe { lowlat_coverage_epoch(ptr(coverage), &mut epoch) };
            assert_eq!(status == Status::Ok, world.lives(coverage, Kind::Coverage));
            answered(status, &[world.lives(coverage, Kind::Coverage)]);
            status
        }
        13 => {
            let mut out = null_mut();
            // SAFETY: the output is valid.
            let status = unsafe { lowlat_recorder_create(&mut out) };
            assert_eq!(status, Status::Ok);
            world.given(status, out, Kind::Recorder);
            status
        }
        14 | 15 => {
            let recorder = of(Kind::Recorder);
            let dims = [2, 3];
            let seal = SealParts {
                name: text(call.big >> 8),
                dtype: TEXTS[1].as_ptr(),
                address: call.big,
                shape: if call.big & 1 == 0 {
                    dims.as_ptr()
                } else {
                    null()
                },
                num_dims: if call.big & 2 == 0 {
                    small % 3
                } else {
                    u32::MAX - small
                },
            };
            let key = KeyParts {
                mode: small % 5,
                batch_size: 1 + small / 8 % 4,
                tokens_per_request: 1,
                width: small % 8,
                shape: text(call.big >> 16),
                isa: TEXTS[1].as_ptr(),
                numerics_digest: 0,
                layout_digest: call.big,
            };
            let num_seals = if call.small == 200 {
                u32::MAX
            } else {
                small % 2
            };
            // SAFETY: one seal is there, and more than the most are refused before they are read.
            let status = unsafe {
                lowlat_recorder_note(ptr(recorder), &key, small / 16 % 4, &seal, num_seals)
            };
            answered(status, &[world.lives(recorder, Kind::Recorder)]);
            status
        }
        16 => {
            let recorder = of(Kind::Recorder);
            let mut out = null_mut();
            // SAFETY: the output is valid.
            let status = unsafe { lowlat_recorder_finish(ptr(recorder), &mut out) };
            assert_eq!(status == Status::Ok, world.lives(recorder, Kind::Recorder));
            answered(status, &[world.lives(recorder, Kind::Recorder)]);
            world.given(status, out, Kind::Record);
            status
        }
        17 => {
            let mut out = null_mut();
            // SAFETY: the text is terminated, the output is valid.
            let status = unsafe { lowlat_record_read(text(call.big), &mut out) };
            answered(status, &[]);
            world.given(status, out, Kind::Record);
            status
        }
        18 => {
            let record = of(Kind::Record);
            let mut words = null();
            let lives = world.lives(record, Kind::Record);
            // SAFETY: the output is valid.
            let status = unsafe { lowlat_record_text(ptr(record), &mut words) };
            answered(status, &[lives]);
            assert_eq!(status == Status::Ok, lives);
            if lives {
                let mut out = null_mut();
                // SAFETY: the text lives as long as the record; the output is valid.
                let read = unsafe { lowlat_record_read(words, &mut out) };
                assert_eq!(read, Status::Ok, "a record's own text is read");
                world.given(read, out, Kind::Record);
                assert_eq!(lowlat_record_compare(ptr(record), out), Status::Ok);
            }
            status
        }
        19 => {
            let (first, second) = (of(Kind::Record), world.pick_kind(call.second, Kind::Record));
            let status = lowlat_record_compare(ptr(first), ptr(second));
            let needed = [
                world.lives(first, Kind::Record),
                world.lives(second, Kind::Record),
            ];
            answered(status, &needed);
            status
        }
        20 => {
            let record = of(Kind::Record);
            let (mut digest, mut count) = (7, 7);
            let lives = [world.lives(record, Kind::Record)];
            // SAFETY: the outputs are valid.
            answered(
                unsafe { lowlat_record_digest(ptr(record), &mut digest) },
                &lives,
            );
            // SAFETY: the outputs are valid.
            answered(
                unsafe { lowlat_record_keys_digest(ptr(record), &mut digest) },
                &lives,
            );
            // SAFETY: the outputs are valid.
            answered(
                unsafe { lowlat_record_num_graphs(ptr(record), &mut count) },
                &lives,
            );
            // SAFETY: no seal is read.
            let status = unsafe { lowlat_record_check_seals(ptr(record), small % 2, null(), 0) };
            answered(status, &lives);
            status
        }
        21 | 22 => {
            let (coverage, record) = (
                of(Kind::Coverage),
                world.pick_kind(call.second, Kind::Record),
            );
            let mut out = null_mut();
            // SAFETY: the output is valid.
            let status = unsafe { lowlat_dispatcher_create(ptr(coverage), ptr(record), &mut out) };
            let needed = [
                world.lives(coverage, Kind::Coverage),
                world.lives(record, Kind::Record),
            ];
            answered(status, &needed);
            world.given(status, out, Kind::Dispatcher);
            status
        }
        23 => {
            let dispatcher = of(Kind::Dispatcher);
            let step = StepFacts {
                mode: small % 7,
                batch_size: call.big as u32,
                tokens_per_request: (call.big >> 32) as u32,
                rows: small,
            };
            let mut decision = StepDecision {
                reason: 7,
                key_idx: 7,
                padded_batch: 7,
            };
            let lives = world.lives(dispatcher, Kind::Dispatcher);
            // SAFETY: the step and the output are valid.
            let status = unsafe { lowlat_dispatcher_decide(ptr(dispatcher), &step, &mut decision) };
            answered(status, &[lives]);
            assert_eq!(status == Status::Ok, lives && step.mode < 6);
            assert_eq!(status == Status::Ok, decision.reason != 7);
            status
        }
        24 => {
            let dispatcher = of(Kind::Dispatcher);
            let lives = [world.lives(dispatcher, Kind::Dispatcher)];
            let mut json = null();
            answered(
                lowlat_dispatcher_disarm(ptr(dispatcher), 395 + small % 20),
                &lives,
            );
            let status = lowlat_dispatcher_switch(ptr(dispatcher), small);
            answered(status, &lives);
            // SAFETY: the output is valid.
            answered(
                unsafe { lowlat_dispatcher_report(ptr(dispatcher), &mut json) },
                &lives,
            );
            assert_eq!(json.is_null(), !lives[0]);
            status
        }
        25 => {
            let mut out = null_mut();
            // SAFETY: the output is valid.
            let status = unsafe { lowlat_watchdog_create(call.big & 3, 1, &mut out) };
            assert_eq!(status == Status::Ok, call.big & 3 != 0);
            world.given(status, out, Kind::Watchdog);
            status
        }
        26 => {
            let watchdog = of(Kind::Watchdog);
            let lives = [world.lives(watchdog, Kind::Watchdog)];
            let (mut health, mut late_ns) = (Health::Idle, 7);
            answered(lowlat_watchdog_arm(ptr(watchdog), call.big), &lives);
            // SAFETY: the outputs are valid.
            let status = unsafe {
                lowlat_watchdog_health(ptr(watchdog), !call.big, &mut health, &mut late_ns)
            };
            answered(status, &lives);
            if call.small % 2 == 0 {
                answered(lowlat_watchdog_disarm(ptr(watchdog)), &lives);
            }
            status
        }
        27 => {
            let mut out = null_mut();
            let name = match call.first % 8 {
                0 => text(call.big),
                number => GROUPS[usize::from(number) % 2].as_ptr(),
            };
            let tp_size = [1, 1, 1, 0, 2, 65][call.second as usize % 6];
            let parts = ballot(call);
            let budget_ns = [0, 1, 300_000, 300_000, u64::MAX][call.small as usize % 5];
            // SAFETY: the name is terminated, the ladder and the output are valid.
            let status = unsafe {
                lowlat_group_join(name, small % 2, tp_size, &parts.ladder, budget_ns, &mut out)
            };
            answered(status, &[]);
            world.given(status, out, Kind::Seat);
            status
        }
        // Destroying: what is most often right, and what is most often wrong.
        which => {
            let kind = KINDS[usize::from(call.small) % KINDS.len()];
            let handle = if which < 30 {
                of(kind)
            } else {
                world.pick(call.first)
            };
            let status = destroy(handle, kind);
            answered(status, &[handle == 0 || world.lives(handle, kind)]);
            world.destroyed(status, handle, kind);
            status
        }
    }
}

fn destroy(handle: usize, kind: Kind) -> Status {
    match kind {
        Kind::Servable => lowlat_servable_destroy(ptr(handle)),
        Kind::Board => lowlat_board_destroy(ptr(handle)),
        Kind::Seat => lowlat_seat_destroy(ptr(handle)),
        Kind::Coverage => lowlat_coverage_destroy(ptr(handle)),
        Kind::Dispatcher => lowlat_dispatcher_destroy(ptr(handle)),
        Kind::Watchdog => lowlat_watchdog_destroy(ptr(handle)),
        Kind::Recorder => lowlat_recorder_destroy(ptr(handle)),
        Kind::Record => lowlat_record_destroy(ptr(handle)),
    }
}

/// One test, because the number of living handles is the process's.
/// (Proved by a `take` that does not raise the generation, and by an `enter` that does not compare
/// kinds.)
#[test]
fn sequences_of_calls() {
    let sequences = prop::collection::vec(call(), 0..120);
    // How often each succeeded.
    let reached = [const { Cell::new(0u64) }; 32];
    proptest!(cases(1500), |(calls in sequences)| {
        let mut world = World::default();
        for &call in &calls {
            if run(&mut world, call) == Status::Ok {
                let count = &reached[usize::from(call.which % 32)];
                count.set(count.get() + 1);
            }
            prop_assert_eq!(lowlat_dispatch_num_handles(), world.living.len() as u64);
        }
        for (handle, kind) in std::mem::take(&mut world.living) {
            prop_assert_eq!(destroy(handle, kind), Status::Ok);
        }
        prop_assert_eq!(lowlat_dispatch_num_handles(), 0);
    });
    for name in GROUPS.iter() {
        let file = format!("/dev/shm/lowlat-{}", name.to_string_lossy());
        assert!(
            !std::path::Path::new(&file).exists(),
            "{file} was left behind"
        );
    }
    for (which, count) in reached.iter().enumerate() {
        // A rank's own decline never succeeds.
        assert_eq!(
            which == 8,
            count.get() == 0,
            "call {which} succeeded {} times",
            count.get()
        );
    }
}
