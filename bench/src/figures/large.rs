//! A file that is larger than any memory on its way: into a guest and out of it again.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kibo_e2e::local::Component;
use serde_json::json;
use tokio::{process::Command, time::MissedTickBehavior};

use super::streams::{mib_per_second, random};
use crate::{
    cpu,
    report::{Aim, Section, mib},
    site::{NAME, Site, workspace},
};

const WORKSPACE: &str = "large";
const IN_GUEST: &str = "large:/data/file";
const MIB: usize = 1 << 20;
/// Between two looks at the memory.
const LOOK: Duration = Duration::from_millis(200);
/// What a process may hold more than before; what one stream has on its way is a few MiB in each.
const GROWTH: Aim = Aim::AtMost(16.0);

const EXPLAINED: &str = "\
`kibo workspace cp` of a file of 4 GiB (`--large-mib`) into a Volume, and back into another file, which is compared with the first. Resident \
memory before, and the most that was seen while it went on; the agent's is what its kernel says of it afterwards. Growth is \
that of the process since before the first copy; `kibo` itself is started for each copy.";

pub async fn measure(site: &Site, mib_of_file: u32) -> Result<Vec<Section>> {
    let pieces = usize::try_from(mib_of_file)?;
    let watch = site.watch().await?;
    let volume = json!({ "volume": { "new": { "size": "5Gi" }, "mountPath": "/data" } });
    site.apply(&[workspace(WORKSPACE, volume)]).await?;
    watch.available(&[WORKSPACE.to_owned()]).await?;
    let (source, back) = (site.directory("large"), site.directory("large-back"));
    make(&source, pieces)?;
    let before = [resident(site, &operator())?, resident(site, &daemon())?];
    let agent_before = agent(site).await?;
    let into = copy(site, &path(&source)?, IN_GUEST).await?;
    let out = copy(site, IN_GUEST, &path(&back)?).await?;
    let agent_after = agent(site).await?;
    compare(&source, &back, pieces)?;
    for file in [source, back] {
        fs::remove_file(&file).with_context(|| format!("failed to remove {}", file.display()))?;
    }

    let header = ["", "before", "copying in", "copying out", "growth", "aim", ""];
    let mut section = Section::new("A large copy", EXPLAINED, header);
    for (index, name) in ["operator", "node-daemon"].into_iter().enumerate() {
        let most = into.most[index].max(out.most[index]);
        let amounts = [before[index], into.most[index], out.most[index], most - before[index]].map(mib);
        section.row(name, amounts.into_iter().chain(GROWTH.cells(most - before[index], mib)));
    }
    let growth = agent_after - agent_before;
    let amounts = [mib(agent_before), String::new(), mib(agent_after), mib(growth)];
    section.row("agent, at most until then", amounts.into_iter().chain(GROWTH.cells(growth, mib)));
    section.row("kibo", [String::new(), mib(into.most[KIBO]), mib(out.most[KIBO])]);
    section.row("rate", [String::new(), into.rate(pieces), out.rate(pieces)]);
    Ok(vec![section])
}

/// How a copy went.
struct Copied {
    seconds: f64,
    /// The most that operator, daemon and kibo held.
    most: [f64; 3],
}

const KIBO: usize = 2;

impl Copied {
    fn rate(&self, pieces: usize) -> String {
        format!("{:.1} MiB/s", mib_per_second(pieces * MIB, self.seconds))
    }
}

async fn copy(site: &Site, from: &str, to: &str) -> Result<Copied> {
    let begun = Instant::now();
    let mut child = kibo(site, &["cp", from, to]).stderr(Stdio::piped()).spawn().context("failed to run kibo")?;
    let pid = i32::try_from(child.id().context("it was not waited for yet")?)?;
    let mut most = [0.0_f64; 3];
    let mut looks = tokio::time::interval(LOOK);
    looks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let status = loop {
        tokio::select! {
            status = child.wait() => break status?,
            _ = looks.tick() => {
                let now = [resident(site, &operator())?, resident(site, &daemon())?, cpu::resident(pid).unwrap_or_default()];
                most = std::array::from_fn(|index| most[index].max(now[index]));
            }
        }
    };
    let seconds = begun.elapsed().as_secs_f64();
    let mut said = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        tokio::io::AsyncReadExt::read_to_string(&mut stderr, &mut said).await?;
    }
    ensure!(status.success(), "kibo workspace cp {from} {to}: {}", said.trim());
    Ok(Copied { seconds, most })
}

fn kibo(site: &Site, arguments: &[&str]) -> Command {
    let mut kibo = site.command(&site.cluster().programs().kibo());
    kibo.args(["-n", NAME, "workspace"]).args(arguments).stdout(Stdio::null());
    kibo
}

/// The most that the agent has held so far: it is process 1 of what runs in the guest.
async fn agent(site: &Site) -> Result<f64> {
    let mut exec = kibo(site, &["exec", WORKSPACE, "--", "cat", "/proc/1/status"]);
    let output = exec.stdout(Stdio::piped()).stderr(Stdio::piped()).output().await.context("failed to run kibo")?;
    ensure!(output.status.success(), "kibo workspace exec: {}", String::from_utf8_lossy(&output.stderr).trim());
    let text = String::from_utf8_lossy(&output.stdout);
    let kib =
        text.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<f64>().ok());
    Ok(kib.with_context(|| format!("no VmHWM in {text:?}"))? / 1024.0)
}

fn operator() -> Component {
    Component::Operator
}

fn daemon() -> Component {
    Component::Node(NAME.to_owned())
}

fn resident(site: &Site, component: &Component) -> Result<f64> {
    cpu::resident(site.pid(component)?)
}

fn path(path: &Path) -> Result<String> {
    Ok(path.to_str().context("the temporary directory has a name that is no text")?.to_owned())
}

/// No two pieces of it are the same.
fn make(path: &Path, pieces: usize) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let mut file = File::create(path)?;
        let mut piece = random(MIB);
        for number in 0..pieces {
            piece[..size_of::<usize>()].copy_from_slice(&number.to_le_bytes());
            file.write_all(&piece)?;
        }
        Ok(())
    };
    write().with_context(|| format!("failed to write {}", path.display()))
}

fn compare(one: &Path, other: &Path, pieces: usize) -> Result<()> {
    let open = |path: &Path| File::open(path).with_context(|| format!("failed to open {}", path.display()));
    let (mut first, mut second) = (open(one)?, open(other)?);
    ensure!(first.metadata()?.len() == second.metadata()?.len(), "{} has another length", other.display());
    let (mut left, mut right) = (vec![0; MIB], vec![0; MIB]);
    for number in 0..pieces {
        first.read_exact(&mut left)?;
        second.read_exact(&mut right)?;
        ensure!(left == right, "{} differs in MiB {number}", other.display());
    }
    Ok(())
}
