//! Handles: what C holds instead of a pointer into this library.
//!
//! A handle is a number in the shape of a pointer, and is never dereferenced: it is looked up in
//! one table of the process. So NULL, a stranger's pointer, a handle of another kind, one that was
//! destroyed and one that another call is using are each told apart and refused in words.
//!
//! ```text
//! handle        63..52 mark | 51..20 generation of the slot | 19..4 slot | 3..0 zero
//! slot.state    63..32 generation | 31..24 kind, 0 while free | 23..0 users, all ones: exclusive
//! ```
//!
//! Transitions of a state, each by comparison:
//!
//! | from | to | by |
//! |---|---|---|
//! | free | kind, exclusive | [`Reserved::new`], which holds the slot alone |
//! | kind, exclusive | kind, no user | [`Reserved::fill`], the end of an exclusive borrow |
//! | kind, no user | kind, exclusive | [`exclusive`], [`take`] |
//! | kind, n users | kind, n + 1 users | [`shared`]; back at the end of the borrow |
//! | kind, exclusive | free, next generation | [`take`], a [`Reserved`] that was not filled |
//!
//! A borrow never waits: a handle in use elsewhere is refused. Whoever goes to "exclusive" acquires
//! what the one before released, so a value may move between threads.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::border::{Failure, invalid, null};

#[cfg(not(target_pointer_width = "64"))]
compile_error!("a handle needs pointers of 64 bits");

/// What a handle can stand for.
pub(crate) trait Kind: Send + Sync + Sized {
    /// The type's name in C.
    const NAME: &'static str;
    /// Its place in [`KINDS`], from 1.
    const NUMBER: u8;
}

/// Names of every kind; a kind's number is its place from 1.
pub(crate) const KINDS: [&str; 8] = [
    "lowlat_servable",
    "lowlat_board",
    "lowlat_seat",
    "lowlat_coverage",
    "lowlat_dispatcher",
    "lowlat_watchdog",
    "lowlat_recorder",
    "lowlat_record",
];

macro_rules! kind {
    ($type:ty, $number:literal) => {
        impl crate::handle::Kind for $type {
            const NAME: &'static str = crate::handle::KINDS[$number - 1];
            const NUMBER: u8 = $number;
        }
    };
}
pub(crate) use kind;

/// No user-space pointer has these upper bits.
const MARK: u64 = 0x4c4 << 52;
const SLOT_BITS: u32 = 16;
/// Handles that can live at the same time.
pub(crate) const MAX_LIVE: usize = 1 << SLOT_BITS;
/// Slots are made this many at a time, so that a process with few handles has few.
const CHUNK: usize = 256;

const EXCLUSIVE: u64 = 0xff_ffff;

/// A slot's state, taken apart.
#[derive(Clone, Copy, PartialEq, Eq)]
struct State(u64);

impl State {
    fn new(generation: u32, kind: u8, users: u64) -> Self {
        Self(u64::from(generation) << 32 | u64::from(kind) << 24 | users)
    }

    fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn kind(self) -> u8 {
        (self.0 >> 24) as u8
    }

    fn users(self) -> u64 {
        self.0 & EXCLUSIVE
    }

    fn with_users(self, users: u64) -> Self {
        Self::new(self.generation(), self.kind(), users)
    }
}

struct Slot {
    state: AtomicU64,
    value: AtomicPtr<()>,
}

struct Table {
    chunks: [OnceLock<Box<[Slot]>>; MAX_LIVE / CHUNK],
    /// Slots that are free again, and how many were ever used.
    free: Mutex<(Vec<u32>, usize)>,
    live: AtomicU64,
}

static TABLE: Table = Table {
    chunks: [const { OnceLock::new() }; MAX_LIVE / CHUNK],
    free: Mutex::new((Vec::new(), 0)),
    // Relaxed everywhere: a count for tests and reports, nothing hangs on it.
    live: AtomicU64::new(0),
};

impl Table {
    fn slot(&self, idx: usize) -> Option<&Slot> {
        self.chunks.get(idx / CHUNK)?.get()?.get(idx % CHUNK)
    }

    fn make_slot(&self, idx: usize) -> &Slot {
        let chunk = self.chunks[idx / CHUNK].get_or_init(|| {
            let empty = || Slot {
                state: AtomicU64::new(0),
                value: AtomicPtr::new(std::ptr::null_mut()),
            };
            (0..CHUNK).map(|_| empty()).collect()
        });
        &chunk[idx % CHUNK]
    }
}

/// Handles that were given and not destroyed.
pub(crate) fn num_live() -> u64 {
    TABLE.live.load(Ordering::Relaxed)
}

fn handle_of<T>(idx: usize, generation: u32) -> *mut T {
    let number = MARK | u64::from(generation) << (SLOT_BITS + 4) | (idx as u64) << 4;
    std::ptr::without_provenance_mut(number as usize)
}

/// The slot that a handle names, and the generation that it was given in.
fn look_up<T>(name: &str, handle: *const T) -> Result<(usize, &'static Slot, u32), Failure> {
    if handle.is_null() {
        return Err(null(name));
    }
    let number = handle.addr() as u64;
    let stranger = || {
        Err(invalid(format!(
            "{name} is {number:#x}, which this library never gave"
        )))
    };
    if number & (0xfff << 52) != MARK || number & 0xf != 0 {
        return stranger();
    }
    let idx = (number >> 4) as usize & (MAX_LIVE - 1);
    let generation = (number >> (SLOT_BITS + 4)) as u32;
    match TABLE.slot(idx) {
        // A generation that is still to come was never given.
        Some(slot) if generation <= State(slot.state.load(Ordering::Relaxed)).generation() => {
            Ok((idx, slot, generation))
        }
        _ => stranger(),
    }
}

/// Adds a user, or becomes the only one.
fn enter<T: Kind>(
    name: &str,
    handle: *const T,
    exclusive: bool,
) -> Result<(usize, &'static Slot, State), Failure> {
    let (idx, slot, generation) = look_up(name, handle)?;
    let mut seen = State(slot.state.load(Ordering::Relaxed));
    loop {
        if seen.generation() != generation || seen.kind() == 0 {
            return Err(invalid(format!("{name} was destroyed before")));
        }
        if seen.kind() != T::NUMBER {
            let kind = KINDS[usize::from(seen.kind()) - 1];
            return Err(invalid(format!(
                "{name} is a {kind}; a {} is needed",
                T::NAME
            )));
        }
        let users = match (exclusive, seen.users()) {
            (true, 0) => EXCLUSIVE,
            (false, users) if users < EXCLUSIVE - 1 => users + 1,
            _ => {
                return Err(invalid(format!(
                    "{name} is in use by another call; calls on one handle come one at a time"
                )));
            }
        };
        let entered = seen.with_users(users);
        // Acquire: pairs with the release of whoever left or filled the slot.
        let swapped = slot.state.compare_exchange_weak(
            seen.0,
            entered.0,
            Ordering::Acquire,
            Ordering::Relaxed,
        );
        match swapped {
            Ok(_) => return Ok((idx, slot, entered)),
            Err(now) => seen = State(now),
        }
    }
}

/// A borrow that others may have too.
pub(crate) struct Shared<T: Kind> {
    slot: &'static Slot,
    kind: PhantomData<T>,
}

/// Borrows what `handle` stands for, beside others that do the same.
pub(crate) fn shared<T: Kind>(name: &str, handle: *const T) -> Result<Shared<T>, Failure> {
    let (_, slot, _) = enter(name, handle, false)?;
    let kind = PhantomData;
    Ok(Shared { slot, kind })
}

impl<T: Kind> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        let value = self.slot.value.load(Ordering::Relaxed).cast::<T>();
        // SAFETY: the slot holds a `T` from `Box::into_raw` (`fill`; the kind was compared in
        // `enter`), and it stays there while this borrow counts as a user.
        unsafe { &*value }
    }
}

impl<T: Kind> Drop for Shared<T> {
    fn drop(&mut self) {
        // Release: the next exclusive user comes after this borrow.
        self.slot.state.fetch_sub(1, Ordering::Release);
    }
}

/// A borrow that nobody else has.
pub(crate) struct Exclusive<T: Kind> {
    slot: &'static Slot,
    kind: PhantomData<T>,
}

/// Borrows what `handle` stands for, alone.
pub(crate) fn exclusive<T: Kind>(name: &str, handle: *const T) -> Result<Exclusive<T>, Failure> {
    let (_, slot, _) = enter(name, handle, true)?;
    let kind = PhantomData;
    Ok(Exclusive { slot, kind })
}

impl<T: Kind> Deref for Exclusive<T> {
    type Target = T;

    fn deref(&self) -> &T {
        let value = self.slot.value.load(Ordering::Relaxed).cast::<T>();
        // SAFETY: as in `Shared::deref`; this borrow is the only one.
        unsafe { &*value }
    }
}

impl<T: Kind> DerefMut for Exclusive<T> {
    fn deref_mut(&mut self) -> &mut T {
        let value = self.slot.value.load(Ordering::Relaxed).cast::<T>();
        // SAFETY: as in `Shared::deref`; this borrow is the only one.
        unsafe { &mut *value }
    }
}

impl<T: Kind> Drop for Exclusive<T> {
    fn drop(&mut self) {
        // Release: the next user comes after this borrow.
        self.slot.state.fetch_sub(EXCLUSIVE, Ordering::Release);
    }
}

/// Gives a slot back; `state` is exclusive and the slot's value was moved out of it.
fn free(idx: usize, slot: &Slot, state: State) {
    TABLE.live.fetch_sub(1, Ordering::Relaxed);
    let mut free = TABLE.free.lock().unwrap_or_else(PoisonError::into_inner);
    // Release: whoever reserves the slot next comes after this.
    if let Some(next) = state.generation().checked_add(1) {
        slot.state
            .store(State::new(next, 0, 0).0, Ordering::Release);
        free.0.push(idx as u32);
    } else {
        // Its numbers are used up; the slot is not used again.
        slot.state
            .store(State::new(u32::MAX, 0, 0).0, Ordering::Release);
    }
}

/// A slot that is held for a handle to come. Reserved before the work that makes the value, so
/// that a vote is never won by a rank that then has no place for its proof.
pub(crate) struct Reserved<T: Kind> {
    idx: usize,
    slot: &'static Slot,
    state: State,
    kind: PhantomData<T>,
}

impl<T: Kind> Reserved<T> {
    /// Takes a free slot.
    pub(crate) fn new() -> Result<Self, Failure> {
        let mut free = TABLE.free.lock().unwrap_or_else(PoisonError::into_inner);
        let idx = match free.0.pop() {
            Some(idx) => idx as usize,
            None if free.1 < MAX_LIVE => {
                free.1 += 1;
                free.1 - 1
            }
            None => {
                return Err(invalid(format!(
                    "{MAX_LIVE} handles are alive; destroy those that are not needed"
                )));
            }
        };
        drop(free);
        let slot = TABLE.make_slot(idx);
        // Acquire: pairs with the release in `free`.
        let before = State(slot.state.load(Ordering::Acquire));
        let state = State::new(before.generation(), T::NUMBER, EXCLUSIVE);
        // Relaxed: nobody has the handle yet.
        slot.state.store(state.0, Ordering::Relaxed);
        TABLE.live.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            idx,
            slot,
            state,
            kind: PhantomData,
        })
    }

    /// Puts the value in; gives the handle.
    pub(crate) fn fill(self, value: T) -> *mut T {
        let Self {
            idx, slot, state, ..
        } = self;
        std::mem::forget(self);
        let value = Box::into_raw(Box::new(value)).cast();
        slot.value.store(value, Ordering::Relaxed);
        // Release: pairs with the acquire in `enter`.
        slot.state.store(state.with_users(0).0, Ordering::Release);
        handle_of(idx, state.generation())
    }
}

impl<T: Kind> Drop for Reserved<T> {
    fn drop(&mut self) {
        free(self.idx, self.slot, self.state);
    }
}

/// Takes a handle back, with what it stood for.
pub(crate) fn take<T: Kind>(name: &str, handle: *mut T) -> Result<Box<T>, Failure> {
    let (idx, slot, state) = enter(name, handle.cast_const(), true)?;
    let value = slot.value.swap(std::ptr::null_mut(), Ordering::Relaxed);
    free(idx, slot, state);
    // SAFETY: the slot held a `T` from `Box::into_raw` (`fill`; the kind was compared in `enter`);
    // the exclusive state made it ours alone, and it was moved out of the slot.
    Ok(unsafe { Box::from_raw(value.cast::<T>()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Number(u64);
    kind!(Number, 1);
    struct Other;
    kind!(Other, 2);

    fn words<T>(result: Result<T, Failure>) -> String {
        result.err().expect("it is refused").1
    }

    #[test]
    fn a_handle_gives_its_value_until_it_is_taken_back() {
        let handle = Reserved::new().unwrap().fill(Number(7));
        exclusive("number", handle).unwrap().0 += 1;
        assert_eq!(shared("number", handle).unwrap().0, 8);
        assert_eq!(take("number", handle).unwrap().0, 8);
        for result in [
            shared("number", handle).map(drop),
            take("number", handle).map(drop),
        ] {
            assert_eq!(words(result), "number was destroyed before");
        }
        // The slot is used again, and the old handle still names nothing.
        let again: Vec<_> = (0..64)
            .map(|idx| Reserved::new().unwrap().fill(Number(idx)))
            .collect();
        assert!(shared("number", handle).is_err());
        assert!(!again.contains(&handle));
        for handle in again {
            take("number", handle).unwrap();
        }
    }

    #[test]
    fn what_is_no_handle_is_told_apart() {
        let handle = Reserved::new().unwrap().fill(Number(7));
        assert_eq!(
            words(shared("other", handle.cast::<Other>())),
            "other is a lowlat_servable; a lowlat_board is needed"
        );
        assert_eq!(
            words(shared::<Number>("number", std::ptr::null())),
            "number is NULL"
        );
        let local = Number(7);
        let future = handle.map_addr(|addr| addr + (1 << (SLOT_BITS + 4)));
        let odd = handle.map_addr(|addr| addr + 1);
        let far = handle.map_addr(|addr| addr | (MAX_LIVE - 1) << 4);
        for stranger in [&raw const local, future, odd, far] {
            let words = words(shared("number", stranger));
            assert!(words.ends_with("which this library never gave"), "{words}");
        }
        take("number", handle).unwrap();
    }

    #[test]
    fn a_handle_in_use_is_refused_and_not_waited_for() {
        let handle = Reserved::new().unwrap().fill(Number(7));
        let in_use = "number is in use by another call; calls on one handle come one at a time";
        let one = shared("number", handle).unwrap();
        let two = shared("number", handle).unwrap();
        assert_eq!(words(exclusive("number", handle)), in_use);
        assert_eq!(words(take("number", handle)), in_use);
        drop((one, two));
        let alone = exclusive("number", handle).unwrap();
        assert_eq!(words(shared("number", handle)), in_use);
        assert_eq!(words(exclusive("number", handle)), in_use);
        drop(alone);
        take("number", handle).unwrap();
    }

    #[test]
    fn a_place_that_was_not_filled_is_free_again() {
        let reserved = Reserved::<Number>::new().unwrap();
        let handle: *mut Number = handle_of(reserved.idx, reserved.state.generation());
        assert!(shared("number", handle).is_err());
        drop(reserved);
        assert_eq!(
            words(shared("number", handle)),
            "number was destroyed before"
        );
    }

    /// Planted and seen to fail: an `enter` that does not look at the users.
    #[test]
    fn threads_that_share_a_handle_never_write_together() {
        let handle = Reserved::new().unwrap().fill(Number(0)).addr();
        let done: u64 = std::thread::scope(|scope| {
            let count = || {
                let handle: *const Number = std::ptr::without_provenance(handle);
                let add = |_: &u32| match exclusive("number", handle) {
                    Ok(mut number) => {
                        let seen = number.0;
                        std::hint::spin_loop();
                        number.0 = seen + 1;
                        true
                    }
                    Err(_) => false,
                };
                (0..20_000).filter(add).count() as u64
            };
            let threads = [scope.spawn(count), scope.spawn(count)];
            threads.map(|thread| thread.join().unwrap()).iter().sum()
        });
        let handle: *mut Number = std::ptr::without_provenance_mut(handle);
        assert_eq!(take("number", handle).unwrap().0, done);
    }
}
