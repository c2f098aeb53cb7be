//! The local cluster ([`local`]): a real control plane, the operator and node daemons as plain
//! processes on one machine, for people (`kibo-local`, behind `hack/local`) and for the end-to-end
//! tests ([`suite`]).

pub mod local;
pub mod suite;
