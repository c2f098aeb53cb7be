//! `kibo workspace port-forward`: local ports that lead into the guest.

use std::{
    future::pending,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    num::NonZeroU16,
    str::FromStr,
    sync::Arc,
};

use bytes::{BufMut as _, BytesMut};
use clap::Args;
use futures::{StreamExt as _, TryStreamExt as _, future::select_all};
use kibo_crds::{Workspace, workspace::WorkspacePhase};
use kube::{
    ResourceExt as _,
    runtime::{WatchStreamExt as _, watcher},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    signal::unix::{SignalKind, signal},
    sync::Semaphore,
};

use super::{
    channels::{self, Channel, DATA, FromServer, PIECE, Receiver, Sender},
    check_available, phase,
};
use crate::{
    client::Cluster,
    errors::{Error, Kind, Result, Subject},
    output::{print, remark, words::enum_word},
    workspace::target,
};

/// Connections at once on one port; more wait, as with any server that is busy.
const CONNECTIONS: usize = 512;

#[derive(Args, Debug)]
pub struct PortForward {
    /// Name, or id (ws-…) in any namespace
    #[arg(value_name = "WORKSPACE")]
    workspace: String,
    /// The guest's port, and in front of it the local one where it is another; 0 or nothing there picks a free one
    #[arg(required = true, value_name = "[LOCAL:]REMOTE")]
    ports: Vec<Ports>,
    /// Local addresses to listen on
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',', default_value = "localhost")]
    address: Vec<Address>,
}

/// A local port, 0 for any, and the guest's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ports {
    local: u16,
    remote: NonZeroU16,
}

impl FromStr for Ports {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let hint = || format!("must be [LOCAL:]REMOTE with ports up to 65535, such as 8080:80, not {text:?}");
        let (local, remote) = text.split_once(':').map_or((None, text), |(local, remote)| (Some(local), remote));
        let remote: NonZeroU16 = remote.parse().map_err(|_| hint())?;
        let local = match local {
            None => remote.get(),
            Some("") => 0,
            Some(local) => local.parse().map_err(|_| hint())?,
        };
        Ok(Self { local, remote })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Address {
    /// 127.0.0.1, and ::1 where there is one.
    Localhost,
    Ip(IpAddr),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "localhost" {
            return Ok(Self::Localhost);
        }
        text.parse().map(Self::Ip).map_err(|_| "must be an IP address or localhost".to_owned())
    }
}

struct Listener {
    socket: TcpListener,
    local: SocketAddr,
    remote: NonZeroU16,
}

/// What all connections need.
struct Forward {
    cluster: Cluster,
    subject: Subject,
}

/// Forwards until Ctrl-C, or until the Workspace stops.
pub async fn port_forward(cluster: &Cluster, args: PortForward) -> Result<()> {
    let (workspace, subject) = target::fetch(cluster, &args.workspace).await?;
    check_available(&workspace, &subject, "no port of it can be reached")?;
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut listeners = Vec::new();
    for ports in &args.ports {
        for address in &args.address {
            listeners.extend(listen(*address, *ports).await?);
        }
    }
    for listener in &listeners {
        print(&format!("Forwarding from {} -> {}\n", listener.local, listener.remote))?;
    }
    let forward = Arc::new(Forward { cluster: cluster.clone(), subject: subject.clone() });
    let served = listeners.into_iter().map(|listener| Box::pin(forward.clone().serve(listener)));
    tokio::select! {
        (error, ..) = select_all(served) => Err(error.into()),
        error = stopped(cluster, &subject, &workspace) => Err(error),
        _ = interrupt.recv() => Ok(()),
        _ = terminate.recv() => Ok(()),
    }
}

async fn listen(address: Address, ports: Ports) -> Result<Vec<Listener>> {
    let ip = match address {
        Address::Localhost => Ipv4Addr::LOCALHOST.into(),
        Address::Ip(ip) => ip,
    };
    let first = bind(SocketAddr::new(ip, ports.local), ports.remote).await.map_err(|error| {
        let kind = match error.kind() {
            std::io::ErrorKind::PermissionDenied => Kind::NotPermitted,
            std::io::ErrorKind::AddrInUse | std::io::ErrorKind::AddrNotAvailable => Kind::FailedPrecondition,
            _ => Kind::Other,
        };
        let local = SocketAddr::new(ip, ports.local);
        Error::new(kind, format!("cannot listen on {local}: {error}"))
            .next(format!("let a free port be picked: :{}", ports.remote))
    })?;
    let mut listeners = vec![first];
    if address == Address::Localhost {
        // The same port; a host without IPv6 does without.
        let second = SocketAddr::new(Ipv6Addr::LOCALHOST.into(), listeners[0].local.port());
        listeners.extend(bind(second, ports.remote).await.ok());
    }
    Ok(listeners)
}

async fn bind(address: SocketAddr, remote: NonZeroU16) -> std::io::Result<Listener> {
    let socket = TcpListener::bind(address).await?;
    let local = socket.local_addr()?;
    Ok(Listener { socket, local, remote })
}

impl Forward {
    /// Takes connections until the socket fails; each goes on by itself.
    async fn serve(self: Arc<Self>, listener: Listener) -> std::io::Error {
        let free = Arc::new(Semaphore::new(CONNECTIONS));
        loop {
            // Nothing closes the semaphore.
            let room = free.clone().acquire_owned().await;
            let (socket, _) = match listener.socket.accept().await {
                Ok(accepted) => accepted,
                Err(error) => return error,
            };
            let forward = self.clone();
            tokio::spawn(async move {
                forward.connection(socket, listener.remote).await;
                drop(room);
            });
        }
    }

    async fn connection(&self, mut socket: TcpStream, port: NonZeroU16) {
        match self.carry(&mut socket, port).await {
            Ok(End::Whole) => return,
            Ok(End::Reset) => {}
            Err(error) => remark(&format!("connection to port {port}: {error}")),
        }
        // So that the program on this side does not take a part for the whole.
        let _ = socket.set_zero_linger();
    }

    async fn carry(&self, socket: &mut TcpStream, port: NonZeroU16) -> Result<End> {
        // Small pieces must not wait for one another.
        socket.set_nodelay(true)?;
        let port = port.to_string();
        let (sender, receiver) =
            channels::open(&self.cluster, &self.subject, "portforward", &[("port", &port)]).await?;
        let (read, write) = socket.split();
        let from_guest = take(receiver, write, &self.subject);
        tokio::select! {
            end = from_guest => end,
            end = give(read, sender) => Ok(end),
        }
    }
}

/// How a connection ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// Both directions were closed, or the program on our side has gone.
    Whole,
    /// The server in the guest reset it.
    Reset,
}

/// Hands on what the program on our side sends. Ends only when that program has gone without a word.
async fn give(mut from: ReadHalf<'_>, mut sender: Sender) -> End {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(PIECE);
        buffer.put_u8(Channel::Stdin as u8);
        let mut limited = (&mut from).take(DATA as u64);
        let sent = match limited.read_buf(&mut buffer).await {
            Err(_) => return End::Whole,
            Ok(0) => {
                // What the other direction brings tells how it ends. The way to the guest must stay open for that.
                let _ = sender.close_stdin().await;
                return pending().await;
            }
            Ok(_) => sender.send_framed(buffer.split().freeze()).await,
        };
        if sent.is_err() {
            return pending().await;
        }
    }
}

/// Hands on what the server in the guest sends, to the end of the connection.
async fn take(mut receiver: Receiver, mut to: WriteHalf<'_>, subject: &Subject) -> Result<End> {
    loop {
        let taken = match receiver.next().await {
            Ok(FromServer::Stdout(data)) => to.write_all(&data).await,
            Ok(FromServer::StdoutClosed) => to.shutdown().await,
            Ok(FromServer::Stderr(_)) => Ok(()),
            Ok(FromServer::Ended(status)) => {
                let code = channels::exit_code(&status, subject)?;
                return Ok(if code == 0 { End::Whole } else { End::Reset });
            }
            Err(broken) => return Err(Error::new(Kind::Unavailable, broken.to_string())),
        };
        if taken.is_err() {
            return Ok(End::Whole);
        }
    }
}

/// Waits until the run of the Workspace whose ports are forwarded is over.
async fn stopped(cluster: &Cluster, subject: &Subject, workspace: &Workspace) -> Error {
    let instance = |workspace: &Workspace| {
        let execution = workspace.status.as_ref()?.execution.as_ref()?;
        Some(execution.instance_id)
    };
    let begun = instance(workspace);
    let api = cluster.namespaced::<Workspace>(subject.namespace.as_deref().unwrap_or_default());
    let mut objects = watcher::watch_object(api, &subject.name).default_backoff().boxed();
    loop {
        let now = match objects.try_next().await {
            Ok(Some(now)) => now.filter(|now| now.uid() == workspace.uid()),
            // Somebody who may not watch sees each connection refused.
            Ok(None) => return pending().await,
            Err(_) => continue,
        };
        let is_over = |phase| !matches!(phase, Some(WorkspacePhase::Available | WorkspacePhase::Stopping));
        let Some(now) = now else { return over(subject, "was deleted") };
        if instance(&now) != begun || is_over(phase(&now)) {
            let state = phase(&now).as_ref().map_or_else(|| "not AVAILABLE".to_owned(), enum_word);
            return over(subject, &format!("has ended its run and is {state} now"));
        }
    }
}

fn over(subject: &Subject, what: &str) -> Error {
    Error::new(Kind::FailedPrecondition, format!("{subject} {what}: its ports are forwarded no more"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_read_as_kubectl_reads_them() {
        for (text, local, remote) in [("80", 80, 80), ("8080:80", 8080, 80), (":80", 0, 80), ("0:80", 0, 80)] {
            let remote = NonZeroU16::new(remote).unwrap();
            assert_eq!(text.parse(), Ok(Ports { local, remote }), "{text}");
        }
        for wrong in ["", ":", "0", "80:", "80:0", "65536", "http", "1:2:3", "-1"] {
            assert!(wrong.parse::<Ports>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn addresses_are_ips_or_localhost() {
        assert_eq!("localhost".parse(), Ok(Address::Localhost));
        assert_eq!("0.0.0.0".parse(), Ok(Address::Ip(Ipv4Addr::UNSPECIFIED.into())));
        assert_eq!("::1".parse(), Ok(Address::Ip(Ipv6Addr::LOCALHOST.into())));
        assert!("example.com".parse::<Address>().is_err());
    }
}
