//! The YAML that is generated from the types: what `crds/yaml/` holds and the operator applies.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray,
};
use kube::CustomResourceExt;

use crate::{Node, OvercommitPolicy, StoragePool, Template, Volume, Workspace, WorkspaceTombstone, policy};

/// All custom resource definitions.
pub fn crds() -> Vec<CustomResourceDefinition> {
    let crds = [
        Node::crd(),
        StoragePool::crd(),
        OvercommitPolicy::crd(),
        Template::crd(),
        Workspace::crd(),
        Volume::crd(),
        WorkspaceTombstone::crd(),
    ];
    crds.into_iter().map(with_known_formats).map(with_one_writer).collect()
}

/// A status has one writer, so nobody shares it field by field. Said in the schema, the API server keeps no
/// record of who owns which field of it, which would be longer than the status itself.
fn with_one_writer(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    for schema in schemas(&mut crd) {
        if let Some(status) = schema.properties.as_mut().and_then(|properties| properties.get_mut("status")) {
            status.x_kubernetes_map_type = Some("atomic".to_owned());
        }
    }
    crd
}

fn schemas(crd: &mut CustomResourceDefinition) -> impl Iterator<Item = &mut JSONSchemaProps> {
    let versions = crd.spec.versions.iter_mut().filter_map(|version| version.schema.as_mut());
    versions.filter_map(|schema| schema.open_api_v3_schema.as_mut())
}

/// The API server warns about formats of unsigned integers, which it does not know.
fn with_known_formats(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    schemas(&mut crd).for_each(name_known_formats);
    crd
}

fn name_known_formats(schema: &mut JSONSchemaProps) {
    if matches!(schema.format.as_deref(), Some("uint16" | "uint32" | "uint64")) {
        schema.format = Some("int64".to_owned());
    }
    schema.properties.iter_mut().flatten().for_each(|(_, property)| name_known_formats(property));
    match &mut schema.items {
        Some(JSONSchemaPropsOrArray::Schema(items)) => name_known_formats(items),
        Some(JSONSchemaPropsOrArray::Schemas(items)) => items.iter_mut().for_each(name_known_formats),
        None => {}
    }
}

/// File name and content of every generated file.
pub fn files() -> Result<Vec<(String, String)>, serde_yaml::Error> {
    let mut files = Vec::new();
    for crd in crds() {
        files.push((format!("{}.yaml", crd.spec.names.plural), serde_yaml::to_string(&crd)?));
    }
    for policy in policy::all() {
        let name = policy.policy.metadata.name.clone().unwrap_or_default();
        let text =
            format!("{}---\n{}", serde_yaml::to_string(&policy.policy)?, serde_yaml::to_string(&policy.binding)?);
        files.push((format!("policy-{name}.yaml"), text));
    }
    let [policy, binding] = policy::own_new_workspaces().map(|optional| optional.object);
    let name = policy.metadata.name.clone().unwrap_or_default();
    let text = format!("{}---\n{}", serde_yaml::to_string(&policy)?, serde_yaml::to_string(&binding)?);
    files.push((format!("policy-{name}.yaml"), text));
    Ok(files)
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    /// Run with `KIBOTOS_UPDATE=1` to write the files anew.
    #[test]
    fn the_files_in_crds_yaml_are_those_that_the_types_generate() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("yaml");
        let files = super::files().unwrap();
        if std::env::var_os("KIBOTOS_UPDATE").is_some() {
            fs::create_dir_all(&dir).unwrap();
            for (name, text) in &files {
                fs::write(dir.join(name), text).unwrap();
            }
        }
        let mut expected: Vec<_> = files.iter().map(|(name, _)| name.clone()).collect();
        let mut found: Vec<_> =
            fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        expected.sort();
        found.sort();
        assert_eq!(found, expected);
        for (name, text) in files {
            assert_eq!(
                fs::read_to_string(dir.join(&name)).unwrap(),
                text,
                "{name} has drifted: run with KIBOTOS_UPDATE=1"
            );
        }
    }
}
