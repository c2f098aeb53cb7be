//! Manifests for `create -f`: one object of the expected kind, with mistakes explained before they
//! reach the API server.

use std::{fs, io::Read as _, path::Path};

use kube::Resource;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::errors::{Error, Result};

/// Reads one object from a YAML or JSON file; `-` is standard input.
pub fn read<K>(path: &Path) -> Result<K>
where
    K: Resource<DynamicType = ()> + DeserializeOwned,
{
    let text = if path == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map(|_| text)
    } else {
        fs::read_to_string(path)
    };
    let shown = path.display();
    let text = text.map_err(|error| Error::invalid(format!("cannot read {shown}: {error}")))?;
    let value: Value = serde_yaml::from_str(&text)
        .map_err(|error| Error::invalid(format!("{shown} must be one YAML document: {error}")).next(apply(path)))?;
    parse(value).map_err(|error| match error {
        Mistake::Kind(message) => Error::invalid(format!("{shown} {message}")).next(apply(path)),
        Mistake::Content(message) => Error::invalid(format!("{shown}: {message}")),
    })
}

/// What reads every manifest.
fn apply(path: &Path) -> String {
    format!("for several objects, or other kinds: kubectl apply -f {}", path.display())
}

/// What is wrong with a manifest.
#[derive(Debug, PartialEq, Eq)]
enum Mistake {
    /// It is about something else.
    Kind(String),
    Content(String),
}

fn parse<K>(value: Value) -> Result<K, Mistake>
where
    K: Resource<DynamicType = ()> + DeserializeOwned,
{
    let found = |key| value.get(key).and_then(Value::as_str).unwrap_or("nothing").to_owned();
    let (version, kind) = (K::api_version(&()), K::kind(&()));
    if found("apiVersion") != version || found("kind") != kind {
        let found = (found("apiVersion"), found("kind"));
        return Err(Mistake::Kind(format!("must be apiVersion {version}, kind {kind}, not {}, {}", found.0, found.1)));
    }
    if let Some((path, number)) = fraction(&value, String::new()) {
        let field = path.rsplit('.').next().unwrap_or(&path);
        return Err(Mistake::Content(format!(
            "{path}: YAML makes a number of {number}: write it in quotes, {field}: \"{number}\""
        )));
    }
    serde_json::from_value(value).map_err(|error| Mistake::Content(error.to_string()))
}

/// The first fraction: the contract has none, a quantity without quotes becomes one.
fn fraction(value: &Value, path: String) -> Option<(String, f64)> {
    let under = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    match value {
        Value::Number(number) if number.is_f64() => Some((path, number.as_f64()?)),
        Value::Object(fields) => fields.iter().find_map(|(key, value)| fraction(value, under(key))),
        Value::Array(items) => items.iter().enumerate().find_map(|(i, item)| fraction(item, format!("{path}[{i}]"))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use kibo_crds::Template;

    use super::*;

    fn template(cpu: &str) -> Result<Template, Mistake> {
        let text = format!(
            "
apiVersion: kibotos.dev/v1alpha1
kind: Template
metadata: {{ name: t }}
spec: {{ rootImage: debian-12, resources: {{ cpu: {cpu}, memory: 256Mi }}, writableLayer: {{ size: 1Gi }} }}
"
        );
        parse(serde_yaml::from_str(&text).unwrap())
    }

    #[test]
    fn a_manifest_is_read() {
        assert_eq!(template("2").unwrap().spec.resources.cpu.to_string(), "2");
    }

    #[test]
    fn a_fraction_without_quotes_is_explained() {
        let message = "spec.resources.cpu: YAML makes a number of 0.5: write it in quotes, cpu: \"0.5\"";
        assert_eq!(template("0.5"), Err(Mistake::Content(message.to_owned())));
    }

    #[test]
    fn another_kind_is_refused() {
        let pod = serde_json::json!({ "apiVersion": "v1", "kind": "Pod" });
        let message = "must be apiVersion kibotos.dev/v1alpha1, kind Template, not v1, Pod";
        assert_eq!(parse::<Template>(pod), Err(Mistake::Kind(message.to_owned())));
    }
}
