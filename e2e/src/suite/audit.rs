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
    let entries = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let own = entries.filter(|entry| entry["user"]["username"] == operator.as_str());
    let (refused, allowed): (Vec<_>, Vec<_>) = own.partition(is_refused);
    let allowed: BTreeSet<String> = allowed.iter().map(right).collect();
    // An API server that has just started refuses rights that it has not read yet.
    let lacking: BTreeSet<String> = refused.iter().map(right).filter(|right| !allowed.contains(right)).collect();
    ensure!(lacking.is_empty(), "the operator lacks rights:\n  {}", Vec::from_iter(lacking).join("\n  "));
    Ok(())
}

/// What was asked for, as RBAC names it.
fn right(entry: &Value) -> String {
    let part = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let object = &entry["objectRef"];
    let resource = [part(&object["apiGroup"]), part(&object["resource"]), part(&object["subresource"])];
    match object["resource"].as_str() {
        Some(_) => format!("{} {}", part(&entry["verb"]), resource.join("/").trim_matches('/')),
        None => format!("{} {}", part(&entry["verb"]), part(&entry["requestURI"])),
    }
}

/// Forbidden by RBAC; a policy that refuses an object says so in another way.
fn is_refused(entry: &Value) -> bool {
    entry["responseStatus"]["code"] == 403
        && entry["annotations"]["authorization.k8s.io/decision"].as_str() != Some("allow")
}
