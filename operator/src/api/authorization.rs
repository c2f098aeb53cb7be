//! Whether a user may do it: Kubernetes decides, by a SubjectAccessReview.

use std::{collections::BTreeMap, fmt};

use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec, SubjectAccessReviewStatus,
};
use kube::{Api, Client, api::PostParams};

use super::{
    discovery::{GROUP, VERSION},
    front_proxy::User,
    request::Subresource,
    status::{ApiError, answered},
};

/// Which Workspace, and what of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub namespace: String,
    pub name: String,
    pub subresource: Subresource,
}

impl Target {
    /// What a user must be allowed in order to use it.
    pub fn right(&self) -> Right {
        Right {
            verb: self.subresource.verb(),
            resource: "workspaces",
            subresource: Some(self.subresource.name()),
            namespace: Some(self.namespace.clone()),
            name: Some(self.name.clone()),
        }
    }
}

/// A right in the group of this API, as RBAC gives it. Displayed as Kubernetes words the lack of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Right {
    pub verb: &'static str,
    pub resource: &'static str,
    pub subresource: Option<&'static str>,
    /// Absent: in all of them.
    pub namespace: Option<String>,
    /// Absent: for every one.
    pub name: Option<String>,
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {} resource \"{}", self.verb, self.resource)?;
        if let Some(subresource) = self.subresource {
            write!(f, "/{subresource}")?;
        }
        write!(f, "\" in API group {GROUP:?} ")?;
        match &self.namespace {
            Some(namespace) => write!(f, "in the namespace {namespace:?}"),
            None => f.write_str("at the cluster scope"),
        }
    }
}

/// Asks Kubernetes; an error means that the request is not served.
pub async fn authorize(client: &Client, user: &User, right: &Right) -> Result<(), ApiError> {
    let reviews: Api<SubjectAccessReview> = Api::all(client.clone());
    let (params, review) = (PostParams::default(), review(user, right));
    let review = answered("asking whether the user may do this", reviews.create(&params, &review)).await?;
    decide(user, right, review.status)
}

fn review(user: &User, right: &Right) -> SubjectAccessReview {
    SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: Some(user.name.clone()),
            uid: user.uid.clone(),
            groups: Some(user.groups.clone()),
            extra: (!user.extra.is_empty()).then(|| user.extra.clone() as BTreeMap<_, _>),
            resource_attributes: Some(ResourceAttributes {
                group: Some(GROUP.to_owned()),
                version: Some(VERSION.to_owned()),
                resource: Some(right.resource.to_owned()),
                subresource: right.subresource.map(str::to_owned),
                verb: Some(right.verb.to_owned()),
                namespace: right.namespace.clone(),
                name: right.name.clone(),
                ..ResourceAttributes::default()
            }),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    }
}

/// Only a plain yes is a yes: no answer, or an explicit denial beside it, is none.
fn decide(user: &User, right: &Right, answer: Option<SubjectAccessReviewStatus>) -> Result<(), ApiError> {
    let answer = answer.unwrap_or_default();
    if answer.allowed && !answer.denied.unwrap_or_default() {
        return Ok(());
    }
    let why = [answer.reason, answer.evaluation_error].into_iter().flatten().filter(|text| !text.is_empty());
    Err(ApiError::Forbidden {
        user: user.name.clone(),
        right: Box::new(right.clone()),
        why: why.fold(String::new(), |all, text| format!("{all}: {text}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jane() -> User {
        User { name: "jane".to_owned(), groups: vec!["dev".to_owned()], ..User::default() }
    }

    fn target(subresource: Subresource) -> Target {
        Target { namespace: "team".to_owned(), name: "dev".to_owned(), subresource }
    }

    #[test]
    fn the_question_names_user_verb_and_the_one_workspace() {
        for (subresource, verb) in [
            (Subresource::Exec, "create"),
            (Subresource::PortForward, "create"),
            (Subresource::FilesRead, "get"),
            (Subresource::FilesWrite, "update"),
            (Subresource::Log, "get"),
            (Subresource::Export, "create"),
            (Subresource::Import, "create"),
            (Subresource::CancelExport, "delete"),
            (Subresource::CancelImport, "delete"),
        ] {
            let spec = review(&jane(), &target(subresource).right()).spec;
            let attributes = spec.resource_attributes.unwrap();
            assert_eq!((spec.user.as_deref(), spec.groups), (Some("jane"), Some(vec!["dev".to_owned()])));
            let said = [
                attributes.group,
                attributes.resource,
                attributes.subresource,
                attributes.verb,
                attributes.namespace,
                attributes.name,
            ];
            let expected = ["subresources.kibotos.dev", "workspaces", subresource.name(), verb, "team", "dev"];
            assert_eq!(said, expected.map(|text| Some(text.to_owned())));
        }
    }

    #[test]
    fn only_a_plain_yes_is_a_yes() {
        let answer = |allowed, denied| {
            Some(SubjectAccessReviewStatus { allowed, denied, ..SubjectAccessReviewStatus::default() })
        };
        for (answer, allowed) in [
            (answer(true, None), true),
            (answer(true, Some(false)), true),
            (answer(false, None), false),
            (answer(true, Some(true)), false),
            (answer(false, Some(true)), false),
            (None, false),
        ] {
            let decision = decide(&jane(), &target(Subresource::Exec).right(), answer.clone());
            assert_eq!(decision.is_ok(), allowed, "{answer:?}");
        }
    }

    #[test]
    fn a_refusal_passes_on_why() {
        let answer = SubjectAccessReviewStatus {
            evaluation_error: Some("role \"x\" not found".to_owned()),
            ..SubjectAccessReviewStatus::default()
        };
        let error = decide(&jane(), &target(Subresource::Exec).right(), Some(answer)).unwrap_err();
        assert!(error.to_string().contains("role \"x\" not found"), "{error}");
    }
}
