//! Ids that the operator mints: a prefix and a ULID, unique in the cluster.

use std::{borrow::Cow, fmt, str::FromStr};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use ulid::Ulid;

/// A string that is not an id of the expected kind.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("invalid id {value:?}: must be {prefix:?} followed by a ULID in lower case (26 characters)")]
pub struct IdError {
    value: String,
    prefix: &'static str,
}

macro_rules! ulid_id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Ulid);

        impl $name {
            pub const PREFIX: &'static str = $prefix;

            /// A new id; sorts after the ids of earlier milliseconds.
            pub fn generate() -> Self {
                Self(Ulid::new())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}{}", $prefix, self.0.to_string().to_ascii_lowercase())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(value: &str) -> Result<Self, IdError> {
                value
                    .strip_prefix($prefix)
                    .filter(|ulid| !ulid.bytes().any(|b| b.is_ascii_uppercase()))
                    .and_then(|ulid| Ulid::from_string(&ulid.to_ascii_uppercase()).ok())
                    .map(Self)
                    .ok_or_else(|| IdError { value: crate::names::shown(value), prefix: $prefix })
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;

            fn try_from(value: String) -> Result<Self, IdError> {
                value.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.to_string()
            }
        }

        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn inline_schema() -> bool {
                true
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({
                    "type": "string",
                    "maxLength": $prefix.len() + 26,
                    "pattern": concat!("^", $prefix, "[0-9a-hjkmnp-tv-z]{26}$"),
                })
            }
        }
    };
}

ulid_id!(
    /// `ws-<ulid>`: a Workspace, for its whole life and in its tombstone.
    WorkspaceId,
    "ws-"
);
ulid_id!(
    /// `inst-<ulid>`: one execution of a Workspace; each start gets a new one. Directories, process
    /// arguments and logs on the host carry it.
    InstanceId,
    "inst-"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_survives_the_way_through_its_text() {
        let id = InstanceId::generate();
        assert_eq!(id.to_string().parse::<InstanceId>(), Ok(id));
        assert!(id.to_string().starts_with("inst-"));
    }

    #[test]
    fn what_is_not_an_id_is_refused() {
        let upper = format!("ws-{}", Ulid::new());
        for bad in ["", "ws-", "inst-01", "ws-01k6zzzzzzzzzzzzzzzzzzzzzU", upper.as_str()] {
            assert!(bad.parse::<WorkspaceId>().is_err(), "{bad}");
        }
        assert!(InstanceId::generate().to_string().parse::<WorkspaceId>().is_err());
    }
}
