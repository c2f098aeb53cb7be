//! Carries the steps out: a task for each isolation that is under way.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use kibo_crds::{
    Node, NodeId,
    node::{IsolationResult, IsolationState},
};

use super::{
    census, evidence,
    plan::{self, Step},
};
use crate::{
    clock::now,
    guarded::WriteError,
    node::{NodeControl, compute_status},
    session::read_node,
};

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The nodes whose isolation a task of this leader is about.
#[derive(Debug, Default)]
pub struct Running(Mutex<HashSet<NodeId>>);

impl Running {
    fn begin(&self, node: &NodeId) -> bool {
        self.0.lock().expect("no holder of this lock panics").insert(node.clone())
    }

    fn end(&self, node: &NodeId) {
        self.0.lock().expect("no holder of this lock panics").remove(node);
    }
}

/// Why a step did not come about; it is tried again.
#[derive(Debug, thiserror::Error)]
enum StepError {
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error("failed to read what the node holds: {0}")]
    Read(#[from] kube::Error),
    #[error("what was begun with the node is not over: starts and events in flight: {0}")]
    InFlight(u32),
    #[error("not everything has let go of the node yet: {0:?}")]
    StillHeld(census::Census),
}

/// Sees to it that somebody carries out what the spec of `node` asks for.
pub fn ensure(control: &Arc<NodeControl>, id: &NodeId, node: &Node) {
    if plan::next(node, &now()) == Step::Rest || !control.isolating.begin(id) {
        return;
    }
    let (control, id) = (control.clone(), id.clone());
    let (tasks, stop) = (control.ctx.tasks.clone(), control.ctx.stop.clone());
    tasks.spawn(async move {
        stop.run_until_cancelled(Box::pin(carry_out(&control, &id))).await;
        control.isolating.end(&id);
        // What was ordered since the last read is seen by the next look at the Node.
        control.ctx.nodes.touch(&id);
    });
}

/// One step after the other, each from what is stored, until there is none.
async fn carry_out(control: &Arc<NodeControl>, id: &NodeId) {
    let mut pause = FIRST_PAUSE;
    loop {
        let outcome = match read_node(&control.api(), id).await {
            Ok((None, _)) => return,
            Ok((Some(node), _)) => match plan::next(&node, &now()) {
                Step::Rest => return,
                step => take(control, id, &node, step).await,
            },
            Err(error) => Err(error.into()),
        };
        match outcome {
            Ok(()) => pause = FIRST_PAUSE,
            Err(StepError::Write(WriteError::Conflict { .. })) => {}
            Err(error @ (StepError::InFlight(_) | StepError::StillHeld(_))) => {
                tracing::debug!(node = %id, %error, "the isolation waits");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            Err(error) => {
                tracing::warn!(node = %id, %error, "a step of an isolation failed and is tried again");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}

async fn take(control: &Arc<NodeControl>, id: &NodeId, node: &Node, step: Step) -> Result<(), StepError> {
    let stored = node.status.as_ref().and_then(|status| status.isolation.clone());
    match (step, stored) {
        (Step::Begin(begun), _) => {
            let incarnation = begun.incarnation;
            store(control, id, node, begun).await?;
            tracing::warn!(node = %id, %incarnation, "an isolation is ordered");
            kibo_failpoint::reach("isolation-begun").await;
            Ok(())
        }
        (Step::Decide { look }, Some(begun)) => decide(control, id, node, begun, look).await,
        (Step::Release, Some(decided)) => release(control, id, node, decided).await,
        (Step::Rest | Step::Decide { .. } | Step::Release, _) => Ok(()),
    }
}

/// Refuses it, or stores the counts, by which everything that names the incarnation becomes void.
async fn decide(
    control: &Arc<NodeControl>,
    id: &NodeId,
    node: &Node,
    begun: IsolationResult,
    look: bool,
) -> Result<(), StepError> {
    let seen = if look {
        evidence::seek(control, id, node, begun.incarnation).await
    } else {
        evidence::Evidence { writes: false, words: None }
    };
    kibo_failpoint::reach("isolation-looked").await;
    let begun = IsolationResult { evidence: seen.words.clone(), ..begun };
    if seen.writes {
        let refused = IsolationResult { state: IsolationState::Refused, finished_at: Some(now()), ..begun };
        store(control, id, node, refused).await?;
        tracing::warn!(node = %id, evidence = seen.words, "the isolation is refused: the host still writes");
        return Ok(());
    }
    // The session is over; a start or an event that was under way when it ended is not counted by half.
    let in_flight = control.usage.of_node(id).in_flight + control.ctx.registry.events_in_work(id);
    if in_flight > 0 {
        return Err(StepError::InFlight(in_flight));
    }
    let census = census::take(&control.ctx.client, id, begun.incarnation).await?;
    kibo_failpoint::reach("isolation-listed").await;
    store(control, id, node, census.store_in(&begun)).await?;
    tracing::warn!(
        node = %id, incarnation = %begun.incarnation, volumes = census.volumes, layers = census.layers,
        workspaces = census.workspaces, evidence = seen.words, "the isolation is carried out"
    );
    kibo_failpoint::reach("isolation-counted").await;
    Ok(())
}

/// Workspaces and Volumes let go by themselves; when nothing names the incarnation any more, it is finished.
async fn release(
    control: &Arc<NodeControl>,
    id: &NodeId,
    node: &Node,
    decided: IsolationResult,
) -> Result<(), StepError> {
    let left = census::take(&control.ctx.client, id, decided.incarnation).await?;
    if !left.is_empty() {
        return Err(StepError::StillHeld(left));
    }
    kibo_failpoint::reach("isolation-released").await;
    let incarnation = decided.incarnation;
    let finished = IsolationResult { state: IsolationState::Finished, finished_at: Some(now()), ..decided };
    store(control, id, node, finished).await?;
    tracing::info!(node = %id, %incarnation, "the isolation is finished");
    kibo_failpoint::reach("isolation-finished").await;
    Ok(())
}

async fn store(
    control: &Arc<NodeControl>,
    id: &NodeId,
    node: &Node,
    result: IsolationResult,
) -> Result<(), WriteError> {
    let mut node = node.clone();
    node.status.get_or_insert_default().isolation = Some(result);
    let status = compute_status(&control.observe(id, &node));
    control.write(id, &node, status).await.map(drop)
}
