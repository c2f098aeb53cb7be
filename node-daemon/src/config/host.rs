//! Whether the host has what the configuration names.

use std::{fs, io, os::unix::fs::PermissionsExt as _, path::Path};

use super::{Config, Problems};

/// Checks every path of the configuration on this host. The pools' markers are not looked at: a
/// pool may come later, and until then it is reported as not available.
pub fn check_host(config: &Config) -> Result<(), Problems> {
    let mut problems = Problems::default();
    let vmm = &config.vmm;
    executable("vmm.qemu", &vmm.qemu, &mut problems);
    readable("vmm.kernel", &vmm.kernel, &mut problems);
    readable("vmm.initrd", &vmm.initrd, &mut problems);
    directory("vmm.cgroup_root", &vmm.cgroup_root, &mut problems);
    directory("host.proc", &config.host.proc, &mut problems);
    directory("images.dir", &config.images.dir, &mut problems);
    if let Some(network) = &config.network {
        executable("network.nft", &network.nft, &mut problems);
    }
    readable("control.ca_file", &config.control.ca_file, &mut problems);
    for (index, pool) in config.storage_pools.iter().enumerate() {
        directory(&format!("storage_pools[{index}].path"), &pool.path, &mut problems);
    }
    problems.into_result()
}

fn shown(path: &Path) -> String {
    format!("{:?}", path.display().to_string())
}

fn metadata(key: &str, path: &Path, problems: &mut Problems) -> Option<fs::Metadata> {
    match fs::metadata(path) {
        Ok(metadata) => Some(metadata),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            problems.add(key, Some(shown(path)), "must exist, but does not");
            None
        }
        Err(error) => {
            problems.add(key, Some(shown(path)), format!("cannot be looked at: {error}"));
            None
        }
    }
}

fn directory(key: &str, path: &Path, problems: &mut Problems) {
    if metadata(key, path, problems).is_some_and(|metadata| !metadata.is_dir()) {
        problems.add(key, Some(shown(path)), "must be a directory");
    }
}

fn readable(key: &str, path: &Path, problems: &mut Problems) {
    let Some(metadata) = metadata(key, path, problems) else { return };
    if !metadata.is_file() {
        problems.add(key, Some(shown(path)), "must be a file");
    } else if let Err(error) = fs::File::open(path) {
        problems.add(key, Some(shown(path)), format!("cannot be opened: {error}"));
    } else if metadata.len() == 0 {
        problems.add(key, Some(shown(path)), "must not be empty");
    }
}

fn executable(key: &str, path: &Path, problems: &mut Problems) {
    let Some(metadata) = metadata(key, path, problems) else { return };
    if !metadata.is_file() || metadata.permissions().mode() & 0o111 == 0 {
        problems.add(key, Some(shown(path)), "must be an executable file");
    }
}
