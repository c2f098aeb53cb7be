//! Several Workspaces as a table.

use jiff::Timestamp;
use kibo_crds::Workspace;
use kube::ResourceExt as _;
use serde::Serialize;

use super::view::{View, id_or_name, volume_name};
use crate::{
    client::Listed,
    output::{
        Present, Table,
        words::{age, enum_word, or_absent, word},
    },
};

/// A list of Workspaces.
pub struct Many {
    pub listed: Listed<Workspace>,
    /// They come from several namespaces.
    pub namespaces: bool,
    pub now: Timestamp,
}

impl Present for Many {
    fn view(&self) -> impl Serialize {
        self.listed.view("workspaces", View::from)
    }

    fn names(&self) -> Vec<String> {
        self.listed.items.iter().map(id_or_name).collect()
    }

    fn text(&self, wide: bool) -> String {
        let mut table = Table::new(["NAME", "STATE", "REASON", "TEMPLATE", "AGE"]);
        if self.namespaces {
            table = table.column_before("NAMESPACE");
        }
        if wide {
            table = table.columns(["ID", "INSTANCE", "NODE", "VOLUME"]);
        }
        for workspace in &self.listed.items {
            let status = workspace.status.clone().unwrap_or_default();
            let mut row = vec![
                workspace.name_any(),
                status.phase.as_ref().map(enum_word).unwrap_or_default(),
                status.reason.as_deref().map(word).unwrap_or_default(),
                workspace.spec.template.clone(),
                age(workspace.creation_timestamp().as_ref(), self.now),
            ];
            if self.namespaces {
                row.insert(0, workspace.namespace().unwrap_or_default());
            }
            if wide {
                row.push(or_absent(status.id));
                row.push(or_absent(status.execution.as_ref().map(|execution| execution.instance_id)));
                row.push(or_absent(status.execution.as_ref().map(|execution| &execution.node)));
                row.push(volume_name(workspace).unwrap_or_default());
            }
            table.row(row);
        }
        table.render()
    }
}
