//! Changes of what a Workspace is made of, while it holds no execution: each guarded by what was looked at, and nothing is
//! started or stopped by it.

use kibo_crds::{Workspace, workspace::Revisions};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

use super::{page::One, target};
use crate::{
    client::Cluster,
    errors::{Error, Kind, On as _, Result, Subject},
    output::{Form, present, print},
    wait::{Look, Wait},
};

/// Conflicts are with the operator, which writes when something happens to the Workspace.
const ATTEMPTS: usize = 20;

/// The Workspace that is to be changed.
pub struct Target<'a> {
    cluster: &'a Cluster,
    pub api: Api<Workspace>,
    pub subject: Subject,
    uid: Option<String>,
}

/// A facet with a revision of its own.
#[derive(Clone, Copy)]
pub enum Facet {
    Resources,
    Binding,
}

impl Facet {
    fn of(self, revisions: &Revisions) -> u64 {
        match self {
            Self::Resources => revisions.resources.revision,
            Self::Binding => revisions.binding.revision,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Resources => "resources",
            Self::Binding => "binding",
        }
    }
}

/// What is to be written: the part of the spec for a merge, or nothing where the Workspace has it already.
pub enum Wanted {
    Nothing,
    Spec(Value),
}

impl<'a> Target<'a> {
    pub async fn find(cluster: &'a Cluster, name_or_id: &str) -> Result<Self> {
        let (workspace, subject) = target::fetch(cluster, name_or_id).await?;
        let api = cluster.namespaced(&workspace.namespace().unwrap_or_default());
        Ok(Self { cluster, api, subject, uid: workspace.uid() })
    }

    pub fn namespace(&self) -> &str {
        self.subject.namespace.as_deref().unwrap_or_default()
    }

    fn gone(&self) -> Error {
        Error::new(Kind::NotFound, format!("{} was deleted meanwhile", self.subject))
    }

    /// Waits until a look at it, as the operator has seen it with its newest spec, is done.
    pub async fn once_seen<T>(
        &self,
        goal: &str,
        remains: &str,
        look: impl Fn(&Workspace) -> Result<Look<T>>,
    ) -> Result<T> {
        let go_on = self.subject.command("get");
        let (api, timeout) = (self.api.clone(), self.cluster.timeout);
        let wait = Wait { api, subject: &self.subject, goal, timeout, remains, go_on };
        wait.until(|seen| {
            let workspace = seen.filter(|seen| seen.uid() == self.uid).ok_or_else(|| self.gone())?;
            if workspace.metadata.deletion_timestamp.is_some() {
                let message = format!("{} is being deleted", self.subject);
                return Err(Error::new(Kind::FailedPrecondition, message));
            }
            let observed = workspace.status.as_ref().and_then(|status| status.observed_generation);
            if observed.is_none() || observed < workspace.metadata.generation {
                return Ok(Look::Waiting("the operator has not seen it yet".to_owned()));
            }
            look(workspace)
        })
        .await
    }

    /// The Workspace with the revisions of its newest spec.
    pub async fn current(&self) -> Result<Workspace> {
        self.once_seen("to be seen by the operator", "nothing was changed", |it| Ok(Look::Done(it.clone()))).await
    }

    /// Decides on what there is and writes, until nobody else wrote in between. With an expected revision, another one
    /// is refused, also when the content would be the same.
    pub async fn change(
        &self,
        expected: Option<(Facet, u64)>,
        decide: impl Fn(&Workspace) -> Result<Wanted>,
    ) -> Result<Option<Workspace>> {
        for _ in 0..ATTEMPTS {
            let workspace = self.current().await?;
            if let Some((facet, expected)) = expected {
                self.check(&workspace, facet, expected)?;
            }
            let Wanted::Spec(spec) = decide(&workspace)? else { return Ok(None) };
            match self.write(&workspace, spec).await {
                Err(kube::Error::Api(status)) if status.is_conflict() => {}
                answer => return answer.map(Some).on(&self.subject),
            }
        }
        Err(Error::new(Kind::Aborted, format!("{} changes too often to be written", self.subject))
            .next(format!("look at it and try again: {}", self.subject.command("get"))))
    }

    /// A merge into the spec, guarded by the version that was decided on.
    pub async fn write(&self, observed: &Workspace, spec: Value) -> kube::Result<Workspace> {
        let patch = json!({ "metadata": { "resourceVersion": observed.resource_version() }, "spec": spec });
        self.api.patch(&self.subject.name, &PatchParams::default(), &Patch::Merge(patch)).await
    }

    /// Takes a wish back that the operator refused, unless somebody has changed it since. What is in the way of that is
    /// told with the refusal.
    pub async fn take_back(&self, spec: Value, is_still_mine: impl Fn(&Workspace) -> bool, refusal: Error) -> Error {
        for _ in 0..ATTEMPTS {
            let Ok(workspace) = self.api.get(&self.subject.name).await else { break };
            if !is_still_mine(&workspace) {
                return refusal;
            }
            match self.write(&workspace, spec.clone()).await {
                Err(kube::Error::Api(status)) if status.is_conflict() => {}
                Ok(_) => return refusal,
                Err(_) => break,
            }
        }
        let next = format!("it still stands in the spec: take it out there, {}", self.subject.command("get"));
        refusal.next(next)
    }

    fn check(&self, workspace: &Workspace, facet: Facet, expected: u64) -> Result<()> {
        let revisions = workspace.status.as_ref().and_then(|status| status.revisions.as_ref());
        let found = revisions.map(|revisions| facet.of(revisions)).unwrap_or_default();
        if found == expected {
            return Ok(());
        }
        let name = facet.name();
        let message = format!("{} has {name} revision {found}, not {expected}; nothing was changed", self.subject);
        Err(Error::new(Kind::Aborted, message)
            .next(format!("look at what changed and decide again: {}", self.subject.command("get"))))
    }

    /// Says what came of it.
    pub async fn finish(&self, form: Form, done: &str) -> Result<()> {
        if matches!(form, Form::Text { .. }) {
            return print(&format!("{}: {done}\n", self.subject));
        }
        let workspace = self.current().await?;
        present(form, &One::gather(self.cluster, workspace).await)
    }
}
