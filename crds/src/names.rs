//! Names that come from outside, checked once where they enter.

use std::{borrow::Cow, fmt, str::FromStr};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// The longest good name, and some more to show what is wrong with one.
const LONGEST_SHOWN: usize = 160;

/// A name that breaks its rule.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("invalid {what} {value:?}: {rule}")]
pub struct NameError {
    what: &'static str,
    value: String,
    rule: &'static str,
}

/// The beginning of a refused value: it may be of any length, and comes into logs.
pub(crate) fn shown(value: &str) -> String {
    value.chars().take(LONGEST_SHOWN).collect()
}

fn is_dns_label(value: &str, max: usize) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    !value.is_empty()
        && value.len() <= max
        && value.bytes().all(inner)
        && !value.starts_with('-')
        && !value.ends_with('-')
}

/// Node names are those of Kubernetes nodes: DNS subdomains, which may have dots.
fn is_node_name(value: &str) -> bool {
    value.len() <= 63 && value.split('.').all(|label| is_dns_label(label, 63))
}

fn is_command_id(value: &str) -> bool {
    (1..=128).contains(&value.len()) && value.bytes().all(|b| b.is_ascii_alphanumeric() || b"._:/-".contains(&b))
}

fn is_uid(value: &str) -> bool {
    value.len() == 36
        && value.bytes().enumerate().all(|(i, b)| match i {
            8 | 13 | 18 | 23 => b == b'-',
            _ => b.is_ascii_digit() || (b'a'..=b'f').contains(&b),
        })
}

macro_rules! checked_name {
    ($(#[$doc:meta])* $name:ident, $what:literal, $check:expr, $rule:literal, $max:literal, $pattern:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }

        impl FromStr for $name {
            type Err = NameError;

            fn from_str(value: &str) -> Result<Self, NameError> {
                Self::try_from(value.to_owned())
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;

            fn try_from(value: String) -> Result<Self, NameError> {
                if $check(&value) {
                    Ok(Self(value))
                } else {
                    Err(NameError { what: $what, value: shown(&value), rule: $rule })
                }
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> String {
                name.0
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
                json_schema!({ "type": "string", "maxLength": $max, "pattern": $pattern })
            }
        }
    };
}

checked_name!(
    /// Name of a Node, also of the host in the cluster. Never reused after retirement.
    NodeId,
    "node id",
    is_node_name,
    "must be at most 63 characters of a-z, 0-9, '-' and '.', each label beginning and ending with a letter or digit",
    63,
    r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
);
checked_name!(
    /// Name of a StoragePool; hosts that declare the same id and carry the same marker share the pool.
    PoolId,
    "pool id",
    |value: &str| is_dns_label(value, 63),
    "must be at most 63 characters of a-z, 0-9 and '-', beginning and ending with a letter or digit",
    63,
    "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
);
checked_name!(
    /// Chosen by the caller of a write; the same id with the same content is answered with the
    /// stored result, with another content it is refused.
    CommandId,
    "command id",
    is_command_id,
    "must be 1 to 128 characters of A-Z, a-z, 0-9, '.', '_', ':', '/' and '-'",
    128,
    "^[A-Za-z0-9._:/-]+$"
);
checked_name!(
    /// `metadata.uid` of the object whose bytes live in a pool: a Volume, or a Workspace for its
    /// writable layer. Also the name of the object's directory.
    ObjectUid,
    "object uid",
    is_uid,
    "must be a UUID in lower case",
    36,
    "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked_where_they_enter() {
        for good in ["a", "node-1", "rack1.node-2", "0"] {
            assert!(good.parse::<NodeId>().is_ok(), "{good}");
        }
        let long = "a".repeat(64);
        for bad in ["", "-a", "a-", "A", "a..b", ".a", "a_b", "a/b", "..", long.as_str()] {
            assert!(bad.parse::<NodeId>().is_err(), "{bad}");
        }
        for bad in ["", "a.b", "../a", "a/b"] {
            assert!(bad.parse::<PoolId>().is_err(), "{bad}");
        }
        assert!("move-a/stop".parse::<CommandId>().is_ok());
        assert!("a b".parse::<CommandId>().is_err());
        assert!("6f9619ff-8b86-d011-b42d-00c04fc964ff".parse::<ObjectUid>().is_ok());
        assert!("6f9619ff-8b86-d011-b42d-00c04fc964f/".parse::<ObjectUid>().is_err());
    }

    #[test]
    fn the_error_names_field_value_and_rule() {
        let error = "a b".parse::<PoolId>().unwrap_err().to_string();
        assert!(error.contains("pool id") && error.contains("\"a b\"") && error.contains("must be"), "{error}");
    }
}
