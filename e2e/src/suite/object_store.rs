//! A server that speaks S3, for one test.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

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

    /// Asks it, with a line of Python that knows `s3`, and gives what that prints.
    pub async fn ask(&self, line: &str) -> Result<String> {
        let client = "import boto3; s3 = boto3.client('s3', endpoint_url=URL, region_name='us-east-1', \
                      aws_access_key_id='test', aws_secret_access_key='test')";
        let script = format!("URL={:?}; {client}; {line}", self.url);
        let output = Command::new("python3").env("PYTHONPATH", &self.packages).args(["-c", &script]).output().await?;
        let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        ensure!(output.status.success(), "{line}: {said} {}", String::from_utf8_lossy(&output.stderr));
        Ok(said)
    }
}
