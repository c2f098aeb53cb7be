//! etcd, kube-apiserver and kube-controller-manager: how they are started, and when they serve.

use std::path::Path;

use http::Request;
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::{Api, Client};

use super::layout::Layout;
use super::pki::{FRONT_PROXY_NAME, Pki};
use super::process::Launch;
use super::record::Ports;

const HINT: &str = "build it with hack/control-plane/build";

/// Services get addresses from here; nothing routes them in a local cluster.
const SERVICE_RANGE: &str = "10.96.0.0/16";

/// Only what objects of a local cluster need: each controller more costs memory and start time.
const CONTROLLERS: [&str; 8] = [
    "clusterrole-aggregation-controller",
    "garbage-collector-controller",
    "namespace-controller",
    "resourcequota-controller",
    "root-ca-certificate-publisher-controller",
    "serviceaccount-controller",
    "serviceaccount-token-controller",
    "validatingadmissionpolicy-status-controller",
];

/// Who did what, without the contents; the control plane's own reads and leases are noise.
pub const AUDIT_POLICY: &str = "\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  users: [system:apiserver, system:kube-controller-manager]
  verbs: [get, list, watch]
- level: None
  resources: [{group: coordination.k8s.io, resources: [leases]}]
  verbs: [get, update]
- level: None
  nonResourceURLs: [/readyz*, /livez*, /healthz*, /openapi*, /version]
- level: Metadata
";

pub fn etcd(layout: &Layout, pki: &Pki, ports: Ports, binaries: &Path) -> Launch {
    let client = format!("https://127.0.0.1:{}", ports.etcd_client);
    let peer = format!("https://127.0.0.1:{}", ports.etcd_peer);
    Launch::new(binaries.join("etcd"), layout.control_plane().join("etcd.log"), HINT)
        .flag("name", "local")
        .flag("data-dir", layout.etcd_data())
        // A killed process loses nothing by this, only a machine that loses power does.
        .arg("--unsafe-no-fsync")
        .flag("log-level", "warn")
        .flag("listen-client-urls", &client)
        .flag("advertise-client-urls", &client)
        .flag("listen-peer-urls", &peer)
        .flag("initial-advertise-peer-urls", &peer)
        .flag("initial-cluster", format!("local={peer}"))
        .arg("--client-cert-auth")
        .flag("trusted-ca-file", pki.path("etcd-ca.crt"))
        .flag("cert-file", pki.path("etcd.crt"))
        .flag("key-file", pki.path("etcd.key"))
        .arg("--peer-client-cert-auth")
        .flag("peer-trusted-ca-file", pki.path("etcd-ca.crt"))
        .flag("peer-cert-file", pki.path("etcd.crt"))
        .flag("peer-key-file", pki.path("etcd.key"))
}

pub fn apiserver(layout: &Layout, pki: &Pki, ports: Ports, binaries: &Path) -> Launch {
    Launch::new(binaries.join("kube-apiserver"), layout.control_plane().join("kube-apiserver.log"), HINT)
        .flag("bind-address", "127.0.0.1")
        .flag("advertise-address", "127.0.0.1")
        // Endpoints may not hold a loopback address, and nobody reaches this API server by its Service.
        .flag("endpoint-reconciler-type", "none")
        .flag("secure-port", ports.apiserver.to_string())
        .flag("service-cluster-ip-range", SERVICE_RANGE)
        .flag("etcd-servers", format!("https://127.0.0.1:{}", ports.etcd_client))
        .flag("etcd-cafile", pki.path("etcd-ca.crt"))
        .flag("etcd-certfile", pki.path("etcd-client.crt"))
        .flag("etcd-keyfile", pki.path("etcd-client.key"))
        .flag("tls-cert-file", pki.path("apiserver.crt"))
        .flag("tls-private-key-file", pki.path("apiserver.key"))
        .flag("client-ca-file", pki.path("ca.crt"))
        .flag("anonymous-auth", "false")
        .flag("authorization-mode", "RBAC")
        .flag("service-account-issuer", "https://kubernetes.default.svc.cluster.local")
        .flag("service-account-key-file", pki.path("sa.pub"))
        .flag("service-account-signing-key-file", pki.path("sa.key"))
        // The aggregation layer: how an API server behind this one knows that a request came through it.
        .flag("requestheader-client-ca-file", pki.path("front-proxy-ca.crt"))
        .flag("requestheader-allowed-names", FRONT_PROXY_NAME)
        .flag("requestheader-username-headers", "X-Remote-User")
        .flag("requestheader-group-headers", "X-Remote-Group")
        .flag("requestheader-extra-headers-prefix", "X-Remote-Extra-")
        .flag("proxy-client-cert-file", pki.path("front-proxy-client.crt"))
        .flag("proxy-client-key-file", pki.path("front-proxy-client.key"))
        .flag("enable-aggregator-routing", "false")
        .flag("audit-policy-file", layout.audit_policy())
        .flag("audit-log-path", layout.audit_log())
        .flag("audit-log-maxsize", "100")
        .flag("audit-log-maxbackup", "2")
        .flag("profiling", "false")
}

pub fn controller_manager(layout: &Layout, pki: &Pki, ports: Ports, binaries: &Path) -> Launch {
    Launch::new(
        binaries.join("kube-controller-manager"),
        layout.control_plane().join("kube-controller-manager.log"),
        HINT,
    )
    .flag("kubeconfig", pki.path("controller-manager.kubeconfig"))
    .flag("bind-address", "127.0.0.1")
    .flag("secure-port", ports.controller_manager.to_string())
    .flag("tls-cert-file", pki.path("controller-manager-server.crt"))
    .flag("tls-private-key-file", pki.path("controller-manager-server.key"))
    .flag("leader-elect", "false")
    .flag("controllers", CONTROLLERS.join(","))
    // With the default limits the first ServiceAccount comes after six seconds instead of one.
    .flag("kube-api-qps", "500")
    .flag("kube-api-burst", "1000")
    .arg("--use-service-account-credentials")
    .flag("service-account-private-key-file", pki.path("sa.key"))
    .flag("root-ca-file", pki.path("ca.crt"))
    .flag("profiling", "false")
}

/// Whether etcd answers that it serves. `client` speaks to etcd with a client certificate of its own.
pub async fn etcd_serves(client: &Client) -> bool {
    get(client, "/readyz").await
}

/// Whether the API server answers that it serves.
pub async fn apiserver_serves(admin: &Client) -> bool {
    get(admin, "/readyz").await
}

/// Whether the controllers work: the manager is healthy, and has made a ServiceAccount.
pub async fn controllers_work(manager: &Client, admin: &Client) -> bool {
    let accounts: Api<ServiceAccount> = Api::namespaced(admin.clone(), "default");
    get(manager, "/healthz").await && matches!(accounts.get_opt("default").await, Ok(Some(_)))
}

async fn get(client: &Client, path: &str) -> bool {
    let request = Request::get(path).body(Vec::new()).expect("a constant path");
    client.request_text(request).await.is_ok()
}
