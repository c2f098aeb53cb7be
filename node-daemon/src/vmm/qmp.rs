//! A client of the QEMU Machine Protocol: commands, answers and events over one unix socket.
//!
//! By hand: the crate for it (qapi) generates all of one QEMU version's schema and refuses events that the schema does
//! not know, while a node runs whatever QEMU its distribution has and needs five commands.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, oneshot},
    task::JoinHandle,
};

/// QEMU answers from its main loop, which can wait for a disk for a while.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
const GREETING_LIMIT: Duration = Duration::from_secs(20);
const RESET_LOOK: Duration = Duration::from_millis(50);
/// As the command line names the agent's socket.
const AGENT_CHANNEL: &str = "agent";

#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    #[error("QEMU closed its control socket")]
    Closed,
    #[error("QEMU did not answer to {command} within {} s", limit.as_secs())]
    Timeout { command: String, limit: Duration },
    #[error("QEMU refused {command}: {class}: {description}")]
    Refused { command: String, class: String, description: String },
    #[error("QEMU said something on its control socket that is no QMP: {0}")]
    Malformed(String),
    #[error("failed to use QEMU's control socket: {0}")]
    Io(#[from] io::Error),
}

/// What QEMU reports by itself, as far as it matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QmpEvent {
    /// The guest is off, or QEMU is about to be.
    Shutdown {
        by_guest: bool,
        reason: String,
    },
    GuestPanicked,
    /// The guest opened or closed the agent's port.
    AgentPort {
        open: bool,
    },
    /// A disk failed; with `stopped` the guest is paused until the write can be tried again.
    BlockError {
        /// The disk's serial.
        disk: String,
        stopped: bool,
        /// There is no space left.
        is_full: bool,
        reason: String,
    },
    /// The socket is closed; the last event.
    Closed,
}

/// The disk that made QEMU pause the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedDisk {
    /// Its serial.
    pub disk: String,
    pub is_full: bool,
}

/// The requests of a guest to read a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskReads {
    pub succeeded: u64,
    pub failed: u64,
}

/// How the guest is, by QEMU's `query-status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunState {
    Running,
    /// Powered off or rebooted; QEMU waits to be told to go.
    Shutdown,
    GuestPanicked,
    /// Paused because a disk has no space.
    IoError,
    /// Reset, and not let go yet.
    Prelaunch,
    Other,
}

/// One connection. Cheap to clone; the connection ends with the last clone.
#[derive(Clone, Debug)]
pub struct Qmp {
    requests: mpsc::Sender<Request>,
}

#[derive(Debug)]
struct Request {
    command: String,
    arguments: Value,
    answer: oneshot::Sender<Result<Value, QmpError>>,
}

#[derive(Deserialize)]
struct Incoming {
    #[serde(rename = "QMP")]
    greeting: Option<Value>,
    event: Option<String>,
    #[serde(default)]
    data: Value,
    id: Option<u64>,
    #[serde(rename = "return")]
    value: Option<Value>,
    error: Option<Refusal>,
}

#[derive(Deserialize)]
struct Refusal {
    class: String,
    desc: String,
}

impl Qmp {
    /// Takes up the conversation: greeting, then command mode. Events arrive from then on.
    pub async fn connect(stream: UnixStream) -> Result<(Self, mpsc::UnboundedReceiver<QmpEvent>), QmpError> {
        let (read, write) = stream.into_split();
        let mut lines = BufReader::new(read).lines();
        let timeout = || QmpError::Timeout { command: "its greeting".to_owned(), limit: GREETING_LIMIT };
        let greeting = tokio::time::timeout(GREETING_LIMIT, lines.next_line()).await.map_err(|_| timeout())??;
        let greeting = greeting.ok_or(QmpError::Closed)?;
        parse(&greeting)?.greeting.ok_or(QmpError::Malformed(greeting))?;

        let (requests, incoming_requests) = mpsc::channel(8);
        let (events, incoming_events) = mpsc::unbounded_channel();
        let pending = Pending::default();
        let reader = tokio::spawn(read_answers(lines, pending.clone(), events));
        tokio::spawn(write_commands(write, incoming_requests, pending, reader));
        let qmp = Self { requests };
        qmp.execute("qmp_capabilities", json!({})).await?;
        Ok((qmp, incoming_events))
    }

    pub async fn run_state(&self) -> Result<RunState, QmpError> {
        let status = self.execute("query-status", json!({})).await?;
        Ok(match status["status"].as_str() {
            Some("running") => RunState::Running,
            Some("shutdown") => RunState::Shutdown,
            Some("guest-panicked") => RunState::GuestPanicked,
            Some("io-error") => RunState::IoError,
            Some("prelaunch") => RunState::Prelaunch,
            _ => RunState::Other,
        })
    }

    /// The disk that a guest is paused for.
    pub async fn failed_disk(&self) -> Result<Option<FailedDisk>, QmpError> {
        let disks = self.execute("query-block", json!({})).await?;
        let failed = |disk: &Value| {
            let is_full = match disk["io-status"].as_str()? {
                "nospace" => true,
                "failed" => false,
                _ => return None,
            };
            Some(FailedDisk { disk: disk["inserted"]["node-name"].as_str()?.to_owned(), is_full })
        };
        Ok(disks.as_array().into_iter().flatten().find_map(failed))
    }

    /// Of the disk with this serial.
    pub async fn reads(&self, disk: &str) -> Result<DiskReads, QmpError> {
        let disks = self.execute("query-blockstats", json!({})).await?;
        let found = disks.as_array().into_iter().flatten().find(|it| it["node-name"] == disk);
        let count = |name: &str| found.and_then(|it| it["stats"][name].as_u64()).unwrap_or_default();
        Ok(DiskReads { succeeded: count("rd_operations"), failed: count("failed_rd_operations") })
    }

    /// Lets a paused guest go on.
    pub async fn resume(&self) -> Result<(), QmpError> {
        self.execute("cont", json!({})).await.map(drop)
    }

    /// Boots a guest anew that went off before its agent was there. `false`: it was there, and the guest stays off.
    pub async fn boot_anew(&self) -> Result<bool, QmpError> {
        let channels = self.execute("query-chardev", json!({})).await?;
        let mut channels = channels.as_array().into_iter().flatten();
        let agent = channels.find(|channel| channel["label"] == AGENT_CHANNEL);
        if agent.is_none_or(|agent| agent["frontend-open"] != false) {
            return Ok(false);
        }
        self.execute("set-action", json!({ "reboot": "reset" })).await?;
        let reset = self.execute("system_reset", json!({})).await;
        self.reboots_are_ends().await?;
        reset?;
        // Not before the reset is done, which QEMU does in its own time.
        let until = tokio::time::Instant::now() + ANSWER_LIMIT;
        while let Err(refused) = self.resume().await {
            if !matches!(refused, QmpError::Refused { .. }) || tokio::time::Instant::now() > until {
                return Err(refused);
            }
            tokio::time::sleep(RESET_LOOK).await;
        }
        Ok(true)
    }

    /// A reboot of the guest is its end, as the command line has it.
    pub async fn reboots_are_ends(&self) -> Result<(), QmpError> {
        self.execute("set-action", json!({ "reboot": "shutdown" })).await.map(drop)
    }

    /// Ends QEMU. The answer may be lost with it: look at the process.
    pub async fn quit(&self) -> Result<(), QmpError> {
        self.execute("quit", json!({})).await.map(drop)
    }

    async fn execute(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let (answer, answered) = oneshot::channel();
        let request = Request { command: command.to_owned(), arguments, answer };
        self.requests.send(request).await.map_err(|_| QmpError::Closed)?;
        let timeout = || QmpError::Timeout { command: command.to_owned(), limit: ANSWER_LIMIT };
        tokio::time::timeout(ANSWER_LIMIT, answered).await.map_err(|_| timeout())?.map_err(|_| QmpError::Closed)?
    }
}

/// Commands that wait for their answer, by id.
#[derive(Clone, Debug, Default)]
struct Pending(Arc<Mutex<HashMap<u64, Request>>>);

impl Pending {
    fn put(&self, id: u64, request: Request) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(id, request);
    }

    fn take(&self, id: u64) -> Option<Request> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&id)
    }

    fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

async fn write_commands(
    mut socket: OwnedWriteHalf,
    mut requests: mpsc::Receiver<Request>,
    pending: Pending,
    reader: JoinHandle<()>,
) {
    let mut id = 0;
    loop {
        let Some(request) = requests.recv().await else {
            // Nobody asks any more: QEMU serves the next client only after this one is gone.
            return reader.abort();
        };
        id += 1;
        let mut line =
            json!({ "execute": &request.command, "arguments": &request.arguments, "id": id }).to_string().into_bytes();
        line.push(b'\n');
        pending.put(id, request);
        if reader.is_finished() || socket.write_all(&line).await.is_err() {
            return pending.clear();
        }
    }
}

async fn read_answers(
    mut lines: Lines<BufReader<OwnedReadHalf>>,
    pending: Pending,
    events: mpsc::UnboundedSender<QmpEvent>,
) {
    while let Ok(Some(line)) = lines.next_line().await {
        let Ok(message) = parse(&line) else {
            tracing::warn!(%line, "QEMU said something that is no QMP");
            break;
        };
        if let Some(event) = message.event.as_deref().and_then(|name| event(name, &message.data)) {
            // Nobody listening is the same as nobody asking.
            let _ = events.send(event);
        }
        let Some(request) = message.id.and_then(|id| pending.take(id)) else { continue };
        let command = request.command;
        let result = match (message.value, message.error) {
            (Some(value), None) => Ok(value),
            (_, Some(error)) => Err(QmpError::Refused { command, class: error.class, description: error.desc }),
            (None, None) => Err(QmpError::Malformed(line)),
        };
        let _ = request.answer.send(result);
    }
    pending.clear();
    let _ = events.send(QmpEvent::Closed);
}

fn parse(line: &str) -> Result<Incoming, QmpError> {
    serde_json::from_str(line).map_err(|_| QmpError::Malformed(line.chars().take(200).collect()))
}

fn event(name: &str, data: &Value) -> Option<QmpEvent> {
    let text = |key: &str| data[key].as_str().unwrap_or_default().to_owned();
    Some(match name {
        "SHUTDOWN" => QmpEvent::Shutdown { by_guest: data["guest"].as_bool().unwrap_or(false), reason: text("reason") },
        "GUEST_PANICKED" => QmpEvent::GuestPanicked,
        "VSERPORT_CHANGE" => QmpEvent::AgentPort { open: data["open"].as_bool().unwrap_or(false) },
        "BLOCK_IO_ERROR" => QmpEvent::BlockError {
            disk: text("node-name"),
            stopped: text("action") == "stop",
            is_full: data["nospace"].as_bool().unwrap_or(false),
            reason: text("reason"),
        },
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn pair() -> (Qmp, mpsc::UnboundedReceiver<QmpEvent>, Lines<BufReader<OwnedReadHalf>>, OwnedWriteHalf) {
        let (client, server) = UnixStream::pair().unwrap();
        let (read, mut write) = server.into_split();
        let mut lines = BufReader::new(read).lines();
        let qemu = async {
            write.write_all(b"{\"QMP\": {\"version\": {}}}\n").await.unwrap();
            let hello: Value = serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap();
            assert_eq!(hello["execute"], "qmp_capabilities");
            write.write_all(format!("{{\"return\": {{}}, \"id\": {}}}\n", hello["id"]).as_bytes()).await.unwrap();
        };
        let (connected, ()) = tokio::join!(Qmp::connect(client), qemu);
        let (qmp, events) = connected.unwrap();
        (qmp, events, lines, write)
    }

    #[tokio::test]
    async fn events_between_a_command_and_its_answer_are_told_apart() {
        let (qmp, mut events, mut lines, mut write) = pair().await;
        let qemu = async {
            let ask: Value = serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap();
            let answers = format!(
                "{{\"event\": \"SHUTDOWN\", \"data\": {{\"guest\": true, \"reason\": \"guest-shutdown\"}}}}\n\
                 {{\"event\": \"OF_A_LATER_QEMU\"}}\n\
                 {{\"return\": {{\"status\": \"shutdown\"}}, \"id\": {}}}\n",
                ask["id"]
            );
            write.write_all(answers.as_bytes()).await.unwrap();
        };
        let (state, ()) = tokio::join!(qmp.run_state(), qemu);
        assert_eq!(state.unwrap(), RunState::Shutdown);
        let expected = QmpEvent::Shutdown { by_guest: true, reason: "guest-shutdown".to_owned() };
        assert_eq!(events.recv().await, Some(expected));
    }

    #[tokio::test]
    async fn the_disk_that_failed_is_found() {
        let (qmp, _events, mut lines, mut write) = pair().await;
        let qemu = async {
            let ask: Value = serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap();
            let disk = |node: &str, status: &str| json!({ "io-status": status, "inserted": { "node-name": node } });
            let disks = [json!({ "device": "cd" }), disk("layer", "ok"), disk("vol0", "nospace")];
            write.write_all(format!("{}\n", json!({ "return": disks, "id": ask["id"] })).as_bytes()).await.unwrap();
        };
        let (failed, ()) = tokio::join!(qmp.failed_disk(), qemu);
        assert_eq!(failed.unwrap(), Some(FailedDisk { disk: "vol0".to_owned(), is_full: true }));
    }

    /// Answers each command in turn, and says what was asked.
    async fn answers(
        lines: &mut Lines<BufReader<OwnedReadHalf>>,
        write: &mut OwnedWriteHalf,
        all: &[Value],
    ) -> Vec<String> {
        let mut asked = Vec::new();
        for answer in all {
            let ask: Value = serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap();
            let mut answer = answer.clone();
            answer["id"] = ask["id"].clone();
            write.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
            asked.push(format!("{} {}", ask["execute"].as_str().unwrap(), ask["arguments"]));
        }
        asked
    }

    fn channels(open: bool) -> Value {
        json!({ "return": [{ "label": "console", "frontend-open": true }, { "label": "agent", "frontend-open": open }] })
    }

    #[tokio::test]
    async fn a_guest_boots_anew_only_before_its_agent_was_there() {
        let (qmp, _events, mut lines, mut write) = pair().await;
        let done = json!({ "return": {} });
        let refused =
            json!({ "error": { "class": "GenericError", "desc": "Resetting the Virtual Machine is required" } });
        let said = [channels(false), done.clone(), done.clone(), done.clone(), refused, done];
        let (booted, asked) = tokio::join!(qmp.boot_anew(), answers(&mut lines, &mut write, &said));
        assert!(booted.unwrap());
        let expected = [
            "query-chardev {}",
            "set-action {\"reboot\":\"reset\"}",
            "system_reset {}",
            "set-action {\"reboot\":\"shutdown\"}",
            "cont {}",
            "cont {}",
        ];
        assert_eq!(asked, expected);
        let said = [channels(true)];
        let (booted, asked) = tokio::join!(qmp.boot_anew(), answers(&mut lines, &mut write, &said));
        assert!(!booted.unwrap());
        assert_eq!(asked, ["query-chardev {}"]);
    }

    #[tokio::test]
    async fn the_reads_of_a_disk_are_counted_by_its_name() {
        let (qmp, _events, mut lines, mut write) = pair().await;
        let qemu = async {
            for _ in 0..2 {
                let ask: Value = serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap();
                assert_eq!(ask["execute"], "query-blockstats");
                let stats = |done: u64, failed: u64| json!({ "rd_operations": done, "failed_rd_operations": failed });
                let disks = [("root", stats(9, 0)), ("vol0", stats(3, 1))];
                let disks = disks.map(|(name, stats)| json!({ "node-name": name, "stats": stats }));
                write.write_all(format!("{}\n", json!({ "return": disks, "id": ask["id"] })).as_bytes()).await.unwrap();
            }
        };
        let asked = async { (qmp.reads("vol0").await.unwrap(), qmp.reads("none").await.unwrap()) };
        let (reads, ()) = tokio::join!(asked, qemu);
        assert_eq!(reads, (DiskReads { succeeded: 3, failed: 1 }, DiskReads::default()));
    }

    #[tokio::test]
    async fn a_command_in_flight_fails_when_qemu_dies() {
        let (qmp, mut events, lines, write) = pair().await;
        let quit = tokio::spawn(async move { qmp.quit().await });
        drop((lines, write));
        assert!(matches!(quit.await.unwrap(), Err(QmpError::Closed | QmpError::Io(_))));
        assert_eq!(events.recv().await, Some(QmpEvent::Closed));
    }

    #[tokio::test]
    async fn a_refusal_carries_qemus_words() {
        let (qmp, _events, mut lines, mut write) = pair().await;
        let qemu = async {
            let ask: Value = serde_json::from_str(&lines.next_line().await.unwrap().unwrap()).unwrap();
            let error = json!({ "error": { "class": "GenericError", "desc": "no" }, "id": ask["id"] });
            write.write_all(format!("{error}\n").as_bytes()).await.unwrap();
        };
        let (result, ()) = tokio::join!(qmp.resume(), qemu);
        assert_eq!(result.unwrap_err().to_string(), "QEMU refused cont: GenericError: no");
    }
}
