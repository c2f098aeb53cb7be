//! `kibo workspace delete`.

use clap::Args;
use kibo_crds::Workspace;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Preconditions},
};

use super::{power::waits_for, target};
use crate::{
    cli::WaitArgs,
    client::Cluster,
    errors::{On as _, Result},
    output::print,
    wait::{Look, Wait},
};

#[derive(Args, Debug)]
pub struct Delete {
    /// Names, or ids (ws-…) in any namespace
    #[arg(required = true, value_name = "WORKSPACE")]
    workspaces: Vec<String>,
    #[command(flatten)]
    wait: WaitArgs,
}

pub async fn delete(cluster: &Cluster, args: Delete) -> Result<()> {
    // All are asked for before the first is waited for: they go at the same time.
    let mut asked = Vec::new();
    for name_or_id in &args.workspaces {
        let (workspace, subject) = target::fetch(cluster, name_or_id).await?;
        let api: Api<Workspace> = cluster.namespaced(&workspace.namespace().unwrap_or_default());
        let uid = workspace.uid();
        let params = DeleteParams {
            preconditions: Some(Preconditions { uid: uid.clone(), resource_version: None }),
            ..DeleteParams::default()
        };
        api.delete(&subject.name, &params).await.map(|_| ()).on(&subject)?;
        asked.push((api, subject, uid));
    }
    for (api, subject, uid) in asked {
        if !args.wait.wanted() {
            print(&format!("{subject} is being deleted\n"))?;
            continue;
        }
        let wait = Wait {
            api,
            subject: &subject,
            goal: "to be gone",
            timeout: cluster.timeout,
            remains: "the deletion goes on",
            go_on: format!("{} --for deleted", subject.command("wait")),
        };
        wait.until(|seen: Option<&Workspace>| {
            Ok(match seen.filter(|workspace| workspace.uid() == uid) {
                None => Look::Done(()),
                Some(workspace) => Look::Waiting(waits_for(workspace)),
            })
        })
        .await?;
        print(&format!("{subject} deleted\n"))?;
    }
    Ok(())
}
