//! Boots real guests in QEMU (TCG) and speaks to their agents as the daemon would.
//!
//! KIBOTOS_GUEST names the directory that hack/guest/build prints.

mod channel;
mod configure;
mod exec;
mod log;
mod machine;
mod power;
