//! A disk as its guest sees it, beside the same guest under a bare QEMU.

use anyhow::{Context as _, Result, bail, ensure};
use kibo_guest_protocol::{
    HostEvent, ProcessEnd,
    v1::{EnvVar, Process},
};
use kibo_node_daemon::vmm::Qemu;
use serde_json::json;

use crate::{
    bare::{self, Bare, Guest},
    report::{Aim, Section, ratio},
    site::{Site, workspace},
    spread::Spread,
};

const ROUNDS: usize = 12;
/// What QEMU can do with a disk that is open for direct I/O.
const WAYS: [&str; 3] = ["threads", "native", IO_URING];
const IO_URING: &str = "io_uring";
const AIM: Aim = Aim::AtLeast(0.95);
const WORKSPACE: &str = "storage";
const MIB: f64 = 1_048_576.0;

const EXPLAINED: &str = "\
What a program in a guest gets from its Volume: 128 MiB one after the other, past the guest's page cache, and 4 KiB at random \
places of the same file (reads after the guest's cache was emptied, writes with O_DSYNC, so that each is on the host's disk). \
The same in guests under a bare QEMU with an image on the same file system, without cgroup, sandbox and network, with each kind of \
asynchronous I/O that QEMU has. Measured in turns, timed in the guest; the share is that of each round beside the kind that is the \
fastest in most of them.";

/// Something that is done with a file on the Volume.
struct Load {
    name: &'static str,
    /// A shell line.
    line: &'static str,
    bytes: f64,
}

const LOADS: [Load; 4] = [
    Load {
        name: "sequential write",
        line: "dd if=/dev/zero of=/data/file bs=1M count=128 oflag=direct conv=notrunc 2> /dev/null",
        bytes: 128.0 * MIB,
    },
    Load {
        name: "sequential read",
        line: "dd if=/data/file of=/dev/null bs=1M iflag=direct 2> /dev/null",
        bytes: 128.0 * MIB,
    },
    Load {
        name: "4 KiB random write",
        line: r#"perl -e 'sysopen F, "/data/file", 010001 or die; my $b = "x" x 4096; srand 1; for (1..1000) { sysseek F, 4096 * int rand 32768, 0; syswrite(F, $b) == 4096 or die }'"#,
        bytes: 1000.0 * 4096.0,
    },
    Load {
        name: "4 KiB random read",
        line: r#"perl -e 'open F, "<:unix", "/data/file" or die; my $b; srand 2; for (1..4000) { sysseek F, 4096 * int rand 32768, 0; sysread(F, $b, 4096) == 4096 or die }'"#,
        bytes: 4000.0 * 4096.0,
    },
];

const PREPARE: &str = "dd if=/dev/urandom of=/data/file bs=1M count=128 conv=fsync 2> /dev/null";

/// A bare guest, and how its QEMU uses the disk.
struct Other {
    aio: &'static str,
    guest: Guest,
}

pub async fn measure(site: &Site) -> Result<Vec<Section>> {
    let watch = site.watch().await?;
    let volume = json!({ "volume": { "new": { "size": "1Gi" }, "mountPath": "/data" } });
    site.apply(&[workspace(WORKSPACE, volume)]).await?;
    watch.available(&[WORKSPACE.to_owned()]).await?;
    let bare = Bare::new(site)?;
    let mut others = Vec::new();
    for aio in WAYS.into_iter().filter(|aio| *aio != IO_URING || bare.has_io_uring()) {
        let guest = bare.boot(true, |qemu, _| use_aio(qemu, aio)).await?;
        others.push(Other { aio, guest });
    }
    in_workspace(site, PREPARE).await?;
    for other in &mut others {
        in_guest(&mut other.guest, PREPARE).await?;
    }
    let header = ["", "median", "min", "max", "of the best", "aim", ""];
    let mut section = Section::new("Storage", EXPLAINED, header);
    for load in LOADS {
        let rates = in_turns(site, &load, &mut others).await?;
        let [of_others @ .., own] = rates.as_slice() else { bail!("nothing was measured") };
        let show = |rate: f64| format!("{rate:.1} MiB/s");
        for (other, rates) in others.iter().zip(of_others) {
            let name = format!("{}, bare QEMU, aio={}", load.name, other.aio);
            section.row(&name, Spread::of(rates.iter().copied()).cells(show));
        }
        let median = |rates: &&Vec<f64>| Spread::of(rates.iter().copied()).median;
        let best = of_others.iter().max_by(|a, b| median(a).total_cmp(&median(b))).context("none was measured")?;
        let share = Spread::of(own.iter().zip(best).map(|(own, best)| own / best)).median;
        let cells = Spread::of(own.iter().copied()).cells(show).into_iter();
        let cells = cells.chain([ratio(share)]).chain(AIM.cells(share, ratio));
        section.row(&format!("{}, Workspace", load.name), cells);
    }
    Ok(vec![section])
}

/// What each of them reached in each round, the Workspace last. Each round begins with another one, since what comes first finds
/// another disk than what comes last.
async fn in_turns(site: &Site, load: &Load, others: &mut [Other]) -> Result<Vec<Vec<f64>>> {
    let line = timed(load.line);
    let count = others.len() + 1;
    let mut rates = vec![Vec::new(); count];
    for round in 0..ROUNDS {
        for turn in 0..count {
            let at = (round + turn) % count;
            let took = match others.get_mut(at) {
                Some(other) => in_guest(&mut other.guest, &line).await?,
                None => in_workspace(site, &line).await?,
            };
            rates[at].push(load.rate(&took)?);
        }
    }
    Ok(rates)
}

impl Load {
    /// MiB in a second, from the nanoseconds that the guest counted.
    fn rate(&self, nanos: &str) -> Result<f64> {
        let nanos: f64 = nanos.trim().parse().with_context(|| format!("{}: the guest said {nanos:?}", self.name))?;
        ensure!(nanos > 0.0, "{}: it took no time", self.name);
        Ok(self.bytes / MIB / (nanos / 1e9))
    }
}

/// The line with an empty cache, and how long it took.
fn timed(line: &str) -> String {
    format!(
        "sync; echo 3 > /proc/sys/vm/drop_caches; b=$(date +%s%N); {line} || exit 1; e=$(date +%s%N); echo $((e - b))"
    )
}

/// Lets QEMU use the disks that are open for direct I/O in this way.
fn use_aio(qemu: &mut Qemu, aio: &str) -> Result<()> {
    for argument in &mut qemu.arguments {
        let text = argument.to_str().context("an argument of our own")?;
        if text.contains("cache.direct=on") {
            let parts = text
                .split(',')
                .map(|part| if part.starts_with("aio=") { format!("aio={aio}") } else { part.to_owned() });
            *argument = parts.collect::<Vec<_>>().join(",").into();
        }
    }
    Ok(())
}

async fn in_workspace(site: &Site, line: &str) -> Result<String> {
    let mut kibo = site.command(&site.cluster().programs().kibo());
    kibo.args(["-n", crate::site::NAME, "workspace", "exec", WORKSPACE, "--", "sh", "-c", line]);
    let ran = kibo.output().await.context("failed to run kibo")?;
    ensure!(ran.status.success(), "{line}: {}", String::from_utf8_lossy(&ran.stderr));
    Ok(String::from_utf8_lossy(&ran.stdout).into_owned())
}

/// Runs a shell line in a bare guest; what it printed.
async fn in_guest(guest: &mut Guest, line: &str) -> Result<String> {
    let argv = ["/bin/sh", "-c", line].map(str::to_owned).to_vec();
    let path = EnvVar { name: "PATH".to_owned(), value: "/usr/sbin:/usr/bin:/sbin:/bin".to_owned() };
    guest.connection.exec(Process { argv, env: vec![path], ..Process::default() }, false)?;
    let mut said = Vec::new();
    loop {
        match bare::next(&mut guest.connection, &mut guest.stream).await? {
            HostEvent::ExecEnded { end: ProcessEnd::Code(0), .. } => {
                return Ok(String::from_utf8_lossy(&said).into_owned());
            }
            HostEvent::ExecEnded { end, .. } => bail!("{line}: {end:?}: {}", String::from_utf8_lossy(&said)),
            HostEvent::Output { data, .. } => said.extend_from_slice(&data),
            _ => {}
        }
    }
}
