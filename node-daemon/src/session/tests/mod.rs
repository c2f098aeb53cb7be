//! Whole sessions: this node's side is real, the operator's is played over real TLS.

mod node;
mod operator;
mod pools;

use std::os::unix::fs::PermissionsExt as _;

use kibo_crds::InstanceId;
use kibo_protocol::v1::{
    self, EndReason, ObjectUse, RefuseReason, SessionRefusal, from_node::Message as FromNode, instance_event::Kind,
    stream_from_node::Frame, stream_to_node::Frame as FrameToNode, to_node::Message as ToNode,
};

use super::Outcome;
use node::{LAYER, TestNode};
use operator::{Operator, ack, settings};

fn granted(epoch: u64) -> v1::Object {
    let grant = v1::Grant { epoch, predecessor_epoch: epoch - 1, predecessor_end: v1::PredecessorEnd::Released.into() };
    v1::Object {
        uid: LAYER.into(),
        pool: "p".into(),
        size_bytes: 64 << 20,
        must_exist: false,
        grant: Some(grant),
        grows_from_bytes: 0,
    }
}

fn launch(instance: InstanceId) -> v1::Launch {
    v1::Launch {
        instance_id: instance.to_string(),
        workspace: Some(v1::WorkspaceRef { uid: LAYER.into(), ..Default::default() }),
        cpu_milli: 1500,
        memory_bytes: 256 << 20,
        allocated_memory_bytes: 320 << 20,
        root_image: "debian".into(),
        layer: Some(granted(1)),
        ..Default::default()
    }
}

fn desired(instance: InstanceId, stop: Option<v1::StopMode>) -> v1::Desired {
    v1::Desired { launch: Some(launch(instance)), stop: stop.map(Into::into) }
}

fn offer(offer_id: &str, instance: InstanceId) -> ToNode {
    ToNode::Offer(v1::Offer { offer_id: offer_id.into(), launch: Some(launch(instance)) })
}

fn go(offer_id: &str, instance: InstanceId) -> ToNode {
    ToNode::Go(v1::Go { offer_id: offer_id.into(), launch: Some(launch(instance)) })
}

async fn answer(session: &mut operator::Session) -> Result<String, RefuseReason> {
    session
        .find(|message| match message {
            FromNode::Accept(accept) => Some(Ok(accept.offer_id)),
            FromNode::Refuse(refuse) => Some(Err(refuse.reason())),
            _ => None,
        })
        .await
}

fn ended(event: &v1::InstanceEvent) -> (EndReason, Vec<ObjectUse>) {
    match &event.kind {
        Some(Kind::Ended(ended)) => (ended.reason(), ended.objects.iter().map(v1::ObjectState::r#use).collect()),
        other => panic!("not an end: {other:?}"),
    }
}

fn exited() -> Kind {
    Kind::EntrypointExited(v1::EntrypointExited { code: Some(1), ..Default::default() })
}

#[tokio::test]
async fn a_node_enrolls_once_and_keeps_its_incarnation() {
    let (mut operator, node) = (Operator::listen().await, TestNode::new());
    let daemon = node.begin(&operator);
    let (mut session, hello) = operator.session().await;
    assert_eq!((hello.node_id.as_str(), hello.node_key.as_slice()), ("node-a", operator.key.expose()));
    assert_eq!((hello.incarnation, hello.cluster_id.as_str()), (None, operator::CLUSTER));
    let credentials = std::fs::metadata(node.dir.path().join("state/credentials.json")).unwrap();
    assert_eq!(credentials.permissions().mode() & 0o777, 0o600);
    session.send(4, ack(7, vec![])).await;
    session
        .find(|message| matches!(message, FromNode::SettingsApplied(applied) if applied.revision == 1).then_some(()))
        .await;
    daemon.end().await;

    // The token is gone; the key is enough.
    std::fs::remove_file(node.dir.path().join("token")).unwrap();
    let daemon = node.begin_with_its_token(&operator);
    let (_, hello) = operator.session().await;
    assert_eq!((hello.incarnation, hello.highest_term, hello.highest_revision), (Some(7), 4, 1));
    daemon.end().await;
}

#[tokio::test]
async fn a_host_whose_key_is_not_taken_any_more_enrolls_with_the_token_that_it_finds() {
    let (mut operator, node) = (Operator::listen().await, TestNode::new());
    let daemon = node.begin(&operator);
    let (session, _) = operator.session().await;
    let reason = v1::SessionRefusal::Revoked.into();
    session.send(1, ToNode::Refused(v1::SessionRefused { reason, message: "revoked".into() })).await;
    drop(session);
    // At once: without a token it would have waited for a minute.
    let (_, hello) = operator.session().await;
    assert_eq!(hello.node_key, operator.key.expose());
    daemon.end().await;
}

#[tokio::test]
async fn a_token_for_another_ca_is_not_shown_to_this_operator() {
    let (operator, node) = (Operator::listen().await, TestNode::new());
    let other = Operator::listen().await;
    std::fs::write(node.dir.path().join("token"), other.token.expose()).unwrap();
    let shared = node.begin_with_its_token(&operator);
    // Long enough for several attempts; none may come as far as a session or a key.
    let waited = tokio::time::timeout(std::time::Duration::from_secs(1), shared.outcome).await;
    assert!(waited.is_err(), "the daemon goes on trying");
    assert!(!node.dir.path().join("state/credentials.json").exists());
}

#[tokio::test]
async fn a_node_says_that_it_lives_and_what_its_clock_shows() {
    let (mut operator, node) = (Operator::listen().await, TestNode::new());
    let daemon = node.begin(&operator);
    let (mut session, _) = operator.session().await;
    let ToNode::HelloAck(ack) = ack(1, vec![]) else { unreachable!("it is one") };
    session.send(1, ToNode::HelloAck(v1::HelloAck { heartbeat_millis: 100, ..ack })).await;
    for _ in 0..3 {
        session.find(|message| matches!(message, FromNode::Heartbeat(_)).then_some(())).await;
    }
    let before = crate::clock::unix_nanos();
    session.send(1, ToNode::ClockProbe(v1::ClockProbe { probe: 7 })).await;
    let reading =
        session.find(|message| if let FromNode::ClockReading(reading) = message { Some(reading) } else { None }).await;
    assert_eq!(reading.probe, 7);
    assert!(before <= reading.received_unix_nanos && reading.received_unix_nanos <= reading.sent_unix_nanos);
    daemon.end().await;
}

#[tokio::test]
async fn an_offer_is_reserved_until_its_go_or_its_revoke() {
    let (mut operator, node) = (Operator::listen().await, TestNode::new());
    let daemon = node.begin(&operator);
    let mut session = operator.accepted(vec![]).await;
    let (first, second) = (InstanceId::generate(), InstanceId::generate());
    session.send(1, offer("a", first)).await;
    assert_eq!(answer(&mut session).await, Ok("a".into()));
    session.send(1, offer("b", second)).await;
    assert_eq!(answer(&mut session).await, Err(RefuseReason::Cpu));
    session.send(1, ToNode::Revoke(v1::Revoke { offer_id: "a".into() })).await;
    session.send(1, offer("b", second)).await;
    assert_eq!(answer(&mut session).await, Ok("b".into()));
    session.send(1, go("b", second)).await;
    // The same Go again, and one whose offer was revoked.
    session.send(1, go("b", second)).await;
    session.send(1, go("a", first)).await;
    let event = session.event().await;
    assert_eq!(event.instance_id, first.to_string());
    assert_eq!(ended(&event), (EndReason::NotStarted, vec![ObjectUse::Refused]));
    assert_eq!(node.calls(), [format!("start {second}")]);
    assert!(node.record("holder.1.refused"));
    daemon.end().await;
}

#[tokio::test]
async fn bad_offers_are_refused_with_their_reason() {
    let (mut operator, node) = (Operator::listen().await, TestNode::new());
    let daemon = node.begin(&operator);
    let mut session = operator.accepted(vec![]).await;
    let offered = |change: &dyn Fn(&mut v1::Launch)| {
        let mut launch = launch(InstanceId::generate());
        change(&mut launch);
        ToNode::Offer(v1::Offer { offer_id: "o".into(), launch: Some(launch) })
    };
    let with_layer =
        |change: fn(&mut v1::Object)| move |launch: &mut v1::Launch| change(launch.layer.as_mut().unwrap());
    let table: [(ToNode, RefuseReason); 6] = [
        (offered(&|launch| launch.root_image = "other".into()), RefuseReason::RootImageMissing),
        (offered(&|launch| launch.root_image = "../debian".into()), RefuseReason::Invalid),
        (offered(&|launch| launch.allocated_memory_bytes = 2 << 30), RefuseReason::Memory),
        (offered(&with_layer(|layer| layer.pool = "other".into())), RefuseReason::PoolUnavailable),
        (offered(&with_layer(|layer| layer.size_bytes = 1 << 60)), RefuseReason::PoolFull),
        (offered(&with_layer(|layer| layer.uid = "../x".into())), RefuseReason::Invalid),
    ];
    for (offer, reason) in table {
        session.send(1, offer).await;
        assert_eq!(answer(&mut session).await, Err(reason));
    }
    let draining = v1::Settings { drain: true, ..settings(2) };
    session.send(1, ToNode::Settings(draining)).await;
    session.send(1, offered(&|_| ())).await;
    assert_eq!(answer(&mut session).await, Err(RefuseReason::Draining));
    daemon.end().await;
}

#[tokio::test]
async fn events_are_sent_until_they_are_acknowledged() {
    let (mut operator, node) = (Operator::listen().await, TestNode::new());
    let daemon = node.begin(&operator);
    let session = operator.accepted(vec![]).await;
    let instance = InstanceId::generate();
    for seq in 1..=3 {
        assert_eq!(daemon.spool.append(instance, LAYER, exited()).unwrap(), seq);
    }
    drop(session);
    let mut session = operator.accepted(vec![]).await;
    let first = session.find(|message| match message {
        FromNode::Events(events) => Some(events.events.iter().map(|event| event.seq).collect::<Vec<_>>()),
        _ => None,
    });
    assert_eq!(first.await, [1, 2, 3]);
    session.send(1, ToNode::EventAck(v1::EventAck { instance_id: instance.to_string(), seq: 2 })).await;
    let acked = async {
        while daemon.spool.unacked().len() > 1 {
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(operator::PATIENCE, acked).await.expect("the acknowledgement is noted");
    daemon.spool.append(instance, LAYER, exited()).unwrap();
    assert_eq!(session.event().await.seq, 4);
    daemon.end().await;

    // Another daemon goes on with what is not acknowledged.
    let daemon = node.begin(&operator);
    let (session, hello) = operator.session().await;
    assert!(hello.instances.is_empty(), "it has not ended, and it does not run: {hello:?}");
    session.send(1, ack(1, vec![])).await;
    let mut session = session;
    let again = session.find(|message| match message {
        FromNode::Events(events) => Some(events.events.iter().map(|event| event.seq).collect::<Vec<_>>()),
        _ => None,
    });
    assert_eq!(again.await, [3, 4]);
    daemon.end().await;
}

#[tokio::test]
async fn an_instance_that_cannot_be_taken_up_is_said_with_its_workspace() {
    let (mut operator, node) = (Operator::listen().await, TestNode::new());
    let instance = InstanceId::generate();
    node.instances.run(instance);
    node.instances.problems.lock().unwrap().insert(instance, "its record is damaged".into());
    let daemon = node.begin(&operator);
    let mut session = operator.accepted(vec![desired(instance, None)]).await;
    let event = session.event().await;
    assert_eq!(
        (event.instance_id.as_str(), event.workspace_uid.as_str()),
        (instance.to_string().as_str(), node::LAYER)
    );
    let blocked = v1::Blocked { message: "its record is damaged".into() };
    assert_eq!(event.kind, Some(Kind::Blocked(blocked)));
    assert_eq!(node.calls(), [] as [String; 0], "it is not started a second time");
    daemon.end().await;
}

#[tokio::test]
async fn the_desired_set_is_started_and_stopped() {
    let (mut operator, node) = (Operator::listen().await, TestNode::new());
    let (unknown, to_stop, gone) = (InstanceId::generate(), InstanceId::generate(), InstanceId::generate());
    node.instances.run(to_stop);
    let daemon = node.begin(&operator);
    let mut wanted = vec![desired(to_stop, Some(v1::StopMode::Normal)), desired(gone, Some(v1::StopMode::Force))];
    // What runs already leaves no room for 1.5 cores more.
    let mut small = desired(unknown, None);
    small.launch.as_mut().unwrap().cpu_milli = 1000;
    wanted.push(small);
    let mut session = operator.accepted(wanted).await;
    let event = session.event().await;
    assert_eq!(event.instance_id, gone.to_string());
    assert_eq!(ended(&event), (EndReason::NotStarted, vec![ObjectUse::Refused]));
    assert_eq!(node.calls(), [format!("stop {to_stop} Normal"), format!("start {unknown}")]);
    // What has ended here is not started again, however often it is desired.
    drop(session);
    let mut session = operator.accepted(vec![desired(gone, None)]).await;
    assert_eq!(session.event().await.instance_id, gone.to_string());
    assert_eq!(node.calls().len(), 2);
    daemon.end().await;
}

#[tokio::test]
async fn a_stop_of_what_is_not_here_closes_its_grants() {
    let (mut operator, node) = (Operator::listen().await, TestNode::new());
    let daemon = node.begin(&operator);
    let mut session = operator.accepted(vec![]).await;
    let instance = InstanceId::generate();
    let stop =
        v1::Stop { instance_id: instance.to_string(), mode: v1::StopMode::Normal.into(), objects: vec![granted(1)] };
    session.send(1, ToNode::Stop(stop.clone())).await;
    session.send(1, ToNode::Stop(stop)).await;
    let event = session.event().await;
    assert_eq!((event.seq, event.workspace_uid.as_str()), (1, LAYER));
    assert_eq!(ended(&event), (EndReason::NotStarted, vec![ObjectUse::Refused]));
    // The Go that the stop has overtaken finds nothing to take.
    session.send(1, go("late", instance)).await;
    session.send(1, offer("o", instance)).await;
    assert_eq!(answer(&mut session).await, Err(RefuseReason::Stale));
    assert!(node.calls().is_empty());
    daemon.end().await;
}

#[tokio::test]
async fn objects_are_confirmed_and_deleted_on_command() {
    let (mut operator, node) = (Operator::listen().await, TestNode::new());
    let daemon = node.begin(&operator);
    let mut session = operator.accepted(vec![]).await;
    let result = async |session: &mut operator::Session| {
        session
            .find(|message| match message {
                FromNode::ObjectResult(result) => Some(result),
                _ => None,
            })
            .await
    };
    let confirm = v1::ConfirmNotTaken { command_id: "c".into(), object: Some(granted(1)) };
    session.send(1, ToNode::ConfirmNotTaken(confirm)).await;
    let confirmed = result(&mut session).await;
    assert!(confirmed.ok && confirmed.r#use() == ObjectUse::Refused && confirmed.command_id == "c");
    // Epoch 1 is over, and epoch 2 is another's decision.
    let delete = |epoch| v1::DeleteObject { command_id: "d".into(), object: Some(granted(epoch)) };
    session.send(1, ToNode::DeleteObject(delete(1))).await;
    let refused = result(&mut session).await;
    assert!(!refused.ok && refused.failure() == v1::ObjectFailure::HolderConflict, "{refused:?}");
    session.send(1, ToNode::DeleteObject(delete(2))).await;
    assert!(result(&mut session).await.ok);
    assert!(!node.dir.path().join("pool/objects").join(LAYER).exists());
    daemon.end().await;
}

#[tokio::test]
async fn a_leader_of_a_lower_term_is_not_obeyed() {
    let (mut operator, node) = (Operator::listen().await, TestNode::new());
    let daemon = node.begin(&operator);
    let (mut session, _) = operator.session().await;
    session.send(5, ack(1, vec![])).await;
    session.send(4, go("a", InstanceId::generate())).await;
    session.closed().await;
    // Nor is its answer to a Hello.
    let (mut session, hello) = operator.session().await;
    assert_eq!(hello.highest_term, 5);
    session.send(4, ack(1, vec![])).await;
    session.closed().await;
    assert!(node.calls().is_empty());
    daemon.end().await;
}

#[tokio::test]
async fn an_operator_of_another_cluster_is_not_obeyed() {
    let (mut operator, node) = (Operator::listen().await, TestNode::new());
    let daemon = node.begin(&operator);
    let (mut session, _) = operator.session().await;
    let ToNode::HelloAck(mut other) = ack(1, vec![desired(InstanceId::generate(), None)]) else { unreachable!() };
    other.cluster_id = "cluster-2".into();
    session.send(1, ToNode::HelloAck(other)).await;
    // The key says which cluster it belongs to: it was given with it.
    session.closed().await;
    assert!(node.calls().is_empty());
    daemon.end().await;
}

#[tokio::test]
async fn an_isolated_node_destroys_everything_and_begins_a_new_life() {
    let (mut operator, node) = (Operator::listen().await, TestNode::new());
    let daemon = node.begin(&operator);
    let session = operator.accepted(vec![]).await;
    node.instances.run(InstanceId::generate());
    let refused =
        v1::SessionRefused { reason: SessionRefusal::Isolated.into(), message: "incarnation 1 is isolated".into() };
    session.send(1, ToNode::Refused(refused)).await;
    assert_eq!(daemon.outcome.await.unwrap(), Outcome::Isolated);
    assert_eq!(node.calls(), ["destroy Isolated"]);
    drop((session, daemon.spool));
    let daemon = node.begin(&operator);
    let (_, hello) = operator.session().await;
    assert_eq!(hello.incarnation, None);
    daemon.end().await;
}

#[tokio::test]
async fn a_replica_that_does_not_lead_is_asked_again() {
    let (mut operator, node) = (Operator::listen().await, TestNode::new());
    let daemon = node.begin(&operator);
    for _ in 0..3 {
        let (session, _) = operator.session().await;
        let refused = v1::SessionRefused { reason: SessionRefusal::NotLeader.into(), message: String::new() };
        session.send(0, ToNode::Refused(refused)).await;
    }
    operator.accepted(vec![]).await;
    daemon.end().await;
}

#[tokio::test]
async fn an_exec_goes_through_a_stream_of_its_own() {
    let (mut operator, node) = (Operator::listen().await, TestNode::new());
    let daemon = node.begin(&operator);
    let session = operator.accepted(vec![]).await;
    let request =
        v1::ExecRequest { instance_id: InstanceId::generate().to_string(), stdin: true, ..Default::default() };
    let open = v1::OpenStream { stream_id: "1".into(), kind: Some(v1::open_stream::Kind::Exec(request)) };
    session.send(1, ToNode::OpenStream(open)).await;
    let mut stream = operator.attached().await;
    stream.send(FrameToNode::Stdin(b"abc".to_vec().into())).await;
    assert_eq!(stream.next().await, Some(Frame::Stdout(b"abc".to_vec().into())));
    stream.send(FrameToNode::StdinClosed(true)).await;
    assert_eq!(stream.next().await, Some(Frame::Exit(v1::ExitStatus { code: Some(3), signal: None })));
    assert_eq!(stream.next().await, None);

    let request = v1::ConnectRequest { instance_id: InstanceId::generate().to_string(), port: 80 };
    let open = v1::OpenStream { stream_id: "3".into(), kind: Some(v1::open_stream::Kind::Connect(request)) };
    session.send(1, ToNode::OpenStream(open)).await;
    let mut stream = operator.attached().await;
    assert_eq!(stream.next().await, Some(Frame::Stdout(b"port 80".to_vec().into())));
    assert_eq!(stream.next().await, Some(Frame::StdoutClosed(true)));
    stream.send(FrameToNode::StdinClosed(true)).await;
    assert_eq!(stream.next().await, Some(Frame::Exit(v1::ExitStatus { code: Some(0), signal: None })));

    let request = v1::LogRequest { workspace_uid: LAYER.into(), ..Default::default() };
    let open = v1::OpenStream { stream_id: "2".into(), kind: Some(v1::open_stream::Kind::Log(request)) };
    session.send(1, ToNode::OpenStream(open)).await;
    let mut stream = operator.attached().await;
    let error = v1::StreamError { failure: v1::StreamFailure::NoInstance.into(), message: "no log".into() };
    assert_eq!(stream.next().await, Some(Frame::Error(error)));
    daemon.end().await;
}

#[tokio::test]
async fn a_stream_that_is_interrupted_says_by_what() {
    let (mut operator, node) = (Operator::listen().await, TestNode::new());
    let daemon = node.begin(&operator);
    let open = |stream_id: &str| {
        let request =
            v1::ExecRequest { instance_id: InstanceId::generate().to_string(), stdin: true, ..Default::default() };
        v1::OpenStream { stream_id: stream_id.into(), kind: Some(v1::open_stream::Kind::Exec(request)) }
    };
    let interrupted = |frame: Option<Frame>| match frame {
        Some(Frame::Error(error)) if error.failure() == v1::StreamFailure::Interrupted => error.message,
        other => panic!("{other:?}"),
    };
    let session = operator.accepted(vec![]).await;
    session.send(1, ToNode::OpenStream(open("1"))).await;
    let mut stream = operator.attached().await;
    stream.send(FrameToNode::Resize(v1::Resize { columns: 80, rows: 24 })).await;
    assert_eq!(stream.next().await, Some(Frame::Stderr(b"Resize { columns: 80, rows: 24 }".to_vec().into())));
    drop(session);
    let message = interrupted(stream.next().await);
    assert!(message.contains("lost its operator"), "{message}");

    let session = operator.accepted(vec![]).await;
    session.send(1, ToNode::OpenStream(open("2"))).await;
    let mut stream = operator.attached().await;
    stream.send(FrameToNode::Signal(2)).await;
    assert_eq!(stream.next().await, Some(Frame::Stderr(b"Signal(2)".to_vec().into())));
    let ((), frame) = tokio::join!(daemon.end(), stream.next());
    let message = interrupted(frame);
    assert!(message.contains("node-daemon restarts"), "{message}");
}
