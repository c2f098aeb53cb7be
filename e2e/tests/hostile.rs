//! Hosts that lie and strangers that knock: refused, said to the log without secrets, and nobody else is disturbed. The
//! operator is the real one; beside each of these a node of good will goes on with its Workspace.

use std::net::TcpStream;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kibo_crds::{Node, Workspace};
use kibo_e2e::local::Component;
use kibo_e2e::suite::failpoints::Failpoints;
use kibo_e2e::suite::host::{Host, Session};
use kibo_e2e::suite::played::{accept, acked, go, host, next, objects, offer, ready, refuse, run, say};
use kibo_e2e::suite::wire::{self, Raw};
use kibo_e2e::suite::{Place, Suite, condition, eventually, secrets};
use kibo_failpoint::Action;
use kibo_protocol::NodeKey;
use kibo_protocol::v1::{self, EndReason, ObjectUse, SessionRefusal, from_node, instance_event, to_node};
use kube::ResourceExt as _;
use serde_json::json;

const SOON: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    Suite::with_operator()
        .test("a_stranger_that_speaks_no_protocol_is_closed", a_stranger_that_speaks_no_protocol_is_closed)
        .test("a_hello_that_comes_too_late_opens_nothing", a_hello_that_comes_too_late_opens_nothing)
        .test("a_hello_full_of_nonsense_is_refused_in_few_words", a_hello_full_of_nonsense_is_refused_in_few_words)
        .test("no_key_opens_the_session_of_another_node", no_key_opens_the_session_of_another_node)
        .test("an_instance_of_another_node_is_claimed_in_vain", an_instance_of_another_node_is_claimed_in_vain)
        .test("what_a_node_says_of_others_changes_nothing", what_a_node_says_of_others_changes_nothing)
        .test("the_answer_to_an_offer_is_its_nodes_alone", the_answer_to_an_offer_is_its_nodes_alone)
        .alone(
            "a_stranger_takes_no_turn_of_the_node_whose_name_it_shows",
            a_stranger_takes_no_turn_of_the_node_whose_name_it_shows,
        )
        .test("a_node_that_never_stops_talking_is_read_slowly", a_node_that_never_stops_talking_is_read_slowly)
        .run()
}

/// A node of good will that runs a Workspace, and what must stay as it is.
struct Victim<'a> {
    place: &'a Place,
    id: String,
    session: Session,
    launch: v1::Launch,
    before: Workspace,
}

impl<'a> Victim<'a> {
    async fn begin(place: &'a Place, id: &str) -> Result<Self> {
        let victim = host(place, id).await?;
        let mut session = ready(place, &victim, None).await?;
        place.create_workspace("victim", json!({})).await?;
        let launch = run(place, &mut session, "victim").await?;
        let before = place.api::<Workspace>().get("victim").await?;
        Ok(Self { place, id: id.to_owned(), session, launch, before })
    }

    fn uid(&self) -> String {
        self.launch.workspace.clone().unwrap_or_default().uid
    }

    /// Nothing was written to its Workspace, its session lives and is answered, and the operator is the same process.
    async fn is_undisturbed(&mut self) -> Result<()> {
        let now = self.place.api::<Workspace>().get("victim").await?;
        ensure!(now.resource_version() == self.before.resource_version(), "its Workspace was written: {now:#?}");
        let node = self.place.all::<Node>().get(&self.id).await?.status.unwrap_or_default();
        let alive = node.session.is_some_and(|session| session.alive && session.id == self.session.ack.session_id);
        ensure!(alive, "its session is over");
        // An event that was told before: it is acknowledged, and nothing more comes of it.
        say(&self.session, &self.launch, 1, kibo_e2e::suite::played::taken(&self.launch)).await?;
        acked(&mut self.session, &self.launch, 1).await?;
        let log = operator_log(self.place)?;
        ensure!(!log.contains("panicked"), "the operator panicked");
        Ok(())
    }
}

fn operator_log(place: &Place) -> Result<String> {
    Ok(std::fs::read_to_string(place.cluster().log(&Component::Operator))?)
}

async fn logged(place: &Place, words: &str) -> Result<()> {
    let what = format!("the operator's log says {words:?}");
    eventually(&what, SOON, async || Ok(operator_log(place)?.contains(words).then_some(()))).await
}

async fn refusal(host: &Host, hello: v1::Hello) -> Result<v1::SessionRefused> {
    let outcome = host.say(from_node::Message::Hello(hello)).await?;
    outcome.err().context("the session was accepted")
}

async fn a_stranger_that_speaks_no_protocol_is_closed(place: Arc<Place>) -> Result<()> {
    let mut victim = Victim::begin(&place, "victim-1").await?;
    let port = place.cluster().ports().session;
    let noise: Vec<u8> = (0..100_000_u32).map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();

    // Before TLS, and inside of it.
    let plain = noise.clone();
    let closed =
        tokio::task::spawn_blocking(move || anyhow::Ok(is_closed(TcpStream::connect(("127.0.0.1", port))?, &plain)));
    ensure!(closed.await??, "noise instead of TLS");
    let (ca, inside) = (wire::operator_ca(&place).await?, noise.clone());
    let closed = tokio::task::spawn_blocking(move || anyhow::Ok(is_closed(wire::tls(&ca, port)?, &inside)));
    ensure!(closed.await??, "noise instead of HTTP/2");

    // A message that is none, one that is cut off, and one beyond every bound.
    for (what, body) in [("noise", noise), ("a length beyond the end", vec![0x0a, 0xff, 0xff, 0x03, b'x'])] {
        let said = wire::answer_to_raw(&place, body).await?;
        ensure!(said.contains("the first message cannot be read"), "{what}: {said:?}");
    }
    // It is announced as larger than a Hello may be: nothing of it is kept.
    let large = wire::answer_to_raw(&place, vec![0; 600 << 10]).await?;
    ensure!(large.contains("614400 bytes, and at most 524288"), "{large:?}");
    let huge = wire::answer_to_raw(&place, vec![0; 17 << 20]).await?;
    ensure!(huge.contains("the first message cannot be read") || huge.is_empty(), "{huge:?}");
    logged(&place, "the first message cannot be read").await?;
    let streams = wire::attach_with_raw(&place, Raw(vec![0xff; 1000])).await?;
    ensure!(streams.is_err(), "a stream that nobody asked for was opened");
    victim.is_undisturbed().await
}

/// Sends noise and reads until the other side closes; false when it is still open after some time.
fn is_closed(mut connection: impl std::io::Read + std::io::Write, noise: &[u8]) -> bool {
    // It may be closed before all is written.
    let _ = connection.write_all(noise).and_then(|()| connection.flush());
    let deadline = Instant::now() + SOON;
    let mut buffer = [0; 4096];
    while Instant::now() < deadline {
        match connection.read(&mut buffer) {
            Ok(1..) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Ok(0) | Err(_) => return true,
        }
    }
    false
}

async fn a_hello_that_comes_too_late_opens_nothing(place: Arc<Place>) -> Result<()> {
    let host = Host::enroll(&place, "late-hello").await?;
    let mut session = host.begin().await?;
    let told = session.receive().await?.context("it was closed without a word")?;
    let to_node::Message::Refused(refused) = told else { anyhow::bail!("{told:?}") };
    ensure!(refused.reason() == SessionRefusal::InvalidHello && refused.message.contains("within 5 s"), "{refused:?}");
    // Whether it can still be sent or not: no answer comes.
    let _ = session.send(from_node::Message::Hello(host.hello(None))).await;
    ensure!(session.receive().await?.is_none(), "a late hello was answered");
    let node = place.all::<Node>().get("late-hello").await?.status.unwrap_or_default();
    ensure!(node.session.is_none() && node.incarnation.is_none(), "{node:?}");
    logged(&place, "must be a hello, within 5 s").await
}

async fn a_hello_full_of_nonsense_is_refused_in_few_words(place: Arc<Place>) -> Result<()> {
    let mut victim = Victim::begin(&place, "victim-2").await?;
    let liar = Host::enroll(&place, "liar-2").await?;
    let good = || liar.hello(None);
    let pool = |id: &str| v1::Pool { id: id.to_owned(), ..v1::Pool::default() };
    let instance = |id: &str, uid: &str| v1::Instance {
        instance_id: id.to_owned(),
        workspace_uid: uid.to_owned(),
        ..v1::Instance::default()
    };
    let long = "x".repeat(1 << 20);
    let nonsense = [
        v1::Hello { node_id: long.clone(), ..good() },
        v1::Hello { node_id: "Not A Node".to_owned(), ..good() },
        v1::Hello { node_key: vec![7; 31], ..good() },
        v1::Hello { boot_id: String::new(), ..good() },
        v1::Hello { boot_id: long.clone(), ..good() },
        v1::Hello { version: "1.0\nERROR forged".to_owned(), ..good() },
        v1::Hello { home: long.clone(), ..good() },
        v1::Hello { cluster_id: long.clone(), ..good() },
        v1::Hello { pools: vec![pool(&long)], ..good() },
        v1::Hello { pools: vec![pool("twice"), pool("twice")], ..good() },
        v1::Hello { pools: (0..33).map(|n| pool(&format!("pool-{n}"))).collect(), ..good() },
        v1::Hello { instances: vec![instance(&long, "u")], ..good() },
        v1::Hello { instances: vec![instance("inst-00000000000000000000000000", &long)], ..good() },
        v1::Hello { labels: (0..65).map(|n| (n.to_string(), String::new())).collect(), ..good() },
        v1::Hello { labels: [(long.clone(), long.clone())].into(), ..good() },
        v1::Hello { latest: Some(v1::Moment { leadership: long.clone(), ..v1::Moment::default() }), ..good() },
    ];
    for (number, hello) in nonsense.into_iter().enumerate() {
        let refused = refusal(&liar, hello).await?;
        ensure!(refused.reason() == SessionRefusal::InvalidHello, "{number}: {refused:?}");
        ensure!(
            refused.message.len() < 1024 && !refused.message.contains('\n'),
            "{number}: {:?}",
            refused.message.len()
        );
    }
    let log = operator_log(&place)?;
    ensure!(log.lines().all(|line| line.len() < 8 << 10 && !line.starts_with("ERROR forged")), "a line was forged");

    // What is possible in itself may be as wild as it likes.
    let capacity =
        v1::Capacity { cpu_milli: Some(u64::MAX), memory_bytes: Some(u64::MAX), max_instances: Some(u32::MAX) };
    let wild = v1::Hello { capacity: Some(capacity), highest_revision: 0, ..good() };
    let session = host_session(&liar, wild).await?;
    session.confirm(&session.settings()).await?;
    let report = v1::Report {
        allocated_cpu_milli: u64::MAX,
        allocated_memory_bytes: u64::MAX,
        instances: u32::MAX,
        settings_revision: u64::MAX,
        ..v1::Report::default()
    };
    session.send(from_node::Message::Report(report)).await?;
    victim.is_undisturbed().await
}

async fn host_session(host: &Host, hello: v1::Hello) -> Result<Session> {
    let outcome = host.say(from_node::Message::Hello(hello)).await?;
    outcome.map_err(|refused| anyhow::anyhow!("refused: {}", refused.message))
}

async fn no_key_opens_the_session_of_another_node(place: Arc<Place>) -> Result<()> {
    let mut victim = Victim::begin(&place, "victim-3").await?;
    let liar = Host::enroll(&place, "liar-3").await?;
    let as_victim = Host { id: "victim-3".to_owned(), ..liar.clone() };
    for incarnation in [None, Some(1), Some(2)] {
        let refused = refusal(&as_victim, as_victim.hello(incarnation)).await?;
        ensure!(refused.reason() == SessionRefusal::WrongKey, "{refused:?}");
    }
    // Nor do many strangers at once keep anybody out.
    let stranger = Host { key: secrets::generate()?, ..as_victim.clone() };
    let knock = (0..100).map(|_| async { refusal(&stranger, stranger.hello(Some(1))).await });
    let (knocked, opened) = tokio::join!(futures::future::join_all(knock), liar.session(None));
    opened?;
    for refused in knocked {
        ensure!(refused?.reason() == SessionRefusal::WrongKey);
    }
    let node = place.all::<Node>().get("victim-3").await?.status.unwrap_or_default();
    let says_so = |kind: &str| node.conditions.iter().any(|it| it.type_ == kind && it.status == "True");
    ensure!(says_so("Ready") && !says_so("DuplicateHost"), "who has no key writes nothing: {:#?}", node.conditions);
    logged(&place, "WRONG_KEY").await?;
    victim.is_undisturbed().await
}

/// A stranger that shows a node's name is looked up apart from all others, and the node does not wait for that.
async fn a_stranger_takes_no_turn_of_the_node_whose_name_it_shows(place: Arc<Place>) -> Result<()> {
    let points = Failpoints::of(place.cluster(), &Component::Operator)?;
    let host = Host::enroll(&place, "named").await?;
    drop(host.session(None).await?);
    points.arm(&["key-looked-up"], Action::Wait)?;
    let stranger = Host { key: NodeKey::from_bytes(&[7; 32])?, ..host.clone() };
    let knocking = tokio::spawn(async move { stranger.open(Some(1)).await });
    points.all_reached(&["key-looked-up"], SOON).await?;
    let session = host.session(Some(1)).await;
    points.clear()?;
    session.context("the node waits for the stranger")?;
    let refused = knocking.await??.err().context("the stranger was let in")?;
    ensure!(refused.reason() == SessionRefusal::WrongKey, "{refused:?}");
    Ok(())
}

async fn an_instance_of_another_node_is_claimed_in_vain(place: Arc<Place>) -> Result<()> {
    let mut victim = Victim::begin(&place, "victim-4").await?;
    let liar = Host::enroll(&place, "liar-4").await?;
    drop(liar.session(None).await?);
    let claimed = v1::Instance {
        instance_id: victim.launch.instance_id.clone(),
        workspace_uid: victim.uid(),
        state: v1::InstanceState::Running.into(),
        last_seq: 7,
    };
    let open = async || {
        let hello = v1::Hello { instances: vec![claimed.clone()], ..liar.hello(Some(1)) };
        Ok(liar.say(from_node::Message::Hello(hello)).await?.ok())
    };
    let mut session = eventually("the liar's session opens", SOON, open).await?;
    ensure!(session.ack.desired.is_empty(), "it was given what is another's");
    let torn_down = next(&mut session, |message| match message {
        to_node::Message::TearDown(torn) => Some(torn),
        _ => None,
    });
    let torn_down = torn_down.await?;
    ensure!(torn_down.instance_id == victim.launch.instance_id, "{torn_down:?}");
    ensure!(torn_down.reason == "no Workspace holds this Instance as its execution on this node", "{torn_down:?}");
    victim.is_undisturbed().await
}

async fn what_a_node_says_of_others_changes_nothing(place: Arc<Place>) -> Result<()> {
    let mut victim = Victim::begin(&place, "victim-5").await?;
    let liar = host(&place, "liar-5").await?;
    let mut session = ready(&place, &liar, None).await?;
    let launch = victim.launch.clone();
    let objects = |used| objects(&launch, used);
    let lies = [
        instance_event::Kind::ObjectsTaken(v1::ObjectsTaken { objects: objects(ObjectUse::Refused) }),
        instance_event::Kind::Available(v1::Available {
            guest_boot_id: "x".to_owned(),
            address: "10.0.0.1".to_owned(),
        }),
        instance_event::Kind::Blocked(v1::Blocked { message: "forged".to_owned() }),
        instance_event::Kind::GuestUnresponsive(v1::GuestUnresponsive {}),
        instance_event::Kind::Ended(v1::Ended {
            reason: EndReason::StorageFailed.into(),
            message: "forged".to_owned(),
            objects: objects(ObjectUse::Released),
        }),
    ];
    for (seq, lie) in (100..).zip(lies) {
        say(&session, &launch, seq, lie).await?;
        acked(&mut session, &launch, seq).await?;
    }
    // And answers to what it was never asked.
    let result = v1::ObjectResult { command_id: "x".to_owned(), uid: victim.uid(), ok: true, ..Default::default() };
    session.send(from_node::Message::ObjectResult(result)).await?;
    session.send(from_node::Message::StreamRefused(v1::StreamRefused::default())).await?;
    session.send(from_node::Message::Inventory(v1::Inventory::default())).await?;
    session.send(from_node::Message::FenceSeen(v1::FenceSeen::default())).await?;
    session.send(from_node::Message::ClockReading(v1::ClockReading::default())).await?;
    session.send(from_node::Message::Hello(Host { id: victim.id.clone(), ..liar.clone() }.hello(Some(1)))).await?;
    // All of it was taken in before this is.
    say(&session, &launch, 200, instance_event::Kind::GuestResponsive(v1::GuestResponsive {})).await?;
    acked(&mut session, &launch, 200).await?;
    let node = place.all::<Node>().get("liar-5").await?.status.unwrap_or_default();
    ensure!(node.session.is_some_and(|it| it.id == session.ack.session_id), "lies of this kind end no session");
    victim.is_undisturbed().await
}

async fn the_answer_to_an_offer_is_its_nodes_alone(place: Arc<Place>) -> Result<()> {
    let good = host(&place, "victim-6").await?;
    let mut session = ready(&place, &good, None).await?;
    place.create_workspace("box", json!({ "nodeSelector": { "test": place.selector().1 } })).await?;
    let offered = offer(&mut session).await?;
    let liar = Host::enroll(&place, "liar-6").await?;
    let lying = liar.session(None).await?;
    accept(&lying, &offered).await?;
    refuse(&lying, &offered, "I do not want it").await?;
    lying.confirm(&lying.settings()).await?;
    // The true answer counts: it is started where it was offered.
    accept(&session, &offered).await?;
    let launch = go(&mut session).await?;
    ensure!(launch.instance_id == offered.launch.unwrap_or_default().instance_id);
    let on_victim = |it: &Workspace| {
        let execution = it.status.as_ref().and_then(|status| status.execution.as_ref());
        execution.is_some_and(|execution| execution.node.as_str() == "victim-6")
    };
    let placed = place.workspace("box", "is placed", 20, on_victim).await?;
    ensure!(condition(&placed, "Placed").is_none_or(|it| !it.message.contains("I do not want it")));
    Ok(())
}

async fn a_node_that_never_stops_talking_is_read_slowly(place: Arc<Place>) -> Result<()> {
    let mut victim = Victim::begin(&place, "victim-7").await?;
    let liar = host(&place, "liar-7").await?;
    let session = ready(&place, &liar, None).await?;
    let settings = session.settings();
    let begun = Instant::now();
    // Each says something else, so that each would be worth a write.
    let talk = async {
        let mut available = true;
        for _ in 0..4000_u32 {
            available = !available;
            let pools: Vec<_> = liar.pools.iter().cloned().map(|pool| v1::Pool { available, ..pool }).collect();
            session.report(&settings, &pools).await?;
        }
        anyhow::Ok(())
    };
    let listen = async {
        for _ in 0..20 {
            victim.is_undisturbed().await?;
        }
        anyhow::Ok(())
    };
    tokio::try_join!(talk, listen)?;
    let writes = wire::status_writes(&place, "nodes", |name| name == "liar-7")?;
    // Those at once, one each second since, and those of the session itself.
    let most = 20 + begun.elapsed().as_secs() + 10;
    ensure!(u64::try_from(writes)? <= most, "{writes} writes of its status in {:?}", begun.elapsed());
    place.api::<Workspace>().delete("victim", &kube::api::DeleteParams::default()).await?;
    Ok(())
}
