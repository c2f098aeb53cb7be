//! Files out of a guest and into it.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::PathBuf;

use kibo_guest_protocol::v1::{self, StartFailureReason, archive::Direction};
use kibo_guest_protocol::{HostEvent, MAX_RUN, ProcessEnd, StreamId};
use tar::{Archive, Builder, EntryType, Header};

use crate::machine::{Bytes, Disks, Machine, configure, format_ext4_of};

fn read(machine: &mut Machine, path: &str) -> Bytes {
    let direction = Direction::Read(v1::ReadArchive { path: path.to_owned() });
    let stream = machine.open(|connection| connection.archive(direction));
    machine.collect_bytes(stream, b"")
}

fn begin(machine: &mut Machine, path: &str, into_directory: bool) -> StreamId {
    let direction = Direction::Write(v1::WriteArchive { path: path.to_owned(), into_directory, keep_owner: true });
    machine.open(|connection| connection.archive(direction))
}

fn write(machine: &mut Machine, path: &str, into_directory: bool, archive: &[u8]) -> ProcessEnd {
    let stream = begin(machine, path, into_directory);
    machine.collect_bytes(stream, archive).end
}

#[track_caller]
fn failure(end: ProcessEnd) -> v1::StartFailure {
    match end {
        ProcessEnd::NotStarted(failure) => failure,
        other => panic!("it went well: {other:?}"),
    }
}

fn header(kind: EntryType, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(size);
    header.set_mode(0o640);
    header.set_uid(1000);
    header.set_gid(1001);
    header.set_mtime(1_600_000_000);
    header.set_cksum();
    header
}

/// A header whose name nobody looked at.
fn rude(kind: EntryType, size: u64, name: &str) -> Header {
    let mut header = header(kind, size);
    header.as_gnu_mut().expect("gnu").name[..name.len()].copy_from_slice(name.as_bytes());
    header.set_cksum();
    header
}

fn one_file(name: &str, content: &[u8]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    builder.append_data(&mut header(EntryType::Regular, content.len() as u64), name, content).expect("in memory");
    builder.into_inner().expect("in memory")
}

const LIST: &str = "find . -printf '%P %y %m %U %G %Ts %n %s %l\\n' | sort";

#[test]
fn a_tree_comes_back_as_it_was() {
    let mut machine = Machine::ready(configure());
    let long = "n".repeat(150);
    machine.out(&format!(
        "mkdir -p /data/tree/sub/{long} /data/tree/empty && cd /data/tree && echo hello >file && chmod 4755 file && \
         chown 1000:1001 file && ln file sub/again && ln -s ../file sub/link && chown -h 1002:1003 sub/link && \
         ln -s /nowhere dangling && mkfifo -m 600 fifo && head -c 100000 /dev/urandom >sub/{long}/{long} && \
         chmod 700 sub && chown 7:8 sub && : >none && touch -h -d @1500000000 file sub/link none && touch -d @1400000000 sub"
    ));
    let got = read(&mut machine, "/data/tree/");
    assert_eq!((got.end, String::from_utf8_lossy(&got.stderr).as_ref()), (ProcessEnd::Code(0), ""));
    let mut archive = Archive::new(got.stdout.as_slice());
    let names: Vec<PathBuf> = archive
        .entries()
        .expect("a tar")
        .map(|entry| entry.expect("whole").path().expect("a name").into_owned())
        .collect();
    assert_eq!(names[0], PathBuf::from("tree/"));
    assert!(names.iter().all(|name| name.starts_with("tree")) && names.len() == 11, "{names:?}");

    assert_eq!(write(&mut machine, "/data/copy", false, &got.stdout), ProcessEnd::Code(0));
    let list = |machine: &mut Machine, at: &str| machine.out(&format!("cd {at} && {LIST} | sed 's/^ d.*//'"));
    assert_eq!(list(&mut machine, "/data/copy"), list(&mut machine, "/data/tree"));
    machine.out("cmp /data/tree/file /data/copy/file && diff -r --no-dereference /data/tree/sub /data/copy/sub");
    assert_eq!(machine.out("stat -c %i /data/copy/file /data/copy/sub/again | uniq | wc -l"), "1\n");
    // Once more over what is there, into the root's overlay, and as nobody's.
    assert_eq!(
        write(&mut machine, "/data/copy", false, &got.stdout),
        ProcessEnd::Code(0),
        "it goes into what is there"
    );
    assert_eq!(list(&mut machine, "/data/copy/tree"), list(&mut machine, "/data/tree"));
    assert_eq!(write(&mut machine, "/srv", true, &got.stdout), ProcessEnd::Code(0));
    assert_eq!(list(&mut machine, "/srv/tree"), list(&mut machine, "/data/tree"));
    let direction =
        Direction::Write(v1::WriteArchive { path: "/data/mine".to_owned(), into_directory: false, keep_owner: false });
    let stream = machine.open(|connection| connection.archive(direction));
    assert_eq!(machine.collect_bytes(stream, &got.stdout).end, ProcessEnd::Code(0));
    assert_eq!(machine.out("stat -c '%a %u %g' /data/mine/file"), "755 0 0\n");
    assert_eq!(machine.out("find / -xdev -name '.kibo-*'; find /data -name '.kibo-*'"), "");
}

#[test]
fn a_file_goes_where_it_is_sent() {
    let mut machine = Machine::ready(configure());
    let archive = one_file("from", b"content\n");
    machine.out("mkdir /data/dir && echo old >/data/old && ln -s dir /data/todir && echo kept >/data/kept && ln -s kept /data/tofile");
    for (path, into_directory, found) in [
        ("/data/new", false, "/data/new"),
        ("/data/dir", false, "/data/dir/from"),
        ("/data/old", false, "/data/old"),
        ("/data/todir", true, "/data/dir/from"),
        ("/data/tofile", false, "/data/tofile"),
    ] {
        assert_eq!(write(&mut machine, path, into_directory, &archive), ProcessEnd::Code(0), "{path}");
        assert_eq!(
            machine.out(&format!("cat {found}; stat -c '%F %a %u %g %Y' {found}; rm {found}")),
            "content\nregular file 640 1000 1001 1600000000\n",
            "{path}"
        );
    }
    assert_eq!(machine.out("cat /data/kept"), "kept\n", "a link is replaced, not followed");
    for (path, into_directory, reason) in [
        ("/data/missing", true, StartFailureReason::NotFound),
        ("/data/missing/", false, StartFailureReason::NotFound),
        ("/data/missing/below", false, StartFailureReason::NotFound),
        ("/data/kept", true, StartFailureReason::Invalid),
        ("data", false, StartFailureReason::Invalid),
        ("/data/../etc", true, StartFailureReason::Invalid),
    ] {
        let refused = failure(write(&mut machine, path, into_directory, &archive));
        assert_eq!(refused.reason(), reason, "{path}: {}", refused.message);
    }
    let missing = failure(read(&mut machine, "/data/missing").end);
    assert_eq!(missing.reason(), StartFailureReason::NotFound);
    assert!(missing.message.contains("/data/missing"), "{}", missing.message);
    let mut two = Builder::new(Vec::new());
    for name in ["a", "b"] {
        two.append_data(&mut header(EntryType::Regular, 0), name, &b""[..]).expect("in memory");
    }
    let two = two.into_inner().expect("in memory");
    assert_eq!(failure(write(&mut machine, "/data/x", false, &two)).reason(), StartFailureReason::Invalid);
    assert_eq!(write(&mut machine, "/data", true, &two), ProcessEnd::Code(0));
}

#[test]
fn nothing_leaves_the_destination() {
    let mut machine = Machine::ready(configure());
    machine.out("mkdir /data/in /data/out && ln -s /data/out /data/in/there");
    let through_link = |target: &str| {
        let mut builder = Builder::new(Vec::new());
        builder.append_link(&mut header(EntryType::Symlink, 0), "link", target).expect("in memory");
        builder.append(&rude(EntryType::Regular, 1, "link/escaped"), &b"x"[..]).expect("in memory");
        builder.into_inner().expect("in memory")
    };
    let named = |name: &str| {
        let mut builder = Builder::new(Vec::new());
        builder.append(&rude(EntryType::Regular, 1, name), &b"x"[..]).expect("in memory");
        builder.into_inner().expect("in memory")
    };
    let hard_link = |target: &str| {
        let mut link = rude(EntryType::Link, 0, "hard");
        link.as_gnu_mut().expect("gnu").linkname[..target.len()].copy_from_slice(target.as_bytes());
        link.set_cksum();
        let mut builder = Builder::new(Vec::new());
        builder.append(&link, &b""[..]).expect("in memory");
        builder.into_inner().expect("in memory")
    };
    let attempts: BTreeMap<&str, Vec<u8>> = [
        ("climbing", named("../escaped")),
        ("climbing inside", named("a/../../escaped")),
        ("absolute", named("/data/out/escaped")),
        ("a link of its own", through_link("/data/out")),
        ("a relative link of its own", through_link("../out")),
        ("a link that is there", named("there/escaped")),
        ("a hard link out", hard_link("../out/secret")),
        ("an absolute hard link", hard_link("/etc/shadow")),
    ]
    .into();
    for (what, archive) in attempts {
        let refused = failure(write(&mut machine, "/data/in", true, &archive));
        assert_eq!(refused.reason(), StartFailureReason::Invalid, "{what}: {}", refused.message);
        assert_eq!(
            machine.out("ls /data/out; ls /data/in/hard 2>/dev/null || true; ls / | grep escaped || true"),
            "",
            "{what}"
        );
    }
}

#[test]
fn an_archive_that_is_cut_leaves_neither_half_a_file_nor_a_temporary_one() {
    let mut machine = Machine::ready(configure());
    machine.out(
        "echo old >/data/big && mkdir /tmpfs && mount -t tmpfs none /tmpfs && echo old >/tmpfs/big && echo old >/big",
    );
    let whole = one_file("big", &vec![7; 3_000_000]);
    let left = "cat /data/big /tmpfs/big /big; ls -A /data /tmpfs; ls -A / | grep kibo || true";
    let before = machine.out(left);
    for directory in ["/data", "/tmpfs", "/"] {
        for cut in [0, 100, 512, 1_000_000, whole.len() - 1024] {
            let refused = failure(write(&mut machine, directory, true, &whole[..cut]));
            assert!(refused.message.contains("ended early"), "{}", refused.message);
            if cut < whole.len() - 1024 {
                assert_eq!(machine.out(left), before, "{directory}, cut at {cut}");
            }
        }
        machine.out(&format!("echo old >{}/big", directory.trim_end_matches('/')));
        // The client goes in the middle.
        let stream = begin(&mut machine, directory, true);
        machine.type_in(stream, &whole[..1_500_000]);
        machine.connection().abandon(stream);
        machine.flush();
        machine.wait_for_end(stream);
        assert_eq!(machine.out(left), before, "{directory}, the client went");
        // The daemon goes.
        let stream = begin(&mut machine, directory, true);
        machine.type_in(stream, &whole[..1_500_000]);
        machine.reconnect(0);
        let gone = "for i in $(seq 100); do grep -qsx exe /proc/[0-9]*/comm || exit 0; sleep 0.1; done; echo left";
        assert_eq!(machine.out(gone), "");
        assert_eq!(machine.out(left), before, "{directory}, the daemon went");
    }
    assert_eq!(write(&mut machine, "/data", true, &whole), ProcessEnd::Code(0));
    assert_eq!(machine.out("stat -c %s /data/big"), "3000000\n");
}

#[test]
fn a_full_disk_is_said_with_the_path_and_leaves_nothing() {
    let mut machine = Machine::ready(configure());
    machine.out("echo old >/data/big");
    let full = failure(write(&mut machine, "/data", true, &one_file("big", &vec![7; 100 << 20])));
    assert!(full.message.contains("/data/big") && full.message.contains("full"), "{}", full.message);
    assert_eq!(machine.out("cat /data/big; ls -A /data | grep -v lost"), "old\nbig\n");
    let free = machine.out("df --output=avail /data | tail -1");
    assert!(free.trim().parse::<u64>().expect("a number") > 50 << 10, "{free} KiB are free");
}

/// The bytes of a large file, made as they are asked for.
struct Pattern(u64);

impl Read for Pattern {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        for chunk in buffer.chunks_mut(8) {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            chunk.copy_from_slice(&self.0.to_le_bytes()[..chunk.len()]);
        }
        Ok(buffer.len())
    }
}

#[test]
fn a_large_file_needs_no_memory() {
    const SIZE: u64 = 128 << 20;
    let directory = tempfile::tempdir().expect("a directory");
    let volume = directory.path().join("large.raw");
    let disks = Disks::fresh(directory.path()).with_image("vol0", &volume);
    format_ext4_of(&volume, 1 << 30);
    let mut machine = Machine::boot(directory, &disks);
    machine.configure(configure());
    let stream = begin(&mut machine, "/data/large", false);
    machine.type_in(stream, header_of("large", SIZE).as_bytes());
    let mut bytes = Pattern(1);
    let mut piece = vec![0; 1 << 20];
    let mut most = 0;
    for mebibyte in 0..SIZE >> 20 {
        bytes.read_exact(&mut piece).expect("endless");
        machine.type_in(stream, &piece);
        if mebibyte % 50 == 49 {
            most = most.max(resident(&mut machine));
        }
    }
    assert_eq!(machine.collect_bytes(stream, &[0; 1024]).end, ProcessEnd::Code(0));

    let direction = Direction::Read(v1::ReadArchive { path: "/data/large".to_owned() });
    let stream = machine.open(|connection| connection.archive(direction));
    let mut expected = Pattern(1);
    let mut position: u64 = 0;
    let mut wanted = vec![0; MAX_RUN];
    while position < 512 + SIZE {
        let (output, data) = machine.wait_for("the file's bytes", |event| match event {
            HostEvent::Output { stream: of, output, data } if of == stream => Some((output, data)),
            _ => None,
        });
        machine.connection().consumed(stream, output, data.len());
        let skip = usize::try_from(512u64.saturating_sub(position)).expect("small").min(data.len());
        let len = usize::try_from((512 + SIZE).saturating_sub(position)).expect("small").min(data.len()).max(skip);
        fill(&mut expected, &mut wanted[..len - skip], position.saturating_sub(512));
        assert!(wanted[..len - skip] == data[skip..len], "the bytes differ after {position}");
        position += data.len() as u64;
    }
    most = most.max(resident(&mut machine));
    assert_eq!(machine.collect_bytes(stream, b"").end, ProcessEnd::Code(0));
    println!("agent and archiver need {most} KiB at most");
    assert!(most < 16 * 1024, "{most} KiB");
}

fn header_of(name: &str, size: u64) -> Header {
    rude(EntryType::Regular, size, name)
}

/// What agent and archiver hold by now, in KiB.
fn resident(machine: &mut Machine) -> u64 {
    let all =
        machine.out("for p in /proc/[0-9]*; do case $(readlink $p/exe) in /init*) grep VmHWM $p/status;; esac; done");
    all.lines().filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum()
}

/// The pattern's bytes from `position` on, which follow those that were taken before.
fn fill(pattern: &mut Pattern, buffer: &mut [u8], position: u64) {
    // A word may be split between two pieces.
    for (at, byte) in (position..).zip(buffer) {
        if at.is_multiple_of(8) {
            pattern.read_exact(&mut [0; 8]).expect("endless");
        }
        *byte = pattern.0.to_le_bytes()[usize::try_from(at % 8).expect("small")];
    }
}
