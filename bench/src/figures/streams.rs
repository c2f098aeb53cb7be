//! Bytes into and out of a guest, beside the bare channel.

use std::{os::fd::OwnedFd, process::Stdio, time::Instant};

use anyhow::{Context as _, Result, bail, ensure};
use command_fds::FdMapping;
use kibo_guest_protocol::{HostEvent, ProcessEnd, v1::Process};
use kibo_node_daemon::vmm::{Qemu, SocketDir};
use serde_json::json;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
};

use crate::{
    bare::{self, Bare, Guest},
    report::{Aim, Section, ratio},
    site::{Site, workspace},
    spread::Spread,
};

const ROUNDS: usize = 3;
const MIB: usize = 64;
const CHUNK: usize = 64 * 1024;
const AIM: Aim = Aim::AtLeast(0.8);
const WORKSPACE: &str = "streams";
/// Of random bytes, in the guest's page cache.
const FILE: &str = "/data/file";

const RAW_SOCKET: &str = "raw.sock";
const RAW_PORT: &str = "raw.0";

const EXPLAINED: &str = "\
Random bytes (64 MiB) between this host and a file in a guest, beside the same bytes through a second virtio-serial port of a \
bare guest, written and read by `dd`: what the channel can do when nothing frames, checks or forwards anything. Both guests \
have one emulated vCPU, so that all that the agent does for a byte is slow. Out of the guest it is timed from the first byte \
to the last; into the guest from the start to the end of the command, less what the same command takes without data.";

/// What a way into or out of a guest did, in MiB/s.
struct Way {
    name: &'static str,
    out: Vec<f64>,
    into: Vec<f64>,
}

pub async fn measure(site: &Site) -> Result<Vec<Section>> {
    let mut raw = Way { name: "bare virtio-serial port", out: Vec::new(), into: Vec::new() };
    let mut exec = Way { name: "kibo workspace exec", out: Vec::new(), into: Vec::new() };
    let watch = site.watch().await?;
    let volume = json!({ "volume": { "new": { "size": "1Gi" }, "mountPath": "/data" } });
    site.apply(&[workspace(WORKSPACE, volume)]).await?;
    watch.available(&[WORKSPACE.to_owned()]).await?;
    let kibo = Kibo { site };
    kibo.exec(&["sh", "-c", &make_file()], None).await?;
    let mut port = Port::open(site).await?;
    for _ in 0..ROUNDS {
        raw.out.push(port.read_rate().await?);
        exec.out.push(kibo.exec(&["cat", FILE], None).await?.rate()?);
        raw.into.push(port.write_rate().await?);
        let command = ["sh", "-c", "cat >/dev/null"];
        let empty = kibo.exec(&command, Some(0)).await?;
        let full = kibo.exec(&command, Some(MIB)).await?;
        exec.into.push(mib_per_second(MIB << 20, full.whole - empty.whole));
    }
    Ok(vec![section(&raw, &[exec])])
}

fn make_file() -> String {
    format!("dd if=/dev/urandom of={FILE} bs=1M count={MIB} 2>/dev/null && cat {FILE} >/dev/null")
}

fn section(raw: &Way, ways: &[Way]) -> Section {
    let header = ["", "median", "min", "max", "of the bare port", "aim", ""];
    let mut section = Section::new("Streams", EXPLAINED, header);
    let show = |rate: f64| format!("{rate:.1} MiB/s");
    for (direction, rates) in [("out", (|way| &way.out) as fn(&Way) -> &Vec<f64>), ("in", |way| &way.into)] {
        let bare = Spread::of(rates(raw).iter().copied());
        section.row(&format!("{}, {direction}", raw.name), bare.cells(show));
        for way in ways {
            let spread = Spread::of(rates(way).iter().copied());
            let share = spread.median / bare.median;
            let cells = spread.cells(show).into_iter().chain([ratio(share)]).chain(AIM.cells(share, ratio));
            section.row(&format!("{}, {direction}", way.name), cells);
        }
    }
    section
}

#[allow(clippy::cast_precision_loss, reason = "bytes, rounded for people")]
fn mib_per_second(bytes: usize, seconds: f64) -> f64 {
    bytes as f64 / f64::from(1 << 20) / seconds
}

/// How a command went.
struct Ran {
    /// Bytes that it printed, and seconds from the first of them to the last.
    printed: usize,
    printing: f64,
    /// Seconds from its start to its end.
    whole: f64,
}

impl Ran {
    fn rate(&self) -> Result<f64> {
        ensure!(self.printed == MIB << 20, "{} bytes came instead of {MIB} MiB", self.printed);
        Ok(mib_per_second(self.printed, self.printing))
    }
}

/// What a user of the cluster has.
struct Kibo<'a> {
    site: &'a Site,
}

impl Kibo<'_> {
    /// Runs a command in the Workspace, with so many MiB on its standard input.
    async fn exec(&self, command: &[&str], stdin: Option<usize>) -> Result<Ran> {
        let mut kibo = self.site.command(&self.site.cluster().programs().kibo());
        kibo.args(["-n", crate::site::NAME, "workspace", "exec"]).args(stdin.map(|_| "-i")).arg(WORKSPACE);
        kibo.arg("--").args(command).stdout(Stdio::piped()).stderr(Stdio::piped());
        let begun = Instant::now();
        let mut child = kibo.stdin(Stdio::piped()).spawn().context("failed to run kibo")?;
        let (mut input, mut output) = (child.stdin.take().context("piped")?, child.stdout.take().context("piped")?);
        let feed = async {
            let data = random(CHUNK);
            for _ in 0..(stdin.unwrap_or(0) << 20) / CHUNK {
                input.write_all(&data).await?;
            }
            drop(input);
            anyhow::Ok(())
        };
        let (fed, printed) = tokio::join!(feed, count(&mut output, usize::MAX));
        let ended = child.wait_with_output().await?;
        ensure!(ended.status.success(), "kibo {command:?}: {}", String::from_utf8_lossy(&ended.stderr).trim());
        fed?;
        let (printed, printing) = printed?;
        Ok(Ran { printed, printing, whole: begun.elapsed().as_secs_f64() })
    }
}

fn random(len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    rand::fill(&mut data[..]);
    data
}

/// Reads to the end, or so many bytes; how many came, and how long it took from the first to the last.
async fn count(stream: &mut (impl AsyncRead + Unpin), limit: usize) -> Result<(usize, f64)> {
    let mut buffer = vec![0; 4 * CHUNK];
    let (mut all, mut first) = (0, None);
    while all < limit {
        let len = stream.read(&mut buffer).await?;
        if len == 0 {
            break;
        }
        first.get_or_insert_with(Instant::now);
        all += len;
    }
    Ok((all, first.map_or(0.0, |first| first.elapsed().as_secs_f64())))
}

/// A second port of a bare guest, which nobody in the guest has open.
struct Port {
    guest: Guest,
    stream: UnixStream,
}

impl Port {
    async fn open(site: &Site) -> Result<Self> {
        let guest = Bare::new(site)?.boot(true, add_port).await?;
        let stream = guest.sockets.connect(RAW_SOCKET).await?;
        let mut port = Self { guest, stream };
        port.run(&make_file()).await?;
        Ok(port)
    }

    async fn read_rate(&mut self) -> Result<f64> {
        let Self { guest, stream } = self;
        let command = with_port(&format!("dd if={FILE} of=/dev/$port bs=64k 2>/dev/null"));
        let (ran, counted) = tokio::join!(run(guest, &command), count(stream, MIB << 20));
        ran?;
        let (bytes, seconds) = counted?;
        Ok(mib_per_second(bytes, seconds))
    }

    async fn write_rate(&mut self) -> Result<f64> {
        let Self { guest, stream } = self;
        let command = with_port(&format!("head -c {} /dev/$port >/dev/null", MIB << 20));
        let begun = Instant::now();
        let feed = async {
            let data = random(CHUNK);
            for _ in 0..(MIB << 20) / CHUNK {
                stream.write_all(&data).await?;
            }
            anyhow::Ok(())
        };
        let (ran, fed) = tokio::join!(run(guest, &command), feed);
        ran?;
        fed?;
        Ok(mib_per_second(MIB << 20, begun.elapsed().as_secs_f64()))
    }

    async fn run(&mut self, command: &str) -> Result<()> {
        run(&mut self.guest, command).await
    }
}

/// A shell line in which `$port` is the port's device.
fn with_port(command: &str) -> String {
    format!("port=$(basename $(dirname $(grep -lx {RAW_PORT} /sys/class/virtio-ports/*/name))); {command}")
}

/// Runs a shell line in a bare guest.
async fn run(guest: &mut Guest, line: &str) -> Result<()> {
    let argv = ["/bin/sh", "-c", line].map(str::to_owned).to_vec();
    let path =
        kibo_guest_protocol::v1::EnvVar { name: "PATH".to_owned(), value: "/usr/sbin:/usr/bin:/sbin:/bin".to_owned() };
    guest.connection.exec(Process { argv, env: vec![path], ..Process::default() }, false)?;
    let mut said = Vec::new();
    loop {
        match bare::next(&mut guest.connection, &mut guest.stream).await? {
            HostEvent::ExecEnded { end: ProcessEnd::Code(0), .. } => return Ok(()),
            HostEvent::ExecEnded { end, .. } => bail!("{line}: {end:?}: {}", String::from_utf8_lossy(&said)),
            HostEvent::Output { data, .. } => said.extend_from_slice(&data),
            _ => {}
        }
    }
}

/// A port beside the agent's.
fn add_port(qemu: &mut Qemu, sockets: &SocketDir) -> Result<()> {
    let child_fd = qemu.files.iter().map(|file| file.child_fd).max().unwrap_or(2) + 1;
    let parent_fd = OwnedFd::from(sockets.listen(RAW_SOCKET)?);
    qemu.files.push(FdMapping { parent_fd, child_fd });
    let arguments = [
        "-chardev".to_owned(),
        format!("socket,id=raw,fd={child_fd},server=on,wait=off"),
        "-device".to_owned(),
        format!("virtserialport,chardev=raw,name={RAW_PORT},id=raw-port"),
    ];
    qemu.arguments.extend(arguments.map(Into::into));
    Ok(())
}
