//! Boots real guests in QEMU (TCG) and speaks to their agents as the daemon would.
//!
//! KIBOTOS_GUEST names the directory that hack/guest/build prints.

mod archive;
mod channel;
mod configure;
mod connect;
mod exec;
mod log;
mod machine;
mod power;
mod terminal;
