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
    /// The highest incarnation of this node that one of its pools says is dead.
    pub highest_mark: Option<Incarnation>,
    /// The life that the node ends by itself.
    pub ended_incarnation: Option<Incarnation>,
}

impl Hello {
    /// The life that goes on, or that the node ends by itself: of an isolation of it the node hears before anything else.
    fn life(&self) -> Option<Incarnation> {
        self.incarnation.or(self.ended_incarnation)
    }
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
            highest_mark: hello.highest_mark.map(Incarnation),
            ended_incarnation: hello.ended_incarnation.map(Incarnation),
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
            used: pool.used_bytes.map(Bytes),
            waiting_guests: pool.waiting_guests,
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
    if let Some((reason, message)) = without_key(hello, observed.node) {
        return refuse(reason, message);
    }
    let Some(node) = observed.node else { return refuse(Refusal::UnknownNode, unknown(hello)) };
    let facts = Facts::of(node);
    match isolation::fence(node) {
        Fence::Closed(isolated) if hello.life().is_some_and(|incarnation| incarnation <= isolated) => {
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

fn unknown(hello: &Hello) -> String {
    format!("there is no Node {}: issue an enrollment for it", hello.node)
}

/// Why this host is not its node, if so.
pub fn without_key(hello: &Hello, node: Option<&Node>) -> Option<(Refusal, String)> {
    let Some(node) = node else { return Some((Refusal::UnknownNode, unknown(hello))) };
    if has_key(node, &hello.key) {
        return None;
    }
    let isolated = isolation::carried_out(node);
    if had_key(node, &hello.key) && hello.life().is_some() && hello.life() <= isolated {
        let message = "this host was isolated, and another one is this node now: destroy all Instances";
        return Some((Refusal::Isolated, message.to_owned()));
    }
    let message = format!("the key is not the one of Node {}: enroll this host with a new token", hello.node);
    Some((Refusal::WrongKey, message))
}

fn has_key(node: &Node, key: &NodeKey) -> bool {
    let stored = node.status.as_ref().and_then(|status| status.key_hash.as_deref());
    stored.and_then(|stored| stored.parse::<SecretHash>().ok()).is_some_and(|stored| stored == key.hash())
}

/// Whether the host was this node before another one enrolled as it.
fn had_key(node: &Node, key: &NodeKey) -> bool {
    let former = node.status.iter().flat_map(|status| &status.former_key_hashes);
    former.filter_map(|stored| stored.parse::<SecretHash>().ok()).any(|stored| stored == key.hash())
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
        // A life that a pool takes for dead could use nothing there: a control plane that was built anew counts from 1.
        None => match newest.max(credible(hello.highest_mark, newest)).next() {
            Some(incarnation) => Decision::Admit { incarnation, minted: true, replaces, adopts },
            None => refuse(Refusal::InvalidHello, "this node has used up its incarnations: use a new node id"),
        },
    }
}

/// A mark that no life of this node comes near is a mistake of whoever wrote it.
fn credible(mark: Option<Incarnation>, newest: Incarnation) -> Incarnation {
    mark.filter(|mark| mark.is_credible_after(newest)).unwrap_or_default()
}

#[cfg(test)]
#[path = "hello_tests.rs"]
mod tests;
