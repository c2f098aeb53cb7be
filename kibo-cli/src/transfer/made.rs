//! What becomes here of the Workspace that an archive describes.

use kibo_archive::{Description, Prefix};
use kibo_crds::{
    self as crds, Bytes as Amount, SizeQuantity, Workspace, WorkspaceId, is_reserved_label,
    workspace::{NewVolume, PowerRequest, PowerState, VolumeBinding, WorkspaceSpec, WritableLayer},
};

use super::import::Import;
use crate::{
    errors::{Error, Kind, Result},
    output::remark,
    workspace::fresh_id,
};

/// The Workspace that is to be made.
pub fn made(prefix: &Prefix, args: &Import) -> Result<Workspace> {
    let Description { origin, mut labels, spec, layer, volume, exported_at: _, root_image: _, data: _ } =
        prefix.description.clone();
    let name = args.name.clone().unwrap_or(origin.name);
    if name.parse::<WorkspaceId>().is_ok() {
        return Err(Error::invalid(format!("{name} has the form of an id, so it cannot be a name")));
    }
    // Each field is looked at: what an archive has was written elsewhere, perhaps by hand.
    let WorkspaceSpec {
        template,
        resources,
        volume: binding,
        node_selector,
        network,
        annotations,
        writable_layer: _,
        power: _,
        r#move: _,
        import: _,
    } = spec;
    let bound = match (binding, volume) {
        (Some(binding), Some(volume)) => {
            let new = NewVolume { size: size(volume)?, pool: args.volume_pool.clone() };
            Some(VolumeBinding { claim: None, new: Some(new), ..binding })
        }
        // It has no bytes yet: it is made as it would have been.
        (Some(VolumeBinding { new: Some(new), claim: None, mount_path, delete_with_workspace }), None) => {
            let new = NewVolume { pool: args.volume_pool.clone(), ..new };
            Some(VolumeBinding { claim: None, new: Some(new), mount_path, delete_with_workspace })
        }
        (Some(_), None) => {
            remark(
                "note: the Volume that was bound had no bytes yet, so none is made; bind one with kibo workspace bind",
            );
            None
        }
        (None, _) => None,
    };
    if bound.is_none() && args.volume_pool.is_some() {
        return Err(Error::new(Kind::Usage, "--volume-pool is for an archive with a Volume, and this one has none"));
    }
    let power = PowerRequest {
        state: PowerState::Stopped,
        request_id: Some(fresh_id()),
        stop_mode: None,
        node: None,
        when_unplaceable: None,
    };
    let spec = WorkspaceSpec {
        template: args.template.clone().unwrap_or(template),
        resources,
        writable_layer: Some(WritableLayer {
            size: Some(size(layer)?),
            pool: args.layer_pool.clone(),
            request_id: None,
        }),
        volume: bound,
        power: Some(power),
        node_selector,
        network,
        r#move: None,
        import: Some(crds::Import { archive: prefix.id(), volume: volume.is_some() }),
        annotations,
    };
    let mut workspace = Workspace::new(&name, spec);
    labels.retain(|key, _| !is_reserved_label(key));
    workspace.metadata.labels = (!labels.is_empty()).then_some(labels);
    Ok(workspace)
}

fn size(bytes: Amount) -> Result<SizeQuantity> {
    let text = bytes.as_mib().map(|mib| format!("{mib}Mi")).unwrap_or_default();
    text.parse::<SizeQuantity>()
        .map_err(|error| Error::invalid(format!("the archive has an image of {bytes}: {error}")))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use kibo_archive::Origin;
    use serde_json::{Value, json};

    use super::*;
    use crate::cli::Cli;

    fn args(line: &[&str]) -> Import {
        let line = [&["kibo", "transfer", "import", "a"], line].concat();
        match Cli::try_parse_from(line).unwrap().command {
            crate::cli::Command::Transfer(crate::transfer::Command::Import(import)) => *import,
            other => panic!("{other:?}"),
        }
    }

    fn prefix(spec: Value, volume: Option<Amount>) -> Prefix {
        Prefix::new(Description {
            exported_at: "2026-11-30T09:00:00Z".to_owned(),
            origin: Origin { namespace: "team".into(), name: "dev".into(), id: String::new() },
            labels: [("a", "b"), ("kibotos.dev/created-for", "x")].map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
            spec: serde_json::from_value(spec).unwrap(),
            root_image: Some("debian-12".to_owned()),
            layer: Amount::mib(2048),
            volume,
            data: Amount::mib(1),
        })
        .unwrap()
    }

    #[test]
    fn the_workspace_is_as_it_was_and_placed_anew() {
        let spec = json!({
            "template": "t", "resources": { "cpu": "2" }, "annotations": { "n": "x" },
            "writableLayer": { "size": "1Gi", "pool": "theirs" },
            "volume": { "claim": "data", "mountPath": "/data", "deleteWithWorkspace": true },
            "nodeSelector": { "disk": "fast" }, "network": { "egress": "Deny" },
            // What no export writes.
            "power": { "state": "Running", "node": "theirs" }, "move": { "to": "theirs" },
            "import": { "archive": "ab".repeat(32) },
        });
        let prefix = prefix(spec, Some(Amount::mib(64)));
        let made = serde_json::to_value(made(&prefix, &args(&["--volume-pool", "fast"])).unwrap()).unwrap();
        assert_eq!(made["metadata"], json!({ "name": "dev", "labels": { "a": "b" } }));
        let mut spec = made["spec"].clone();
        let power = spec.as_object_mut().unwrap().remove("power").unwrap();
        assert_eq!(power["state"], "Stopped");
        assert_eq!(
            spec,
            json!({
                "template": "t", "resources": { "cpu": "2" }, "annotations": { "n": "x" },
                "writableLayer": { "size": "2048Mi" },
                "volume": {
                    "new": { "size": "64Mi", "pool": "fast" }, "mountPath": "/data", "deleteWithWorkspace": true,
                },
                "import": { "archive": prefix.id(), "volume": true },
                "nodeSelector": { "disk": "fast" }, "network": { "egress": "Deny" },
            })
        );
    }

    #[test]
    fn a_volume_without_bytes_is_made_as_it_would_have_been_or_left_out() {
        let new =
            json!({ "template": "t", "volume": { "new": { "size": "1Gi", "pool": "theirs" }, "mountPath": "/d" } });
        let made_new = made(&prefix(new, None), &args(&["--name", "other"])).unwrap();
        assert_eq!(made_new.metadata.name.as_deref(), Some("other"));
        let elsewhere = made(&prefix(json!({ "template": "t" }), None), &args(&["--template", "theirs"])).unwrap();
        assert_eq!(elsewhere.spec.template, "theirs");
        let volume = serde_json::to_value(&made_new.spec.volume).unwrap();
        assert_eq!(volume, json!({ "new": { "size": "1Gi" }, "mountPath": "/d", "deleteWithWorkspace": false }));
        assert!(!made_new.spec.import.unwrap().volume);
        let claim = json!({ "template": "t", "volume": { "claim": "data", "mountPath": "/d" } });
        assert!(made(&prefix(claim, None), &args(&[])).unwrap().spec.volume.is_none());
        let none = made(&prefix(json!({ "template": "t" }), None), &args(&["--volume-pool", "p"])).unwrap_err();
        assert_eq!(none.kind, Kind::Usage);
    }
}
