//! `kibo volume resize`.

use kibo_crds::{ConditionType, SizeQuantity, Volume};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
};
use serde_json::json;

use super::{One, Resize, api, subject};
use crate::{
    client::Cluster,
    errors::{Error, Kind, On as _, Result, Subject},
    output::{Form, Table, present, print},
    wait::{Look, Wait},
};

/// Conflicts are with the operator, which writes when something happens to the Volume.
const ATTEMPTS: usize = 20;

pub async fn resize(cluster: &Cluster, args: Resize) -> Result<()> {
    let (api, subject) = (api(cluster), subject(cluster, &args.name));
    let before = api.get(&args.name).await.on(&subject)?;
    let volume = match write(&api, &subject, &args.size).await? {
        Some(generation) => settled(cluster, &api, &subject, &args.size, generation, &before).await?,
        None => before,
    };
    if matches!(args.output.form(), Form::Text { .. }) {
        return print(&format!("{subject}: it has {} from the next start on\n", args.size));
    }
    present(args.output.form(), &One { volume, events: Table::default(), now: Cluster::now() })
}

/// Asks for the size; `None`: it has that size, or is asked for it, already.
async fn write(api: &Api<Volume>, subject: &Subject, size: &SizeQuantity) -> Result<Option<i64>> {
    let wanted = size.amount().map_err(|error| Error::invalid(error.to_string()))?;
    for _ in 0..ATTEMPTS {
        let volume = api.get(&subject.name).await.on(subject)?;
        if volume.metadata.deletion_timestamp.is_some() {
            return Err(Error::new(Kind::FailedPrecondition, format!("{subject} is being deleted")));
        }
        if volume.spec.size.amount() == Ok(wanted) && refusal(&volume).is_none() {
            return Ok(None);
        }
        let patch = json!({
            "metadata": { "resourceVersion": volume.resource_version() }, "spec": { "size": size },
        });
        match api.patch(&subject.name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Err(kube::Error::Api(status)) if status.is_conflict() => {}
            answer => return answer.on(subject).map(|written| written.metadata.generation),
        }
    }
    Err(Error::new(Kind::Aborted, format!("{subject} changes too often to be written"))
        .next(format!("look at it and try again: {}", subject.command("get"))))
}

/// Why its image does not get the size that was asked for.
fn refusal(volume: &Volume) -> Option<String> {
    let mut conditions = volume.status.iter().flat_map(|status| &status.conditions);
    let is_refusal =
        |kind: &str, reason: &str| kind == ConditionType::Resized.to_string() && reason == "ResourceExhausted";
    conditions.find(|it| is_refusal(&it.type_, &it.reason)).map(|it| it.message.clone())
}

/// Waits for the operator's word. A size that is refused is taken out of the spec again.
async fn settled(
    cluster: &Cluster,
    api: &Api<Volume>,
    subject: &Subject,
    size: &SizeQuantity,
    generation: i64,
    before: &Volume,
) -> Result<Volume> {
    let wait = Wait {
        api: api.clone(),
        subject,
        goal: "to take the new size",
        timeout: cluster.timeout,
        remains: "the new size stays requested",
        go_on: subject.command("get"),
    };
    let volume = wait
        .until(|seen: Option<&Volume>| {
            let gone = || Error::new(Kind::NotFound, format!("{subject} was deleted meanwhile"));
            let volume = seen.filter(|volume| volume.uid() == before.uid()).ok_or_else(gone)?;
            let observed = volume.status.as_ref().and_then(|status| status.observed_generation);
            if observed.is_none_or(|observed| observed < generation) {
                return Ok(Look::Waiting("the operator has not seen it yet".to_owned()));
            }
            Ok(Look::Done(volume.clone()))
        })
        .await?;
    let Some(message) = refusal(&volume).filter(|_| volume.spec.size == *size) else { return Ok(volume) };
    let error = Error::new(Kind::ResourceExhausted, format!("{subject}: {message}"));
    let has = volume.status.as_ref().and_then(|status| status.grow_to.or(status.size)).map(SizeQuantity::from);
    let patch = json!({
        "metadata": { "resourceVersion": volume.resource_version() },
        "spec": { "size": has.as_ref().unwrap_or(&before.spec.size) },
    });
    let next = match api.patch(&subject.name, &PatchParams::default(), &Patch::Merge(patch)).await {
        Ok(_) => format!("see what the pools have left: {} storage-pool list", crate::errors::program()),
        Err(_) => format!("the size still stands in its spec: ask for what it has, {}", subject.command("get")),
    };
    Err(error.next(next))
}
