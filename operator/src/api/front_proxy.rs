//! Who asks: the API server in front says so, and proves with its certificate that it is that server.
//!
//! Which CA signs that certificate, which names it may carry and which headers tell the user is in the
//! ConfigMap that every aggregated API server reads (kube-system/extension-apiserver-authentication).
//! There is no other way to authenticate here.

use std::{collections::BTreeMap, sync::Arc};

use axum::http::HeaderMap;
use futures::TryStreamExt as _;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client, runtime::WatchStreamExt as _, runtime::watcher};
use percent_encoding::percent_decode_str;
use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, pem::PemObject as _},
};
use tokio::sync::watch;

use super::status::ApiError;
use crate::watch::WatchBackoff;

const CONFIG_MAP: &str = "extension-apiserver-authentication";
const CONFIG_MAP_NAMESPACE: &str = "kube-system";

/// Whom to believe, and where the user's name is.
#[derive(Clone, Debug)]
pub struct Trust {
    pub roots: Arc<RootCertStore>,
    /// Common names that may speak for users; empty: any that the CA has signed.
    allowed_names: Vec<String>,
    username_headers: Vec<String>,
    uid_headers: Vec<String>,
    group_headers: Vec<String>,
    extra_header_prefixes: Vec<String>,
}

/// What is wrong with the ConfigMap.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    #[error(
        "ConfigMap {CONFIG_MAP_NAMESPACE}/{CONFIG_MAP} has no {0}: run kube-apiserver with its --requestheader-… flags (the aggregation layer)"
    )]
    Missing(&'static str),
    #[error("ConfigMap {CONFIG_MAP_NAMESPACE}/{CONFIG_MAP}: {key} is not a JSON list of strings: {source}")]
    NoList { key: &'static str, source: serde_json::Error },
    #[error(
        "ConfigMap {CONFIG_MAP_NAMESPACE}/{CONFIG_MAP}: requestheader-client-ca-file holds no usable certificate: {0}"
    )]
    Certificate(String),
}

/// A user, as the API server in front has authenticated them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: Option<String>,
    pub groups: Vec<String>,
    pub extra: BTreeMap<String, Vec<String>>,
}

impl Trust {
    pub fn from_config_map(map: &ConfigMap) -> Result<Self, TrustError> {
        let list = |key: &'static str| match map.data.as_ref().and_then(|data| data.get(key)) {
            None => Ok(Vec::new()),
            Some(text) => {
                serde_json::from_str::<Vec<String>>(text).map_err(|source| TrustError::NoList { key, source })
            }
        };
        let pem = map
            .data
            .as_ref()
            .and_then(|data| data.get("requestheader-client-ca-file"))
            .ok_or(TrustError::Missing("requestheader-client-ca-file"))?;
        let username_headers = list("requestheader-username-headers")?;
        if username_headers.is_empty() {
            return Err(TrustError::Missing("requestheader-username-headers"));
        }
        Ok(Self {
            roots: Arc::new(roots(pem)?),
            allowed_names: list("requestheader-allowed-names")?,
            username_headers,
            uid_headers: list("requestheader-uid-headers")?,
            group_headers: list("requestheader-group-headers")?,
            extra_header_prefixes: list("requestheader-extra-headers-prefix")?,
        })
    }

    /// The user of a request that came over a connection with this certificate, whose signature by the CA the
    /// TLS handshake has checked.
    pub fn user(&self, certificate: Option<&Certificate>, headers: &HeaderMap) -> Result<User, ApiError> {
        let certificate = certificate.ok_or(ApiError::Unauthenticated("it shows no client certificate"))?;
        if !self.allowed_names.is_empty() && !self.allowed_names.contains(&certificate.common_name) {
            return Err(ApiError::Unauthenticated(
                "its certificate's name is not among those that may speak for users",
            ));
        }
        let first =
            |names: &[String]| names.iter().find_map(|name| values(headers, name).find(|value| !value.is_empty()));
        let name = first(&self.username_headers).ok_or(ApiError::Unauthenticated("it names no user"))?;
        Ok(User {
            name,
            uid: first(&self.uid_headers),
            groups: self.group_headers.iter().flat_map(|name| values(headers, name)).collect(),
            extra: self.extra(headers),
        })
    }

    fn extra(&self, headers: &HeaderMap) -> BTreeMap<String, Vec<String>> {
        let mut extra: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for prefix in &self.extra_header_prefixes {
            let prefix = prefix.to_ascii_lowercase();
            for (name, value) in headers {
                // Header names are in lower case here; a key with other characters comes percent-encoded.
                let Some(key) = name.as_str().strip_prefix(&prefix) else { continue };
                let key = percent_decode_str(key).decode_utf8_lossy().into_owned();
                extra.entry(key).or_default().push(text(value.as_bytes()));
            }
        }
        extra
    }
}

fn values<'a>(headers: &'a HeaderMap, name: &'a str) -> impl Iterator<Item = String> + 'a {
    headers.get_all(name).iter().map(|value| text(value.as_bytes()))
}

fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value).into_owned()
}

fn roots(pem: &str) -> Result<RootCertStore, TrustError> {
    let failed = |error: String| TrustError::Certificate(error);
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        let certificate = certificate.map_err(|error| failed(error.to_string()))?;
        roots.add(certificate).map_err(|error| failed(error.to_string()))?;
    }
    if roots.is_empty() { Err(failed("it is empty".to_owned())) } else { Ok(roots) }
}

/// What matters of a client's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    common_name: String,
}

impl Certificate {
    pub fn of(der: &CertificateDer<'_>) -> Option<Self> {
        let (_, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
        let common_name = certificate.subject().iter_common_name().next()?.as_str().ok()?.to_owned();
        Some(Self { common_name })
    }
}

/// The newest trust, absent while the ConfigMap is missing or unusable.
pub type CurrentTrust = watch::Receiver<Option<Arc<Trust>>>;

/// Follows the ConfigMap until the future is dropped.
pub async fn follow(client: Client, current: watch::Sender<Option<Arc<Trust>>>) {
    let api: Api<ConfigMap> = Api::namespaced(client, CONFIG_MAP_NAMESPACE);
    let config = watcher::Config::default().fields(&format!("metadata.name={CONFIG_MAP}"));
    let mut maps = std::pin::pin!(watcher(api, config).backoff(WatchBackoff::default()).applied_objects());
    loop {
        match maps.try_next().await {
            Ok(Some(map)) => take_over(&map, &current),
            Ok(None) => return,
            Err(error) => tracing::warn!(%error, "cannot watch ConfigMap {CONFIG_MAP_NAMESPACE}/{CONFIG_MAP}"),
        }
    }
}

fn take_over(map: &ConfigMap, current: &watch::Sender<Option<Arc<Trust>>>) {
    match Trust::from_config_map(map) {
        Ok(trust) => {
            tracing::info!(allowed_names = ?trust.allowed_names, "front proxy trust read");
            current.send_replace(Some(Arc::new(trust)));
        }
        Err(error) => {
            tracing::error!(%error, "exec and log are refused until this is mended");
            current.send_replace(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderName, HeaderValue};

    use super::*;

    fn ca() -> String {
        rcgen::CertificateParams::default().self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap().pem()
    }

    fn config(changes: &[(&str, Option<&str>)]) -> ConfigMap {
        let ca = ca();
        let mut data: BTreeMap<String, String> = [
            ("requestheader-client-ca-file", ca.as_str()),
            ("requestheader-allowed-names", r#"["front-proxy-client"]"#),
            ("requestheader-username-headers", r#"["X-Remote-User", "X-Other-User"]"#),
            ("requestheader-uid-headers", r#"["X-Remote-Uid"]"#),
            ("requestheader-group-headers", r#"["X-Remote-Group"]"#),
            ("requestheader-extra-headers-prefix", r#"["X-Remote-Extra-"]"#),
        ]
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .into();
        for (key, value) in changes {
            match value {
                Some(value) => data.insert((*key).to_owned(), (*value).to_owned()),
                None => data.remove(*key),
            };
        }
        ConfigMap { data: Some(data), ..ConfigMap::default() }
    }

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let pair = |(name, value): &(&str, &str)| {
            (name.parse::<HeaderName>().unwrap(), HeaderValue::from_bytes(value.as_bytes()).unwrap())
        };
        let mut headers = HeaderMap::new();
        for (name, value) in pairs.iter().map(pair) {
            headers.append(name, value);
        }
        headers
    }

    fn proxy() -> Certificate {
        Certificate { common_name: "front-proxy-client".to_owned() }
    }

    #[test]
    fn the_headers_tell_the_whole_user() {
        let trust = Trust::from_config_map(&config(&[])).unwrap();
        let headers = headers(&[
            ("x-remote-user", "jane"),
            ("x-remote-uid", "42"),
            ("x-remote-group", "dev"),
            ("x-remote-group", "system:authenticated"),
            ("x-remote-extra-scopes", "a"),
            ("x-remote-extra-scopes", "b"),
            ("x-remote-extra-example.com%2fkind", "c"),
            ("x-other", "no"),
        ]);
        let extra = [("scopes", vec!["a", "b"]), ("example.com/kind", vec!["c"])];
        let expected = User {
            name: "jane".to_owned(),
            uid: Some("42".to_owned()),
            groups: vec!["dev".to_owned(), "system:authenticated".to_owned()],
            extra: extra.map(|(key, values)| (key.to_owned(), values.into_iter().map(str::to_owned).collect())).into(),
        };
        assert_eq!(trust.user(Some(&proxy()), &headers).unwrap(), expected);
    }

    #[test]
    fn the_first_header_that_says_something_counts() {
        let trust = Trust::from_config_map(&config(&[])).unwrap();
        let headers = headers(&[("x-remote-user", ""), ("x-other-user", "joe")]);
        assert_eq!(trust.user(Some(&proxy()), &headers).unwrap().name, "joe");
    }

    #[test]
    fn who_is_not_the_front_proxy_speaks_for_nobody() {
        let trust = Trust::from_config_map(&config(&[])).unwrap();
        let jane = headers(&[("x-remote-user", "jane")]);
        let stranger = Certificate { common_name: "jane".to_owned() };
        for (certificate, headers, word) in [
            (None, &jane, "no client certificate"),
            (Some(&stranger), &jane, "not among those"),
            (Some(&proxy()), &HeaderMap::new(), "names no user"),
        ] {
            let error = trust.user(certificate, headers).unwrap_err();
            assert_eq!(error.to_status().code, Some(401));
            assert!(error.to_string().contains(word), "{error}");
        }
        let any = Trust::from_config_map(&config(&[("requestheader-allowed-names", Some("[]"))])).unwrap();
        assert!(any.user(Some(&stranger), &jane).is_ok(), "an empty list allows any name");
    }

    #[test]
    fn an_unusable_configuration_says_which_key_is_wrong() {
        for (changes, word) in [
            (("requestheader-client-ca-file", None), "aggregation layer"),
            (("requestheader-client-ca-file", Some("no PEM")), "requestheader-client-ca-file"),
            (("requestheader-username-headers", None), "requestheader-username-headers"),
            (("requestheader-group-headers", Some("X-Remote-Group")), "requestheader-group-headers"),
        ] {
            let error = Trust::from_config_map(&config(&[changes])).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
