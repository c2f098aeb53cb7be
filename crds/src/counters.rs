//! Counters that only grow. Each has a type of its own, so that one is never compared with another.

use std::{borrow::Cow, fmt};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// JSON numbers above 2^53 lose digits in some clients; no counter here comes near.
const MAX: u64 = 1 << 53;

macro_rules! counter {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// The next value, or `None` at the end of the range.
            pub fn next(self) -> Option<Self> {
                self.0.checked_add(1).filter(|next| *next <= MAX).map(Self)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
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
                json_schema!({ "type": "integer", "format": "int64", "minimum": 0, "maximum": MAX })
            }
        }
    };
}

counter!(
    /// Generation of the right to use one object. Grows with each grant, survives each release.
    Epoch
);
counter!(
    /// One life of a node's set of Instances. Grows when the node proved that none is left.
    Incarnation
);
impl Incarnation {
    /// Whether a node that lives or lived `lived` may have come as far as this, on whatever control planes.
    pub fn is_credible_after(self, lived: Self) -> bool {
        const FAR: u64 = 1 << 20;
        self.0.saturating_sub(lived.0) <= FAR
    }
}

counter!(
    /// Number of the leadership, from the Lease's transitions. A write of a lower term is refused.
    Term
);
counter!(
    /// Position of an event among those of one Instance; the first is 1.
    SequenceNumber
);
