//! The life of an Instance as one pure function: where it is, what happened, what follows.

use std::time::Duration;

use kibo_protocol::v1::{EndReason, InstanceState, instance_event::Kind};
use serde::{Deserialize, Serialize};

use super::StopMode;
use crate::config::Accelerator;

/// How long each step may take.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// From the start of the VMM to the agent's hello.
    pub boot: Duration,
    pub configure: Duration,
    /// The one sync of a forced stop.
    pub last_sync: Duration,
    /// Between two tries of a normal stop's sync.
    pub sync_again: Duration,
    /// From the request to end to the VMM's end.
    pub quit: Duration,
}

impl Bounds {
    /// A guest that is emulated takes seconds where another takes a fraction, and minutes where many boot at once.
    pub fn of(accelerator: Accelerator) -> Self {
        let boot = match accelerator {
            Accelerator::Kvm => Duration::from_secs(60),
            Accelerator::Tcg => Duration::from_secs(300),
        };
        Self {
            boot,
            configure: boot,
            last_sync: Duration::from_secs(1),
            sync_again: Duration::from_secs(5),
            quit: Duration::from_secs(5),
        }
    }
}

/// Why an Instance ended, and what to tell people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ending {
    #[serde(with = "reason_name")]
    pub reason: EndReason,
    pub message: String,
}

impl Ending {
    pub fn new(reason: EndReason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }

    fn stopped() -> Self {
        Self::new(EndReason::Stopped, "stopped; the guest had written everything back")
    }

    fn stopped_before_it_ran() -> Self {
        Self::new(EndReason::Stopped, "stopped before the guest was configured; nothing had been written")
    }

    fn forced() -> Self {
        Self::new(EndReason::ForceStopped, "stopped by force")
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Objects are being taken and the VMM started. `end`: it is to end as soon as that is done.
    Starting {
        end: Option<Ending>,
    },
    /// The VMM runs; the agent was not heard yet.
    Booting,
    /// An earlier daemon had configured it; the agent was not heard yet.
    Adopting,
    /// `stop`: a normal stop waits until there is something to stop.
    Configuring {
        stop: bool,
    },
    Running,
    /// A normal stop: everything is being written back. `failed`: the guest could not, and is asked again.
    Syncing {
        failed: bool,
    },
    /// The guest was told to power off, after its writeback.
    PoweringOff,
    /// A forced stop: one short sync before the end.
    LastSync,
    /// The VMM was told to go.
    Ending(Ending),
    /// The VMM is gone; objects and traces are being cleared.
    Releasing(Ending),
}

/// How the guest says that it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GuestCondition {
    Unconfigured,
    Configuring,
    Ready,
    /// It could not be configured.
    Failed(String),
    ShuttingDown,
    /// It belongs to another Instance.
    Foreign(String),
}

/// What happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    Launched,
    /// Nothing runs.
    LaunchFailed(Ending),
    Connected(GuestCondition),
    Configured,
    ConfigureFailed(String),
    Synced {
        error: String,
    },
    ShuttingDown,
    /// The guest is off, or the host told the VMM to go.
    Off {
        by_guest: bool,
        reason: String,
    },
    Panicked,
    /// The process is gone. `explanation` is what it said itself.
    Exited {
        how: String,
        out_of_memory: bool,
        explanation: String,
    },
    /// The step took longer than its bound.
    TimedOut,
    Stop(StopMode),
    /// It is to end at once.
    End(Ending),
    /// Worth an event, whatever the state.
    Noticed(Kind),
}

/// What is to be done, in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    Configure,
    /// The guest is configured: its entrypoint runs, its limits count.
    Available,
    Sync,
    ShutDown,
    /// Keep it, so that a daemon that is killed now knows why the VM ended.
    Remember(Ending),
    /// Ask the VMM to go.
    Quit,
    Kill,
    Tell(Kind),
}

impl State {
    /// What the clients of the guest's streams are told, once it is clear that they end.
    pub fn ending(&self) -> Option<String> {
        match self {
            Self::Syncing { .. } | Self::PoweringOff => Some("the workspace is being stopped".to_owned()),
            Self::LastSync => Some("the workspace is being stopped by force".to_owned()),
            Self::Ending(ending) | Self::Releasing(ending) => {
                Some(format!("the workspace has ended: {}", ending.message))
            }
            Self::Starting { .. } | Self::Booting | Self::Adopting | Self::Configuring { .. } | Self::Running => None,
        }
    }

    /// `stalled`: the guest stands still because its disk cannot be written, which is no fault of its own. It is told to
    /// end all the same where that is wanted.
    pub fn deadline(&self, bounds: &Bounds, stalled: bool) -> Option<Duration> {
        match self {
            Self::Booting | Self::Configuring { .. } if stalled => None,
            Self::Booting => Some(bounds.boot),
            Self::Configuring { .. } => Some(bounds.configure),
            Self::Syncing { failed: true } => Some(bounds.sync_again),
            Self::LastSync => Some(bounds.last_sync),
            Self::Ending(_) => Some(bounds.quit),
            Self::Starting { .. }
            | Self::Adopting
            | Self::Running
            | Self::Syncing { failed: false }
            | Self::PoweringOff
            | Self::Releasing(_) => None,
        }
    }

    /// Whether the time of the deadline counts from now, when `input` led to `next`. What else a guest says must not put
    /// it off: it could evade a forced stop for ever.
    pub fn begins_anew(&self, next: &Self, input: &Input) -> bool {
        let goes_on = matches!(input, Input::Noticed(Kind::Resumed(_)));
        let begins = matches!(self, Self::Booting | Self::Configuring { .. });
        self != next || matches!(input, Input::TimedOut) || (begins && goes_on)
    }

    pub fn reported(&self) -> InstanceState {
        match self {
            Self::Starting { .. } | Self::Booting | Self::Configuring { .. } => InstanceState::Starting,
            Self::Adopting | Self::Running => InstanceState::Running,
            Self::Syncing { .. } | Self::PoweringOff | Self::LastSync | Self::Ending(_) | Self::Releasing(_) => {
                InstanceState::Stopping
            }
        }
    }

    /// What follows. An input that a state does not wait for changes nothing.
    #[must_use]
    pub fn step(self, input: Input) -> (Self, Vec<Action>) {
        match (self, input) {
            // Once it is gone nothing matters any more.
            (Self::Releasing(ending), _) | (Self::Ending(ending), Input::Exited { .. }) => {
                (Self::Releasing(ending), vec![])
            }
            (state, Input::Noticed(kind)) => (state, vec![Action::Tell(kind)]),
            (Self::Ending(ending), Input::TimedOut) => (Self::Ending(ending), vec![Action::Kill]),
            (Self::Ending(ending), _) => (Self::Ending(ending), vec![]),

            (Self::Starting { end }, input) => starting(end, input),

            (state, Input::Exited { how, out_of_memory, explanation }) => {
                let ending = unexpected(&state, &how, out_of_memory, &explanation);
                (Self::Releasing(ending.clone()), vec![Action::Remember(ending)])
            }
            (_, Input::End(ending)) => killed(ending),
            (_, Input::Panicked) => {
                left(Ending::new(EndReason::GuestPanicked, "the guest's kernel panicked; see its console"))
            }
            (state, Input::Off { by_guest, reason }) => off(&state, by_guest, &reason),
            (_, Input::Connected(GuestCondition::Foreign(other))) => {
                killed(Ending::new(EndReason::VmmFailed, format!("the guest says that it belongs to {other}")))
            }
            (state, Input::Connected(condition)) => connected(state, condition),
            (state, Input::Stop(StopMode::Normal)) => stop(state),
            (state, Input::Stop(StopMode::Force)) => force(&state),

            (Self::Configuring { stop: false }, Input::Configured) => (Self::Running, vec![Action::Available]),
            (Self::Configuring { stop: true }, Input::Configured) => {
                (Self::Syncing { failed: false }, vec![Action::Available, Action::Sync])
            }
            (Self::Configuring { .. }, Input::ConfigureFailed(message)) => {
                killed(Ending::new(EndReason::GuestConfigureFailed, message))
            }
            (Self::Booting, Input::TimedOut) => killed(Ending::new(
                EndReason::GuestBootTimeout,
                "the guest's agent did not answer in time after the start of the VM; see its console",
            )),
            (Self::Configuring { .. }, Input::TimedOut) => killed(Ending::new(
                EndReason::GuestBootTimeout,
                "the guest did not finish its configuration in time; see its console",
            )),

            (Self::Syncing { .. }, Input::Synced { error }) if error.is_empty() => {
                (Self::PoweringOff, vec![Action::Remember(Ending::stopped()), Action::ShutDown])
            }
            (Self::Syncing { .. }, Input::Synced { .. }) => (Self::Syncing { failed: true }, vec![]),
            (Self::Syncing { .. }, Input::TimedOut) => (Self::Syncing { failed: false }, vec![Action::Sync]),
            (Self::LastSync, Input::Synced { .. } | Input::TimedOut) => killed(Ending::forced()),

            (state, _) => (state, vec![]),
        }
    }
}

fn starting(end: Option<Ending>, input: Input) -> (State, Vec<Action>) {
    match (end, input) {
        (None, Input::Launched) => (State::Booting, vec![]),
        (Some(end), Input::Launched) => killed(end),
        // What was asked for has happened, and is what whoever asked waits for.
        (Some(ending), Input::LaunchFailed(_)) | (None, Input::LaunchFailed(ending)) => {
            (State::Releasing(ending.clone()), vec![Action::Remember(ending)])
        }
        (_, Input::End(ending)) => (State::Starting { end: Some(ending) }, vec![]),
        (_, Input::Stop(StopMode::Force)) => (State::Starting { end: Some(Ending::forced()) }, vec![]),
        (None, Input::Stop(StopMode::Normal)) => {
            (State::Starting { end: Some(Ending::stopped_before_it_ran()) }, vec![])
        }
        (end, _) => (State::Starting { end }, vec![]),
    }
}

/// The agent was heard, for the first time or after the connection was lost: what it may have missed is said again.
fn connected(state: State, condition: GuestCondition) -> (State, Vec<Action>) {
    use GuestCondition::{Configuring, Failed, Ready, ShuttingDown, Unconfigured};
    match (state, condition) {
        (State::Booting | State::Adopting, Unconfigured) => {
            (State::Configuring { stop: false }, vec![Action::Configure])
        }
        (State::Configuring { stop }, Unconfigured) => (State::Configuring { stop }, vec![Action::Configure]),
        (State::Booting | State::Adopting, Configuring) => (State::Configuring { stop: false }, vec![]),
        (State::Booting | State::Adopting | State::Configuring { stop: false }, Ready) => {
            (State::Running, vec![Action::Available])
        }
        (State::Configuring { stop: true }, Ready) => {
            (State::Syncing { failed: false }, vec![Action::Available, Action::Sync])
        }
        (State::Booting | State::Adopting | State::Configuring { .. }, Failed(message)) => {
            killed(Ending::new(EndReason::GuestConfigureFailed, message))
        }
        (State::Adopting | State::Syncing { .. }, ShuttingDown) => (State::PoweringOff, vec![]),
        // An earlier daemon's stop found no configured guest: there is nothing to write back.
        (State::Syncing { .. }, Unconfigured) => killed(Ending::stopped_before_it_ran()),
        (State::Syncing { .. }, Failed(message)) => killed(Ending::new(EndReason::GuestConfigureFailed, message)),
        (State::Syncing { .. }, _) => (State::Syncing { failed: false }, vec![Action::Sync]),
        (State::PoweringOff, Ready) => (State::PoweringOff, vec![Action::ShutDown]),
        // It had written everything back, and by its own word there is nothing mounted any more: it may never go by
        // itself, and nothing else would end it.
        (State::PoweringOff, Unconfigured | Failed(_)) => killed(Ending::stopped()),
        (State::LastSync, Ready) => (State::LastSync, vec![Action::Sync]),
        (State::Running, Unconfigured) => {
            let message = "the guest was booted anew by itself, and what ran in it is gone";
            killed(Ending::new(EndReason::GuestShutdown, message))
        }
        (state, _) => (state, vec![]),
    }
}

fn stop(state: State) -> (State, Vec<Action>) {
    match state {
        State::Booting => killed(Ending::stopped_before_it_ran()),
        State::Configuring { .. } => (State::Configuring { stop: true }, vec![]),
        State::Adopting | State::Running => (State::Syncing { failed: false }, vec![Action::Sync]),
        state => (state, vec![]),
    }
}

fn force(state: &State) -> (State, Vec<Action>) {
    match state {
        State::Booting | State::Configuring { .. } | State::PoweringOff => killed(Ending::forced()),
        State::LastSync => (State::LastSync, vec![]),
        _ => (State::LastSync, vec![Action::Sync]),
    }
}

fn off(state: &State, by_guest: bool, reason: &str) -> (State, Vec<Action>) {
    let ending = match (state, by_guest) {
        (State::PoweringOff, true) => Ending::stopped(),
        (State::LastSync, _) => Ending::forced(),
        (_, true) => {
            let message = format!("the guest powered itself off or rebooted ({reason})");
            Ending::new(EndReason::GuestShutdown, message)
        }
        (_, false) => Ending::new(EndReason::VmmExited, format!("something on the host ended the VM ({reason})")),
    };
    left(ending)
}

fn unexpected(state: &State, how: &str, out_of_memory: bool, explanation: &str) -> Ending {
    let said = if explanation.is_empty() { String::new() } else { format!(": {explanation}") };
    if out_of_memory {
        let message = "the VM used more memory than its limit and was killed: give the Workspace more memory";
        return Ending::new(EndReason::OutOfMemory, message);
    }
    match state {
        State::LastSync => Ending::forced(),
        State::Booting => Ending::new(EndReason::VmmFailed, format!("the VM ended {how} while it booted{said}")),
        _ => Ending::new(EndReason::VmmExited, format!("the VM ended {how}{said}")),
    }
}

/// The VM is done and only has to go.
fn left(ending: Ending) -> (State, Vec<Action>) {
    (State::Ending(ending.clone()), vec![Action::Remember(ending), Action::Quit])
}

fn killed(ending: Ending) -> (State, Vec<Action>) {
    (State::Ending(ending.clone()), vec![Action::Remember(ending), Action::Kill])
}

/// Reasons by their names in the protocol, so that a file can be read by people and by later versions.
mod reason_name {
    use kibo_protocol::v1::EndReason;
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
    pub fn serialize<S: Serializer>(reason: &EndReason, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(reason.as_str_name())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<EndReason, D::Error> {
        let name = String::deserialize(deserializer)?;
        EndReason::from_str_name(&name).ok_or_else(|| D::Error::custom(format!("unknown end reason {name:?}")))
    }
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
