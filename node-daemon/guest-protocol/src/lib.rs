//! What node-daemon and guest-agent say to each other, and how it survives the wire.
//!
//! The wire is a virtio-serial port: a byte stream that can be cut anywhere, that hands bytes of a connection that is
//! gone to the next one, and that may lose what was in flight. This crate does no I/O; both ends feed it the bytes that
//! they read and write out the bytes that it gives them:
//!
//! - [`frame`]: frames that can be found again after any garbage, with a checksum and the nonce of their connection; and
//!   runs of bytes as they are behind a frame that announces them, for what there is much of.
//! - [`host`]: the daemon's end. [`HostConnection`] says hello with a fresh nonce, drops all that does not bear it, and
//!   keeps the exec streams' windows, so that a guest cannot make the daemon buffer more than it granted.
//! - [`guest`]: the agent's end. A new nonce ends the connection before it.
//! - [`flow`]: credit windows: a slow reader stops its own writer and nobody else.
//! - [`v1`]: the messages (protobuf: a guest may have been started by an older daemon).

pub mod cobs;
pub mod flow;
pub mod frame;
pub mod guest;
pub mod host;
mod mask;
mod outgoing;
mod run;
mod spare;
mod stream;
mod sum;
mod wire;

#[allow(clippy::all, clippy::pedantic)]
pub mod v1 {
    //! The messages of `kibotos.guest.v1`.
    include!(concat!(env!("OUT_DIR"), "/kibotos.guest.v1.rs"));
}

mod convert;

pub use convert::ProcessEnd;
pub use frame::{MAX_MESSAGE, Nonce};
pub use guest::{GuestConnection, GuestEvent};
pub use host::{HostConnection, HostEvent, StreamId};

/// The most bytes of a stream or of the log that one message carries.
pub const MAX_CHUNK: usize = 32 * 1024;

/// The most bytes of a stream that one run carries: what a pipe holds, and what a credit of a wide window grants.
pub const MAX_RUN: usize = 256 * 1024;

/// The streams that one guest has at once. Both ends keep it: the daemon believes no guest that it does.
pub const MAX_STREAMS: usize = 256;

/// What these ends understand, see `Hello` and `HelloReply`.
pub const PROTOCOL: u32 = 4;

/// The first protocol with [`frame::Check::Sum`].
const WITH_SUMS: u32 = 2;

/// The first protocol with runs.
const WITH_RUNS: u32 = 3;

/// The first protocol in which input is masked and the windows of outputs grow.
const WITH_MASKS: u32 = 4;

/// The name of the virtio-serial port.
pub const PORT_NAME: &str = "agent.0";

/// What a guest says on its console, and goes off, where nothing that waits for a time would ever end in it.
pub const NO_TIMER: &str = "the kernel found no timer that works";

/// How many bytes of entropy [`v1::Configure`] carries.
pub const ENTROPY_LEN: usize = 64;
