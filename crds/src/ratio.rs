//! Overcommit ratios, in integer arithmetic from end to end.

use std::{borrow::Cow, fmt, str::FromStr};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::{Bytes, MilliCpu, decimal};

/// A decimal of at most three places, 0 to 16; kept in thousandths.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Ratio(u16);

/// A string that is not a ratio.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("invalid ratio {0:?}: must be a decimal from 0 to 16 with at most three decimal places, such as \"2.5\"")]
pub struct RatioError(String);

impl Ratio {
    pub const ONE: Self = Self(1000);
    const MAX_THOUSANDTHS: u16 = 16_000;

    /// The ratio in thousandths, 0 to 16000.
    pub fn thousandths(self) -> u32 {
        u32::from(self.0)
    }

    /// A ratio of this many thousandths; `None` beyond 16000.
    pub fn from_thousandths(thousandths: u32) -> Option<Self> {
        u16::try_from(thousandths).ok().filter(|t| *t <= Self::MAX_THOUSANDTHS).map(Self)
    }

    fn scale(self, amount: u64) -> u64 {
        // 64 + 14 bits fit in 128; what a host of this world reports times 16 fits in 64 again.
        let scaled = u128::from(amount) * u128::from(self.0) / 1000;
        u64::try_from(scaled).unwrap_or(u64::MAX)
    }

    /// `amount` times the ratio, rounded down to whole millicores.
    pub fn of_cpu(self, amount: MilliCpu) -> MilliCpu {
        MilliCpu(self.scale(amount.0))
    }

    /// `amount` times the ratio, rounded down to whole bytes.
    pub fn of_memory(self, amount: Bytes) -> Bytes {
        Bytes(self.scale(amount.0))
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&decimal::show(self.0, 3))
    }
}

impl fmt::Debug for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Ratio {
    type Err = RatioError;

    fn from_str(text: &str) -> Result<Self, RatioError> {
        let ratio = decimal::read(text, 2, 3).and_then(Self::from_thousandths);
        ratio.ok_or_else(|| RatioError(text.to_owned()))
    }
}

impl TryFrom<String> for Ratio {
    type Error = RatioError;

    fn try_from(text: String) -> Result<Self, RatioError> {
        text.parse()
    }
}

impl From<Ratio> for String {
    fn from(ratio: Ratio) -> String {
        ratio.to_string()
    }
}

impl JsonSchema for Ratio {
    fn schema_name() -> Cow<'static, str> {
        "Ratio".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "maxLength": 6,
            "description": "A decimal from 0 to 16 with at most three decimal places, as a string.",
            "x-kubernetes-validations": [{
                "rule": r"self.matches('^(([0-9]|1[0-5])([.][0-9]{1,3})?|16([.]0{1,3})?)$')",
                "message": "must be a decimal from 0 to 16 with at most three decimal places, such as \"2.5\"",
                "reason": "FieldValueInvalid",
            }],
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against integers in which nothing can wrap.
        #[test]
        fn an_amount_is_scaled_exactly_and_rounded_down(amount: u64, thousandths in 0_u32..=16_000) {
            let ratio = Ratio::from_thousandths(thousandths).unwrap();
            let exact = u128::from(amount) * u128::from(thousandths) / 1000;
            prop_assert_eq!(u128::from(ratio.of_memory(Bytes(amount)).0), exact.min(u128::from(u64::MAX)));
            prop_assert_eq!(ratio.of_cpu(MilliCpu(amount)).0, ratio.of_memory(Bytes(amount)).0);
            prop_assert_eq!(ratio.to_string().parse::<Ratio>().unwrap(), ratio);
        }
    }

    #[test]
    fn ratios_are_read_and_written_exactly() {
        for (text, thousandths, shown) in [
            ("16", 16000, "16"),
            ("0", 0, "0"),
            ("2.5", 2500, "2.5"),
            ("0.001", 1, "0.001"),
            ("16.000", 16000, "16"),
            ("1.10", 1100, "1.1"),
        ] {
            let ratio: Ratio = text.parse().unwrap();
            assert_eq!(ratio.thousandths(), thousandths);
            assert_eq!(ratio.to_string(), shown);
        }
        for bad in ["16.001", "1.0001", "-1", "1e3", "", "NaN", "1.", ".5", "017", "100", "+1", "1,5"] {
            assert!(bad.parse::<Ratio>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_extremes_neither_wrap_nor_panic() {
        let max: Ratio = "16".parse().unwrap();
        assert_eq!(max.of_memory(Bytes(1 << 53)), Bytes(1 << 57));
        assert_eq!(max.of_cpu(MilliCpu(u64::MAX)), MilliCpu(u64::MAX));
        assert_eq!("0.9".parse::<Ratio>().unwrap().of_cpu(MilliCpu(1)), MilliCpu(0));
    }
}
