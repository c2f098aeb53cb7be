//! What a client's wishes are in the guest's words.

use kibo_guest_protocol::v1 as guest;
use kibo_protocol::v1::{self, StreamFailure, archive_request::Direction};

use super::StreamError;
use crate::guest::Open;

pub fn invalid(message: String) -> StreamError {
    StreamError { failure: StreamFailure::Invalid, message }
}

pub fn command(request: v1::ExecRequest) -> Result<Open, StreamError> {
    match (request.shell, request.command.is_empty()) {
        (false, true) => return Err(invalid("the command is empty".to_owned())),
        (true, false) => return Err(invalid("a command and a shell exclude each other: give one of them".to_owned())),
        _ => {}
    }
    let env = request.env.into_iter().map(|(name, value)| guest::EnvVar { name, value }).collect();
    let process = guest::Process { argv: request.command, env, cwd: request.working_dir, user: String::new() };
    let terminal = request.terminal.map(|v1::Terminal { columns, rows, term }| guest::Terminal { columns, rows, term });
    Ok(Open::Exec(guest::Exec {
        stream_id: 0,
        process: Some(process),
        stdin: request.stdin,
        terminal,
        login_shell: request.shell,
    }))
}

pub fn archive(request: v1::ArchiveRequest) -> Result<Open, StreamError> {
    Ok(Open::Archive(match request.direction {
        Some(Direction::Read(v1::ReadArchive { path })) => guest::archive::Direction::Read(guest::ReadArchive { path }),
        Some(Direction::Write(v1::WriteArchive { path, into_directory, keep_owner })) => {
            guest::archive::Direction::Write(guest::WriteArchive { path, into_directory, keep_owner })
        }
        None => return Err(invalid("the archive has no direction".to_owned())),
    }))
}
