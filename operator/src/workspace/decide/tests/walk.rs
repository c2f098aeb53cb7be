//! A whole life, in which the leader dies between any two steps and another goes on from what is stored.
//!
//! The world is a store with one Workspace and its Volume, and a node that keeps what it was told. Every
//! write and every message is a step; for each number of steps there is a walk whose leader dies there.

use kibo_crds::{VOLUME_FINALIZER, volume::VolumeSpec};

use super::*;
use crate::{
    cache::Key,
    volume::decide as volume_decide,
    workspace::{commit, launch, sight::CREATED_FOR},
};

const VOLUME_UID: &str = "22222222-2222-2222-2222-222222222222";

/// The leader has died.
struct Death;

/// The node: the only one who may say that an object is taken or released.
#[derive(Default)]
struct SimNode {
    running: Option<v1::Launch>,
    /// Objects taken, by uid, with epoch; released ones stay with `true`.
    records: Vec<(String, u64, bool)>,
    refused: Vec<(String, u64)>,
    /// Not acked yet.
    events: Vec<v1::InstanceEvent>,
    started: usize,
}

struct Sim {
    workspace: Option<Workspace>,
    volume: Option<Volume>,
    node: SimNode,
    facts: Facts,
    /// Steps until the leader dies.
    left: usize,
    steps: usize,
}

impl SimNode {
    fn take(&mut self, object: &v1::Object) {
        let grant = object.grant.as_ref().expect("a Go carries grants");
        assert!(!self.refused.contains(&(object.uid.clone(), grant.epoch)), "a refused epoch is never used");
        let newest = self.records.iter().filter(|(uid, ..)| *uid == object.uid).max_by_key(|(_, epoch, _)| *epoch);
        if let Some((_, epoch, is_released)) = newest {
            assert!(*epoch < grant.epoch, "epochs grow");
            assert!(is_released, "two holders of {}", object.uid);
        }
        self.records.push((object.uid.clone(), grant.epoch, false));
    }

    fn go(&mut self, launch: v1::Launch) {
        if self.running.as_ref().is_some_and(|running| running.instance_id == launch.instance_id) {
            return;
        }
        assert!(self.running.is_none(), "two executions of one Workspace");
        let objects: Vec<_> = launch
            .layer
            .iter()
            .chain(launch.volumes.iter().filter_map(|volume| volume.object.as_ref()))
            .cloned()
            .collect();
        for object in &objects {
            self.take(object);
        }
        let states = objects
            .iter()
            .map(|object| v1::ObjectState {
                uid: object.uid.clone(),
                epoch: object.grant.as_ref().unwrap().epoch,
                r#use: v1::ObjectUse::Held.into(),
                size_bytes: Some(object.size_bytes),
            })
            .collect();
        self.started += 1;
        self.event(&launch, 1, v1::instance_event::Kind::ObjectsTaken(v1::ObjectsTaken { objects: states }));
        self.event(&launch, 2, v1::instance_event::Kind::Available(v1::Available::default()));
        self.running = Some(launch);
    }

    fn event(&mut self, launch: &v1::Launch, seq: u64, kind: v1::instance_event::Kind) {
        self.events.push(v1::InstanceEvent {
            instance_id: launch.instance_id.clone(),
            workspace_uid: UID.into(),
            seq,
            unix_nanos: 0,
            kind: Some(kind),
        });
    }

    fn stop(&mut self, reason: v1::EndReason) {
        let Some(launch) = self.running.take() else { return };
        let mut objects = Vec::new();
        for record in self.records.iter_mut().filter(|(.., is_released)| !is_released) {
            record.2 = true;
            objects.push(v1::ObjectState {
                uid: record.0.clone(),
                epoch: record.1,
                r#use: v1::ObjectUse::Released.into(),
                size_bytes: Some(1 << 30),
            });
        }
        let ended = v1::Ended { reason: reason.into(), message: String::new(), objects };
        self.event(&launch, 3, v1::instance_event::Kind::Ended(ended));
    }

    fn confirm_not_taken(&mut self, uid: &str, epoch: u64) -> v1::ObjectUse {
        match self.records.iter().find(|record| record.0 == uid && record.1 == epoch) {
            Some((.., true)) => v1::ObjectUse::Released,
            Some(_) => v1::ObjectUse::Held,
            None => {
                self.refused.push((uid.to_owned(), epoch));
                v1::ObjectUse::Refused
            }
        }
    }
}

impl Sim {
    fn new(left: usize) -> Self {
        let mut workspace = workspace();
        workspace.metadata.finalizers = None;
        workspace.spec.volume = Some(
            serde_json::from_value(serde_json::json!({
                "new": { "size": "1Gi" }, "mountPath": "/data", "deleteWithWorkspace": true
            }))
            .unwrap(),
        );
        let (workspace, node) = (Some(workspace), SimNode::default());
        Self { workspace, volume: None, node, facts: online(), left, steps: 0 }
    }

    fn step(&mut self) -> Result<(), Death> {
        if self.left == 0 {
            return Err(Death);
        }
        (self.left, self.steps) = (self.left - 1, self.steps + 1);
        Ok(())
    }

    /// Runs until nothing happens any more; dies once on the way.
    fn settle(&mut self) {
        for _ in 0..200 {
            match self.round() {
                Ok(true) => {}
                Ok(false) => return,
                Err(Death) => {
                    // A new leader: it knows what is stored, and the node's new session gets the desired set.
                    (self.left, self.facts.told) = (usize::MAX, Vec::new());
                    self.hello();
                }
            }
        }
        panic!("no end: {:#?}", self.workspace);
    }

    fn hello(&mut self) {
        let Some(workspace) = &self.workspace else { return };
        if let Some(launch) = launch::launch(workspace, Some(&template()), self.volume.as_ref()) {
            self.facts.told.push(launch.instance_id.parse().unwrap());
            let has_ended = self.node.events.iter().any(|event| event.instance_id == launch.instance_id);
            if !has_ended {
                self.node.go(launch);
            }
        }
    }

    /// Whether anything happened.
    fn round(&mut self) -> Result<bool, Death> {
        Ok(self.events()? | self.workspace_round()? | self.volume_round()?)
    }

    fn events(&mut self) -> Result<bool, Death> {
        let Some(event) = self.node.events.first().cloned() else { return Ok(false) };
        for state in event::object_states(&event) {
            if let Some(volume) =
                self.volume.clone().filter(|volume| volume.metadata.uid.as_deref() == Some(&state.uid))
            {
                let mut status = volume.status.unwrap_or_default();
                event::volume_fact(&mut status, &node("a"), state.into(), false);
                self.step()?;
                self.volume.as_mut().unwrap().status = Some(status);
            }
        }
        if let Some(workspace) = &self.workspace
            && let Some(status) = event::apply(workspace, &node("a"), &event, false, at(50)).status
        {
            self.step()?;
            self.workspace.as_mut().unwrap().status = Some(*status);
        }
        self.step()?;
        self.node.events.remove(0);
        Ok(true)
    }

    fn workspace_round(&mut self) -> Result<bool, Death> {
        let Some(workspace) = self.workspace.clone() else { return Ok(false) };
        let decision = look_with(&workspace, Some(&template()), self.volume.as_ref(), &self.facts);
        let wrote = decision.outcome.status.is_some();
        if let Some(status) = decision.outcome.status {
            self.step()?;
            self.workspace.as_mut().unwrap().status = Some(*status);
        }
        Ok(self.act(decision.action)? || wrote)
    }

    fn act(&mut self, action: Action) -> Result<bool, Death> {
        let workspace = self.workspace.clone().unwrap();
        match action {
            Action::Rest => return Ok(false),
            Action::AddFinalizer => {
                self.step()?;
                self.workspace.as_mut().unwrap().metadata.finalizers = Some(vec![WORKSPACE_FINALIZER.into()]);
            }
            Action::CreateVolume => {
                self.step()?;
                let mut volume =
                    Volume::new("demo", VolumeSpec { size: "1Gi".parse().unwrap(), pool: None, r#move: None });
                volume.metadata.uid = Some(VOLUME_UID.into());
                volume.metadata.labels = Some([(CREATED_FOR.to_owned(), UID.to_owned())].into());
                volume.metadata.finalizers = Some(vec![VOLUME_FINALIZER.into()]);
                self.volume = Some(volume);
            }
            Action::BindVolume | Action::UnbindVolume => {
                self.step()?;
                let bound =
                    matches!(action, Action::BindVolume).then(|| BoundTo { name: "demo".into(), uid: UID.into() });
                self.volume.as_mut().unwrap().status.get_or_insert_default().bound_to = bound;
            }
            Action::Start(start) => self.start(&workspace, &start)?,
            Action::Go => {
                self.step()?;
                self.hello();
            }
            Action::Stop { mode, .. } => {
                let is_done = self.node.running.is_none();
                self.step()?;
                let force = mode == v1::StopMode::Force;
                self.node.stop(if force { v1::EndReason::ForceStopped } else { v1::EndReason::Stopped });
                return Ok(!is_done);
            }
            Action::Settle { object: Object::Volume, holder } => {
                self.step()?;
                let used = self.node.confirm_not_taken(VOLUME_UID, holder.epoch.0);
                self.volume_word(holder.epoch, used)?;
            }
            Action::Transfer { step, .. } => panic!("nobody asks for a transfer here: {step:?}"),
            Action::ReleaseVolume(name) => panic!("it has one Volume alone, and not {name}"),
            Action::Settle { object: Object::Layer, .. } => panic!("the layer's grant and the execution are one write"),
            Action::DeleteLayer { holder } => {
                self.step()?;
                self.node.records.retain(|record| record.0 != UID);
                self.step()?;
                let status = layer_deleted(&workspace, &holder.node, holder.epoch);
                self.workspace.as_mut().unwrap().status = Some(status);
            }
            Action::DeleteVolume => {
                self.step()?;
                self.volume.as_mut().unwrap().metadata.deletion_timestamp = Some(at(70));
            }
            Action::Bury => {
                self.step()?;
                self.workspace = None;
            }
        }
        Ok(true)
    }

    fn volume_word(&mut self, epoch: Epoch, used: v1::ObjectUse) -> Result<(), Death> {
        assert_ne!(used, v1::ObjectUse::Held, "what the node holds is current");
        let mut status = self.volume.clone().unwrap().status.unwrap();
        event::volume_fact(&mut status, &node("a"), event::ObjectFact { epoch, used, size: None }, false);
        self.step()?;
        self.volume.as_mut().unwrap().status = Some(status);
        Ok(())
    }

    fn start(&mut self, workspace: &Workspace, start: &Start) -> Result<(), Death> {
        self.step()?;
        let place = commit::Place {
            node: node("a"),
            incarnation: Incarnation(1),
            instance: InstanceId::generate(),
            pools: vec![pool(), pool()],
        };
        let volume = self.volume.clone().unwrap();
        let granted = commit::volume_status(&volume, workspace, &place, &self.facts).ok().unwrap();
        self.step()?;
        self.volume.as_mut().unwrap().status = Some(granted);
        let amounts = launch::amounts(workspace, &template()).unwrap();
        let status = commit::workspace_status(workspace, start, &place, amounts, &self.facts, at(40)).ok().unwrap();
        self.step()?;
        self.workspace.as_mut().unwrap().status = Some(status);
        self.step()?;
        self.hello();
        Ok(())
    }

    fn volume_round(&mut self) -> Result<bool, Death> {
        let Some(volume) = self.volume.clone() else { return Ok(false) };
        let status = volume.status.clone().unwrap_or_default();
        let execution = self.workspace.as_ref().and_then(|w| w.status.as_ref()).and_then(|s| s.execution.as_ref());
        let owner = |is_named: bool| match &self.workspace {
            Some(_) if is_named => {
                volume_decide::Owner::Present { instance: execution.map(|execution| execution.instance_id) }
            }
            _ => volume_decide::Owner::Gone,
        };
        let decision = volume_decide::decide(&volume_decide::Sight {
            volume: &volume,
            bound_to: owner(status.bound_to.is_some()),
            created_for: owner(true),
            granted_for: owner(status.granted_for.is_some()),
            cluster: &self.facts,
            now: at(80),
        });
        let wrote = decision.status.is_some();
        if let Some(status) = decision.status {
            self.step()?;
            self.volume.as_mut().unwrap().status = Some(*status);
        }
        match decision.action {
            volume_decide::Action::Rest => return Ok(wrote),
            volume_decide::Action::AddFinalizer => panic!("{} is made with its finalizer", Key::of(&volume)),
            volume_decide::Action::Settle { holder } => {
                self.step()?;
                let used = self.node.confirm_not_taken(VOLUME_UID, holder.epoch.0);
                self.volume_word(holder.epoch, used)?;
            }
            volume_decide::Action::Delete { .. } => {
                self.step()?;
                self.node.records.retain(|record| record.0 != VOLUME_UID);
                self.step()?;
                self.volume = None;
            }
            volume_decide::Action::RemoveFinalizer | volume_decide::Action::Withdraw => {
                self.step()?;
                self.volume = None;
            }
        }
        Ok(true)
    }

    fn phase(&self) -> WorkspacePhase {
        self.workspace.as_ref().unwrap().status.as_ref().unwrap().phase.unwrap()
    }

    fn ask(&mut self, state: PowerState, id: &str) {
        self.workspace.as_mut().unwrap().spec.power = Some(request(state, id));
        self.settle();
    }
}

/// Create, stop, start, delete; the leader dies after `left` steps.
fn life(left: usize) -> usize {
    let mut sim = Sim::new(left);
    sim.settle();
    assert_eq!((sim.phase(), sim.node.started), (WorkspacePhase::Available, 1), "died at {left}");
    sim.ask(PowerState::Stopped, "stop");
    assert_eq!(sim.phase(), WorkspacePhase::Stopped, "died at {left}");
    assert!(sim.node.running.is_none());
    sim.ask(PowerState::Running, "start");
    assert_eq!((sim.phase(), sim.node.started), (WorkspacePhase::Available, 2), "died at {left}");
    let commands = &sim.workspace.as_ref().unwrap().status.as_ref().unwrap().commands;
    assert!(commands.iter().all(|command| command.result == CommandResult::Succeeded), "{commands:?}");
    sim.workspace.as_mut().unwrap().metadata.deletion_timestamp = Some(at(60));
    sim.settle();
    assert!(sim.workspace.is_none() && sim.volume.is_none(), "died at {left}: {:?}", sim.volume);
    assert!(sim.node.running.is_none() && sim.node.records.is_empty(), "nothing is left on the node");
    sim.steps
}

#[test]
fn whoever_takes_over_goes_on_wherever_the_last_one_died() {
    let steps = life(usize::MAX);
    assert!(steps > 30, "{steps} steps");
    for left in 0..=steps {
        life(left);
    }
}

#[test]
fn a_deletion_ends_clean_wherever_a_start_was_cut_off() {
    let mut sim = Sim::new(usize::MAX);
    sim.settle();
    for left in 0..sim.steps {
        let mut sim = Sim::new(left);
        while !matches!(sim.round(), Err(Death) | Ok(false)) {}
        (sim.left, sim.facts.told) = (usize::MAX, Vec::new());
        sim.hello();
        sim.workspace.as_mut().unwrap().metadata.deletion_timestamp = Some(at(60));
        if sim.workspace.as_ref().unwrap().metadata.finalizers.is_none() {
            continue;
        }
        sim.settle();
        assert!(sim.workspace.is_none(), "cut off at {left}: {:#?}", sim.workspace);
        assert!(sim.volume.is_none(), "cut off at {left}: {:#?}", sim.volume);
        assert!(sim.node.running.is_none() && sim.node.records.is_empty(), "cut off at {left}");
    }
}
