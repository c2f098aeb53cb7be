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
    parse(&text).map_err(|message| {
        Error::invalid(format!("{shown}: {message}"))
            .next(format!("for several objects, or other kinds: kubectl apply -f {shown}"))
    })
}

fn parse<K>(text: &str) -> Result<K, String>
where
    K: Resource<DynamicType = ()> + DeserializeOwned,
{
    let value: Value = serde_yaml::from_str(text).map_err(|error| format!("must be one YAML document: {error}"))?;
    let found = |key| value.get(key).and_then(Value::as_str).unwrap_or("nothing").to_owned();
    let (version, kind) = (K::api_version(&()), K::kind(&()));
    if found("apiVersion") != version || found("kind") != kind {
        return Err(format!(
            "must be apiVersion {version}, kind {kind}, not {}, {}",
            found("apiVersion"),
            found("kind")
        ));
    }
    if let Some((path, number)) = fraction(&value, String::new()) {
        return Err(format!("{path}: YAML makes a number of {number}: write it in quotes, {path}: \"{number}\""));
    }
    serde_json::from_value(value).map_err(|error| error.to_string())
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

    const TEMPLATE: &str = "
apiVersion: kibotos.dev/v1alpha1
kind: Template
metadata: { name: t }
spec: { rootImage: debian-12, resources: { cpu: CPU, memory: 256Mi }, writableLayer: { size: 1Gi } }
";

    #[test]
    fn a_manifest_is_read() {
        let template: Template = parse(&TEMPLATE.replace("CPU", "2")).unwrap();
        assert_eq!(template.spec.resources.cpu.to_string(), "2");
    }

    #[test]
    fn a_fraction_without_quotes_is_explained() {
        let message = parse::<Template>(&TEMPLATE.replace("CPU", "0.5")).unwrap_err();
        assert_eq!(
            message,
            "spec.resources.cpu: YAML makes a number of 0.5: write it in quotes, spec.resources.cpu: \"0.5\""
        );
    }

    #[test]
    fn another_kind_is_refused() {
        let message = parse::<Template>("apiVersion: v1\nkind: Pod\n").unwrap_err();
        assert_eq!(message, "must be apiVersion kibotos.dev/v1alpha1, kind Template, not v1, Pod");
        assert!(parse::<Template>("a: 1\n---\nb: 2\n").unwrap_err().starts_with("must be one YAML document"));
    }
}
