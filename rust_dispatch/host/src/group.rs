//! Joining a group by its name, voting in it, and leaving it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lowlat_core::ladder::{LadderError, Rung};
use lowlat_core::vote::{Admission, Bell, Decision, MAX_RANKS, Member, Refusal, Roll};
use lowlat_core::{Ballot, Coverage, DeadlineLadder, Epoch, InstantNs, Reason, Seat, TpRank};
use rustix::fs::{FallocateFlags, FlockOperation, OFlags, fallocate, flock};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::memory::{FORMING, Memory, TABLE_BYTES};
use crate::process::{Process, hold_byte, is_byte_held};

/// Most bytes of a group's name.
pub const NAME_BYTES: usize = 64;

/// How long who leaves waits for the file's lock before it leaves the name to the next newcomer.
const LEAVE_BUDGET: Duration = Duration::from_millis(100);

/// Who asks to join what.
#[derive(Clone, Debug)]
pub struct GroupSettings {
    name: String,
    tp_rank: TpRank,
    tp_size: u32,
    ladder: DeadlineLadder,
    folder: PathBuf,
    first: Epoch,
}

impl GroupSettings {
    /// Rank `tp_rank` of the group `name`, which has `tp_size` ranks. `ladder` bounds every wait.
    pub fn new(
        name: impl Into<String>,
        tp_rank: TpRank,
        tp_size: u32,
        ladder: DeadlineLadder,
    ) -> Self {
        Self {
            name: name.into(),
            tp_rank,
            tp_size,
            ladder,
            folder: PathBuf::from("/dev/shm"),
            first: Epoch(1),
        }
    }

    /// The same in another folder than `/dev/shm`, which must be memory that processes share.
    #[must_use]
    pub fn in_folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = folder.into();
        self
    }

    /// The same with the first epoch given, so that a test can begin just before the wrap. What the
    /// rank says that makes the group counts.
    #[must_use]
    pub fn starting_at(mut self, first: Epoch) -> Self {
        self.first = first;
        self
    }

    fn path(&self) -> PathBuf {
        self.folder.join(format!("lowlat-{}", self.name))
    }

    fn check(&self) -> Result<(), GroupError> {
        let Self {
            name,
            tp_rank,
            tp_size,
            ..
        } = self;
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
        if name.is_empty() || NAME_BYTES < name.len() || !name.bytes().all(plain) {
            // As much of a long one as tells it.
            let shown: String = name.chars().take(NAME_BYTES + 1).collect();
            return Err(GroupError::Invalid(format!(
                "group name is {shown:?}{}; 1 to {NAME_BYTES} letters, digits, _, . and - are \
                 needed",
                if shown.len() < name.len() {
                    format!(" and so on, {} bytes", name.len())
                } else {
                    String::new()
                }
            )));
        }
        if *tp_size == 0 || MAX_RANKS < *tp_size as usize {
            return Err(GroupError::Invalid(format!(
                "tp_size is {tp_size}; a vote needs 1 to {MAX_RANKS}"
            )));
        }
        if *tp_size <= tp_rank.0 {
            return Err(GroupError::Invalid(format!(
                "tp_rank is {}; it must be below tp_size, {tp_size}",
                tp_rank.0
            )));
        }
        Ok(())
    }

    fn refuse(&self, reason: Reason, words: impl std::fmt::Display) -> GroupError {
        GroupError::Refused {
            reason,
            words: format!("group {}, {}: {words}", self.name, self.tp_rank),
        }
    }
}

/// Why a rank is not in a group, or does not vote.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// An argument is wrong: a name, a rank, a size, a budget.
    #[error("{0}")]
    Invalid(String),
    /// [`Reason::GroupInUse`], [`Reason::RankTaken`], [`Reason::VoteGroup`],
    /// [`Reason::SharedMemory`], or [`Reason::RankMissing`] where the group did not form in time.
    #[error("[{}] {words}", reason.number())]
    Refused {
        /// The reason to count and report.
        reason: Reason,
        /// What was seen and what changes it, in one line.
        words: String,
    },
}

impl GroupError {
    /// The reason to count and report; none where an argument is wrong.
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Self::Invalid(_) => None,
            Self::Refused { reason, .. } => Some(*reason),
        }
    }
}

impl From<LadderError> for GroupError {
    fn from(error: LadderError) -> Self {
        Self::Invalid(error.to_string())
    }
}

/// Time on this machine's steady clock, from a start of its own.
#[derive(Clone, Copy, Debug)]
struct Clock(Instant);

impl Clock {
    fn now(self) -> InstantNs {
        InstantNs(u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}

/// How long is left until a deadline.
#[derive(Clone, Copy, Debug)]
struct Deadline(Instant);

impl Deadline {
    fn after(budget_ns: u64) -> Self {
        // A ladder may hold a budget past the end of the clock: some centuries will do.
        let far = Duration::from_secs(1 << 33);
        let now = Instant::now();
        let budget = Duration::from_nanos(budget_ns);
        Self(now.checked_add(budget).unwrap_or(now + far))
    }

    fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    fn passed(self) -> bool {
        self.left().is_zero()
    }
}

/// Grows from 100 µs to 5 ms: a lock is held for microseconds, a dying group lives for longer.
fn nap(tries: &mut u32, deadline: Deadline) {
    let nap = Duration::from_micros(100 << (*tries).min(6)).min(Duration::from_millis(5));
    *tries += 1;
    std::thread::sleep(nap.min(deadline.left()));
}

/// Joins the group `settings` names, and waits until every rank has, at most `budget_ns`: more than
/// 0, and shorter than the ladder's engine budget, since forming is a wait of the collective rung.
///
/// ```
/// use lowlat_core::{DeadlineLadder, TpRank, vote::Decision};
/// use lowlat_host::{GroupSettings, join};
/// let ladder = DeadlineLadder::new(1_000_000, 2_000_000_000, 3_000_000_000, 60_000_000_000);
/// let name = format!("doc-{}", std::process::id());
/// let settings = GroupSettings::new(name, TpRank(0), 1, ladder.unwrap());
/// let mut seat = join(&settings, 1_000_000_000).unwrap();
/// assert_eq!(seat.agree_step(7, 1_000_000_000).unwrap(), Decision::Agreed);
/// assert_eq!(
///     seat.agree_step(7, 0).unwrap_err().to_string(),
///     "budget is 0 ns; it must be longer than 0"
/// );
/// ```
///
/// # Errors
/// [`GroupError::Invalid`] for a name, rank, size or budget that cannot be; otherwise why this rank
/// is not in the group, as a numbered reason in one line. All ranks that were in it fail alike
/// where it does not form in time.
pub fn join(settings: &GroupSettings, budget_ns: u64) -> Result<HostSeat, GroupError> {
    settings.check()?;
    settings.ladder.check(Rung::Collective, budget_ns)?;
    let deadline = Deadline::after(budget_ns);
    let me = Process::current().map_err(|error| {
        settings.refuse(
            Reason::SharedMemory,
            format_args!("cannot tell living ranks from dead ones without /proc: {error}"),
        )
    })?;
    let mut tries = 0;
    loop {
        let file = GroupFile::lock(settings, deadline)?;
        let memory = file.memory(settings, deadline)?;
        let in_use = match admission(&file, &memory, settings, &me) {
            None => {
                memory.table().make(settings.tp_size, settings.first);
                return HostSeat::enter(settings, file, memory, me, deadline);
            }
            Some(Admission::Enter) => {
                return HostSeat::enter(settings, file, memory, me, deadline);
            }
            Some(Admission::Reclaim) => {
                file.unlink(settings)?;
                continue;
            }
            Some(Admission::Wait) if !deadline.passed() => None,
            Some(Admission::Wait) => Some(Reason::GroupInUse),
            Some(Admission::Refused(reason)) => Some(reason),
        };
        if let Some(reason) = in_use {
            let words = words_in_use(&file, &memory, settings, reason, &me);
            return Err(settings.refuse(reason, words));
        }
        drop(file);
        nap(&mut tries, deadline);
    }
}

/// What the roll says of this rank; `None` where no group was made in the memory yet. The file is
/// locked.
fn admission(
    file: &GroupFile,
    memory: &Memory,
    settings: &GroupSettings,
    me: &Process,
) -> Option<Admission> {
    let table = memory.table();
    // What is no group at all was refused when it was mapped.
    if table.is_ready() != Ok(true) {
        return None;
    }
    let tp_size = table.tp_size().min(MAX_RANKS as u32);
    let members: Vec<Member> = (0..tp_size)
        .map(TpRank)
        .map(|rank| match table.member(rank) {
            None => Member::Absent,
            Some(process) if file.lives(rank, &process, me) => Member::Living,
            Some(_) => Member::Dead,
        })
        .collect();
    // Read after the living were told from the dead: who was dead while nothing was settled has
    // cast no ballot, so that another may take its place.
    let roll = Roll {
        members: &members,
        settled: table.forming.decision(FORMING),
        closed: table.is_closed(),
    };
    Some(roll.admit(settings.tp_rank, settings.tp_size))
}

fn words_in_use(
    file: &GroupFile,
    memory: &Memory,
    settings: &GroupSettings,
    reason: Reason,
    me: &Process,
) -> String {
    let table = memory.table();
    let tp_size = table.tp_size().min(MAX_RANKS as u32);
    let pid = |rank| table.member(rank).map_or(0, |process| process.pid);
    match reason {
        Reason::RankTaken => format!(
            "process {} has joined with this number and lives; each rank needs a number of its own",
            pid(settings.tp_rank)
        ),
        Reason::VoteGroup => format!(
            "the group that forms has {tp_size} ranks, this rank believes in {}; all need the same \
             tp_size",
            settings.tp_size
        ),
        _ => {
            let living = (0..tp_size).map(TpRank).find(|&rank| {
                let process = table.member(rank);
                process.is_some_and(|process| file.lives(rank, &process, me))
            });
            let living = living.unwrap_or(TpRank(0));
            format!(
                "a living group of {tp_size} has this name, its {living} is process {}; end it or \
                 choose another name",
                pid(living)
            )
        }
    }
}

/// A group's file, open and locked; unlocked when dropped or by [`GroupFile::unlock`].
#[derive(Debug)]
struct GroupFile {
    file: File,
    path: PathBuf,
}

impl GroupFile {
    /// Opens or makes the file under the name and locks it. Whoever changes who is in a group, or
    /// which file has its name, holds the lock of the file that has the name at that time.
    fn lock(settings: &GroupSettings, deadline: Deadline) -> Result<Self, GroupError> {
        let path = settings.path();
        let no_memory = |error: io::Error| {
            settings.refuse(
                Reason::SharedMemory,
                format_args!("{}: {}", path.display(), memory_words(&error)),
            )
        };
        let mut tries = 0;
        loop {
            let mut options = OpenOptions::new();
            let options = options.read(true).write(true).create(true).mode(0o600);
            // A link could lead to a file that is not ours to write.
            let options = options.custom_flags(OFlags::NOFOLLOW.bits() as i32);
            let file = options.open(&path).map_err(no_memory)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if is_at(&file, &path).map_err(no_memory)? => {
                    return Ok(Self { file, path });
                }
                // It lost its name before it was locked: the name has another file, or none.
                Ok(()) => continue,
                Err(Errno::WOULDBLOCK | Errno::INTR) if !deadline.passed() => {
                    nap(&mut tries, deadline);
                }
                Err(Errno::WOULDBLOCK | Errno::INTR) => {
                    return Err(settings.refuse(
                        Reason::GroupInUse,
                        format_args!(
                            "{} was locked all the time; a process that joins it or leaves it may \
                             be stopped",
                            path.display()
                        ),
                    ));
                }
                Err(error) => return Err(no_memory(error.into())),
            }
        }
    }

    /// Maps the file, and gives it its blocks first where it is new. A new file that comes to
    /// nothing goes.
    fn memory(&self, settings: &GroupSettings, deadline: Deadline) -> Result<Memory, GroupError> {
        let refuse = |words: String| {
            let words = format!("{}: {words}", self.path.display());
            settings.refuse(Reason::SharedMemory, words)
        };
        let failed = |error: io::Error| refuse(memory_words(&error));
        let metadata = self.file.metadata().map_err(failed)?;
        let uid = rustix::process::geteuid().as_raw();
        if metadata.uid() != uid {
            return Err(refuse(format!(
                "belongs to user {}, this is user {uid}; choose another name",
                metadata.uid()
            )));
        }
        if !metadata.is_file() {
            return Err(refuse(
                "is no file; remove it or choose another name".into(),
            ));
        }
        if metadata.len() == 0 {
            let made = allocate(&self.file, deadline)
                .and_then(|()| Memory::map(&self.file, settings.tp_size));
            return made.map_err(|error| {
                // Nothing was made in it, so nothing is lost.
                let _ = fs::remove_file(&self.path);
                failed(error)
            });
        }
        if metadata.len() != TABLE_BYTES {
            return Err(refuse(format!(
                "has {} bytes and a group's memory has {TABLE_BYTES}; it is another program's, or \
                 of another lowlat: remove it or choose another name",
                metadata.len()
            )));
        }
        let memory = Memory::map(&self.file, settings.tp_size).map_err(failed)?;
        memory.table().is_ready().map_err(|magic| {
            refuse(format!(
                "begins with {magic:#018x}, so it is no group's memory, or of another lowlat: \
                 remove it or choose another name"
            ))
        })?;
        Ok(memory)
    }

    /// Whether `process`, which has entered as `rank`, lives.
    fn lives(&self, rank: TpRank, process: &Process, me: &Process) -> bool {
        process.lives(me, || is_byte_held(&self.file, rank))
    }

    /// Takes the name away; the memory lives on where it is mapped.
    fn unlink(self, settings: &GroupSettings) -> Result<(), GroupError> {
        fs::remove_file(&self.path).map_err(|error| {
            settings.refuse(
                Reason::SharedMemory,
                format_args!("{} cannot be removed: {error}", self.path.display()),
            )
        })
    }

    /// Gives the lock back and keeps the file.
    fn unlock(self) -> File {
        // It cannot fail for a lock that is held.
        let _ = flock(&self.file, FlockOperation::Unlock);
        self.file
    }
}

/// Gives a file its blocks now: a page that cannot be had later is a signal, not an error.
fn allocate(file: &File, deadline: Deadline) -> io::Result<()> {
    // Beyond this limit it would be a signal too, SIGXFSZ, which ends the process.
    let most = getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX);
    if most < TABLE_BYTES {
        return Err(io::Error::other(format!(
            "this process may write files of at most {most} bytes, {TABLE_BYTES} are needed; raise \
             its limit (ulimit -f, RLIMIT_FSIZE)"
        )));
    }
    loop {
        match fallocate(file, FallocateFlags::empty(), 0, TABLE_BYTES) {
            // A signal had come; what was allocated is given back, and it begins again.
            Err(Errno::INTR) if !deadline.passed() => {}
            made => return Ok(made?),
        }
    }
}

/// Whether `file` is the one that `path` names now.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let file = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (file.dev(), file.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn memory_words(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => format!(
            "shared memory is full, {TABLE_BYTES} bytes are needed: {error}; make room or enlarge \
             it (a container's --shm-size)"
        ),
        io::ErrorKind::PermissionDenied => {
            format!("shared memory is not permitted: {error}; choose another name or folder")
        }
        _ => format!("no shared memory: {error}"),
    }
}

/// One rank's place in a group of processes. All ranks make the same sequence of calls.
///
/// Dropping it leaves the group: peers that vote on find this rank missing, and the name is free.
#[derive(Debug)]
pub struct HostSeat {
    seat: Seat,
    memory: Arc<Memory>,
    ladder: DeadlineLadder,
    clock: Clock,
    file: File,
    path: PathBuf,
    pid: u32,
}

impl HostSeat {
    /// Enters the locked group, then waits until it has formed.
    fn enter(
        settings: &GroupSettings,
        file: GroupFile,
        memory: Memory,
        me: Process,
        deadline: Deadline,
    ) -> Result<Self, GroupError> {
        let path = file.path.clone();
        let memory = Arc::new(memory);
        hold_byte(&file.file, settings.tp_rank).map_err(|error| {
            settings.refuse(
                Reason::SharedMemory,
                format_args!("{} cannot be locked: {error}", path.display()),
            )
        })?;
        memory.table().enter(settings.tp_rank, me);
        let lines: Arc<dyn lowlat_core::vote::Lines> = Arc::clone(&memory) as _;
        let seat = Self {
            seat: Seat::over(lines, settings.tp_rank, memory.table().first()),
            memory,
            ladder: settings.ladder,
            clock: Clock(Instant::now()),
            file: file.unlock(),
            path,
            pid: me.pid,
        };
        let futex = seat.memory.futex();
        futex.wake(&seat.memory.table().arrivals);
        match seat.form(settings.tp_size, deadline) {
            Decision::Missing { rank } => Err(settings.refuse(
                Reason::RankMissing,
                format_args!("{rank} did not join by the deadline"),
            )),
            _ => {
                seat.memory.formed();
                Ok(seat)
            }
        }
    }

    /// Waits until every rank has entered, or a deadline settles that one has not.
    fn form(&self, tp_size: u32, deadline: Deadline) -> Decision {
        let (table, futex) = (self.memory.table(), self.memory.futex());
        loop {
            let arrivals = table.arrivals.load(std::sync::atomic::Ordering::Acquire);
            if let Some(decision) = table.forming.decision(FORMING) {
                return decision;
            }
            let absent = (0..tp_size)
                .map(TpRank)
                .find(|&rank| table.member(rank).is_none());
            let left = deadline.left();
            let proposal = match absent {
                None => Decision::Agreed,
                Some(rank) if left.is_zero() => Decision::Missing { rank },
                Some(_) => {
                    let left_ns = u64::try_from(left.as_nanos()).unwrap_or(u64::MAX);
                    futex.sleep(&table.arrivals, arrivals, left_ns);
                    continue;
                }
            };
            // There is one epoch, so something stands; whoever was first has settled it for all.
            let stands = table.forming.claim(FORMING, proposal);
            // So that who sleeps looks again.
            table
                .arrivals
                .fetch_add(1, std::sync::atomic::Ordering::AcqRel);
            futex.wake(&table.arrivals);
            return stands.unwrap_or(proposal);
        }
    }

    /// Whose seat it is.
    pub fn tp_rank(&self) -> TpRank {
        self.seat.tp_rank()
    }

    /// Ranks of the group.
    pub fn tp_size(&self) -> u32 {
        self.seat.tp_size()
    }

    /// The time that budgets are counted in: nanoseconds on this machine's steady clock since this
    /// rank has joined.
    pub fn now(&self) -> InstantNs {
        self.clock.now()
    }

    /// Votes on coverage, for at most `budget_ns`: more than 0, and shorter than the ladder's
    /// collective budget. The outer error is a budget that cannot be; the inner one is
    /// [`Seat::agree`]'s, the same on every rank.
    ///
    /// # Errors
    /// See above.
    ///
    /// # Panics
    /// When the ballot is another rank's.
    pub fn agree(
        &mut self,
        ballot: &Ballot,
        budget_ns: u64,
    ) -> Result<Result<Coverage, Refusal>, LadderError> {
        self.ladder.check(Rung::Plugin, budget_ns)?;
        let clock = self.clock;
        let ended = self.seat.agree(ballot, budget_ns, || clock.now());
        self.close_after_fault();
        Ok(ended)
    }

    /// The hot vote, [`Seat::agree_step`], under the same rule for the budget.
    ///
    /// # Errors
    /// When the budget cannot be.
    pub fn agree_step(&mut self, digest: u64, budget_ns: u64) -> Result<Decision, LadderError> {
        self.ladder.check(Rung::Plugin, budget_ns)?;
        let clock = self.clock;
        let decision = self.seat.agree_step(digest, budget_ns, || clock.now());
        self.close_after_fault();
        Ok(decision)
    }

    /// Begins the hot vote and does not wait ([`Seat::begin_step`]).
    ///
    /// # Errors
    /// When the budget cannot be; then nothing was begun.
    ///
    /// # Panics
    /// While a vote is not over.
    pub fn begin_step(&mut self, digest: u64, budget_ns: u64) -> Result<(), LadderError> {
        self.ladder.check(Rung::Plugin, budget_ns)?;
        self.seat.begin_step(digest, budget_ns, self.clock.now());
        Ok(())
    }

    /// What became of the vote that [`HostSeat::begin_step`] began ([`Seat::poll_step`]).
    ///
    /// # Panics
    /// When no vote was begun.
    pub fn poll_step(&mut self) -> Option<Decision> {
        let decision = self.seat.poll_step(self.clock.now());
        self.close_after_fault();
        decision
    }

    /// The last step vote's decision in words, with the values where ranks differed.
    pub fn step_refusal(&self, decision: Decision) -> Refusal {
        self.seat.step_refusal(decision)
    }

    /// A group that has faulted votes no more, so that its name is free for a fresh one.
    fn close_after_fault(&self) {
        if self.seat.fault().is_some() {
            self.memory.table().close();
        }
    }
}

impl Drop for HostSeat {
    fn drop(&mut self) {
        // A child that was forked has a copy; what it does with it is not the rank's doing.
        if std::process::id() != self.pid {
            return;
        }
        self.memory.table().close();
        let deadline = Deadline(Instant::now() + LEAVE_BUDGET);
        let mut tries = 0;
        while flock(&self.file, FlockOperation::NonBlockingLockExclusive).is_err() {
            if deadline.passed() {
                // The name stays; the next newcomer finds the group closed and takes it.
                return;
            }
            nap(&mut tries, deadline);
        }
        // Under the lock of the file that has the name, so no other can have it meanwhile.
        if is_at(&self.file, &self.path).unwrap_or(false) {
            let _ = fs::remove_file(&self.path);
        }
    }
}
