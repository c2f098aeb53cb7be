//! Instances with real guests under QEMU: their whole life, and what can break it.

mod node;

use std::{
    os::unix::fs::PermissionsExt as _,
    time::{Duration, Instant},
};

use futures::StreamExt as _;
use kibo_node_daemon::{accelerator, config::DiskIo, instance::StopMode, vmm::Aio};
use kibo_protocol::v1::{EndReason, InstanceState, ObjectUse, instance_event::Kind};

use node::{TestNode, Workspace, kill, signal};
use rustix::process::Signal;

#[test]
fn a_workspace_runs_stops_and_finds_its_data_again() {
    let node = TestNode::new();
    let mut workspace = Workspace::new();
    let daemon = node.daemon();

    let first = daemon.start(workspace.next(&node));
    let boot_id = daemon.available(first);
    let (code, printed) = daemon.sh(first, "cat /proc/sys/kernel/random/boot_id; hostname; exit 3");
    assert_eq!((code, printed.as_str()), (3, format!("{boot_id}\ntest\n").as_str()));
    assert_eq!(daemon.instances.list()[0].state, InstanceState::Running);
    let (code, printed) = daemon.sh(first, "echo layer > /root/a && echo volume > /data/b");
    assert_eq!(code, 0, "{printed}");

    assert!(daemon.instances.stop(first, StopMode::Normal));
    let (reason, ended) = daemon.ended(first);
    assert_eq!(reason, EndReason::Stopped, "{ended:?}");
    assert_eq!(ended.objects.len(), 2);
    assert!(ended.objects.iter().all(|object| object.r#use() == ObjectUse::Released), "{ended:?}");
    node.assert_nothing_left();

    let second = daemon.start(workspace.next(&node));
    assert_ne!(daemon.available(second), boot_id);
    assert_eq!(daemon.sh(second, "cat /root/a /data/b"), (0, "layer\nvolume\n".to_owned()));
    daemon.instances.stop(second, StopMode::Force);
    assert_eq!(daemon.ended(second).0, EndReason::ForceStopped);
    node.assert_nothing_left();
}

#[test]
fn the_entrypoint_is_logged_and_its_end_is_told() {
    let node = TestNode::new();
    let mut workspace = Workspace::new();
    workspace.entrypoint = ["/bin/sh", "-c", "echo out; echo err >&2; exit 5"].map(str::to_owned).to_vec();
    let daemon = node.daemon();
    let instance = daemon.start(workspace.next(&node));
    daemon.available(instance);
    let code = daemon.wait_for(instance, "EntrypointExited", |kind| match kind {
        Kind::EntrypointExited(exited) => Some((exited.code, exited.will_restart)),
        _ => None,
    });
    assert_eq!(code, (Some(5), false));
    daemon.instances.stop(instance, StopMode::Normal);
    daemon.ended(instance);
    let log = daemon.instances.log(&node::follow(workspace.uid())).unwrap();
    let chunks: Vec<_> = daemon.block_on(log.collect());
    let stderr: Vec<_> = chunks.iter().filter(|chunk| chunk.is_stderr).map(|chunk| chunk.data.as_ref()).collect();
    assert_eq!(stderr, [b"err\n"]);
    let stdout: Vec<_> = chunks.iter().filter(|chunk| !chunk.is_stderr).map(|chunk| chunk.data.as_ref()).collect();
    assert_eq!(stdout, [b"out\n"]);
}

#[test]
fn a_killed_vm_is_told_at_once_and_leaves_nothing() {
    let node = TestNode::new();
    let mut workspace = Workspace::new();
    let daemon = node.daemon();
    let instance = daemon.start(workspace.next(&node));
    daemon.available(instance);
    let pids = node.processes();
    let killed = Instant::now();
    pids.iter().copied().for_each(kill);
    let (reason, ended) = daemon.ended(instance);
    assert!(killed.elapsed() < Duration::from_secs(3), "told after {:?}", killed.elapsed());
    assert_eq!(pids.len(), 1);
    assert_eq!(reason, EndReason::VmmExited);
    assert!(ended.message.contains("signal 9"), "{ended:?}");
    node.assert_nothing_left();

    let again = daemon.start(workspace.next(&node));
    daemon.available(again);
    daemon.block_on(daemon.instances.destroy_all(EndReason::Isolated, "isolated by the test"));
    assert_eq!(daemon.ended(again).0, EndReason::Isolated);
    node.assert_nothing_left();
}

#[test]
fn a_new_daemon_adopts_what_runs() {
    let node = TestNode::new();
    let mut workspace = Workspace::new();
    workspace.entrypoint =
        ["/bin/sh", "-c", "n=0; while :; do n=$((n+1)); echo $n; sleep 0.1; done"].map(str::to_owned).to_vec();
    let daemon = node.daemon();
    let instance = daemon.start(workspace.next(&node));
    let boot_id = daemon.available(instance);
    let before = daemon.log_lines(&workspace, 3);
    let pids = node.processes();
    daemon.die();

    let daemon = node.daemon();
    assert_eq!(node.processes(), pids, "the same VM");
    assert_eq!(daemon.instances.list().len(), 1);
    let (code, printed) = until_answered(|| daemon.try_sh(instance, "cat /proc/sys/kernel/random/boot_id"));
    assert_eq!((code, printed.trim()), (0, boot_id.as_str()));
    let available = daemon.events(instance).iter().filter(|kind| matches!(kind, Kind::Available(_))).count();
    assert_eq!(available, 1, "what was told once is not told again");
    let lines = daemon.log_lines(&workspace, before.len() + 5);
    let expected: Vec<String> = (1..=lines.len()).map(|number| number.to_string()).collect();
    assert_eq!(lines, expected, "no line is lost and none comes twice");
    daemon.instances.stop(instance, StopMode::Normal);
    assert_eq!(daemon.ended(instance).0, EndReason::Stopped);
    node.assert_nothing_left();
}

#[test]
fn a_new_daemon_ends_what_died_meanwhile_and_kills_what_belongs_to_nobody() {
    let node = TestNode::new();
    let (mut workspace, mut other) = (Workspace::new(), Workspace::new());
    let daemon = node.daemon();
    let dead = daemon.start(workspace.next(&node));
    let stray = daemon.start(other.next(&node));
    daemon.available(dead);
    daemon.available(stray);
    let (_, process) = processes_of(&node, dead);
    daemon.die();
    kill(process);
    std::fs::remove_dir_all(node.state().join("instances").join(stray.to_string())).unwrap();

    let daemon = node.daemon();
    let (reason, ended) = daemon.ended(dead);
    assert_eq!(reason, EndReason::VmmExited, "{ended:?}");
    node.assert_nothing_left();
}

#[test]
fn a_daemon_leaves_the_vms_of_the_same_node_in_another_cluster_alone() {
    let node = TestNode::new();
    let daemon = node.daemon();
    let instance = daemon.start(Workspace::new().next(&node));
    daemon.available(instance);
    let other = node.namesake();
    other.daemon().die();
    assert_eq!(node.processes().len(), 1);
    assert_eq!(daemon.sh(instance, "true").0, 0);
    daemon.instances.stop(instance, StopMode::Normal);
    assert_eq!(daemon.ended(instance).0, EndReason::Stopped);
    node.assert_nothing_left();
}

#[test]
fn a_root_image_that_is_none_fails_with_the_guests_words() {
    let node = TestNode::new();
    std::fs::write(node.images().join("broken.erofs"), vec![7; 1 << 20]).unwrap();
    let mut workspace = Workspace::new();
    workspace.root_image = "broken".to_owned();
    let daemon = node.daemon();
    let instance = daemon.start(workspace.next(&node));
    let (reason, ended) = daemon.ended(instance);
    assert_eq!(reason, EndReason::GuestConfigureFailed, "{ended:?}");
    assert!(ended.message.contains("root image"), "{ended:?}");
    node.assert_nothing_left();

    workspace.root_image = "missing".to_owned();
    let instance = daemon.start(workspace.next(&node));
    let (reason, ended) = daemon.ended(instance);
    assert_eq!(reason, EndReason::StorageFailed, "{ended:?}");
    assert!(ended.objects.iter().all(|object| object.r#use() == ObjectUse::Released), "{ended:?}");
    node.assert_nothing_left();
}

#[test]
fn a_guest_that_goes_by_itself_says_how() {
    let node = TestNode::new();
    let mut workspace = Workspace::new();
    let daemon = node.daemon();
    for (script, expected) in [
        ("echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger", EndReason::GuestPanicked),
        ("echo 1 > /proc/sys/kernel/sysrq; echo o > /proc/sysrq-trigger; sleep 5", EndReason::GuestShutdown),
    ] {
        let instance = daemon.start(workspace.next(&node));
        daemon.available(instance);
        daemon.run(instance, script);
        let (reason, ended) = daemon.ended(instance);
        assert_eq!(reason, expected, "{script}: {ended:?}");
        node.assert_nothing_left();
    }
}

#[test]
fn a_vm_without_its_program_fails_with_the_reason() {
    let node = TestNode::new();
    let mut workspace = Workspace::new();
    // More than the host can map.
    workspace.memory_mib = 1 << 34;
    let daemon = node.daemon();
    let instance = daemon.start(workspace.next(&node));
    let (reason, ended) = daemon.ended(instance);
    assert_eq!(reason, EndReason::VmmFailed, "{ended:?}");
    assert!(ended.message.contains("memory"), "{ended:?}");
    node.assert_nothing_left();
}

#[test]
fn a_daemon_that_is_killed_anywhere_is_followed_by_one_that_goes_on() {
    let node = TestNode::new();
    let mut workspace = Workspace::new();
    for millis in [0, 20, 80, 200, 500, 1500] {
        let pause = Duration::from_millis(millis);
        let daemon = node.daemon();
        let instance = daemon.start(workspace.next(&node));
        std::thread::sleep(pause);
        daemon.die();

        let daemon = node.daemon();
        if millis == 0 && daemon.instances.list().is_empty() {
            // Killed before anything was on the disk: the control plane asks again.
            let launch = workspace.again(&node, instance);
            daemon.start(launch);
        }
        daemon.available(instance);
        assert_eq!(node.processes().len(), 1, "one VM, {millis} ms");
        daemon.sh(instance, &format!("echo {millis} >> /root/log"));
        assert!(daemon.instances.stop(instance, StopMode::Normal));
        std::thread::sleep(pause / 4);
        daemon.die();

        let daemon = node.daemon();
        // As the desired set says again; it may have ended meanwhile.
        daemon.instances.stop(instance, StopMode::Normal);
        let (reason, ended) = daemon.ended(instance);
        assert_eq!(reason, EndReason::Stopped, "{millis} ms: {ended:?}");
        node.assert_nothing_left();
        daemon.die();
    }
    let daemon = node.daemon();
    let instance = daemon.start(workspace.next(&node));
    daemon.available(instance);
    assert_eq!(daemon.sh(instance, "cat /root/log"), (0, "0\n20\n80\n200\n500\n1500\n".to_owned()));
    daemon.instances.stop(instance, StopMode::Force);
    daemon.ended(instance);
}

#[test]
fn a_guest_that_hangs_is_told_and_only_force_ends_it() {
    let node = TestNode::new();
    let mut workspace = Workspace::new();
    let daemon = node.daemon();
    let instance = daemon.start(workspace.next(&node));
    daemon.available(instance);
    let pid = node.processes()[0];
    signal(pid, Signal::STOP);
    daemon.wait_for(instance, "GuestUnresponsive", |kind| matches!(kind, Kind::GuestUnresponsive(_)).then_some(()));
    assert!(daemon.instances.stop(instance, StopMode::Normal));
    signal(pid, Signal::CONT);
    daemon.wait_for(instance, "GuestResponsive", |kind| matches!(kind, Kind::GuestResponsive(_)).then_some(()));
    assert_eq!(daemon.ended(instance).0, EndReason::Stopped);

    let instance = daemon.start(workspace.next(&node));
    daemon.available(instance);
    signal(node.processes()[0], Signal::STOP);
    let asked = Instant::now();
    assert!(daemon.instances.stop(instance, StopMode::Normal));
    assert!(daemon.instances.stop(instance, StopMode::Force));
    assert_eq!(daemon.ended(instance).0, EndReason::ForceStopped);
    assert!(asked.elapsed() < Duration::from_secs(5), "took {:?}", asked.elapsed());
    node.assert_nothing_left();
}

#[test]
fn limits_are_the_workspaces_and_an_oom_kill_is_recognized() {
    let node = TestNode::new();
    let mut workspace = Workspace::new();
    workspace.cpu_milli = 500;
    let daemon = node.daemon();
    let instance = daemon.start(workspace.next(&node));
    daemon.available(instance);
    let file = |controller: &str, name: &str| {
        let below = format!("{controller}/kibotos/{}/{instance}/{name}", node.id);
        std::path::Path::new("/sys/fs/cgroup").join(below)
    };
    let read = |controller, name| std::fs::read_to_string(file(controller, name)).unwrap().trim().to_owned();
    assert_eq!((read("cpu", "cpu.cfs_quota_us"), read("cpu", "cpu.cfs_period_us")), ("50000".into(), "100000".into()));
    assert_eq!(daemon.sh(instance, "nproc"), (0, "1\n".to_owned()));

    let used: u64 = read("memory", "memory.usage_in_bytes").parse().unwrap();
    std::fs::write(file("memory", "memory.limit_in_bytes"), (used + (8 << 20)).to_string()).unwrap();
    daemon.run(instance, "head -c 100M /dev/zero | tail");
    let (reason, ended) = daemon.ended(instance);
    assert_eq!(reason, EndReason::OutOfMemory, "{ended:?}");
    node.assert_nothing_left();
}

#[test]
fn a_vm_runs_without_rights() {
    let node = TestNode::new();
    let daemon = node.daemon();
    let instance = daemon.start(Workspace::new().next(&node));
    daemon.available(instance);
    let process = std::path::PathBuf::from(format!("/proc/{}", node.processes()[0]));
    let status = std::fs::read_to_string(process.join("status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap_or_else(|| panic!("no {name} in {status}")).split_whitespace().collect::<Vec<_>>()
    };
    assert_eq!(field("Uid"), ["65534"; 4]);
    assert_eq!(field("Gid"), ["65534"; 4]);
    assert_eq!(field("Groups"), [""; 0]);
    for set in ["CapPrm", "CapEff", "CapInh", "CapAmb"] {
        assert_eq!(field(set), ["0000000000000000"], "{set}");
    }
    assert_eq!((field("NoNewPrivs"), field("Seccomp")), (vec!["1"], vec!["2"]));
    for namespace in ["net", "ipc", "mnt", "uts"] {
        let of = |process: &std::path::Path| std::fs::read_link(process.join("ns").join(namespace)).unwrap();
        assert_ne!(of(&process), of(std::path::Path::new("/proc/self")), "{namespace}");
    }
    let core = std::fs::read_to_string(process.join("limits")).unwrap();
    let core = core.lines().find(|line| line.starts_with("Max core file size")).unwrap().to_owned();
    assert_eq!(core.split_whitespace().rev().nth(1), Some("0"), "{core}");
    assert_eq!(std::fs::read_to_string(process.join("oom_score_adj")).unwrap().trim(), "500");
    daemon.instances.stop(instance, StopMode::Force);
    daemon.ended(instance);
    node.assert_nothing_left();
}

#[test]
fn a_guest_that_does_not_boot_in_time_is_ended_with_its_console() {
    let mut node = TestNode::new();
    node.bounds.boot = Duration::from_millis(200);
    let daemon = node.daemon();
    let instance = daemon.start(Workspace::new().next(&node));
    assert_eq!(daemon.ended(instance).0, EndReason::GuestBootTimeout);
    node.assert_nothing_left();
}

/// A record that cannot be read says nothing about the VM: it is neither started again nor ended, nor is any other.
#[test]
fn a_damaged_record_keeps_no_other_instance_from_being_adopted() {
    let node = TestNode::new();
    let (mut whole, mut damaged) = (Workspace::new(), Workspace::new());
    let daemon = node.daemon();
    let first = daemon.start(whole.next(&node));
    let second = daemon.start(damaged.next(&node));
    daemon.available(first);
    let boot_id = daemon.available(second);
    let pids: std::collections::BTreeSet<_> = node.processes().into_iter().collect();
    daemon.die();
    let record = node.state().join("instances").join(second.to_string()).join("instance.json");
    let content = std::fs::read(&record).unwrap();
    std::fs::write(&record, &content[..content.len() / 2]).unwrap();

    let daemon = node.daemon();
    assert_eq!(until_answered(|| daemon.try_sh(first, "true")).0, 0);
    let problem = daemon.instances.problem(second).expect("it cannot be taken up");
    assert!(problem.contains("instance.json") && problem.contains("damaged"), "{problem}");
    assert_eq!(daemon.instances.list().len(), 2, "it keeps its place");
    daemon.start(damaged.again(&node, second));
    assert_eq!(node.processes().into_iter().collect::<std::collections::BTreeSet<_>>(), pids, "both VMs, and no other");

    // Somebody restores it: the Instance is taken up as any other.
    std::fs::write(&record, &content).unwrap();
    let (code, printed) = until_answered(|| daemon.try_sh(second, "cat /proc/sys/kernel/random/boot_id"));
    assert_eq!((code, printed.trim()), (0, boot_id.as_str()));
    for instance in [first, second] {
        daemon.instances.stop(instance, StopMode::Force);
        assert_eq!(daemon.ended(instance).0, EndReason::ForceStopped);
    }
    node.assert_nothing_left();
}

#[test]
fn an_end_that_waits_for_a_damaged_holder_record_says_so() {
    let node = TestNode::new();
    let mut workspace = Workspace::new();
    let daemon = node.daemon();
    let instance = daemon.start(workspace.next(&node));
    daemon.available(instance);
    let record = node.object(workspace.uid()).join("holder.1");
    let content = std::fs::read(&record).unwrap();
    std::fs::write(&record, "rubbish").unwrap();
    daemon.instances.stop(instance, StopMode::Force);
    let message = daemon.wait_for(instance, "Blocked", |kind| match kind {
        Kind::Blocked(blocked) => Some(blocked.message.clone()),
        _ => None,
    });
    assert!(message.contains("holder.1 is damaged") && message.contains("restore it"), "{message}");
    assert_eq!(node.processes(), [] as [i32; 0], "the VM is gone all the same");
    std::fs::write(&record, content).unwrap();
    let (reason, ended) = daemon.ended(instance);
    assert_eq!(reason, EndReason::ForceStopped);
    assert!(ended.objects.iter().all(|object| object.r#use() == ObjectUse::Released), "{ended:?}");
    node.assert_nothing_left();
}

/// The end is the last of an Instance's events, and the one that everybody waits for.
#[test]
fn the_end_of_an_instance_can_be_stored_on_a_full_disk() {
    let directory = tempfile::tempdir().unwrap();
    let disk = SmallDisk::mount(directory.path());
    let spool = kibo_node_daemon::spool::EventSpool::open(&directory.path().join("events")).unwrap();
    let instance = kibo_crds::InstanceId::generate();
    let append = |kind| spool.append(instance, "6f9619ff-8b86-d011-b42d-00c04fc964ff", kind);
    append(Kind::Available(kibo_protocol::v1::Available::default())).unwrap();
    disk.fill();
    let ended = kibo_protocol::v1::Ended { message: "x".repeat(6000), ..Default::default() };
    append(Kind::Ended(ended)).unwrap();
}

/// A file system of one MiB.
struct SmallDisk<'a>(&'a std::path::Path);

impl<'a> SmallDisk<'a> {
    fn mount(at: &'a std::path::Path) -> Self {
        use rustix::mount::{MountFlags, mount};
        mount("tmpfs", at, "tmpfs", MountFlags::empty(), Some(c"size=1m")).unwrap();
        Self(at)
    }

    fn fill(&self) {
        use std::io::Write as _;
        let mut file = std::fs::File::create(self.0.join("filler")).unwrap();
        let full = loop {
            if let Err(error) = file.write_all(&[0; 4096]) {
                break error;
            }
        };
        assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}

fn processes_of(node: &TestNode, instance: kibo_crds::InstanceId) -> (String, i32) {
    let name = instance.to_string();
    let all = kibo_node_daemon::vmm::list_processes(node.id.as_str(), &node.state()).unwrap();
    let (name, process) = all.into_iter().find(|(of, _)| *of == name).expect("it runs");
    (name, process.pid)
}

#[test]
fn the_accelerator_is_proved_by_a_guest_and_once_for_each_boot() {
    let node = TestNode::new();
    std::fs::create_dir(node.state()).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let vmm = node.vmm();
    let prove = |boot_id, limit| runtime.block_on(accelerator::prove(&vmm, boot_id, limit));

    let error = prove("boot-1", Duration::from_millis(1)).unwrap_err().to_string();
    assert!(error.contains("vmm.accelerator = \"tcg\"") && error.contains("did not answer"), "{error}");
    let disk_io = prove("boot-1", node::PATIENCE).unwrap();
    let at_once = Duration::ZERO;
    assert_eq!(prove("boot-1", at_once).unwrap(), disk_io);
    assert_eq!(accelerator::remembered(&node.state()), Some(disk_io));
    prove("boot-2", at_once).unwrap_err();
    assert_nothing_proves(&node);
}

fn assert_nothing_proves(node: &TestNode) {
    assert_eq!(node.processes(), [] as [i32; 0]);
    assert_eq!(node.cgroups(), [] as [&str; 0]);
    assert!(!node.state().join("accelerator-proof").exists());
}

#[test]
fn a_host_without_io_uring_uses_threads_unless_told_otherwise() {
    let node = TestNode::new();
    std::fs::create_dir(node.state()).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let qemu = node.path().join("qemu");
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in *aio=io_uring*) echo 'aio=io_uring is not supported in this build' >&2; exit 1;; esac\n\
         exec {} \"$@\"\n",
        node::QEMU
    );
    std::fs::write(&qemu, script).unwrap();
    for path in [node.path(), &qemu] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let prove = |disk_io| {
        let vmm = node.vmm_with(disk_io, &qemu);
        runtime.block_on(accelerator::prove(&vmm, "boot-1", node::PATIENCE))
    };
    assert_eq!(prove(DiskIo::Auto).unwrap(), Aio::Threads);
    // What was proved of one setting says nothing of another.
    let error = prove(DiskIo::IoUring).unwrap_err().to_string();
    assert!(error.contains("vmm.disk_io = \"io_uring\"") && error.contains("not supported in this build"), "{error}");
    assert_nothing_proves(&node);
}

/// An adopted guest answers as soon as the new connection stands.
fn until_answered<T>(mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + node::PATIENCE;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < deadline, "the guest does not answer");
        std::thread::sleep(Duration::from_millis(50));
    }
}
