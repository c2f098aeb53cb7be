//! The node that transfers is isolated in the middle.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::{Result, ensure};
use kibo_crds::node::{Node, NodeStatus};
use kibo_crds::{Volume, Workspace};
use kibo_e2e::local::LocalPool;
use kibo_e2e::suite::program::Program;
use kibo_e2e::suite::proxy::Proxy;
use kibo_e2e::suite::{Place, eventually};
use kibo_failpoint::Action;

use crate::LIMIT;
use crate::scene::Scene;

/// The way of the scene's node to the operator, which can be cut, and the pool that another node may have too.
pub struct Way {
    proxy: Proxy,
    pools: Vec<LocalPool>,
}

impl Way {
    pub async fn with_scene(place: &Arc<Place>) -> Result<(Scene, Self)> {
        let proxy = Proxy::to(place.cluster().ports().session).await?;
        let path = place.cluster().layout().root().join("transferred");
        let pools = vec![LocalPool { id: "transferred".to_owned(), path, default: true }];
        let scene = Scene::with(place, |node| {
            node.endpoint = Some(proxy.endpoint());
            node.pools.clone_from(&pools);
        });
        Ok((scene.await?, Self { proxy, pools }))
    }
}

async fn becomes(place: &Place, id: &str, what: &str, reached: impl Fn(&NodeStatus) -> bool) -> Result<()> {
    let reached = |node: &Node| node.status.as_ref().is_some_and(&reached);
    place.watched(place.all::<Node>(), id, what, LIMIT.as_secs(), reached).await.map(drop)
}

/// An export and an import end for whoever asked, and leave nothing; the disks go to another node at once, and what the
/// isolated one still had in hand comes to nothing when it wakes up.
pub async fn meanwhile(scene: &Scene, way: &Way, archive: &str) -> Result<()> {
    let (place, Way { proxy, pools }) = (&scene.place, way);
    let kept: BTreeSet<String> = scene.disks("w").await?.into();
    let daemon = scene.daemon()?;
    daemon.arm(&["export-reading", "import-writing"], Action::Wait)?;
    let cut = scene.path("cut.kibo");
    let mut export = Program::start(place.kibo_command(&["transfer", "export", "w", "--to", &cut]))?;
    let mut import = Program::start(place.kibo_command(&["transfer", "import", archive, "--name", "lost"]))?;
    daemon.all_reached(&["export-reading", "import-writing"], LIMIT).await?;
    let pools = pools.clone();
    place.node_with("1", "512Mi", |node| node.pools = pools).await?;

    place.cluster().pause(&scene.component())?;
    proxy.cut();
    let is_alive = |status: &NodeStatus| status.session.as_ref().is_some_and(|session| session.alive);
    becomes(place, &scene.node, "has no session", |status| !is_alive(status)).await?;
    place.kibo(&["node", "isolate", &scene.node, "--confirm-host-cannot-write"]).await?.ok()?;
    for ended in [&mut export, &mut import] {
        ensure!(ended.ended().await? == 17, "{}", ended.stderr());
    }
    ensure!(!scene.files().iter().any(|name| name.contains("cut.kibo")), "{:?}", scene.files());
    // Both by the other node: nobody waits for the one that is isolated.
    place.gone(place.api::<Workspace>(), "lost", LIMIT.as_secs()).await?;
    place.gone(place.api::<Volume>(), "lost", LIMIT.as_secs()).await?;
    scene.export("w", &cut).await?;

    daemon.clear()?;
    place.cluster().resume(&scene.component())?;
    proxy.mend();
    let gone = async || Ok(place.cluster().process(&scene.component()).is_none().then_some(()));
    eventually("the isolated daemon ends", LIMIT, gone).await?;
    place.cluster().start(&scene.component()).await?;
    becomes(place, &scene.node, "is back", is_alive).await?;
    let clean = async || {
        let there = scene.uids();
        ensure!(there == kept, "{:?}", there.difference(&kept));
        Ok(Some(()))
    };
    eventually("nothing is left of what was broken off", LIMIT, clean).await?;
    scene.import(&cut, "whole").await?;
    scene.same("w", "whole").await
}
