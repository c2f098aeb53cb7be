//! Arms failpoints in the operator and in daemons, and sees who has come there.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kibo_failpoint::{Action, REACHED};

use super::wait::eventually;
use crate::local::{Component, LocalCluster};

/// The failpoints of one program.
pub struct Failpoints {
    directory: PathBuf,
}

impl Failpoints {
    /// Those of the operator or of a node's daemon.
    pub fn of(cluster: &LocalCluster, component: &Component) -> Result<Self> {
        let directory = match component {
            Component::Operator => cluster.layout().operator_failpoints(),
            Component::Node(id) => cluster.layout().node_failpoints(id),
            other => anyhow::bail!("{other} has no failpoints"),
        };
        fs::create_dir_all(&directory).with_context(|| format!("failed to make {}", directory.display()))?;
        Ok(Self { directory })
    }

    /// Each of these acts once, whoever comes by first.
    pub fn arm(&self, points: &[&str], action: Action) -> Result<()> {
        for point in points {
            let new = self.directory.join(".new");
            fs::write(&new, action.as_str())?;
            fs::rename(&new, self.directory.join(point))?;
        }
        Ok(())
    }

    /// Waits until somebody has come to each of these.
    pub async fn all_reached(&self, points: &[&str], limit: Duration) -> Result<()> {
        eventually("every failpoint is reached", limit, async || {
            let missing: Vec<_> =
                points.iter().filter(|point| !self.directory.join(format!("{point}{REACHED}")).exists()).collect();
            ensure!(missing.is_empty(), "nobody came to {missing:?}");
            Ok(Some(()))
        })
        .await
    }

    /// Disarms all points, and lets everybody go on who waits at one. Gives back which were reached.
    pub fn clear(&self) -> Result<BTreeSet<String>> {
        let mut reached = BTreeSet::new();
        // Those that are armed first: nobody who goes on is to stop at the next one.
        let names: Vec<String> = fs::read_dir(&self.directory)?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<Result<_>>()?;
        let (waiting, armed): (Vec<_>, Vec<_>) = names.into_iter().partition(|name| name.ends_with(REACHED));
        for name in armed {
            let _ = fs::remove_file(self.directory.join(name));
        }
        for name in waiting {
            fs::remove_file(self.directory.join(&name))?;
            reached.insert(name.trim_end_matches(REACHED).to_owned());
        }
        Ok(reached)
    }
}
