//! Holder records on disk: `holder.<epoch>`, `holder.<epoch>.released`, `holder.<epoch>.refused`.
//!
//! A record appears whole under its name or not at all: it is written to a temporary file, synced
//! and linked. Whether a link was made is told by the temporary file's link count, because the reply
//! of a network file system can get lost.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::Path,
};

use kibo_crds::{Epoch, NodeId};

use super::records::{EpochRecords, Record, Records};
use crate::durable;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Taken,
    Released,
    Refused,
}

const PREFIX: &str = "holder.";

/// Temporary files carry the node's name, since each node clears away only its own.
fn temporary_prefix(node: &NodeId) -> String {
    format!(".record.{node}.")
}

fn name(epoch: Epoch, kind: Kind) -> String {
    match kind {
        Kind::Taken => format!("{PREFIX}{epoch}"),
        Kind::Released => format!("{PREFIX}{epoch}.released"),
        Kind::Refused => format!("{PREFIX}{epoch}.refused"),
    }
}

fn parse_name(name: &str) -> Option<(Epoch, Kind)> {
    let rest = name.strip_prefix(PREFIX)?;
    let (number, kind) = match rest.split_once('.') {
        None => (rest, Kind::Taken),
        Some((number, "released")) => (number, Kind::Released),
        Some((number, "refused")) => (number, Kind::Refused),
        Some(_) => return None,
    };
    // One name for each epoch: two records of one epoch would contradict each other.
    let epoch = Epoch(number.parse().ok()?);
    (epoch.to_string() == number).then_some((epoch, kind))
}

/// A line of JSON and its CRC-32, so that a record that bit-rotted is not taken for another one.
fn encode(record: &Record) -> io::Result<Vec<u8>> {
    let json = serde_json::to_string(record)?;
    let crc = crc32fast::hash(json.as_bytes());
    Ok(format!("{json}\n{crc:08x}\n").into_bytes())
}

fn decode(bytes: &[u8]) -> Option<Record> {
    let text = std::str::from_utf8(bytes).ok()?;
    let (json, crc) = text.trim_end().split_once('\n')?;
    (u32::from_str_radix(crc, 16).ok()? == crc32fast::hash(json.as_bytes())).then_some(())?;
    serde_json::from_str(json).ok()
}

/// Reads every record of an object; a directory that does not exist has none.
pub fn list(dir: &Path) -> io::Result<Records> {
    let mut records = Records::default();
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(records),
        entries => entries?,
    };
    for entry in entries {
        let path = entry?.path();
        let Some((epoch, kind)) = path.file_name().and_then(|name| name.to_str()).and_then(parse_name) else {
            continue;
        };
        let bytes = match fs::read(&path) {
            // Another member removes records that are settled; but a cache that does not know the newest names may say
            // the same.
            Err(error) if error.kind() == io::ErrorKind::NotFound && !is_listed(dir, &path)? => continue,
            bytes => bytes?,
        };
        let record = decode(&bytes).ok_or_else(|| {
            let problem = format!(
                "the holder record {} is damaged: restore it from a backup; or, when you know that no process on any node \
                 writes to this object's image, remove that file",
                path.display()
            );
            io::Error::new(io::ErrorKind::InvalidData, problem)
        })?;
        let at: &mut EpochRecords = records.0.entry(epoch).or_default();
        match kind {
            Kind::Taken => at.taken = Some(record),
            Kind::Released => at.released = Some(record),
            Kind::Refused => at.refused = Some(record),
        }
    }
    Ok(records)
}

fn is_listed(dir: &Path, path: &Path) -> io::Result<bool> {
    for entry in fs::read_dir(dir)? {
        if entry?.path() == path {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Writes one record; `false` when there is one of that name already.
pub fn write(dir: &Path, node: &NodeId, kind: Kind, record: &Record) -> io::Result<bool> {
    let target = dir.join(name(record.grant.epoch, kind));
    let temporary = dir.join(format!("{}{}", temporary_prefix(node), ulid::Ulid::new()));
    let result = link_new(&temporary, &target, &encode(record)?);
    let removed = fs::remove_file(&temporary);
    let linked = result?;
    removed?;
    durable::sync_dir(dir)?;
    Ok(linked)
}

fn link_new(temporary: &Path, target: &Path, content: &[u8]) -> io::Result<bool> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(temporary)?;
    file.write_all(content)?;
    file.sync_all()?;
    let linked = fs::hard_link(temporary, target);
    if file.metadata()?.nlink() == 2 {
        return Ok(true);
    }
    match linked {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
        Ok(()) => Err(io::Error::other("the file system linked a file without counting it")),
    }
}

/// Removes the records of one epoch. That it was taken goes before that it was released: killed in
/// between, the epoch must not look open.
pub fn remove(dir: &Path, epoch: Epoch) -> io::Result<()> {
    for kind in [Kind::Taken, Kind::Released, Kind::Refused] {
        remove_if_there(&dir.join(name(epoch, kind)))?;
        durable::sync_dir(dir)?;
    }
    Ok(())
}

pub fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Removes temporary records of this node that a crash left.
pub fn remove_leftovers(dir: &Path, node: &NodeId) -> io::Result<()> {
    let prefix = temporary_prefix(node);
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(&prefix)) {
            remove_if_there(&path)?;
        }
    }
    Ok(())
}
