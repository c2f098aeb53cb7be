//! Whoever asked is killed, or is there and does nothing.

use anyhow::{Result, ensure};
use kibo_crds::workspace::WorkspacePhase;
use kibo_crds::{TransferState, Volume, Workspace};
use kibo_e2e::suite::eventually;
use kibo_e2e::suite::program::Program;
use kibo_failpoint::Action;
use rustix::process::Signal;

use crate::LIMIT;
use crate::scene::Scene;

fn transfer(workspace: &Workspace) -> Option<TransferState> {
    workspace.status.as_ref()?.transfer.as_ref().map(|transfer| transfer.state)
}

/// In the middle of an export to a file, and of `import`, which is the one of "victim" and has begun.
pub async fn killed(scene: &Scene, archive: &str, import: Program) -> Result<()> {
    let place = &scene.place;
    let daemon = scene.daemon()?;
    daemon.arm(&["export-reading"], Action::Wait)?;
    let export = Program::start(place.kibo_command(&["transfer", "export", "w", "--to", &scene.path("killed")]))?;
    daemon.all_reached(&["export-reading"], LIMIT).await?;
    export.signal(Signal::KILL)?;
    daemon.clear()?;
    scene.is_free("w").await?;
    ensure!(!scene.files().contains("killed"), "{:?}", scene.files());

    place
        .workspace("victim", "is imported", LIMIT.as_secs(), |it| transfer(it) == Some(TransferState::Running))
        .await?;
    let begun = async || {
        let [layer, _] = scene.disks("victim").await?;
        Ok(scene.entries(&layer).iter().any(|name| name.starts_with("image.raw.importing.")).then_some(layer))
    };
    let layer = eventually("it writes the layer", LIMIT, begun).await?;
    import.signal(Signal::KILL)?;
    let failed = |it: &Workspace| it.status.as_ref().and_then(|status| status.phase) == Some(WorkspacePhase::Failed);
    let left = place.workspace("victim", "has failed", LIMIT.as_secs(), failed).await?;
    let reason = left.status.and_then(|status| status.reason);
    ensure!(reason.as_deref() == Some("ImportFailed"), "{reason:?}");
    let entries = scene.entries(&layer);
    ensure!(entries.iter().all(|name| name.starts_with("holder.")), "something of it is left: {entries:?}");
    let start = place.kibo(&["workspace", "start", "victim"]).await?;
    ensure!(start.code == 13, "{start:?}");

    // The name can be had again, and how is said.
    let again = ["transfer", "import", archive, "--name", "victim"];
    let taken = place.kibo(&again).await?;
    ensure!(taken.code == 14 && taken.stderr.contains("kibo workspace delete victim"), "{taken:?}");
    scene.delete(&["victim".to_owned()]).await?;
    place.gone(place.api::<Volume>(), "victim", LIMIT.as_secs()).await?;
    place.kibo(&again).await?.ok()?;
    scene.same("w", "victim").await
}

/// A kibo that was stopped keeps the disks, until somebody says that it shall not.
pub async fn stopped(scene: &Scene) -> Result<()> {
    let place = &scene.place;
    let nothing = place.kibo(&["transfer", "cancel", "w"]).await?;
    ensure!(nothing.code == 13 && nothing.stderr.contains("nobody exports it now"), "{nothing:?}");
    let daemon = scene.daemon()?;
    daemon.arm(&["export-reading"], Action::Wait)?;
    let mut export = Program::start(place.kibo_command(&["transfer", "export", "w", "--to", &scene.path("stopped")]))?;
    daemon.all_reached(&["export-reading"], LIMIT).await?;
    export.signal(Signal::STOP)?;
    let mut cancel = Program::start(place.kibo_command(&["transfer", "cancel", "w"]))?;
    place.workspace("w", "is given up", LIMIT.as_secs(), |it| transfer(it) == Some(TransferState::Ending)).await?;
    daemon.clear()?;
    ensure!(cancel.ended().await? == 0, "{}", cancel.stderr());
    scene.is_free("w").await?;
    export.signal(Signal::CONT)?;
    ensure!(export.ended().await? == 17 && export.stderr().contains("cancelled it"), "{}", export.stderr());
    ensure!(!scene.files().iter().any(|name| name.contains("stopped")), "{:?}", scene.files());
    Ok(())
}
