//! How far an isolation has come, and what comes next. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::{
    Incarnation, Node,
    node::{Isolation, IsolationResult, IsolationState},
};

/// What a Hello meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    Open,
    /// An isolation is ordered, and whether it is carried out will be known in some seconds: until then neither this
    /// incarnation nor a new one begins a session.
    Undecided(Incarnation),
    /// This incarnation and all before it are dead.
    Closed(Incarnation),
}

/// The next step of an isolation.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// None was ordered, or it has come to its end.
    Rest,
    /// This is to be stored first: the order was seen.
    Begin(IsolationResult),
    /// Look for evidence against it, if `look`; then count and store, or refuse.
    Decide { look: bool },
    /// It is decided: what is void is let go of, and then it is finished.
    Release,
}

fn result(node: &Node) -> Option<&IsolationResult> {
    node.status.as_ref().and_then(|status| status.isolation.as_ref())
}

/// Whether `result` is what came of this order, and not of one before it.
fn answers(result: &IsolationResult, ordered: &Isolation) -> bool {
    let is_overruled = result.state == IsolationState::Refused && ordered.force_despite_evidence;
    result.incarnation == ordered.incarnation && result.request_id == ordered.request_id && !is_overruled
}

/// Once the counts are stored there is no way back.
fn is_decided(result: &IsolationResult) -> bool {
    match result.state {
        IsolationState::Refused => false,
        IsolationState::InProgress => result.failed_workspaces.is_some(),
        IsolationState::Finished => true,
    }
}

fn is_refused(node: &Node, ordered: &Isolation) -> bool {
    result(node).is_some_and(|result| result.state == IsolationState::Refused && answers(result, ordered))
}

/// The incarnation whose executions and holders are void, with all before it. It only ever grows while it matters:
/// a later isolation is of a later incarnation, whose beginning voided the earlier ones too.
pub fn carried_out(node: &Node) -> Option<Incarnation> {
    result(node).filter(|result| is_decided(result)).map(|result| result.incarnation)
}

pub fn fence(node: &Node) -> Fence {
    let ordered = node.spec.isolation.as_ref().filter(|ordered| !is_refused(node, ordered));
    let ordered = ordered.map(|ordered| ordered.incarnation);
    match (ordered, carried_out(node)) {
        (Some(ordered), decided) if decided < Some(ordered) => Fence::Undecided(ordered),
        (_, Some(decided)) => Fence::Closed(decided),
        (_, None) => Fence::Open,
    }
}

pub fn next(node: &Node, now: &Time) -> Step {
    let Some(ordered) = &node.spec.isolation else { return Step::Rest };
    let result = result(node);
    let Some(result) = result.filter(|result| answers(result, ordered)) else {
        return Step::Begin(begin(ordered, result, now));
    };
    match result.state {
        IsolationState::Refused | IsolationState::Finished => Step::Rest,
        IsolationState::InProgress if is_decided(result) => Step::Release,
        IsolationState::InProgress => {
            // Of a life that is over anyhow there is nothing to see.
            let is_current = node.status.as_ref().and_then(|status| status.incarnation) == Some(ordered.incarnation);
            Step::Decide { look: is_current && !ordered.force_despite_evidence }
        }
    }
}

/// A new order for an incarnation that is being isolated, or was, joins what is there: its counts stay.
fn begin(ordered: &Isolation, before: Option<&IsolationResult>, now: &Time) -> IsolationResult {
    let goes_on = before.filter(|it| it.incarnation == ordered.incarnation && it.state != IsolationState::Refused);
    match goes_on {
        Some(before) => IsolationResult { request_id: ordered.request_id.clone(), ..before.clone() },
        None => IsolationResult {
            incarnation: ordered.incarnation,
            request_id: ordered.request_id.clone(),
            state: IsolationState::InProgress,
            evidence: None,
            released_volumes: None,
            released_layers: None,
            failed_workspaces: None,
            started_at: Some(now.clone()),
            finished_at: None,
        },
    }
}

/// What people are told: the condition Isolated, with its reason and words. `None`: there is nothing to tell.
pub fn verdict(node: &Node) -> Option<(Option<bool>, &'static str, String)> {
    let current = node.status.as_ref().and_then(|status| status.incarnation)?;
    let refused = node.spec.isolation.as_ref().filter(|ordered| is_refused(node, ordered));
    let result = result(node);
    if let (Some(ordered), Some(result)) = (refused, result)
        && ordered.incarnation == current
    {
        let seen = result.evidence.as_deref().unwrap_or("another member of a shared pool saw the host write");
        let message = format!(
            "refused, and nothing was released: {seen}. Power the host off and isolate it by a new request \
             (a new requestId), or, when you know better, set forceDespiteEvidence too"
        );
        return Some((Some(false), "HostStillWrites", message));
    }
    match fence(node) {
        Fence::Open => None,
        Fence::Undecided(incarnation) if incarnation >= current => {
            let message = format!(
                "the isolation of incarnation {incarnation} is ordered; members of its shared storage pools look \
                 whether the host still writes"
            );
            Some((None, "Undecided", message))
        }
        Fence::Closed(incarnation) if incarnation >= current => {
            let counts = result.map(counts).unwrap_or_default();
            let is_finished = result.is_some_and(|result| result.state == IsolationState::Finished);
            let reason = if is_finished { "Isolated" } else { "Releasing" };
            let message = format!(
                "incarnation {incarnation} is isolated ({counts}); that ends by itself when the node comes back with a \
                 new one"
            );
            Some((Some(true), reason, message))
        }
        Fence::Undecided(_) | Fence::Closed(_) => {
            Some((Some(false), "Returned", format!("the node came back with incarnation {current}")))
        }
    }
}

fn counts(result: &IsolationResult) -> String {
    let count = |count: Option<u32>| count.unwrap_or_default();
    format!(
        "released Volumes: {}, released layers: {}, failed Workspaces: {}",
        count(result.released_volumes),
        count(result.released_layers),
        count(result.failed_workspaces)
    )
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;
    use kibo_crds::node::{NodeSpec, NodeStatus};

    use super::*;

    fn at(second: i64) -> Time {
        Time(Timestamp::from_second(second).unwrap())
    }

    /// A node in incarnation 3.
    fn node(ordered: Option<Isolation>, result: Option<IsolationResult>) -> Node {
        let mut node = Node::new("node-1", NodeSpec { isolation: ordered, ..NodeSpec::default() });
        let status = NodeStatus { incarnation: Some(Incarnation(3)), isolation: result, ..NodeStatus::default() };
        node.status = Some(status);
        node
    }

    #[expect(clippy::unnecessary_wraps, reason = "a row of a table may have none")]
    fn ordered(incarnation: u64, request: &str, force: bool) -> Option<Isolation> {
        Some(Isolation {
            incarnation: Incarnation(incarnation),
            confirm_host_cannot_write: true,
            force_despite_evidence: force,
            request_id: Some(request.parse().unwrap()),
        })
    }

    #[expect(clippy::unnecessary_wraps, reason = "a row of a table may have none")]
    fn came(incarnation: u64, request: &str, state: IsolationState, counted: Option<u32>) -> Option<IsolationResult> {
        let ordered = ordered(incarnation, request, false).unwrap();
        let begun = begin(&ordered, None, &at(1));
        Some(IsolationResult { state, failed_workspaces: counted, ..begun })
    }

    use IsolationState::{Finished, InProgress, Refused};

    #[test]
    fn each_stored_state_has_one_next_step() {
        let begun = |request| Step::Begin(came(3, request, InProgress, None).unwrap());
        for (ordered, came, expected) in [
            (None, None, Step::Rest),
            (ordered(3, "a", false), None, begun("a")),
            (ordered(3, "a", false), came(3, "a", InProgress, None), Step::Decide { look: true }),
            (ordered(3, "a", true), came(3, "a", InProgress, None), Step::Decide { look: false }),
            // Of an earlier life: it was ordered of an older control plane.
            (ordered(2, "a", false), came(2, "a", InProgress, None), Step::Decide { look: false }),
            (ordered(3, "a", false), came(3, "a", InProgress, Some(1)), Step::Release),
            (ordered(3, "a", false), came(3, "a", Finished, Some(1)), Step::Rest),
            (ordered(3, "a", false), came(3, "a", Refused, None), Step::Rest),
            // Refused, and ordered anew.
            (ordered(3, "b", false), came(3, "a", Refused, None), begun("b")),
            (ordered(3, "a", true), came(3, "a", Refused, None), begun("a")),
            // The life before was isolated.
            (ordered(3, "b", false), came(2, "a", Finished, Some(4)), begun("b")),
        ] {
            assert_eq!(next(&node(ordered.clone(), came.clone()), &at(1)), expected, "{ordered:?} {came:?}");
        }
    }

    #[test]
    fn a_second_order_for_the_same_life_keeps_the_counts_of_the_first() {
        for (state, counted) in [(InProgress, None), (InProgress, Some(2)), (Finished, Some(2))] {
            let before = came(3, "a", state, counted);
            let expected = IsolationResult { request_id: Some("b".parse().unwrap()), ..before.clone().unwrap() };
            assert_eq!(next(&node(ordered(3, "b", false), before), &at(9)), Step::Begin(expected));
        }
    }

    #[test]
    fn nobody_comes_in_before_it_is_decided_and_nothing_is_void_until_then() {
        let closed = Fence::Closed(Incarnation(3));
        let undecided = Fence::Undecided(Incarnation(3));
        for (ordered, came, fence_then, void) in [
            (None, None, Fence::Open, None),
            (ordered(3, "a", false), None, undecided, None),
            (ordered(3, "a", false), came(3, "a", InProgress, None), undecided, None),
            (ordered(3, "a", false), came(3, "a", InProgress, Some(0)), closed, Some(3)),
            (ordered(3, "a", false), came(3, "a", Finished, Some(0)), closed, Some(3)),
            (ordered(3, "b", false), came(3, "a", Finished, Some(0)), closed, Some(3)),
            (ordered(3, "a", false), came(3, "a", Refused, None), Fence::Open, None),
            (ordered(3, "b", false), came(3, "a", Refused, None), undecided, None),
            (ordered(3, "a", true), came(3, "a", Refused, None), undecided, None),
            (ordered(3, "b", false), came(2, "a", Finished, Some(0)), undecided, Some(2)),
        ] {
            let node = node(ordered.clone(), came.clone());
            assert_eq!(fence(&node), fence_then, "{ordered:?} {came:?}");
            assert_eq!(carried_out(&node), void.map(Incarnation), "{ordered:?} {came:?}");
        }
    }

    #[test]
    fn people_are_told_where_it_stands() {
        for (ordered, came, expected) in [
            (None, None, None),
            (ordered(3, "a", false), None, Some((None, "Undecided"))),
            (ordered(3, "a", false), came(3, "a", Refused, None), Some((Some(false), "HostStillWrites"))),
            (ordered(3, "a", false), came(3, "a", InProgress, Some(0)), Some((Some(true), "Releasing"))),
            (ordered(3, "a", false), came(3, "a", Finished, Some(0)), Some((Some(true), "Isolated"))),
            (ordered(2, "a", false), came(2, "a", Finished, Some(0)), Some((Some(false), "Returned"))),
        ] {
            let told = verdict(&node(ordered.clone(), came.clone()));
            assert_eq!(told.map(|(value, reason, _)| (value, reason)), expected, "{ordered:?} {came:?}");
        }
    }
}
