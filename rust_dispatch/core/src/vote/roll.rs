//! Who may enter a group of processes: decided from what stands under the group's name.
//!
//! A group lives once. Its memory is made for it and never made ready for another, so whoever holds
//! an old group's memory can meet nobody in it but that group: an epoch cannot be joined late, only
//! a group that still forms can. What a newcomer finds under the name decides:
//!
//! ```text
//! forming   not every rank has entered. A rank that is not there yet enters; one that died before
//!           the group was formed is replaced, since no epoch has begun. A living one is not.
//! formed    nobody enters. While all live, the name is in use. Where one has died, the others are
//!           about to miss it: the newcomer waits for that, until its own deadline.
//! closed    a rank left or adopted a fault, or the group did not form in time. It votes no more;
//!           its name is free for a fresh group, in memory of its own.
//! dead      nobody in it lives; its name is free too.
//! ```

use super::decision::Decision;
use crate::ids::TpRank;
use crate::reason::Reason;

/// One rank's entry in the roll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Member {
    /// It has not entered.
    Absent,
    /// Its process lives, stopped or not.
    Living,
    /// Its process has ended.
    Dead,
}

/// What stands under a group's name, seen while nobody can change it.
#[derive(Clone, Copy, Debug)]
pub struct Roll<'a> {
    /// Every rank of the group.
    pub members: &'a [Member],
    /// Whether the group formed, or who was missing; `None` while it forms.
    pub settled: Option<Decision>,
    /// Whether a rank left it or adopted a fault.
    pub closed: bool,
}

/// What a newcomer does.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Enter the group that forms.
    Enter,
    /// Give the name to a fresh group and enter that.
    Reclaim,
    /// Look again: the group is about to notice that a rank has died.
    Wait,
    /// Leave it, for this reason.
    Refused(Reason),
}

impl Roll<'_> {
    /// What becomes of `rank` of a group of `tp_size`.
    ///
    /// ```
    /// use lowlat_core::vote::{Admission, Decision, Member::*, Roll};
    /// use lowlat_core::{Reason, TpRank};
    /// let forming = Roll { members: &[Living, Absent], settled: None, closed: false };
    /// assert_eq!(forming.admit(TpRank(1), 2), Admission::Enter);
    /// assert_eq!(forming.admit(TpRank(0), 2), Admission::Refused(Reason::RankTaken));
    /// assert_eq!(forming.admit(TpRank(1), 4), Admission::Refused(Reason::VoteGroup));
    ///
    /// let formed = Roll { settled: Some(Decision::Agreed), ..forming };
    /// let formed = Roll { members: &[Living, Living], ..formed };
    /// assert_eq!(formed.admit(TpRank(1), 2), Admission::Refused(Reason::GroupInUse));
    /// let doomed = Roll { members: &[Living, Dead], ..formed };
    /// assert_eq!(doomed.admit(TpRank(1), 2), Admission::Wait);
    /// let dead = Roll { members: &[Dead, Dead], ..formed };
    /// assert_eq!(dead.admit(TpRank(1), 2), Admission::Reclaim);
    /// assert_eq!(Roll { closed: true, ..formed }.admit(TpRank(1), 2), Admission::Reclaim);
    /// ```
    pub fn admit(&self, rank: TpRank, tp_size: u32) -> Admission {
        let any = |member| self.members.contains(&member);
        if self.closed || !any(Member::Living) {
            return Admission::Reclaim;
        }
        match self.settled {
            None if self.members.len() != tp_size as usize => Admission::Refused(Reason::VoteGroup),
            None => match self.members.get(rank.idx()) {
                Some(Member::Absent | Member::Dead) => Admission::Enter,
                Some(Member::Living) => Admission::Refused(Reason::RankTaken),
                None => Admission::Refused(Reason::VoteGroup),
            },
            Some(Decision::Agreed) if any(Member::Dead) => Admission::Wait,
            Some(Decision::Agreed) => Admission::Refused(Reason::GroupInUse),
            Some(_) => Admission::Reclaim,
        }
    }
}
