//! What could stand in a place of the line: names of objects, asked of the cluster.

use std::{ffi::OsStr, time::Duration};

use clap_complete::{
    PathCompleter,
    engine::{CompletionCandidate, ValueCompleter as _},
};
use k8s_openapi::api::core::v1::Namespace;
use kibo_crds::{Node, StoragePool, Template, Volume, Workspace};
use kube::{Api, Resource, ResourceExt as _, api::ListParams, config::Kubeconfig};
use serde::de::DeserializeOwned;

use super::words::Words;
use crate::{
    client::{Cluster, Global},
    output::words::enum_word,
};

/// Nobody waits longer for a name.
const PATIENCE: Duration = Duration::from_secs(2);

/// More names help nobody.
const MOST: u32 = 500;

/// What kind of name a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Workspace,
    Volume,
    /// `VOLUME:PATH`
    Mount,
    Template,
    Node,
    Pool,
    Namespace,
    Context,
    /// `WORKSPACE:PATH` or a file here
    Side,
}

/// A name, and a word about it.
#[derive(Debug, PartialEq, Eq)]
struct Name {
    name: String,
    about: Option<String>,
}

impl Kind {
    /// By the name that help gives the value.
    pub fn of(value_name: &str) -> Option<Self> {
        Some(match value_name {
            "WORKSPACE" => Self::Workspace,
            "VOLUME" => Self::Volume,
            "VOLUME:PATH" => Self::Mount,
            "TEMPLATE" => Self::Template,
            "NODE" => Self::Node,
            "POOL" => Self::Pool,
            "NAMESPACE" => Self::Namespace,
            "CONTEXT" => Self::Context,
            "SRC" | "DST" => Self::Side,
            _ => return None,
        })
    }
}

/// The names that begin with what was typed and are not on the line yet.
pub fn find(kind: Kind, typed: &OsStr, words: &Words) -> Vec<CompletionCandidate> {
    let Some(typed) = typed.to_str() else { return Vec::new() };
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return Vec::new() };
    let asked = runtime.block_on(async { tokio::time::timeout(PATIENCE, names(kind, typed, &words.globals())).await });
    // A look-up of a name may hang in a thread of its own.
    runtime.shutdown_background();
    let mut found = fitting(asked.ok().flatten().unwrap_or_default(), typed, words);
    if kind == Kind::Side {
        found.extend(PathCompleter::any().complete(OsStr::new(typed)));
    }
    found
}

fn fitting(names: Vec<Name>, typed: &str, words: &Words) -> Vec<CompletionCandidate> {
    let fits = |it: &Name| it.name.starts_with(typed) && !words.has(&it.name);
    let candidate = |it: Name| CompletionCandidate::new(it.name).help(it.about.map(Into::into));
    names.into_iter().filter(fits).map(candidate).collect()
}

async fn names(kind: Kind, typed: &str, global: &Global) -> Option<Vec<Name>> {
    if kind == Kind::Context {
        return contexts(global);
    }
    let cluster = Cluster::open(global).await.ok()?;
    let here = cluster.namespace().to_owned();
    match kind {
        Kind::Workspace => workspaces(&cluster, typed).await,
        Kind::Side => Some(before_path(workspaces(&cluster, typed).await?)),
        Kind::Volume => list(&cluster.namespaced(&here), about_volume).await,
        Kind::Mount => Some(before_path(list(&cluster.namespaced(&here), about_volume).await?)),
        Kind::Template => {
            list(&cluster.cluster_wide(), |template: &Template| Some(template.spec.root_image.clone())).await
        }
        Kind::Node => {
            let about = |node: &Node| node.status.as_ref()?.phase.as_ref().map(enum_word);
            list(&cluster.cluster_wide(), about).await
        }
        Kind::Pool => list(&cluster.cluster_wide::<StoragePool>(), |_| None).await,
        Kind::Namespace => list(&cluster.cluster_wide::<Namespace>(), |_| None).await,
        Kind::Context => None,
    }
}

fn before_path(names: Vec<Name>) -> Vec<Name> {
    names.into_iter().map(|it| Name { name: format!("{}:", it.name), ..it }).collect()
}

/// Names in the namespace; somebody who has begun an id gets those of all namespaces too.
async fn workspaces(cluster: &Cluster, typed: &str) -> Option<Vec<Name>> {
    let about = |workspace: &Workspace| workspace.status.as_ref()?.phase.as_ref().map(enum_word);
    let mut names = list(&cluster.namespaced(cluster.namespace()), about).await.unwrap_or_default();
    if typed.starts_with("ws-") {
        let api: Api<Workspace> = match &cluster.explicit_namespace {
            Some(namespace) => cluster.namespaced(namespace),
            None => Api::all(cluster.client.clone()),
        };
        names.extend(objects(&api).await?.iter().filter_map(by_id));
    }
    Some(names)
}

fn by_id(workspace: &Workspace) -> Option<Name> {
    let status = workspace.status.as_ref()?;
    let place = format!("{} in {}", workspace.name_any(), workspace.namespace().unwrap_or_default());
    let about = status.phase.as_ref().map_or(place.clone(), |phase| format!("{place}, {}", enum_word(phase)));
    Some(Name { name: status.id?.to_string(), about: Some(about) })
}

fn about_volume(volume: &Volume) -> Option<String> {
    let phase = volume.status.as_ref()?.phase.as_ref().map(enum_word);
    Some([Some(volume.spec.size.to_string()), phase].into_iter().flatten().collect::<Vec<_>>().join(", "))
}

fn contexts(global: &Global) -> Option<Vec<Name>> {
    let kubeconfig = match &global.kubeconfig {
        Some(path) => Kubeconfig::read_from(path),
        None => Kubeconfig::read(),
    };
    let names = kubeconfig.ok()?.contexts.into_iter().map(|context| Name { name: context.name, about: None });
    Some(names.collect())
}

async fn list<K>(api: &Api<K>, about: impl Fn(&K) -> Option<String>) -> Option<Vec<Name>>
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug,
{
    let named = |object: &K| Name { name: object.name_any(), about: about(object) };
    Some(objects(api).await?.iter().map(named).collect())
}

/// From the API server's memory, which may be a moment old.
async fn objects<K>(api: &Api<K>) -> Option<Vec<K>>
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug,
{
    let params = ListParams::default().match_any().limit(MOST);
    Some(api.list(&params).await.ok()?.items)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(name: &str, about: Option<&str>) -> Name {
        Name { name: name.to_owned(), about: about.map(str::to_owned) }
    }

    #[test]
    fn what_fits_begins_as_typed_and_is_not_on_the_line_yet() {
        let words = Words::new(["kibo", "workspace", "delete", "dev", "de"].map(Into::into).into(), None);
        let names = vec![name("dev", None), name("demo", Some("STOPPED")), name("web", None)];
        let found = fitting(names, "de", &words);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].get_value(), "demo");
        assert_eq!(found[0].get_help().unwrap().to_string(), "STOPPED");
    }

    #[test]
    fn an_id_says_whose_it_is() {
        let workspace: Workspace = serde_json::from_value(serde_json::json!({
            "metadata": { "name": "dev", "namespace": "team" }, "spec": { "template": "t" },
            "status": { "id": "ws-01kb8z4w3w0000000000000000", "phase": "Stopped" },
        }))
        .unwrap();
        assert_eq!(by_id(&workspace), Some(name("ws-01kb8z4w3w0000000000000000", Some("dev in team, STOPPED"))));
    }

    #[test]
    fn without_a_cluster_there_is_nothing_to_offer() {
        let line = ["kibo", "workspace", "get", "--kubeconfig", "/no/such/file", ""];
        assert!(find(Kind::Workspace, OsStr::new(""), &Words::new(line.map(Into::into).into(), None)).is_empty());
    }
}
