//! Sessions of a node whose pools hang, or take it for dead.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::Path,
    time::Duration,
};

use kibo_crds::{Incarnation, InstanceId};
use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::*;

async fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let looked = async {
        while !reached() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(operator::PATIENCE, looked).await.unwrap_or_else(|_| panic!("{what}"));
}

/// Whoever reads this file waits until somebody has written it.
fn hanging(path: &Path) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

/// Somebody who takes over from this node says so in a pool.
fn mark_dead(pool: &crate::pool::Pool, dead: Incarnation) {
    pool.mark_dead(&"node-a".parse().unwrap(), dead);
    pool.look_again();
}

fn move_object(epoch: u64, to: &str) -> ToNode {
    let object = v1::Object { must_exist: true, ..granted(epoch) };
    ToNode::MoveObject(v1::MoveObject { object: Some(object), to_pool: to.into() })
}

/// The next word about the move of this epoch that is in this state.
async fn word(session: &mut operator::Session, epoch: u64, state: v1::MoveState) -> v1::MoveProgress {
    session
        .find(|message| match message {
            FromNode::MoveProgress(word) if word.epoch == epoch && word.state() == state => Some(word),
            _ => None,
        })
        .await
}

#[tokio::test]
async fn a_move_that_hangs_holds_neither_its_object_nor_the_next_move() {
    let (mut operator, node) = (Operator::listen().await, TestNode::with_pools(&["q", "r"]));
    let object = |pool: &str| node.dir.path().join(pool).join("objects").join(LAYER);
    fs::create_dir(object("pool")).unwrap();
    let image = File::create(object("pool").join("image.raw")).unwrap();
    image.set_len(64 << 20).unwrap();
    image.write_all_at(&[7; 8192], 5 << 20).unwrap();
    let hangs = object("q").join("image.raw.moving.2.json");
    hanging(&hangs);

    let daemon = node.begin(&operator);
    let mut session = operator.accepted(vec![]).await;
    session.send(1, move_object(2, "q")).await;
    until("the move begins", || node.record("holder.2")).await;
    // It is given up. Where the object is nobody waits for it.
    let confirm = v1::ConfirmNotTaken { command_id: "c".into(), object: Some(granted(2)) };
    session.send(1, ToNode::ConfirmNotTaken(confirm)).await;
    let result = |message| if let FromNode::ObjectResult(result) = message { Some(result) } else { None };
    let confirmed = session.find(result).await;
    assert!(confirmed.ok && confirmed.r#use() == ObjectUse::Released, "{confirmed:?}");

    // To another pool it is moved at once, and what lies there is removed.
    session.send(1, move_object(3, "r")).await;
    word(&mut session, 3, v1::MoveState::Copied).await;
    assert!(fs::read(object("pool").join("image.raw")).unwrap() == fs::read(object("r").join("image.raw")).unwrap());
    let confirm = v1::ConfirmNotTaken { command_id: "c".into(), object: Some(granted(3)) };
    session.send(1, ToNode::ConfirmNotTaken(confirm)).await;
    assert!(session.find(result).await.ok);
    let copy = v1::Object { pool: "r".into(), ..granted(3) };
    session.send(1, ToNode::DiscardCopy(v1::DiscardCopy { command_id: "d".into(), object: Some(copy) })).await;
    assert!(session.find(result).await.ok && !object("r").exists());

    // To the same one it waits, and says for what.
    session.send(1, move_object(4, "q")).await;
    let waits = word(&mut session, 4, v1::MoveState::Copying).await;
    assert!(waits.message.contains("waits for its last move to storage pool q"), "{waits:?}");
    let confirm = v1::ConfirmNotTaken { command_id: "c".into(), object: Some(granted(4)) };
    session.send(1, ToNode::ConfirmNotTaken(confirm)).await;
    // In whatever order.
    let (mut is_refused, mut stopped) = (false, None);
    while !is_refused || stopped.is_none() {
        match session.next().await {
            FromNode::ObjectResult(result) => is_refused = result.r#use() == ObjectUse::Refused,
            FromNode::MoveProgress(word) if word.state() == v1::MoveState::Failed => stopped = Some(word),
            _ => {}
        }
    }
    assert_eq!(stopped.map(|word| (word.epoch, word.message)), Some((4, "it was stopped".to_owned())));
    fs::write(&hangs, "").unwrap();
    let failed = word(&mut session, 2, v1::MoveState::Failed).await;
    assert!(failed.message.contains("it was stopped"), "{failed:?}");
    daemon.end().await;
}

/// Whoever took over from an isolated node marked it dead, and nothing runs on it any more.
#[tokio::test]
async fn a_node_hears_that_it_was_isolated_before_it_begins_a_new_life() {
    let (mut operator, node) = (Operator::listen().await, TestNode::new());
    let instance = InstanceId::generate();
    node.instances.run(instance);
    let daemon = node.begin(&operator);
    let session = operator.accepted(vec![desired(instance, None)]).await;
    let pool = daemon.pools.get(&"p".parse().unwrap()).unwrap();
    mark_dead(pool, Incarnation(1));
    until("it is seen", || !pool.status().is_available()).await;
    // The daemon goes while something runs, and comes back when nothing does.
    daemon.end().await;
    drop(session);
    node.instances.forget(instance);
    let daemon = node.begin(&operator);
    let (_session, hello) = operator.session().await;
    assert_eq!((hello.incarnation, hello.highest_mark), (Some(1), Some(1)), "it may be refused for it");
    daemon.end().await;
}

/// One that could end no life: no node comes so far.
#[tokio::test]
async fn a_mark_that_cannot_be_harms_its_pool_alone() {
    let (mut operator, node) = (Operator::listen().await, TestNode::new());
    let daemon = node.begin(&operator);
    let session = operator.accepted(vec![]).await;
    let pool = daemon.pools.get(&"p".parse().unwrap()).unwrap();
    mark_dead(pool, Incarnation(1 << 40));
    until("it is seen", || !pool.status().is_available()).await;
    drop(session);
    let (_session, hello) = operator.session().await;
    assert_eq!((hello.incarnation, hello.highest_mark), (Some(1), None));
    daemon.end().await;
}

#[tokio::test]
async fn the_end_of_what_is_not_here_waits_for_no_pool_that_is_lost() {
    let (mut operator, node) = (Operator::listen().await, TestNode::with_pools(&["q"]));
    let hangs = node.dir.path().join("q").join("objects").join(LAYER).join("holder.1");
    hanging(&hangs);
    let instance = InstanceId::generate();
    let mut stopped = desired(instance, Some(v1::StopMode::Force));
    stopped.launch.as_mut().and_then(|launch| launch.layer.as_mut()).unwrap().pool = "q".into();
    let daemon = node.begin(&operator);
    let mut session = operator.accepted(vec![stopped]).await;
    // By then it looks at the records.
    session.send(1, ToNode::ClockProbe(v1::ClockProbe { probe: 1 })).await;
    session.find(|message| matches!(message, FromNode::ClockReading(_)).then_some(())).await;
    session.send(1, ToNode::LostPools(v1::LostPools { ids: vec!["q".into()] })).await;
    let event = session.event().await;
    assert_eq!(
        (event.instance_id.as_str(), ended(&event).1),
        (instance.to_string().as_str(), vec![ObjectUse::Released])
    );
    fs::write(&hangs, "").unwrap();
    daemon.end().await;
}

/// As many as run at once hang in a pool that is then given up for good.
#[tokio::test]
async fn moves_that_hang_in_a_lost_pool_keep_no_other_one_waiting() {
    let (mut operator, node) = (Operator::listen().await, TestNode::with_pools(&["q", "r"]));
    let object = |pool: &str, uid: &str| node.dir.path().join(pool).join("objects").join(uid);
    let uids: Vec<_> = (0..8).map(|number| format!("6f9619ff-8b86-d011-b42d-00c04fc9640{number}")).collect();
    for uid in uids.iter().map(String::as_str).chain([LAYER]) {
        fs::create_dir(object("pool", uid)).unwrap();
        File::create(object("pool", uid).join("image.raw")).unwrap().set_len(64 << 20).unwrap();
    }
    let hangs: Vec<_> = uids.iter().map(|uid| object("q", uid).join("image.raw.moving.2.json")).collect();
    for path in &hangs {
        hanging(path);
    }

    let daemon = node.begin(&operator);
    let mut session = operator.accepted(vec![]).await;
    for uid in &uids {
        let object = v1::Object { uid: uid.clone(), must_exist: true, ..granted(2) };
        session.send(1, ToNode::MoveObject(v1::MoveObject { object: Some(object), to_pool: "q".into() })).await;
    }
    until("all of them begin", || uids.iter().all(|uid| object("pool", uid).join("holder.2").exists())).await;
    session.send(1, move_object(3, "r")).await;
    let waits = word(&mut session, 3, v1::MoveState::Copying).await;
    assert!(waits.message.contains("waits for its turn"), "{waits:?}");
    session.send(1, ToNode::LostPools(v1::LostPools { ids: vec!["q".into()] })).await;
    word(&mut session, 3, v1::MoveState::Copied).await;
    // Nor a new life, which another pool makes necessary.
    let pool = daemon.pools.get(&"p".parse().unwrap()).unwrap();
    mark_dead(pool, Incarnation(1));
    session.closed().await;
    let (_session, hello) = operator.session().await;
    assert_eq!((hello.incarnation, hello.highest_mark), (None, Some(1)));
    for path in &hangs {
        fs::write(path, "").unwrap();
    }
    daemon.end().await;
}

/// The pool did not answer when the control plane, which was built anew, counted from 1.
#[tokio::test]
async fn a_node_that_a_pool_takes_for_dead_begins_a_new_life_once_nothing_runs_on_it() {
    let (mut operator, node) = (Operator::listen().await, TestNode::new());
    let instance = InstanceId::generate();
    node.instances.run(instance);
    let daemon = node.begin(&operator);
    let session = operator.accepted(vec![desired(instance, None)]).await;
    let pool = daemon.pools.get(&"p".parse().unwrap()).unwrap();
    mark_dead(pool, Incarnation(7));
    until("it is seen", || !pool.status().is_available()).await;
    drop(session);
    let (mut session, hello) = operator.session().await;
    assert_eq!((hello.incarnation, hello.highest_mark), (Some(1), Some(7)), "something runs");
    session.send(1, ack(1, vec![desired(instance, None)])).await;
    let applied = |message: FromNode| matches!(message, FromNode::SettingsApplied(_)).then_some(());
    session.find(applied).await;
    node.instances.forget(instance);
    session.closed().await;
    let (mut session, hello) = operator.session().await;
    assert_eq!((hello.incarnation, hello.highest_mark), (None, Some(7)), "it asks for another one");
    assert_eq!(hello.ended_incarnation, Some(1), "it may have been isolated meanwhile");
    session.send(1, ack(8, vec![])).await;
    session.find(applied).await;
    assert!(pool.status().is_available());

    // Whoever marks it again so soon costs it that pool, and no session: a report comes after it was looked at.
    mark_dead(pool, Incarnation(9));
    let told = |message| match message {
        FromNode::Report(report) => report.pools.iter().any(|pool| !pool.available).then_some(()),
        _ => None,
    };
    session.find(told).await;
    daemon.end().await;
}
