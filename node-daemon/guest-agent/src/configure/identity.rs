//! Hostname, and the files in /etc that go with it.

use std::fmt::Write;
use std::fs;
use std::io;
use std::path::Path;

use crate::request::{Network, Request};

/// Marks a file as ours; somebody who removes the line keeps the file as it is.
const HEADER: &str = "# Written at each start by the guest agent; remove this line to keep your own.\n";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("failed to set the hostname to {name:?}: {source}")]
    Hostname { name: String, source: rustix::io::Errno },
    #[error("failed to write {path}: {source}")]
    File { path: &'static str, source: io::Error },
}

pub fn set_hostname(name: &str) -> Result<(), Error> {
    rustix::system::sethostname(name.as_bytes()).map_err(|source| Error::Hostname { name: name.to_owned(), source })
}

/// Runs inside the Workspace's root.
pub fn write_files(request: &Request) -> Result<(), Error> {
    match fs::create_dir("/etc") {
        Err(source) if source.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Error::File { path: "/etc", source });
        }
        _ => {}
    }
    replace("/etc/hostname", &format!("{}\n", request.hostname))?;
    if is_ours(Path::new("/etc/hosts")) {
        replace("/etc/hosts", &hosts(&request.hostname, request.network.as_ref()))?;
    }
    match &request.network {
        Some(network) if is_ours(Path::new("/etc/resolv.conf")) => replace("/etc/resolv.conf", &resolv_conf(network)),
        _ => Ok(()),
    }
}

/// Whether the file is not there (or a link that leads nowhere), empty, or written by an earlier start.
fn is_ours(path: &Path) -> bool {
    fs::read_to_string(path).map_or_else(
        |error| error.kind() == io::ErrorKind::NotFound,
        |content| content.is_empty() || content.starts_with(HEADER),
    )
}

/// Puts a new file in place, never writes through a link.
fn replace(path: &'static str, content: &str) -> Result<(), Error> {
    let error = |source| Error::File { path, source };
    match fs::read_to_string(path) {
        Ok(present) if present == content => return Ok(()),
        _ => {}
    }
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => return Err(error(source)),
        _ => {}
    }
    fs::write(path, content).map_err(error)
}

fn hosts(hostname: &str, network: Option<&Network>) -> String {
    let short = hostname.split('.').next().unwrap_or(hostname);
    let names = if short == hostname { hostname.to_owned() } else { format!("{hostname} {short}") };
    let own = network.map_or_else(|| "127.0.1.1".to_owned(), |network| network.address.to_string());
    format!("{HEADER}127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n{own} {names}\n")
}

fn resolv_conf(network: &Network) -> String {
    let mut content = HEADER.to_owned();
    if !network.dns_search.is_empty() {
        let _ = writeln!(content, "search {}", network.dns_search.join(" "));
    }
    for server in &network.dns_servers {
        let _ = writeln!(content, "nameserver {server}");
    }
    content
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_names_the_guest_with_and_without_its_domain() {
        let content = hosts("demo.example", None);
        assert!(content.ends_with("127.0.1.1 demo.example demo\n"), "{content}");
        assert!(hosts("demo", None).ends_with("127.0.1.1 demo\n"));
    }

    #[test]
    fn a_file_without_our_first_line_is_somebody_elses() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("hosts");
        assert!(is_ours(&path));
        fs::write(&path, hosts("demo", None)).expect("written");
        assert!(is_ours(&path));
        fs::write(&path, "10.0.0.1 mine\n").expect("written");
        assert!(!is_ours(&path));
    }
}
