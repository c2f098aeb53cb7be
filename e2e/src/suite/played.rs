//! A node that is played by hand over a [`Session`]: it takes offers, and says of its Instances what the test wants.

use anyhow::{Context as _, Result, ensure};
use kibo_crds::Node;
use kibo_crds::workspace::WorkspacePhase;
use kibo_protocol::v1::{self, EndReason, ObjectUse, from_node, instance_event, to_node};
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::host::{Host, Session};
use super::{Place, phase_of};

/// How long the operator may take for a step, on a machine that has other things to do.
const SOON: u64 = 60;

/// A host with one private pool whose label makes it this test's own.
pub async fn host(place: &Place, id: &str) -> Result<Host> {
    let pools = vec![v1::Pool {
        id: format!("local-{id}"),
        uid: format!("uid-{id}"),
        default: true,
        available: true,
        capacity_bytes: Some(100 << 30),
        free_bytes: Some(100 << 30),
        ..v1::Pool::default()
    }];
    let host = Host { pools, ..Host::enroll(place, id).await? };
    let (key, value) = place.selector();
    let labels = Patch::Merge(json!({ "metadata": { "labels": { key: value } } }));
    place.all::<Node>().patch(id, &PatchParams::default(), &labels).await?;
    Ok(host)
}

/// A session whose settings are in use, so that it is a candidate.
pub async fn ready(place: &Place, host: &Host, incarnation: Option<u64>) -> Result<Session> {
    let session = host.session(incarnation).await?;
    session.confirm(&session.settings()).await?;
    // With it a daemon has said everything, and the operator writes it down at once.
    session.report(&session.settings(), &host.pools).await?;
    let is_candidate = |node: &Node| {
        let conditions = node.status.iter().flat_map(|status| &status.conditions);
        conditions.clone().any(|condition| condition.type_ == "Schedulable" && condition.status == "True")
    };
    place.watched(place.all::<Node>(), &host.id, "takes Workspaces", SOON, is_candidate).await?;
    Ok(session)
}

/// The next message that is of interest.
pub async fn next<T>(session: &mut Session, pick: impl Fn(to_node::Message) -> Option<T>) -> Result<T> {
    loop {
        let message = session.receive().await?.context("the session ended")?;
        if let to_node::Message::Settings(settings) = &message {
            session.confirm(settings).await?;
        }
        if let Some(found) = pick(message) {
            return Ok(found);
        }
    }
}

/// The next offer of a start.
pub async fn offer(session: &mut Session) -> Result<v1::Offer> {
    next(session, |message| if let to_node::Message::Offer(offer) = message { Some(offer) } else { None }).await
}

pub async fn accept(session: &Session, offer: &v1::Offer) -> Result<()> {
    session.send(from_node::Message::Accept(v1::Accept { offer_id: offer.offer_id.clone() })).await
}

pub async fn refuse(session: &Session, offer: &v1::Offer, message: &str) -> Result<()> {
    let reason = v1::RefuseReason::RootImageMissing.into();
    let refuse = v1::Refuse { offer_id: offer.offer_id.clone(), reason, message: message.to_owned() };
    session.send(from_node::Message::Refuse(refuse)).await
}

/// The next Go, with what is to be started.
pub async fn go(session: &mut Session) -> Result<v1::Launch> {
    let go = next(session, |message| if let to_node::Message::Go(go) = message { Some(go) } else { None }).await?;
    go.launch.context("a Go without a launch")
}

/// What a node says of the objects of a start.
pub fn objects(launch: &v1::Launch, used: ObjectUse) -> Vec<v1::ObjectState> {
    let volumes = launch.volumes.iter().filter_map(|volume| volume.object.as_ref());
    let state = |object: &v1::Object| v1::ObjectState {
        uid: object.uid.clone(),
        epoch: object.grant.as_ref().map_or(0, |grant| grant.epoch),
        r#use: used.into(),
        size_bytes: (used != ObjectUse::Refused).then_some(object.size_bytes),
    };
    launch.layer.iter().chain(volumes).map(state).collect()
}

/// Tells an event.
pub async fn say(session: &Session, launch: &v1::Launch, seq: u64, kind: instance_event::Kind) -> Result<()> {
    let workspace_uid = launch.workspace.clone().unwrap_or_default().uid;
    let event = v1::InstanceEvent {
        instance_id: launch.instance_id.clone(),
        workspace_uid,
        seq,
        unix_nanos: 0,
        kind: Some(kind),
    };
    session.send(from_node::Message::Events(v1::Events { events: vec![event] })).await
}

pub fn taken(launch: &v1::Launch) -> instance_event::Kind {
    instance_event::Kind::ObjectsTaken(v1::ObjectsTaken { objects: objects(launch, ObjectUse::Held) })
}

pub fn available() -> instance_event::Kind {
    instance_event::Kind::Available(v1::Available { guest_boot_id: "b".to_owned(), address: String::new() })
}

pub fn ended(launch: &v1::Launch, reason: EndReason, used: ObjectUse) -> instance_event::Kind {
    let message = format!("played {}", reason.as_str_name());
    instance_event::Kind::Ended(v1::Ended { reason: reason.into(), message, objects: objects(launch, used) })
}

/// Waits until events up to this one are acknowledged.
pub async fn acked(session: &mut Session, launch: &v1::Launch, seq: u64) -> Result<()> {
    next(session, |message| match message {
        to_node::Message::EventAck(ack) if ack.instance_id == launch.instance_id && ack.seq >= seq => Some(()),
        _ => None,
    })
    .await
}

/// Starts a Workspace on this host, which says that it runs.
pub async fn run(place: &Place, session: &mut Session, name: &str) -> Result<v1::Launch> {
    let offered = offer(session).await?;
    accept(session, &offered).await?;
    let launch = go(session).await?;
    ensure!(launch.instance_id == offered.launch.unwrap_or_default().instance_id, "the Go is the offer's");
    say(session, &launch, 1, taken(&launch)).await?;
    say(session, &launch, 2, available()).await?;
    acked(session, &launch, 2).await?;
    place.workspace(name, "is available", SOON, |it| phase_of(it) == Some(WorkspacePhase::Available)).await?;
    Ok(launch)
}
