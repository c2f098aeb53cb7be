//! What went wrong, in the words of the person who typed the command, with the exit status for it.
//!
//! [`Kind`] is the whole table of exit statuses. Everything that fails is turned into an [`Error`] of
//! one kind here, so that a script can rely on the number.

use std::{fmt, io};

use kibo_crds::refusals;
use kube::{core::Status, runtime::watcher};

/// Why a command failed, and its exit status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Other = 1,
    /// The command line cannot be understood; clap exits with it too.
    Usage = 2,
    InvalidArgument = 10,
    NotPermitted = 11,
    NotFound = 12,
    FailedPrecondition = 13,
    /// A revision conflict, or a command id that was used with another input.
    Aborted = 14,
    ResourceExhausted = 15,
    Timeout = 16,
    Unavailable = 17,
    /// Ctrl-C, as shells count it.
    Interrupted = 130,
    /// The reader of our output has gone; nothing is printed for it.
    BrokenPipe = 141,
}

impl Kind {
    pub fn exit_code(self) -> u8 {
        self as u8
    }
}

/// A failed command: what failed and on what (`message`), and what to do (`next`).
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    pub kind: Kind,
    pub message: String,
    pub next: Option<String>,
    /// The API server was not reached: the message gets its address.
    unreachable: bool,
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), next: None, unreachable: false }
    }

    /// Adds what to do about it.
    pub fn next(mut self, next: impl Into<String>) -> Self {
        self.next = Some(next.into());
        self
    }

    /// Names the API server in the message of an error of the connection to it.
    pub fn with_server(mut self, server: &str) -> Self {
        if self.unreachable {
            self.message = format!("cannot reach the Kubernetes API at {server}: {}", self.message);
            self.next.get_or_insert_with(|| "check that the cluster answers: kubectl cluster-info".to_owned());
        }
        self
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Kind::InvalidArgument, message)
    }

    /// What was there when the command began is not any more.
    pub fn gone(subject: &Subject) -> Self {
        Self::new(Kind::NotFound, format!("{subject} was deleted meanwhile"))
            .next(format!("see what there is: {}", subject.list_command()))
    }

    fn unreachable(message: String) -> Self {
        Self { kind: Kind::Unavailable, message, next: None, unreachable: true }
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        let kind = if error.kind() == io::ErrorKind::BrokenPipe { Kind::BrokenPipe } else { Kind::Other };
        Self::new(kind, error.to_string())
    }
}

/// The object that a command is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// `Workspace`, as people and the API call it.
    pub kind: &'static str,
    pub name: String,
    pub namespace: Option<String>,
}

impl Subject {
    pub fn cluster(kind: &'static str, name: &str) -> Self {
        Self { kind, name: name.to_owned(), namespace: None }
    }

    pub fn namespaced(kind: &'static str, name: &str, namespace: &str) -> Self {
        Self { kind, name: name.to_owned(), namespace: Some(namespace.to_owned()) }
    }

    /// The word for the kind on the command line.
    fn noun(&self) -> &'static str {
        match self.kind {
            "Workspace" => "workspace",
            "Volume" => "volume",
            "Template" => "template",
            "StoragePool" => "storage-pool",
            _ => "node",
        }
    }

    /// A kibo command on this object, ready to be typed.
    pub fn command(&self, verb: &str) -> String {
        let namespace = self.namespace.as_deref().map(|ns| format!(" -n {ns}")).unwrap_or_default();
        format!("{} {} {verb} {}{namespace}", program(), self.noun(), self.name)
    }

    fn list_command(&self) -> String {
        let namespace = self.namespace.as_deref().map(|ns| format!(" -n {ns}")).unwrap_or_default();
        format!("{} {} list{namespace}", program(), self.noun())
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name.is_empty() {
            write!(f, "{}s", self.kind)?;
        } else {
            write!(f, "{} {:?}", self.kind, self.name)?;
        }
        match &self.namespace {
            Some(namespace) => write!(f, " in namespace {namespace:?}"),
            None => Ok(()),
        }
    }
}

/// What the user types to run this program: `kibo`, or `kubectl kibo` when run as a plugin.
pub fn program() -> &'static str {
    let as_plugin = std::env::args_os().next().is_some_and(|path| {
        std::path::Path::new(&path).file_stem().is_some_and(|name| name.to_string_lossy().starts_with("kubectl-"))
    });
    if as_plugin { "kubectl kibo" } else { "kibo" }
}

/// Says on which object a call failed.
pub trait On<T> {
    fn on(self, subject: &Subject) -> Result<T>;
}

impl<T> On<T> for kube::Result<T> {
    fn on(self, subject: &Subject) -> Result<T> {
        self.map_err(|error| from_kube(error, subject))
    }
}

pub fn from_kube(error: kube::Error, subject: &Subject) -> Error {
    match error {
        kube::Error::Api(status) => from_status(&status, subject),
        kube::Error::Auth(error) => Error::new(Kind::NotPermitted, format!("cannot authenticate: {}", root(&error))),
        error @ (kube::Error::HyperError(_) | kube::Error::Service(_) | kube::Error::ReadEvents(_)) => {
            Error::unreachable(root(&error))
        }
        error @ kube::Error::UpgradeConnection(_) => {
            Error::new(Kind::Unavailable, format!("{subject}: the stream was not opened: {}", root(&error)))
        }
        error @ kube::Error::SerdeError(_) => Error::new(
            Kind::Other,
            format!("{subject}: the answer of the API server is not understood: {}", root(&error)),
        )
        .next("the cluster may run another release: compare `kibo version` with the operator's"),
        error => Error::new(Kind::Other, format!("{subject}: {error}")),
    }
}

pub fn from_watch(error: watcher::Error, subject: &Subject) -> Error {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => from_kube(error, subject),
        watcher::Error::WatchError(status) => from_status(&status, subject),
        error @ watcher::Error::NoResourceVersion => Error::new(Kind::Other, format!("{subject}: {error}")),
    }
}

/// The innermost cause: the layers above it only say "error trying to connect".
pub fn root(error: &(dyn std::error::Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// Maps an answer of the API server. The reasons are those of the Kubernetes API conventions; admission
/// policies, quotas and namespaces that are going away all answer with Forbidden, like RBAC.
pub fn from_status(status: &Status, subject: &Subject) -> Error {
    match (status.reason.as_str(), status.code) {
        ("Invalid", _) | (_, 422) => invalid(status, subject),
        ("Forbidden", _) | (_, 403) => forbidden(status, subject),
        ("Unauthorized", _) | (_, 401) => Error::new(
            Kind::NotPermitted,
            "the API server does not know you: the credentials in the kubeconfig are missing, wrong or expired",
        )
        .next("see who you are: kubectl auth whoami"),
        ("AlreadyExists", _) => Error::new(Kind::Aborted, format!("{subject} already exists"))
            .next(format!("look at it: {}", subject.command("get"))),
        ("Conflict", _) | (_, 409) => conflict(status, subject),
        ("NotFound", _) | (_, 404) => not_found(status, subject),
        ("BadRequest", _) | (_, 400) => bad_request(status, subject),
        ("Timeout" | "ServerTimeout" | "ServiceUnavailable" | "TooManyRequests", _) | (_, 429 | 502..=504) => {
            let said = if status.message.is_empty() { "the API server cannot answer now" } else { &status.message };
            Error::new(Kind::Unavailable, format!("{subject}: {said}"))
                .next("give the command again in a moment; if that goes on, look at the API server: kubectl get --raw '/readyz?verbose'")
        }
        ("InsufficientStorage", _) | (_, 507) => Error::new(Kind::ResourceExhausted, &status.message),
        (_, 500..) => Error::new(Kind::Other, format!("{subject}: the API server failed: {}", status.message))
            .next("give the command again; if that goes on, the API server's log says why"),
        _ => Error::new(Kind::Other, format!("{subject}: {}", status.message)),
    }
}

fn bad_request(status: &Status, subject: &Subject) -> Error {
    let error = Error::invalid(format!("{subject}: {}", status.message));
    if status.message.contains("field label not supported") {
        return error.next(
            "the cluster runs an older release, which cannot be asked so: compare `kibo version` with the operator's",
        );
    }
    error
}

fn conflict(status: &Status, subject: &Subject) -> Error {
    if status.message.contains("has been modified") {
        return Error::new(Kind::Aborted, format!("{subject} was changed by somebody else at the same moment"))
            .next(format!("look at it and try again: {}", subject.command("get")));
    }
    // The streams' API answers so when the Workspace is not in the state for it.
    let mut causes = status.details.iter().flat_map(|details| &details.causes);
    if causes.any(|cause| matches!(cause.reason.as_str(), "WorkspaceNotRunning" | "NodeRefused" | "NotTransferred")) {
        return Error::new(Kind::FailedPrecondition, &status.message);
    }
    Error::new(Kind::Aborted, format!("{subject}: {}", status.message))
}

fn not_found(status: &Status, subject: &Subject) -> Error {
    let details = status.details.as_ref();
    match details {
        Some(details) if details.kind == "namespaces" => {
            Error::new(Kind::NotFound, format!("namespace {:?} not found", details.name))
                .next(format!("make it: kubectl create namespace {}", details.name))
        }
        Some(details) if !details.name.is_empty() => Error::new(Kind::NotFound, format!("{subject} not found"))
            .next(format!("see what there is: {}", subject.list_command())),
        _ => {
            Error::new(Kind::Unavailable, format!("{subject}: the cluster does not serve this API: {}", status.message))
                .next("check that Kibotos is installed and its operator runs: kubectl get apiservices v1alpha1.kibotos.dev v1alpha1.subresources.kibotos.dev")
        }
    }
}

fn forbidden(status: &Status, subject: &Subject) -> Error {
    let said = status.message.split_once(" is forbidden: ").map_or(status.message.as_str(), |(_, said)| said);
    if let Some((_, reason)) = said.split_once("denied request: ") {
        return Error::new(Kind::FailedPrecondition, reason);
    }
    if said.contains("exceeded quota") {
        return Error::new(Kind::ResourceExhausted, format!("{subject}: {said}"));
    }
    if said.contains("is being terminated") {
        return Error::new(Kind::FailedPrecondition, format!("{subject}: {said}"));
    }
    let namespace = subject.namespace.as_deref().map(|ns| format!(" -n {ns}")).unwrap_or_default();
    Error::new(Kind::NotPermitted, format!("{subject}: {said}"))
        .next(format!("see what you may do: kubectl auth can-i --list{namespace}"))
}

/// One line for each rule that was broken: field, value, rule.
fn invalid(status: &Status, subject: &Subject) -> Error {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    // What the API server says about itself after the real causes.
    let causes: Vec<_> = causes.filter(|cause| cause.field != "<nil>").collect();
    let states = causes.iter().filter(|cause| cause.reason == "FieldValueForbidden").count();
    let kind = if states > 0 && states == causes.len() { Kind::FailedPrecondition } else { Kind::InvalidArgument };
    let mut message = format!("{subject} is refused");
    if causes.is_empty() {
        message = format!("{message}: {}", status.message);
    }
    for cause in &causes {
        message.push_str("\n  ");
        message.push_str(&broken_rule(&cause.field, &cause.reason, &cause.message));
    }
    let mut error = Error::new(kind, message);
    if causes.iter().any(|cause| cause.reason == "FieldValueTypeInvalid" && cause.message.contains("\"number\"")) {
        error = error.next("write fractions in quotes (cpu: \"0.5\") or in millicores (cpu: 500m)");
    } else if causes.iter().any(|cause| cause.message.contains(refusals::POWER_REQUEST_PENDING)) {
        error = error.next(format!("see what it waits for: {}", subject.command("get")));
    }
    error
}

/// `Invalid value: "64Mi": memory must be …` becomes `spec.resources.memory "64Mi": memory must be …`.
fn broken_rule(field: &str, reason: &str, message: &str) -> String {
    let said = ["Invalid value: ", "Forbidden: ", "Unsupported value: ", "Too long: ", "Too many: "]
        .iter()
        .find_map(|prefix| message.strip_prefix(prefix))
        .unwrap_or(message);
    if reason == "FieldValueRequired" {
        return format!("{field}: must be given");
    }
    // For a wrong type the API server gives the type as value, which says nothing.
    if reason == "FieldValueTypeInvalid" {
        let wanted = said.split("must be of type ").nth(1).and_then(|rest| rest.split(':').next());
        return match wanted {
            Some(wanted) => format!("{field}: must be of type {}", wanted.replace(',', " or ")),
            None => format!("{field}: {said}"),
        };
    }
    let (value, rule) = split_value(said);
    let rule = rule.strip_prefix(&format!("{field} in body ")).unwrap_or(rule);
    match value {
        Some(value) => format!("{field} {value}: {rule}"),
        None => format!("{field}: {rule}"),
    }
}

/// The quoted value before a rule. Whole objects are left out: they would fill the screen.
fn split_value(said: &str) -> (Option<&str>, &str) {
    if let Some(rest) = said.strip_prefix('"')
        && let Some(end) = rest.find("\": ")
    {
        return (Some(&said[..end + 2]), &rest[end + 3..]);
    }
    if said.starts_with(['{', '[']) {
        let end = said.find("}: ").or_else(|| said.find("]: "));
        return (None, end.map_or(said, |end| &said[end + 3..]));
    }
    match said.split_once(": ") {
        Some((value, rule)) if value.parse::<f64>().is_ok() => (Some(value), rule),
        _ => (None, said),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workspace() -> Subject {
        Subject::namespaced("Workspace", "dev", "default")
    }

    fn status(json: serde_json::Value) -> Error {
        from_status(&serde_json::from_value(json).unwrap(), &workspace())
    }

    fn refused(field: &str, reason: &str, message: &str) -> Error {
        status(serde_json::json!({
            "status": "Failure", "reason": "Invalid", "code": 422, "message": "whole text",
            "details": { "causes": [{ "field": field, "reason": reason, "message": message }] },
        }))
    }

    #[test]
    fn exit_statuses_are_a_promise() {
        use Kind::*;
        let table = [
            (Other, 1),
            (Usage, 2),
            (InvalidArgument, 10),
            (NotPermitted, 11),
            (NotFound, 12),
            (FailedPrecondition, 13),
            (Aborted, 14),
            (ResourceExhausted, 15),
            (Timeout, 16),
            (Unavailable, 17),
            (Interrupted, 130),
            (BrokenPipe, 141),
        ];
        for (kind, code) in table {
            assert_eq!(kind.exit_code(), code, "{kind:?}");
        }
    }

    #[test]
    fn every_reason_of_the_api_server_has_its_kind() {
        let table = [
            ("Forbidden", 403, "workspaces \"dev\" is forbidden: User \"bob\" cannot get it", Kind::NotPermitted),
            ("Forbidden", 403, "x is forbidden: exceeded quota: q", Kind::ResourceExhausted),
            (
                "Forbidden",
                403,
                "x is forbidden: ValidatingAdmissionPolicy 'p' with binding 'p' denied request: no",
                Kind::FailedPrecondition,
            ),
            (
                "Forbidden",
                403,
                "x is forbidden: unable to create new content in namespace a because it is being terminated",
                Kind::FailedPrecondition,
            ),
            ("Unauthorized", 401, "Unauthorized", Kind::NotPermitted),
            ("AlreadyExists", 409, "exists", Kind::Aborted),
            ("Conflict", 409, "the object has been modified", Kind::Aborted),
            ("BadRequest", 400, "field label not supported", Kind::InvalidArgument),
            ("ServiceUnavailable", 503, "", Kind::Unavailable),
            ("TooManyRequests", 429, "", Kind::Unavailable),
            ("Failed to parse error data", 404, "404 page not found", Kind::Unavailable),
            ("InternalError", 500, "", Kind::Other),
        ];
        for (reason, code, message, kind) in table {
            let error = status(serde_json::json!({
                "status": "Failure", "reason": reason, "code": code, "message": message,
            }));
            assert_eq!(error.kind, kind, "{reason}: {message}");
            assert_eq!(error.next.is_some_and(|next| next.contains("older release")), message.contains("field label"));
        }
    }

    #[test]
    fn a_stream_into_a_workspace_that_does_not_run_is_a_failed_precondition() {
        let error = status(serde_json::json!({
            "reason": "Conflict", "code": 409, "message": "Workspace \"dev\" is Stopped: start it first",
            "details": { "name": "dev", "causes": [{ "reason": "WorkspaceNotRunning", "message": "" }] },
        }));
        assert_eq!(error, Error::new(Kind::FailedPrecondition, "Workspace \"dev\" is Stopped: start it first"));
    }

    #[test]
    fn what_is_missing_is_named_with_the_command_that_lists_it() {
        let error = status(serde_json::json!({
            "reason": "NotFound", "code": 404, "message": "", "details": { "name": "dev", "kind": "workspaces" },
        }));
        assert_eq!(error.kind, Kind::NotFound);
        assert_eq!(error.message, "Workspace \"dev\" in namespace \"default\" not found");
        assert_eq!(error.next.as_deref(), Some("see what there is: kibo workspace list -n default"));
    }

    #[test]
    fn a_broken_rule_shows_field_value_and_rule() {
        let error = refused(
            "spec.resources.memory",
            "FieldValueInvalid",
            "Invalid value: \"64Mi\": memory must be at least 128Mi",
        );
        assert_eq!(error.kind, Kind::InvalidArgument);
        assert_eq!(
            error.message,
            "Workspace \"dev\" in namespace \"default\" is refused\n  spec.resources.memory \"64Mi\": memory must be at least 128Mi"
        );
    }

    #[test]
    fn a_rule_about_the_state_is_a_failed_precondition() {
        let error = refused("spec.template", "FieldValueForbidden", "Forbidden: spec.template is immutable");
        assert_eq!(error.kind, Kind::FailedPrecondition);
        assert!(error.message.ends_with("\n  spec.template: spec.template is immutable"), "{error}");
    }

    #[test]
    fn values_are_told_from_rules() {
        let table = [
            ("f", "FieldValueInvalid", "Invalid value: {\"a\":\"b\"}: exactly one", "f: exactly one"),
            ("f", "FieldValueInvalid", "Invalid value: exactly one: a or b", "f: exactly one: a or b"),
            ("f", "FieldValueInvalid", "Invalid value: 7: must be less", "f 7: must be less"),
            (
                "f",
                "FieldValueInvalid",
                "Invalid value: \"T_\": f in body should match '^a$'",
                "f \"T_\": should match '^a$'",
            ),
            ("f", "FieldValueRequired", "Required value", "f: must be given"),
            (
                "f",
                "FieldValueTypeInvalid",
                "Invalid value: \"number\": f in body must be of type integer,string: \"number\"",
                "f: must be of type integer or string",
            ),
        ];
        for (field, reason, message, expected) in table {
            assert_eq!(broken_rule(field, reason, message), expected);
        }
    }

    #[test]
    fn a_fraction_without_quotes_is_explained() {
        let error = refused(
            "spec.resources.cpu",
            "FieldValueTypeInvalid",
            "Invalid value: \"number\": spec.resources.cpu in body must be of type integer,string: \"number\"",
        );
        assert!(error.next.unwrap().contains("cpu: \"0.5\""));
    }
}
