//! PID 1 of every guest.
//!
//! It comes up generic, waits for one configure message, makes itself the guest of that Instance and then serves its
//! host: exec, log, sync, shutdown. It never trusts that the host is there: connections come and go, the workload stays.
//!
//! Rooms: [`boot`] (from the kernel's start to an open port), [`port`] (bytes in, bytes out), [`agent`] (the loop that
//! ties all together), [`phase`] (what the guest is), [`request`] (what a configure message may say), [`configure`] (carries it out), [`workload`]
//! (processes, their log and the host's streams), [`archive`] (the process that packs and unpacks files), [`power`] (the
//! way down), [`turn`] (who goes first where there is one CPU), [`timer`] (whether the kernel has one).

mod agent;
mod archive;
mod boot;
mod configure;
mod modules;
mod phase;
mod port;
mod power;
mod request;
mod timer;
mod turn;
mod wake;
mod workload;

use std::process::ExitCode;

fn main() -> ExitCode {
    if !rustix::process::getpid().is_init() {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        if let Some(status) = archive::main(&arguments) {
            return status;
        }
        eprintln!("kibo-guest-agent is PID 1 of a guest; there is nothing that it could do here");
        return ExitCode::from(2);
    }
    match boot::run().and_then(|port| Ok(agent::Agent::new(port)?)) {
        Ok(agent) => agent.run(),
        Err(error) => {
            // The end of PID 1 is a kernel panic, which the host sees; the console says why.
            eprintln!("kibo-guest-agent: {error}");
            ExitCode::FAILURE
        }
    }
}
