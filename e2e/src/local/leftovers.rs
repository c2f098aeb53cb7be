//! What a local cluster has left on the host: nothing, after `down`.

use std::fs;
use std::path::{Path, PathBuf};

use super::layout::Layout;
use super::process;

/// Processes and mounts that belong to this state directory; each with what it is.
pub fn leftovers(layout: &Layout) -> Vec<String> {
    let mut left: Vec<String> = process::processes_of(layout.root())
        .into_iter()
        .map(|listed| format!("process {}: {}", listed.id.pid, listed.command))
        .collect();
    left.extend(mounts_below(layout.root()).into_iter().map(|mount| format!("mount {mount}")));
    left
}

/// The cgroups of a node's Instances, in every hierarchy.
pub fn cgroups_of(node: &str) -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let Ok(hierarchies) = fs::read_dir(root) else { return Vec::new() };
    let v1 = hierarchies.flatten().map(|entry| entry.path());
    // With cgroup v2 the root itself is the only hierarchy.
    v1.chain([root.to_owned()])
        .filter_map(|hierarchy| fs::read_dir(hierarchy.join("kibotos").join(node)).ok())
        .flat_map(|entries| entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()))
        .collect()
}

fn mounts_below(root: &Path) -> Vec<String> {
    let Ok(mounts) = fs::read_to_string("/proc/self/mountinfo") else { return Vec::new() };
    let mut below: Vec<String> = mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .filter(|point| Path::new(point).starts_with(root))
        .map(str::to_owned)
        .collect();
    below.sort();
    below
}
