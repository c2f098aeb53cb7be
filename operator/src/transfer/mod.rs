//! Transfers: a Workspace's disks into an archive, and a Workspace out of one. `docs/transfer.md` has the protocol.
//!
//! Who asks holds a connection ([`Transfer`]); what they ask for is a wish in memory ([`Wishes`]), which the Workspace's
//! own decisions see, beside the rest, and act upon: they grant the disks, say when the node may be asked for the
//! stream, and get the disks back when it has ended. A wish that nobody has any more, as after a change of the leader,
//! ends what its transfer has begun.

mod wishes;

use k8s_openapi::jiff::Timestamp;
use kibo_archive::{Description, Origin};
use kibo_crds::{Bytes, Template, TransferKind, TransferStatus, Workspace, workspace::WorkspaceSpec};
use kibo_protocol::v1::{self, open_stream};
use kube::ResourceExt as _;

use crate::workspace::draft::own_labels;

pub use wishes::{Order, Refusal, Sizes, Transfer, Wish, Wishes, cancel};

/// Whether something of it is left to be done.
pub fn is_open(transfer: Option<&TransferStatus>) -> bool {
    transfer.is_some_and(|transfer| !transfer.state.is_over())
}

/// What the node is asked for.
pub fn stream(
    kind: TransferKind,
    workspace: &Workspace,
    template: Option<&Template>,
    layer: v1::Object,
    volume: Option<v1::Object>,
) -> open_stream::Kind {
    match kind {
        TransferKind::Export => {
            // Every part of it is text, a number or a list of them.
            let description = serde_json::to_vec(&describe(workspace, template)).unwrap_or_default();
            open_stream::Kind::Export(v1::ExportRequest { layer: Some(layer), volume, description })
        }
        TransferKind::Import => {
            let archive = workspace.spec.import.as_ref().map(|import| bytes(&import.archive)).unwrap_or_default();
            open_stream::Kind::Import(v1::ImportRequest { layer: Some(layer), volume, archive })
        }
    }
}

/// Everything of it that means something elsewhere; the node fills the sizes in.
fn describe(workspace: &Workspace, template: Option<&Template>) -> Description {
    // Each field is named, so that a new one is decided about.
    let WorkspaceSpec {
        template: template_name,
        resources,
        writable_layer,
        volume,
        node_selector,
        network,
        annotations,
        power: _,
        r#move: _,
        import: _,
    } = workspace.spec.clone();
    let spec = WorkspaceSpec {
        template: template_name,
        resources,
        writable_layer,
        volume,
        power: None,
        node_selector,
        network,
        r#move: None,
        import: None,
        annotations,
    };
    let id = workspace.status.as_ref().and_then(|status| status.id);
    Description {
        exported_at: Timestamp::now().to_string(),
        origin: Origin {
            namespace: workspace.namespace().unwrap_or_default(),
            name: workspace.name_any(),
            id: id.map(|id| id.to_string()).unwrap_or_default(),
        },
        labels: own_labels(workspace).into_iter().map(|(key, value)| (key.clone(), value.clone())).collect(),
        spec,
        root_image: template.map(|template| template.spec.root_image.clone()),
        layer: Bytes::default(),
        volume: None,
        data: Bytes::default(),
    }
}

/// Pairs of hexadecimal digits, as the schema says.
fn bytes(digits: &str) -> Vec<u8> {
    let pairs = digits.as_bytes().chunks(2).filter_map(|pair| std::str::from_utf8(pair).ok());
    pairs.filter_map(|pair| u8::from_str_radix(pair, 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_has_what_means_something_elsewhere() {
        let workspace: Workspace = serde_json::from_value(serde_json::json!({
            "metadata": { "name": "dev", "namespace": "team", "labels": { "a": "b", "kibotos.dev/x": "y" } },
            "spec": {
                "template": "t", "resources": { "cpu": "2" }, "annotations": { "n": "x" },
                "power": { "state": "Stopped", "requestId": "r" }, "move": { "to": "p" },
                "nodeSelector": { "disk": "fast" }, "network": { "egress": "Deny" },
                "import": { "archive": "ab".repeat(32) },
            },
        }))
        .unwrap();
        let template = serde_json::from_value(serde_json::json!({
            "metadata": { "name": "t" }, "spec": { "rootImage": "debian-12", "resources": { "cpu": "1", "memory": "1Gi" },
            "writableLayer": { "size": "1Gi" } },
        }));
        let described = serde_json::to_value(describe(&workspace, Some(&template.unwrap()))).unwrap();
        assert_eq!(described["rootImage"], "debian-12");
        assert!(describe(&workspace, None).root_image.is_none(), "its Template is gone");
        assert_eq!(
            described["spec"],
            serde_json::json!({
                "template": "t", "resources": { "cpu": "2" }, "annotations": { "n": "x" },
                "nodeSelector": { "disk": "fast" }, "network": { "egress": "Deny" },
            })
        );
        assert_eq!(
            (&described["origin"]["name"], &described["labels"]),
            (&"dev".into(), &serde_json::json!({"a": "b"}))
        );
        assert_eq!(bytes(&workspace.spec.import.unwrap().archive), [0xab; 32]);
    }
}
