//! Bytes into and out of a guest, beside the bare channel.

use std::{collections::BTreeSet, net::SocketAddr, process::Stdio, time::Instant};

use anyhow::{Context as _, Result, ensure};
use kibo_e2e::local::Component;
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    process::{Child, Command},
};

use super::bare_port::Port;
use crate::{
    cpu,
    report::{Aim, Section, ratio},
    site::{NAME, Site, workspace},
    spread::Spread,
};

const ROUNDS: usize = 3;
pub(super) const MIB: usize = 64;
pub(super) const CHUNK: usize = 64 * 1024;
const AIM: Aim = Aim::AtLeast(0.8);
const WORKSPACE: &str = "streams";
/// Of random bytes, in the guest's page cache.
pub(super) const FILE: &str = "/data/file";

const EXPLAINED: &str = "\
Random bytes (64 MiB) between this host and a file in a guest, beside the same bytes through a second virtio-serial port of a \
bare guest, written and read by `dd`: what the channel can do when nothing frames, checks or forwards anything. Both guests \
have one emulated vCPU, so that all that the agent does for a byte is slow; `cp` into a guest also makes a file there, which the \
bare port does in a line of its own. Out of the guest it is timed from the first byte \
to the last; into the guest from the start to the end of the command, less what the same command takes without data. The aim \
is for cp and port-forward; behind port-forward a small Perl program in the guest reads or writes the bytes.";

const COST_EXPLAINED: &str = "\
CPU seconds that each part used for the same 64 MiB: the emulated guest with its QEMU, and what is between it and the user. \
What two cores can do is theirs together; the bare port has the first line alone, and nobody who encrypts.";

/// What a way into or out of a guest did, in MiB/s.
struct Way {
    name: &'static str,
    /// The least share of the bare port.
    aim: Option<Aim>,
    out: Vec<f64>,
    into: Vec<f64>,
}

impl Way {
    const fn new(name: &'static str, aim: Option<Aim>) -> Self {
        Self { name, aim, out: Vec::new(), into: Vec::new() }
    }
}

pub async fn measure(site: &Site) -> Result<Vec<Section>> {
    let mut raw = Way::new("bare virtio-serial port", None);
    let mut raw_file = Way::new("bare virtio-serial port into a file", None);
    let mut exec = Way::new("kibo workspace exec", None);
    let mut cp = Way::new("kibo workspace cp", Some(AIM));
    let mut forward = Way::new("kibo workspace port-forward", Some(AIM));
    let watch = site.watch().await?;
    let volume = json!({ "volume": { "new": { "size": "1Gi" }, "mountPath": "/data" } });
    site.apply(&[workspace(WORKSPACE, volume)]).await?;
    watch.available(&[WORKSPACE.to_owned()]).await?;
    let kibo = Kibo { site };
    kibo.exec(&["sh", "-c", &make_file()], None).await?;
    let files = Files::make(site)?;
    let servers = Servers::start(&kibo).await?;
    let mut port = Port::open(site).await?;
    let mut costs = Costs::new(site);
    for _ in 0..ROUNDS {
        raw.out.push(port.read_rate().await?);
        exec.out.push(kibo.exec(&["cat", FILE], None).await?.rate()?);
        raw.into.push(port.write_rate().await?);
        raw_file.into.push(port.write_rate_into_file().await?);
        let command = ["sh", "-c", "cat >/dev/null"];
        let empty = kibo.exec(&command, Some(0)).await?;
        let full = kibo.exec(&command, Some(MIB)).await?;
        exec.into.push(mib_per_second(MIB << 20, full.whole - empty.whole));
        let copied = costs.of("cp, out", kibo.run(&["cp", &format!("{WORKSPACE}:{FILE}"), "-"], None)).await?;
        cp.out.push(copied.rate()?);
        let into = format!("{WORKSPACE}:/data/copy");
        let empty = kibo.run(&["cp", &files.empty, &into], None).await?;
        let full = costs.of("cp, in", kibo.run(&["cp", &files.full, &into], None)).await?;
        cp.into.push(mib_per_second(MIB << 20, full.whole - empty.whole));
        forward.out.push(costs.of("port-forward, out", servers.read_rate()).await?);
        forward.into.push(servers.write_rate().await?);
    }
    Ok(vec![section(&raw, &[raw_file, exec, cp, forward]), costs.section()])
}

/// What the parts used for a way's bytes.
struct Costs<'a> {
    site: &'a Site,
    used: Vec<(&'static str, Vec<f64>)>,
}

impl<'a> Costs<'a> {
    const HEADER: [&'static str; 6] = ["", "guest", "node-daemon", "operator", "kube-apiserver", "kibo"];

    const fn new(site: &'a Site) -> Self {
        Self { site, used: Vec::new() }
    }

    async fn of<T>(&mut self, way: &'static str, work: impl Future<Output = Result<T>>) -> Result<T> {
        let before = self.so_far()?;
        let done = work.await?;
        let after = self.so_far()?;
        self.used.push((way, before.into_iter().zip(after).map(|(before, after)| after - before).collect()));
        Ok(done)
    }

    /// In the order of [`Self::HEADER`]. A `kibo` that has ended is a child of this process; one that goes on is none.
    fn so_far(&self) -> Result<Vec<f64>> {
        let machines = self.site.cluster().virtual_machines(NAME);
        let guest = machines.first().context("the guest does not run")?.id.pid;
        let parts = [Component::Node(NAME.to_owned()), Component::Operator, Component::ApiServer];
        let mut seconds = vec![cpu::seconds(guest)?];
        for part in &parts {
            seconds.push(cpu::seconds(self.site.pid(part)?)?);
        }
        seconds.push(cpu::seconds_of_children()?);
        Ok(seconds)
    }

    fn section(self) -> Section {
        let mut section = Section::new("Where the time of a copy goes", COST_EXPLAINED, Self::HEADER);
        let ways: BTreeSet<&'static str> = self.used.iter().map(|(way, _)| *way).collect();
        for way in ways {
            let median = |part: usize| {
                Spread::of(self.used.iter().filter(|(of, _)| *of == way).map(|(_, used)| used[part])).median
            };
            section.row(way, (0..Self::HEADER.len() - 1).map(|part| format!("{:.2} s", median(part))));
        }
        section
    }
}

pub(super) fn make_file() -> String {
    format!("dd if=/dev/urandom of={FILE} bs=1M count={MIB} 2>/dev/null && cat {FILE} >/dev/null")
}

fn section(raw: &Way, ways: &[Way]) -> Section {
    let header = ["", "median", "min", "max", "of the bare port", "aim", ""];
    let mut section = Section::new("Streams", EXPLAINED, header);
    let show = |rate: f64| format!("{rate:.1} MiB/s");
    for (direction, rates) in [("out", (|way| &way.out) as fn(&Way) -> &Vec<f64>), ("in", |way| &way.into)] {
        let bare = Spread::of(rates(raw).iter().copied());
        section.row(&format!("{}, {direction}", raw.name), bare.cells(show));
        for way in ways.iter().filter(|way| !rates(way).is_empty()) {
            let spread = Spread::of(rates(way).iter().copied());
            let share = spread.median / bare.median;
            let aim = way.aim.into_iter().flat_map(|aim| aim.cells(share, ratio));
            let cells = spread.cells(show).into_iter().chain([ratio(share)]).chain(aim);
            section.row(&format!("{}, {direction}", way.name), cells);
        }
    }
    section
}

#[allow(clippy::cast_precision_loss, reason = "bytes, rounded for people")]
pub(super) fn mib_per_second(bytes: usize, seconds: f64) -> f64 {
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
    /// An archive has a little more than the file in it.
    fn rate(&self) -> Result<f64> {
        ensure!(self.printed >= MIB << 20, "{} bytes came instead of {MIB} MiB", self.printed);
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
        let interactive: &[&str] = if stdin.is_some() { &["-i"] } else { &[] };
        self.run(&[&["exec"], interactive, &[WORKSPACE, "--"], command].concat(), stdin).await
    }

    /// A verb of `kibo workspace`.
    fn verb(&self, arguments: &[&str]) -> Command {
        let mut kibo = self.site.command(&self.site.cluster().programs().kibo());
        kibo.args(["-n", crate::site::NAME, "workspace"]).args(arguments);
        kibo
    }

    /// Runs a verb to its end, with so many MiB on its standard input.
    async fn run(&self, arguments: &[&str], stdin: Option<usize>) -> Result<Ran> {
        let mut kibo = self.verb(arguments);
        kibo.stdout(Stdio::piped()).stderr(Stdio::piped());
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
        ensure!(ended.status.success(), "kibo {arguments:?}: {}", String::from_utf8_lossy(&ended.stderr).trim());
        fed?;
        let (printed, printing) = printed?;
        Ok(Ran { printed, printing, whole: begun.elapsed().as_secs_f64() })
    }
}

/// What is copied into the guest.
struct Files {
    full: String,
    empty: String,
}

impl Files {
    fn make(site: &Site) -> Result<Self> {
        let make = |name: &str, content: &[u8]| {
            let path = site.directory(name);
            std::fs::write(&path, content).with_context(|| format!("failed to write {}", path.display()))?;
            path.into_os_string().into_string().ok().context("the temporary directory has a name that is no text")
        };
        Ok(Self { full: make("full", &random(MIB << 20))?, empty: make("empty", &[])? })
    }
}

/// Two servers in the guest, one that sends the file and one that takes what comes, and the ways to their ports.
/// They end when this is dropped.
struct Servers {
    sends: SocketAddr,
    takes: SocketAddr,
    _running: Vec<Child>,
}

const SERVER: &str = r#"
use IO::Socket::INET;
my ($port, $file) = @ARGV;
my $server = IO::Socket::INET->new(Listen => 8, LocalAddr => "127.0.0.1", LocalPort => $port, ReuseAddr => 1) or die $!;
$| = 1;
print "listens\n";
while (my $client = $server->accept) {
    my $data;
    if ($file) {
        open my $from, "<:raw", $file or die $!;
        while (my $length = sysread $from, $data, 65536) {
            for (my $done = 0; $done < $length;) { $done += syswrite $client, $data, $length - $done, $done or die $! }
        }
    } else {
        1 while sysread $client, $data, 65536;
        syswrite $client, "done";
    }
    close $client;
}
"#;

impl Servers {
    async fn start(kibo: &Kibo<'_>) -> Result<Self> {
        let mut running = Vec::new();
        let mut addresses = Vec::new();
        for (port, file) in [("7001", Some(FILE)), ("7002", None)] {
            let mut server = kibo.verb(&["exec", WORKSPACE, "--", "perl", "-e", SERVER, port]);
            server.args(file);
            running.push(first_line(server).await?.0);
            let forward = kibo.verb(&["port-forward", WORKSPACE, &format!(":{port}"), "--address", "127.0.0.1"]);
            let (child, line) = first_line(forward).await?;
            running.push(child);
            let address = line.split_whitespace().nth(2).and_then(|address| address.parse().ok());
            addresses.push(address.with_context(|| format!("port-forward said {line:?}"))?);
        }
        Ok(Self { sends: addresses[0], takes: addresses[1], _running: running })
    }

    async fn read_rate(&self) -> Result<f64> {
        let mut stream = TcpStream::connect(self.sends).await?;
        let (bytes, seconds) = count(&mut stream, usize::MAX).await?;
        ensure!(bytes == MIB << 20, "{bytes} bytes came instead of {MIB} MiB");
        Ok(mib_per_second(bytes, seconds))
    }

    async fn write_rate(&self) -> Result<f64> {
        let empty = self.write(0).await?;
        let full = self.write(MIB).await?;
        Ok(mib_per_second(MIB << 20, full - empty))
    }

    /// Seconds from connecting to the server's word that it has all.
    async fn write(&self, mib: usize) -> Result<f64> {
        let data = random(CHUNK);
        let begun = Instant::now();
        let mut stream = TcpStream::connect(self.takes).await?;
        for _ in 0..(mib << 20) / CHUNK {
            stream.write_all(&data).await?;
        }
        stream.shutdown().await?;
        let mut said = Vec::new();
        stream.read_to_end(&mut said).await?;
        ensure!(said == b"done", "the server in the guest said {:?}", String::from_utf8_lossy(&said));
        Ok(begun.elapsed().as_secs_f64())
    }
}

/// Starts a command that goes on, and waits for its first line.
async fn first_line(mut command: Command) -> Result<(Child, String)> {
    let mut child = command.stdout(Stdio::piped()).spawn().context("failed to run kibo")?;
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().context("piped")?).read_line(&mut line).await?;
    ensure!(!line.is_empty(), "kibo ended before it said anything");
    Ok((child, line))
}

pub(super) fn random(len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    rand::fill(&mut data[..]);
    data
}

/// Reads to the end, or so many bytes; how many came, and how long it took from the first to the last.
pub(super) async fn count(stream: &mut (impl AsyncRead + Unpin), limit: usize) -> Result<(usize, f64)> {
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
