//! What each message of the operator makes this node do.
//!
//! Messages are handled one after the other, so that a Stop never overtakes the Go of its Instance;
//! whatever takes time goes on in the background.

use std::{collections::HashMap, sync::Arc};

use kibo_crds::{Incarnation, PoolId};
use kibo_protocol::v1::{self, fence_seen, from_node, to_node::Message};
use tokio_util::sync::CancellationToken;

use super::{
    ack,
    backoff::End,
    control::InstanceControl,
    live, moves,
    node::Node,
    outbox::Outbox,
    settle::{NotHere, settle},
    streams::{self, SessionEnd, Way},
};
use crate::{
    admission::Settings,
    clock::BootTime,
    instance::StopMode,
    launch::{By, GrantedObject, InvalidMessage, Launch, LaunchRequest, Operation, Taker, instance_id},
    pool::{Beat, PoolEntry, PoolError, Pools},
};

pub struct Handler<I> {
    node: Arc<Node<I>>,
    incarnation: Incarnation,
    outbox: Outbox,
    way: Way,
    desired: Vec<v1::Desired>,
    streams: HashMap<String, CancellationToken>,
    /// Ends every stream with the session.
    closed: SessionEnd,
}

fn stop_mode(mode: v1::StopMode) -> StopMode {
    match mode {
        v1::StopMode::Force => StopMode::Force,
        v1::StopMode::Normal | v1::StopMode::Unspecified => StopMode::Normal,
    }
}

impl<I: InstanceControl> Handler<I> {
    /// Applies the settings of an accepted Hello.
    pub fn begin(
        node: Arc<Node<I>>,
        incarnation: Incarnation,
        outbox: Outbox,
        way: Way,
        ack: &v1::HelloAck,
    ) -> Result<Self, End> {
        let desired = ack.desired.clone();
        let handler =
            Self { node, incarnation, outbox, way, desired, streams: HashMap::new(), closed: SessionEnd::default() };
        let settings = ack.settings.as_ref().ok_or_else(|| End::Disobeyed("the HelloAck has no settings".into()))?;
        handler.apply(settings)?;
        Ok(handler)
    }

    pub fn close(&self, end: &End) {
        self.closed.close(match end {
            End::Refused { .. } => format!("the operator ended the session of node {}: try again", self.node.id),
            _ => format!("node {} lost its operator, whose leader may have changed: try again", self.node.id),
        });
    }

    fn taker(&self, by: By) -> Taker {
        Taker { node: self.node.id.clone(), incarnation: self.incarnation, by }
    }

    fn launch(&self, message: Option<v1::Launch>) -> Result<Launch, InvalidMessage> {
        let missing = || InvalidMessage { field: "launch", problem: "it is missing".into() };
        Launch::read(message.ok_or_else(missing)?, self.node.id.clone(), self.incarnation)
    }

    /// Starts what the control plane holds for this node and this node does not know, and stops what
    /// is to stop.
    pub async fn start_desired(&mut self) {
        for desired in std::mem::take(&mut self.desired) {
            let stop = desired.stop.map(|_| stop_mode(desired.stop()));
            match self.launch(desired.launch) {
                Ok(launch) => self.desire(launch, stop).await,
                Err(error) => tracing::error!(%error, "an Instance of the desired set cannot be understood"),
            }
        }
    }

    async fn desire(&self, launch: Launch, stop: Option<StopMode>) {
        let instance = launch.instance();
        if let Some(problem) = self.node.instances.problem(instance) {
            self.tell_problem(&launch, problem).await;
        }
        match stop {
            _ if self.node.is_over(instance) => {}
            Some(mode) => {
                if !self.node.instances.stop(instance, mode) {
                    self.not_here(launch, "it was to be stopped and does not run here".into());
                }
            }
            None if self.node.is_listed(instance) => {}
            None => match self.node.admission.committed(&launch, &self.node.instances.list(), BootTime::now()) {
                Ok(()) => self.start(launch).await,
                Err(refusal) => self.not_here(launch, refusal.message),
            },
        }
    }

    /// Says with the Workspace what its Instance waits for: only the operator knows which Workspace that is.
    async fn tell_problem(&self, launch: &Launch, problem: String) {
        let (spool, instance, workspace) =
            (Arc::clone(&self.node.spool), launch.instance(), launch.workspace.uid.clone());
        let blocked = v1::instance_event::Kind::Blocked(v1::Blocked { message: problem });
        let told = tokio::task::spawn_blocking(move || spool.append(instance, &workspace, blocked)).await;
        match told {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::warn!(%instance, %error, "what an Instance waits for cannot be told"),
            Err(error) => tracing::error!(%instance, %error, "what an Instance waits for cannot be told"),
        }
    }

    async fn start(&self, launch: Launch) {
        let instance = launch.instance();
        self.node.instances.start(launch).await;
        self.node.admission.registered(instance);
    }

    fn not_here(&self, launch: Launch, message: String) {
        let objects = launch.objects().cloned().collect();
        let workspace_uid = launch.workspace.uid;
        settle(&self.node, NotHere { instance: launch.instance, taker: launch.taker, workspace_uid, objects, message });
    }

    /// Does what a message says. An error ends the session.
    pub async fn handle(&mut self, message: v1::ToNode) -> Result<(), End> {
        let is_new_term = ack::check_term(self.node.state.get().highest_term, message.term).map_err(End::Disobeyed)?;
        if is_new_term {
            let term = kibo_crds::Term(message.term);
            self.node.state.update(|record| record.highest_term = term).map_err(|e| End::Local(e.to_string()))?;
        }
        match message.message {
            Some(Message::HelloAck(_)) => return Err(End::Disobeyed("the operator answered the Hello twice".into())),
            Some(Message::TakeInventory(_)) => {
                return Err(End::Disobeyed("the operator asks for an inventory in the middle of a session".into()));
            }
            Some(Message::Moment(moment)) => {
                let latest = Some(moment.into());
                self.node.state.update(|record| record.latest = latest).map_err(|e| End::Local(e.to_string()))?;
            }
            Some(Message::Refused(refused)) => return Err(live::refusal(&refused)),
            Some(Message::Settings(settings)) => self.apply(&settings)?,
            Some(Message::Offer(offer)) => self.offer(&offer),
            Some(Message::Revoke(revoke)) => self.node.admission.revoke(&revoke.offer_id),
            Some(Message::Go(go)) => self.go(go).await,
            Some(Message::Stop(stop)) => self.stop(&stop),
            Some(Message::TearDown(tear_down)) => self.tear_down(&tear_down),
            Some(Message::EventAck(ack)) => self.ack(&ack).await,
            Some(Message::DeleteObject(delete)) => {
                self.object(delete.command_id, delete.object.as_ref(), Command::Delete);
            }
            Some(Message::ConfirmNotTaken(confirm)) => {
                self.object(confirm.command_id, confirm.object.as_ref(), Command::ConfirmNotTaken);
            }
            Some(Message::ClockProbe(probe)) => {
                let reading = crate::host::clock::read(probe.probe);
                self.outbox.send(from_node::Message::ClockReading(reading));
            }
            Some(Message::OpenStream(open)) => self.open_stream(open),
            Some(Message::LookAtFence(look)) => self.look_at_fence(look),
            Some(Message::ListPool(list)) => self.list_pool(list),
            Some(Message::RemoveUnowned(remove)) => self.remove_unowned(remove),
            Some(Message::LostPools(lost)) => {
                self.node.lose_pools(&lost.ids).map_err(|error| End::Local(error.to_string()))?;
            }
            Some(Message::CloseStream(close)) => {
                if let Some(stream) = self.streams.remove(&close.stream_id) {
                    stream.cancel();
                }
            }
            Some(Message::MoveObject(order)) => self.move_object(&order),
            Some(Message::DiscardCopy(discard)) => self.discard_copy(discard),
            // Of a newer operator: it knows from the version that this node cannot do it.
            None => {
                tracing::debug!("a message of an unknown kind is ignored");
            }
        }
        Ok(())
    }

    fn apply(&self, message: &v1::Settings) -> Result<(), End> {
        let settings = Settings::read(message).ok_or_else(|| {
            End::Disobeyed("the settings have a ratio beyond 16, or thresholds of memory that are none".into())
        })?;
        self.node.admission.apply(settings);
        let revision = settings.revision;
        let (cpu_ratio, memory_ratio) = (settings.cpu_ratio, settings.memory_ratio);
        tracing::info!(revision, drain = settings.drain, slots = settings.slots, %cpu_ratio, %memory_ratio, "settings applied");
        self.outbox.send(from_node::Message::SettingsApplied(v1::SettingsApplied { revision }));
        Ok(())
    }

    fn offer(&self, offer: &v1::Offer) {
        let offer_id = offer.offer_id.clone();
        let missing = || InvalidMessage { field: "launch", problem: "it is missing".into() };
        let request = offer.launch.as_ref().ok_or_else(missing).and_then(LaunchRequest::read);
        let refusal = match request {
            Err(error) => Some((v1::RefuseReason::Invalid, error.to_string())),
            Ok(request) if self.node.is_over(request.instance) => {
                Some((v1::RefuseReason::Stale, format!("{} has ended here", request.instance)))
            }
            Ok(request) => {
                let instances = self.node.instances.list();
                let decision = self.node.admission.offer(&offer_id, &request, &instances, BootTime::now());
                kibo_failpoint::reach_blocking("offer-decided");
                decision.err().map(|refusal| (refusal.reason, refusal.message))
            }
        };
        let answer = match refusal {
            None => from_node::Message::Accept(v1::Accept { offer_id }),
            Some((reason, message)) => {
                tracing::info!(offer = offer_id, reason = reason.as_str_name(), message, "offer refused");
                from_node::Message::Refuse(v1::Refuse { offer_id, reason: reason.into(), message })
            }
        };
        self.outbox.send(answer);
    }

    async fn go(&self, go: v1::Go) {
        let launch = match self.launch(go.launch) {
            Ok(launch) => launch,
            Err(error) => {
                tracing::error!(offer = go.offer_id, %error, "a Go cannot be understood");
                return;
            }
        };
        let instance = launch.instance();
        if self.node.is_over(instance) || self.node.is_listed(instance) {
            return;
        }
        match self.node.admission.go(&go.offer_id, &launch, BootTime::now()) {
            Ok(()) => {
                kibo_failpoint::reach("go-received").await;
                self.start(launch).await;
            }
            Err(message) => self.not_here(launch, message),
        }
    }

    fn stop(&self, stop: &v1::Stop) {
        let instance = match instance_id(&stop.instance_id) {
            Ok(instance) => instance,
            Err(error) => return tracing::error!(%error, "a Stop cannot be understood"),
        };
        if self.node.is_over(instance) || self.node.instances.stop(instance, stop_mode(stop.mode())) {
            return;
        }
        let mut objects = Vec::new();
        for object in &stop.objects {
            match GrantedObject::try_from(object) {
                Ok(object) => objects.push(object),
                Err(error) => tracing::error!(%instance, %error, "an object of a Stop cannot be understood"),
            }
        }
        // A Workspace's own object, its writable layer, comes first.
        let workspace_uid = stop.objects.first().map(|object| object.uid.clone()).unwrap_or_default();
        let message = "it was to be stopped and does not run here".into();
        let taker = self.taker(By::Instance(instance));
        settle(&self.node, NotHere { instance, taker, workspace_uid, objects, message });
    }

    fn tear_down(&self, tear_down: &v1::TearDown) {
        match instance_id(&tear_down.instance_id) {
            Ok(instance) => {
                let is_here = self.node.instances.tear_down(instance, &tear_down.reason);
                tracing::warn!(%instance, is_here, reason = tear_down.reason, "told to tear down");
            }
            Err(error) => tracing::error!(%error, "a TearDown cannot be understood"),
        }
    }

    async fn ack(&self, ack: &v1::EventAck) {
        let Ok(instance) = instance_id(&ack.instance_id) else { return };
        let (spool, seq) = (Arc::clone(&self.node.spool), ack.seq);
        // May compact a journal, which waits for the disk.
        if let Err(error) = tokio::task::spawn_blocking(move || spool.ack(instance, seq)).await {
            tracing::error!(%instance, %error, "noting an acknowledgement failed");
        }
    }

    fn object(&self, command_id: String, object: Option<&v1::Object>, command: Command) {
        let granted = object
            .ok_or_else(|| InvalidMessage { field: "object", problem: "it is missing".into() })
            .and_then(GrantedObject::try_from);
        let granted = match granted {
            Ok(granted) => granted,
            Err(error) => return tracing::error!(command = command_id, %error, "a command cannot be understood"),
        };
        let (node, outbox) = (Arc::clone(&self.node), self.outbox.clone());
        let deletion = self.taker(By::Operation(Operation::Deletion));
        let moving = Arc::clone(&node);
        let (uid, epoch, pool) = (granted.object.uid.clone(), granted.grant.epoch, granted.object.pool.clone());
        let work = move || {
            let result = node.pools.get(&granted.object.pool).and_then(|pool| match command {
                Command::Delete => pool.delete(&granted, &deletion).map(|()| v1::ObjectUse::Released),
                Command::ConfirmNotTaken => pool.confirm_not_taken(&granted, |taker| node.is_here(&granted, taker)),
            });
            if let Err(error) = &result {
                tracing::warn!(object = %granted.object.uid, %error, "a command on an object failed");
            }
            if matches!((command, &result), (Command::Delete, Ok(_))) {
                node.instances.forget_log(&granted.object.uid);
            }
            outbox.send(from_node::Message::ObjectResult(object_result(command_id, &granted, result)));
        };
        tokio::spawn(async move {
            if matches!(command, Command::ConfirmNotTaken) {
                moving.moves.let_go(&uid, epoch, &pool);
                // Who asks does not want a transfer by this grant, whose client may not know that yet.
                moving.transfers.stop(&uid, epoch, moving.is_lost()).await;
            }
            // Its errors are in the result.
            let _ = tokio::task::spawn_blocking(work).await;
        });
    }

    fn move_object(&self, order: &v1::MoveObject) {
        let missing = || InvalidMessage { field: "object", problem: "it is missing".into() };
        let granted = order.object.as_ref().ok_or_else(missing).and_then(GrantedObject::try_from);
        let to = order.to_pool.parse::<PoolId>();
        let (granted, to) = match (granted, to) {
            (Ok(granted), Ok(to)) => (granted, to),
            (Err(error), _) => return tracing::error!(%error, "an order to move cannot be understood"),
            (_, Err(error)) => return tracing::error!(%error, "an order to move cannot be understood"),
        };
        let taker = self.taker(By::Operation(Operation::Move));
        moves::start(&self.node, &self.outbox, moves::Order { granted, to, taker });
    }

    fn discard_copy(&self, discard: v1::DiscardCopy) {
        let missing = || InvalidMessage { field: "object", problem: "it is missing".into() };
        let granted = match discard.object.as_ref().ok_or_else(missing).and_then(GrantedObject::try_from) {
            Ok(granted) => granted,
            Err(error) => return tracing::error!(%error, "an order to discard a copy cannot be understood"),
        };
        let (node, outbox) = (Arc::clone(&self.node), self.outbox.clone());
        tokio::spawn(async move {
            let (uid, epoch) = (granted.object.uid.clone(), granted.grant.epoch);
            let (pools, pool) = (Arc::clone(&node.pools), granted.object.pool.clone());
            node.moves.stop(&uid, epoch, &pool, node.is_lost()).await;
            let discarded =
                tokio::task::spawn_blocking(move || pools.get(&pool).and_then(|pool| pool.discard_copy(&uid, epoch)));
            let Ok(discarded) = discarded.await else { return };
            if let Err(error) = &discarded {
                tracing::warn!(object = %granted.object.uid, %error, "a copy was not removed");
            }
            let result = discarded.map(|()| v1::ObjectUse::Unspecified);
            outbox.send(from_node::Message::ObjectResult(object_result(discard.command_id, &granted, result)));
        });
    }

    /// On a thread of its own: a pool may hang.
    fn look_at_fence(&self, look: v1::LookAtFence) {
        let (node, outbox) = (Arc::clone(&self.node), self.outbox.clone());
        tokio::task::spawn_blocking(move || {
            let result = match seen(&node.pools, &look) {
                Ok(Some(beat)) => fence_seen::Result::File(v1::FenceFile {
                    incarnation: beat.incarnation.unwrap_or_default().0,
                    heartbeat: beat.heartbeat,
                }),
                Ok(None) => fence_seen::Result::Missing(true),
                Err(problem) => fence_seen::Result::Problem(problem),
            };
            outbox.send(from_node::Message::FenceSeen(v1::FenceSeen { look_id: look.look_id, result: Some(result) }));
        });
    }

    fn list_pool(&self, list: v1::ListPool) {
        let (node, outbox) = (Arc::clone(&self.node), self.outbox.clone());
        tokio::task::spawn_blocking(move || {
            outbox.send(from_node::Message::PoolListing(listing(&node.pools, list)));
        });
    }

    fn remove_unowned(&self, remove: v1::RemoveUnowned) {
        let (node, outbox) = (Arc::clone(&self.node), self.outbox.clone());
        let taker = self.taker(By::Operation(Operation::Deletion));
        tokio::task::spawn_blocking(move || {
            let v1::RemoveUnowned { command_id, pool, pool_uid, uid } = remove;
            let (Ok(pool), Ok(object)) = (pool.parse(), uid.parse()) else {
                return tracing::error!(command = command_id, "a command cannot be understood");
            };
            let result = node.pools.get(&pool).and_then(|pool| pool.remove_unowned(&pool_uid, &object, &taker));
            let answer = v1::ObjectResult { command_id, uid, ..Default::default() };
            outbox.send(from_node::Message::ObjectResult(match result {
                Ok(()) => {
                    tracing::info!(%pool, %object, "removed what was left of a deleted object");
                    v1::ObjectResult { ok: true, ..answer }
                }
                Err(error) => {
                    tracing::warn!(%pool, %object, %error, "what is left of a deleted object stays");
                    v1::ObjectResult { failure: error.failure().into(), message: error.to_string(), ..answer }
                }
            }));
        });
    }

    fn open_stream(&mut self, open: v1::OpenStream) {
        self.streams.retain(|_, stream| !stream.is_cancelled());
        let cancel = self.closed.child_token();
        self.streams.insert(open.stream_id.clone(), cancel.clone());
        let stream = streams::Stream {
            node: Arc::clone(&self.node),
            transfers_by: self.taker(By::Operation(Operation::Transfer)),
            way: self.way.clone(),
            outbox: self.outbox.clone(),
            cancel,
            session: self.closed.clone(),
        };
        stream.spawn(open);
    }
}

fn seen(pools: &Pools, look: &v1::LookAtFence) -> Result<Option<Beat>, String> {
    let pool = look.pool.parse().map_err(|error| format!("{error}"))?;
    let node = look.node_id.parse().map_err(|error| format!("{error}"))?;
    pools.get(&pool).and_then(|pool| pool.look_at_fence(&node)).map_err(|error| error.to_string())
}

fn listing(pools: &Pools, list: v1::ListPool) -> v1::PoolListing {
    let v1::ListPool { list_id, pool, after, limit } = list;
    let page = pool.parse().map_err(|error| format!("{error}")).and_then(|pool| {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        pools.get(&pool).and_then(|pool| pool.entries(&after, limit)).map_err(|error| error.to_string())
    });
    match page {
        Ok(page) => {
            let entry = |entry: PoolEntry| v1::PoolEntry {
                name: entry.name,
                is_object: entry.uid.is_some(),
                used_bytes: entry.used.0,
                is_deleted: entry.is_deleted,
            };
            let entries = page.entries.into_iter().map(entry).collect();
            v1::PoolListing { list_id, pool_uid: page.pool_uid, problem: String::new(), entries, more: page.more }
        }
        Err(problem) => v1::PoolListing { list_id, problem, ..Default::default() },
    }
}

#[derive(Clone, Copy, Debug)]
enum Command {
    Delete,
    ConfirmNotTaken,
}

fn object_result(
    command_id: String,
    granted: &GrantedObject,
    result: Result<v1::ObjectUse, PoolError>,
) -> v1::ObjectResult {
    let answer = v1::ObjectResult {
        command_id,
        uid: granted.object.uid.to_string(),
        epoch: granted.grant.epoch.0,
        ..Default::default()
    };
    match result {
        Ok(object_use) => v1::ObjectResult { ok: true, r#use: object_use.into(), ..answer },
        Err(error) => {
            v1::ObjectResult { ok: false, failure: error.failure().into(), message: error.to_string(), ..answer }
        }
    }
}
