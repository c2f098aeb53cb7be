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

/// A daemon that was stopped while it was isolated, and reads in a pool that it is dead before it sees that its session is over.
#[test]
fn a_node_that_ends_its_isolated_life_by_itself_hears_of_the_isolation_first() {
    let ends = |hello: &mut v1::Hello| (hello.ended_incarnation, hello.highest_mark) = (Some(3), Some(3));
    let isolated = node(Some(3), Some(3), |_| {});
    assert_eq!(reason(&decide(&hello(None, ends), observed(Some(&isolated)))), Some(Refusal::Isolated));
    let taken = node(Some(4), Some(3), |node| {
        let status = node.status.as_mut().unwrap();
        status.former_key_hashes = vec![key(1).hash().to_string()];
        status.key_hash = Some(key(2).hash().to_string());
    });
    assert_eq!(reason(&decide(&hello(None, ends), observed(Some(&taken)))), Some(Refusal::Isolated));
    // Nobody isolated it: a pool alone takes it for dead.
    let lives = node(Some(3), None, |_| {});
    let decision = decide(&hello(None, ends), observed(Some(&lives)));
    assert!(matches!(decision, Decision::Admit { incarnation: Incarnation(4), minted: true, .. }), "{decision:?}");
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
fn a_host_whose_place_was_taken_hears_of_its_isolation() {
    let taken = |isolated| {
        node(Some(4), isolated, |node| {
            let status = node.status.as_mut().unwrap();
            status.former_key_hashes = vec![key(8).hash().to_string(), key(9).hash().to_string()];
        })
    };
    for (isolated, asked, shown, expected) in [
        (Some(3), Some(3), 9, Refusal::Isolated),
        (Some(3), Some(2), 8, Refusal::Isolated),
        // What it runs was never declared dead.
        (Some(3), Some(4), 9, Refusal::WrongKey),
        (None, Some(3), 9, Refusal::WrongKey),
        (Some(3), None, 9, Refusal::WrongKey),
        (Some(3), Some(3), 7, Refusal::WrongKey),
    ] {
        let mut hello = hello(asked, |_| {});
        hello.key = key(shown);
        assert_eq!(reason(&decide(&hello, observed(Some(&taken(isolated))))), Some(expected), "{isolated:?} {asked:?}");
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
fn a_new_life_is_above_every_one_that_a_pool_says_is_dead() {
    let minted = |newest, mark: Option<u64>| {
        let node = node(newest, None, |_| ());
        match decide(&hello(None, |hello| hello.highest_mark = mark), observed(Some(&node))) {
            Decision::Admit { incarnation, minted: true, .. } => incarnation.0,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(minted(None, None), 1);
    assert_eq!(minted(None, Some(7)), 8, "the control plane was built anew");
    assert_eq!(minted(Some(3), Some(7)), 8);
    assert_eq!(minted(Some(9), Some(7)), 10);
    assert_eq!(minted(Some(9), Some(u64::MAX)), 10, "no node comes so far: whoever wrote it was mistaken");
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
