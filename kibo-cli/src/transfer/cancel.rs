//! The end of a transfer whose own kibo does not end it.

use clap::Args;
use http::Request;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kibo_crds::{TransferKind, Workspace};

use crate::{
    client::Cluster,
    errors::{Error, On as _, Result, Subject},
    output::print,
    workspace::{stream, target},
};

#[derive(Args, Debug)]
#[command(after_help = "\
A kibo that is interrupted or killed ends what it does by itself. This is for one that was stopped in the middle, or whose \
host vanished: it would keep the disks for a quarter of an hour.

  kibo transfer cancel dev")]
pub struct Cancel {
    /// Name, or id (ws-…) in any namespace
    #[arg(value_name = "WORKSPACE")]
    workspace: String,
}

pub async fn run(cluster: &Cluster, args: Cancel) -> Result<()> {
    let (workspace, subject) = target::fetch(cluster, &args.workspace).await?;
    let (subresource, done) = what(&workspace, &subject);
    let request = Request::delete(stream::path(&subject, subresource)).body(Vec::new());
    let request = request.map_err(|error| Error::invalid(format!("{subject}: {error}")))?;
    cluster.client.request::<Status>(request).await.on(&subject)?;
    print(&format!("{done}\n"))
}

/// Which of its parts is asked to end, and what is said when it has: a Workspace is imported once, before everything else.
fn what(workspace: &Workspace, subject: &Subject) -> (&'static str, String) {
    let status = workspace.status.as_ref();
    let is_imported = workspace.spec.import.is_none() || status.is_some_and(|status| status.imported);
    let under_way = status.and_then(|status| status.transfer.as_ref()).filter(|transfer| !transfer.state.is_over());
    match under_way.map(|transfer| transfer.kind) {
        Some(TransferKind::Export) => ("export", format!("{subject} is not exported any more")),
        None if is_imported => ("export", format!("{subject} is not exported any more")),
        Some(TransferKind::Import) | None => (
            "import",
            format!("{subject} is not imported any more; delete what is left: {}", subject.command("delete")),
        ),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_import_that_is_not_complete_is_what_is_ended_and_an_export_afterwards() {
        let subject = Subject::namespaced("Workspace", "dev", "team");
        let of = |import: bool, imported: bool, open: Option<&str>| {
            let transfer = open.map(|kind| {
                json!({
                    "id": "inst-01k6zzzzzzzzzzzzzzzzzzzzzz", "kind": kind, "state": "Running", "user": "jane",
                    "node": "a", "incarnation": 1, "epoch": 1, "startedAt": "2026-11-30T00:00:00Z",
                })
            });
            let workspace: Workspace = serde_json::from_value(json!({
                "metadata": { "name": "dev" },
                "spec": { "template": "t", "import": import.then(|| json!({ "archive": "ab".repeat(32) })) },
                "status": { "imported": imported, "transfer": transfer },
            }))
            .unwrap();
            what(&workspace, &subject).0
        };
        assert_eq!(of(false, false, Some("Export")), "export");
        assert_eq!(of(false, false, None), "export", "one that waits for its turn");
        assert_eq!(of(true, false, Some("Import")), "import");
        assert_eq!(of(true, false, None), "import");
        assert_eq!(of(true, true, None), "export");
        // The last step of it.
        assert_eq!(of(true, true, Some("Import")), "import");
    }
}
