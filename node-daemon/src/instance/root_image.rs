//! Root images: read-only file systems in the images' directory.

use std::path::{Path, PathBuf};

use crate::launch::RootImageName;

/// File systems that the guest can mount as its root; also the suffixes of the files.
const FILE_SYSTEMS: [&str; 2] = ["erofs", "squashfs"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RootImage {
    pub path: PathBuf,
    pub fs_type: &'static str,
}

/// The file of a root image; `None` when this node does not have it.
pub fn find(directory: &Path, name: &RootImageName) -> Option<RootImage> {
    FILE_SYSTEMS.iter().find_map(|fs_type| {
        let path = directory.join(format!("{name}.{fs_type}"));
        path.is_file().then_some(RootImage { path, fs_type })
    })
}
