//! Failures of the API, answered as `Status` objects, which every Kubernetes client understands.

use std::time::Duration;

use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Status, StatusCause, StatusDetails};
use kibo_crds::{NodeId, workspace::WorkspacePhase};
use tokio::time::timeout;

use super::{authorization::Right, discovery::GROUP};
use crate::{
    streams::{OpenError, StreamLost},
    transfer::Refusal,
};

/// Why a request is not carried out.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    #[error("the request did not come through the Kubernetes API server: {0}")]
    Unauthenticated(&'static str),
    #[error("{}.{GROUP} {:?} is forbidden: User {user:?} {right}{why}", right.resource, right.name.as_deref().unwrap_or_default())]
    Forbidden { user: String, right: Box<Right>, why: String },
    #[error("workspaces.kibotos.dev {name:?} not found in the namespace {namespace:?}")]
    NoWorkspace { namespace: String, name: String },
    #[error(
        "workspaceusages.{GROUP} {name:?} not found in the namespace {namespace:?}: no node has reported what it uses, \
         since it does not run, or not long enough"
    )]
    NoUsage { namespace: String, name: String },
    #[error(
        "no such path: this API serves exec, export, files, import, log and portforward of workspaces, and \
         workspaceusages, in {GROUP}"
    )]
    NoPath,
    #[error("{0}")]
    BadRequest(String),
    #[error("{0}")]
    Method(&'static str),
    #[error("Workspace {name:?} is {}: {advice}", phase_word(*.phase))]
    NotRunning { name: String, phase: Option<WorkspacePhase>, advice: String },
    #[error("Workspace {name:?}: node {node} refused: {message}")]
    Refused { name: String, node: NodeId, message: String },
    #[error("Workspace {name:?} is not transferred: {}", .refusal.message)]
    NotTransferred { name: String, refusal: Refusal },
    #[error("{0}: try again")]
    Unavailable(String),
    #[error("{what} failed: {source}")]
    Kubernetes { what: &'static str, source: Box<kube::Error> },
}

/// The API server answers at once. While it does not, a client is better told so than left to wait.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// What the API server answers while a request is served.
pub async fn answered<T>(
    what: &'static str,
    asked: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, ApiError> {
    let answer = timeout(ANSWERS_WITHIN, asked).await.map_err(|_| {
        let seconds = ANSWERS_WITHIN.as_secs();
        ApiError::Unavailable(format!("{what}: the API server did not answer the operator within {seconds} s"))
    })?;
    answer.map_err(|source| ApiError::Kubernetes { what, source: Box::new(source) })
}

fn phase_word(phase: Option<WorkspacePhase>) -> String {
    phase.map_or_else(|| "not seen by the operator yet".to_owned(), |phase| format!("{phase:?}"))
}

impl ApiError {
    /// A transfer that is not begun.
    pub fn of_refusal(name: &str, refusal: Refusal) -> Self {
        match refusal.reason {
            "Unavailable" => Self::Unavailable(refusal.message),
            _ => Self::NotTransferred { name: name.to_owned(), refusal },
        }
    }

    /// A stream that the node did not give.
    pub fn of_stream(name: &str, node: NodeId, error: OpenError) -> Self {
        match error {
            OpenError::Refused { message, .. } => Self::Refused { name: name.to_owned(), node, message },
            error => Self::Unavailable(error.to_string()),
        }
    }

    /// A stream that broke before anything came of it.
    pub fn of_lost(name: &str, node: NodeId, lost: StreamLost) -> Self {
        match lost {
            StreamLost::Failed { message, .. } => Self::Refused { name: name.to_owned(), node, message },
            StreamLost::Connection { .. } => Self::Unavailable(lost.to_string()),
        }
    }

    fn code(&self) -> StatusCode {
        match self {
            Self::Unauthenticated(_) => StatusCode::UNAUTHORIZED,
            Self::Forbidden { .. } => StatusCode::FORBIDDEN,
            Self::NoWorkspace { .. } | Self::NoUsage { .. } | Self::NoPath => StatusCode::NOT_FOUND,
            Self::BadRequest(_) => StatusCode::BAD_REQUEST,
            Self::Method(_) => StatusCode::METHOD_NOT_ALLOWED,
            Self::NotTransferred { refusal, .. } if refusal.reason == "ResourceExhausted" => {
                StatusCode::INSUFFICIENT_STORAGE
            }
            Self::NotRunning { .. } | Self::Refused { .. } | Self::NotTransferred { .. } => StatusCode::CONFLICT,
            Self::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Kubernetes { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Unauthenticated(_) => "Unauthorized",
            Self::Forbidden { .. } => "Forbidden",
            Self::NoWorkspace { .. } | Self::NoUsage { .. } | Self::NoPath => "NotFound",
            Self::BadRequest(_) => "BadRequest",
            Self::Method(_) => "MethodNotAllowed",
            Self::NotTransferred { refusal, .. } if refusal.reason == "ResourceExhausted" => "InsufficientStorage",
            Self::NotRunning { .. } | Self::Refused { .. } | Self::NotTransferred { .. } => "Conflict",
            Self::Unavailable(_) => "ServiceUnavailable",
            Self::Kubernetes { .. } => "InternalError",
        }
    }

    /// What a program can go by where the code alone is not enough.
    fn details(&self) -> Option<StatusDetails> {
        let (name, cause) = match self {
            Self::NotRunning { name, .. } => (name, Some(("WorkspaceNotRunning", Some("status.phase")))),
            Self::Refused { name, .. } => (name, Some(("NodeRefused", None))),
            Self::NotTransferred { name, .. } => (name, Some(("NotTransferred", None))),
            Self::NoWorkspace { name, .. } => (name, None),
            Self::Forbidden { right, .. } => (right.name.as_ref()?, None),
            _ => return None,
        };
        let causes = cause.map(|(reason, field)| {
            vec![StatusCause {
                reason: Some(reason.to_owned()),
                message: Some(self.to_string()),
                field: field.map(str::to_owned),
            }]
        });
        Some(StatusDetails {
            name: Some(name.clone()),
            group: Some(kibo_crds::GROUP.to_owned()),
            kind: Some("workspaces".to_owned()),
            causes,
            ..StatusDetails::default()
        })
    }

    pub fn to_status(&self) -> Status {
        Status {
            status: Some("Failure".to_owned()),
            message: Some(self.to_string()),
            reason: Some(self.reason().to_owned()),
            code: Some(i32::from(self.code().as_u16())),
            details: self.details(),
            ..Status::default()
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        match &self {
            Self::Kubernetes { .. } => tracing::warn!(error = %self, "request not served"),
            error => tracing::debug!(%error, "request refused"),
        }
        (self.code(), Json(self.to_status())).into_response()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_api_server_that_does_not_answer_is_not_waited_for() {
        let never = std::future::pending::<Result<(), kube::Error>>();
        let error = answered("reading the Workspace", never).await.unwrap_err();
        assert_eq!(error.to_status().code, Some(503));
        assert!(error.to_string().contains("within 10 s: try again"), "{error}");
    }

    #[test]
    fn a_workspace_that_does_not_run_says_its_phase_and_what_to_do() {
        let error = ApiError::NotRunning {
            name: "dev".to_owned(),
            phase: Some(WorkspacePhase::Stopped),
            advice: "start it first".to_owned(),
        };
        let status = error.to_status();
        assert_eq!((status.code, status.reason.as_deref()), (Some(409), Some("Conflict")));
        assert_eq!(status.message.as_deref(), Some("Workspace \"dev\" is Stopped: start it first"));
        let cause = &status.details.unwrap().causes.unwrap()[0];
        assert_eq!(cause.reason.as_deref(), Some("WorkspaceNotRunning"));
    }

    #[test]
    fn a_refusal_of_rights_names_user_verb_and_resource() {
        let error = ApiError::Forbidden {
            user: "jane".to_owned(),
            right: Box::new(Right {
                verb: "create",
                resource: "workspaces",
                subresource: Some("exec"),
                namespace: Some("team".to_owned()),
                name: Some("dev".to_owned()),
            }),
            why: String::new(),
        };
        let status = error.to_status();
        assert_eq!(status.code, Some(403));
        let message = status.message.unwrap();
        for part in ["\"jane\"", "create", "workspaces/exec", "\"team\"", "\"dev\""] {
            assert!(message.contains(part), "{message}");
        }
    }
}
