//! The keys and tokens of nodes: in files that nobody else may read, and in no log, in whatever spelling.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use kibo_protocol::{EnrollmentToken, Secret};
use regex::bytes::RegexBuilder;
use serde_json::Value;

use crate::local::Layout;

/// Secrets that no file of the cluster holds: of hosts that a test plays by hand.
static PLAYED: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// At the end of the suite this must be in no log.
pub fn remember(secret: &[u8]) {
    PLAYED.lock().unwrap_or_else(PoisonError::into_inner).push(secret.to_vec());
}

/// Fails when others may read a secret of a node, or when one is in a log.
pub(super) fn are_kept(layout: &Layout) -> Result<()> {
    let mut secrets = PLAYED.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for node in directories_in(&layout.nodes())? {
        let (key, token) = (node.join("state/credentials.json"), node.join("enroll.token"));
        for path in [&key, &token].into_iter().filter(|path| path.exists()) {
            let mode = fs::metadata(path)?.permissions().mode() & 0o777;
            ensure!(mode == 0o600, "{} has mode {mode:o}, not 600", path.display());
        }
        if let Ok(text) = fs::read_to_string(&key) {
            let stored: Value = serde_json::from_str(&text)?;
            secrets.push(STANDARD.decode(stored["key"].as_str().context("a key")?)?);
        }
        if let Ok(token) = fs::read_to_string(&token).unwrap_or_default().parse::<EnrollmentToken>() {
            secrets.push(token.secret.expose().to_vec());
        }
    }
    are_in_no_log(layout, &secrets)
}

fn are_in_no_log(layout: &Layout, secrets: &[Vec<u8>]) -> Result<()> {
    if secrets.is_empty() {
        return Ok(());
    }
    let all: Vec<String> = secrets.iter().flat_map(|secret| spellings(secret)).collect();
    let pattern = RegexBuilder::new(&all.join("|")).unicode(false).size_limit(256 << 20).build()?;
    for log in logs_of(layout)? {
        let text = fs::read(&log).with_context(|| format!("failed to read {}", log.display()))?;
        let Some(found) = pattern.find(&text) else { continue };
        let line = text[..found.start()].split(|byte| *byte == b'\n').count();
        anyhow::bail!("a secret of a node is in line {line} of {}", log.display());
    }
    Ok(())
}

/// How a secret could get into a text, as patterns.
fn spellings(secret: &[u8]) -> Vec<String> {
    let hexadecimal = hexadecimal(secret);
    // As Rust prints bytes; eight of them are no accident.
    let numbers = secret.iter().take(8).map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let mut texts = vec![STANDARD_NO_PAD.encode(secret), URL_SAFE_NO_PAD.encode(secret), hexadecimal, numbers];
    texts.extend(std::str::from_utf8(secret).map(str::to_owned));
    texts.iter().map(|text| regex::escape(text)).collect()
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .filter_map(|digit| char::from_digit(digit.into(), 16))
        .collect()
}

fn logs_of(layout: &Layout) -> Result<Vec<PathBuf>> {
    let mut places = vec![layout.root().to_owned(), layout.control_plane()];
    places.extend(directories_in(&layout.nodes())?);
    let mut logs = Vec::new();
    for place in places {
        for entry in fs::read_dir(&place)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "log") {
                logs.push(path);
            }
        }
    }
    Ok(logs)
}

fn directories_in(place: &Path) -> Result<Vec<PathBuf>> {
    if !place.exists() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(place)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    Ok(entries.into_iter().filter(|path| path.is_dir()).collect())
}

/// A secret of a host that a test plays.
pub fn generate() -> Result<Secret> {
    let secret = Secret::generate()?;
    remember(secret.expose());
    Ok(secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_found_in_every_spelling() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path().to_owned());
        fs::create_dir_all(layout.control_plane()).unwrap();
        let secret: Vec<u8> = (100..132).collect();
        let hexadecimal = hexadecimal(&secret);
        let log = layout.root().join("operator.log");
        for line in [STANDARD.encode(&secret), URL_SAFE_NO_PAD.encode(&secret), hexadecimal, format!("{secret:?}")] {
            fs::write(&log, format!("fine\nkey={line}\n")).unwrap();
            let error = are_in_no_log(&layout, std::slice::from_ref(&secret)).unwrap_err().to_string();
            assert!(error.contains("line 2 of") && !error.contains(&line), "{error}");
        }
        fs::write(&log, "fine\n").unwrap();
        are_in_no_log(&layout, &[secret]).unwrap();
    }
}
