//! A server that speaks S3, for one test.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::task::JoinSet;

use super::line;
use super::wait::eventually;

const LIMIT: Duration = Duration::from_secs(60);

/// Ends when it is dropped.
pub struct ObjectStore {
    _server: Child,
    packages: PathBuf,
    pub url: String,
}

/// Where `hack/setup` puts it.
fn packages() -> Result<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = variable("KIBOTOS_CACHE")
        .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("kibotos")))
        .or_else(|| Some(variable("HOME")?.join(".cache/kibotos")))
        .context("neither KIBOTOS_CACHE nor HOME is set")?;
    let packages = cache.join("object-store");
    if !packages.join("moto").is_dir() {
        bail!("there is no object store in {}: run hack/setup", packages.display());
    }
    Ok(packages)
}

impl ObjectStore {
    pub async fn start() -> Result<Self> {
        let packages = packages()?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
        let mut python = Command::new("python3");
        python.env("PYTHONPATH", &packages).args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &port]);
        python.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
        let server = python.spawn().context("failed to run python3")?;
        let address = format!("127.0.0.1:{port}");
        eventually("the object store answers", LIMIT, async || Ok(TcpStream::connect(&address).await.ok())).await?;
        Ok(Self { _server: server, packages, url: format!("http://{address}") })
    }

    /// The same store behind a line that gives this many bytes in a second, as long as what comes with it is there.
    pub async fn slowly(&self, bytes: usize) -> Result<(String, JoinSet<()>)> {
        line::slow(self.address(), bytes).await.map(named)
    }

    /// The same store behind a line that breaks after so many bytes, each time.
    pub async fn brittle(&self, bytes: u64) -> Result<(String, JoinSet<()>)> {
        let carry = move |mut client: TcpStream, address: Arc<str>| async move {
            let mut store = TcpStream::connect(&*address).await?;
            let ((mut from_client, mut to_client), (from_store, mut to_store)) = (client.split(), store.split());
            let down = async {
                copy(&mut from_store.take(bytes), &mut to_client).await?;
                // Not even an end: what it carried is cut off in the middle.
                Err::<(), _>(io::Error::other("it broke"))
            };
            tokio::try_join!(copy(&mut from_client, &mut to_store), down)?;
            Ok(())
        };
        line::behind(self.address(), carry).await.map(named)
    }

    fn address(&self) -> &str {
        self.url.trim_start_matches("http://")
    }

    /// The same store behind a line on which somebody else is faster: before the request with all these words in its head is
    /// passed on, the store is asked this once.
    pub async fn before(&self, words: [&'static str; 2], asks: &str) -> Result<(String, JoinSet<()>)> {
        let asked = Arc::new(self.question(asks));
        let carry = move |client, address: Arc<str>| {
            let asked = asked.clone();
            async move { carry_late(client, &address, words, &asked).await }
        };
        line::behind(self.address(), carry).await.map(named)
    }

    /// Asks it, with a line of Python that knows `s3`, and gives what that prints.
    pub async fn ask(&self, line: &str) -> Result<String> {
        self.question(line).put().await
    }

    fn question(&self, line: &str) -> Question {
        let client = "import boto3; s3 = boto3.client('s3', endpoint_url=URL, region_name='us-east-1', \
                      aws_access_key_id='test', aws_secret_access_key='test')";
        let script = format!("URL={:?}; {client}; {line}", self.url);
        Question { packages: self.packages.clone(), script }
    }
}

fn named((address, line): (SocketAddr, JoinSet<()>)) -> (String, JoinSet<()>) {
    (format!("http://{address}"), line)
}

/// A line of Python for the store.
struct Question {
    packages: PathBuf,
    script: String,
}

impl Question {
    async fn put(&self) -> Result<String> {
        let Self { packages, script } = self;
        let output = Command::new("python3").env("PYTHONPATH", packages).args(["-c", script]).output().await?;
        let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        ensure!(output.status.success(), "{script}: {said} {}", String::from_utf8_lossy(&output.stderr));
        Ok(said)
    }
}

/// The head of a request comes in one piece, since its client writes it so.
async fn carry_late(mut client: TcpStream, address: &str, words: [&str; 2], asked: &Question) -> Result<()> {
    let mut store = TcpStream::connect(address).await?;
    let ((mut from_client, mut to_client), (mut from_store, mut to_store)) = (client.split(), store.split());
    let up = async {
        let mut piece = vec![0; 64 << 10];
        loop {
            let length = from_client.read(&mut piece).await?;
            if length == 0 {
                to_store.shutdown().await?;
                return anyhow::Ok(());
            }
            let head = String::from_utf8_lossy(&piece[..length.min(2048)]).into_owned();
            if words.iter().all(|word| head.contains(word)) {
                asked.put().await?;
            }
            to_store.write_all(&piece[..length]).await?;
        }
    };
    let down = async { anyhow::Ok(copy(&mut from_store, &mut to_client).await.map(drop)?) };
    tokio::try_join!(up, down)?;
    Ok(())
}
