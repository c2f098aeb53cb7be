//! What the API server wrote down about the operator: a right that the chart forgets shows here,
//! also where the operator only tries again later.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::local::{Layout, NAMESPACE};

/// Fails when the operator was ever refused for want of a right.
pub(super) fn operator_was_never_refused(layout: &Layout) -> Result<()> {
    let log = layout.audit_log();
    let text = fs::read_to_string(&log).with_context(|| format!("failed to read {}", log.display()))?;
    let operator = format!("system:serviceaccount:{NAMESPACE}:kibotos-operator");
    let refused: BTreeSet<String> = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|entry| entry["user"]["username"] == operator.as_str() && is_refused(entry))
        .map(|entry| {
            format!("{} {}", entry["verb"].as_str().unwrap_or("?"), entry["requestURI"].as_str().unwrap_or("?"))
        })
        .collect();
    ensure!(refused.is_empty(), "the operator lacks rights for:\n  {}", Vec::from_iter(refused).join("\n  "));
    Ok(())
}

/// Forbidden by RBAC; a policy that refuses an object says so in another way.
fn is_refused(entry: &Value) -> bool {
    entry["responseStatus"]["code"] == 403
        && entry["annotations"]["authorization.k8s.io/decision"].as_str() != Some("allow")
}
