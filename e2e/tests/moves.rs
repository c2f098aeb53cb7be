//! `kibo workspace move`: a stop and a start on another node, wherever it is cut off.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use kibo_crds::Workspace;
use kibo_crds::workspace::WorkspacePhase;
use kibo_e2e::local::{LocalNode, LocalPool};
use kibo_e2e::suite::typed::said;
use kibo_e2e::suite::{Place, STOP, Suite, execution, is_available, why};
use serde_json::json;

fn main() -> ExitCode {
    Suite::with_everything()
        .test("a_workspace_moves_with_its_data_and_only_where_it_can", moves)
        .test("a_move_that_was_cut_off_goes_on", resumes)
        .run()
}

/// A node that shares a storage pool of this test with the others.
async fn sharing(place: &Place) -> Result<String> {
    let path = place.cluster().layout().root().join(format!("shared-{}", place.namespace()));
    let pool = LocalPool { id: shared(place), path, default: false };
    place.node_with("2", "512Mi", |node: &mut LocalNode| node.pools.push(pool)).await
}

fn shared(place: &Place) -> String {
    format!("shared-{}", place.namespace())
}

async fn get(place: &Place, name: &str) -> Result<Workspace> {
    Ok(place.api::<Workspace>().get(name).await?)
}

async fn runs_on(place: &Place, name: &str, node: &str) -> Result<()> {
    let workspace = get(place, name).await?;
    ensure!(is_available(&workspace) && execution(&workspace)?.0 == node, "not on {node}: {}", why(&workspace));
    Ok(())
}

async fn moves(place: Arc<Place>) -> Result<()> {
    let (a, b) = (sharing(&place).await?, sharing(&place).await?);
    let private = place.node("2", "512Mi").await?;
    let spec = json!({
        "writableLayer": { "pool": shared(&place) },
        "volume": { "new": { "size": "64Mi", "pool": shared(&place) }, "mountPath": "/data" },
        "power": { "state": "Running", "node": a },
    });
    place.create_workspace("box", spec).await?;
    let first = place.available("box").await?;
    place.sh("box", "echo kept > /root/layer && echo kept > /data/volume").await?;

    // It runs there already: nothing is stopped.
    said(&place, &["workspace", "move", "box", "--node", &a], 0, &format!("is AVAILABLE on {a}")).await?;
    ensure!(execution(&get(&place, "box").await?)? == execution(&first)?, "it was started anew");
    // Where its disks cannot be reached, it is left as it is.
    said(&place, &["workspace", "move", "box", "--node", &private], 13, "does not reach").await?;
    said(&place, &["workspace", "move", "box", "--node", "no-such-node"], 12, "no-such-node").await?;
    said(&place, &["node", "drain", &b], 0, "drain requested").await?;
    said(&place, &["workspace", "move", "box", "--node", &b], 13, "is draining").await?;
    said(&place, &["node", "cancel-drain", &b], 0, "drain cancelled").await?;
    ensure!(execution(&get(&place, "box").await?)? == execution(&first)?, "it was stopped");

    let go = ["workspace", "move", "box", "--node", &b, "--command-id", "go"];
    said(&place, &go, 0, &format!("is AVAILABLE on {b}")).await?;
    runs_on(&place, "box", &b).await?;
    let found = place.sh("box", "cat /root/layer /data/volume").await?;
    ensure!(found == "kept\nkept", "{found:?}");
    let moved = execution(&get(&place, "box").await?)?;
    said(&place, &go, 0, &format!("is AVAILABLE on {b}")).await?;
    ensure!(execution(&get(&place, "box").await?)? == moved, "given again, it was done again");
    said(&place, &["workspace", "move", "box", "--node", &a, "--command-id", "go"], 14, "\"go/start\"").await?;

    // One that is stopped is started.
    said(&place, &["workspace", "stop", "box"], 0, "is STOPPED").await?;
    said(&place, &["workspace", "move", "box", "--node", &a], 0, &format!("is AVAILABLE on {a}")).await?;
    Ok(())
}

async fn resumes(place: Arc<Place>) -> Result<()> {
    let (a, b) = (sharing(&place).await?, sharing(&place).await?);
    let spec = json!({ "writableLayer": { "pool": shared(&place) }, "power": { "state": "Running", "node": a } });
    place.create_workspace("box", spec).await?;
    place.available("box").await?;
    let stop = |id: &str| json!({ "state": "Stopped", "requestId": format!("{id}/stop") });
    let start = |id: &str, node: &str| json!({ "state": "Running", "requestId": format!("{id}/start"), "node": node, "whenUnplaceable": "Fail" });
    let go = async |id: &str, node: &str| {
        let args = ["workspace", "move", "box", "--node", node, "--command-id", id];
        said(&place, &args, 0, &format!("is AVAILABLE on {node}")).await
    };
    // Cut off after the stop was requested, after it was done, and after the start was requested.
    place.power("box", stop("one")).await?;
    go("one", &b).await?;
    place.power("box", stop("two")).await?;
    place.phase("box", WorkspacePhase::Stopped, STOP).await?;
    go("two", &a).await?;
    place.power("box", stop("three")).await?;
    place.phase("box", WorkspacePhase::Stopped, STOP).await?;
    place.power("box", start("three", &b)).await?;
    go("three", &b).await?;
    runs_on(&place, "box", &b).await?;

    // The target stops to take Workspaces between the two steps.
    place.power("box", stop("four")).await?;
    place.phase("box", WorkspacePhase::Stopped, STOP).await?;
    said(&place, &["node", "drain", &a], 0, "drain requested").await?;
    let args = ["workspace", "move", "box", "--node", &a, "--command-id", "four"];
    let failed = said(&place, &args, 15, "draining").await?;
    let again = failed.lines().find_map(|line| line.split_once("start it: kibo ")).context("it says how to go on")?.1;
    said(&place, &["node", "cancel-drain", &a], 0, "drain cancelled").await?;
    let words: Vec<&str> = again.split_whitespace().collect();
    said(&place, &words, 0, &format!("is AVAILABLE on {a}")).await?;
    Ok(())
}
