//! Who may write to a disk: one object in one shared pool, some hosts, a control plane, and everything that goes wrong.
//!
//! The rules are not written down here a second time. What the control plane grants is [`kibo_operator::right`], what a
//! host takes is decided by the holder records of [`kibo_node_daemon::pool::records`], and what follows from what it sees
//! in the pool by [`kibo_node_daemon::pool::watch::decide`]: the functions that the programs run. The model adds what
//! they run in: steps that can be cut off anywhere, messages that get lost, hosts that are declared dead rightly and
//! wrongly. The checker walks through every order of these steps.
//!
//! Time goes in check periods of a pool. A period does not end before every daemon that can read the pool has read it
//! once, which is what the daemon's thread for that pool promises.
//!
//! An isolation is *right* where its host can write no more: it is off, or it is cut off from the pool and comes back
//! only after its guests stood still and somebody took over.

mod control;
mod host;
mod world;

#[cfg(test)]
mod tests;

pub use world::*;
