//! Groups of processes: who may join, what a refusal says, and what is left behind.
//!
//! Planted once: with `Roll::admit` letting a rank enter a formed group in a dead one's place,
//! `a_rank_that_was_started_again_waits_for_a_fresh_group` fails; without `fallocate`,
//! `shared_memory_that_is_full` ends by a signal; with a bell that is rung before each look,
//! `a_vote_that_need_not_wait_makes_no_system_call` is killed.

#[path = "support/rank_process.rs"]
mod rank_process;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use lowlat_core::vote::Decision;
use lowlat_core::{Ballot, BallotParts, Epoch, Facts, Reason, Requirements, TpRank, guard};
use lowlat_host::{GroupError, GroupSettings, HostSeat, NAME_BYTES, join};
use rank_process::{PATIENCE, RankProcess, SPEC, be_one_if_asked, ladder, say};
use rustix::process::Signal;

const MS: u64 = 1_000_000;
const LONG_MS: u64 = 20_000;

#[test]
fn rank_process() {
    be_one_if_asked();
}

/// A name that no other test and no other run of the tests has.
fn name(test: &str) -> String {
    format!("test-{}-{test}", std::process::id())
}

fn path(name: &str) -> PathBuf {
    PathBuf::from(format!("/dev/shm/lowlat-{name}"))
}

fn settings(name: &str, rank: u32, tp_size: u32) -> GroupSettings {
    GroupSettings::new(name, TpRank(rank), tp_size, ladder())
}

fn join_all(name: &str, tp_size: u32, first: Epoch) -> Vec<HostSeat> {
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..tp_size)
            .map(|rank| {
                let settings = settings(name, rank, tp_size).starting_at(first);
                scope.spawn(move || join(&settings, LONG_MS * MS).unwrap())
            })
            .collect();
        handles
            .into_iter()
            .map(|handle| handle.join().unwrap())
            .collect()
    })
}

fn vote_all(seats: &mut [HostSeat], digest: impl Fn(u32) -> u64 + Sync) -> Vec<Decision> {
    let digest = &digest;
    std::thread::scope(|scope| {
        let handles: Vec<_> = seats
            .iter_mut()
            .map(|seat| {
                let digest = digest(seat.tp_rank().0);
                scope.spawn(move || seat.agree_step(digest, LONG_MS * MS).unwrap())
            })
            .collect();
        handles
            .into_iter()
            .map(|handle| handle.join().unwrap())
            .collect()
    })
}

fn refused(ended: Result<HostSeat, GroupError>, reason: Reason, words: &str) {
    let error = ended.expect_err("it was let in");
    assert_eq!(error.reason(), Some(reason), "{error}");
    let text = error.to_string();
    assert!(
        text.contains(words) && !text.contains('\n') && text.starts_with('['),
        "{text}"
    );
}

#[test]
fn ranks_agree_differ_and_go_on_across_the_wrap_of_epochs() {
    for tp_size in [1, 2, 5] {
        let name = name("wrap");
        let mut seats = join_all(&name, tp_size, Epoch(u32::MAX - 2));
        for step in 0..6 {
            let ended = vote_all(&mut seats, |_| step);
            assert!(ended.iter().all(|decision| *decision == Decision::Agreed));
            if 1 < tp_size {
                let ended = vote_all(&mut seats, |rank| u64::from(rank == 1));
                let differs = Decision::Differs {
                    rank: TpRank(1),
                    reason: Reason::VoteStep,
                };
                assert!(ended.iter().all(|decision| *decision == differs));
                assert_eq!(
                    seats[0].step_refusal(differs).to_string(),
                    "[308] rank 1 is about to run step 0x0000000000000001; \
                     rank 0 is about to run step 0x0000000000000000"
                );
            }
        }
    }
}

#[test]
fn coverage_is_voted_on_by_value() {
    let facts = Facts {
        isa: "scalar".into(),
        tp_size: 2,
        ..Facts::default()
    };
    let servable = guard(&facts, &Requirements::new("toy", &["scalar"])).unwrap();
    let mut seats = join_all(&name("coverage"), 2, Epoch(1));
    for odd in [false, true] {
        let servable = &servable;
        let ended: Vec<_> = std::thread::scope(|scope| {
            let handles: Vec<_> = seats
                .iter_mut()
                .map(|seat| {
                    scope.spawn(move || {
                        let last = odd && seat.tp_rank() == TpRank(1);
                        let parts = BallotParts {
                            widths: if last { &[6] } else { &[6, 12] },
                            keys_digest: 1,
                            geometry_digest: 2,
                            catalogue_digest: 3,
                            ladder: ladder(),
                        };
                        let ballot = Ballot::new(servable, seat.tp_rank(), parts).unwrap();
                        seat.agree(&ballot, LONG_MS * MS).unwrap()
                    })
                })
                .collect();
            handles.into_iter().map(|h| h.join().unwrap()).collect()
        });
        for (rank, ended) in (0..).zip(ended) {
            match ended {
                Ok(coverage) => {
                    assert!(!odd && coverage.widths() == [6, 12]);
                    assert_eq!(coverage.tp_rank(), TpRank(rank));
                }
                Err(refusal) => assert_eq!(
                    refusal.to_string(),
                    "[301] rank 1 covers widths [6]; rank 0 covers [6, 12]"
                ),
            }
        }
    }
}

#[test]
fn arguments_that_cannot_be_are_refused_in_words() {
    let good = settings("a", 0, 1);
    let long = "x".repeat(NAME_BYTES + 1);
    let cases = [
        (settings("", 0, 1), 1, "group name is \"\""),
        (settings("a/b", 0, 1), 1, "letters, digits"),
        (settings("ä", 0, 1), 1, "letters, digits"),
        (settings("..\0", 0, 1), 1, "letters, digits"),
        (settings(&long, 0, 1), 1, "1 to 64 letters"),
        (settings("a", 0, 0), 1, "tp_size is 0; a vote needs 1 to 64"),
        (settings("a", 0, 65), 1, "tp_size is 65"),
        (
            settings("a", 2, 2),
            1,
            "tp_rank is 2; it must be below tp_size, 2",
        ),
        (good.clone(), 0, "budget is 0 ns; it must be longer than 0"),
        (good, 120_000 * MS, "must be shorter than the engine budget"),
    ];
    for (settings, budget_ns, words) in cases {
        let error = join(&settings, budget_ns).expect_err("it was let in");
        assert_eq!(error.reason(), None);
        let text = error.to_string();
        assert!(text.contains(words) && !text.contains('\n'), "{text}");
    }
}

#[test]
fn a_budget_of_0_or_beyond_the_next_rung_begins_no_vote() {
    let mut seats = join_all(&name("budget"), 2, Epoch(1));
    for budget_ns in [0, 60_000 * MS, u64::MAX] {
        assert!(seats[0].agree_step(1, budget_ns).is_err());
        assert!(seats[0].begin_step(1, budget_ns).is_err());
    }
    // The ranks are still in step.
    let ended = vote_all(&mut seats, |_| 1);
    assert_eq!(ended, [Decision::Agreed; 2]);
}

#[test]
fn two_ranks_with_one_number() {
    let name = name("number");
    let first = RankProcess::spawn(&name, 0, 2, LONG_MS, 100, 0);
    while fs::metadata(path(&name)).map_or(0, |file| file.len()) == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    // It may not have entered yet; then this one is first, and that one is refused.
    let again = join(&settings(&name, 0, 2), 200 * MS);
    match again {
        Err(error) if error.reason() == Some(Reason::RankTaken) => {
            let pid = first.child.id();
            assert!(
                error.to_string().contains(&format!("process {pid} ")),
                "{error}"
            );
            refused(
                join(&settings(&name, 1, 3), MS),
                Reason::VoteGroup,
                "has 2 ranks",
            );
            let _second = join(&settings(&name, 1, 2), LONG_MS * MS).unwrap();
            assert_eq!(first.line().unwrap(), "joined");
        }
        Err(error) => {
            assert_eq!(error.reason(), Some(Reason::RankMissing), "{error}");
            let line = first.line().unwrap();
            assert!(line.starts_with("refused 310 "), "{line}");
        }
        Ok(_) => panic!("the group formed with one rank"),
    }
}

#[test]
fn a_group_has_one_size() {
    let name = name("size");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| join(&settings(&name, 0, 2), LONG_MS * MS));
        let error = join(&settings(&name, 2, 3), 200 * MS).expect_err("it was let in");
        if error.reason() == Some(Reason::VoteGroup) {
            assert!(error.to_string().contains("has 2 ranks"), "{error}");
            let _second = join(&settings(&name, 1, 2), LONG_MS * MS).unwrap();
            first.join().unwrap().unwrap();
        } else {
            // It was there before the other, which then is the odd one.
            assert_eq!(error.reason(), Some(Reason::RankMissing), "{error}");
            refused(first.join().unwrap(), Reason::VoteGroup, "has 3 ranks");
        }
    });
}

#[test]
fn the_name_of_a_living_group() {
    let name = name("living");
    let mut seats = join_all(&name, 2, Epoch(1));
    let own = std::process::id();
    for rank in 0..2 {
        refused(
            join(&settings(&name, rank, 2), LONG_MS * MS),
            Reason::GroupInUse,
            &format!("a living group of 2 has this name, its rank 0 is process {own};"),
        );
    }
    // It was not disturbed, and its name is free as soon as one rank has left.
    assert_eq!(vote_all(&mut seats, |_| 5), [Decision::Agreed; 2]);
    drop(seats.pop());
    let mut fresh = join_all(&name, 2, Epoch(1));
    assert_eq!(vote_all(&mut fresh, |_| 6), [Decision::Agreed; 2]);
    // The rank that is left of the old group meets nobody in the new one.
    let ended = seats[0].agree_step(6, 20 * MS).unwrap();
    assert_eq!(ended, Decision::Missing { rank: TpRank(1) });
    drop(seats);
    assert!(
        path(&name).exists(),
        "an old rank took a fresh group's name away"
    );
    assert_eq!(vote_all(&mut fresh, |_| 7), [Decision::Agreed; 2]);
}

#[test]
fn the_name_of_a_dead_group() {
    let name = name("dead");
    let ranks: Vec<_> = (0..2)
        .map(|rank| RankProcess::spawn(&name, rank, 2, LONG_MS, LONG_MS, 1))
        .collect();
    for rank in &ranks {
        assert_eq!(rank.line().unwrap(), "joined");
    }
    // Stopped first, so that neither can notice that the other dies.
    for rank in &ranks {
        rank.signal(Signal::STOP);
    }
    ranks.into_iter().for_each(RankProcess::end);
    assert!(path(&name).exists());
    let mut seats = join_all(&name, 3, Epoch(1));
    assert_eq!(vote_all(&mut seats, |_| 6), [Decision::Agreed; 3]);
    drop(seats);
    assert!(!path(&name).exists());
}

/// A container that ended and was started again finds the name of its own group. Planted once: a
/// rank of another name space that always counts as living.
#[test]
fn the_name_of_a_group_whose_container_has_ended() {
    let name = name("container");
    let mut command = Command::new("unshare");
    command
        .args(["-rpf", "--mount-proc", "--kill-child"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "rank_process", "--nocapture", "--test-threads=1"])
        .env(SPEC, format!("{name} 0 2 {LONG_MS} {LONG_MS} 1"));
    let may = Command::new("unshare")
        .args(["-rpf", "--mount-proc", "true"])
        .status();
    if !may.is_ok_and(|status| status.success()) {
        println!("skipped: no name space of processes may be made here");
        return;
    }
    let there = RankProcess::of(command);
    let here = RankProcess::spawn(&name, 1, 2, LONG_MS, LONG_MS, 1);
    assert_eq!(there.line().unwrap(), "joined");
    assert_eq!(here.line().unwrap(), "joined");
    // Its number is 1 in there, which lives here too, and is another's.
    let words = "a living group of 2 has this name, its rank 0 is process 1;";
    refused(
        join(&settings(&name, 0, 1), LONG_MS * MS),
        Reason::GroupInUse,
        words,
    );
    here.signal(Signal::STOP);
    there.end();
    here.end();
    // A process that is killed takes a moment to end.
    let began_at = Instant::now();
    let seat = loop {
        match join(&settings(&name, 0, 1), LONG_MS * MS) {
            Ok(seat) => break seat,
            Err(error) => assert!(began_at.elapsed() < PATIENCE, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    drop(seat);
    assert!(!path(&name).exists());
}

#[test]
fn a_rank_that_was_started_again_waits_for_a_fresh_group() {
    let name = name("again");
    let (first, second) = (
        RankProcess::spawn(&name, 0, 2, LONG_MS, 300, 1),
        RankProcess::spawn(&name, 1, 2, LONG_MS, 300, 2),
    );
    assert_eq!(first.line().unwrap(), "joined");
    assert_eq!(second.line().unwrap(), "joined");
    second.end();
    // It meets the old group at first, of which rank 0 lives and has not yet missed anybody.
    let again = RankProcess::spawn(&name, 1, 2, LONG_MS, LONG_MS, 3);
    let line = first.line().unwrap();
    assert!(
        line.starts_with("ended Missing { rank: TpRank(1) }"),
        "{line}"
    );
    let mut seat = join(&settings(&name, 0, 2), LONG_MS * MS).unwrap();
    assert_eq!(again.line().unwrap(), "joined");
    // Both begin at the first step; a rank of the old group was at another.
    for step in 0..3 {
        assert_eq!(seat.agree_step(step, LONG_MS * MS), Ok(Decision::Agreed));
    }
}

#[test]
fn a_group_that_does_not_form_in_time_fails_on_every_rank() {
    let name = name("forming");
    let ended: Vec<_> = std::thread::scope(|scope| {
        let handles: Vec<_> = [0, 2]
            .into_iter()
            .map(|rank| {
                let settings = settings(&name, rank, 3);
                scope.spawn(move || join(&settings, 100 * MS))
            })
            .collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    });
    for ended in ended {
        // A rank that is late on a loaded machine may meet nobody, and misses the first.
        let error = ended.expect_err("it was let in");
        assert_eq!(error.reason(), Some(Reason::RankMissing), "{error}");
        assert!(
            error.to_string().contains("did not join by the deadline"),
            "{error}"
        );
    }
    assert!(!path(&name).exists());
}

#[test]
fn a_group_that_ends_leaves_nothing_behind() {
    let name = name("nothing");
    for _ in 0..20 {
        let seats = join_all(&name, 4, Epoch(1));
        assert!(path(&name).exists());
        drop(seats);
        assert!(!path(&name).exists());
    }
}

#[test]
fn a_file_that_is_no_group_is_left_alone() {
    let name = name("foreign");
    let own = settings(&name, 0, 1);
    for bytes in [vec![7; 3], vec![7; fs_len()]] {
        fs::write(path(&name), &bytes).unwrap();
        refused(
            join(&own, LONG_MS * MS),
            Reason::SharedMemory,
            "remove it or choose another",
        );
        assert_eq!(fs::read(path(&name)).unwrap(), bytes);
        fs::remove_file(path(&name)).unwrap();
    }
    let pipe = Command::new("mkfifo").arg(path(&name)).status().unwrap();
    assert!(pipe.success());
    refused(
        join(&own, LONG_MS * MS),
        Reason::SharedMemory,
        "is no file; remove it",
    );
    fs::remove_file(path(&name)).unwrap();
    let target = std::env::temp_dir().join(&name);
    std::os::unix::fs::symlink(&target, path(&name)).unwrap();
    refused(
        join(&own, LONG_MS * MS),
        Reason::SharedMemory,
        "no shared memory",
    );
    assert!(!target.exists());
    fs::remove_file(path(&name)).unwrap();
}

#[test]
fn a_group_is_its_users_own() {
    let name = name("owner");
    let seats = join_all(&name, 1, Epoch(1));
    let mode = fs::metadata(path(&name)).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // Another user's file, which this process may write all the same.
    if std::os::unix::fs::chown(path(&name), Some(12_345), None).is_err() {
        println!("skipped: only root may give a file to another user");
        return;
    }
    refused(
        join(&settings(&name, 0, 1), LONG_MS * MS),
        Reason::SharedMemory,
        "belongs to user 12345, this is user 0; choose another name",
    );
    drop(seats);
}

/// Bytes of a group's memory, as a group shows them.
fn fs_len() -> usize {
    let name = name("length");
    let seats = join_all(&name, 1, Epoch(1));
    let len = fs::metadata(path(&name)).unwrap().len();
    drop(seats);
    len as usize
}

#[test]
fn memory_of_a_creator_that_died_is_made_again() {
    let name = name("half");
    // It died before it gave the file any blocks, or before it had made the memory ready.
    for len in [0, fs_len()] {
        fs::write(path(&name), vec![0; len]).unwrap();
        let mut seats = join_all(&name, 2, Epoch(1));
        assert_eq!(vote_all(&mut seats, |_| 1), [Decision::Agreed; 2]);
    }
}

#[test]
fn shared_memory_that_is_not_permitted() {
    // Nobody may make a file there, not even root.
    let settings = settings("a", 0, 1).in_folder("/sys/kernel");
    refused(
        join(&settings, LONG_MS * MS),
        Reason::SharedMemory,
        "/sys/kernel/lowlat-a: ",
    );
    let settings = settings_in_no_folder();
    refused(
        join(&settings, LONG_MS * MS),
        Reason::SharedMemory,
        "no shared memory",
    );
}

fn settings_in_no_folder() -> GroupSettings {
    settings("a", 0, 1).in_folder("/no-such-folder")
}

/// In a name space with a file system of its own that is too small; where a user may not have one,
/// there is nothing to see.
#[test]
fn shared_memory_that_is_full() {
    const FOLDER: &str = "LOWLAT_TEST_FULL";
    if let Ok(folder) = std::env::var(FOLDER) {
        let settings = settings("full", 0, 1).in_folder(&folder);
        let error = join(&settings, LONG_MS * MS).expect_err("it was let in");
        say(&format!("{error}"));
        let left = fs::read_dir(folder).unwrap().count();
        return say(&format!("{left} files left"));
    }
    let folder = std::env::temp_dir().join(name("full"));
    fs::create_dir(&folder).unwrap();
    let mut command = Command::new("unshare");
    let script = "mount -t tmpfs -o size=16k none \"$0\" && echo 'rank> mounted' &&
        exec \"$1\" --exact shared_memory_that_is_full --nocapture";
    command
        .args(["-rm", "sh", "-c", script])
        .arg(&folder)
        .arg(std::env::current_exe().unwrap())
        .env(FOLDER, &folder);
    let may = Command::new("unshare").args(["-rm", "true"]).status();
    let process = may
        .is_ok_and(|status| status.success())
        .then(|| RankProcess::of(command));
    // The first line says that the folder is what it should be.
    let mounted = process.filter(|process| process.line().is_some());
    let line = mounted.map(|process| (process.line(), process.line()));
    fs::remove_dir(&folder).unwrap();
    let Some((line, left)) = line else {
        println!("skipped: no file system may be mounted here");
        return;
    };
    let line = line.expect("it ended without a word");
    assert_eq!(left.as_deref(), Some("0 files left"));
    assert!(
        line.starts_with("[118] group full, rank 0: ") && line.contains("shared memory is full"),
        "{line}"
    );
}

/// From here on any system call but writing and ending kills this process.
fn forbid_system_calls() {
    use libc::{BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, sock_filter, sock_fprog};
    use libc::{SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS};
    let line = |code, jt, k| sock_filter {
        code: code as u16,
        jt,
        jf: 0,
        k,
    };
    // The call's number is the first word of what the filter sees.
    let mut filter = [
        line(BPF_LD | BPF_W | BPF_ABS, 0, 0),
        line(BPF_JMP | BPF_JEQ | BPF_K, 2, libc::SYS_write as u32),
        line(BPF_JMP | BPF_JEQ | BPF_K, 1, libc::SYS_exit_group as u32),
        line(BPF_RET | BPF_K, 0, SECCOMP_RET_KILL_PROCESS),
        line(BPF_RET | BPF_K, 0, SECCOMP_RET_ALLOW),
    ];
    let program = sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    rustix::thread::set_no_new_privs(true).unwrap();
    // SAFETY: `program` and the filter that it points to live until the call has copied them.
    let set = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn a_vote_that_need_not_wait_makes_no_system_call() {
    const STEP: &str = "LOWLAT_TEST_STRICT";
    let end = |words: &str| -> ! {
        let written = rustix::io::write(rustix::stdio::stdout(), words.as_bytes());
        std::process::exit(i32::from(written.is_err()));
    };
    match std::env::var(STEP).as_deref() {
        Ok("clock") => {
            forbid_system_calls();
            let began_at = Instant::now();
            for _ in 0..100 {
                std::hint::black_box(began_at.elapsed());
            }
            end("rank> clock\n");
        }
        Ok("vote") => {
            let mut seats = join_all(&name("strict"), 2, Epoch(1));
            fs::remove_file(path(&name("strict"))).unwrap();
            let (first, rest) = seats.split_at_mut(1);
            forbid_system_calls();
            for step in 0..1_000 {
                rest[0].begin_step(step, LONG_MS * MS).unwrap();
                let ended = first[0].agree_step(step, LONG_MS * MS);
                let other = rest[0].poll_step();
                if (ended, other) != (Ok(Decision::Agreed), Some(Decision::Agreed)) {
                    end("rank> did not agree\n");
                }
            }
            end("rank> voted\n");
        }
        Ok("sleep") => {
            forbid_system_calls();
            std::thread::sleep(Duration::from_millis(1));
            end("rank> slept\n");
        }
        _ => {}
    }
    let run = |step| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "a_vote_that_need_not_wait_makes_no_system_call"])
            .args(["--nocapture", "--test-threads=1"])
            .env(STEP, step);
        RankProcess::of(command).line()
    };
    assert_eq!(run("sleep"), None, "the filter lets a system call pass");
    // Where the clock itself is a system call, nothing can be shown.
    if run("clock").as_deref() != Some("clock") {
        println!("skipped: reading the clock is a system call on this machine");
        return;
    }
    assert_eq!(run("vote").as_deref(), Some("voted"));
}
