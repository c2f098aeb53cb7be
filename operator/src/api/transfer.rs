//! `export` and `import`: the disks of a Workspace into an archive, and out of one.
//!
//! The stream comes from a node whether the Workspace's guest runs or not; before it is asked for, the disks are granted
//! for it, so that nobody else uses them meanwhile.

use std::time::Duration;

use axum::{
    Extension, Json,
    extract::{Path, State, WebSocketUpgrade, ws::rejection::WebSocketUpgradeRejection},
    http::HeaderMap,
    response::Response,
};
use futures::future::BoxFuture;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kibo_crds::TransferKind;

use super::{
    Server,
    authorization::Target,
    channels::{self, Carries, Conclude},
    front_proxy::User,
    negotiate, remote_command,
    request::Subresource,
    status::ApiError,
};
use crate::transfer::Transfer;

pub async fn export(
    server: State<Server>,
    user: Extension<User>,
    path: Path<(String, String)>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    serve(server, user, path, &headers, upgrade, TransferKind::Export).await
}

pub async fn import(
    server: State<Server>,
    user: Extension<User>,
    path: Path<(String, String)>,
    headers: HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    serve(server, user, path, &headers, upgrade, TransferKind::Import).await
}

/// Ends an export whose client does not end it.
pub async fn cancel_export(
    server: State<Server>,
    user: Extension<User>,
    path: Path<(String, String)>,
) -> Result<Json<Status>, ApiError> {
    cancel(server, user, path, TransferKind::Export).await
}

/// The same for an import. What is left of it is deleted by whoever may.
pub async fn cancel_import(
    server: State<Server>,
    user: Extension<User>,
    path: Path<(String, String)>,
) -> Result<Json<Status>, ApiError> {
    cancel(server, user, path, TransferKind::Import).await
}

async fn cancel(
    State(server): State<Server>,
    Extension(user): Extension<User>,
    Path((namespace, name)): Path<(String, String)>,
    kind: TransferKind,
) -> Result<Json<Status>, ApiError> {
    let subresource = if kind == TransferKind::Export { Subresource::CancelExport } else { Subresource::CancelImport };
    let target = Target { namespace, name, subresource };
    let workspace = server.authorized(&user, &target).await?;
    tracing::info!(
        user = user.name,
        namespace = target.namespace,
        workspace = target.name,
        verb = target.subresource.verb(),
        "{}",
        target.subresource
    );
    let cancelled = server.transfers.cancel_transfer(&workspace, kind, &user.name).await;
    cancelled.map_err(|refusal| ApiError::of_refusal(&target.name, refusal))?;
    Ok(Json(Status { status: Some("Success".to_owned()), ..Status::default() }))
}

/// A client that is stopped, or whose file hangs, does not keep the disks for ever. Large parts on a slow way to a store take
/// minutes in which it takes nothing.
const PATIENCE: Duration = Duration::from_secs(15 * 60);

fn carries(kind: TransferKind) -> Carries {
    let is_import = kind == TransferKind::Import;
    let when_leader_changes = if is_import {
        "the import was broken off, delete the Workspace and import again"
    } else {
        "the export was broken off, export again"
    };
    Carries {
        input: is_import,
        stdout: !is_import,
        patience: Some(PATIENCE),
        when_leader_changes,
        ..Carries::default()
    }
}

async fn serve(
    State(server): State<Server>,
    Extension(user): Extension<User>,
    Path((namespace, name)): Path<(String, String)>,
    headers: &HeaderMap,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
    kind: TransferKind,
) -> Result<Response, ApiError> {
    let subresource = if kind == TransferKind::Export { Subresource::Export } else { Subresource::Import };
    let target = Target { namespace, name, subresource };
    let workspace = server.authorized(&user, &target).await?;
    let (upgrade, protocol) = negotiate(headers, upgrade)?;
    let begun = server.transfers.transfer(&workspace, kind, &user.name).await;
    let (transfer, order) = begun.map_err(|refusal| ApiError::of_refusal(&target.name, refusal))?;
    let opened = server.streams.open(&order.node, order.incarnation, order.stream).await;
    let stream = opened.map_err(|error| ApiError::of_stream(&target.name, order.node.clone(), error))?;
    tracing::info!(
        user = user.name, namespace = target.namespace, workspace = target.name, transfer = %transfer.id,
        node = %order.node, verb = target.subresource.verb(), "{}", target.subresource
    );
    let Server { ctx, .. } = server;
    Ok(upgrade.on_upgrade(move |socket| {
        let stop = ctx.stop.clone();
        ctx.tasks.track_future(channels::serve(socket, protocol, carries(kind), stream, transfer, stop))
    }))
}

impl Conclude for Transfer {
    /// Success is said once it is on record.
    async fn conclude(self, status: Status) -> Status {
        let is_success = status.status.as_deref() == Some("Success");
        let message = status.message.clone().unwrap_or_default();
        match Self::conclude(self, if is_success { Ok(()) } else { Err(message) }).await {
            Err(problem) if is_success => remote_command::status_of_failure(&problem),
            Err(problem) => Status { message: Some(problem), ..status },
            Ok(()) => status,
        }
    }

    fn called_off(&self) -> BoxFuture<'static, String> {
        self.over()
    }
}
