//! kibo as a person types it, with what is expected of it.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::Place;

/// Runs kibo and checks its exit status, and that it says something. Gives back all that it says.
pub async fn said(place: &Place, args: &[&str], code: i32, says: &str) -> Result<String> {
    let ran = place.kibo(args).await?;
    let text = format!("{}{}", ran.stdout, ran.stderr);
    ensure!(ran.code == code && text.contains(says), "{args:?}: expected {code} and {says:?}: {ran:?}");
    Ok(text)
}

/// The result of a command that prints JSON.
pub async fn result(place: &Place, args: &[&str]) -> Result<Value> {
    let text = place.kibo(&[args, &["--json"]].concat()).await?.ok()?;
    let mut value: Value = serde_json::from_str(&text).with_context(|| format!("no JSON: {text}"))?;
    Ok(value["result"].take())
}
