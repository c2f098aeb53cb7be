//! What a local cluster has left on the host: nothing, after `down`.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::layout::Layout;
use super::network::networks_of;
use super::node::LocalNode;
use super::process;

/// Processes, virtual machines, cgroups, networks and mounts that belong to this state directory; each with what it is.
pub fn leftovers(layout: &Layout, nodes: &[LocalNode]) -> Vec<String> {
    let mut left: Vec<String> = process::processes_of(layout.root())
        .into_iter()
        .map(|listed| format!("process {}: {}", listed.id.pid, listed.command))
        .collect();
    for node in nodes {
        let machines = process::virtual_machines(&node.id);
        left.extend(machines.iter().map(|it| format!("virtual machine {} (process {})", it.instance, it.id.pid)));
        left.extend(parents_of(&node.id).iter().map(|path| format!("cgroup {}", path.display())));
    }
    left.extend(networks_of(nodes));
    left.extend(mounts_below(layout.root()).into_iter().map(|mount| format!("mount {mount}")));
    left
}

/// The cgroups of a node's Instances, in every hierarchy.
pub fn cgroups_of(node: &str) -> Vec<PathBuf> {
    parents_of(node)
        .into_iter()
        .filter_map(|parent| fs::read_dir(parent).ok())
        .flat_map(|entries| entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()))
        .collect()
}

/// Where the cgroups of a node's Instances are.
fn parents_of(node: &str) -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let Ok(hierarchies) = fs::read_dir(root) else { return Vec::new() };
    // With cgroup v2 the root itself is the only hierarchy.
    let all = hierarchies.flatten().map(|entry| entry.path()).chain([root.to_owned()]);
    let mut parents: Vec<PathBuf> = all
        .filter(|path| !path.is_symlink())
        .map(|hierarchy| hierarchy.join("kibotos").join(node))
        .filter(|path| path.is_dir())
        .collect();
    parents.sort();
    parents
}

/// Lets go on what was frozen of a node's Instances.
pub fn thaw(node: &str) {
    for cgroup in cgroups_of(node) {
        // One of the two, in the one hierarchy that has it.
        for (file, thawed) in [("freezer.state", "THAWED"), ("cgroup.freeze", "0")] {
            let file = cgroup.join(file);
            if file.exists() {
                let _ = fs::write(file, thawed);
            }
        }
    }
}

/// Removes the empty cgroups of a node, and those above that are empty then.
pub async fn remove_cgroups(node: &str) {
    // The kernel lets go of a cgroup a moment after its last process was reaped.
    for _ in 0..50 {
        for path in cgroups_of(node) {
            let _ = fs::remove_dir(path);
        }
        if cgroups_of(node).is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for parent in parents_of(node) {
        // What is not empty belongs to somebody who still runs, and stays.
        let _ = fs::remove_dir(&parent);
        let _ = parent.parent().map(fs::remove_dir);
    }
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
