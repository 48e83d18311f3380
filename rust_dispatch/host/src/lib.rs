//! The third transport of the coverage vote: ranks that are processes of one Linux host.
//!
//! Ranks meet under a name: each calls [`join`] with the same name and size and its own number, in
//! any order, and votes on the [`HostSeat`] that it gets. The ballots lie in a file of `/dev/shm`
//! that every rank maps; a rank whose peers have voted already makes no system call, and one that
//! must wait sleeps on a futex. The rules of the vote itself are [`lowlat_core::vote`]'s; this
//! crate owns what that may not know: the clock, the memory, the processes.
//!
//! # Properties
//!
//! Each is held by the test that is named, in `tests/rust/`.
//!
//! 1. A vote ends within its budget, whoever is killed or stopped, and names who is missing, the
//!    same rank on every rank (`host_processes`: `survivors_report_in_time`).
//! 2. A vote costs no system call when every peer has voted (`host_group`:
//!    `a_vote_that_need_not_wait_makes_no_system_call`).
//! 3. A rank that died, was started again or comes late never joins an old epoch: a group's memory
//!    is made for it and never used for another, and nobody enters once it has formed
//!    (`host_group`: `a_rank_that_was_started_again_waits_for_a_fresh_group`).
//! 4. Two ranks with one number, and a group with another size: the second is refused
//!    (`two_ranks_with_one_number`, `a_group_has_one_size`).
//! 5. The name of a living group is refused, that of a dead or closed one is taken over
//!    (`the_name_of_a_living_group`, `the_name_of_a_dead_group`).
//! 6. All ranks enter a group or none does: what became of forming it is settled by one register,
//!    as an epoch is (`a_group_that_does_not_form_in_time_fails_on_every_rank`).
//! 7. Shared memory that is full or not permitted is a refusal, here and not at a later access: the
//!    file's blocks are allocated before it is mapped (`shared_memory_that_is_full`,
//!    `shared_memory_that_is_not_permitted`).
//! 8. The memory goes with the group: who leaves first takes the name away, the last mapping the
//!    memory. Only where every rank is killed does the file stay, until the name is used again
//!    (`a_group_that_ends_leaves_nothing_behind`).
//!
//! What a process that can write the file could do to it, by malice or by truncating it, is not
//! guarded against: it is the user's own (mode 0600, and the owner is checked).
#![cfg(target_os = "linux")]
#![deny(missing_docs)]

mod futex;
mod group;
mod memory;
mod process;

pub use group::{GroupError, GroupSettings, HostSeat, NAME_BYTES, join};
