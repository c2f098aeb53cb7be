//! The fence file of a node: `nodes/<node>` in each pool that it declares.
//!
//! Its first block belongs to that node, which writes it in place every 2 s: the incarnation that it lives and a count
//! that only grows. A count that moves tells every other member of the pool that this host is up and reaches the pool,
//! whatever anybody says of it.
//!
//! The blocks behind it belong to the others. Whoever takes an object because its holder's incarnation was isolated
//! first writes there, in place and checksummed, that this incarnation is dead. Its node reads the file afresh every 2 s
//! and so hears of it without the control plane ([`super::watch`]).
//!
//! The name and the length of the file never change, so that no cache of names, missing names or attributes can hide a
//! mark. Each block is a page of its own and is written past the page cache: on a network file system a client may
//! write a whole page where it changed a part of it, and would put an old mark back.

mod block;
mod file;
mod heart;

pub use file::{Beat, Fence, FenceError, mark, read, sign_in};
pub use heart::{Heart, Life};
