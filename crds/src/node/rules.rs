//! Rules of a Node that look at its commands.

use crate::rules::{fresh, id, recorded};

/// Commands are recorded one after the other: what replaces one that is not on record yet would make it be forgotten,
/// and a replay of it be taken for a new one.
pub const COMMANDS_ARE_RECORDED: &str = concat!(
    recorded!("enrollment"),
    " && ",
    recorded!("revocation"),
    " && ",
    recorded!("drain"),
    " && ",
    recorded!("isolation"),
    " && ",
    recorded!("slotsRequest"),
    " && ",
    recorded!("labelRequest"),
    " && ",
    recorded!("overcommit"),
    " && ",
    recorded!("adoption"),
);

/// An id names one command for as long as it is on record.
pub const COMMAND_IDS_ARE_FRESH: &str = concat!(
    fresh!("enrollment"),
    " && ",
    fresh!("revocation"),
    " && ",
    fresh!("drain"),
    " && ",
    fresh!("isolation"),
    " && ",
    fresh!("retirement"),
    " && ",
    fresh!("slotsRequest"),
    " && ",
    fresh!("labelRequest"),
    " && ",
    fresh!("overcommit"),
    " && ",
    fresh!("adoption"),
);

macro_rules! ids {
    () => {
        concat!(
            "(",
            id!("enrollment"),
            " + ",
            id!("revocation"),
            " + ",
            id!("drain"),
            " + ",
            id!("isolation"),
            " + ",
            id!("retirement"),
            " + ",
            id!("slotsRequest"),
            " + ",
            id!("labelRequest"),
            " + ",
            id!("overcommit"),
            " + ",
            id!("adoption"),
            ")",
        )
    };
}

/// A rule of the spec alone, so that it holds for a new Node too: of two commands with one id only one could be recorded.
pub const COMMAND_IDS_DIFFER: &str = concat!(ids!(), ".all(one, ", ids!(), ".exists_one(other, other == one))");

/// Nothing is left there, and a drain sees to it that nothing comes; or its life was declared dead and all that it
/// held is released; or it never had one: nobody could drain or isolate it, and nothing ever ran there.
pub const CAN_BE_RETIRED: &str = "\
!has(self.spec.retirement) || has(oldSelf.spec.retirement) || (has(self.status) \
&& ((has(self.spec.drain) && self.spec.drain.requested && has(oldSelf.spec.drain) && oldSelf.spec.drain.requested \
&& has(self.status.conditions) && self.status.conditions.exists(c, c.type == 'Drained' && c.status == 'True')) \
|| (has(self.status.isolation) && self.status.isolation.state == 'Finished' && has(self.status.incarnation) \
&& self.status.isolation.incarnation >= self.status.incarnation) \
|| (has(self.status.admission) && self.status.admission != 'Pending' && !has(self.status.incarnation))))";
