//! What a Hello says, checked, and what is answered to it. Pure.

use std::collections::{BTreeMap, BTreeSet};

use kibo_crds::{Bytes, Incarnation, InstanceId, Node, NodeId, ObjectUid, PoolId, Term, node::AdoptionAction};
use kibo_protocol::{NodeKey, SecretHash, quarantine_id, v1};
use v1::SessionRefusal as Refusal;

use super::live::{Capacity, DeclaredPool};
use crate::{
    leader::History,
    node::{
        Facts, banished,
        isolation::{self, Fence},
    },
};

/// Labels that say something about Kubernetes or Kibotos itself are not the host's to give.
const RESERVED_LABELS: [&str; 3] = ["kibotos.dev/", "kubernetes.io/", "k8s.io/"];
const MAX_LABELS: usize = 64;
const MAX_POOLS: usize = 32;

/// A Hello whose every part has been checked.
#[derive(Debug)]
pub struct Hello {
    pub node: NodeId,
    pub key: NodeKey,
    /// Absent: the node runs nothing and asks for a new one.
    pub incarnation: Option<Incarnation>,
    pub boot_id: String,
    /// Which state directory speaks; empty: an older daemon.
    pub home: String,
    pub version: String,
    /// Empty: not known.
    pub source_revision: String,
    pub capacity: Capacity,
    pub pools: Vec<DeclaredPool>,
    pub instances: Vec<Running>,
    pub labels: BTreeMap<String, String>,
    /// Empty before the node's first session.
    pub cluster_id: String,
    pub highest_revision: u64,
    pub highest_term: Term,
    /// The latest moment of the control plane's history that the node knows.
    pub latest: Option<v1::Moment>,
    /// Names what the node has seen, should this control plane not know it.
    pub quarantine: String,
}

/// An Instance that the node has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Running {
    pub instance: InstanceId,
    pub workspace_uid: String,
    /// Nothing of it runs any more; its last events wait for their ack.
    pub ended: bool,
}

/// A Hello that makes no sense, with the part that does not.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("invalid hello: {0}")]
pub struct InvalidHello(String);

fn invalid(what: impl Into<String>) -> InvalidHello {
    InvalidHello(what.into())
}

impl TryFrom<v1::Hello> for Hello {
    type Error = InvalidHello;

    fn try_from(hello: v1::Hello) -> Result<Self, InvalidHello> {
        let quarantine = quarantine_id(&hello);
        let node: NodeId = hello.node_id.parse().map_err(|error| invalid(format!("{error}")))?;
        let key = NodeKey::from_bytes(&hello.node_key).map_err(|error| invalid(format!("node_key: {error}")))?;
        let instances = hello.instances.iter().map(running).collect::<Result<Vec<_>, _>>()?;
        let incarnation = hello.incarnation.map(Incarnation);
        if incarnation.is_none()
            && let Some(left) = instances.iter().find(|instance| !instance.ended)
        {
            return Err(invalid(format!(
                "a node that still has an Instance ({}) cannot ask for a new incarnation",
                left.instance
            )));
        }
        Ok(Self {
            node,
            key,
            incarnation,
            boot_id: bounded("boot_id", hello.boot_id)?,
            home: optional("home", hello.home)?,
            version: bounded("version", hello.version)?,
            source_revision: hello.source_revision.chars().take(64).collect(),
            capacity: hello.capacity.as_ref().map(Capacity::from).unwrap_or_default(),
            pools: declared_pools(&hello.pools)?,
            instances,
            labels: host_labels(hello.labels)?,
            cluster_id: optional("cluster_id", hello.cluster_id)?,
            highest_revision: hello.highest_revision,
            highest_term: Term(hello.highest_term),
            latest: hello.latest.map(moment).transpose()?,
            quarantine,
        })
    }
}

/// What others read in a condition or a log.
fn bounded(what: &str, value: String) -> Result<String, InvalidHello> {
    let is_plain = value.bytes().all(|byte| byte.is_ascii_graphic());
    if (1..=64).contains(&value.len()) && is_plain {
        return Ok(value);
    }
    Err(invalid(format!("{what} must have 1 to 64 visible characters of ASCII")))
}

fn optional(what: &str, value: String) -> Result<String, InvalidHello> {
    if value.is_empty() { Ok(value) } else { bounded(what, value) }
}

fn moment(moment: v1::Moment) -> Result<v1::Moment, InvalidHello> {
    Ok(v1::Moment { leadership: optional("latest.leadership", moment.leadership)?, ..moment })
}

fn running(instance: &v1::Instance) -> Result<Running, InvalidHello> {
    Ok(Running {
        instance: instance.instance_id.parse().map_err(|error| invalid(format!("{error}")))?,
        workspace_uid: instance
            .workspace_uid
            .parse::<ObjectUid>()
            .map_err(|error| invalid(format!("workspace_uid of an Instance: {error}")))?
            .into(),
        ended: instance.state() == v1::InstanceState::Ended,
    })
}

/// Pools with checked names; also those of a Report.
pub fn declared_pools(pools: &[v1::Pool]) -> Result<Vec<DeclaredPool>, InvalidHello> {
    if pools.len() > MAX_POOLS {
        return Err(invalid(format!("more than {MAX_POOLS} storage pools")));
    }
    if pools.iter().filter(|pool| pool.default).count() > 1 {
        return Err(invalid("more than one default storage pool"));
    }
    let mut seen = BTreeSet::new();
    let pool = |pool: &v1::Pool| {
        let id: PoolId = pool.id.parse().map_err(|error| invalid(format!("{error}")))?;
        if !seen.insert(id.clone()) {
            return Err(invalid(format!("storage pool {id} is declared twice")));
        }
        // A pool that is not reached may not know its marker.
        if pool.uid.len() > 36 || (pool.available && pool.uid.is_empty()) {
            return Err(invalid(format!("storage pool {id} is available without the uid of its marker")));
        }
        Ok(DeclaredPool {
            id,
            uid: pool.uid.clone(),
            default: pool.default,
            available: pool.available,
            capacity: pool.capacity_bytes.map(Bytes),
            free: pool.free_bytes.map(Bytes),
        })
    };
    pools.iter().map(pool).collect()
}

fn host_labels(labels: std::collections::HashMap<String, String>) -> Result<BTreeMap<String, String>, InvalidHello> {
    if labels.len() > MAX_LABELS {
        return Err(invalid(format!("more than {MAX_LABELS} labels")));
    }
    let is_reserved = |key: &str| {
        key.split_once('/').is_some_and(|(prefix, _)| {
            RESERVED_LABELS.iter().any(|reserved| {
                let domain = reserved.trim_end_matches('/');
                prefix == domain || prefix.ends_with(&format!(".{domain}"))
            })
        })
    };
    labels
        .into_iter()
        .filter(|(key, _)| !is_reserved(key))
        .map(|(key, value)| {
            if key.is_empty() || key.len() > 317 || value.len() > 63 {
                let shown: String = key.chars().take(317).collect();
                return Err(invalid(format!("label {shown:?} is no Kubernetes label")));
            }
            Ok((key, value))
        })
        .collect()
}

/// A session of the same node that this leader holds now.
#[derive(Clone, Copy, Debug)]
pub struct Existing<'a> {
    pub boot_id: &'a str,
    pub home: &'a str,
    pub incarnation: Incarnation,
}

/// What the leader knows when a Hello comes, all read after it came.
#[derive(Clone, Copy, Debug)]
pub struct Observed<'a> {
    /// From a quorum read; absent: there is no such Node.
    pub node: Option<&'a Node>,
    pub existing: Option<Existing<'a>>,
    pub cluster_id: &'a str,
    pub term: Term,
    pub history: &'a History,
    /// What the node has, if it was asked: the highest incarnation that it ever lived.
    pub inventoried: Option<Incarnation>,
    /// Revision of the control plane at that read, when it is a number.
    pub revision: Option<u64>,
}

/// The answer to a Hello.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    Refuse {
        reason: Refusal,
        message: String,
    },
    /// An admin ordered what becomes of a node that is ahead: first it says what it has.
    TakeInventory,
    /// An isolation is ordered, and whether it is carried out is known in some seconds.
    AwaitIsolation,
    Admit {
        incarnation: Incarnation,
        minted: bool,
        replaces: bool,
        adopts: Option<AdoptionAction>,
    },
}

fn refuse(reason: Refusal, message: impl Into<String>) -> Decision {
    Decision::Refuse { reason, message: message.into() }
}

/// Decides over a Hello. The order of the checks is part of the contract: a node that was isolated and then
/// retired still hears that it was isolated, and destroys what it runs.
pub fn decide(hello: &Hello, observed: Observed<'_>) -> Decision {
    let Some(node) = observed.node else {
        return refuse(Refusal::UnknownNode, format!("there is no Node {}: issue an enrollment for it", hello.node));
    };
    if !has_key(node, &hello.key) {
        return refuse(
            Refusal::WrongKey,
            format!("the key is not the one of Node {}: enroll this host with a new token", hello.node),
        );
    }
    let facts = Facts::of(node);
    match isolation::fence(node) {
        Fence::Closed(isolated) if hello.incarnation.is_some_and(|incarnation| incarnation <= isolated) => {
            return refuse(
                Refusal::Isolated,
                format!(
                    "incarnation {isolated} of this node was isolated: destroy all Instances and come back without an incarnation"
                ),
            );
        }
        Fence::Undecided(ordered) if hello.incarnation.is_none_or(|incarnation| incarnation <= ordered) => {
            return Decision::AwaitIsolation;
        }
        Fence::Open | Fence::Undecided(_) | Fence::Closed(_) => {}
    }
    if let Some((reason, message)) = banished(node) {
        return refuse(reason, message);
    }
    match went_back(hello, observed, facts) {
        Some(message) => ahead(node, hello, observed, facts, message),
        None => session_of(hello, observed.existing, facts.incarnation.unwrap_or_default(), None),
    }
}

fn has_key(node: &Node, key: &NodeKey) -> bool {
    let stored = node.status.as_ref().and_then(|status| status.key_hash.as_deref());
    stored.and_then(|stored| stored.parse::<SecretHash>().ok()).is_some_and(|stored| stored == key.hash())
}

/// A node that is ahead gets no session before an admin has said what becomes of it.
fn ahead(node: &Node, hello: &Hello, observed: Observed<'_>, facts: Facts, message: String) -> Decision {
    let ordered = node.spec.adoption.as_ref().filter(|adoption| adoption.quarantine == hello.quarantine);
    let Some(ordered) = ordered else { return refuse(Refusal::ControlPlaneWentBack, message) };
    if ordered.action == AdoptionAction::Destroy && hello.incarnation.is_some() {
        return refuse(
            Refusal::Isolated,
            "an admin ordered that what runs here is destroyed: destroy all Instances and come back without an incarnation",
        );
    }
    let Some(highest) = observed.inventoried else { return Decision::TakeInventory };
    // What this control plane has forgotten counts too: no number is used twice.
    let newest = facts.incarnation.unwrap_or_default().max(highest);
    session_of(hello, observed.existing, newest, Some(ordered.action))
}

/// How the node proves that this control plane forgot something: it was restored from a backup.
fn went_back(hello: &Hello, observed: Observed<'_>, facts: Facts) -> Option<String> {
    let advice = format!(
        "nothing on the node is touched: when the control plane was restored from a backup, `kibo node adopt {}` takes what runs there back",
        hello.node
    );
    if !hello.cluster_id.is_empty() && hello.cluster_id != observed.cluster_id {
        return Some(format!(
            "the node belongs to cluster {}, this is cluster {}; {advice}",
            hello.cluster_id, observed.cluster_id
        ));
    }
    if hello.highest_term > observed.term {
        return Some(format!(
            "the node has obeyed a leader of term {}, this one has {}; {advice}",
            hello.highest_term, observed.term
        ));
    }
    if let Some(latest) = &hello.latest
        && let Err(how) = observed.history.contains(latest)
    {
        return Some(format!("{how}; {advice}"));
    }
    if let Some(revision) = observed.revision
        && hello.highest_revision > revision
    {
        return Some(format!(
            "the node has seen revision {}, the control plane is at {revision}; {advice}",
            hello.highest_revision
        ));
    }
    let newest = facts.incarnation.unwrap_or_default();
    if let Some(incarnation) = hello.incarnation
        && incarnation > newest
    {
        return Some(format!("the node is in incarnation {incarnation}, the newest known is {newest}; {advice}"));
    }
    None
}

/// Which session the node gets: a new life, its current one, or none, since another host has it.
fn session_of(
    hello: &Hello,
    existing: Option<Existing<'_>>,
    newest: Incarnation,
    adopts: Option<AdoptionAction>,
) -> Decision {
    if let Some(existing) = existing {
        let same_home = existing.home == hello.home || existing.home.is_empty() || hello.home.is_empty();
        let same_life =
            same_home && existing.boot_id == hello.boot_id && hello.incarnation == Some(existing.incarnation);
        if !same_life {
            return refuse(
                Refusal::Duplicate,
                format!(
                    "another daemon (boot {}, incarnation {}) has a live session as this node; if this host was just restarted, that session ends by itself in a few seconds",
                    existing.boot_id, existing.incarnation
                ),
            );
        }
    }
    let replaces = existing.is_some();
    match hello.incarnation {
        Some(incarnation) if incarnation == newest => Decision::Admit { incarnation, minted: false, replaces, adopts },
        Some(incarnation) => refuse(
            Refusal::Isolated,
            format!(
                "incarnation {incarnation} is over since {newest} began, and everything of it is void: destroy all Instances and come back without an incarnation"
            ),
        ),
        None => match newest.next() {
            Some(incarnation) => Decision::Admit { incarnation, minted: true, replaces, adopts },
            None => refuse(Refusal::InvalidHello, "this node has used up its incarnations: use a new node id"),
        },
    }
}

#[cfg(test)]
mod tests {
    use kibo_crds::node::{
        Admission, Isolation, IsolationResult, IsolationState, NodeSpec, NodeStatus, Retirement, Revocation,
    };

    use super::*;

    const CLUSTER: &str = "cluster-a";

    fn key(byte: u8) -> NodeKey {
        NodeKey::from_bytes(&[byte; 32]).unwrap()
    }

    fn node(incarnation: Option<u64>, isolated: Option<u64>, change: impl FnOnce(&mut Node)) -> Node {
        let mut node = Node::new("node-1", NodeSpec::default());
        node.spec.isolation = isolated.map(|incarnation| Isolation {
            incarnation: Incarnation(incarnation),
            confirm_host_cannot_write: true,
            force_despite_evidence: false,
            request_id: None,
        });
        node.status = Some(NodeStatus {
            isolation: isolated.map(|incarnation| finished(incarnation, IsolationState::Finished)),
            admission: Some(Admission::Admitted),
            key_hash: Some(key(1).hash().to_string()),
            incarnation: incarnation.map(Incarnation),
            ..NodeStatus::default()
        });
        change(&mut node);
        node
    }

    fn finished(incarnation: u64, state: IsolationState) -> IsolationResult {
        IsolationResult {
            incarnation: Incarnation(incarnation),
            request_id: None,
            state,
            evidence: None,
            released_volumes: None,
            released_layers: None,
            failed_workspaces: None,
            started_at: None,
            finished_at: None,
        }
    }

    fn hello(incarnation: Option<u64>, change: impl FnOnce(&mut v1::Hello)) -> Hello {
        let mut hello = v1::Hello {
            node_id: "node-1".into(),
            node_key: key(1).expose().to_vec(),
            incarnation,
            boot_id: "boot-1".into(),
            version: "1.0".into(),
            ..v1::Hello::default()
        };
        change(&mut hello);
        hello.try_into().unwrap()
    }

    fn observed(node: Option<&Node>) -> Observed<'_> {
        static HISTORY: std::sync::LazyLock<History> = std::sync::LazyLock::new(History::default);
        Observed {
            node,
            existing: None,
            cluster_id: CLUSTER,
            term: Term(5),
            history: &HISTORY,
            inventoried: None,
            revision: Some(100),
        }
    }

    fn reason(decision: &Decision) -> Option<Refusal> {
        match decision {
            Decision::Refuse { reason, .. } => Some(*reason),
            Decision::TakeInventory | Decision::AwaitIsolation | Decision::Admit { .. } => None,
        }
    }

    fn admitted(incarnation: u64, minted: bool, replaces: bool) -> Decision {
        Decision::Admit { incarnation: Incarnation(incarnation), minted, replaces, adopts: None }
    }

    #[test]
    fn a_node_keeps_its_incarnation_or_gets_the_next_one() {
        for (stored, asked, expected) in [
            (None, None, admitted(1, true, false)),
            (Some(3), None, admitted(4, true, false)),
            (Some(3), Some(3), admitted(3, false, false)),
        ] {
            let node = node(stored, None, |_| {});
            assert_eq!(decide(&hello(asked, |_| {}), observed(Some(&node))), expected);
        }
    }

    #[test]
    fn the_checks_come_in_their_order() {
        type Change = fn(&mut Node);
        let retired: Change = |node| node.spec.retirement = Some(Retirement::default());
        let revoked: Change = |node| node.status.as_mut().unwrap().admission = Some(Admission::Revoked);
        let being_revoked: Change = |node| node.spec.revocation = Some(Revocation::default());
        let both: Change = |node| {
            node.spec.retirement = Some(Retirement::default());
            node.status.as_mut().unwrap().admission = Some(Admission::Revoked);
        };
        let nothing: Change = |_| {};
        for (isolated, change, asked, wrong_key, expected) in [
            (None, nothing, Some(3), true, Refusal::WrongKey),
            (Some(3), retired, Some(3), true, Refusal::WrongKey),
            (Some(3), retired, Some(3), false, Refusal::Isolated),
            (Some(3), retired, Some(2), false, Refusal::Isolated),
            (Some(3), retired, None, false, Refusal::Retired),
            (None, both, Some(3), false, Refusal::Retired),
            (None, revoked, Some(3), false, Refusal::Revoked),
            (None, being_revoked, Some(3), false, Refusal::Revoked),
            (Some(3), being_revoked, Some(3), false, Refusal::Isolated),
            // An older life that nobody isolated: the node was set back to an older state.
            (None, nothing, Some(2), false, Refusal::Isolated),
        ] {
            let node = node(Some(3), isolated, change);
            let mut hello = hello(asked, |_| {});
            if wrong_key {
                hello.key = key(9);
            }
            let decision = decide(&hello, observed(Some(&node)));
            assert_eq!(reason(&decision), Some(expected), "{isolated:?} {asked:?} {wrong_key} {decision:?}");
        }
        assert_eq!(reason(&decide(&hello(None, |_| {}), observed(None))), Some(Refusal::UnknownNode));
    }

    #[test]
    fn an_isolation_ends_with_the_next_incarnation() {
        let node = node(Some(3), Some(3), |_| {});
        assert_eq!(decide(&hello(None, |_| {}), observed(Some(&node))), admitted(4, true, false));
    }

    #[test]
    fn nobody_comes_in_before_it_is_known_whether_an_isolation_is_carried_out() {
        use IsolationState::{InProgress, Refused};
        for (came, asked, expected) in [
            (None, Some(3), Decision::AwaitIsolation),
            (None, Some(2), Decision::AwaitIsolation),
            // The counts are of one life: the next begins when they are stored.
            (None, None, Decision::AwaitIsolation),
            (Some(InProgress), Some(3), Decision::AwaitIsolation),
            (Some(Refused), Some(3), admitted(3, false, false)),
            (Some(Refused), None, admitted(4, true, false)),
        ] {
            let node = node(Some(3), Some(3), |node| {
                node.status.as_mut().unwrap().isolation = came.map(|state| finished(3, state));
            });
            assert_eq!(decide(&hello(asked, |_| {}), observed(Some(&node))), expected, "{came:?} {asked:?}");
        }
    }

    #[test]
    fn a_node_that_never_enrolled_has_no_key() {
        let node = node(None, None, |node| node.status.as_mut().unwrap().key_hash = None);
        assert_eq!(reason(&decide(&hello(None, |_| {}), observed(Some(&node)))), Some(Refusal::WrongKey));
    }

    #[test]
    fn only_the_same_life_replaces_a_live_session() {
        for (boot_id, home, incarnation, expected) in [
            ("boot-1", "1-2", Some(3), None),
            ("boot-1", "", Some(3), None),
            ("boot-2", "1-2", Some(3), Some(Refusal::Duplicate)),
            // A second daemon on the same host, with a copied state directory.
            ("boot-1", "1-3", Some(3), Some(Refusal::Duplicate)),
            // The same with a copied key and nothing of its own.
            ("boot-1", "1-2", None, Some(Refusal::Duplicate)),
            ("boot-2", "1-2", None, Some(Refusal::Duplicate)),
        ] {
            let node = node(Some(3), None, |_| {});
            let existing = Existing { boot_id, home, incarnation: Incarnation(3) };
            let decision = decide(
                &hello(incarnation, |hello| hello.home = "1-2".into()),
                Observed { existing: Some(existing), ..observed(Some(&node)) },
            );
            assert_eq!(reason(&decision), expected, "{boot_id} {incarnation:?}");
            if expected.is_none() {
                assert_eq!(decision, admitted(3, false, true));
            }
        }
    }

    #[test]
    fn a_control_plane_that_went_back_steers_nobody() {
        type Change = fn(&mut v1::Hello);
        let cases: [(Change, bool); 7] = [
            (|hello| hello.cluster_id = CLUSTER.into(), false),
            (|hello| hello.cluster_id = "cluster-b".into(), true),
            (|hello| hello.highest_term = 5, false),
            (|hello| hello.highest_term = 6, true),
            (|hello| hello.highest_revision = 100, false),
            (|hello| hello.highest_revision = 101, true),
            (|hello| hello.incarnation = Some(4), true),
        ];
        for (index, (change, back)) in cases.into_iter().enumerate() {
            let node = node(Some(3), None, |_| {});
            let decision = decide(&hello(Some(3), change), observed(Some(&node)));
            assert_eq!(reason(&decision) == Some(Refusal::ControlPlaneWentBack), back, "case {index}: {decision:?}");
        }
    }

    #[test]
    fn a_node_that_is_ahead_is_admitted_as_an_admin_says_and_for_this_accident_alone() {
        use AdoptionAction::{Adopt, Destroy};
        let admit = |incarnation, minted, adopts| Decision::Admit {
            incarnation: Incarnation(incarnation),
            minted,
            replaces: false,
            adopts: Some(adopts),
        };
        for (ordered, same_accident, asked, inventoried, expected) in [
            (Adopt, false, Some(5), None, Err(Refusal::ControlPlaneWentBack)),
            (Destroy, false, Some(5), None, Err(Refusal::ControlPlaneWentBack)),
            (Adopt, true, Some(5), None, Ok(Decision::TakeInventory)),
            (Adopt, true, Some(5), Some(5), Ok(admit(5, false, Adopt))),
            // Its host was booted meanwhile: the next life is above all that it lived.
            (Adopt, true, None, Some(5), Ok(admit(6, true, Adopt))),
            (Destroy, true, Some(5), None, Err(Refusal::Isolated)),
            (Destroy, true, None, None, Ok(Decision::TakeInventory)),
            (Destroy, true, None, Some(5), Ok(admit(6, true, Destroy))),
        ] {
            let hello = hello(asked, |hello| hello.highest_term = 9);
            let node = node(Some(3), None, |node| {
                node.spec.adoption = Some(kibo_crds::node::Adoption {
                    quarantine: if same_accident { hello.quarantine.clone() } else { "q-0".into() },
                    action: ordered,
                    unknown: kibo_crds::node::UnknownInstances::Keep,
                    request_id: None,
                });
            });
            let inventoried = inventoried.map(Incarnation);
            let decision = decide(&hello, Observed { inventoried, ..observed(Some(&node)) });
            match expected {
                Ok(expected) => assert_eq!(decision, expected, "{ordered:?} {asked:?} {inventoried:?}"),
                Err(expected) => assert_eq!(reason(&decision), Some(expected), "{ordered:?} {asked:?}"),
            }
        }
    }

    #[test]
    fn a_hello_that_makes_no_sense_is_refused_with_the_part_that_does_not() {
        type Change = fn(&mut v1::Hello);
        let pool = |id: &str| v1::Pool { id: id.into(), uid: "u".into(), available: true, ..v1::Pool::default() };
        let cases: [(Change, &str); 5] = [
            (|hello| hello.node_id = "../x".into(), "node id"),
            (|hello| hello.node_key = vec![1], "node_key"),
            (|hello| hello.boot_id = String::new(), "boot_id"),
            (|hello| hello.version = "v".repeat(65), "version"),
            (
                |hello| {
                    hello.instances = vec![v1::Instance {
                        instance_id: InstanceId::generate().to_string(),
                        workspace_uid: "6f9619ff-8b86-d011-b42d-00c04fc964ff".into(),
                        state: v1::InstanceState::Running.into(),
                        last_seq: 1,
                    }];
                },
                "new incarnation",
            ),
        ];
        for (change, part) in cases {
            let mut hello = v1::Hello {
                node_id: "node-1".into(),
                node_key: vec![1; 32],
                boot_id: "b".into(),
                version: "v".into(),
                ..v1::Hello::default()
            };
            change(&mut hello);
            let error = Hello::try_from(hello).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert!(declared_pools(&[pool("a"), pool("b")]).is_ok());
        assert!(declared_pools(&[pool("a"), pool("a")]).is_err());
        assert!(declared_pools(&[v1::Pool { uid: String::new(), ..pool("a") }]).is_err());
    }

    #[test]
    fn a_host_cannot_give_itself_reserved_labels() {
        let labels = [("zone", "a"), ("kibotos.dev/x", "1"), ("node.kubernetes.io/x", "1"), ("example.com/x", "1")];
        let hello = hello(None, |hello| {
            hello.labels = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        });
        assert_eq!(hello.labels.keys().map(String::as_str).collect::<Vec<_>>(), ["example.com/x", "zone"]);
    }
}
