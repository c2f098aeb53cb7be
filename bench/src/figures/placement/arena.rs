//! Where they are compared: a cluster of its own for each number of nodes, since nobody wants to take so many down again.

use std::{fs, sync::Arc};

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::Namespace;
use kibo_e2e::local::LocalCluster;
use kube::{Api, Client, api::PostParams};
use serde_json::json;

use crate::{audit, site::Site};

/// The namespace of all that is placed.
pub const NAME: &str = "arena";

pub struct Arena<'a> {
    site: &'a Site,
    pub cluster: Arc<LocalCluster>,
}

impl<'a> Arena<'a> {
    pub async fn up(site: &'a Site, nodes: u32) -> Result<Self> {
        let cluster = site.another(&format!("{NAME}-{nodes}"))?;
        fs::write(cluster.layout().audit_policy(), audit::POLICY).context("failed to write the audit policy")?;
        cluster.up().await?;
        let namespaces: Api<Namespace> = Api::all(cluster.client().await?);
        let namespace = serde_json::from_value(json!({ "metadata": { "name": NAME } }))?;
        namespaces.create(&PostParams::default(), &namespace).await.context("failed to create the namespace")?;
        Ok(Self { site, cluster })
    }

    pub async fn client(&self) -> Result<Client> {
        Ok(self.cluster.client().await?)
    }

    /// All writes from now on, to be divided among the objects.
    pub fn audit(&self) -> Result<audit::Audit> {
        audit::Audit::begin(self.cluster.layout().audit_log())
    }

    pub async fn down(self) -> Result<()> {
        self.site.close(&self.cluster).await
    }
}
