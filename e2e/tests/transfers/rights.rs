//! Who may do only some of it.

use std::time::Duration;

use anyhow::{Result, ensure};
use kibo_crds::Workspace;
use kibo_e2e::suite::eventually;
use serde_json::{Value, json};

use crate::LIMIT;
use crate::scene::Scene;

/// Gives a user of this name rights in the namespace of the test.
async fn allow(scene: &Scene, user: &str, rules: Value) -> Result<()> {
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
        "metadata": { "name": user, "namespace": scene.place.namespace() }, "rules": rules,
    });
    scene.place.kubectl_with(&["apply", "-f", "-"], &role.to_string()).await?.ok()?;
    let bind = ["create", "rolebinding", user, "--role", user, "--user", user];
    scene.place.kubectl(&bind).await?.ok().map(drop)
}

fn rule(group: &str, resource: &str, verbs: &[&str]) -> Value {
    json!({ "apiGroups": [group], "resources": [resource], "verbs": verbs })
}

pub async fn some_of_them(scene: &Scene, archive: &str) -> Result<()> {
    const OBJECTS: &str = "kibotos.dev";
    const PARTS: &str = "subresources.kibotos.dev";
    let place = &scene.place;
    let get_only = json!([rule(OBJECTS, "workspaces", &["get"]), rule(PARTS, "workspaces/export", &["get"])]);
    allow(scene, "reader", get_only).await?;
    let exports = json!([rule(OBJECTS, "workspaces", &["get"]), rule(PARTS, "workspaces/export", &["get", "create"])]);
    allow(scene, "exporter", exports).await?;
    let makes = json!([rule(OBJECTS, "workspaces", &["get", "create"]), rule(PARTS, "workspaces/import", &["get"]),]);
    allow(scene, "maker", makes).await?;

    let theirs = scene.path("theirs.kibo");
    let export = async |user: &str| place.kibo(&["transfer", "export", "w", "--to", &theirs, "--as", user]).await;
    eventually("the exporter may export", Duration::from_secs(20), async || Ok(Some(export("exporter").await?.ok()?)))
        .await?;
    std::fs::remove_file(&theirs)?;
    let import = async |user: &str| place.kibo(&["transfer", "import", archive, "--name", "made", "--as", user]).await;
    let cancel = place.kibo(&["transfer", "cancel", "w", "--as", "exporter"]).await?;
    let refused = [
        (export("reader").await?, "cannot create resource \"workspaces/export\""),
        (cancel, "cannot delete resource \"workspaces/export\""),
        (import("exporter").await?, "cannot create resource \"workspaces\""),
        (import("maker").await?, "cannot create resource \"workspaces/import\""),
    ];
    for (ran, says) in &refused {
        ensure!(ran.code == 11 && ran.stderr.contains(says), "expected 11 and {says:?}: {ran:?}");
    }
    ensure!(!scene.files().contains("theirs.kibo"), "{:?}", scene.files());
    // Who may not take away what was made for nothing is told that it is there.
    let (left, _) = &refused[3];
    ensure!(left.stderr.contains("is left, without its disks") && left.stderr.contains("cannot delete"), "{left:?}");
    scene.delete(&["made".to_owned()]).await?;
    place.gone(place.api::<Workspace>(), "made", LIMIT.as_secs()).await
}
