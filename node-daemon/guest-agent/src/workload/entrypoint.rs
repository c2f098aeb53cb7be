//! The entrypoint: started once the guest is configured, started again as its policy says, its output is the log.

use std::io;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::time::{Duration, Instant};

use kibo_guest_protocol::ProcessEnd;
use kibo_guest_protocol::v1::{self, Output, RestartPolicy, StartFailure, StartFailureReason, entrypoint_state::Kind};
use rustix::process::Pid;

use super::pipe::{self, Found};
use super::process::{Streams, spawn};
use super::start_failure;
use crate::configure::Workspace;
use crate::request;

/// What becomes of an entrypoint that ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    Stay,
    RestartAfter(Duration),
}

/// `delay` is the one before the last start, if that was a restart.
pub fn decide(spec: &request::Entrypoint, end: &ProcessEnd, ran_for: Duration, delay: Option<Duration>) -> Next {
    let failed = *end != ProcessEnd::Code(0);
    let again = match spec.policy {
        RestartPolicy::Always => true,
        RestartPolicy::OnFailure => failed,
        RestartPolicy::Never | RestartPolicy::Unspecified => false,
    };
    if !again {
        return Next::Stay;
    }
    let next = match delay {
        Some(delay) if ran_for <= spec.backoff_maximum => (delay * 2).min(spec.backoff_maximum),
        _ => spec.backoff_initial,
    };
    Next::RestartAfter(next)
}

#[derive(Debug)]
enum State {
    Running { pid: Pid, since: Instant },
    Waiting { end: ProcessEnd, delay: Duration, until: Instant },
    Exited { end: ProcessEnd },
}

pub struct Entrypoint {
    spec: request::Entrypoint,
    state: State,
    restarts: u32,
    delay: Option<Duration>,
    stdout: Outlet,
    stderr: Outlet,
}

/// A pipe for all runs: a child of an earlier run that still writes is heard as well.
struct Outlet {
    reader: OwnedFd,
    writer: OwnedFd,
}

impl Outlet {
    fn new() -> io::Result<Self> {
        let (reader, writer) = pipe::readable()?;
        Ok(Self { reader, writer })
    }
}

impl Entrypoint {
    /// Starts it for the first time; a failure of that is a failure to configure.
    pub fn start(spec: request::Entrypoint, workspace: &Workspace, now: Instant) -> Result<Self, StartFailure> {
        let outlet = || Outlet::new().map_err(|error| no_pipe(&error));
        let (stdout, stderr) = (outlet()?, outlet()?);
        let pid = run(&spec, workspace, &stdout, &stderr)?;
        let state = State::Running { pid, since: now };
        Ok(Self { spec, state, restarts: 0, delay: None, stdout, stderr })
    }

    pub const fn spec(&self) -> &request::Entrypoint {
        &self.spec
    }

    /// Takes note of a reaped process. `true` when it was the entrypoint.
    pub fn reaped(&mut self, pid: Pid, end: ProcessEnd, now: Instant) -> bool {
        match self.state {
            State::Running { pid: own, since } if own == pid => {
                self.ended(end, now.duration_since(since), now);
                true
            }
            _ => false,
        }
    }

    /// Starts it again when its time has come. `true` when the state changed.
    pub fn tick(&mut self, workspace: &Workspace, now: Instant) -> bool {
        match self.state {
            State::Waiting { until, .. } if now >= until => {}
            _ => return false,
        }
        self.restarts = self.restarts.saturating_add(1);
        match run(&self.spec, workspace, &self.stdout, &self.stderr) {
            Ok(pid) => self.state = State::Running { pid, since: now },
            Err(failure) => self.ended(ProcessEnd::NotStarted(failure), Duration::ZERO, now),
        }
        true
    }

    pub const fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Waiting { until, .. } => Some(until),
            State::Running { .. } | State::Exited { .. } => None,
        }
    }

    /// The guest goes down: what waits for a restart stays down.
    pub fn stop_restarting(&mut self) {
        self.spec.policy = RestartPolicy::Never;
        if let State::Waiting { end, .. } = &self.state {
            self.state = State::Exited { end: end.clone() };
        }
    }

    pub fn message(&self) -> v1::EntrypointState {
        let kind = match &self.state {
            State::Running { pid, .. } => {
                Kind::Running(v1::EntrypointRunning { pid: pid.as_raw_nonzero().get().cast_unsigned() })
            }
            State::Exited { end } => Kind::Exited(v1::EntrypointExited { status: Some(end.clone().into()) }),
            State::Waiting { end, delay, .. } => Kind::Restarting(v1::EntrypointRestarting {
                status: Some(end.clone().into()),
                delay_millis: u32::try_from(delay.as_millis()).unwrap_or(u32::MAX),
            }),
        };
        v1::EntrypointState { kind: Some(kind), restarts: self.restarts }
    }

    pub const fn outputs(&self) -> [(Output, &OwnedFd); 2] {
        [(Output::Stdout, &self.stdout.reader), (Output::Stderr, &self.stderr.reader)]
    }

    /// Reads what it said, at most `limit` bytes.
    pub fn read(&self, output: Output, limit: usize) -> Option<Vec<u8>> {
        let outlet = if output == Output::Stderr { &self.stderr } else { &self.stdout };
        match pipe::read(&outlet.reader, limit) {
            Found::Data(data) => Some(data),
            // The agent holds a writer itself: there is no end.
            Found::Nothing | Found::End | Found::Broken(_) => None,
        }
    }

    fn ended(&mut self, end: ProcessEnd, ran_for: Duration, now: Instant) {
        self.state = match decide(&self.spec, &end, ran_for, self.delay) {
            Next::Stay => State::Exited { end },
            Next::RestartAfter(delay) => {
                self.delay = Some(delay);
                State::Waiting { end, delay, until: now + delay }
            }
        };
    }
}

fn run(
    spec: &request::Entrypoint,
    workspace: &Workspace,
    stdout: &Outlet,
    stderr: &Outlet,
) -> Result<Pid, StartFailure> {
    let writer = |outlet: &Outlet| outlet.writer.try_clone().map_err(|error| no_pipe(&error));
    let (stdout, stderr) = (writer(stdout)?.into(), writer(stderr)?.into());
    let streams = Streams { stdin: Stdio::null(), stdout, stderr, terminal: None };
    spawn(workspace, &spec.process, &[], streams)
}

fn no_pipe(error: &io::Error) -> StartFailure {
    start_failure(StartFailureReason::Other, format!("failed to make a pipe: {error}"))
}

/// The state of a guest that was given no entrypoint.
pub const fn none() -> v1::EntrypointState {
    v1::EntrypointState { kind: Some(Kind::None(v1::NoEntrypoint {})), restarts: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(10);

    fn spec(policy: RestartPolicy) -> request::Entrypoint {
        request::Entrypoint {
            process: v1::Process::default(),
            policy,
            backoff_initial: Duration::from_secs(1),
            backoff_maximum: Duration::from_secs(5),
        }
    }

    #[test]
    fn the_policy_decides_whether_it_starts_again() {
        let cases = [
            (RestartPolicy::Never, ProcessEnd::Code(1), false),
            (RestartPolicy::OnFailure, ProcessEnd::Code(0), false),
            (RestartPolicy::OnFailure, ProcessEnd::Code(3), true),
            (RestartPolicy::OnFailure, ProcessEnd::Signal(9), true),
            (RestartPolicy::Always, ProcessEnd::Code(0), true),
        ];
        for (policy, end, again) in cases {
            let next = decide(&spec(policy), &end, SHORT, None);
            assert_eq!(next != Next::Stay, again, "{policy:?} after {end:?}");
        }
    }

    #[test]
    fn the_delay_doubles_up_to_its_maximum_and_starts_anew_after_a_long_run() {
        let spec = spec(RestartPolicy::Always);
        let mut delays = Vec::new();
        let mut delay = None;
        for ran_for in [SHORT, SHORT, SHORT, SHORT, SHORT, Duration::from_secs(6), SHORT] {
            let Next::RestartAfter(next) = decide(&spec, &ProcessEnd::Code(0), ran_for, delay) else {
                panic!("it restarts")
            };
            delays.push(next.as_secs());
            delay = Some(next);
        }
        assert_eq!(delays, [1, 2, 4, 5, 5, 1, 2]);
    }
}
