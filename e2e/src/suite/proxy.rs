//! A way between a node and the operator that can be cut.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use anyhow::Result;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Forwards connections until it is cut; then it ends them, and takes none until it is mended. It outlives this handle,
/// since its node has to come to an end after the test.
pub struct Proxy {
    address: SocketAddr,
    /// The port that it leads to; none while it is cut.
    target: Arc<watch::Sender<Option<u16>>>,
    port: u16,
}

impl Proxy {
    /// To a port of this host.
    pub async fn to(port: u16) -> Result<Self> {
        Self::at(Ipv4Addr::LOCALHOST, port).await
    }

    /// The same, for those who come to this address of the host.
    pub async fn at(address: Ipv4Addr, port: u16) -> Result<Self> {
        let listener = TcpListener::bind((address, 0)).await?;
        let address = listener.local_addr()?;
        let target = Arc::new(watch::channel(Some(port)).0);
        tokio::spawn(accept(listener, target.clone()));
        Ok(Self { address, target, port })
    }

    /// For a node's configuration.
    pub fn endpoint(&self) -> String {
        format!("https://{}", self.address)
    }

    pub fn cut(&self) {
        self.target.send_replace(None);
    }

    pub fn mend(&self) {
        self.lead_to(self.port);
    }

    /// Ends all connections; the next ones go to another port.
    pub fn lead_to(&self, port: u16) {
        self.target.send_replace(Some(port));
    }
}

async fn accept(listener: TcpListener, target: Arc<watch::Sender<Option<u16>>>) {
    while let Ok((mut near, _)) = listener.accept().await {
        let mut changes = target.subscribe();
        let Some(port) = *changes.borrow_and_update() else { continue };
        tokio::spawn(async move {
            let Ok(mut far) = TcpStream::connect(("127.0.0.1", port)).await else { return };
            tokio::select! {
                _ = copy_bidirectional(&mut near, &mut far) => {}
                _ = changes.changed() => {}
            }
        });
    }
}
