//! The outside of the host for tests of the guests' network: a network namespace behind a pair of interfaces, with
//! services that say who asked. It has no way to anywhere else, so whatever answers is of the test.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::Command;
use tokio::task::JoinSet;

use super::wait::eventually;

/// Where cloud providers answer with secrets of the host.
pub const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
/// Greets with the address of whoever connects, and then repeats what it is told.
pub const ECHO: u16 = 7000;
/// Notes what it is sent.
pub const NOTED: u16 = 7001;
const METADATA_PORT: u16 = 80;
const DNS: u16 = 53;
/// Every name has this address.
pub const RESOLVED: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 7);

/// Makes names and addresses unique in this process.
static COUNT: AtomicU32 = AtomicU32::new(0);

/// Every address that the host's end can have, for the certificate of an operator that is to be reached there.
pub fn addresses_of_host() -> String {
    (0..RANGES).map(|range| host_in(range).to_string()).collect::<Vec<_>>().join(",")
}

/// TEST-NET-2 in ranges of four.
const RANGES: u32 = 64;

fn host_in(range: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(Ipv4Addr::new(198, 51, 100, 0)) + range * 4 + 1)
}

/// The namespace; gone when it is dropped, and its interfaces with it.
pub struct Outside {
    name: String,
    /// The host's interface that leads there, and its address.
    pub uplink: String,
    pub host: Ipv4Addr,
    /// The other end, where the services are.
    pub address: Ipv4Addr,
    noted: Arc<Mutex<Vec<(SocketAddr, String)>>>,
    services: JoinSet<()>,
}

impl Outside {
    pub async fn make() -> Result<Self> {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let pid = std::process::id();
        let name = format!("kibo-e2e-{pid}-{number}");
        let uplink = format!("kb{pid}-{number}");
        let host = host_in((pid + number) % RANGES);
        let address = Ipv4Addr::from(u32::from(host) + 1);
        let noted = Arc::default();
        // From here on dropping it takes back what was made.
        let mut outside = Self { name, uplink, host, address, noted, services: JoinSet::new() };
        outside.set_up(number).await?;
        outside.serve()?;
        Ok(outside)
    }

    async fn set_up(&self, number: u32) -> Result<()> {
        let Self { name, uplink, host, address, .. } = self;
        ip(&format!("netns add {name}")).await?;
        ip(&format!("link add {uplink} type veth peer name eth0 netns {name}")).await?;
        ip(&format!("addr add {host}/30 dev {uplink}")).await?;
        ip(&format!("link set {uplink} up")).await?;
        ip(&format!("-n {name} addr add {address}/30 dev eth0")).await?;
        ip(&format!("-n {name} addr add {METADATA}/32 dev lo")).await?;
        for link in ["lo", "eth0"] {
            ip(&format!("-n {name} link set {link} up")).await?;
        }
        // A guest that is not masqueraded could be answered too, and then be seen.
        ip(&format!("-n {name} route add default via {host}")).await?;
        ip(&format!("route add {METADATA}/32 via {address} metric {}", 1000 + number)).await
    }

    fn serve(&mut self) -> Result<()> {
        let namespace = File::open(format!("/run/netns/{}", self.name)).context("failed to open the namespace")?;
        let address = self.address;
        // A socket stays in the namespace in which it was made, whoever uses it.
        let bind = move || -> Result<(Vec<TcpListener>, UdpSocket, UdpSocket)> {
            move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), Some(LinkNameSpaceType::Network))?;
            let listeners = [(address, ECHO), (METADATA, METADATA_PORT)].map(TcpListener::bind);
            let listeners = listeners.into_iter().collect::<std::io::Result<_>>()?;
            Ok((listeners, UdpSocket::bind((address, DNS))?, UdpSocket::bind((address, NOTED))?))
        };
        let bound = std::thread::spawn(bind).join().map_err(|_| anyhow::anyhow!("the binding thread panicked"))?;
        let (listeners, dns, notes) = bound.context("failed to bind the services of the outside")?;
        for listener in listeners {
            listener.set_nonblocking(true)?;
            self.services.spawn(greet(tokio::net::TcpListener::from_std(listener)?));
        }
        for socket in [&dns, &notes] {
            socket.set_nonblocking(true)?;
        }
        self.services.spawn(resolve(tokio::net::UdpSocket::from_std(dns)?));
        self.services.spawn(note(tokio::net::UdpSocket::from_std(notes)?, self.noted.clone()));
        Ok(())
    }

    /// The name of the namespace, for what is to run in it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// From now on nothing goes in or out; what is connected is not told.
    pub async fn cut(&self) -> Result<()> {
        self.nft("add table inet cut").await?;
        for hook in ["input", "output"] {
            self.nft(&format!("add chain inet cut {hook} {{ type filter hook {hook} priority 0; }}")).await?;
            let interface = if hook == "input" { "iifname" } else { "oifname" };
            self.nft(&format!("add rule inet cut {hook} {interface} eth0 drop")).await?;
        }
        Ok(())
    }

    pub async fn mend(&self) -> Result<()> {
        self.nft("delete table inet cut").await
    }

    async fn nft(&self, command: &str) -> Result<()> {
        let mut nft = Command::new("ip");
        nft.args(["netns", "exec", &self.name, "nft", command]);
        let output = nft.output().await.context("failed to run nft")?;
        ensure!(output.status.success(), "nft {command}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// What arrived at [`NOTED`], with who sent it.
    pub fn noted(&self) -> BTreeMap<String, SocketAddr> {
        let noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        noted.iter().map(|(from, text)| (text.clone(), *from)).collect()
    }

    /// Waits until something has arrived at [`NOTED`].
    pub async fn has_noted(&self, text: &str) -> Result<()> {
        eventually(&format!("{text:?} arrives outside"), Duration::from_secs(20), || async {
            Ok(self.noted().contains_key(text).then_some(()))
        })
        .await
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        // The interfaces, addresses and routes of both ends go with the namespace.
        let _ = std::process::Command::new("ip").args(["link", "del", &self.uplink]).status();
        let _ = std::process::Command::new("ip").args(["netns", "del", &self.name]).status();
    }
}

async fn ip(arguments: &str) -> Result<()> {
    let output = Command::new("ip").args(arguments.split(' ')).output().await.context("failed to run ip")?;
    ensure!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

async fn greet(listener: tokio::net::TcpListener) {
    let mut connections = JoinSet::new();
    while let Ok((mut stream, peer)) = listener.accept().await {
        connections.spawn(async move {
            let mut buffer = [0; 1024];
            stream.write_all(format!("hello {}\n", peer.ip()).as_bytes()).await?;
            loop {
                let len = stream.read(&mut buffer).await?;
                if len == 0 {
                    return std::io::Result::Ok(());
                }
                stream.write_all(&buffer[..len]).await?;
            }
        });
    }
}

async fn note(socket: tokio::net::UdpSocket, noted: Arc<Mutex<Vec<(SocketAddr, String)>>>) {
    let mut buffer = [0; 1024];
    while let Ok((len, from)) = socket.recv_from(&mut buffer).await {
        let text = String::from_utf8_lossy(&buffer[..len]).into_owned();
        noted.lock().unwrap_or_else(PoisonError::into_inner).push((from, text));
    }
}

/// Answers every question for an IPv4 address with the same one, and every other with nothing.
async fn resolve(socket: tokio::net::UdpSocket) {
    let mut buffer = [0; 512];
    while let Ok((len, from)) = socket.recv_from(&mut buffer).await {
        if let Some(answer) = answer(&buffer[..len]) {
            let _ = socket.send_to(&answer, from).await;
        }
    }
}

/// The answer to a DNS query with one question.
fn answer(query: &[u8]) -> Option<Vec<u8>> {
    const HEADER: usize = 12;
    let mut end = HEADER;
    while *query.get(end)? != 0 {
        end += usize::from(query[end]) + 1;
    }
    let question = query.get(HEADER..end + 5)?;
    let wants_ipv4 = question[question.len() - 4..] == [0, 1, 0, 1];
    let mut answer = query[..2].to_vec();
    // A response, recursion available; one question; one answer, or none.
    answer.extend([0x81, 0x80, 0, 1, 0, u8::from(wants_ipv4), 0, 0, 0, 0]);
    answer.extend(question);
    if wants_ipv4 {
        // The name of the question, of class IN for a minute.
        answer.extend([0xc0, 0x0c, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
        answer.extend(RESOLVED.octets());
    }
    Some(answer)
}
