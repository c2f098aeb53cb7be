//! The local cluster as people use it: `kibo-local up`, `status`, `env` and `down`.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use kibo_e2e::local::process::processes_of;
use kibo_e2e::local::{CONTROL_PLANE, Layout, Record};

/// Runs kibo-local on a state directory.
fn run(state: &Path, args: &[&str]) -> Output {
    command(state, args).output().unwrap()
}

fn command(state: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kibo-local"));
    command.args(args).arg("--state").arg(state);
    command
}

fn succeed(state: &Path, args: &[&str]) -> String {
    let output = run(state, args);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{args:?}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

const UP: [&str; 2] = ["up", "--control-plane-only"];

/// Takes a cluster down when its test ends, however it ends.
struct Down<'a>(&'a Path);

impl Drop for Down<'_> {
    fn drop(&mut self) {
        run(self.0, &["down"]);
    }
}

#[test]
fn two_state_directories_are_two_clusters() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    let _down = (Down(&one), Down(&two));
    succeed(&one, &UP);
    succeed(&two, &UP);
    let record = |state: &Path| Record::load(&Layout::new(state.to_owned()).record()).unwrap().unwrap();
    for component in &CONTROL_PLANE {
        assert!(record(&one).alive(component).is_some() && record(&two).alive(component).is_some());
        assert_ne!(record(&one).alive(component), record(&two).alive(component));
    }

    // The end of one is not felt by the other.
    succeed(&one, &["down", "--delete"]);
    assert!(!one.exists());
    assert_eq!(processes_of(&one).len(), 0);
    assert_eq!(processes_of(&two).len(), CONTROL_PLANE.len());
    assert!(succeed(&two, &["status"]).contains("running"));
}

#[test]
fn up_starts_only_what_does_not_run() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let _down = Down(&state);
    succeed(&state, &UP);
    let before = Record::load(&Layout::new(state.clone()).record()).unwrap().unwrap();
    succeed(&state, &UP);
    let after = Record::load(&Layout::new(state.clone()).record()).unwrap().unwrap();
    for component in &CONTROL_PLANE {
        assert_eq!(before.alive(component), after.alive(component));
    }
    assert_eq!(before.ports, after.ports);

    let env = succeed(&state, &["env"]);
    let kubectl = Command::new("sh")
        .args(["-c", &format!("{env}\nexec kubectl get namespaces")])
        .env("KUBECACHEDIR", dir.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&kubectl.stdout).into_owned();
    assert!(kubectl.status.success() && said.contains("kube-system"), "{kubectl:?}");
}

#[test]
fn an_interrupted_up_is_repeated_or_taken_down() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let _down = Down(&state);
    // Killed at the moment at which it has started something.
    let mut up = command(&state, &UP).spawn().unwrap();
    while processes_of(&state).iter().all(|it| it.program == "kibo-local") {
        assert!(up.try_wait().unwrap().is_none(), "up ended before anything was started");
        std::thread::sleep(Duration::from_millis(2));
    }
    up.kill().unwrap();
    up.wait().unwrap();
    succeed(&state, &UP);
    assert_eq!(processes_of(&state).len(), CONTROL_PLANE.len(), "nothing runs twice: {:?}", processes_of(&state));
    succeed(&state, &["down"]);
    assert_eq!(processes_of(&state).len(), 0);
}

/// What etcd leaves when it is killed while it makes its first files: a log without a member in it.
#[test]
fn an_etcd_that_was_killed_while_it_was_born_is_made_anew() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let _down = Down(&state);
    succeed(&state, &UP);
    succeed(&state, &["down"]);
    let layout = Layout::new(state.clone());
    std::fs::remove_file(layout.etcd_in_use()).unwrap();
    let wal = layout.etcd_data().join("member/wal");
    for entry in std::fs::read_dir(&wal).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    std::fs::write(wal.join("0000000000000000-0000000000000000.wal"), [0; 512]).unwrap();
    succeed(&state, &UP);
}

#[test]
fn what_is_not_there_is_said() {
    let dir = tempfile::tempdir().unwrap();
    for args in [["status"], ["env"], ["down"]] {
        let output = run(&dir.path().join("nothing"), &args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("start one with up"), "{args:?}: {said}");
    }
}
