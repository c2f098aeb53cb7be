//! Shares of a whole as people read them, without floats.

use std::{borrow::Cow, fmt, str::FromStr};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::decimal;

/// A share in percent with at most two decimal places, 0 to 100; kept in hundredths.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Percent(u16);

/// A string that is no percentage.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("invalid percentage {0:?}: must be a decimal from 0 to 100 with at most two decimal places, such as \"12.5\"")]
pub struct PercentError(String);

impl Percent {
    const MAX_HUNDREDTHS: u16 = 10_000;

    /// A share of this many hundredths of a percent; `None` beyond 10000.
    pub fn from_hundredths(hundredths: u32) -> Option<Self> {
        u16::try_from(hundredths).ok().filter(|it| *it <= Self::MAX_HUNDREDTHS).map(Self)
    }

    /// `part` of `whole`, rounded down; `None` where that is no share: of nothing, or of less than itself.
    pub fn of(part: u64, whole: u64) -> Option<Self> {
        let hundredths = u128::from(part) * u128::from(Self::MAX_HUNDREDTHS);
        u32::try_from(hundredths.checked_div(u128::from(whole))?).ok().and_then(Self::from_hundredths)
    }

    /// The share in hundredths of a percent, 0 to 10000.
    pub fn hundredths(self) -> u32 {
        u32::from(self.0)
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&decimal::show(self.0, 2))
    }
}

impl fmt::Debug for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Percent {
    type Err = PercentError;

    fn from_str(text: &str) -> Result<Self, PercentError> {
        let percent = decimal::read(text, 3, 2).and_then(Self::from_hundredths);
        percent.ok_or_else(|| PercentError(text.to_owned()))
    }
}

impl TryFrom<String> for Percent {
    type Error = PercentError;

    fn try_from(text: String) -> Result<Self, PercentError> {
        text.parse()
    }
}

impl From<Percent> for String {
    fn from(percent: Percent) -> String {
        percent.to_string()
    }
}

impl JsonSchema for Percent {
    fn schema_name() -> Cow<'static, str> {
        "Percent".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "maxLength": 6,
            "pattern": r"^([0-9]{1,2}([.][0-9]{1,2})?|100([.]0{1,2})?)$",
            "description": "A share in percent, 0 to 100 with at most two decimal places, as a string.",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_are_read_and_written_exactly() {
        for (text, hundredths, shown) in
            [("0", 0, "0"), ("100", 10_000, "100"), ("12.5", 1250, "12.5"), ("0.01", 1, "0.01"), ("7.00", 700, "7")]
        {
            let percent: Percent = text.parse().unwrap();
            assert_eq!((percent.hundredths(), percent.to_string().as_str()), (hundredths, shown));
        }
        for bad in ["", "100.01", "101", "-1", "1.234", ".5", "1.", "1e1", "NaN"] {
            assert!(bad.parse::<Percent>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_share_never_wraps_and_is_none_of_nothing() {
        assert_eq!(Percent::of(1, 3).unwrap().to_string(), "33.33");
        assert_eq!(Percent::of(u64::MAX, u64::MAX).unwrap().to_string(), "100");
        assert_eq!(Percent::of(1, 0), None);
        assert_eq!(Percent::of(2, 1), None);
    }
}
