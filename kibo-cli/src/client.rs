//! The cluster that the commands talk to, with the user's own kubeconfig.

use std::{path::PathBuf, time::Duration};

use clap::{Args, ColorChoice};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::{ClusterResourceScope, NamespaceResourceScope, api::core::v1::Event};
use kube::{
    Api, Client, Config, Resource, ResourceExt as _,
    api::ListParams,
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use serde::de::DeserializeOwned;

use crate::{
    errors::{Error, Kind, On as _, Result, Subject},
    output::{Table, remark, words::age},
};

/// Longer than whoever is asked waits for others in turn.
const ANSWERS_WITHIN: Duration = Duration::from_secs(90);

/// Options of every command.
#[derive(Args, Clone, Debug)]
pub struct Global {
    /// Namespace of Workspaces and Volumes; default: that of the kubeconfig's context
    #[arg(short, long, global = true, value_name = "NAMESPACE", help_heading = "Cluster")]
    pub namespace: Option<String>,
    /// Path of the kubeconfig; default: $KUBECONFIG, then ~/.kube/config
    #[arg(long, global = true, value_name = "FILE", help_heading = "Cluster")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig
    #[arg(long, global = true, value_name = "CONTEXT", help_heading = "Cluster")]
    pub context: Option<String>,
    /// Act as this user (Kubernetes impersonation)
    #[arg(long = "as", global = true, value_name = "USER", help_heading = "Cluster")]
    pub as_user: Option<String>,
    /// Act as a member of this group, with --as; can be repeated
    #[arg(long = "as-group", global = true, value_name = "GROUP", requires = "as_user", help_heading = "Cluster")]
    pub as_groups: Vec<String>,
    /// How long a command waits for what it asked for, such as 90s, 5m or 1h
    #[arg(long, global = true, value_name = "DURATION", default_value = "5m", value_parser = duration, help_heading = "Cluster")]
    pub timeout: Duration,
    /// Colours: on a terminal unless NO_COLOR is set, always, or never
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto", help_heading = "Output")]
    pub color: ColorChoice,
}

/// Reads a time span such as `90s`, `5m` or `1h30m`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let hint = "must be a time span such as 90s, 5m or 1h30m";
    let span: SignedDuration = text.parse().map_err(|_| hint.to_owned())?;
    Duration::try_from(span).map_err(|_| hint.to_owned())
}

/// A connection to the API server, as the user of the kubeconfig.
#[derive(Clone)]
pub struct Cluster {
    pub client: Client,
    pub server: String,
    /// The namespace that was asked for, when one was.
    pub explicit_namespace: Option<String>,
    default_namespace: String,
    pub timeout: Duration,
}

impl Cluster {
    /// Reads the kubeconfig; nothing is sent yet.
    pub async fn open(global: &Global) -> Result<Self> {
        let mut config = read_config(global).await?;
        if let Some(user) = &global.as_user {
            config.auth_info.impersonate = Some(user.clone());
            config.auth_info.impersonate_groups = Some(global.as_groups.clone());
        }
        config.connect_timeout = Some(Duration::from_secs(10));
        // A log that is followed, or a command, may say nothing for hours.
        config.read_timeout = None;
        // The client would go on for five minutes when something is unavailable, and say nothing.
        config.default_retry = false;
        let server = config.cluster_url.to_string().trim_end_matches('/').to_owned();
        let default_namespace = config.default_namespace.clone();
        let client = Client::try_from(config)
            .map_err(|error| Error::invalid(format!("the kubeconfig cannot be used: {error}")))?;
        Ok(Self {
            client,
            server,
            explicit_namespace: global.namespace.clone(),
            default_namespace,
            timeout: global.timeout,
        })
    }

    /// The API server at some address, as nobody.
    #[cfg(test)]
    pub fn at(url: &str, timeout: Duration) -> Self {
        let client = Client::try_from(Config::new(url.parse().expect("an address"))).expect("without TLS");
        let (server, default_namespace) = (url.to_owned(), "default".to_owned());
        Self { client, server, explicit_namespace: None, default_namespace, timeout }
    }

    pub fn namespace(&self) -> &str {
        self.explicit_namespace.as_deref().unwrap_or(&self.default_namespace)
    }

    pub fn namespaced<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), namespace)
    }

    pub fn cluster_wide<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = ClusterResourceScope>,
    {
        Api::all(self.client.clone())
    }

    /// Fails when there is no such object. A user who may not read it passes: the operator decides.
    pub async fn check_exists<K>(&self, api: &Api<K>, subject: &Subject) -> Result<()>
    where
        K: Resource + Clone + DeserializeOwned + std::fmt::Debug,
    {
        match api.get_metadata(&subject.name).await {
            Err(kube::Error::Api(status)) if status.is_forbidden() => Ok(()),
            answer => answer.map(|_| ()).on(subject),
        }
    }

    pub fn now() -> Timestamp {
        Timestamp::now()
    }

    /// The last Kubernetes Events about an object, oldest first. They decorate a page, so a user
    /// who may not read them gets the page without.
    pub async fn events<K: Resource<DynamicType = ()>>(&self, object: &K, now: Timestamp) -> Table {
        const SHOWN: usize = 10;
        let mut table = Table::new(["AGE", "TYPE", "REASON", "MESSAGE"]);
        let Some(uid) = object.uid() else { return table };
        let namespace = object.namespace().unwrap_or_else(|| "default".to_owned());
        let params = ListParams::default().fields(&format!("involvedObject.uid={uid}"));
        let Ok(list) = self.namespaced::<Event>(&namespace).list(&params).await else { return table };
        let mut events = list.items;
        events.sort_by_key(last_seen);
        for event in &events[events.len().saturating_sub(SHOWN)..] {
            let seen = last_seen(event).map(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time);
            let count = event.series.as_ref().and_then(|series| series.count).or(event.count).unwrap_or(1);
            let times = if count > 1 { format!(" (x{count})") } else { String::new() };
            table.row(vec![
                format!("{}{times}", age(seen.as_ref(), now)),
                event.type_.clone().unwrap_or_default(),
                event.reason.clone().unwrap_or_default(),
                event.message.clone().unwrap_or_default().replace('\n', " "),
            ]);
        }
        table
    }
}

/// The answer of a server to `asked`, or the beginning of one that goes on: that has no bound of its own.
pub async fn answered<T>(subject: &Subject, asked: impl Future<Output = Result<T, kube::Error>>) -> Result<T> {
    let answer = tokio::time::timeout(ANSWERS_WITHIN, asked).await.map_err(|_| {
        let message =
            format!("{subject}: no answer within {ANSWERS_WITHIN:?} of the API server, or of the operator behind it");
        Error::new(Kind::Unavailable, message).next("try again; whether they answer at all: kubectl get --raw /readyz")
    })?;
    answer.on(subject)
}

fn last_seen(event: &Event) -> Option<Timestamp> {
    let series = event.series.as_ref().and_then(|series| series.last_observed_time.as_ref()).map(|time| time.0);
    series
        .or(event.last_timestamp.as_ref().map(|time| time.0))
        .or(event.event_time.as_ref().map(|time| time.0))
        .or(event.metadata.creation_timestamp.as_ref().map(|time| time.0))
}

async fn read_config(global: &Global) -> Result<Config> {
    let options = KubeConfigOptions { context: global.context.clone(), ..KubeConfigOptions::default() };
    if let Some(path) = &global.kubeconfig {
        let named = |error| {
            Error::invalid(format!("cannot use the kubeconfig {}: {}", path.display(), cause(&error)))
                .next("give the path of another one with --kubeconfig, or leave it out for the usual one")
        };
        let kubeconfig = Kubeconfig::read_from(path).map_err(named)?;
        return Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(named);
    }
    if global.context.is_some() {
        return Config::from_kubeconfig(&options)
            .await
            .map_err(|error| Error::invalid(format!("cannot use the kubeconfig: {}", cause(&error))))
            .map_err(|error| error.next("see what there is: kubectl config get-contexts"));
    }
    // Without a kubeconfig, a pod's own ServiceAccount is used.
    Config::infer().await.map_err(|error| {
        // The outer text speaks of pods; the cause says which file is missing or wrong.
        let cause = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
        Error::new(Kind::Unavailable, format!("no cluster is configured: {cause}"))
            .next("set KUBECONFIG or give --kubeconfig FILE; for a local cluster: eval \"$(hack/local env)\"")
    })
}

/// What is wrong with a kubeconfig; a file that cannot be read is named once.
fn cause(error: &KubeconfigError) -> String {
    match error {
        KubeconfigError::ReadConfig(error, _) => error.to_string(),
        error => error.to_string(),
    }
}

/// What the operator serves behind the cluster's API server.
pub const AGGREGATED_API: &str = "/apis/subresources.kibotos.dev/v1alpha1";

/// Which part of a list is asked for.
#[derive(Args, Clone, Debug, Default)]
pub struct Paging {
    /// Print one page of at most this many; the next page's token goes to standard error
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=500), help_heading = "Paging")]
    pub page_size: Option<u32>,
    /// Go on after the page that printed this token
    #[arg(long, value_name = "TOKEN", help_heading = "Paging")]
    pub page_token: Option<String>,
    /// Print all pages, which is the default without --page-size
    #[arg(long, help_heading = "Paging")]
    pub all: bool,
}

/// The objects of one page, or of all.
pub struct Listed<K> {
    pub items: Vec<K>,
    pub next_page_token: Option<String>,
}

impl Paging {
    /// Reads what was asked for, in pages, so that a large list is no large answer.
    pub async fn list<K>(&self, api: &Api<K>, params: ListParams, subject: &Subject) -> Result<Listed<K>>
    where
        K: Resource + Clone + DeserializeOwned + std::fmt::Debug,
    {
        const PAGE: u32 = 500;
        let one_page = self.page_size.is_some() && !self.all;
        let mut params = params.limit(self.page_size.unwrap_or(PAGE));
        params.continue_token.clone_from(&self.page_token);
        let mut items = Vec::new();
        loop {
            let list = api.list(&params).await.on(subject).map_err(|error| explain_token(error, self))?;
            let next = list.metadata.continue_.filter(|token| !token.is_empty());
            items.extend(list.items);
            match next {
                Some(token) if !one_page => params.continue_token = Some(token),
                next_page_token => return Ok(Listed { items, next_page_token }),
            }
        }
    }
}

/// Says that a list is empty, and where one looked.
pub fn nothing(kind: &str, cluster: &Cluster, all_namespaces: bool) -> String {
    if all_namespaces {
        return format!("no {kind} in any namespace");
    }
    format!("no {kind} in namespace {:?}", cluster.namespace())
}

/// Hands out the token of the next page, beside the result.
pub fn remark_next_page<K>(listed: &Listed<K>) {
    if let Some(token) = &listed.next_page_token {
        remark(&format!("next page: --page-token {token}"));
    }
}

/// A page token lives for some minutes only, since the server forgets old states.
fn explain_token(error: Error, paging: &Paging) -> Error {
    if paging.page_token.is_some() && error.message.contains("continue") {
        return Error::invalid(format!("--page-token is no token of this list, or too old: {}", error.message))
            .next("list again without --page-token");
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_a_server_that_never_answers() {
        let subject = Subject::namespaced("Workspace", "dev", "default");
        let begun = tokio::time::Instant::now();
        let never = std::future::pending::<Result<(), kube::Error>>();
        let error = answered(&subject, never).await.unwrap_err();
        assert_eq!(error.kind, Kind::Unavailable, "{error}");
        assert!(error.message.contains("no answer within 90s"), "{error}");
        assert!(begun.elapsed() >= ANSWERS_WITHIN, "{error}");
    }

    #[test]
    fn time_spans_are_read() {
        for (text, seconds) in [("90s", 90), ("5m", 300), ("1h30m", 5400), ("0s", 0)] {
            assert_eq!(duration(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for bad in ["", "5", "x", "-5m"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
