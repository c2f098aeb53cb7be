//! What the shells of Workspaces and Volumes share during one leadership.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use kibo_crds::{Incarnation, InstanceId, NodeId, PoolId, Template, Volume, Workspace, workspace::WorkspaceStatus};
use kube::{
    Api, Resource, ResourceExt,
    runtime::events::{Event, EventType},
};
use tokio::sync::{Notify, Semaphore, mpsc};

use super::{
    decide::idle::volume_name,
    draft::Notice,
    index::{Workspaces, nodes_of},
    ledger::Ledger,
    placer,
    sight::Cluster,
    stopwatch::Stopwatch,
    sums,
};
use crate::{
    cache::{Cache, Key, Projection},
    context::Ctx,
    guarded::{self, WriteError},
    moving::{Heard, Hearsay},
    node::{NodeIndex, Void},
    placement::Strategy,
    queue::Queue,
    space::Room,
    transfer::{Wish, Wishes},
    volume::Volumes,
};

/// Requests to the API server that this room has under way at once.
const API_CALLS: usize = 64;
/// A new leader gives every node this long to come back before it says that one is missing.
const SETTLING: Duration = Duration::from_secs(10);
/// Settings, clock and pools of a new session are in order much sooner, or its session ends.
const SET_UP_WITHIN: Duration = Duration::from_secs(20);
/// A node that refused a start, or did not make it in time, is not asked again for so long.
const AVOID_FOR: Duration = Duration::from_secs(15);

/// How this room behaves; from the operator's flags.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub strategy: Strategy,
    /// How long the record of a deleted Workspace is kept.
    pub tombstone_ttl: Duration,
}

#[derive(Default)]
pub struct Nothing;

impl Projection<Template> for Nothing {
    fn replace(&mut self, _: &Key, _: Option<&Template>, _: Option<&Template>) {}
}

pub type Templates = Cache<Template, Nothing>;

pub struct World {
    pub ctx: Ctx,
    pub settings: Settings,
    pub workspaces: Arc<Workspaces>,
    pub volumes: Arc<Volumes>,
    pub templates: Arc<Templates>,
    pub ledger: Ledger,
    pub stopwatch: Stopwatch,
    /// What nodes said of moves.
    pub hearsay: Hearsay,
    /// Who waits for the disks of which Workspace.
    pub transfers: Wishes,
    pub bells: Bells,
    pub(super) placements: mpsc::UnboundedSender<placer::Request>,
    /// Starts that wait until something changes.
    pub(super) waiting: Mutex<BTreeSet<Key>>,
    /// When a Workspace's messages were last written, to write no more often than a person reads.
    pub(super) worded: Mutex<HashMap<Key, Instant>>,
    told: Mutex<HashSet<InstanceId>>,
    /// By the uid of the Workspace.
    avoided: Mutex<HashMap<String, Refusals>>,
    api_calls: Semaphore,
    born: Instant,
}

/// Nodes that lately refused a Workspace: when, and in which words.
type Refusals = BTreeMap<NodeId, (Instant, String)>;

/// Whom to wake.
#[derive(Clone)]
pub struct Bells {
    pub workspaces: Queue,
    pub volumes: Queue,
    /// Something changed that may give a waiting start its place.
    pub room: Arc<Notify>,
    pub nodes: NodeIndex,
}

impl Bells {
    /// What a new version of a Workspace means for everything else.
    pub fn workspace_changed(&self, key: &Key, old: Option<&Workspace>, new: Option<&Workspace>) {
        self.workspaces.push(key.clone());
        let transfer = |status: &WorkspaceStatus| status.transfer.as_ref().map(|it| (it.id, it.state));
        let uses = |workspace: Option<&Workspace>| {
            let status = workspace.and_then(|w| w.status.as_ref());
            status.map(|status| (status.execution.clone(), (status.holder.clone(), transfer(status))))
        };
        let (before, after) = (uses(old), uses(new));
        if before != after {
            for node in old.into_iter().chain(new).flat_map(nodes_of).collect::<BTreeSet<_>>() {
                self.nodes.touch(node);
            }
        }
        let executes = |uses: &Option<(Option<_>, _)>| uses.as_ref().is_some_and(|(execution, _)| execution.is_some());
        if executes(&before) && !executes(&after) {
            self.room.notify_one();
        }
        if (before != after || new.is_none())
            && let Some(binding) = old.or(new).and_then(|workspace| workspace.spec.volume.as_ref())
        {
            self.volumes.push(Key::new(&key.namespace, &volume_name(binding, &key.name)));
        }
    }

    pub fn volume_changed(&self, key: &Key, old: Option<&Volume>, new: Option<&Volume>) {
        self.volumes.push(key.clone());
        let statuses = || old.into_iter().chain(new).filter_map(|volume| volume.status.as_ref());
        for bound in statuses().filter_map(|status| status.bound_to.as_ref()) {
            self.workspaces.push(Key::new(&key.namespace, &bound.name));
        }
        for holder in statuses().filter_map(|status| status.holder.as_ref()) {
            self.nodes.touch(&holder.node);
        }
        self.room.notify_one();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no holder of this lock panics")
}

impl World {
    pub(super) fn new(
        ctx: Ctx,
        settings: Settings,
        bells: Bells,
        placements: mpsc::UnboundedSender<placer::Request>,
    ) -> Self {
        let (ws_bells, volume_bells, room) = (bells.clone(), bells.clone(), bells.room.clone());
        Self {
            workspaces: Arc::new(Cache::new(Box::new(move |key, old, new| ws_bells.workspace_changed(key, old, new)))),
            volumes: Arc::new(Cache::new(Box::new(move |key, old, new| volume_bells.volume_changed(key, old, new)))),
            templates: Arc::new(Cache::new(Box::new(move |_, _, _| room.notify_one()))),
            ledger: Ledger::new(ctx.nodes.clone(), bells.room.clone()),
            stopwatch: Stopwatch::default(),
            hearsay: Hearsay::default(),
            transfers: Wishes::default(),
            settings,
            bells,
            placements,
            waiting: Mutex::default(),
            worded: Mutex::default(),
            told: Mutex::default(),
            avoided: Mutex::default(),
            api_calls: Semaphore::new(API_CALLS),
            born: Instant::now(),
            ctx,
        }
    }

    pub fn workspace_api(&self, namespace: &str) -> Api<Workspace> {
        Api::namespaced(self.ctx.client.clone(), namespace)
    }

    pub fn volume_api(&self, namespace: &str) -> Api<Volume> {
        Api::namespaced(self.ctx.client.clone(), namespace)
    }

    /// A turn among the requests to the API server.
    pub async fn turn(&self) -> Option<tokio::sync::SemaphorePermit<'_>> {
        self.api_calls.acquire().await.ok()
    }

    pub async fn write_workspace(&self, observed: &Workspace, status: WorkspaceStatus) -> Result<(), WriteError> {
        let _turn = self.turn().await;
        let api = self.workspace_api(&Key::of(observed).namespace);
        let written = guarded::replace_status(&api, observed, status, self.ctx.term).await;
        self.noted(written, |written| self.workspaces.observe(written))
    }

    pub async fn write_volume(
        &self,
        observed: &Volume,
        status: kibo_crds::volume::VolumeStatus,
    ) -> Result<(), WriteError> {
        let _turn = self.turn().await;
        let api = self.volume_api(&Key::of(observed).namespace);
        let written = guarded::replace_status(&api, observed, status, self.ctx.term).await;
        self.noted(written, |written| self.volumes.observe(written))
    }

    /// A newer leader exists: this one ends.
    pub fn noted<K>(&self, written: Result<K, WriteError>, observe: impl FnOnce(K) -> bool) -> Result<(), WriteError> {
        if let Err(error @ WriteError::StaleTerm { .. }) = &written {
            tracing::error!(%error, "a newer leader is at work: this one ends");
            self.ctx.stop.cancel();
        }
        written.map(|written| {
            observe(written);
        })
    }

    /// Reads an object anew after a conflict.
    pub async fn refresh_workspace(&self, key: &Key) -> Result<(), kube::Error> {
        let _turn = self.turn().await;
        let found = self.workspace_api(&key.namespace).get_opt(&key.name).await?;
        refresh(&self.workspaces, key, found);
        Ok(())
    }

    pub async fn refresh_volume(&self, key: &Key) -> Result<(), kube::Error> {
        let _turn = self.turn().await;
        let found = self.volume_api(&key.namespace).get_opt(&key.name).await?;
        refresh(&self.volumes, key, found);
        Ok(())
    }

    pub fn template_of(&self, workspace: &Workspace) -> Option<Arc<Template>> {
        self.templates.get(&Key::new("", &workspace.spec.template))
    }

    /// The Volume that the spec names.
    pub fn volume_of(&self, workspace: &Workspace) -> Option<Arc<Volume>> {
        let binding = workspace.spec.volume.as_ref()?;
        let name = volume_name(binding, &workspace.name_any());
        self.volumes.get(&Key::new(&workspace.namespace().unwrap_or_default(), &name))
    }

    /// The node is told of this execution in its current session.
    pub fn tell(&self, instance: InstanceId) {
        lock(&self.told).insert(instance);
    }

    pub fn forget_told(&self, instance: InstanceId) {
        lock(&self.told).remove(&instance);
    }

    pub fn avoid(&self, workspace_uid: &str, node: &NodeId, words: &str) {
        let until = Instant::now() + AVOID_FOR;
        lock(&self.avoided)
            .entry(workspace_uid.to_owned())
            .or_default()
            .insert(node.clone(), (until, words.to_owned()));
    }

    /// Nodes that this Workspace is not to be offered to now, with what they said.
    pub fn avoided(&self, workspace_uid: &str) -> BTreeMap<NodeId, String> {
        let mut avoided = lock(&self.avoided);
        let now = Instant::now();
        avoided.retain(|_, nodes| {
            nodes.retain(|_, (until, _)| *until > now);
            !nodes.is_empty()
        });
        let nodes = avoided.get(workspace_uid).into_iter().flatten();
        nodes.map(|(node, (_, words))| (node.clone(), words.clone())).collect()
    }

    pub fn wait_for_room(&self, key: Key) {
        lock(&self.waiting).insert(key);
    }

    pub(super) fn take_waiting(&self) -> BTreeSet<Key> {
        std::mem::take(&mut *lock(&self.waiting))
    }

    /// How long until the messages of this Workspace may be written again; `None`: now.
    pub(super) fn words_rest(&self, key: &Key, pause: Duration) -> Option<Duration> {
        lock(&self.worded).get(key).and_then(|at| pause.checked_sub(at.elapsed())).filter(|rest| !rest.is_zero())
    }

    pub(super) fn worded(&self, key: Key) {
        lock(&self.worded).insert(key, Instant::now());
    }

    /// The Workspace is gone.
    pub(super) fn forget(&self, key: &Key) {
        lock(&self.worded).remove(key);
        lock(&self.waiting).remove(key);
        self.transfers.keep(|uid| self.workspaces.by_uid(uid).is_some());
    }

    /// Whether a node that has lived is not connected yet, or not ready to take something.
    pub(super) fn expects_nodes(&self) -> bool {
        self.ctx.nodes.expected().iter().any(|node| {
            let snapshot = self.ctx.registry.snapshot_of(node);
            !snapshot.is_some_and(|snapshot| snapshot.is_settled())
        })
    }

    /// Whether a session is so new that its node may still be being set up: of this node, or of any.
    pub(super) fn has_new_session(&self, node: Option<&NodeId>) -> bool {
        self.ctx.registry.has_opened_within(SET_UP_WITHIN, node)
    }

    pub fn settled_at(&self) -> Duration {
        SETTLING.saturating_sub(self.born.elapsed())
    }

    /// Tells people of failures and firsts. Nothing depends on it.
    pub async fn publish<K: Resource<DynamicType = ()>>(&self, object: &K, notices: Vec<Notice>) {
        for notice in notices {
            let event = Event {
                type_: if notice.is_warning { EventType::Warning } else { EventType::Normal },
                reason: notice.reason,
                note: Some(notice.message),
                action: "Reconcile".into(),
                secondary: None,
            };
            if let Err(error) = self.ctx.recorder.publish(&event, &object.object_ref(&())).await {
                tracing::warn!(object = guarded::describe(object), %error, "an event could not be recorded");
            }
        }
    }
}

fn refresh<K: Resource + Clone, P: Projection<K>>(cache: &Cache<K, P>, key: &Key, found: Option<K>) {
    let known = cache.get(key).and_then(|known| known.uid());
    let found_uid = found.as_ref().and_then(ResourceExt::uid);
    if let Some(uid) = known.filter(|uid| Some(uid) != found_uid.as_ref()) {
        cache.forget(key, &uid);
    }
    if let Some(found) = found {
        cache.observe(found);
    }
}

impl Cluster for World {
    fn void(&self, node: &NodeId, incarnation: Incarnation) -> Option<Void> {
        self.ctx.nodes.void(node, incarnation)
    }

    fn session(&self, node: &NodeId) -> Option<Incarnation> {
        let snapshot = self.ctx.registry.snapshot_of(node)?;
        snapshot.desired_sent.then_some(snapshot.incarnation)
    }

    fn is_offline(&self, node: &NodeId) -> bool {
        self.ctx.watchdog.is_told(node)
    }

    fn is_settling(&self) -> bool {
        self.born.elapsed() < SETTLING
    }

    fn others_reach(&self, pool: &PoolId, node: &NodeId) -> bool {
        self.ctx.pools.has_other_member(pool, node)
    }

    fn reachable_members(&self, pool: &PoolId) -> Vec<(NodeId, Incarnation)> {
        let reaches = |node: NodeId| {
            let snapshot = self.ctx.registry.snapshot_of(&node).filter(|snapshot| snapshot.desired_sent)?;
            let declares =
                snapshot.pools.iter().any(|p| p.id == *pool && p.available && self.ctx.pools.has_marker(pool, &p.uid));
            declares.then_some((node, snapshot.incarnation))
        };
        self.members(pool).into_iter().filter_map(reaches).collect()
    }

    fn is_lost(&self, pool: &PoolId) -> bool {
        self.ctx.pools.is_lost(pool)
    }

    fn members(&self, pool: &PoolId) -> Vec<NodeId> {
        let members = self.ctx.pools.members(pool);
        members.into_iter().map(|member| member.node).collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn room_in(&self, pool: &PoolId) -> Option<Room> {
        sums::room_in(self, pool)
    }

    fn was_told(&self, instance: InstanceId) -> bool {
        lock(&self.told).contains(&instance)
    }

    fn free_in(&self, node: &NodeId, pool: &PoolId) -> Option<Room> {
        sums::room_of(self, node, pool)
    }

    fn heard(&self, uid: &str) -> Heard {
        self.hearsay.of(uid)
    }

    fn transfer(&self, uid: &str) -> Option<Wish> {
        self.transfers.of(uid)
    }
}
