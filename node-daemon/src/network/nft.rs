//! Runs `nft`. Its own language in, since that is what people read and what `nft list` shows them; JSON out.

use std::{io, path::PathBuf, process::Stdio, time::Duration};

use serde::Deserialize;
use tokio::{io::AsyncWriteExt as _, process::Command};

use super::rules::Table;

/// It answers within milliseconds.
const LIMIT: Duration = Duration::from_secs(20);

#[derive(Debug, thiserror::Error)]
pub enum NftError {
    #[error("failed to run {program}: {source}", program = .program.display())]
    Run { program: PathBuf, source: io::Error },
    #[error("{program} did not end within {} s", LIMIT.as_secs(), program = .program.display())]
    Slow { program: PathBuf },
    #[error("{program} refused: {said}", program = .program.display())]
    Refused { program: PathBuf, said: String },
    #[error("{program} printed what is no list of tables: {source}", program = .program.display())]
    Listing { program: PathBuf, source: serde_json::Error },
}

#[derive(Clone, Debug)]
pub struct Nft {
    program: PathBuf,
}

#[derive(Deserialize)]
struct Listing {
    nftables: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    table: Option<Named>,
}

#[derive(Deserialize)]
struct Named {
    family: String,
    name: String,
}

impl Nft {
    pub fn new(program: PathBuf) -> Self {
        Self { program }
    }

    /// Carries out a text in one transaction.
    pub async fn apply(&self, text: &str) -> Result<(), NftError> {
        self.run(&["-f", "-"], text).await.map(drop)
    }

    /// The tables of all node-daemons on this host.
    pub async fn tables(&self) -> Result<Vec<Table>, NftError> {
        let output = self.run(&["--json", "list", "tables"], "").await?;
        let listing: Listing = serde_json::from_slice(&output)
            .map_err(|source| NftError::Listing { program: self.program.clone(), source })?;
        let tables = listing.nftables.into_iter().filter_map(|entry| entry.table);
        Ok(tables.filter(|table| table.family == "inet").filter_map(|table| Table::parse(&table.name)).collect())
    }

    async fn run(&self, arguments: &[&str], input: &str) -> Result<Vec<u8>, NftError> {
        let failed = |source| NftError::Run { program: self.program.clone(), source };
        let mut command = Command::new(&self.program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().map_err(failed)?;
        let stdin = child.stdin.take();
        let conversation = async {
            // It reads everything before it says anything, or is gone: what it said then is told.
            if let Some(mut stdin) = stdin {
                let _ = stdin.write_all(input.as_bytes()).await;
            }
            child.wait_with_output().await
        };
        let output = tokio::time::timeout(LIMIT, conversation)
            .await
            .map_err(|_| NftError::Slow { program: self.program.clone() })?
            .map_err(failed)?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(NftError::Refused { program: self.program.clone(), said })
    }
}
