//! Logs that are followed, and streams while the leader changes.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kibo_crds::Workspace;
use kibo_crds::workspace::WorkspacePhase;
use kibo_e2e::local::Component;
use kibo_e2e::suite::program::Program;
use kibo_e2e::suite::{Place, STOP, Suite, eventually};
use kube::api::DeleteParams;
use serde_json::json;
use tokio::time::Instant;

const SOON: Duration = Duration::from_secs(40);

fn main() -> ExitCode {
    Suite::with_everything().alone("a_log_is_followed_through_everything", everything).run()
}

/// Counts, and goes on where it was after a restart of the guest. A shell says on standard error that its `sleep` was
/// ended.
const COUNT: &str = "exec 2>/dev/null; i=$(cat /root/i 2>/dev/null || echo 0); trap s=1 TERM; \
                     while [ -z \"$s\" ]; do i=$((i+1)); echo line $i; echo $i > /root/i; sync /root/i; sleep 0.2; done";

/// The numbers of the lines that were printed whole.
fn numbers(program: &Program) -> Result<Vec<u64>> {
    let text = String::from_utf8(program.stdout())?;
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let number = |line: &str| line.strip_prefix("line ").and_then(|number| number.parse().ok());
    whole.lines().map(|line| number(line).with_context(|| format!("{line:?} is torn"))).collect()
}

/// Waits until lines come that are new.
async fn goes_on(program: &Program, after: &str) -> Result<()> {
    let before = numbers(program)?.last().copied().unwrap_or(0);
    eventually(&format!("the log goes on after {after}"), SOON, || async {
        Ok((numbers(program)?.last().copied().unwrap_or(0) > before + 5).then_some(()))
    })
    .await
    .with_context(|| program.stderr())
}

async fn everything(place: Arc<Place>) -> Result<()> {
    let node = Component::Node(place.node("1", "512Mi").await?);
    let mut template = place.template();
    template["spec"]["entrypoint"] = json!({"command": ["/bin/sh", "-c", COUNT]});
    place.create(template).await?;
    place.create_workspace("w", json!({})).await?;
    place.available("w").await?;
    let mut log = Program::start(place.kibo_command(&["workspace", "logs", "w", "-f"]))?;
    log.says("line 5\n").await?;

    parts(&place).await?;

    place.cluster().kill(&node).await?;
    log.remarks("trying to go on").await?;
    place.cluster().start(&node).await?;
    goes_on(&log, "a restart of the daemon").await?;

    // The leader goes in an orderly way: everybody is told.
    let mut exec = Program::start(place.kibo_command(&["workspace", "exec", "w", "--", "sleep", "4242"]))?;
    eventually("the command runs", SOON, || async {
        Ok((place.sh("w", "grep -la '^sleep.[4]242' /proc/[0-9]*/cmdline || true").await?.len() > 1).then_some(()))
    })
    .await?;
    place.cluster().stop(&Component::Operator).await?;
    let code = exec.ended().await?;
    ensure!(code == 17 && exec.stderr().contains("leader"), "{code} {}", exec.stderr());
    place.cluster().start(&Component::Operator).await?;
    goes_on(&log, "a change of the leader").await?;

    // And without a word.
    let mut exec =
        Program::start(place.kibo_command(&["workspace", "exec", "w", "--", "sh", "-c", "echo on; sleep 99"]))?;
    exec.says("on").await?;
    place.cluster().kill(&Component::Operator).await?;
    let code = exec.ended().await?;
    ensure!(code == 17 && exec.stderr().contains("the connection broke"), "{code} {}", exec.stderr());
    place.cluster().start(&Component::Operator).await?;
    goes_on(&log, "the death of the leader").await?;

    place.power("w", json!({"state": "Stopped"})).await?;
    place.phase("w", WorkspacePhase::Stopped, STOP).await?;
    log.remarks("is STOPPED: the log goes on when it starts again").await?;
    place.power("w", json!({"state": "Running"})).await?;
    place.available("w").await?;
    goes_on(&log, "a restart of the guest").await?;

    place.api::<Workspace>().delete("w", &DeleteParams::default()).await?;
    let begun = Instant::now();
    ensure!(log.ended().await? == 0, "{}", log.stderr());
    ensure!(log.stderr().contains("was deleted"), "after {:?}: {}", begun.elapsed(), log.stderr());
    let numbers = numbers(&log)?;
    let expected: Vec<u64> = (1..=numbers.len() as u64).collect();
    let wrong = numbers.iter().zip(&expected).position(|(one, other)| one != other);
    ensure!(
        wrong.is_none(),
        "from {wrong:?} on: {:?}\n{}",
        &numbers[wrong.unwrap_or(0).saturating_sub(3)..],
        log.stderr()
    );
    Ok(())
}

/// The parts of a log that can be asked for.
async fn parts(place: &Place) -> Result<()> {
    let logs = async |args: &[&str]| -> Result<Vec<String>> {
        let ran = place.kibo(&[&["workspace", "logs", "w"][..], args].concat()).await?.ok()?;
        Ok(ran.lines().map(str::to_owned).collect())
    };
    ensure!(logs(&[]).await?[0] == "line 1");
    ensure!(logs(&["--tail", "2"]).await?.len() == 2);
    let times = logs(&["--timestamps"]).await?;
    let (time, line) = times[2].split_once(' ').context("a time")?;
    let time: jiff::Timestamp = time.parse().with_context(|| format!("{time:?} is no time"))?;
    ensure!(line == "line 3", "{line:?}");
    let since = logs(&["--since-time", &time.to_string()]).await?;
    ensure!(since[0] == "line 3", "{:?}", since.first());
    ensure!(logs(&["--since", "1h"]).await?[0] == "line 1");
    Ok(())
}
