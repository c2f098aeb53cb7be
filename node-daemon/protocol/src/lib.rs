//! The control session between operator and node: its messages, and the secrets that open it.

mod quarantine;
mod redacted;
mod secret;

/// Generated from `proto/kibotos/node/v1/control.proto`.
pub mod v1 {
    #![allow(clippy::pedantic, clippy::large_enum_variant, reason = "generated; a Hello comes once in a session")]
    tonic::include_proto!("kibotos.node.v1");
}

pub use quarantine::quarantine_id;
/// Release of this build, given to it as `KIBOTOS_RELEASE` when it is compiled.
pub const RELEASE: &str = match option_env!("KIBOTOS_RELEASE") {
    Some(release) => release,
    None => "unreleased",
};

/// Revision of the source of this build, given to it as `KIBOTOS_REVISION` when it is compiled; empty: not known.
pub const REVISION: &str = match option_env!("KIBOTOS_REVISION") {
    Some(revision) => revision,
    None => "",
};

pub use secret::{EnrollmentToken, NodeKey, Secret, SecretHash, TokenError};
