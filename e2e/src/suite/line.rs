//! Lines to a server of this host that are not as good as the loopback device.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

/// Of a slow line, in bytes: what waits in it is not on its way yet.
const LITTLE: u32 = 64 << 10;

/// Accepts connections and carries each as `carry` does it, which is given the server's address. It is there as long as what
/// comes with its own address.
pub async fn behind<F>(
    server: &str,
    carry: impl Fn(TcpStream, Arc<str>) -> F + Send + 'static,
) -> Result<(SocketAddr, JoinSet<()>)>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let (address, server): (_, Arc<str>) = (listener.local_addr()?, server.into());
    let mut line = JoinSet::new();
    line.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((client, _)) = listener.accept().await {
            let carried = carry(client, server.clone());
            // Who breaks off is none of the line's business.
            connections.spawn(async move { drop(carried.await) });
        }
    });
    Ok((address, line))
}

/// One that gives this many bytes in a second.
pub async fn slow(server: &str, bytes: usize) -> Result<(SocketAddr, JoinSet<()>)> {
    behind(server, move |client, address| async move { carry_slowly(client, &address, bytes).await }).await
}

async fn carry_slowly(mut client: TcpStream, address: &str, bytes: usize) -> Result<()> {
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(LITTLE)?;
    let mut server = socket.connect(address.parse()?).await?;
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) = (client.split(), server.split());
    let down = async {
        let mut piece = vec![0; (bytes / 10).max(1)];
        let mut pace = interval(Duration::from_millis(100));
        pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            pace.tick().await;
            match from_server.read(&mut piece).await? {
                0 => return to_client.shutdown().await,
                length => to_client.write_all(&piece[..length]).await?,
            }
        }
    };
    tokio::try_join!(copy(&mut from_client, &mut to_server), down)?;
    Ok(())
}
