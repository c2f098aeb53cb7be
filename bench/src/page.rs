//! The page: all figures, with the machine, the day and the commit that they are of.

use std::{fs, process::Command};

use anyhow::{Context as _, Result};
use jiff::Timestamp;

use crate::report::Section;

const HEAD: &str = "\
# Figures

Measured with `hack/bench` and written by it (`hack/bench --markdown docs/figures.md`, as root, on a machine that does nothing
else; about an hour, and `hack/bench start` measures that figure alone). It builds release programs, starts a cluster of
its own on loopback with one node, and takes it down afterwards. Figures with an aim are ratios of things measured in turns in
one run, counts, or amounts of memory, so that they can be compared between machines. They are no tests: a figure that misses
its aim is shown and fails nothing. In production `kibotos_start_seconds` of the operator's `/metrics` and the line `available`
of a daemon's log say where the time of a start goes.
";

/// All of `docs/figures.md`.
pub fn page(sections: &[Section]) -> Result<String> {
    let circumstances = circumstances()?.into_iter().map(|(name, value)| format!("- {name}: {value}"));
    let circumstances = circumstances.collect::<Vec<_>>().join("\n") + "\n";
    let sections = sections.iter().map(Section::markdown);
    Ok([HEAD.to_owned(), circumstances].into_iter().chain(sections).collect::<Vec<_>>().join("\n"))
}

fn circumstances() -> Result<Vec<(&'static str, String)>> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").context("failed to read /proc/cpuinfo")?;
    let models: Vec<&str> = cpuinfo.lines().filter_map(|line| line.strip_prefix("model name")).collect();
    let model = models.first().map_or("?", |line| line.trim_start_matches([' ', '\t', ':']));
    let meminfo = fs::read_to_string("/proc/meminfo").context("failed to read /proc/meminfo")?;
    let total =
        meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse().ok());
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").context("failed to read the kernel's release")?;
    let gib = total.map_or_else(|| "?".to_owned(), |kib: u64| format!("{:.0}", kib_to_gib(kib)));
    let qemu = printed("qemu-system-x86_64", &["--version"])?;
    let version = qemu.split_whitespace().nth(3).unwrap_or("?").to_owned();
    Ok(vec![
        ("machine", format!("{} × {model}, {gib} GiB, Linux {}", models.len(), kernel.trim())),
        ("guests", format!("QEMU {version}, emulated (tcg), 1 vCPU and 256 MiB where nothing else is said")),
        ("date", format!("{}", Timestamp::now().strftime("%Y-%m-%d %H:%M UTC"))),
        ("commit", commit()?),
    ])
}

#[allow(clippy::cast_precision_loss, reason = "an amount of memory, rounded for people")]
fn kib_to_gib(kib: u64) -> f64 {
    kib as f64 / 1024.0 / 1024.0
}

fn commit() -> Result<String> {
    let git = |args: &[&str]| printed("git", &[&["-C", env!("CARGO_MANIFEST_DIR")], args].concat());
    let id = git(&["rev-parse", "--short", "HEAD"])?;
    // The page itself is what this run writes.
    let changed = git(&["status", "--porcelain", "--untracked-files=no", ":/", ":(exclude,top)docs/figures.md"])?;
    Ok(if changed.is_empty() { id } else { format!("{id}, with changes that are not committed") })
}

fn printed(program: &str, args: &[&str]) -> Result<String> {
    let output = Command::new(program).args(args).output().with_context(|| format!("failed to run {program}"))?;
    anyhow::ensure!(output.status.success(), "{program} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
