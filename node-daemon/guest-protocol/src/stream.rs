//! What the daemon's end keeps of one stream.

use crate::flow::{ReceiveWindow, SendWindow, Width, Widths};
use crate::v1::Output;

#[derive(Debug)]
pub(crate) struct Stream {
    pub stdin: SendWindow,
    pub stdin_open: bool,
    /// Not all of the input was taken that was there last.
    pub waits: bool,
    pub abandoned: bool,
    /// Once the guest has begun what it is of.
    pid: Option<u32>,
    stdout: Heard,
    stderr: Heard,
}

/// What comes of one output.
#[derive(Debug)]
struct Heard {
    window: ReceiveWindow,
    closed: bool,
}

impl Heard {
    const fn new(width: Width) -> Self {
        Self { window: ReceiveWindow::new(width), closed: false }
    }
}

impl Stream {
    pub const fn new(Widths { input, output }: Widths, stdin_open: bool) -> Self {
        let (stdout, stderr) = (Heard::new(output), Heard::new(output));
        Self { stdin: SendWindow::new(input), stdin_open, waits: false, abandoned: false, pid: None, stdout, stderr }
    }

    /// What of its outputs' windows is taken from what is common.
    pub const fn beyond(&self) -> usize {
        self.stdout.window.beyond() + self.stderr.window.beyond()
    }

    pub fn window(&mut self, output: Output) -> Option<&mut ReceiveWindow> {
        self.heard(output).map(|heard| &mut heard.window)
    }

    /// The guest began what the stream is of; whether that is news.
    pub const fn start(&mut self, pid: u32) -> bool {
        self.pid.replace(pid).is_none()
    }

    /// The guest closed an output; whether that is news. It takes nothing of a window, and could be said without end.
    pub fn close(&mut self, output: Output) -> bool {
        self.heard(output).is_some_and(|heard| !std::mem::replace(&mut heard.closed, true))
    }

    fn heard(&mut self, output: Output) -> Option<&mut Heard> {
        match output {
            Output::Stdout => Some(&mut self.stdout),
            Output::Stderr => Some(&mut self.stderr),
            Output::Unspecified => None,
        }
    }
}
