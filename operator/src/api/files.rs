//! `files`: a file or a directory of the guest as a tar stream, out of it or into it.

use kibo_crds::InstanceId;
use kibo_protocol::v1::{self, archive_request, open_stream};

use super::{GuestStream, channels::Carries, exec::is_true, request::Subresource, status::ApiError};

/// Longer than any path that Linux takes.
const LONGEST_PATH: usize = 4096;

/// What the query of a files request says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilesOptions {
    pub path: String,
    pub mode: Mode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Read,
    Write {
        /// The path is a directory, and the entries go into it.
        into_directory: bool,
        /// Files belong to the numeric owners that the stream says; else to root.
        keep_owner: bool,
    },
}

impl GuestStream for FilesOptions {
    fn from_query(query: &str) -> Result<Self, ApiError> {
        let (mut path, mut mode) = (String::new(), String::new());
        let (mut into_directory, mut keep_owner) = (false, false);
        for (key, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*key {
                "path" => path = value.into_owned(),
                "mode" => mode = value.into_owned(),
                "intoDirectory" => into_directory = is_true(&value),
                "keepOwner" => keep_owner = is_true(&value),
                _ => {}
            }
        }
        if !path.starts_with('/') || path.len() > LONGEST_PATH || path.contains('\0') {
            return Err(ApiError::BadRequest("path must be an absolute path in the guest".to_owned()));
        }
        let mode = match mode.as_str() {
            "read" => Mode::Read,
            "write" => Mode::Write { into_directory, keep_owner },
            _ => return Err(ApiError::BadRequest("mode must be read or write".to_owned())),
        };
        Ok(Self { path, mode })
    }

    fn subresource(&self) -> Subresource {
        match self.mode {
            Mode::Read => Subresource::FilesRead,
            Mode::Write { .. } => Subresource::FilesWrite,
        }
    }

    fn kind(&self, instance: InstanceId) -> open_stream::Kind {
        let path = self.path.clone();
        let direction = match self.mode {
            Mode::Read => archive_request::Direction::Read(v1::ReadArchive { path }),
            Mode::Write { into_directory, keep_owner } => {
                archive_request::Direction::Write(v1::WriteArchive { path, into_directory, keep_owner })
            }
        };
        open_stream::Kind::Archive(v1::ArchiveRequest { instance_id: instance.to_string(), direction: Some(direction) })
    }

    fn carries(&self) -> Carries {
        let is_write = matches!(self.mode, Mode::Write { .. });
        Carries {
            input: is_write,
            stdout: !is_write,
            when_leader_changes: "the copy was broken off, copy again",
            ..Carries::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_read_or_written() {
        let read = FilesOptions::from_query("path=%2Fetc%2Fa%20b&mode=read").unwrap();
        assert_eq!(read, FilesOptions { path: "/etc/a b".to_owned(), mode: Mode::Read });
        assert_eq!((read.subresource().verb(), read.carries().input), ("get", false));
        let write = FilesOptions::from_query("path=/tmp&mode=write&intoDirectory=true&keepOwner=true").unwrap();
        assert_eq!(write.mode, Mode::Write { into_directory: true, keep_owner: true });
        assert_eq!((write.subresource().verb(), write.carries().input), ("update", true));
        for query in ["mode=read", "path=etc&mode=read", "path=/etc", "path=/etc&mode=x", "path=/a%00b&mode=read"] {
            let error = FilesOptions::from_query(query).unwrap_err();
            assert_eq!(error.to_status().code, Some(400), "{query}");
        }
    }
}
