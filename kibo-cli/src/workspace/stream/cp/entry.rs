//! What an archive from a guest may say. Nothing of it is trusted.

use std::{
    cell::Cell,
    ffi::{OsStr, OsString},
    io::{self, Read},
    path::{Component, Path},
    rc::Rc,
};

/// More than any path, and any extended header that Linux' tools make.
const LONGEST_HEADER: u64 = 1024 * 1024;

/// Where an entry belongs, name by name; nothing in it leads upward or to the root.
pub type Names = Vec<OsString>;

/// What a file, a directory or a link is like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    pub mode: u32,
    pub uid: u64,
    pub gid: u64,
    /// Seconds since 1970.
    pub modified: u64,
}

impl Attributes {
    /// What cannot be read is as if it were not said.
    pub fn of(header: &tar::Header) -> Self {
        Self {
            mode: header.mode().unwrap_or(0o644),
            uid: header.uid().unwrap_or(0),
            gid: header.gid().unwrap_or(0),
            modified: header.mtime().unwrap_or(0),
        }
    }
}

/// The names of a path; none: it would leave the destination.
pub fn names(path: &Path) -> Option<Names> {
    let mut names = Names::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => names.push(name.to_owned()),
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(names)
}

/// How the names of an archive become names below the destination.
#[derive(Debug)]
pub struct Renaming {
    /// The first name of all entries, as the first one has it; none: the archive is of the root directory.
    top: Option<OsString>,
    /// What stands in its place; none: nothing, what is in it comes to the destination itself.
    to: Option<OsString>,
}

impl Renaming {
    /// By the first entry of the archive. `to`: as what its top is to be kept.
    pub fn of(first: &Names, to: impl FnOnce(&OsStr) -> Option<OsString>) -> Self {
        let top = first.first().cloned();
        let to = top.as_deref().and_then(to);
        Self { top, to }
    }

    /// None: the entry is not below the first one.
    pub fn apply(&self, mut names: Names) -> Option<Names> {
        let Some(top) = &self.top else { return Some(names) };
        if names.first() != Some(top) {
            return None;
        }
        match &self.to {
            Some(to) => names[0].clone_from(to),
            None => drop(names.remove(0)),
        }
        Some(names)
    }
}

/// Reads an archive, but no header without end: its names would fill the memory.
pub struct Bounded<R> {
    inner: R,
    left: Rc<Cell<Option<u64>>>,
}

/// Says whether headers or contents are read.
pub struct Bound(Rc<Cell<Option<u64>>>);

impl<R: Read> Bounded<R> {
    pub fn new(inner: R) -> (Self, Bound) {
        let left = Rc::new(Cell::new(None));
        (Self { inner, left: left.clone() }, Bound(left))
    }
}

impl Bound {
    pub fn headers(&self) {
        self.0.set(Some(LONGEST_HEADER));
    }

    pub fn contents(&self) {
        self.0.set(None);
    }
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.inner.read(buffer)?;
        if let Some(left) = self.left.get() {
            let left = left.checked_sub(length as u64);
            let left = left.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a name in it is too long"))?;
            self.left.set(Some(left));
        }
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(path: &str) -> Option<Names> {
        names(Path::new(path))
    }

    #[test]
    fn nothing_leads_upward_or_to_the_root() {
        assert_eq!(of("a/b"), Some(vec!["a".into(), "b".into()]));
        assert_eq!(of("./a//b/."), Some(vec!["a".into(), "b".into()]));
        assert_eq!(of("./"), Some(vec![]));
        for wrong in ["/etc/passwd", "..", "a/../../b", "a/..", "/"] {
            assert_eq!(of(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_top_is_renamed_and_nothing_is_beside_it() {
        let renaming = Renaming::of(&of("etc").unwrap(), |_| Some("copy".into()));
        assert_eq!(renaming.apply(of("etc").unwrap()), of("copy"));
        assert_eq!(renaming.apply(of("etc/hosts").unwrap()), of("copy/hosts"));
        assert_eq!(renaming.apply(of("bin/sh").unwrap()), None);
        assert_eq!(renaming.apply(of("./").unwrap()), None);
        let contents = Renaming::of(&of("etc").unwrap(), |_| None);
        assert_eq!(contents.apply(of("etc").unwrap()), of("./"));
        assert_eq!(contents.apply(of("etc/hosts").unwrap()), of("hosts"));
        let root = Renaming::of(&of("./").unwrap(), |_| Some("x".into()));
        assert_eq!(root.apply(of("etc/hosts").unwrap()), of("etc/hosts"));
    }

    #[test]
    fn a_header_has_an_end() {
        let (mut bounded, bound) = Bounded::new(io::repeat(7));
        let mut buffer = vec![0; 1 << 20];
        bound.headers();
        bounded.read_exact(&mut buffer).unwrap();
        assert_eq!(bounded.read(&mut buffer).unwrap_err().kind(), io::ErrorKind::InvalidData);
        bound.contents();
        bounded.read_exact(&mut buffer).unwrap();
    }
}
