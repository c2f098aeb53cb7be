//! A program that runs beside the test, as a person runs it: its output is read as it comes, it can be at a terminal,
//! and it can be sent signals.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Termios, Winsize, tcgetattr, tcsetwinsize};
use tokio::process::{Child, ChildStdin, Command};

use super::memory::resident;
use super::wait::eventually;

/// How long a program may take to say what is waited for, with guests booting on the same cores.
const SOON: Duration = Duration::from_secs(90);

/// A program that runs.
pub struct Program {
    child: Child,
    pub stdin: Option<ChildStdin>,
    stdout: Said,
    stderr: Said,
    readers: Vec<JoinHandle<()>>,
}

/// What was printed so far.
#[derive(Clone, Default)]
struct Said(Arc<Mutex<Vec<u8>>>);

impl Said {
    fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes()).into_owned()
    }

    /// Reads to the end, on a thread of its own: the other side may never end.
    fn read(mut from: File) -> (Self, JoinHandle<()>) {
        let said = Self::default();
        let to = said.clone();
        let reader = thread::spawn(move || {
            let mut buffer = vec![0; 64 * 1024];
            while let Ok(length @ 1..) = from.read(&mut buffer) {
                to.bytes().extend_from_slice(&buffer[..length]);
            }
        });
        (said, reader)
    }

    async fn says(&self, text: &str, limit: Duration) -> Result<()> {
        let what = format!("it says {text:?}");
        let found = eventually(&what, limit, || async { Ok(self.text().contains(text).then_some(())) });
        found.await.with_context(|| format!("it said {:?}", self.text()))
    }
}

impl Program {
    pub fn start(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("failed to run {:?}", command.as_std()))?;
        let stdout = child.stdout.take().context("stdout is piped")?.into_owned_fd()?;
        let stderr = child.stderr.take().context("stderr is piped")?.into_owned_fd()?;
        let stdin = child.stdin.take();
        let ((stdout, out), (stderr, err)) = (Said::read(stdout.into()), Said::read(stderr.into()));
        Ok(Self { child, stdin, stdout, stderr, readers: vec![out, err] })
    }

    pub fn stdout(&self) -> Vec<u8> {
        self.stdout.bytes().clone()
    }

    pub fn stderr(&self) -> String {
        self.stderr.text()
    }

    /// Waits until it has printed a text.
    pub async fn says(&self, text: &str) -> Result<()> {
        self.stdout.says(text, SOON).await.with_context(|| format!("beside it: {:?}", self.stderr()))
    }

    /// The same on standard error.
    pub async fn remarks(&self, text: &str) -> Result<()> {
        self.stderr.says(text, SOON).await
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill_process(pid(&self.child)?, signal)?)
    }

    /// Its resident memory now.
    pub fn memory_bytes(&self) -> Result<u64> {
        resident(pid(&self.child)?.as_raw_nonzero().get())
    }

    pub fn has_ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }

    /// Waits for its end and gives its exit status.
    pub async fn ended(&mut self) -> Result<i32> {
        let ended = tokio::time::timeout(SOON, self.child.wait()).await;
        let ended = ended.with_context(|| format!("it goes on: {:?} {:?}", self.stdout.text(), self.stderr()))??;
        for reader in self.readers.drain(..) {
            last_words(reader).await?;
        }
        ended.code().context("it was killed")
    }
}

/// Waits until all that an ended program has printed is read.
async fn last_words(reader: JoinHandle<()>) -> Result<()> {
    let read = tokio::task::spawn_blocking(move || reader.join());
    let read = tokio::time::timeout(SOON, read).await.context("something holds its output open")?;
    read?.map_err(|_| anyhow!("the reader of its output panicked"))
}

fn pid(child: &Child) -> Result<Pid> {
    child.id().and_then(|id| Pid::from_raw(id.cast_signed())).context("it has ended")
}

/// A terminal with a program at it.
pub struct Terminal {
    child: Child,
    master: OwnedFd,
    /// Kept open, so that the terminal outlives the program, until that has ended.
    slave: Option<OwnedFd>,
    said: Said,
    reader: Option<JoinHandle<()>>,
    before: Termios,
}

impl Terminal {
    /// Starts a program whose terminal this is, with so many columns and rows.
    pub fn start(command: &Command, columns: u16, rows: u16) -> Result<Self> {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let name = ptsname(&master, Vec::new())?;
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let slave = rustix::fs::open(name.as_c_str(), flags, Mode::empty())?;
        tcsetwinsize(&master, size(columns, rows))?;
        let before = tcgetattr(&slave)?;
        let command = command.as_std();
        let mut at_terminal = Command::new("setsid");
        at_terminal.args(["--ctty", "--wait"]).arg(command.get_program()).args(command.get_args());
        at_terminal
            .envs(command.get_envs().filter_map(|(key, value)| Some((key, value?))))
            .env("TERM", "xterm-256color");
        at_terminal.stdin(slave.try_clone()?).stdout(slave.try_clone()?).stderr(slave.try_clone()?).kill_on_drop(true);
        let child = at_terminal.spawn().context("failed to run setsid")?;
        let (said, reader) = Said::read(File::from(master.try_clone()?));
        Ok(Self { child, master, slave: Some(slave), said, reader: Some(reader), before })
    }

    /// Types.
    pub fn types(&self, keys: &str) -> Result<()> {
        Ok(File::from(self.master.try_clone()?).write_all(keys.as_bytes())?)
    }

    /// Gives the window another size.
    pub fn resize(&self, columns: u16, rows: u16) -> Result<()> {
        Ok(tcsetwinsize(&self.master, size(columns, rows))?)
    }

    fn slave(&self) -> Result<&OwnedFd> {
        self.slave.as_ref().context("the program at the terminal has ended")
    }

    pub async fn says(&self, text: &str) -> Result<()> {
        self.said.says(text, SOON).await
    }

    pub fn text(&self) -> String {
        self.said.text()
    }

    /// Waits until the program has the terminal to itself.
    pub async fn is_raw(&self) -> Result<()> {
        eventually("the terminal is raw", SOON, || async {
            let now = tcgetattr(self.slave()?)?;
            Ok((!now.local_modes.intersects(LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG)).then_some(()))
        })
        .await
        .with_context(|| format!("it shows {:?}", self.text()))
    }

    /// To the program itself, not to `setsid` in front of it.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let setsid = pid(&self.child)?.as_raw_nonzero();
        let children = fs::read_to_string(format!("/proc/{setsid}/task/{setsid}/children"))?;
        // Where setsid was no leader of a group it has become the program.
        let id = children.split_whitespace().next().map_or(Ok(setsid.get()), str::parse)?;
        Ok(kill_process(Pid::from_raw(id).context("a process")?, signal)?)
    }

    /// Waits for the end, of the program and of what it shows; the terminal must then be as it was.
    pub async fn ended(&mut self) -> Result<i32> {
        let ended = tokio::time::timeout(SOON, self.child.wait()).await;
        let ended = ended.with_context(|| format!("it goes on and shows {:?}", self.text()))??;
        let after = tcgetattr(self.slave()?)?;
        // Without it the terminal hangs up, and its reader comes to an end.
        self.slave = None;
        if let Some(reader) = self.reader.take() {
            last_words(reader).await?;
        }
        ensure!(
            is_alike(&after, &self.before),
            "the terminal was not given back: {:?} before, {:?} after",
            self.before.local_modes,
            after.local_modes
        );
        match ended.code() {
            Some(code) => Ok(code),
            None => bail!("it was killed: {ended}"),
        }
    }
}

fn is_alike(one: &Termios, other: &Termios) -> bool {
    (one.local_modes, one.input_modes, one.output_modes, one.control_modes)
        == (other.local_modes, other.input_modes, other.output_modes, other.control_modes)
}

fn size(columns: u16, rows: u16) -> Winsize {
    Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 }
}
