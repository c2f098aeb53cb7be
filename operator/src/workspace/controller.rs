//! Starts this room for one leadership: lists, then works.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use kibo_crds::{NodeId, Template, Volume, Workspace};
use kube::Api;
use tokio::sync::{Notify, broadcast::error::RecvError, mpsc, watch};

use super::{
    hooks::Hooks,
    index::Workspaces,
    placer,
    reconcile::reconcile,
    world::{Bells, Settings, World},
};
use crate::{
    cache::{Cache, Projection, feed},
    context::Ctx,
    queue::{Work, queue},
    session::NodeSnapshot,
    tombstone,
};

/// Waiting starts are looked at at most this often, however many things change.
const WAKE_PAUSE: Duration = Duration::from_millis(200);
/// And at least this often, should a bell ever be missed.
const WAKE_PERIOD: Duration = Duration::from_secs(60);

/// Sessions are compared at most this often.
const SESSIONS_PAUSE: Duration = Duration::from_millis(50);

/// Between two Workspaces that are told that their node is offline.
const OFFLINE_PAUSE: Duration = Duration::from_millis(10);

/// The leadership ended before everything was listed.
#[derive(Debug, thiserror::Error)]
#[error("the leadership ended before the Workspaces were listed")]
pub struct Ended;

/// A room that knows everything and does nothing yet.
pub struct Room {
    world: Arc<World>,
    placements: mpsc::UnboundedReceiver<placer::Request>,
    workspaces: Work,
    volumes: Work,
}

impl Room {
    /// Makes the one complete list of this term, and goes on watching. No session may be accepted before.
    pub async fn open(ctx: Ctx, settings: Settings) -> Result<Self, Ended> {
        let ((workspace_queue, workspaces), (volume_queue, volumes)) = (queue(), queue());
        let bells = Bells {
            workspaces: workspace_queue,
            volumes: volume_queue,
            room: Arc::new(Notify::new()),
            nodes: ctx.nodes.clone(),
        };
        let (sender, placements) = mpsc::unbounded_channel();
        let world = Arc::new(World::new(ctx.clone(), settings, bells, sender));
        let mut listed = vec![
            start_feed(&ctx, Api::<Template>::all(ctx.client.clone()), &world.templates),
            start_feed(&ctx, Api::<Volume>::all(ctx.client.clone()), &world.volumes),
            start_feed(&ctx, Api::<Workspace>::all(ctx.client.clone()), &world.workspaces),
        ];
        for list in &mut listed {
            tokio::select! {
                () = ctx.stop.cancelled() => return Err(Ended),
                done = list.wait_for(|done| *done) => { done.map_err(|_| Ended)?; }
            }
        }
        Ok(Self { world, placements, workspaces, volumes })
    }

    /// What the session server and the node room need; usable from now on.
    pub fn hooks(&self) -> Arc<Hooks> {
        Arc::new(Hooks(self.world.clone()))
    }

    /// All of them, as the leader knows them.
    pub fn workspaces(&self) -> Arc<Workspaces> {
        self.world.workspaces.clone()
    }

    /// Works until the leadership ends, on the context's tracker.
    pub fn run(self) {
        let Self { world, placements, workspaces, volumes } = self;
        let (ctx, stop) = (world.ctx.clone(), world.ctx.stop.clone());
        let for_workspaces = world.clone();
        ctx.tasks.spawn(
            workspaces
                .run(world.bells.workspaces.clone(), stop.clone(), move |key| reconcile(for_workspaces.clone(), key)),
        );
        let for_volumes = world.clone();
        ctx.tasks.spawn(volumes.run(world.bells.volumes.clone(), stop.clone(), move |key| {
            crate::volume::reconcile::reconcile(for_volumes.clone(), key)
        }));
        ctx.tasks.spawn(stop.clone().run_until_cancelled_owned(placer::run(world.clone(), placements)));
        ctx.tasks.spawn(stop.clone().run_until_cancelled_owned(wake_waiting(world.clone())));
        ctx.tasks.spawn(stop.clone().run_until_cancelled_owned(follow_sessions(world.clone())));
        ctx.tasks.spawn(stop.clone().run_until_cancelled_owned(follow_nodes(world.clone())));
        ctx.tasks.spawn(stop.clone().run_until_cancelled_owned(follow_watchdog(world.clone())));
        ctx.tasks.spawn(stop.clone().run_until_cancelled_owned(look_again_when_settled(world)));
        ctx.tasks.spawn(tombstone::run(ctx.client.clone(), stop));
    }
}

fn start_feed<K, P>(ctx: &Ctx, api: Api<K>, cache: &Arc<Cache<K, P>>) -> watch::Receiver<bool>
where
    K: kube::Resource<DynamicType = ()> + Clone + serde::de::DeserializeOwned + std::fmt::Debug + Send + Sync + 'static,
    P: Projection<K> + 'static,
{
    let (sender, listed) = watch::channel(false);
    ctx.tasks.spawn(ctx.stop.clone().run_until_cancelled_owned(feed(api, cache.clone(), sender)));
    listed
}

impl World {
    /// Looks at everything that names the node.
    pub(super) fn wake_node(&self, node: &NodeId) {
        for key in self.workspaces.project(|index| index.keys_of(node)) {
            self.bells.workspaces.push(key);
        }
        for key in self.volumes.project(|index| index.keys_of(node)) {
            self.bells.volumes.push(key);
        }
    }

    fn wake_all(&self) {
        self.workspaces.keys().into_iter().for_each(|key| self.bells.workspaces.push(key));
        self.volumes.keys().into_iter().for_each(|key| self.bells.volumes.push(key));
    }
}

async fn wake_waiting(world: Arc<World>) {
    let mut sessions = world.ctx.registry.changes();
    loop {
        tokio::select! {
            () = world.bells.room.notified() => {}
            changed = sessions.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(WAKE_PERIOD) => {}
        }
        for key in world.take_waiting() {
            world.bells.workspaces.push(key);
        }
        tokio::time::sleep(WAKE_PAUSE).await;
    }
}

/// A session that came or went concerns what is on its node, and deletions in the pools that it reaches.
async fn follow_sessions(world: Arc<World>) {
    let mut changes = world.ctx.registry.moves();
    let mut known: HashMap<NodeId, String> = HashMap::new();
    let mut reached = BTreeSet::new();
    loop {
        let snapshots = world.ctx.registry.snapshot();
        // Who reaches which pool now, whatever is free there.
        let reach = |snapshot: &NodeSnapshot| {
            let pools = snapshot.pools.iter().filter(|pool| pool.available);
            pools.map(|pool| (snapshot.id.clone(), pool.uid.clone())).collect::<Vec<_>>()
        };
        let reaches: BTreeSet<_> = snapshots.iter().flat_map(reach).collect();
        let now: HashMap<_, _> = snapshots
            .into_iter()
            .filter(|snapshot| snapshot.desired_sent)
            .map(|snapshot| (snapshot.id, snapshot.session_id))
            .collect();
        let moved: Vec<_> = now
            .iter()
            .filter(|(node, session)| known.get(*node) != Some(*session))
            .chain(known.iter().filter(|(node, _)| !now.contains_key(*node)))
            .map(|(node, _)| node.clone())
            .collect();
        for node in &moved {
            world.wake_node(node);
        }
        if now.len() > known.len() || !moved.is_empty() {
            world.wake_deletions();
        }
        if reaches != reached {
            world.wake_stranded();
        }
        if reaches != reached || !moved.is_empty() {
            world.wake_moving();
        }
        (known, reached) = (now, reaches);
        tokio::time::sleep(SESSIONS_PAUSE).await;
        if changes.changed().await.is_err() {
            return;
        }
    }
}

async fn follow_nodes(world: Arc<World>) {
    let mut changed = world.ctx.nodes.changed();
    loop {
        match changed.recv().await {
            Ok(node) => world.wake_node(&node),
            Err(RecvError::Lagged(_)) => world.wake_all(),
            Err(RecvError::Closed) => return,
        }
    }
}

/// The Workspaces of a node that is offline say so, one after the other: nobody waits for it.
async fn follow_watchdog(world: Arc<World>) {
    let mut told = world.ctx.watchdog.told();
    loop {
        match told.recv().await {
            Ok(node) => {
                for key in world.workspaces.project(|index| index.keys_of(&node)) {
                    world.bells.workspaces.push(key);
                    tokio::time::sleep(OFFLINE_PAUSE).await;
                }
            }
            Err(RecvError::Lagged(_)) => world.wake_all(),
            Err(RecvError::Closed) => return,
        }
    }
}

/// What was not said while the nodes were given time to come back.
async fn look_again_when_settled(world: Arc<World>) {
    tokio::time::sleep(world.settled_at()).await;
    world.wake_all();
}

impl World {
    /// Where they can start changes with the nodes that reach their pools.
    fn wake_stranded(&self) {
        for key in self.workspaces.project(super::index::ByNode::stranded) {
            self.bells.workspaces.push(key);
        }
    }

    /// Moves wait for nodes that reach two pools, or one that has something left over.
    fn wake_moving(&self) {
        for key in self.workspaces.project(super::index::ByNode::moving) {
            self.bells.workspaces.push(key);
        }
        for key in self.volumes.project(crate::volume::index::ByHolder::moving) {
            self.bells.volumes.push(key);
        }
    }

    /// Deletions wait for any member of a pool, which no holder names.
    fn wake_deletions(&self) {
        for key in self.workspaces.project(super::index::ByNode::deleting) {
            self.bells.workspaces.push(key);
        }
        for key in self.volumes.project(crate::volume::index::ByHolder::deleting) {
            self.bells.volumes.push(key);
        }
    }
}
