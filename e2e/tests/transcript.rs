//! The session that `docs/cli.md` shows is typed again, on a real cluster with a real guest, and gives the same.
//! With `KIBOTOS_UPDATE=1` it is written anew; then run the unit tests of kibo with it, which write `docs/cli.md`.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use kibo_e2e::local::Component;
use kibo_e2e::suite::transcript::{Entry, Normalizer, ended, parse, render, script};
use kibo_e2e::suite::{Place, Suite, eventually};

fn main() -> ExitCode {
    Suite::with_everything().test("the_session_in_the_documentation_is_what_happens", session).run()
}

/// What is not shown: what somebody does at a host, `power off NODE` and `power on NODE`, and what else is typed.
async fn prepare(place: &Place, command: &str) -> Result<()> {
    let Some((switch, node)) = command.strip_prefix("power ").and_then(|rest| rest.split_once(' ')) else {
        return place.bash(command).await?.ok().map(drop);
    };
    let daemon = Component::Node(node.to_owned());
    match switch {
        "off" => {
            place.cluster().kill(&daemon).await?;
            Ok(place.cluster().end_virtual_machines(node).await?)
        }
        "on" => {
            // It hears that it was isolated and ends; its supervisor starts it again.
            place.cluster().spawn(&daemon).await?;
            let ended = async || Ok(place.cluster().process(&daemon).is_none().then_some(()));
            eventually("the isolated daemon has ended", Duration::from_secs(60), ended).await?;
            Ok(place.cluster().start(&daemon).await?)
        }
        _ => bail!("a host is switched off or on"),
    }
}

async fn session(place: Arc<Place>) -> Result<()> {
    let path = place.cluster().programs().repository.join("kibo-cli/src/transcript.txt");
    let text = std::fs::read_to_string(&path).with_context(|| format!("failed to read {}", path.display()))?;
    // Names as a reader would give them: the cluster is this test's own.
    let host = place.host_files("node-1")?;
    let change = |node: &mut kibo_e2e::local::LocalNode| {
        node.labels = [("zone".to_owned(), "a".to_owned())].into();
        node.proc = Some(host.root().to_owned());
    };
    place.node_named("node-1", "2", "1Gi", change).await?;
    let mut normalizer = Normalizer::default().replacing(place.namespace(), "default");
    let (mut again, mut differences) = (Vec::new(), Vec::new());
    for entry in parse(&text) {
        again.push(match entry {
            Entry::Text(text) => Entry::Text(text),
            Entry::Silent(command) => {
                prepare(&place, &command).await.with_context(|| format!("% {command}"))?;
                Entry::Silent(command)
            }
            Entry::Shown { command, output: recorded } => {
                let ran = place.bash(&script(&command)).await?;
                let mut output = ended(&normalizer.normalized(&ran.stdout));
                if ran.code != 0 {
                    let _ = writeln!(output, "[exit status {}]", ran.code);
                }
                if output != recorded {
                    differences.push(format!("$ {command}\n---- recorded\n{recorded}---- now\n{output}"));
                }
                Entry::Shown { command, output }
            }
        });
    }
    if std::env::var_os("KIBOTOS_UPDATE").is_some() {
        return Ok(std::fs::write(&path, render(&again))?);
    }
    if !differences.is_empty() {
        let path = path.display();
        bail!("{path} has drifted: run with KIBOTOS_UPDATE=1, or mend what has changed\n{}", differences.join("\n"));
    }
    Ok(())
}
