//! What people get wrong, and what they are told.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, ensure};
use kibo_crds::Workspace;
use kibo_e2e::local::{Component, process};
use kibo_e2e::suite::{Place, START, Suite, condition, eventually, has_failed, why};
use serde_json::json;

fn main() -> ExitCode {
    Suite::with_everything()
        .test("an_unknown_template_is_named", unknown_template)
        .test("a_root_image_that_is_none_fails_the_start", bad_root_image)
        .test("a_missing_root_image_is_named", missing_root_image)
        .test("an_entrypoint_that_does_not_exist_is_named", bad_entrypoint)
        .test("a_broken_config_stops_the_daemon_with_the_key", broken_config)
        .test("kibo_says_what_is_wrong_and_what_to_do", kibo_errors)
        .run()
}

/// Waits for a Workspace to say in its status what is wrong; it may wait for a mend or have failed.
async fn complaint(place: &Place, name: &str, seconds: u64, about: &str) -> Result<Workspace> {
    let says = |it: &Workspace| {
        let placed = condition(it, "Placed").map(|it| it.message.clone()).unwrap_or_default();
        why(it).contains(about) || placed.contains(about)
    };
    place.workspace(name, &format!("complains about {about}"), seconds, says).await
}

async fn unknown_template(place: Arc<Place>) -> Result<()> {
    place.node("1", "512Mi").await?;
    let mut manifest = place.workspace_manifest("w");
    manifest["spec"]["template"] = json!("no-such-template");
    place.create(manifest).await?;
    complaint(&place, "w", 20, "no-such-template").await?;

    let by_kibo = place.kibo(&["workspace", "create", "v", "--template", "no-such-template"]).await?;
    ensure!(by_kibo.code == 12 && by_kibo.stderr.contains("no-such-template"), "{by_kibo:?}");
    Ok(())
}

async fn bad_root_image(place: Arc<Place>) -> Result<()> {
    // Images of its own: one of them is no file system.
    let images = place.cluster().layout().root().join("bad-images");
    std::fs::create_dir_all(&images)?;
    std::fs::write(images.join("broken.erofs"), vec![0x5a; 1 << 20])?;
    place.node_with("1", "512Mi", |node| node.images = Some(images)).await?;
    let mut template = place.template();
    template["spec"]["rootImage"] = json!("broken");
    place.create(template).await?;
    place.create_workspace("w", json!({})).await?;
    let failed = place.workspace("w", "has failed", START, has_failed).await?;
    ensure!(why(&failed).contains("root"), "it says that the root image is bad: {}", why(&failed));
    Ok(())
}

async fn missing_root_image(place: Arc<Place>) -> Result<()> {
    place.node("1", "512Mi").await?;
    let mut template = place.template();
    template["spec"]["rootImage"] = json!("no-such-image");
    place.create(template).await?;
    place.create_workspace("w", json!({"power": {"state": "Running", "whenUnplaceable": "Fail"}})).await?;
    place.workspace("w", "has failed", 30, has_failed).await?;
    complaint(&place, "w", 5, "image").await.map(drop)
}

async fn bad_entrypoint(place: Arc<Place>) -> Result<()> {
    place.node("1", "512Mi").await?;
    let mut template = place.template();
    template["spec"]["entrypoint"] = json!({"command": ["/no/such/program"], "restart": "Never"});
    place.create(template).await?;
    place.create_workspace("w", json!({})).await?;
    let failed = place.workspace("w", "has failed", START, has_failed).await?;
    ensure!(why(&failed).contains("/no/such/program"), "{}", why(&failed));
    Ok(())
}

async fn broken_config(place: Arc<Place>) -> Result<()> {
    let id = place.node("1", "512Mi").await?;
    let config = place.cluster().layout().node(&id).join("config.toml");
    let good = std::fs::read_to_string(&config)?;
    let daemon = place.cluster().programs().node_daemon();
    let table = [
        (r#"cpu = "1""#, r#"cpu = "some""#, "resources.cpu"),
        (r#"memory = "512Mi""#, r#"memory = "1.5""#, "resources.memory"),
        (r#"accelerator = "tcg""#, r#"accelerator = "xen""#, "vmm.accelerator"),
        (r#"qemu = "/usr/bin/qemu-system-x86_64""#, r#"qemu = "/no/qemu""#, "vmm.qemu"),
        ("[control]\n", "[control]\nport = 1\n", "port"),
        ("[resources]\n", "", "resources"),
    ];
    for (from, to, names) in table {
        ensure!(good.contains(from), "the config has {from}: {good}");
        let broken = config.with_file_name("broken.toml");
        std::fs::write(&broken, good.replacen(from, to, 1))?;
        let check = tokio::process::Command::new(&daemon).args(["check", "--config"]).arg(&broken).output().await?;
        let said = String::from_utf8_lossy(&check.stderr).into_owned();
        ensure!(!check.status.success(), "a config with {to} was taken");
        ensure!(said.contains(names), "{to}: the error does not name {names}: {said}");
    }
    // The good one is good, and the daemon that runs with it was not touched.
    let check = tokio::process::Command::new(&daemon).args(["check", "--config"]).arg(&config).output().await?;
    ensure!(check.status.success(), "{}", String::from_utf8_lossy(&check.stderr));
    ensure!(place.cluster().process(&Component::Node(id)).is_some());
    Ok(())
}

async fn kibo_errors(place: Arc<Place>) -> Result<()> {
    place.ensure_template().await?;
    let template = place.template_name();
    let table: [(&[&str], i32, &str); 6] = [
        (&["workspace", "get", "nobody"], 12, "nobody"),
        (&["workspace", "create"], 2, "--template"),
        (&["workspace", "create", "w", "-t", &template, "--memory", "64Mi"], 10, "128Mi"),
        (&["workspace", "create", "w", "-t", &template, "--cpu", "0"], 10, "1m"),
        (&["workspace", "create", "Not_A_Name", "-t", &template], 10, "Not_A_Name"),
        (&["workspace", "exec", "nobody", "--", "true"], 12, "nobody"),
    ];
    for (args, code, says) in table {
        let ran = place.kibo(args).await?;
        ensure!(ran.code == code && ran.stderr.contains(says), "{args:?}: expected {code} and {says:?}: {ran:?}");
    }
    // An API server that is not there is unavailable, not a crash.
    let nowhere = place.kibo(&["workspace", "list", "--kubeconfig", "/no/such/kubeconfig"]).await?;
    ensure!(nowhere.code != 0 && nowhere.stderr.contains("/no/such/kubeconfig"), "{nowhere:?}");
    eventually("the operator has not crashed over any of it", std::time::Duration::from_secs(1), || async {
        let log = process::tail(&place.cluster().log(&Component::Operator), 400);
        ensure!(!log.contains("panicked"), "{log}");
        Ok(Some(()))
    })
    .await
}
