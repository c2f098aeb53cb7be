//! The disks that are attached, by the serial that the host gave each: their names depend on order and number.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::PathBuf;

/// Device paths by serial.
#[derive(Debug)]
pub struct Disks(BTreeMap<String, PathBuf>);

#[derive(Debug, thiserror::Error)]
#[error("failed to list the block devices: {0}")]
pub struct Error(#[from] io::Error);

impl Disks {
    /// virtio_blk has been loaded: its disks are there when that returns.
    pub fn find() -> Result<Self, Error> {
        let mut disks = BTreeMap::new();
        for entry in fs::read_dir("/sys/block")? {
            let entry = entry?;
            if let Ok(serial) = fs::read_to_string(entry.path().join("serial")) {
                disks.insert(serial.trim_end().to_owned(), PathBuf::from("/dev").join(entry.file_name()));
            }
        }
        Ok(Self(disks))
    }

    /// The device with this serial, or a message that says what is there instead.
    pub fn device(&self, serial: &str) -> Result<&PathBuf, String> {
        self.0.get(serial).ok_or_else(|| {
            let present: Vec<_> = self.0.keys().map(String::as_str).collect();
            let present = if present.is_empty() { "none".to_owned() } else { present.join(", ") };
            format!("no disk with serial {serial:?} is attached to the guest (attached: {present})")
        })
    }
}
