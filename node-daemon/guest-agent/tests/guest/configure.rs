//! What a guest becomes, and how it says that it cannot.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use kibo_guest_protocol::ProcessEnd;
use kibo_guest_protocol::v1::{self, ConfigureStage, guest_state};

use crate::machine::{Disks, Machine, artifacts, configure, entrypoint, unix_nanos};

#[test]
fn a_configured_guest_has_its_disks_name_clock_and_network() {
    let mut machine = Machine::fresh();
    let started = Instant::now();
    let network = v1::Network {
        mac: "52:54:00:aa:bb:cc".to_owned(),
        address: "10.0.2.15".to_owned(),
        prefix_length: 24,
        gateway: "10.0.2.2".to_owned(),
        dns_servers: vec!["10.0.2.3".to_owned()],
        dns_search: vec!["example.test".to_owned()],
        mtu: 1400,
    };
    machine.configure(v1::Configure { network: Some(network), ..configure() });
    println!("hello after {:?}, configured {:?} later", machine.booted_in, started.elapsed());

    assert_eq!(machine.out("cat /etc/debian_version | cut -d. -f1"), "12\n");
    assert_eq!(machine.out("hostname; cat /etc/hostname"), "demo\ndemo\n");
    assert_eq!(
        machine.out("grep -c demo /etc/hosts; tail -n 2 /etc/resolv.conf"),
        "1\nsearch example.test\nnameserver 10.0.2.3\n"
    );
    assert_eq!(
        machine.out("awk '$2 == \"/\" || $2 == \"/data\" {print $2, $3}' /proc/mounts"),
        "/ overlay\n/data ext4\n"
    );
    assert_eq!(machine.out("stat -c '%a %U' / /tmp"), "755 root\n1777 root\n");
    assert_eq!(machine.out("cat /sys/class/net/eth0/address /sys/class/net/eth0/mtu"), "52:54:00:aa:bb:cc\n1400\n");
    assert_eq!(
        machine.out("grep -c 0A00020F /proc/net/fib_trie >/dev/null || grep -c 10.0.2.15 /proc/net/fib_trie"),
        "2\n"
    );
    assert_eq!(machine.out("awk '$2 == \"00000000\" {print $3}' /proc/net/route"), "0202000A\n");
    assert_eq!(
        machine.out("cat /sys/class/net/lo/operstate; echo > /dev/null; ls -d /dev/pts /dev/shm /dev/fd"),
        "unknown\n/dev/fd\n/dev/pts\n/dev/shm\n"
    );
}

#[test]
fn what_was_written_is_there_after_the_next_boot() {
    let mut machine = Machine::ready(configure());
    machine.out("echo layer > /root/file; echo volume > /data/file; rm /etc/issue; mkdir -p /srv/deep; ln -s /data /srv/deep/link");
    assert_eq!(machine.sync(), "");
    let first = machine.hello.boot_id.clone();
    let directory = machine.power_off();
    let disks = reopened(directory.path());
    let mut machine = Machine::boot(directory, &disks);
    machine.configure(v1::Configure { instance_id: "inst-2".to_owned(), ..configure() });
    assert_ne!(machine.hello.boot_id, first);
    assert_eq!(
        machine.out("cat /root/file /srv/deep/link/file; ls /etc/issue 2>/dev/null || echo removed"),
        "layer\nvolume\nremoved\n"
    );
}

#[test]
fn what_was_synced_survives_the_death_of_the_machine() {
    let script = "seq 1000000 > /data/running; exec sleep 1000";
    let given = entrypoint(script, v1::RestartPolicy::Never);
    let mut machine = Machine::ready(v1::Configure { entrypoint: Some(given), ..configure() });
    machine.out("echo layer > /root/file; echo volume > /data/file");
    assert_eq!(machine.sync(), "");
    let directory = machine.kill();
    let disks = reopened(directory.path());
    let mut machine = Machine::boot(directory, &disks);
    machine.configure(configure());
    assert_eq!(machine.out("cat /root/file /data/file"), "layer\nvolume\n");
}

#[test]
fn a_squashfs_is_a_root_image_too() {
    let directory = tempfile::tempdir().expect("a directory");
    let image = file(directory.path(), "bare", include_bytes!("fixtures/bare.squashfs"));
    let disks = Disks::fresh(directory.path()).with_image("root", &image);
    let mut machine = Machine::boot(directory, &disks);
    let root_image = v1::RootImage { serial: "root".to_owned(), fs_type: "squashfs".to_owned() };
    machine.configure(v1::Configure { root_image: Some(root_image), ..configure() });
    // There is nothing in it to run, and that is said too.
    let ProcessEnd::NotStarted(failure) = machine.sh("true").end else { panic!("something was started") };
    assert_eq!(failure.reason(), v1::StartFailureReason::NotFound);
}

#[test]
fn a_daemon_that_dies_while_the_guest_is_configured_asks_again() {
    let mut machine = Machine::fresh();
    machine.send(v1::Configure { time_unix_nanos: unix_nanos(), ..configure() });
    machine.reconnect(0);
    machine.configure(configure());
    assert_eq!(machine.out("cat /etc/hostname"), "demo\n");
}

/// The disks of a machine that was shut down.
fn reopened(directory: &Path) -> Disks {
    let (layer, volume) = (directory.join("layer.raw"), directory.join("volume.raw"));
    let empty = tempfile::tempdir().expect("a directory");
    Disks::fresh(empty.path()).with_image("rw", &layer).with_image("vol0", &volume)
}

/// Boots with what `spoil` makes of good disks; gives the failure that the guest reports.
fn failure(configure: v1::Configure, spoil: impl Fn(Disks, &Path) -> Disks) -> v1::Failure {
    let directory = tempfile::tempdir().expect("a directory");
    let disks = spoil(Disks::fresh(directory.path()), directory.path());
    let mut machine = Machine::boot(directory, &disks);
    let failure = machine.try_configure(configure.clone()).expect("it cannot be configured");
    println!("{:?}: {}", failure.stage(), failure.message);
    // A daemon that was away hears the same.
    machine.reconnect(0);
    let Some(guest_state::Kind::Failed(failed)) = machine.hello.state.clone().and_then(|state| state.kind) else {
        panic!("{:?}", machine.hello);
    };
    assert_eq!(failed.failure.as_ref(), Some(&failure));
    assert_eq!(machine.try_configure(configure).as_ref(), Some(&failure));
    machine.shut_down(std::time::Duration::ZERO);
    assert!(machine.wait_for_exit().success());
    failure
}

fn file(directory: &Path, name: &str, content: &[u8]) -> PathBuf {
    let path = directory.join(name);
    fs::write(&path, content).expect("written");
    path
}

#[test]
fn a_root_image_that_is_none_is_reported() {
    let failure = failure(configure(), |disks, directory| {
        disks.with_image("root", &file(directory, "none", &vec![b'x'; 1 << 20]))
    });
    assert_eq!(failure.stage(), ConfigureStage::RootImage);
    assert!(failure.message.contains("holds no erofs file system"), "{}", failure.message);
}

#[test]
fn a_root_image_with_a_damaged_inside_is_reported() {
    let failure = failure(configure(), |disks, directory| {
        let mut image = fs::read(artifacts().join("images/debian-12.erofs")).expect("the root image");
        image[1280..65536].fill(0xff);
        disks.with_image("root", &file(directory, "damaged", &image))
    });
    assert_eq!(failure.stage(), ConfigureStage::RootImage);
}

#[test]
fn a_missing_layer_is_reported_with_what_is_there() {
    let failure = failure(configure(), |disks, _| disks.without("rw"));
    assert_eq!(failure.stage(), ConfigureStage::WritableLayer);
    assert!(failure.message.contains("\"rw\"") && failure.message.contains("root, vol0"), "{}", failure.message);
}

#[test]
fn a_layer_that_is_no_ext4_is_reported() {
    let failure =
        failure(configure(), |disks, directory| disks.with_image("rw", &file(directory, "zeros", &vec![0; 1 << 20])));
    assert_eq!(failure.stage(), ConfigureStage::WritableLayer);
    assert!(failure.message.contains("holds no ext4 file system"), "{}", failure.message);
}

#[test]
fn a_missing_volume_and_an_unformatted_one_are_reported_by_name() {
    let missing = failure(configure(), |disks, _| disks.without("vol0"));
    assert_eq!(missing.stage(), ConfigureStage::Volume);
    assert!(missing.message.starts_with("volume data: "), "{}", missing.message);
    let unformatted =
        failure(configure(), |disks, directory| disks.with_image("vol0", &file(directory, "zeros", &vec![0; 1 << 20])));
    assert_eq!(unformatted.stage(), ConfigureStage::Volume);
}

#[test]
fn an_entrypoint_that_is_not_there_is_reported() {
    let mut given = entrypoint("", v1::RestartPolicy::Always);
    given.process.as_mut().expect("given").argv = vec!["/opt/missing".to_owned()];
    let failure = failure(v1::Configure { entrypoint: Some(given), ..configure() }, |disks, _| disks);
    assert_eq!(failure.stage(), ConfigureStage::Entrypoint);
    assert!(failure.message.contains("/opt/missing"), "{}", failure.message);
}
