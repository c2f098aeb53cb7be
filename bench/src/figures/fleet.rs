//! What 500 nodes that do nothing cost the operator, and how soon a new leader has them all.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use kibo_e2e::{fleet::Fleet, local::Component, suite::replica::Replica};
use kube::{Client, Config};
use procfs::process::Process;

use super::as_float;
use crate::{
    audit,
    report::{Aim, Section, mib, percent, seconds},
    site::Site,
};

const SIZE: usize = 500;
const CONNECTED: Aim = Aim::AtMost(10.0);
const CPU: Aim = Aim::AtMost(5.0);
const RESIDENT: Aim = Aim::AtMost(150.0);
const WRITES: Aim = Aim::AtMost(1.0);
/// Of which the writes and the CPU are of.
const IDLE: Duration = Duration::from_secs(180);
/// After it every node has reported once, and conditions that go by time have ended.
const SETTLED: Duration = Duration::from_secs(90);
const POLL: Duration = Duration::from_millis(20);
/// As it is without saying.
const LEASE_SECONDS: u64 = 15;
const PATIENCE: Duration = Duration::from_secs(120);

const EXPLAINED: &str = "\
500 nodes in one process: the session, admission, pools and spools of the real daemon, and no virtual machines. Two \
operators; the nodes know both. A change of leader is measured from the election of the new one until it has the sessions of \
all nodes: first in order (SIGTERM), then after a kill. The machine is shared by the operator, the API server, etcd and the 500 \
nodes. CPU, memory and writes are those of the leader over three minutes in which nothing happens; CPU in percent of one core.";

pub async fn measure(site: &Site) -> Result<Vec<Section>> {
    let mut second = Replica::beside(site.cluster(), "second", LEASE_SECONDS)?;
    let (one, two) = (Metrics::of(site.cluster().ports().health)?, Metrics::of(second.health)?);
    let endpoints = [site.cluster().ports().session, second.session].map(|port| format!("https://127.0.0.1:{port}"));
    let fleet = Fleet::begin(site.cluster(), SIZE, &endpoints).await?;
    // The site has a node of its own, which knows the first operator alone.
    one.has_sessions(SIZE + 1).await?;

    ensure!(site.cluster().stop(&Component::Operator).await?, "the leader did not end by itself");
    let ordered = two.time_to_all().await?;
    tokio::time::sleep(SETTLED).await;
    let pid = second.process.id().context("the second operator has ended")?.cast_signed();
    let (audit, before) = (site.audit()?, cpu_seconds(pid)?);
    tokio::time::sleep(IDLE).await;
    let (writes, used) = (audit.writes()?, cpu_seconds(pid)? - before);
    let resident = Process::new(pid)?.status()?.vmrss.context("VmRSS")?;

    site.cluster().spawn(&Component::Operator).await?;
    one.answers().await?;
    second.process.kill().await?;
    let killed = one.time_to_all().await?;
    site.cluster().ready(&Component::Operator).await?;
    fleet.end().await?;

    let own: Vec<_> = writes.iter().filter(|write| write.user == "kibotos-operator").cloned().collect();
    let minutes = IDLE.as_secs_f64() / 60.0;
    let each = |count: f64| count / minutes / as_float(SIZE);
    let mut section = Section::new("A fleet of 500 nodes", EXPLAINED, ["", "measured", "aim", ""]);
    let mut row = |name: &str, measured: f64, aim: Aim, show: fn(f64) -> String| {
        let [aim, met] = aim.cells(measured, show);
        section.row(name, [show(measured), aim, met]);
    };
    row("all sessions, after a leader that ended in order", ordered, CONNECTED, seconds);
    row("all sessions, after a leader that was killed", killed, CONNECTED, seconds);
    row("CPU, idle", used / IDLE.as_secs_f64() * 100.0, CPU, percent);
    row("resident memory", as_float(resident) / 1024.0, RESIDENT, mib);
    let of_nodes = own.iter().filter(|write| write.resource == "nodes/status").count();
    row("writes of Nodes, each node and minute", each(as_float(of_nodes)), WRITES, |each| format!("{each:.2}"));
    for ((_, kind), count) in audit::counts(&own) {
        section.row(&format!("operator: {kind}, in three minutes"), [count.to_string()]);
    }
    Ok(vec![section])
}

fn cpu_seconds(pid: i32) -> Result<f64> {
    let stat = Process::new(pid)?.stat()?;
    Ok(as_float(stat.utime + stat.stime) / as_float(procfs::ticks_per_second()))
}

/// What one operator says of itself.
struct Metrics(Client);

impl Metrics {
    fn of(port: u16) -> Result<Self> {
        Ok(Self(Client::try_from(Config::new(format!("http://127.0.0.1:{port}").parse()?))?))
    }

    /// Nothing while it does not answer, or has no such figure yet.
    async fn value(&self, name: &str) -> Option<f64> {
        let request = http::Request::get("/metrics").body(Vec::new()).ok()?;
        let text = self.0.request_text(request).await.ok()?;
        text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
    }

    async fn until(&self, what: &str, reached: impl AsyncFn() -> bool) -> Result<Instant> {
        let begun = Instant::now();
        while !reached().await {
            if begun.elapsed() > PATIENCE {
                bail!("{what}: not within {PATIENCE:?}");
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(Instant::now())
    }

    async fn answers(&self) -> Result<()> {
        let up = async || {
            self.0.request_text(http::Request::get("/healthz").body(Vec::new()).unwrap_or_default()).await.is_ok()
        };
        self.until("the operator answers", up).await.map(drop)
    }

    async fn has_sessions(&self, count: usize) -> Result<Instant> {
        let all = async || self.value("kibotos_sessions").await.is_some_and(|sessions| sessions >= as_float(count));
        self.until("the operator has all sessions", all).await
    }

    /// Seconds from its election to the sessions of all nodes.
    async fn time_to_all(&self) -> Result<f64> {
        let leads = async || self.value("kibotos_leader_term").await.is_some_and(|term| term > 0.0);
        let elected = self.until("the operator leads", leads).await?;
        Ok(self.has_sessions(SIZE).await?.duration_since(elected).as_secs_f64())
    }
}
