//! Telling whether a process still lives, although its number may be another's by now.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

use lowlat_core::TpRank;

/// A process, for as long as the machine runs: its number alone is used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub pid: u32,
    /// When it was started, in the kernel's ticks.
    pub started: u64,
    /// The namespace in which `pid` means it.
    pub namespace: u64,
}

/// What `/proc/PID/stat` says.
struct Stat {
    state: u8,
    num_threads: u64,
    started: u64,
}

fn stat(pid: u32) -> io::Result<Stat> {
    parse(&fs::read(format!("/proc/{pid}/stat"))?)
        .ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat is not as it should be")))
}

fn parse(bytes: &[u8]) -> Option<Stat> {
    // The name stands in brackets and may itself hold brackets and blanks; fields follow the last.
    let end = bytes.iter().rposition(|byte| *byte == b')')?;
    let text = std::str::from_utf8(&bytes[end + 1..]).ok()?;
    let fields: Vec<&str> = text.split_ascii_whitespace().collect();
    // proc(5) counts from 1 and the name is 2: state 3, num_threads 20, starttime 22.
    let number = |field: usize| fields.get(field - 3)?.parse().ok();
    Some(Stat {
        state: *fields.first()?.as_bytes().first()?,
        num_threads: number(20)?,
        started: number(22)?,
    })
}

impl Process {
    /// This process.
    ///
    /// # Errors
    /// When `/proc` does not say.
    pub(crate) fn current() -> io::Result<Self> {
        let pid = std::process::id();
        Ok(Self {
            pid,
            started: stat(pid)?.started,
            namespace: fs::metadata("/proc/self/ns/pid")?.ino(),
        })
    }

    /// Whether it lives, as `judge` sees it. One that was stopped lives; one that has ended and is
    /// not yet waited for does not. In doubt it lives: where it cannot be read. Of another
    /// namespace its number says nothing, and `elsewhere` decides.
    pub(crate) fn lives(&self, judge: &Self, elsewhere: impl FnOnce() -> bool) -> bool {
        if self.namespace != judge.namespace {
            return elsewhere();
        }
        match stat(self.pid) {
            Ok(stat) if stat.started != self.started => false,
            // A leader that ended before its threads is a zombie that lives.
            Ok(stat) => match stat.state {
                b'Z' => 1 < stat.num_threads,
                b'X' | b'x' => false,
                _ => true,
            },
            // ESRCH: it ended while it was read.
            Err(error) => {
                error.kind() != io::ErrorKind::NotFound
                    && error.raw_os_error() != Some(rustix::io::Errno::SRCH.raw_os_error())
            }
        }
    }
}

/// The byte of a rank in its group's file, to be locked for writing.
fn byte_of(rank: TpRank) -> libc::flock {
    // SAFETY: a struct of numbers, of which 0 is a value; some systems have more of them.
    let mut byte: libc::flock = unsafe { std::mem::zeroed() };
    byte.l_type = libc::F_WRLCK as _;
    byte.l_whence = libc::SEEK_SET as _;
    byte.l_start = rank.0.into();
    byte.l_len = 1;
    byte
}

/// Locks the rank's byte for as long as `file` is open: in this process, and in those that it
/// forks. It tells a rank that has ended also where its number says nothing.
///
/// # Errors
/// Those of the lock; it is another's too.
pub(crate) fn hold_byte(file: &File, rank: TpRank) -> io::Result<()> {
    // SAFETY: the descriptor is open, and the struct lives until the call has read it.
    let set = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &byte_of(rank)) };
    if set == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}

/// Whether somebody else holds the rank's byte, through another opening of the file; in doubt yes.
pub(crate) fn is_byte_held(file: &File, rank: TpRank) -> bool {
    let mut byte = byte_of(rank);
    // SAFETY: the descriptor is open, and the struct lives until the call has written it.
    let got = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut byte) };
    got != 0 || byte.l_type != libc::F_UNLCK as libc::c_short
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_name_with_brackets_hides_no_field() {
        let line = b"7 (a) Z (b c) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 99 18 4321 20 21\n";
        let stat = parse(line).unwrap();
        assert_eq!(
            (stat.state, stat.num_threads, stat.started),
            (b'S', 99, 4321)
        );
        assert!(parse(b"7 (a").is_none() && parse(b"").is_none() && parse(b"7 (a) S 1").is_none());
    }

    #[test]
    fn who_has_ended_is_dead_before_it_is_waited_for_and_after() {
        let me = Process::current().unwrap();
        assert!(me.lives(&me, || unreachable!()));
        let mut child = Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let pid = child.id();
        let other = Process {
            pid,
            started: stat(pid).unwrap().started,
            ..me
        };
        assert!(other.lives(&me, || unreachable!()));
        child.kill().unwrap();
        // It is a zombie as soon as the signal has done its work.
        for _ in 0..10_000 {
            if !other.lives(&me, || unreachable!()) {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(fs::metadata(format!("/proc/{pid}/stat")).is_ok());
        assert!(!other.lives(&me, || unreachable!()));
        child.wait().unwrap();
        assert!(!other.lives(&me, || unreachable!()));
    }

    #[test]
    fn a_number_that_is_used_again_is_another_process() {
        let me = Process::current().unwrap();
        let earlier = Process {
            started: me.started - 1,
            ..me
        };
        assert!(!earlier.lives(&me, || unreachable!()));
        let elsewhere = Process {
            namespace: me.namespace + 1,
            ..earlier
        };
        assert!(elsewhere.lives(&me, || true) && !elsewhere.lives(&me, || false));
    }
}
