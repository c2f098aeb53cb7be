//! Each rule of the custom resources, with an object that keeps it and one that breaks it, at the
//! real API server. A refusal must name the field, and say the rule in our words.

#![expect(clippy::needless_pass_by_value, reason = "the tables read better when their values are made in place")]

mod amounts;
mod case;
mod moves;
mod nodes;
mod pools;
mod wishes;
mod workspaces;

use std::process::ExitCode;
use std::sync::Arc;

use kibo_e2e::suite::{Place, Suite};
use kube::Client;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};

use case::{Accepted, Case, Refused};

fn resource(kind: &str) -> ApiResource {
    let plural = match kind {
        "OvercommitPolicy" => "overcommitpolicies".to_owned(),
        kind => format!("{}s", kind.to_lowercase()),
    };
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(kibo_crds::GROUP, kibo_crds::VERSION, kind), &plural)
}

fn api(client: &Client, kind: &str) -> Api<DynamicObject> {
    match kind {
        "Workspace" | "Volume" => Api::namespaced_with(client.clone(), "default", &resource(kind)),
        _ => Api::all_with(client.clone(), &resource(kind)),
    }
}

/// Takes a case through its steps; the last one is the one that is judged.
async fn attempt(client: &Client, case: &Case, name: &str) -> Result<(), kube::Error> {
    let api = api(client, case.kind);
    let patch = |value: Value| Patch::Merge(value);
    let params = PatchParams::default();
    // Retirement needs a status first, so an object that begins retired gets there by steps.
    let mut spec = case.spec.clone();
    let retirement = spec.as_object_mut().and_then(|spec| spec.remove("retirement"));
    let object = serde_json::from_value(json!({
        "apiVersion": "kibotos.dev/v1alpha1", "kind": case.kind, "metadata": {"name": name}, "spec": spec,
    }))
    .map_err(kube::Error::SerdeError)?;
    let created = api.create(&PostParams::default(), &object).await;
    if case.change.is_none() {
        return created.map(drop);
    }
    created.unwrap_or_else(|error| panic!("{}: the object to change is refused: {error}", case.rule));
    if let Some(status) = case.status.clone().filter(|status| !status.is_null()) {
        let status = api.patch_status(name, &params, &patch(json!({"status": status}))).await;
        status.unwrap_or_else(|error| panic!("{}: the status is refused: {error}", case.rule));
    }
    if let Some(retirement) = retirement {
        let retired = api.patch(name, &params, &patch(json!({"spec": {"retirement": retirement}}))).await;
        retired.unwrap_or_else(|error| panic!("{}: the retirement is refused: {error}", case.rule));
    }
    let change = case.change.clone().unwrap_or_default();
    if change.get("status").is_some() {
        api.patch_status(name, &params, &patch(change)).await.map(drop)
    } else {
        api.patch(name, &params, &patch(change)).await.map(drop)
    }
}

fn judge(case: &Case, outcome: Result<(), kube::Error>) -> Option<String> {
    let (rule, kind) = (case.rule, case.kind);
    match (&case.expected, outcome) {
        (Accepted, Ok(())) => None,
        (Accepted, Err(error)) => Some(format!("{kind}, {rule}: refused, though it is allowed: {error}")),
        (Refused(_), Ok(())) => Some(format!("{kind}, {rule}: accepted, though it is not allowed")),
        (Refused(parts), Err(kube::Error::Api(status))) if parts.iter().all(|part| status.message.contains(part)) => {
            None
        }
        (Refused(parts), Err(error)) => Some(format!("{kind}, {rule}: refused without saying {parts:?}: {error}")),
    }
}

/// A node that was admitted cannot be deleted, a typo can. A policy takes a moment until it is in
/// force, so the typo's twin is tried until it is refused.
async fn keeps_admitted_nodes(client: &Client) {
    let nodes = api(client, "Node");
    let node = |name: &str| {
        serde_json::from_value(json!({
            "apiVersion": "kibotos.dev/v1alpha1", "kind": "Node", "metadata": {"name": name}, "spec": {},
        }))
        .unwrap()
    };
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let refusal = loop {
        nodes.create(&PostParams::default(), &node("kept")).await.unwrap();
        let status = json!({"status": {"admission": "Admitted"}});
        nodes.patch_status("kept", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
        match nodes.delete("kept", &DeleteParams::default()).await {
            Err(error) => break error,
            Ok(_) => assert!(std::time::Instant::now() < deadline, "an admitted node can be deleted"),
        }
    };
    let text = refusal.to_string();
    assert!(text.contains("Node kept was admitted") && text.contains("retire it instead"), "{text}");
    nodes.create(&PostParams::default(), &node("typo")).await.unwrap();
    nodes.delete("typo", &DeleteParams::default()).await.unwrap();
}

/// One that is declared lost says for ever that its disks are not to be used again; one that nobody uses can go.
async fn keeps_storage_pools(client: &Client) {
    let pools = api(client, "StoragePool");
    let create = async |name: &str, spec: serde_json::Value| {
        let pool = json!({
            "apiVersion": "kibotos.dev/v1alpha1", "kind": "StoragePool", "metadata": {"name": name}, "spec": spec,
        });
        pools.create(&PostParams::default(), &serde_json::from_value(pool).unwrap()).await.unwrap();
    };
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let refusal = loop {
        create("in-use", json!({})).await;
        pools
            .patch_status("in-use", &PatchParams::default(), &Patch::Merge(json!({"status": {"objects": 1}})))
            .await
            .unwrap();
        match pools.delete("in-use", &DeleteParams::default()).await {
            Err(error) => break error,
            Ok(_) => assert!(std::time::Instant::now() < deadline, "a pool with objects can be deleted"),
        }
    };
    assert!(
        refusal.to_string().contains("StoragePool in-use was declared lost, has members or has objects"),
        "{refusal}"
    );
    create("gone", json!({})).await;
    let lost = Patch::Merge(json!({"spec": {"lost": {"confirmDataIsGone": true}}}));
    pools.patch("gone", &PatchParams::default(), &lost).await.unwrap();
    pools.delete("gone", &DeleteParams::default()).await.unwrap_err();
    create("unused", json!({})).await;
    pools.delete("unused", &DeleteParams::default()).await.unwrap();
}

fn main() -> ExitCode {
    Suite::with_control_plane()
        .test("every_rule_of_the_contract_holds_at_the_api_server", every_rule)
        .test("an_admitted_node_cannot_be_deleted", |place| async move {
            keeps_admitted_nodes(&place.client()).await;
            Ok(())
        })
        .test("a_storage_pool_that_is_used_or_lost_cannot_be_deleted", |place| async move {
            keeps_storage_pools(&place.client()).await;
            Ok(())
        })
        .run()
}

async fn every_rule(place: Arc<Place>) -> anyhow::Result<()> {
    let client = place.client();
    let cases: Vec<Case> = [
        amounts::amounts(),
        amounts::ratios(),
        workspaces::immutability(),
        workspaces::bindings(),
        wishes::wishes(),
        workspaces::power(),
        moves::moves(),
        nodes::counters(),
        nodes::nodes(),
        nodes::commands(),
        pools::pools(),
    ]
    .into_iter()
    .flatten()
    .collect();
    let mut wrong = Vec::new();
    for (index, case) in cases.iter().enumerate() {
        let own = format!("case-{index}");
        let outcome = attempt(&client, case, case.name.unwrap_or(&own)).await;
        wrong.extend(judge(case, outcome));
    }
    anyhow::ensure!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
    Ok(())
}
