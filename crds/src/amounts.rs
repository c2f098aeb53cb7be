//! Amounts of CPU, memory and disk: Kubernetes quantities outside, whole integers inside.

use std::{borrow::Cow, fmt, str::FromStr};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

const MIB: u64 = 1 << 20;

/// CPU in thousandths of a core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MilliCpu(pub u64);

/// Memory or disk space in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

/// A quantity that cannot be used as the amount that it stands for.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("invalid quantity {value:?}: {rule}")]
pub struct AmountError {
    value: String,
    rule: &'static str,
}

/// Multiplier of a quantity's suffix in thousandths, as Kubernetes defines them.
fn suffix_thousandths(suffix: &str) -> Option<u128> {
    let decimal = |power: u32| 1000u128.pow(power) * 1000;
    let binary = |power: u32| 1024u128.pow(power) * 1000;
    Some(match suffix {
        "m" => 1,
        "" => decimal(0),
        "k" => decimal(1),
        "M" => decimal(2),
        "G" => decimal(3),
        "T" => decimal(4),
        "P" => decimal(5),
        "E" => decimal(6),
        "Ki" => binary(1),
        "Mi" => binary(2),
        "Gi" => binary(3),
        "Ti" => binary(4),
        "Pi" => binary(5),
        "Ei" => binary(6),
        exponent => {
            let power: u32 = exponent.strip_prefix(['e', 'E'])?.parse().ok().filter(|p| *p <= 18)?;
            10u128.pow(power) * 1000
        }
    })
}

/// Reads a Kubernetes quantity as whole thousandths; a part below that is refused, not rounded.
fn thousandths(text: &str) -> Result<u64, AmountError> {
    let error = |rule| AmountError { value: text.to_owned(), rule };
    let malformed = "must be a Kubernetes quantity, such as 500m, 2, 512Mi or 1.5Gi";
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, places) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && places.is_empty()) || whole.len() > 19 || places.len() > 9 || places.contains('.') {
        return Err(error(malformed));
    }
    let scale = 10u128.pow(u32::try_from(places.len()).map_err(|_| error(malformed))?);
    let digits: u128 = format!("{whole}{places}").parse().map_err(|_| error(malformed))?;
    let multiplier = suffix_thousandths(suffix).ok_or_else(|| error(malformed))?;
    let scaled = digits.checked_mul(multiplier).ok_or_else(|| error("is too large"))?;
    if scaled % scale != 0 {
        return Err(error("must be a whole number of thousandths"));
    }
    u64::try_from(scaled / scale).map_err(|_| error("is too large"))
}

impl FromStr for MilliCpu {
    type Err = AmountError;

    fn from_str(text: &str) -> Result<Self, AmountError> {
        thousandths(text).map(Self)
    }
}

impl FromStr for Bytes {
    type Err = AmountError;

    fn from_str(text: &str) -> Result<Self, AmountError> {
        let thousandths = thousandths(text)?;
        if thousandths % 1000 != 0 {
            return Err(AmountError { value: text.to_owned(), rule: "must be a whole number of bytes" });
        }
        Ok(Self(thousandths / 1000))
    }
}

impl fmt::Display for MilliCpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_multiple_of(1000) { f.pad(&(self.0 / 1000).to_string()) } else { f.pad(&format!("{}m", self.0)) }
    }
}

impl fmt::Display for Bytes {
    /// The exact amount with the largest binary unit that divides it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units =
            [(1u64 << 60, "Ei"), (1 << 50, "Pi"), (1 << 40, "Ti"), (1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")];
        match units.iter().find(|(unit, _)| self.0 != 0 && self.0.is_multiple_of(*unit)) {
            Some((unit, suffix)) => f.pad(&format!("{}{suffix}", self.0 / unit)),
            None => f.pad(&self.0.to_string()),
        }
    }
}

impl MilliCpu {
    /// Virtual CPUs that a guest with this amount sees: rounded up to whole ones, at least one.
    pub fn vcpus(self) -> u64 {
        self.0.div_ceil(1000).max(1)
    }

    pub fn checked_add(self, other: Self) -> Option<Self> {
        self.0.checked_add(other.0).map(Self)
    }

    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl Bytes {
    pub const fn mib(mib: u32) -> Self {
        Self(mib as u64 * MIB)
    }

    pub fn checked_add(self, other: Self) -> Option<Self> {
        self.0.checked_add(other.0).map(Self)
    }

    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// Whole MiB, or `None` when a part is left over.
    pub fn as_mib(self) -> Option<u64> {
        self.0.is_multiple_of(MIB).then_some(self.0 / MIB)
    }
}

impl JsonSchema for MilliCpu {
    fn schema_name() -> Cow<'static, str> {
        "MilliCpu".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "integer", "format": "int64", "minimum": 0 })
    }
}

impl JsonSchema for Bytes {
    fn schema_name() -> Cow<'static, str> {
        "Bytes".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "integer", "format": "int64", "minimum": 0 })
    }
}

/// The text of a quantity as its author wrote it; numbers are taken too, since YAML makes one of `cpu: 2`.
fn quantity_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum IntOrString {
        Int(u64),
        String(String),
    }
    Ok(match IntOrString::deserialize(deserializer)? {
        IntOrString::Int(number) => number.to_string(),
        IntOrString::String(text) => text,
    })
}

/// CEL that holds for a quantity between two others; `self` may be a number or a string.
fn bounds(what: &str, min: &str, max: &str, step: Option<(&str, &str)>) -> serde_json::Value {
    let quantity = "isQuantity(string(self))";
    let mut rules = vec![
        serde_json::json!({
            "rule": quantity,
            "message": format!("{what} must be a quantity such as 500m, 2, 512Mi or 10Gi; write fractions in quotes"),
            "reason": "FieldValueInvalid",
        }),
        serde_json::json!({
            "rule": format!("!{quantity} || quantity(string(self)).compareTo(quantity('{min}')) >= 0"),
            "message": format!("{what} must be at least {min}"),
            "reason": "FieldValueInvalid",
        }),
        serde_json::json!({
            "rule": format!("!{quantity} || quantity(string(self)).compareTo(quantity('{max}')) <= 0"),
            "message": format!("{what} must be at most {max}"),
            "reason": "FieldValueInvalid",
        }),
    ];
    if let Some((rule, message)) = step {
        rules.push(serde_json::json!({
            "rule": format!("!{quantity} || {rule}"),
            "message": format!("{what} must be {message}"),
            "reason": "FieldValueInvalid",
        }));
    }
    serde_json::Value::Array(rules)
}

fn quantity_schema(description: &str, rules: serde_json::Value) -> Schema {
    let mut schema = json_schema!({
        "description": description,
        "x-kubernetes-int-or-string": true,
        "maxLength": 32,
    });
    schema.insert("x-kubernetes-validations".into(), rules);
    schema
}

/// CEL does not take 1.5Gi for an integer; its approximation is exact for every size in bounds.
const WHOLE_MIB: (&str, &str) = (
    "(quantity(string(self)).isInteger() ? quantity(string(self)).asInteger() % 1048576 == 0 \
     : quantity(string(self)).asApproximateFloat() / 1048576.0 \
     == double(int(quantity(string(self)).asApproximateFloat() / 1048576.0)))",
    "a whole number of MiB",
);

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident => $amount:ty, $schema:expr) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Serialize)]
        #[serde(transparent)]
        pub struct $name(String);

        impl $name {
            /// The amount; fails only for text that the API server would have refused.
            pub fn amount(&self) -> Result<$amount, AmountError> {
                self.0.parse()
            }
        }

        impl From<$amount> for $name {
            fn from(amount: $amount) -> Self {
                Self(amount.to_string())
            }
        }

        impl FromStr for $name {
            type Err = AmountError;

            fn from_str(text: &str) -> Result<Self, AmountError> {
                text.parse::<$amount>()?;
                Ok(Self(text.to_owned()))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                quantity_text(deserializer)?.parse().map_err(D::Error::custom)
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
                $schema
            }
        }
    };
}

quantity!(
    /// CPU of a guest: 1m to 1024 cores.
    CpuQuantity => MilliCpu,
    quantity_schema(
        "CPU in cores or millicores (500m); the guest sees it rounded up to whole vCPUs.",
        bounds("cpu", "1m", "1024", Some((
            "(quantity(string(self)).isInteger() || string(self).matches('^[0-9]+m$') || string(self).matches('^[0-9]*[.][0-9]{1,3}$'))",
            "a whole number of millicores",
        ))),
    )
);
quantity!(
    /// Memory of a guest: 128Mi to 16Ti, whole MiB.
    MemoryQuantity => Bytes,
    quantity_schema("Memory of the guest, whole MiB.", bounds("memory", "128Mi", "16Ti", Some(WHOLE_MIB)))
);
quantity!(
    /// Size of a disk image: 16Mi to 64Ti, whole MiB.
    SizeQuantity => Bytes,
    quantity_schema("Size of the disk, whole MiB.", bounds("size", "16Mi", "64Ti", Some(WHOLE_MIB)))
);
quantity!(
    /// What may be allocated in a storage pool: 16Mi to 4Pi, whole MiB.
    CapacityQuantity => Bytes,
    quantity_schema("Size of all disks together, whole MiB.", bounds("capacity", "16Mi", "4Pi", Some(WHOLE_MIB)))
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_exactly() {
        for (text, milli) in [("1", 1000), ("500m", 500), ("0.5", 500), ("1.25", 1250), ("1e3", 1_000_000), (".5", 500)]
        {
            assert_eq!(text.parse(), Ok(MilliCpu(milli)), "{text}");
        }
        for (text, bytes) in [("128Mi", 128 << 20), ("1.5Gi", 3 << 29), ("1k", 1000), ("0.5Ki", 512), ("1000m", 1)] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_quantity_is_refused() {
        for bad in [
            "",
            ".",
            "m",
            "1.5.5",
            "-1",
            "1 Gi",
            "1Zi",
            "0x10",
            "1e99",
            "99999999999999999999",
            "16Ei1",
            "NaN",
            "0.0001",
        ] {
            assert!(bad.parse::<MilliCpu>().is_err(), "{bad}");
        }
        assert!("500m".parse::<Bytes>().is_err());
    }

    #[test]
    fn the_largest_unit_that_divides_is_shown() {
        assert_eq!(Bytes(3 << 29).to_string(), "1536Mi");
        assert_eq!(Bytes::mib(1024).to_string(), "1Gi");
        assert_eq!(Bytes(0).to_string(), "0");
        assert_eq!(MilliCpu(1500).to_string(), "1500m");
        assert_eq!(MilliCpu(2000).to_string(), "2");
    }

    #[test]
    fn a_guest_sees_whole_vcpus() {
        assert_eq!(MilliCpu(1).vcpus(), 1);
        assert_eq!(MilliCpu(1000).vcpus(), 1);
        assert_eq!(MilliCpu(1001).vcpus(), 2);
    }

    #[test]
    fn numbers_in_yaml_are_quantities_too() {
        assert_eq!(serde_json::from_str::<CpuQuantity>("2").unwrap().amount(), Ok(MilliCpu(2000)));
        assert!(serde_json::from_str::<CpuQuantity>("\"x\"").is_err());
    }
}
