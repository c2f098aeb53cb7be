//! Refusals of the API's rules that programs recognize: the words that people read, in one place.

/// A status is older than what a newer leader has written.
pub const TERM_FELL: &str = "status.term never falls: a newer leader has written this object";

/// A command would take the place of one that is not on record yet.
pub const NOT_ON_RECORD: &str =
    "the previous command with a requestId is not in status.commands yet: try again in a moment";

/// A node that is neither drained nor isolated is not retired.
pub const CANNOT_BE_RETIRED: &str = "only a node that is drained (condition Drained) or whose current incarnation is \
isolated can be retired: drain it and empty it, or isolate it when its host is down";

/// A power request would take the place of one that is not acted upon yet.
pub const POWER_REQUEST_PENDING: &str = "the previous power request is not consumed yet: wait for the condition \
PowerRequestConsumed (only Force may replace a normal stop, and a stop a start that waits)";
