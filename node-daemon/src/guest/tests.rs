//! Conversations with the agent's end of the protocol, over a real socket.

use std::os::unix::net::UnixListener as StdListener;

use bytes::Bytes;
use kibo_guest_protocol::{GuestConnection, GuestEvent as FromHost, MAX_STREAMS, PROTOCOL, flow::Width};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{UnixListener, UnixStream},
};

use super::*;
use crate::{
    instance::{ExecExit, ExecInput, ExecOutput},
    vmm::AGENT_SOCKET,
};

/// The other end: says what the test tells it to.
struct Agent {
    socket: UnixStream,
    connection: GuestConnection,
}

#[derive(Default)]
struct Log(Vec<u8>);

impl LogSink for Log {
    fn offset(&self) -> u64 {
        self.0.len() as u64
    }

    fn store(&mut self, data: &v1::LogData) {
        self.0.extend_from_slice(&data.data);
    }
}

struct Fixture {
    _directory: tempfile::TempDir,
    listener: UnixListener,
    guest: Guest,
    events: mpsc::Receiver<GuestEvent>,
}

fn fixture() -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let sockets = SocketDir::open(directory.path()).unwrap();
    let listener: StdListener = sockets.listen(AGENT_SOCKET).unwrap();
    listener.set_nonblocking(true).unwrap();
    let listener = UnixListener::from_std(listener).unwrap();
    let (guest, events, conversation) = Guest::converse(sockets, Log::default(), false);
    tokio::spawn(conversation);
    Fixture { _directory: directory, listener, guest, events }
}

impl Fixture {
    /// Accepts a connection and answers its hello.
    async fn connect(&mut self) -> Agent {
        self.connect_to(0).await
    }

    /// As [`Self::connect`], with an agent of some protocol.
    async fn connect_to(&mut self, protocol: u32) -> Agent {
        let (socket, _) = self.listener.accept().await.unwrap();
        let mut agent = Agent { socket, connection: GuestConnection::default() };
        let hello = agent.hear().await;
        assert!(matches!(hello, FromHost::Connected(_)), "{hello:?}");
        agent.connection.reply(v1::HelloReply { boot_id: "boot".to_owned(), protocol, ..v1::HelloReply::default() });
        agent.flush().await;
        let connected = self.events.recv().await.unwrap();
        assert!(matches!(connected, GuestEvent::Connected(_)), "{connected:?}");
        agent
    }
}

async fn exec(fixture: &Fixture, process: v1::Process, stdin: bool) -> Result<ExecStream, StreamError> {
    fixture.guest.open(Open::Exec(v1::Exec { process: Some(process), stdin, ..v1::Exec::default() })).await
}

impl Agent {
    /// The next message that is neither a ping nor a repeated hello.
    async fn hear(&mut self) -> FromHost {
        let mut buffer = vec![0; 64 * 1024];
        loop {
            match self.connection.next_event() {
                Some(FromHost::HelloAgain(_)) => {}
                Some(FromHost::Message(message)) if matches!(*message, v1::host_message::Kind::Ping(_)) => {}
                Some(event) => return event,
                None => {
                    let len = self.socket.read(&mut buffer).await.unwrap();
                    assert_ne!(len, 0, "the daemon hung up");
                    self.connection.receive(&buffer[..len]);
                }
            }
        }
    }

    async fn hear_message(&mut self) -> v1::host_message::Kind {
        match self.hear().await {
            FromHost::Message(message) => *message,
            other => panic!("expected a message, got {other:?}"),
        }
    }

    async fn say(&mut self, message: impl Into<v1::guest_message::Kind>) {
        self.connection.send(message).unwrap();
        self.flush().await;
    }

    async fn flush(&mut self) {
        let bytes = self.connection.outgoing().to_vec();
        self.socket.write_all(&bytes).await.unwrap();
        self.connection.written(bytes.len());
    }
}

#[tokio::test]
async fn a_lost_connection_is_made_anew_and_said_so() {
    let mut fixture = fixture();
    drop(fixture.connect().await);
    let mut agent = fixture.connect().await;
    fixture.guest.sync(7);
    assert!(matches!(agent.hear_message().await, v1::host_message::Kind::Sync(v1::Sync { id: 7 })));
}

#[tokio::test]
async fn a_configuration_has_the_time_and_entropy_of_its_sending() {
    let mut fixture = fixture();
    let mut agent = fixture.connect().await;
    fixture.guest.configure(v1::Configure { instance_id: "inst-x".to_owned(), ..v1::Configure::default() });
    let v1::host_message::Kind::Configure(configure) = agent.hear_message().await else { panic!("no configuration") };
    assert_eq!(configure.instance_id, "inst-x");
    assert_eq!(configure.entropy.len(), kibo_guest_protocol::ENTROPY_LEN);
    let now = crate::clock::unix_nanos();
    assert!(now.abs_diff(configure.time_unix_nanos) < 5_000_000_000);
}

#[tokio::test]
async fn an_exec_carries_input_output_and_its_end() {
    let mut fixture = fixture();
    let mut agent = fixture.connect().await;
    let process = v1::Process { argv: vec!["cat".to_owned()], ..v1::Process::default() };
    let mut exec = exec(&fixture, process, true).await.unwrap();
    let v1::host_message::Kind::Exec(asked) = agent.hear_message().await else { panic!("no exec") };
    let stream_id = asked.stream_id;

    exec.input.send(ExecInput::Data(Bytes::from_static(b"hello"))).await.unwrap();
    let v1::host_message::Kind::StdinData(input) = agent.hear_message().await else { panic!("no input") };
    assert_eq!(input.data, b"hello");
    drop(exec.input);
    assert!(matches!(agent.hear_message().await, v1::host_message::Kind::StdinClose(_)));

    let output = v1::Output::Stderr.into();
    agent.say(v1::OutputData { stream_id, output, data: b"hi".to_vec() }).await;
    let status = Some(kibo_guest_protocol::ProcessEnd::Code(3).into());
    agent.say(v1::ExecExited { stream_id, status }).await;
    assert_eq!(exec.output.recv().await, Some(ExecOutput::Stderr(Bytes::from_static(b"hi"))));
    assert_eq!(exec.output.recv().await, Some(ExecOutput::Exit(ExecExit::Code(3))));
    assert_eq!(exec.output.recv().await, None);
}

#[tokio::test]
async fn a_program_that_is_not_there_ends_as_in_a_shell() {
    let mut fixture = fixture();
    let mut agent = fixture.connect().await;
    let process = v1::Process { argv: vec!["nope".to_owned()], ..v1::Process::default() };
    let mut exec = exec(&fixture, process, false).await.unwrap();
    let v1::host_message::Kind::Exec(start) = agent.hear_message().await else { panic!("an exec") };
    let reason = v1::StartFailureReason::NotFound.into();
    let failure = v1::StartFailure { reason, message: "no such program".to_owned() };
    let status = Some(kibo_guest_protocol::ProcessEnd::NotStarted(failure).into());
    agent.say(v1::ExecExited { stream_id: start.stream_id, status }).await;
    assert_eq!(exec.output.recv().await, Some(ExecOutput::Stderr(Bytes::from_static(b"no such program\n"))));
    assert_eq!(exec.output.recv().await, Some(ExecOutput::Exit(ExecExit::Code(127))));
}

#[tokio::test]
async fn an_exec_ends_with_its_connection() {
    let mut fixture = fixture();
    let mut agent = fixture.connect().await;
    let process = v1::Process { argv: vec!["sleep".to_owned()], ..v1::Process::default() };
    let mut exec = exec(&fixture, process, false).await.unwrap();
    agent.hear_message().await;
    drop(agent);
    assert!(matches!(exec.output.recv().await, Some(ExecOutput::Failed(_))));
}

#[tokio::test]
async fn a_stream_that_ends_with_its_guest_says_why_the_guest_ends() {
    use kibo_protocol::v1::StreamFailure::Interrupted;
    let mut fixture = fixture();
    let mut agent = fixture.connect().await;
    let process = v1::Process { argv: vec!["sleep".to_owned()], ..v1::Process::default() };
    let (mut first, mut second) =
        (exec(&fixture, process.clone(), false).await.unwrap(), exec(&fixture, process, false).await.unwrap());
    let v1::host_message::Kind::Exec(start) = agent.hear_message().await else { panic!("an exec") };
    agent.hear_message().await;
    fixture.guest.ends("the workspace is being stopped");
    fixture.guest.ends("the workspace has ended");
    let status = Some(kibo_guest_protocol::ProcessEnd::Signal(15).into());
    agent.say(v1::ExecExited { stream_id: start.stream_id, status }).await;
    let told = StreamError { failure: Interrupted, message: "the workspace is being stopped".to_owned() };
    assert_eq!(first.output.recv().await, Some(ExecOutput::Failed(told.clone())));
    drop(agent);
    assert_eq!(second.output.recv().await, Some(ExecOutput::Failed(told)));
}

#[tokio::test]
async fn a_guest_of_an_older_daemon_is_not_asked_for_what_it_does_not_know() {
    let mut fixture = fixture();
    let _agent = fixture.connect().await;
    for what in [
        Open::Connect { port: 80 },
        Open::Exec(v1::Exec { login_shell: true, ..v1::Exec::default() }),
        Open::Archive(v1::archive::Direction::Read(v1::ReadArchive { path: "/".to_owned() })),
    ] {
        let refused = fixture.guest.open(what).await.unwrap_err();
        assert!(refused.message.contains("older node-daemon"), "{}", refused.message);
    }
}

#[tokio::test]
async fn a_process_that_nobody_wants_is_killed() {
    let mut fixture = fixture();
    let mut agent = fixture.connect().await;
    let process = v1::Process { argv: vec!["yes".to_owned()], ..v1::Process::default() };
    let exec = exec(&fixture, process, false).await.unwrap();
    agent.hear_message().await;
    drop(exec);
    let killed = agent.hear_message().await;
    assert!(matches!(killed, v1::host_message::Kind::Signal(v1::Signal { number: 9, .. })), "{killed:?}");
}

#[tokio::test]
async fn without_a_connection_an_exec_is_refused() {
    let fixture = fixture();
    let (_socket, _) = fixture.listener.accept().await.unwrap();
    let refused = exec(&fixture, v1::Process::default(), false).await.unwrap_err();
    assert_eq!(refused.failure, kibo_protocol::v1::StreamFailure::GuestUnavailable);
}

#[tokio::test]
async fn a_guest_that_makes_events_without_end_waits_for_its_instance() {
    let mut fixture = fixture();
    let mut agent = fixture.connect().await;
    let flood = async {
        loop {
            agent.say(v1::EntrypointState { restarts: 1, ..v1::EntrypointState::default() }).await;
        }
    };
    // Nobody takes the events; the sockets' buffers are full long before this is over.
    tokio::time::timeout(std::time::Duration::from_secs(2), flood).await.expect_err("the flood never ends");
    let taken = std::iter::from_fn(|| fixture.events.try_recv().ok()).count();
    assert_eq!(taken, EVENTS);
}

/// Until all is heard that the guest said before.
async fn synced(fixture: &mut Fixture, agent: &mut Agent, id: u64) {
    agent.say(v1::SyncDone { id, error: String::new() }).await;
    let heard = tokio::time::timeout(std::time::Duration::from_secs(60), fixture.events.recv());
    assert_eq!(heard.await.expect("the guest is not heard"), Some(GuestEvent::Synced { id, error: String::new() }));
}

#[tokio::test]
async fn a_guest_that_says_a_byte_at_a_time_fills_no_memory() {
    const BYTES: usize = 20_000;
    let mut fixture = fixture();
    let mut agent = fixture.connect_to(PROTOCOL).await;
    let mut exec = exec(&fixture, v1::Process::default(), false).await.unwrap();
    let v1::host_message::Kind::Exec(asked) = agent.hear_message().await else { panic!("no exec") };
    for _ in 0..BYTES {
        for output in [v1::Output::Stdout, v1::Output::Stderr] {
            let fill = |room: &mut [u8]| {
                room[0] = 7;
                1
            };
            agent.connection.send_output(asked.stream_id, output, 1, fill).unwrap();
        }
    }
    agent.flush().await;
    synced(&mut fixture, &mut agent, 1).await;
    let status = Some(kibo_guest_protocol::ProcessEnd::Code(0).into());
    agent.say(v1::ExecExited { stream_id: asked.stream_id, status }).await;
    let (mut pieces, mut bytes) = (0, 0);
    while let Some(output) = exec.output.recv().await {
        if let ExecOutput::Stdout(data) | ExecOutput::Stderr(data) = output {
            (pieces, bytes) = (pieces + 1, bytes + data.len());
        }
    }
    assert_eq!(bytes, 2 * BYTES);
    assert!(pieces < BYTES / 20, "{pieces} pieces waited");
}

#[tokio::test]
async fn a_guest_has_a_bounded_number_of_streams() {
    let mut fixture = fixture();
    let mut agent = fixture.connect().await;
    let mut streams = Vec::new();
    for _ in 0..MAX_STREAMS {
        streams.push(exec(&fixture, v1::Process::default(), false).await.unwrap());
    }
    let refused = exec(&fixture, v1::Process::default(), false).await.unwrap_err();
    assert_eq!(refused.failure, kibo_protocol::v1::StreamFailure::TooMany);
    let v1::host_message::Kind::Exec(first) = agent.hear_message().await else { panic!("no exec") };
    let status = Some(kibo_guest_protocol::ProcessEnd::Code(0).into());
    agent.say(v1::ExecExited { stream_id: first.stream_id, status }).await;
    assert_eq!(streams[0].output.recv().await, Some(ExecOutput::Exit(ExecExit::Code(0))));
    exec(&fixture, v1::Process::default(), false).await.unwrap();
}

#[tokio::test]
async fn a_guest_that_is_slow_to_take_input_is_heard() {
    let mut fixture = fixture();
    let mut agent = fixture.connect_to(PROTOCOL).await;
    let mut streams = Vec::new();
    for _ in 0..20 {
        let stream = exec(&fixture, v1::Process::default(), true).await.unwrap();
        stream.input.send(ExecInput::Data(Bytes::from(vec![7; Width::WIDE.bytes()]))).await.unwrap();
        streams.push(stream);
    }
    // It takes nothing meanwhile.
    for id in 0..100 {
        synced(&mut fixture, &mut agent, id).await;
    }
    // In the end all of it arrives.
    let mut left = 20 * Width::WIDE.bytes();
    while left > 0 {
        if let v1::host_message::Kind::StdinData(input) = agent.hear_message().await {
            let bytes = u32::try_from(input.data.len()).unwrap();
            left -= input.data.len();
            agent.say(v1::StdinCredit { stream_id: input.stream_id, bytes }).await;
        }
    }
}

#[tokio::test]
async fn what_waits_for_a_client_anywhere_waits_within_its_window() {
    let mut fixture = fixture();
    let mut agent = fixture.connect_to(PROTOCOL).await;
    let mut exec = exec(&fixture, v1::Process::default(), false).await.unwrap();
    let v1::host_message::Kind::Exec(asked) = agent.hear_message().await else { panic!("no exec") };
    let begins = Width::GROWING.begins();
    agent.connection.send_output(asked.stream_id, v1::Output::Stdout, begins, |_| begins).unwrap();
    agent.flush().await;
    // Out of the daemon's channels, and not gone.
    let piece = exec.output.recv().await;
    assert!(matches!(&piece, Some(ExecOutput::Stdout(data)) if data.len() == begins), "{piece:?}");
    fixture.guest.sync(1);
    let heard = agent.hear_message().await;
    assert!(matches!(heard, v1::host_message::Kind::Sync(_)), "granted what is still there: {heard:?}");
    drop(piece);
    let heard = agent.hear_message().await;
    let v1::host_message::Kind::StreamCredit(credit) = heard else { panic!("no credit but {heard:?}") };
    assert!(credit.bytes as usize >= begins, "{credit:?}");
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_begins_nothing_is_not_waited_for_and_ends_it_should_it_come_to_it() {
    let mut fixture = fixture();
    let mut agent = fixture.connect_to(PROTOCOL).await;
    let mut exec = exec(&fixture, v1::Process::default(), false).await.unwrap();
    let failed = exec.output.recv().await;
    let Some(ExecOutput::Failed(error)) = failed else { panic!("{failed:?}") };
    assert_eq!(error.failure, kibo_protocol::v1::StreamFailure::GuestUnavailable);
    assert!(error.message.contains("within 60 s"), "{}", error.message);
    let v1::host_message::Kind::Exec(asked) = agent.hear_message().await else { panic!("no exec") };
    let v1::host_message::Kind::Hangup(hangup) = agent.hear_message().await else { panic!("no hangup") };
    assert_eq!(hangup.stream_id, asked.stream_id);
}
