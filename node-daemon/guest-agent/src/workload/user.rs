//! Who a process runs as: names are looked up in the Workspace's own /etc/passwd and /etc/group.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};

/// Longer files are cut; a name behind that is not found.
const MAX_FILE: u64 = 4 * 1024 * 1024;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    pub home: String,
    /// Empty when there is none.
    pub shell: String,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the workspace has no user {0:?}: add it to /etc/passwd, or give a number")]
    NoUser(String),
    #[error("the workspace has no group {0:?}: add it to /etc/group, or give a number")]
    NoGroup(String),
}

/// `spec` is "name", "uid", "name:group" or "uid:gid"; empty is root.
pub fn resolve(root: &OwnedFd, spec: &str) -> Result<User, Error> {
    find(spec, &read_in(root, "etc/passwd"), &read_in(root, "etc/group"))
}

/// A file of the Workspace, never one that a link leads to outside of it. Unreadable counts as empty.
fn read_in(root: &OwnedFd, path: &str) -> String {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let mut content = Vec::new();
    if let Ok(file) = openat2(root.as_fd(), path, flags, Mode::empty(), resolve) {
        let _ = std::fs::File::from(file).take(MAX_FILE).read_to_end(&mut content);
    }
    String::from_utf8_lossy(&content).into_owned()
}

fn find(spec: &str, passwd: &str, group: &str) -> Result<User, Error> {
    let (who, of) = spec.split_once(':').map_or((spec, None), |(who, of)| (who, Some(of)));
    let who = if who.is_empty() { "0" } else { who };
    let number: Option<u32> = who.parse().ok();
    let entry = passwd
        .lines()
        .filter_map(Account::parse)
        .find(|account| number.map_or(account.name == who, |uid| account.uid == uid));
    let shell = entry.as_ref().map(|account| account.shell.to_owned()).unwrap_or_default();
    let (name, uid, own_gid, home) = match (entry, number) {
        (Some(account), _) => (account.name.to_owned(), account.uid, account.gid, account.home.to_owned()),
        (None, Some(0)) => ("root".to_owned(), 0, 0, "/root".to_owned()),
        (None, Some(uid)) => (uid.to_string(), uid, uid, "/".to_owned()),
        (None, None) => return Err(Error::NoUser(who.to_owned())),
    };
    let gid = of.map_or(Ok(own_gid), |of| gid_of(of, group))?;
    let groups = memberships(&name, group);
    Ok(User { name, uid, gid, groups, home, shell })
}

struct Account<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
    shell: &'a str,
}

impl<'a> Account<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let fields: Vec<_> = line.split(':').collect();
        let [name, _, uid, gid, _, home, rest @ ..] = fields.as_slice() else {
            return None;
        };
        let home = if home.is_empty() { "/" } else { home };
        Some(Self {
            name,
            uid: uid.parse().ok()?,
            gid: gid.parse().ok()?,
            home,
            shell: rest.first().copied().unwrap_or(""),
        })
    }
}

/// Name, number and members of each group.
fn groups(group: &str) -> impl Iterator<Item = (&str, u32, &str)> {
    group.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let (name, _, gid, members) = (fields.next()?, fields.next()?, fields.next()?, fields.next().unwrap_or(""));
        Some((name, gid.parse().ok()?, members))
    })
}

fn gid_of(name: &str, group: &str) -> Result<u32, Error> {
    name.parse()
        .ok()
        .or_else(|| groups(group).find(|(of, ..)| *of == name).map(|(_, gid, _)| gid))
        .ok_or_else(|| Error::NoGroup(name.to_owned()))
}

fn memberships(user: &str, group: &str) -> Vec<u32> {
    groups(group)
        .filter(|(_, _, members)| members.split(',').any(|member| member == user))
        .map(|(_, gid, _)| gid)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\ndev:x:1000:1001:,,,:/home/dev:/bin/bash\nbroken\n";
    const GROUP: &str = "root:x:0:\ndev:x:1001:\ndocker:x:999:ann,dev\n";

    fn user(name: &str, uid: u32, gid: u32, groups: &[u32], home: &str) -> User {
        let shell = match name {
            "root" => "/bin/sh",
            "dev" => "/bin/bash",
            _ => "",
        };
        User {
            name: name.to_owned(),
            uid,
            gid,
            groups: groups.to_vec(),
            home: home.to_owned(),
            shell: shell.to_owned(),
        }
    }

    #[test]
    fn every_form_of_a_user_is_resolved() {
        let cases = [
            ("", Ok(user("root", 0, 0, &[], "/root"))),
            ("dev", Ok(user("dev", 1000, 1001, &[999], "/home/dev"))),
            ("1000", Ok(user("dev", 1000, 1001, &[999], "/home/dev"))),
            ("dev:docker", Ok(user("dev", 1000, 999, &[999], "/home/dev"))),
            ("4711", Ok(user("4711", 4711, 4711, &[], "/"))),
            ("4711:12", Ok(user("4711", 4711, 12, &[], "/"))),
            ("nobody", Err(Error::NoUser("nobody".to_owned()))),
            ("dev:nogroup", Err(Error::NoGroup("nogroup".to_owned()))),
        ];
        for (spec, expected) in cases {
            assert_eq!(find(spec, PASSWD, GROUP), expected, "{spec:?}");
        }
    }

    #[test]
    fn an_image_without_a_passwd_file_still_has_root() {
        let root = User { shell: String::new(), ..user("root", 0, 0, &[], "/root") };
        assert_eq!(find("", "", ""), Ok(root));
    }
}
