//! Words and figures as kibo shows them.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kibo_crds::{Bytes, MilliCpu};
use serde::Serialize;

/// What stands where there is nothing to show.
pub const ABSENT: &str = "-";

/// The upper-case word for a word of the Kubernetes API: `ResourceExhausted` is `RESOURCE_EXHAUSTED`.
/// The only place where the two spellings meet.
pub fn word(camel: &str) -> String {
    let mut upper = String::with_capacity(camel.len() + 4);
    let mut previous_is_lower = false;
    for c in camel.chars() {
        if c.is_ascii_uppercase() && previous_is_lower {
            upper.push('_');
        }
        previous_is_lower = c.is_ascii_lowercase() || c.is_ascii_digit();
        upper.push(c.to_ascii_uppercase());
    }
    upper
}

/// The upper-case word for a value of one of the contract's enums.
pub fn enum_word<T: Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(camel)) => word(&camel),
        _ => ABSENT.to_owned(),
    }
}

/// Shows what there is, or the sign for nothing.
pub fn or_absent<T: ToString>(value: Option<T>) -> String {
    value.map(|value| value.to_string()).filter(|text| !text.is_empty()).unwrap_or_else(|| ABSENT.to_owned())
}

/// CPU in cores, without zeros at the end: `0.5`, `2`.
pub fn cores(cpu: MilliCpu) -> String {
    let text = format!("{}.{:03}", cpu.0 / 1000, cpu.0 % 1000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Bytes in the largest binary unit that they fill, with one decimal place: `1.5Gi`.
pub fn binary(bytes: Bytes) -> String {
    let units = ["B", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let mut unit = 0;
    while unit + 1 < units.len() && bytes.0 >> (10 * (unit + 1)) > 0 {
        unit += 1;
    }
    if unit == 0 {
        return bytes.0.to_string();
    }
    // In tenths, rounded; what rounds up to 1024 belongs to the next unit.
    let scale = 1u128 << (10 * unit);
    let tenths = (u128::from(bytes.0) * 10 + scale / 2) / scale;
    if tenths >= 10_240 && unit + 1 < units.len() {
        return format!("1.0{}", units[unit + 1]);
    }
    format!("{}.{}{}", tenths / 10, tenths % 10, units[unit])
}

/// A time span as kubectl shows ages: two units while the second one matters.
pub fn span(seconds: i64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    let two = |big: i64, unit: &str, small: i64, small_unit: &str| {
        if small == 0 { format!("{big}{unit}") } else { format!("{big}{unit}{small}{small_unit}") }
    };
    match () {
        () if seconds < 0 => "0s".to_owned(),
        () if seconds < 120 => format!("{seconds}s"),
        () if minutes < 10 => two(minutes, "m", seconds % 60, "s"),
        () if minutes < 180 => format!("{minutes}m"),
        () if hours < 8 => two(hours, "h", minutes % 60, "m"),
        () if hours < 48 => format!("{hours}h"),
        () if days < 8 => two(days, "d", hours % 24, "h"),
        () if days < 730 => format!("{days}d"),
        () => two(days / 365, "y", days % 365, "d"),
    }
}

/// How long ago `time` was.
pub fn age(time: Option<&Time>, now: Timestamp) -> String {
    or_absent(time.map(|time| span(now.duration_since(time.0).as_secs())))
}

/// How long ago a time was, `5m ago`; wide, with the time itself: `5m ago (2026-11-29T19:00:00Z)`.
pub fn when(time: Option<&Time>, now: Timestamp, wide: bool) -> String {
    let ago = |time| format!("{} ago", age(Some(time), now));
    or_absent(time.map(|time| if wide { format!("{} ({})", ago(time), instant(time)) } else { ago(time) }))
}

/// A time to the second, in UTC.
pub fn instant(time: &Time) -> String {
    time.0.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use kibo_crds::{
        CommandResult,
        node::{Admission, HolderEnd, NodePhase},
        volume::VolumePhase,
        workspace::{PowerState, StopMode, WhenUnplaceable, WorkspacePhase},
    };

    use super::*;

    #[test]
    fn every_enum_word_has_its_upper_case_form() {
        use WorkspacePhase as W;
        let words: Vec<_> = [W::Creating, W::Starting, W::Available, W::Stopping, W::Stopped, W::Failed, W::Deleting]
            .iter()
            .map(enum_word)
            .collect();
        assert_eq!(words, ["CREATING", "STARTING", "AVAILABLE", "STOPPING", "STOPPED", "FAILED", "DELETING"]);
        assert_eq!(enum_word(&NodePhase::NotReady), "NOT_READY");
        assert_eq!(enum_word(&NodePhase::Drained), "DRAINED");
        assert_eq!(enum_word(&Admission::Admitted), "ADMITTED");
        assert_eq!(enum_word(&VolumePhase::Bound), "BOUND");
        assert_eq!(enum_word(&HolderEnd::IncarnationEnded), "INCARNATION_ENDED");
        assert_eq!(enum_word(&PowerState::Running), "RUNNING");
        assert_eq!(enum_word(&StopMode::Force), "FORCE");
        assert_eq!(enum_word(&WhenUnplaceable::Fail), "FAIL");
        assert_eq!(enum_word(&CommandResult::Processing), "PROCESSING");
        assert_eq!(word("ResourceExhausted"), "RESOURCE_EXHAUSTED");
        assert_eq!(word("OOMKilled"), "OOMKILLED");
    }

    #[test]
    fn amounts_are_shown_in_cores_and_in_the_largest_binary_unit() {
        for (milli, text) in [(0, "0"), (1, "0.001"), (500, "0.5"), (2000, "2"), (1250, "1.25"), (10_000, "10")] {
            assert_eq!(cores(MilliCpu(milli)), text);
        }
        let table = [
            (0, "0"),
            (1023, "1023"),
            (1024, "1.0Ki"),
            (256 << 20, "256.0Mi"),
            (3 << 29, "1.5Gi"),
            ((1 << 30) - 1, "1.0Gi"),
            (u64::MAX, "16.0Ei"),
        ];
        for (bytes, text) in table {
            assert_eq!(binary(Bytes(bytes)), text);
        }
    }

    #[test]
    fn a_time_is_said_by_its_distance() {
        let (time, now) = (Time(Timestamp::UNIX_EPOCH), Timestamp::from_second(300).unwrap());
        assert_eq!(when(Some(&time), now, false), "5m ago");
        assert_eq!(when(Some(&time), now, true), "5m ago (1970-01-01T00:00:00Z)");
        assert_eq!(when(None, now, true), ABSENT);
    }

    #[test]
    fn ages_read_like_those_of_kubectl() {
        let table = [
            (-5, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (125, "2m5s"),
            (600, "10m"),
            (3 * 3600, "3h"),
            (3 * 3600 + 300, "3h5m"),
            (9 * 3600, "9h"),
            (50 * 3600, "2d2h"),
            (9 * 86_400, "9d"),
            (800 * 86_400, "2y70d"),
        ];
        for (seconds, text) in table {
            assert_eq!(span(seconds), text, "{seconds}");
        }
    }
}
