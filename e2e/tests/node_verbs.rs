//! The verbs of nodes with real daemons and real guests: when a node is drained, where its Workspaces may go, and what
//! is still held where.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use kibo_crds::node::NodePhase;
use kibo_crds::workspace::WorkspacePhase;
use kibo_crds::{Node, Volume, Workspace};
use kibo_e2e::local::{Component, LocalNode, LocalPool};
use kibo_e2e::suite::program::Program;
use kibo_e2e::suite::typed::{result, said};
use kibo_e2e::suite::{Place, STOP, Suite, execution};
use serde_json::json;

/// Seconds that a node's status may take to follow.
const SOON: u64 = 60;

fn main() -> ExitCode {
    Suite::with_everything()
        .operator_args(["--unreachable-seconds", "4"])
        .test("a_drain_is_waited_for_until_nothing_is_held", private_pool)
        .test("what_lies_in_a_shared_pool_keeps_nobody_from_being_drained", shared_pool)
        .test("what_a_workspace_still_holds_is_told_with_its_source", cleanup)
        .test("slots_and_labels_are_what_placement_goes_by", settings)
        .run()
}

async fn becomes(place: &Place, id: &str, what: &str, reached: impl Fn(&Node) -> bool) -> Result<Node> {
    place.watched(place.all::<Node>(), id, what, SOON, reached).await
}

fn phase(node: &Node) -> Option<NodePhase> {
    node.status.as_ref()?.phase
}

/// What the condition Drained says.
fn why_not_drained(node: &Node) -> String {
    let conditions = node.status.iter().flat_map(|status| &status.conditions);
    conditions.filter(|it| it.type_ == "Drained" && it.status == "False").map(|it| it.message.clone()).collect()
}

async fn stopped(place: &Place, name: &str) -> Result<()> {
    place.kibo(&["workspace", "stop", name]).await?.ok()?;
    place.phase(name, WorkspacePhase::Stopped, STOP).await.map(drop)
}

async fn private_pool(place: Arc<Place>) -> Result<()> {
    let id = place.node("2", "1Gi").await?;
    place.create_workspace("w", json!({})).await?;
    let runs = place.available("w").await?;
    listed_by_place(&place, &id, &runs).await?;
    let wait = ["node", "drain", &id, "--wait", "--command-id", "d/1", "--timeout", "3s"];
    said(&place, &wait, 16, "the drain stays requested, and kibo does not submit it again").await?;
    let node =
        becomes(&place, &id, "it says what runs", |node| why_not_drained(node).contains("running here: 1")).await?;
    ensure!(node.spec.drain.as_ref().is_some_and(|drain| drain.requested) && phase(&node) == Some(NodePhase::Draining));
    let drains = |node: &Node| {
        let commands = node.status.iter().flat_map(|status| &status.commands);
        commands.filter(|record| record.operation == "drain").count()
    };
    ensure!(drains(&node) == 1, "submitted once");
    said(&place, &["workspace", "create", "x", "-t", &place.template_name(), "--node", &id], 15, "draining").await?;

    // Somebody waits while the drain is cancelled.
    let mut waits = Program::start(place.kibo_command(&["node", "drain", &id, "--wait"]))?;
    let second = |node: &Node| drains(node) == 2;
    becomes(&place, &id, "the second drain is on record", second).await?;
    said(&place, &["node", "cancel-drain", &id], 0, "drain cancelled").await?;
    ensure!(waits.ended().await? == 13 && waits.stderr().contains("the drain was cancelled"), "{}", waits.stderr());

    // Its disk stays there, where nobody else reaches it.
    stopped(&place, "w").await?;
    said(&place, &["node", "drain", &id], 0, "drain requested").await?;
    let says = "held here though not in use: 1 Volumes and layers in storage pools that no other node is attached to";
    let node = becomes(&place, &id, "it says what is held", |node| why_not_drained(node).contains(says)).await?;
    ensure!(phase(&node) == Some(NodePhase::Draining));
    let held = result(&place, &["node", "get", &id]).await?["report"]["held_objects"].clone();
    ensure!(held == 1, "{held}");
    said(&place, &["node", "retire", &id, "--yes"], 13, "drain it and empty it").await?;
    said(&place, &["node", "drain", &id, "--wait", "--timeout", "2s"], 16, says).await?;
    place.kibo(&["workspace", "delete", "w", "x"]).await?.ok()?;
    said(&place, &["node", "drain", &id, "--wait"], 0, "is DRAINED").await.map(drop)
}

/// What executes is found by its node and by its Instance, and nothing else is.
async fn listed_by_place(place: &Place, node: &str, runs: &Workspace) -> Result<()> {
    let (id, instance) = (runs.status.as_ref().and_then(|status| status.id).context("an id")?, execution(runs)?.1);
    place.create_workspace("nowhere", json!({ "nodeSelector": { "of": "nobody" } })).await?;
    let all = place.kibo(&["workspace", "list", "--node", node, "--all", "-q"]).await?.ok()?;
    ensure!(all == format!("{id}\n"), "{all}");
    let wide = said(place, &["workspace", "list", "--instance", &instance, "--wide"], 0, &instance).await?;
    let row: Vec<_> = wide.lines().nth(1).context("a row")?.split_whitespace().collect();
    ensure!(
        row.ends_with(&[id.to_string().as_str(), instance.as_str(), node, "-"]) && wide.lines().count() == 2,
        "{wide}"
    );
    said(place, &["workspace", "list", "--node", "no-such-node"], 12, "kibo node list").await?;
    let both = ["workspace", "list", "--node", node, "--instance", &instance];
    said(place, &both, 2, "cannot be used with").await?;
    said(place, &["workspace", "list", "--node", node, "--state", "failed"], 2, "cannot be used with").await?;

    // The next start is another Instance, and what is stopped is nowhere.
    place.power("w", json!({ "state": "Stopped", "stopMode": "Force", "requestId": "off" })).await?;
    place.phase("w", WorkspacePhase::Stopped, STOP).await?;
    for by in [["--node", node], ["--instance", &instance]] {
        said(place, &[&["workspace", "list"][..], &by].concat(), 0, "no Workspaces").await?;
    }
    place.power("w", json!({ "state": "Running", "requestId": "on" })).await?;
    let again = execution(&place.available("w").await?)?.1;
    said(place, &["workspace", "list", "--instance", &instance], 0, "no Workspaces").await?;
    said(place, &["workspace", "list", "--instance", &again, "-q"], 0, &id.to_string()).await?;
    place.kibo(&["workspace", "delete", "nowhere"]).await?.ok().map(drop)
}

/// A node whose default pool is this test's shared one.
async fn attached(place: &Place, number: u32) -> Result<String> {
    let pool = LocalPool {
        id: "e2e-verbs".to_owned(),
        path: place.cluster().layout().root().join("verbs-pool"),
        default: true,
    };
    let change = |node: &mut LocalNode| node.pools = vec![pool];
    place.node_named(&format!("e2e-verbs-{number}"), "2", "1Gi", change).await
}

async fn shared_pool(place: Arc<Place>) -> Result<()> {
    let one = attached(&place, 1).await?;
    let two = attached(&place, 2).await?;
    // A revoked node is attached to nothing.
    said(&place, &["enrollment", "revoke", &two], 0, "REVOKED").await?;
    let alone = |pool: &kibo_crds::StoragePool| pool.status.as_ref().is_some_and(|status| status.members.len() == 1);
    place.watched(place.all(), "e2e-verbs", "has one member", SOON, alone).await?;
    place.create_workspace("w", json!({})).await?;
    place.available("w").await?;
    place.sh("w", "echo remember > /root/note; sync").await?;
    stopped(&place, "w").await?;
    said(&place, &["node", "drain", &one], 0, "").await?;
    becomes(&place, &one, "the disk holds it", |node| why_not_drained(node).contains("held here though")).await?;

    // What another node can have is given back by itself.
    let three = attached(&place, 3).await?;
    becomes(&place, &one, "it is drained", |node| phase(node) == Some(NodePhase::Drained)).await?;
    let status = place.api::<Workspace>().get("w").await?.status.context("a status")?;
    ensure!(status.phase == Some(WorkspacePhase::Stopped) && status.holder.is_none(), "{status:?}");
    said(&place, &["node", "retire", &one, "--yes"], 0, "RETIRED").await?;
    place.kibo(&["workspace", "start", "w"]).await?.ok()?;
    ensure!(execution(&place.available("w").await?)?.0 == three);
    ensure!(place.sh("w", "cat /root/note").await? == "remember");

    // With another admitted node in the pool, a stop gives the disk back at once: no drain waits for it.
    let four = attached(&place, 4).await?;
    let both = |pool: &kibo_crds::StoragePool| {
        pool.status.as_ref().is_some_and(|status| status.members.iter().filter(|member| member.available).count() == 2)
    };
    place.watched(place.all(), "e2e-verbs", "has two members", SOON, both).await?;
    stopped(&place, "w").await?;
    said(&place, &["node", "drain", &three, "--wait"], 0, "is DRAINED").await?;
    place.kibo(&["workspace", "start", "w"]).await?.ok()?;
    ensure!(execution(&place.available("w").await?)?.0 == four);
    Ok(())
}

/// State and source of the three parts.
async fn held(place: &Place, workspace: &str) -> Result<[(String, String); 3]> {
    let shown = result(place, &["workspace", "cleanup-status", workspace]).await?;
    Ok(["runtime", "volume_attachment", "residual"].map(|part| {
        let word = |key: &str| shown[part][key].as_str().unwrap_or_default().to_owned();
        (word("state"), word("source"))
    }))
}

fn all(state: &str, source: &str) -> [(String, String); 3] {
    [(); 3].map(|()| (state.to_owned(), source.to_owned()))
}

async fn cleanup(place: Arc<Place>) -> Result<()> {
    let id = place.node("2", "1Gi").await?;
    place.kibo(&["volume", "create", "data", "--size", "64Mi"]).await?.ok()?;
    place.create_workspace("w", json!({ "volume": { "claim": "data", "mountPath": "/data" } })).await?;
    place.available("w").await?;
    ensure!(held(&place, "w").await? == all("HELD", "NODE"), "{:?}", held(&place, "w").await?);
    stopped(&place, "w").await?;
    let private = [("RELEASED", "NODE"), ("RETAINED", "NODE"), ("RETAINED", "NODE")];
    let private = private.map(|(state, source)| (state.to_owned(), source.to_owned()));
    ensure!(held(&place, "w").await? == private, "{:?}", held(&place, "w").await?);
    place.kibo(&["workspace", "start", "w"]).await?.ok()?;
    place.available("w").await?;

    // The host is off: nobody knows, until somebody says so.
    let daemon = Component::Node(id.clone());
    place.cluster().kill(&daemon).await?;
    place.cluster().end_virtual_machines(&id).await?;
    becomes(&place, &id, "its session is over", |node| {
        node.status.as_ref().and_then(|status| status.session.as_ref()).is_some_and(|session| !session.alive)
    })
    .await?;
    ensure!(held(&place, "w").await? == all("UNKNOWN", "CONTROL_PLANE"), "{:?}", held(&place, "w").await?);
    let isolate = ["node", "isolate", &id, "--confirm-host-cannot-write", "--command-id", "off"];
    let done = result(&place, &isolate).await?;
    let counts = ["released_volumes", "released_layers", "failed_workspaces"].map(|name| done[name].as_u64());
    ensure!(counts == [Some(1); 3], "{done}");
    let failed = place.phase("w", WorkspacePhase::Failed, SOON).await?;
    ensure!(failed.status.and_then(|status| status.reason).as_deref() == Some("Unavailable"));
    becomes(&place, &id, "nothing is allocated there", |node| {
        let allocated = node.status.as_ref().and_then(|status| status.allocated.clone()).unwrap_or_default();
        (allocated.cpu.as_deref(), allocated.memory.as_deref()) == (Some("0"), Some("0"))
    })
    .await?;
    ensure!(held(&place, "w").await? == all("RELEASED", "CONTROL_PLANE"), "{:?}", held(&place, "w").await?);

    // The host is back: its daemon hears that it was isolated, and ends; started again it has a new life. The result
    // of the command stays what it was.
    let told = place.cluster().start(&daemon).await.err().context("it goes on in the life that was isolated")?;
    ensure!(told.to_string().contains("ended while it started"), "{told}");
    place.cluster().start(&daemon).await?;
    becomes(&place, &id, "it is ready", |node| phase(node) == Some(NodePhase::Ready)).await?;
    ensure!(result(&place, &isolate).await? == done);
    place.kibo(&["workspace", "start", "w"]).await?.ok()?;
    place.available("w").await?;
    let of_w = place.api::<Workspace>().get("w").await?.status.and_then(|status| status.id).context("an id")?;
    place.kibo(&["workspace", "delete", "w"]).await?.ok()?;
    let deleted = [("RELEASED", "NODE"), ("RELEASED", "CONTROL_PLANE"), ("RELEASED", "NODE")];
    let deleted = deleted.map(|(state, source)| (state.to_owned(), source.to_owned()));
    for name in ["w", &of_w.to_string()] {
        ensure!(held(&place, name).await? == deleted, "{name}: {:?}", held(&place, name).await?);
    }
    said(&place, &["workspace", "cleanup-status", "nothing"], 12, "not found").await?;

    // Its last node goes for ever.
    place.kibo(&["volume", "delete", "data"]).await?.ok()?;
    place.gone(place.api::<Volume>(), "data", SOON).await?;
    said(&place, &["node", "drain", &id, "--wait"], 0, "is DRAINED").await?;
    said(&place, &["node", "retire", &id, "--yes"], 0, "RETIRED").await?;
    ensure!(held(&place, "w").await? == all("RELEASED", "CONTROL_PLANE"), "{:?}", held(&place, "w").await?);
    Ok(())
}

async fn settings(place: Arc<Place>) -> Result<()> {
    let id = place.node("2", "1Gi").await?;
    place.ensure_template().await?;
    let template = place.template_name();
    let create = |name: &'static str, selector: &'static str| {
        ["workspace", "create", name, "-t", &template, "--node-selector", selector]
    };
    said(&place, &["node", "slots", "set", &id, "0"], 0, "slots set to 0").await?;
    said(&place, &["node", "label", &id, "rack=b7"], 0, "labelled").await?;
    said(&place, &create("w", "rack=b7"), 15, "without a free slot").await?;
    said(&place, &["node", "slots", "set", &id, "1"], 0, "slots set to 1").await?;
    said(&place, &["workspace", "start", "w"], 0, "AVAILABLE").await?;
    said(&place, &create("x", "rack=b8"), 15, "without the labels rack=b8").await?;
    said(&place, &["node", "slots", "set", &id, "default"], 0, "what its configuration says").await?;
    said(&place, &["node", "label", &id, "rack=b8"], 0, "labelled").await?;
    said(&place, &["workspace", "start", "x"], 0, "AVAILABLE").await.map(drop)
}
