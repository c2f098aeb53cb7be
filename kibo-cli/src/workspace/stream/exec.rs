//! `kibo workspace exec` and `shell`.

use clap::Args;
use futures::future::pending;
use rustix::process::Signal;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    signal::unix::{Signal as Signals, SignalKind, signal},
    sync::{mpsc, oneshot},
    time::{Duration, sleep},
};

use super::{
    channels::{self, Broken, Channel, DATA, FromServer, Receiver, Sender},
    check_available,
    terminal::{self, Raw},
};
use crate::{
    client::Cluster,
    errors::{Error, Kind, Result, Subject},
    output::remark,
    workspace::target,
};

/// Input that the command does not take is in the way of a signal; then the connection is ended instead.
const SIGNAL_PASSES: Duration = Duration::from_secs(3);

#[derive(Args, Debug)]
pub struct Exec {
    /// Name, or id (ws-…) in any namespace
    #[arg(value_name = "WORKSPACE")]
    workspace: String,
    /// Hand standard input to the command
    #[arg(short = 'i', long)]
    stdin: bool,
    /// Give the command a terminal, which is yours: its size, its keys, Ctrl-C
    #[arg(short = 't', long)]
    tty: bool,
    /// Program and arguments, not run through a shell
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

#[derive(Args, Debug)]
pub struct Shell {
    /// Name, or id (ws-…) in any namespace
    #[arg(value_name = "WORKSPACE")]
    workspace: String,
}

/// What is to run, and with what.
struct Program {
    /// None: the login shell.
    command: Option<Vec<String>>,
    stdin: bool,
    terminal: bool,
}

/// Runs a command in the guest and gives its exit status.
pub async fn exec(cluster: &Cluster, args: Exec) -> Result<u8> {
    if args.tty && !terminal::is_there() {
        return Err(Error::invalid("-t needs a terminal on standard input, and there is none").next("leave -t out"));
    }
    let program = Program { command: Some(args.command), stdin: args.stdin, terminal: args.tty };
    run(cluster, &args.workspace, program).await
}

/// Runs the login shell; with a terminal when there is one, else it reads its commands from standard input.
pub async fn shell(cluster: &Cluster, args: Shell) -> Result<u8> {
    let program = Program { command: None, stdin: true, terminal: terminal::is_there() };
    run(cluster, &args.workspace, program).await
}

async fn run(cluster: &Cluster, workspace: &str, program: Program) -> Result<u8> {
    let (workspace, subject) = target::fetch(cluster, workspace).await?;
    check_available(&workspace, &subject, "nothing can be run in it")?;
    // Before the command runs, so that no signal is missed.
    let signals = Listeners::listen()?;
    let (sender, receiver) = open(cluster, &subject, &program).await?;
    let raw = if program.terminal { Some(Raw::enter()?) } else { None };
    let (control, orders) = mpsc::channel(4);
    let ended = tokio::select! {
        ended = print(receiver) => ended?.map_err(|broken| lost(&subject, &broken)),
        broken = feed(sender, program.stdin, orders) => Err(lost(&subject, &broken)),
        code = signals.pass_on(&control, raw.as_ref()) => return Ok(code),
    };
    // Before anything is said.
    drop(raw);
    let status = ended?;
    let code = channels::exit_code(&status, &subject)?;
    if let Some(said) = channels::became_of_workspace(&status) {
        remark(said);
    }
    Ok(code)
}

async fn open(cluster: &Cluster, subject: &Subject, program: &Program) -> Result<(Sender, Receiver)> {
    let said = |yes: bool| if yes { "true" } else { "false" };
    let mut query = vec![("stdin", said(program.stdin)), ("stdout", "true"), ("stderr", said(!program.terminal))];
    match &program.command {
        Some(command) => query.extend(command.iter().map(|part| ("command", part.as_str()))),
        None => query.push(("shell", "true")),
    }
    let term = std::env::var("TERM").unwrap_or_default();
    let size = terminal::size().map(|(columns, rows)| (columns.to_string(), rows.to_string()));
    if program.terminal {
        query.extend([("tty", "true"), ("term", term.as_str())]);
        if let Some((columns, rows)) = &size {
            query.extend([("columns", columns.as_str()), ("rows", rows.as_str())]);
        }
    }
    channels::open(cluster, subject, "exec", &query).await
}

fn lost(subject: &Subject, broken: &Broken) -> Error {
    Error::new(
        Kind::Unavailable,
        format!("{subject}: {broken}, before the command ended, so its exit status is not known"),
    )
    .next(format!("see whether it still runs: {}", subject.command("get")))
}

type Ended = Box<k8s_openapi::apimachinery::pkg::apis::meta::v1::Status>;

/// Prints what comes, each piece at once, until the command has ended. A reader of ours that has gone ends it too.
async fn print(mut receiver: Receiver) -> std::io::Result<Result<Ended, Broken>> {
    let (mut stdout, mut stderr) = (tokio::io::stdout(), tokio::io::stderr());
    loop {
        match receiver.next().await {
            Ok(FromServer::Stdout(data)) => {
                stdout.write_all(&data).await?;
                stdout.flush().await?;
            }
            Ok(FromServer::Stderr(data)) => {
                stderr.write_all(&data).await?;
                stderr.flush().await?;
            }
            Ok(FromServer::StdoutClosed) => {}
            Ok(FromServer::Ended(status)) => return Ok(Ok(status)),
            Err(broken) => return Ok(Err(broken)),
        }
    }
}

/// A message beside the input.
struct Order {
    channel: Channel,
    data: String,
    sent: oneshot::Sender<()>,
}

/// Sends the input to its end, and orders between its pieces. Ends only when the connection does.
async fn feed(mut sender: Sender, stdin: bool, mut orders: mpsc::Receiver<Order>) -> Broken {
    let mut input = stdin.then(channels::stdin);
    let mut buffer = vec![0; DATA];
    loop {
        let read = async {
            match &mut input {
                Some(input) => input.read(&mut buffer).await,
                None => pending().await,
            }
        };
        let sent = tokio::select! {
            biased;
            Some(order) = orders.recv() => {
                let sent = sender.send(order.channel, order.data.as_bytes()).await;
                // Who waited for it may have given up.
                let _ = order.sent.send(());
                sent
            }
            read = read => match read {
                // An input that cannot be read has ended, as for any program.
                Ok(0) | Err(_) => {
                    input = None;
                    sender.close_stdin().await
                }
                Ok(length) => sender.send(Channel::Stdin, &buffer[..length]).await,
            },
        };
        if let Err(broken) = sent {
            // What the operator said last is still to be read.
            sleep(Duration::from_secs(2)).await;
            return broken;
        }
    }
}

/// The signals that mean something here.
struct Listeners {
    interrupt: Signals,
    terminate: Signals,
    quit: Signals,
    hangup: Signals,
    window: Signals,
    go_on: Signals,
}

impl Listeners {
    fn listen() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            quit: signal(SignalKind::quit())?,
            hangup: signal(SignalKind::hangup())?,
            window: signal(SignalKind::window_change())?,
            go_on: signal(SignalKind::from_raw(Signal::CONT.as_raw()))?,
        })
    }

    /// Without a terminal the command gets the first signal, and the second ends us. With one, the keys go to the
    /// command, and a signal from elsewhere ends us. Gives our exit status.
    async fn pass_on(mut self, control: &mpsc::Sender<Order>, raw: Option<&Raw>) -> u8 {
        let mut was_signalled = false;
        loop {
            let (number, name) = tokio::select! {
                _ = self.interrupt.recv() => (2, "INT"),
                _ = self.terminate.recv() => (15, "TERM"),
                _ = self.quit.recv() => (3, "QUIT"),
                _ = self.hangup.recv() => (1, "HUP"),
                _ = self.window.recv(), if raw.is_some() => {
                    resize(control);
                    continue;
                }
                _ = self.go_on.recv(), if raw.is_some() => {
                    // A terminal that has gone says so on the next read.
                    let _ = raw.map(Raw::again);
                    resize(control);
                    continue;
                }
            };
            if raw.is_some() || number == 1 || std::mem::replace(&mut was_signalled, true) {
                return 128 + number;
            }
            let (sent, passed) = oneshot::channel();
            let order = Order { channel: Channel::Signal, data: name.to_owned(), sent };
            if control.try_send(order).is_err() || tokio::time::timeout(SIGNAL_PASSES, passed).await.is_err() {
                remark(&format!(
                    "the command does not read its input, which is in the way of SIG{name}: the connection is ended, and the command gets SIGHUP"
                ));
                return 128 + number;
            }
        }
    }
}

fn resize(control: &mpsc::Sender<Order>) {
    let Some((columns, rows)) = terminal::size() else { return };
    let data = format!("{{\"Width\":{columns},\"Height\":{rows}}}");
    // A size that finds no room is followed by a newer one, or the command has ended.
    let _ = control.try_send(Order { channel: Channel::Resize, data, sent: oneshot::channel().0 });
}
