//! The aggregated API `subresources.kibotos.dev`: commands, files, connections and logs of Workspaces, behind the
//! cluster's own API server, so that a kubeconfig is all that a user needs.
//!
//! The API server in front authenticates the user; this one believes it by its certificate ([`front_proxy`]),
//! asks Kubernetes whether the user may ([`authorization`]), and passes bytes between the client and the node.
//! It is served by the leader alone, since the nodes' sessions end there.

mod authorization;
mod channels;
mod discovery;
mod exec;
mod files;
mod front_proxy;
mod listener;
mod log;
mod port_forward;
mod registration;
mod remote_command;
mod request;
mod status;
mod transfer;
mod usage;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::Context as _;
use axum::{
    Extension, Router,
    extract::{Path, RawQuery, Request, State, WebSocketUpgrade, ws::rejection::WebSocketUpgradeRejection},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
    routing::{any, get},
};
use jiff::Timestamp;
use kibo_crds::{InstanceId, Workspace};
use kibo_protocol::v1::open_stream;
use kube::Api;
use tokio::{net::TcpListener, sync::watch, time::timeout};

use crate::{
    context::Ctx,
    streams::StreamRegistry,
    workspace::{Hooks, Workspaces},
};
use authorization::Target;
use channels::{Carries, Place};
use exec::ExecOptions;
use files::FilesOptions;
use front_proxy::{Certificate, CurrentTrust, User};
use log::LogOptions;
use port_forward::PortForwardOptions;
use remote_command::Protocol;
use request::Subresource;
use status::ApiError;

pub use listener::ServingCertificate;
use registration::Listening;
pub use registration::Reach;

/// Between two attempts to register.
const RETRY: Duration = Duration::from_secs(2);
/// Registering earlier would only let the first check of the API server in front fail.
const TRUST_TIMEOUT: Duration = Duration::from_secs(10);

/// What the API is served with.
pub struct Options {
    pub listen: SocketAddr,
    /// Where the session server listens; it stands behind the same Service.
    pub session_listen: SocketAddr,
    pub reach: Reach,
    pub serving: ServingCertificate,
    /// The CA that signed the serving certificate.
    pub ca_pem: String,
}

/// Listens, and until the leadership ends serves the API and sees to its registration. What is returned takes the
/// streams that nodes dial.
pub async fn start(
    ctx: Ctx,
    workspaces: Arc<Workspaces>,
    transfers: Arc<Hooks>,
    options: Options,
) -> anyhow::Result<Arc<StreamRegistry>> {
    let listener = TcpListener::bind(options.listen).await;
    let listener = listener.with_context(|| format!("cannot listen on {} for the aggregated API", options.listen))?;
    let streams = StreamRegistry::new(ctx.registry.clone());
    let tasks = ctx.tasks.clone();
    let rooms = Rooms { workspaces, transfers, streams: streams.clone() };
    tasks.spawn(run(ctx, rooms, listener, options));
    Ok(Arc::new(streams))
}

/// Whom requests are about.
struct Rooms {
    workspaces: Arc<Workspaces>,
    transfers: Arc<Hooks>,
    streams: StreamRegistry,
}

async fn run(ctx: Ctx, rooms: Rooms, listener: TcpListener, options: Options) {
    let (current, trust) = watch::channel(None);
    let Rooms { workspaces, transfers, streams } = rooms;
    let server = Server { ctx: ctx.clone(), workspaces, transfers, streams, trust: trust.clone() };
    let serve = listener::serve(listener, Arc::new(options.serving), trust.clone(), server.router(), ctx.stop.clone());
    let listening = Listening { api: options.listen, session: options.session_listen };
    let register = register(&ctx, trust, &options.ca_pem, &options.reach, listening);
    let background = async {
        tokio::join!(front_proxy::follow(ctx.client.clone(), current), register);
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = serve => {}
        () = background => {}
    }
}

async fn register(ctx: &Ctx, mut trust: CurrentTrust, ca_pem: &str, reach: &Reach, listening: Listening) {
    if timeout(TRUST_TIMEOUT, trust.wait_for(Option::is_some)).await.is_err() {
        tracing::warn!("registering the API though nothing tells whom to trust");
    }
    while let Err(error) = registration::apply(&ctx.client, &ctx.namespace, ca_pem, reach, listening).await {
        tracing::warn!(%error, "cannot register the API, trying again");
        tokio::time::sleep(RETRY).await;
    }
}

/// What every request needs.
#[derive(Clone)]
struct Server {
    ctx: Ctx,
    workspaces: Arc<Workspaces>,
    transfers: Arc<Hooks>,
    streams: StreamRegistry,
    trust: CurrentTrust,
}

impl Server {
    fn router(self) -> Router {
        let version = "/apis/subresources.kibotos.dev/v1alpha1";
        let namespace = format!("{version}/namespaces/{{namespace}}");
        let workspace = format!("{namespace}/workspaces/{{name}}");
        Router::new()
            .route("/apis", get(discovery::groups))
            .route("/apis/subresources.kibotos.dev", get(discovery::group))
            .route(version, get(discovery::resources))
            .route(&format!("{workspace}/exec"), any(serve_stream::<ExecOptions>))
            .route(&format!("{workspace}/files"), any(serve_stream::<FilesOptions>))
            .route(&format!("{workspace}/portforward"), any(serve_stream::<PortForwardOptions>))
            .route(&format!("{workspace}/log"), get(serve_log))
            .route(&format!("{workspace}/export"), any(transfer::export).delete(transfer::cancel_export))
            .route(&format!("{workspace}/import"), any(transfer::import).delete(transfer::cancel_import))
            .route(&format!("{version}/workspaceusages"), get(usage::everywhere))
            .route(&format!("{namespace}/workspaceusages"), get(usage::in_namespace))
            .route(&format!("{namespace}/workspaceusages/{{name}}"), get(usage::of_one))
            .fallback(async || ApiError::NoPath)
            .method_not_allowed_fallback(async || ApiError::Method("only GET is served here"))
            .layer(middleware::from_fn_with_state(self.clone(), authenticate))
            .layer(middleware::from_fn(close_refused_upgrade))
            .with_state(self)
    }

    /// The Workspace, for a user who may have this part of it.
    async fn authorized(&self, user: &User, target: &Target) -> Result<Workspace, ApiError> {
        authorization::authorize(&self.ctx.client, user, &target.right()).await?;
        let workspaces: Api<Workspace> = Api::namespaced(self.ctx.client.clone(), &target.namespace);
        let found = status::answered("reading the Workspace", workspaces.get_opt(&target.name)).await?;
        found.ok_or_else(|| ApiError::NoWorkspace { namespace: target.namespace.clone(), name: target.name.clone() })
    }
}

/// The aggregator ends a client's connection after an upgrade that was refused. A client that is not told
/// so keeps the connection for its next request, which then fails.
async fn close_refused_upgrade(request: Request, next: Next) -> Response {
    let is_upgrade = request.headers().contains_key(header::UPGRADE);
    let mut response = next.run(request).await;
    if is_upgrade && response.status() != StatusCode::SWITCHING_PROTOCOLS {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

async fn authenticate(
    State(server): State<Server>,
    Extension(certificate): Extension<Option<Certificate>>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let trust = server.trust.borrow().clone();
    let trust = trust.ok_or_else(|| {
        ApiError::Unavailable("the operator does not know yet which API server may ask it".to_owned())
    })?;
    let user = trust.user(certificate.as_ref(), request.headers())?;
    request.extensions_mut().insert(user);
    Ok(next.run(request).await)
}

/// A stream into a running guest, as the query asks for it.
trait GuestStream: Sized + Send {
    fn from_query(query: &str) -> Result<Self, ApiError>;
    /// What the user must be allowed.
    fn subresource(&self) -> Subresource;
    /// What the node is asked for.
    fn kind(&self, instance: InstanceId) -> open_stream::Kind;
    fn carries(&self) -> Carries;
}

async fn serve_stream<S: GuestStream>(
    State(server): State<Server>,
    Extension(user): Extension<User>,
    Path((namespace, name)): Path<(String, String)>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let asked = S::from_query(query.as_deref().unwrap_or_default())?;
    let target = Target { namespace, name, subresource: asked.subresource() };
    let workspace = server.authorized(&user, &target).await?;
    let running = request::running(&workspace)?;
    let (upgrade, protocol) = negotiate(&headers, upgrade)?;
    let opened = server.streams.open(&running.node, running.incarnation, asked.kind(running.instance)).await;
    let stream = opened.map_err(|error| ApiError::of_stream(&target.name, running.node.clone(), error))?;
    tracing::info!(
        user = user.name, namespace = target.namespace, workspace = target.name, instance = %running.instance,
        node = %running.node, verb = target.subresource.verb(), "{}", target.subresource
    );
    let Server { ctx, .. } = server;
    let workspaces = Api::namespaced(ctx.client.clone(), &target.namespace);
    let place = Place { workspaces, name: target.name, instance: running.instance };
    let carries = asked.carries();
    Ok(upgrade.on_upgrade(move |socket| {
        let stop = ctx.stop.clone();
        ctx.tasks.track_future(channels::serve(socket, protocol, carries, stream, place, stop))
    }))
}

/// The WebSocket and its subprotocol, or in words what the client should have sent.
fn negotiate(
    headers: &HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<(WebSocketUpgrade, Protocol), ApiError> {
    let is_spdy =
        headers.get(header::UPGRADE).is_some_and(|value| value.as_bytes().to_ascii_lowercase().starts_with(b"spdy"));
    if is_spdy {
        return Err(ApiError::BadRequest(
            "this speaks WebSocket, not SPDY: use kibo, or a client of Kubernetes 1.31 or later".to_owned(),
        ));
    }
    let upgrade = upgrade
        .map_err(|_| ApiError::BadRequest("this must be a GET request that upgrades to a WebSocket".to_owned()))?;
    let upgrade = upgrade
        .protocols(remote_command::PROTOCOLS)
        .max_message_size(channels::MAX_MESSAGE)
        .max_frame_size(channels::MAX_MESSAGE);
    let selected = upgrade.selected_protocol().and_then(|name| name.to_str().ok()).and_then(Protocol::from_name);
    let protocol = selected.ok_or_else(|| {
        let known = remote_command::PROTOCOLS.join(" and ");
        ApiError::BadRequest(format!("the client must offer one of the subprotocols {known}"))
    })?;
    Ok((upgrade, protocol))
}

async fn serve_log(
    State(server): State<Server>,
    Extension(user): Extension<User>,
    Path((namespace, name)): Path<(String, String)>,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let target = Target { namespace, name, subresource: Subresource::Log };
    let workspace = server.authorized(&user, &target).await?;
    let options = LogOptions::from_query(query.as_deref().unwrap_or_default())?;
    let node = request::log_keeper(&workspace)?;
    // The log outlives the incarnation that wrote it.
    let session = server.ctx.registry.snapshot_of(&node).ok_or_else(|| {
        ApiError::Unavailable(format!("node {node}, which keeps the log, has no control session with the operator"))
    })?;
    let request = options.request(workspace.metadata.uid.as_deref().unwrap_or_default(), Timestamp::now());
    let opened = server.streams.open(&node, session.incarnation, open_stream::Kind::Log(request)).await;
    let stream = opened.map_err(|error| ApiError::of_stream(&target.name, node.clone(), error))?;
    let body = log::body(stream, server.ctx.stop.clone()).await;
    let body = body.map_err(|lost| ApiError::of_lost(&target.name, node, lost))?;
    Ok(([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], body).into_response())
}
