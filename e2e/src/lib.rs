//! The local cluster ([`local`]): a real control plane, the operator and node daemons as plain
//! processes on one machine, for people (`kibo-local`, behind `hack/local`) and for the end-to-end
//! tests ([`suite`]); and many nodes at once without virtual machines ([`fleet`]).

pub mod fleet;
pub mod local;
pub mod suite;
