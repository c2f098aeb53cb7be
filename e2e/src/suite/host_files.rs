//! What a host's kernel tells in /proc, as a test wants it: the daemon is told to read there.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

/// A directory with the files that a daemon reads of its host.
#[derive(Clone, Debug)]
pub struct HostFiles {
    root: PathBuf,
}

impl HostFiles {
    /// Makes them: 1 GiB of memory of which half is available, and no pressure.
    pub fn make(root: PathBuf) -> Result<Self> {
        fs::create_dir_all(root.join("pressure"))?;
        let files = Self { root };
        files.memory(500)?;
        files.write("stat", "cpu  10 0 10 80 0 0 0 0 0 0\n")?;
        for resource in ["cpu", "memory"] {
            let line = |kind: &str| format!("{kind} avg10=0.00 avg60=0.00 avg300=0.00 total=0\n");
            files.write(&format!("pressure/{resource}"), &format!("{}{}", line("some"), line("full")))?;
        }
        Ok(files)
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// So many thousandths of the memory are available.
    pub fn memory(&self, permille: u64) -> Result<()> {
        const TOTAL_KIB: u64 = 1 << 20;
        let available = TOTAL_KIB * permille / 1000;
        self.write("meminfo", &format!("MemTotal: {TOTAL_KIB} kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n"))
    }

    /// At once: a daemon never sees half of it.
    pub fn write(&self, file: &str, text: &str) -> Result<()> {
        let path = self.root.join(file);
        let new = path.with_extension("new");
        fs::write(&new, text)?;
        Ok(fs::rename(new, path)?)
    }
}
