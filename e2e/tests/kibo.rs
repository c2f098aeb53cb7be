//! The command line against a real API server and operator, without nodes: what it refuses, with which exit
//! status, what it repeats, what it waits for. What needs a guest is in the other files.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::ConfigMap;
use kibo_crds::{Node, Workspace};
use kibo_e2e::local::{Component, NAMESPACE};
use kibo_e2e::suite::program::Terminal;
use kibo_e2e::suite::typed::{result, said};
use kibo_e2e::suite::{Place, Suite, eventually};
use kibo_protocol::EnrollmentToken;
use kube::api::Api;
use serde_json::Value;

fn main() -> ExitCode {
    Suite::with_operator()
        .test("a_start_without_room_is_resource_exhausted_or_waits", no_room)
        .test("the_same_command_id_gives_the_same_outcome", command_ids)
        .test("a_name_or_an_id_means_the_same_workspace", names_and_ids)
        .test("who_may_not_is_told_so", rights)
        .test("a_long_list_comes_in_pages", pages)
        .test("colours_and_spinners_are_for_terminals", at_a_terminal)
        .test("a_shell_and_kubectl_complete_names", completions)
        .test("an_enrollment_token_fits_the_node_and_the_operator", enrollment)
        .alone("a_wait_outlives_a_restart_of_the_api_server", wait_through_restart)
        .run()
}

async fn template(place: &Place) -> Result<String> {
    place.ensure_template().await?;
    Ok(place.template_name())
}

async fn no_room(place: Arc<Place>) -> Result<()> {
    let template = template(&place).await?;
    // Nodes of nobody, so that those of other tests do not take it.
    let create = |name: &'static str| ["workspace", "create", name, "-t", &template, "--node-selector", "of=nobody"];
    said(&place, &create("fails"), 15, "RESOURCE_EXHAUSTED").await?;
    let shown = result(&place, &["workspace", "get", "fails"]).await?;
    ensure!(shown["state"] == "FAILED" && shown["reason"] == "RESOURCE_EXHAUSTED", "{shown}");
    said(&place, &["workspace", "start", "fails"], 15, "kibo node list").await?;
    said(&place, &["workspace", "wait", "fails"], 15, "RESOURCE_EXHAUSTED").await?;
    said(&place, &["workspace", "exec", "fails", "--", "true"], 13, "kibo workspace start fails").await?;

    let waiting = [&create("waits")[..], &["--when-unplaceable", "wait", "--timeout", "2s"]].concat();
    said(&place, &waiting, 16, "the start stays requested").await?;
    said(&place, &["workspace", "start", "waits"], 13, "not consumed yet").await?;
    said(&place, &["workspace", "stop", "waits"], 0, "STOPPED").await?;
    said(&place, &["workspace", "list", "--state", "stopped", "-q"], 0, "ws-").await?;
    said(&place, &["workspace", "delete", "fails", "waits"], 0, "deleted").await?;
    said(&place, &["workspace", "list"], 0, "no Workspaces").await?;
    Ok(())
}

async fn command_ids(place: Arc<Place>) -> Result<()> {
    let template = template(&place).await?;
    let create = ["workspace", "create", "-t", &template, "--node-selector", "of=nobody", "--command-id", "c/1"];
    said(&place, &create, 15, "cmd-").await?;
    said(&place, &create, 15, "cmd-").await?;
    said(&place, &[&create[..], &["--cpu", "2"]].concat(), 14, "with another input").await?;
    let name =
        result(&place, &["workspace", "list"]).await?["workspaces"][0]["name"].as_str().context("one")?.to_owned();
    said(&place, &["workspace", "create", &name, "-t", &template], 14, "already exists").await?;

    let start = ["workspace", "start", &name, "--command-id", "s/1"];
    said(&place, &start, 15, "RESOURCE_EXHAUSTED").await?;
    let before = place.api::<Workspace>().get(&name).await?.metadata.generation;
    said(&place, &start, 15, "RESOURCE_EXHAUSTED").await?;
    let after = place.api::<Workspace>().get(&name).await?.metadata.generation;
    ensure!(before == after, "a replay asks for nothing");
    said(&place, &["workspace", "stop", &name, "--command-id", "s/1"], 14, "choose a new --command-id").await?;
    said(&place, &["workspace", "stop", &name, "--command-id", "s/2"], 0, "STOPPED").await?;
    // Its request is not the one in force any more; its record is still there.
    said(&place, &start, 15, "RESOURCE_EXHAUSTED").await?;
    Ok(())
}

async fn names_and_ids(place: Arc<Place>) -> Result<()> {
    let template = template(&place).await?;
    let create = ["workspace", "create", "w", "-t", &template, "--node-selector", "of=nobody", "--no-wait"];
    said(&place, &create, 0, "created").await?;
    let id = eventually("it has an id", Duration::from_secs(20), || async {
        let id = place.kibo(&["workspace", "list", "-q"]).await?.ok()?.trim().to_owned();
        Ok(id.starts_with("ws-").then_some(id))
    })
    .await?;
    let by_id = result(&place, &["workspace", "get", &id]).await?;
    ensure!(by_id["name"] == "w" && by_id["workspace_id"] == id.as_str(), "{by_id}");
    said(&place, &["workspace", "create", &id, "-t", &template], 10, "has the form of an id").await?;
    let unknown = "ws-01kb8z4w3w0000000000000000";
    said(&place, &["workspace", "get", unknown], 12, unknown).await?;
    said(&place, &["workspace", "delete", &id], 0, "\"w\"").await?;
    said(&place, &["workspace", "wait", &id, "--for", "deleted"], 0, "").await?;
    Ok(())
}

async fn rights(place: Arc<Place>) -> Result<()> {
    let template = template(&place).await?;
    let nobody = |args: &[&'static str]| [args, &["--as", "nobody"]].concat();
    for args in [&["workspace", "list"][..], &["workspace", "get", "w"], &["node", "list"], &["volume", "list"]] {
        said(&place, &nobody(args), 11, "nobody").await?;
    }
    let bind = ["create", "rolebinding", "reader", "--user", "nobody", "--clusterrole", "view"];
    place.kubectl(&bind).await?.ok()?;
    eventually("the role is in force", Duration::from_secs(20), || async {
        let ran = place.kibo(&nobody(&["workspace", "list"])).await?;
        Ok((ran.code == 0).then_some(()))
    })
    .await?;
    let create = ["workspace", "create", "w", "-t", &template, "--as", "nobody"];
    said(&place, &create, 11, "cannot create").await?;
    // What runs on a node is looked for everywhere, unless somebody says where to look.
    let by_node = "kibo workspace list --node any --as nobody";
    let everywhere = place.bash(by_node).await?;
    ensure!(everywhere.code == 11 && everywhere.stderr.contains("say with -n where it is"), "{everywhere:?}");
    let here = place.bash(&format!("{by_node} -n {}", place.namespace())).await?;
    ensure!(here.code == 0 && here.stderr.contains("no Workspaces"), "{here:?}");
    Ok(())
}

async fn pages(place: Arc<Place>) -> Result<()> {
    for name in ["a", "b", "c"] {
        place.kibo(&["volume", "create", name, "--size", "16Mi"]).await?.ok()?;
    }
    let first = result(&place, &["volume", "list", "--page-size", "2"]).await?;
    let token = first["next_page_token"].as_str().context("a second page")?;
    let rest = result(&place, &["volume", "list", "--page-size", "2", "--page-token", token]).await?;
    let names = |page: &Value| -> Vec<String> {
        let volumes = page["volumes"].as_array().cloned().unwrap_or_default();
        volumes.iter().filter_map(|volume| volume["name"].as_str().map(str::to_owned)).collect()
    };
    ensure!(names(&first) == ["a", "b"] && names(&rest) == ["c"], "{first} {rest}");
    ensure!(rest["next_page_token"].is_null(), "{rest}");
    said(&place, &["volume", "list", "--page-size", "2", "--page-token", "x"], 10, "").await?;
    said(&place, &["volume", "list", "--page-size", "2", "--all", "-q"], 0, "a\nb\nc\n").await?;
    said(&place, &["volume", "delete", "a", "b", "c"], 0, "deleted").await?;
    Ok(())
}

async fn at_a_terminal(place: Arc<Place>) -> Result<()> {
    const ESCAPE: &str = "\u{1b}[";
    let template = template(&place).await?;
    let create = ["workspace", "create", "w", "-t", &template, "--node-selector", "of=nobody"];
    said(&place, &[&create[..], &["--when-unplaceable", "wait", "--no-wait"]].concat(), 0, "created").await?;
    let list = ["workspace", "list"];
    let shown = async |command: &tokio::process::Command, code: i32| {
        let mut at = Terminal::start(command, 120, 40)?;
        ensure!(at.ended().await? == code, "{:?}", at.text());
        anyhow::Ok(at.text())
    };
    let coloured = shown(&place.kibo_command(&list), 0).await?;
    ensure!(coloured.contains("NAME") && coloured.contains(ESCAPE), "{coloured:?}");
    let plain = shown(place.kibo_command(&list).env("NO_COLOR", "1"), 0).await?;
    ensure!(plain.contains("NAME") && !plain.contains(ESCAPE), "{plain:?}");
    let wait = ["workspace", "wait", "w", "--timeout", "1s"];
    let spins = shown(&place.kibo_command(&wait), 16).await?;
    ensure!(spins.contains("waiting for w "), "{spins:?}");
    for args in [&list[..], &wait] {
        let piped = place.kibo(args).await?;
        let all = piped.stdout + &piped.stderr;
        ensure!(!all.contains(ESCAPE) && !all.contains("waiting for w "), "{all:?}");
    }
    Ok(())
}

/// Types at a zsh with a terminal of its own until Tab has completed the line.
const ZSH: &str = r#"
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "autoload -Uz compinit; compinit -D -u; source <(kibo completions zsh); echo rea''dy"
zpty -r -m shell text '*ready*'
zpty -w -n shell $'kibo workspace get d\t'
zpty -r -m shell text '*get dev*'
print -r -- "$text""#;

async fn completions(place: Arc<Place>) -> Result<()> {
    let template = template(&place).await?;
    let namespace = place.namespace().to_owned();
    for name in ["dev", "web"] {
        let create = ["workspace", "create", name, "-t", &template, "--node-selector", "of=nobody", "--no-wait"];
        said(&place, &create, 0, "created").await?;
    }
    said(&place, &["volume", "create", "data", "--size", "16Mi"], 0, "created").await?;
    let id = eventually("it has an id", Duration::from_secs(20), || async {
        let shown = result(&place, &["workspace", "get", "dev"]).await?;
        Ok(shown["workspace_id"].as_str().map(str::to_owned))
    })
    .await?;

    // What bash does when somebody presses Tab behind the line.
    let typed = |line: String| {
        let place = place.clone();
        async move {
            let press = "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_TYPE=9
                _clap_complete_kibo kibo \"${COMP_WORDS[COMP_CWORD]}\"; printf '%s\\n' \"${COMPREPLY[@]}\"";
            let script = format!("source <(kibo completions bash); COMP_WORDS=({line}); {press}");
            let text = place.bash(&script).await?.ok()?;
            anyhow::Ok(text.lines().map(str::to_owned).collect::<Vec<_>>())
        }
    };
    let offers = |line: &str, expected: &[&str]| {
        let (asked, line) = (typed(line.to_owned()), line.to_owned());
        let expected: Vec<_> = expected.iter().map(|&name| name.to_owned()).collect();
        async move {
            let offered = asked.await?;
            ensure!(offered == expected, "{line}: {offered:?}, not {expected:?}");
            Ok(())
        }
    };
    offers("kibo workspace get ''", &["dev", "web"]).await?;
    offers("kibo ws delete dev ''", &["web"]).await?;
    offers(&format!("kibo workspace stop -n {namespace} d"), &["dev"]).await?;
    offers("kibo workspace stop -n kube-system d", &[""]).await?;
    offers(&format!("kibo workspace get {}", &id[..20]), &[&id]).await?;
    offers(&format!("kibo workspace create x -t {}", &template[..5]), &[&template]).await?;
    offers("kibo workspace create x --volume da", &["data:"]).await?;
    offers(&format!("kibo volume list -n {}", &namespace[..namespace.len() - 1]), &[&namespace]).await?;
    // A cluster that does not answer costs two seconds at most, and says nothing.
    let silent = place.bash("kibo completions bash >/dev/null; KIBO_COMPLETE=bash _CLAP_COMPLETE_INDEX=3 kibo -- kibo --kubeconfig /none workspace get ''").await?;
    ensure!(silent.stderr.is_empty(), "{silent:?}");

    // The other shells, in their own words.
    let fish = "fish --no-config -c 'kibo completions fish | source; complete -C \"kibo workspace get d\"'";
    let offered = place.bash(fish).await?.ok()?;
    ensure!(offered.split_whitespace().next() == Some("dev") && offered.lines().count() == 1, "fish: {offered}");
    let zsh = place.bash(&format!("zsh -f <<'EOF'\n{ZSH}\nEOF")).await?.ok()?;
    ensure!(zsh.contains("kibo workspace get dev"), "zsh: {zsh}");

    let asked = place.bash("kubectl __complete kibo workspace get ''").await?.ok()?;
    ensure!(asked.contains("dev\t") && asked.contains("web\t") && asked.ends_with(":4\n"), "{asked}");
    Ok(())
}

async fn enrollment(place: Arc<Place>) -> Result<()> {
    let id = format!("kibo-{}", std::process::id());
    let issue = ["enrollment", "issue", &id, "--ttl", "10m"];
    let parsed = |text: String| text.trim().parse::<EnrollmentToken>().context("a token");
    let first = parsed(place.kibo(&issue).await?.ok()?)?;
    let second = parsed(place.kibo(&issue).await?.ok()?)?;
    ensure!(first.node_id == id && first.secret != second.secret, "each token is another");
    let node: Node = place.all().get(&id).await?;
    let grant = node.spec.enrollment.context("a pending grant")?;
    ensure!(grant.secret_hash == second.secret.hash().to_string(), "the newest token counts");

    let ca: ConfigMap = Api::namespaced(place.client(), NAMESPACE).get("kibotos-ca").await?;
    let file = place.cluster().layout().root().join("kibo-ca.crt");
    std::fs::write(&file, ca.data.context("the CA")?.remove("ca.crt").context("the CA")?)?;
    let by_file = [&issue[..], &["--ca-file", file.to_str().context("UTF-8")?]].concat();
    ensure!(parsed(place.kibo(&by_file).await?.ok()?)?.ca_hash == first.ca_hash);

    said(&place, &["node", "get", &id], 0, "a token was issued and works until").await?;
    said(&place, &["enrollment", "issue", "Not_A_Node"], 10, "Not_A_Node").await?;
    said(&place, &["node", "get", "no-such-node"], 12, "kibo node list").await?;
    // Nobody has used it, so that it may go.
    place.kubectl(&["delete", "nodes.kibotos.dev", &id]).await?.ok()?;
    Ok(())
}

async fn wait_through_restart(place: Arc<Place>) -> Result<()> {
    let template = template(&place).await?;
    let create = ["workspace", "create", "w", "-t", &template, "--node-selector", "of=nobody"];
    let waiting = [&create[..], &["--when-unplaceable", "wait", "--no-wait"]].concat();
    said(&place, &waiting, 0, "created").await?;
    let waiter = tokio::spawn({
        let place = place.clone();
        async move { place.kibo(&["workspace", "wait", "w", "--for", "stopped", "--timeout", "100s"]).await }
    });
    eventually("it waits", Duration::from_secs(20), || async {
        let shown = result(&place, &["workspace", "get", "w"]).await?;
        Ok((shown["reason"] == "RESOURCE_EXHAUSTED").then_some(()))
    })
    .await?;
    place.cluster().kill(&Component::ApiServer).await?;
    let nowhere = place.kibo(&["workspace", "list"]).await?;
    ensure!(nowhere.code == 17 && nowhere.stderr.contains("cannot reach the Kubernetes API at"), "{nowhere:?}");
    place.cluster().start(&Component::ApiServer).await?;
    ensure!(!waiter.is_finished(), "the wait goes on");
    // The operator may need a moment to lead again.
    said(&place, &["workspace", "stop", "w", "--timeout", "60s"], 0, "STOPPED").await?;
    let waited = waiter.await??;
    ensure!(waited.code == 0, "{waited:?}");
    Ok(())
}
