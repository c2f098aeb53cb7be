//! Commands to nodes, by kibo and by patches: what they refuse, what they repeat, and what is final. The operator is
//! the real one; the hosts are played by hand.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use kibo_crds::Node;
use kibo_crds::node::NodePhase;
use kibo_e2e::suite::host::{Host, Session};
use kibo_e2e::suite::played::next;
use kibo_e2e::suite::program::Terminal;
use kibo_e2e::suite::typed::{result, said};
use kibo_e2e::suite::{Place, Suite};
use kibo_protocol::v1::{SessionRefusal, to_node};
use serde_json::{Value, json};

const SOON: u64 = 60;

fn main() -> ExitCode {
    Suite::with_operator()
        .test("a_command_given_again_is_done_once", replays)
        .test("an_old_version_is_refused_with_what_has_changed", stale)
        .test("every_command_goes_by_the_version_and_the_id_that_it_is_given", every_command)
        .test("a_retirement_asks_first_and_is_final", retirement)
        .test("an_isolation_needs_a_silent_node_and_is_done_once", isolation)
        .test("a_patch_is_refused_with_what_to_do", patches)
        .test("an_enrollment_is_listed_and_revoked", enrollments)
        .test("nodes_come_sorted_and_in_pages", pages)
        .run()
}

async fn node(place: &Place, id: &str) -> Result<Node> {
    Ok(place.all::<Node>().get(id).await?)
}

async fn becomes(place: &Place, id: &str, what: &str, reached: impl Fn(&Node) -> bool) -> Result<Node> {
    place.watched(place.all::<Node>(), id, what, SOON, reached).await
}

fn phase(node: &Node) -> Option<NodePhase> {
    node.status.as_ref()?.phase
}

fn has_session(node: &Node) -> bool {
    node.status.as_ref().and_then(|status| status.session.as_ref()).is_some_and(|session| session.alive)
}

fn is_drain_requested(node: &Node) -> bool {
    node.spec.drain.as_ref().is_some_and(|drain| drain.requested)
}

/// Gives a command with the version that the node has at that moment; who was overtaken by the operator looks again,
/// as a person would.
async fn at_its_version(place: &Place, id: &str, args: &[&str]) -> Result<Value> {
    for _ in 0..10 {
        let version = result(place, &["node", "get", id]).await?["registration_version"].clone();
        let version = version.as_str().context("a version")?;
        let ran = place.kibo(&[args, &["--expected-version", version, "--json"]].concat()).await?;
        match ran.code {
            14 if ran.stderr.contains("registration_version is") => {}
            _ => return Ok(serde_json::from_str::<Value>(&ran.ok()?)?["result"].take()),
        }
    }
    bail!("{id} is never as it was a moment ago")
}

/// A played node that runs nothing, with its session.
async fn plays(place: &Place, id: &str) -> Result<(Host, Session)> {
    let host = Host::enroll(place, id).await?;
    let session = host.session(None).await?;
    session.confirm(&session.settings()).await?;
    Ok((host, session))
}

/// Drains a played node to its end.
async fn drain(place: &Place, id: &str, session: &mut Session) -> Result<()> {
    result(place, &["node", "drain", id]).await?;
    let settings = next(session, |message| match message {
        to_node::Message::Settings(settings) if settings.drain => Some(settings),
        _ => None,
    });
    let settings = settings.await?;
    session.report(&settings, &[]).await?;
    becomes(place, id, "it is drained", |node| phase(node) == Some(NodePhase::Drained)).await.map(drop)
}

async fn replays(place: Arc<Place>) -> Result<()> {
    let id = "replays";
    let (_host, _session) = plays(&place, id).await?;
    // Each with the same id and another input.
    let commands: [(&str, Vec<&str>, Vec<&str>); 5] = [
        ("l/1", vec!["node", "label", id, "zone=a"], vec!["node", "label", id, "zone=b"]),
        ("s/1", vec!["node", "slots", "set", id, "3"], vec!["node", "slots", "set", id, "default"]),
        ("d/1", vec!["node", "drain", id], vec!["node", "cancel-drain", id]),
        ("c/1", vec!["node", "cancel-drain", id], vec!["node", "drain", id]),
        ("l/2", vec!["node", "label", id, "zone-"], vec!["node", "slots", "set", id, "9"]),
    ];
    let mut results = Vec::new();
    for (command_id, args, other) in &commands {
        let named = |args: &[&str]| {
            [args, &["--command-id", command_id]].concat().iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let (args, other) = (named(args), named(other));
        let (args, other): (Vec<_>, Vec<_>) =
            (args.iter().map(String::as_str).collect(), other.iter().map(String::as_str).collect());
        let first = result(&place, &args).await?;
        ensure!(first["result"] == "SUCCEEDED" && first["command_id"] == *command_id, "{first}");
        let before = node(&place, id).await?;
        ensure!(result(&place, &args).await? == first, "{args:?} again");
        said(&place, &other, 14, "choose a new --command-id").await?;
        // The id goes before the version.
        let with_version = [&args[..], &["--expected-version", "1"]].concat();
        ensure!(result(&place, &with_version).await? == first, "{args:?} with its old version");
        let after = node(&place, id).await?;
        ensure!(before.metadata.generation == after.metadata.generation, "a replay writes nothing");
        results.push((args.iter().map(ToString::to_string).collect::<Vec<_>>(), first));
    }
    // Also those whose place in the spec others have taken.
    for (args, first) in &results {
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        ensure!(result(&place, &args).await? == *first, "{args:?} at the end");
    }
    let end = node(&place, id).await?;
    ensure!(!is_drain_requested(&end) && end.spec.slots == Some(3), "{:?}", end.spec);
    ensure!(!end.metadata.labels.is_some_and(|labels| labels.contains_key("zone")), "the label went");
    let kept: Vec<_> = end.status.unwrap_or_default().commands.iter().map(|it| it.id.to_string()).collect();
    ensure!(kept == ["l/1", "s/1", "d/1", "c/1", "l/2"], "{kept:?}");
    Ok(())
}

async fn stale(place: Arc<Place>) -> Result<()> {
    let id = "stale";
    let (host, session) = plays(&place, id).await?;
    let version = async || {
        let shown = result(&place, &["node", "get", id]).await?;
        Ok::<_, anyhow::Error>(shown["registration_version"].as_str().context("a version")?.to_owned())
    };
    let old = version().await?;
    said(&place, &["node", "label", id, "zone=a"], 0, "labelled").await?;
    let refused = said(&place, &["node", "drain", id, "--expected-version", &old], 14, "its labels").await?;
    let now = version().await?;
    ensure!(refused.contains(&format!("registration_version is {now} now")), "{now}: {refused}");
    ensure!(!is_drain_requested(&node(&place, id).await?), "nothing was done");

    let old = version().await?;
    drop(session);
    becomes(&place, id, "its session is over", |node| !has_session(node)).await?;
    said(&place, &["node", "slots", "set", id, "3", "--expected-version", &old], 14, "its session ended").await?;
    // A version that the API server does not have any more, or never had.
    said(&place, &["node", "drain", id, "--expected-version", "x"], 14, "not known any more").await?;
    let done = at_its_version(&place, id, &["node", "drain", id]).await?;
    ensure!(done["operation"] == "drain", "{done}");
    // What is asked of a node while it is away is the first that it hears when it is back.
    said(&place, &["node", "slots", "set", id, "3"], 0, "slots set to 3").await?;
    let settings = host.session(Some(1)).await?.settings();
    ensure!(settings.drain && settings.slots == Some(3), "{settings:?}");
    Ok(())
}

async fn every_command(place: Arc<Place>) -> Result<()> {
    let id = "every";
    let (_host, _session) = plays(&place, id).await?;
    let ratios = ["node", "overcommit", "set", id, "--cpu", "2", "--memory", "1.5"];
    let commands: [&[&'static str]; 10] = [
        &["node", "drain", id],
        &["node", "cancel-drain", id],
        &["node", "isolate", id, "--confirm-host-cannot-write"],
        &["node", "retire", id, "--yes"],
        &["node", "slots", "set", id, "3"],
        &["node", "label", id, "zone=a"],
        &["node", "adopt", id],
        &ratios,
        &["enrollment", "issue", id],
        &["enrollment", "revoke", id],
    ];
    let before = node(&place, id).await?;
    for command in commands {
        let args = [command, &["--expected-version", "1", "--command-id", "new"]].concat();
        said(&place, &args, 14, "registration_version is").await?;
    }
    let after = node(&place, id).await?;
    ensure!(after.metadata.generation == before.metadata.generation, "something was done: {:?}", after.spec);

    // Ratios and an adoption need what the others do without: a version, and a quarantine.
    let done = at_its_version(&place, id, &[&ratios[..], &["--command-id", "taken"]].concat()).await?;
    let with_id = |args: &[&'static str]| [args, &["--command-id", "taken", "--expected-version", "1"]].concat();
    ensure!(result(&place, &with_id(&ratios)).await? == done, "given again it is what it was");
    let other = ["node", "overcommit", "set", id, "--cpu", "3", "--memory", "1.5"];
    said(&place, &with_id(&other), 14, "with another input").await?;
    for command in commands.into_iter().filter(|command| *command != ratios) {
        said(&place, &with_id(command), 14, "for another command before (set-overcommit)").await?;
    }
    let end = node(&place, id).await?;
    ensure!(end.spec.enrollment == before.spec.enrollment && end.spec.retirement.is_none(), "{:?}", end.spec);
    Ok(())
}

async fn retirement(place: Arc<Place>) -> Result<()> {
    let id = "retiring";
    let (host, mut session) = plays(&place, id).await?;
    let retire = ["node", "retire", id];
    let yes = ["node", "retire", id, "--yes"];
    said(&place, &retire, 10, "kibo node retire retiring --yes").await?;
    said(&place, &yes, 13, "kibo node drain retiring --wait").await?;
    said(&place, &[&yes[..], &["--command-id", "r/1"]].concat(), 2, "--expected-version").await?;
    drain(&place, id, &mut session).await?;

    let mut at = Terminal::start(&place.kibo_command(&retire), 100, 40)?;
    at.says("Type yes").await?;
    at.types("no\r")?;
    ensure!(at.ended().await? == 13, "{}", at.text());
    ensure!(node(&place, id).await?.spec.retirement.is_none());
    let command = [&yes[..], &["--command-id", "r/1"]].concat();
    let done = at_its_version(&place, id, &command).await?;
    ensure!(done["result"] == "SUCCEEDED", "{done}");
    let again = result(&place, &[&command[..], &["--expected-version", "1"]].concat()).await?;
    ensure!(again == done, "{again}");
    let told = next(&mut session, |message| match message {
        to_node::Message::Refused(refused) => Some(refused.reason()),
        _ => None,
    });
    ensure!(told.await? == SessionRefusal::Retired);

    ensure!(phase(&node(&place, id).await?) == Some(NodePhase::Retired));
    for (args, says) in [
        (&["node", "drain", id][..], "final"),
        (&["node", "cancel-drain", id], "final"),
        (&["node", "isolate", id, "--confirm-host-cannot-write"], "final"),
        (&["node", "label", id, "a=b"], "final"),
        (&["node", "slots", "set", id, "1"], "final"),
        (&["enrollment", "issue", id], "use a new node id"),
        (&["enrollment", "revoke", id], "final"),
        (&yes, "final"),
    ] {
        said(&place, args, 13, says).await?;
    }
    let refused = host.open(Some(1)).await?.err().context("it was let in")?;
    ensure!(refused.reason() == SessionRefusal::Retired, "{refused:?}");
    let deleted = place.kubectl(&["delete", "nodes.kibotos.dev", id]).await?;
    ensure!(deleted.code != 0 && deleted.stderr.contains("kept for ever"), "{deleted:?}");

    // The host may be switched off once it is drained, and is retired as before.
    let (_host, mut session) = plays(&place, "emptied").await?;
    drain(&place, "emptied", &mut session).await?;
    drop(session);
    becomes(&place, "emptied", "its session is over", |node| !has_session(node)).await?;
    said(&place, &["node", "retire", "emptied", "--yes"], 0, "RETIRED").await.map(drop)
}

async fn isolation(place: Arc<Place>) -> Result<()> {
    let id = "silent";
    let (host, session) = plays(&place, id).await?;
    let isolate = ["node", "isolate", id, "--confirm-host-cannot-write"];
    said(&place, &["node", "isolate", id], 2, "--confirm-host-cannot-write").await?;
    said(&place, &isolate, 13, "live control session").await?;
    drop(session);
    becomes(&place, id, "its session is over", |node| !has_session(node)).await?;
    let named = [&isolate[..], &["--command-id", "i/1"]].concat();
    let done = result(&place, &named).await?;
    let none = json!({ "released_volumes": 0, "released_layers": 0, "failed_workspaces": 0 });
    for (name, count) in none.as_object().context("counts")? {
        ensure!(done[name] == *count, "{name}: {done}");
    }
    ensure!(result(&place, &named).await? == done, "given again");
    said(&place, &[&named[..], &["--force-despite-evidence"]].concat(), 14, "with another input").await?;
    ensure!(result(&place, &["node", "get", id]).await?["isolated"] == true);

    // With the next life of the node it is over, and its result is still told.
    let session = host.session(None).await?;
    ensure!(session.ack.incarnation == 2);
    ensure!(result(&place, &named).await? == done, "after the node's return");
    ensure!(result(&place, &["node", "get", id]).await?["isolated"] == false);
    drop(session);
    becomes(&place, id, "its session is over", |node| !has_session(node)).await?;
    said(&place, &isolate, 0, "0 Volumes and 0 retained layers released, 0 Workspaces failed").await?;
    said(&place, &["node", "retire", id, "--yes"], 0, "RETIRED").await?;

    said(&place, &["enrollment", "issue", "never-lived"], 0, "kibo-enroll").await?;
    let isolate = ["node", "isolate", "never-lived", "--confirm-host-cannot-write"];
    let refused = said(&place, &isolate, 13, "never had a session").await?;
    ensure!(refused.contains("kibo enrollment revoke never-lived"), "{refused}");
    // Each says what leads on.
    let retire = ["node", "retire", "never-lived", "--yes"];
    said(&place, &retire, 13, "kibo enrollment revoke never-lived").await?;
    said(&place, &["enrollment", "revoke", "never-lived"], 0, "no token works any more").await?;
    said(&place, &isolate, 13, "kibo node retire never-lived").await?;
    said(&place, &retire, 0, "RETIRED").await.map(drop)
}

async fn patches(place: Arc<Place>) -> Result<()> {
    let id = "patched";
    let (_host, session) = plays(&place, id).await?;
    let patch = |spec: Value| {
        let place = place.clone();
        async move {
            let text = json!({ "spec": spec }).to_string();
            place.kubectl(&["patch", "nodes.kibotos.dev", id, "--type=merge", "-p", &text]).await
        }
    };
    let refused = |spec: Value, says: &'static str| {
        let patched = patch(spec.clone());
        async move {
            let ran = patched.await?;
            ensure!(ran.code != 0 && ran.stderr.contains(says), "{spec}: expected {says:?}: {ran:?}");
            Ok(())
        }
    };
    let isolation =
        |incarnation: u64| json!({ "isolation": { "incarnation": incarnation, "confirmHostCannotWrite": true } });
    refused(isolation(1), "power the host off").await?;
    refused(json!({ "retirement": {} }), "drain it and empty it").await?;
    patch(json!({ "drain": { "requested": true, "requestId": "by-hand" } })).await?.ok()?;
    becomes(&place, id, "the command is on record", |node| {
        node.status.iter().flat_map(|status| &status.commands).any(|record| record.id.as_str() == "by-hand")
    })
    .await?;
    refused(json!({ "drain": { "requested": false } }), "choose a new requestId").await?;
    refused(json!({ "revocation": { "requestId": "by-hand" } }), "choose a new requestId").await?;
    // Whoever gives the same command finds it done.
    let done = result(&place, &["node", "drain", id, "--command-id", "by-hand"]).await?;
    ensure!(done["result"] == "SUCCEEDED", "{done}");
    said(&place, &["node", "cancel-drain", id, "--command-id", "by-hand"], 14, "for another command").await?;

    drop(session);
    becomes(&place, id, "its session is over", |node| !has_session(node)).await?;
    refused(isolation(7), "read the node again").await?;
    refused(json!({ "isolation": { "incarnation": 1 } }), "isolate only a host that is off").await?;
    let stale = json!({ "metadata": { "resourceVersion": "1" }, "spec": { "slots": 3 } }).to_string();
    let ran = place.kubectl(&["patch", "nodes.kibotos.dev", id, "--type=merge", "-p", &stale]).await?;
    ensure!(ran.code != 0 && ran.stderr.contains("has been modified"), "{ran:?}");
    let ran = place.kubectl(&["delete", "nodes.kibotos.dev", id]).await?;
    ensure!(ran.code != 0 && ran.stderr.contains("retire it instead"), "{ran:?}");
    Ok(())
}

async fn enrollments(place: Arc<Place>) -> Result<()> {
    let id = "enrolling";
    let listed = async || {
        let all = result(&place, &["enrollment", "list"]).await?;
        let all = all["enrollments"].as_array().cloned().unwrap_or_default();
        let found = all.into_iter().find(|it| it["node_id"] == id).context("it is listed")?;
        Ok::<_, anyhow::Error>((found["admission"].clone(), found["token"]["state"].clone()))
    };
    let issue = ["enrollment", "issue", id, "--command-id", "e/1"];
    said(&place, &issue, 0, "kibo-enroll").await?;
    let grant = node(&place, id).await?.spec.enrollment;
    said(&place, &issue, 13, "was printed when the command was given").await?;
    ensure!(node(&place, id).await?.spec.enrollment == grant, "the token still works");
    becomes(&place, id, "the operator has seen it", |node| phase(node).is_some()).await?;
    ensure!(listed().await? == (json!("PENDING"), json!("PENDING")), "{:?}", listed().await?);
    let revoke = ["enrollment", "revoke", id, "--command-id", "x/1"];
    let done = result(&place, &revoke).await?;
    ensure!(result(&place, &revoke).await? == done);
    ensure!(listed().await?.1.is_null(), "{:?}", listed().await?);
    // Nobody has ever been this node, so that it may go.
    place.kubectl(&["delete", "nodes.kibotos.dev", id]).await?.ok()?;

    let (host, mut session) = plays(&place, id).await?;
    ensure!(listed().await? == (json!("ADMITTED"), json!("USED")), "{:?}", listed().await?);
    said(&place, &["enrollment", "revoke", id], 0, "REVOKED").await?;
    let told = next(&mut session, |message| match message {
        to_node::Message::Refused(refused) => Some(refused.reason()),
        _ => None,
    });
    ensure!(told.await? == SessionRefusal::Revoked);
    let refused = host.open(Some(1)).await?.err().context("it was let in")?;
    ensure!(refused.reason() == SessionRefusal::Revoked, "{refused:?}");
    ensure!(listed().await? == (json!("REVOKED"), Value::Null), "{:?}", listed().await?);
    said(&place, &["enrollment", "issue", id], 0, "kibo-enroll").await?;
    ensure!(listed().await? == (json!("REVOKED"), json!("PENDING")), "{:?}", listed().await?);
    Ok(())
}

async fn pages(place: Arc<Place>) -> Result<()> {
    for id in ["page-a", "page-b", "page-c"] {
        place.kibo(&["enrollment", "issue", id]).await?.ok()?;
    }
    let mut token = String::new();
    let mut ids = Vec::new();
    loop {
        let mut args = vec!["node", "list", "--page-size", "1"];
        if !token.is_empty() {
            args.extend(["--page-token", &token]);
        }
        let page = result(&place, &args).await?;
        let nodes = page["nodes"].as_array().context("nodes")?;
        ensure!(nodes.len() == 1, "{page}");
        ids.push(nodes[0]["node_id"].as_str().context("an id")?.to_owned());
        match page["next_page_token"].as_str() {
            Some(next) => next.clone_into(&mut token),
            None => break,
        }
    }
    let at = |id: &str| ids.iter().position(|it| it == id).with_context(|| format!("no {id} in {ids:?}"));
    ensure!(ids.is_sorted() && at("page-a")? + 1 == at("page-b")? && at("page-b")? + 1 == at("page-c")?, "{ids:?}");
    Ok(())
}
