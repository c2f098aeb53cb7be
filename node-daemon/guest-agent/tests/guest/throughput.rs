//! How much of the raw channel a stream gets. Figures, no promises: `cargo test --test guest -- --ignored throughput`.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use kibo_guest_protocol::v1::{self, archive::Direction};
use kibo_guest_protocol::{HostEvent, StreamId};

use crate::machine::{Machine, RAW_PORT, configure, shell};

const BYTES: usize = 64 << 20;

fn rate(what: &str, bytes: usize, took: Duration) {
    #[allow(clippy::cast_precision_loss, reason = "for people")]
    let rate = bytes as f64 / took.as_secs_f64() / 1e6;
    println!("{what:<40} {rate:8.1} MB/s");
}

fn raw(machine: &mut Machine, kind: &str) {
    let mut port = UnixStream::connect(machine.directory().join(RAW_PORT)).expect("the raw port");
    let name = machine.out("grep -lx raw.0 /sys/class/virtio-ports/*/name | cut -d/ -f5");
    let device = format!("/dev/{}", name.trim());
    let mut buffer = vec![0; 256 * 1024];
    let out = machine
        .exec(shell(&format!("head -c {BYTES} {kind} | dd of={device} bs=64k iflag=fullblock 2>/dev/null")), false);
    port.read_exact(&mut buffer[..1]).expect("the first byte");
    let (since, mut got) = (Instant::now(), 1);
    while got < BYTES {
        got += port.read(&mut buffer).expect("the guest's bytes");
    }
    rate(&format!("raw, out, {kind}"), BYTES, since.elapsed());
    machine.wait_for_end(out);
    let taker = machine.exec(
        shell(&format!("dd if={device} of=/dev/null bs=64k iflag=fullblock count={} 2>/dev/null", BYTES >> 16)),
        false,
    );
    buffer.fill(7);
    let since = Instant::now();
    for _ in 0..BYTES / buffer.len() {
        port.write_all(&buffer).expect("the guest takes it");
    }
    machine.wait_for_end(taker);
    rate("raw, in", BYTES, since.elapsed());
}

fn drain(machine: &mut Machine, what: &str, stream: StreamId) {
    let (mut got, mut since) = (0, None);
    loop {
        let event = machine.wait_for("output", |event| match &event {
            HostEvent::Output { stream: of, .. } | HostEvent::ExecEnded { stream: of, .. } if *of == stream => {
                Some(event)
            }
            _ => None,
        });
        let HostEvent::Output { output, data, .. } = event else { break };
        since.get_or_insert_with(Instant::now);
        got += data.len();
        machine.connection().consumed(stream, output, data.len());
    }
    rate(what, got, since.expect("something came").elapsed());
}

fn fill(machine: &mut Machine, what: &str, stream: StreamId, before: &[u8]) {
    machine.type_in(stream, before);
    let piece: Vec<u8> = (0..=250u8).cycle().take(1 << 20).collect();
    let since = Instant::now();
    for _ in 0..BYTES >> 20 {
        machine.type_in(stream, &piece);
    }
    machine.type_in(stream, &[0; 1024]);
    machine.close(stream);
    machine.wait_for_end(stream);
    rate(what, BYTES, since.elapsed());
}

#[test]
#[ignore = "prints figures"]
fn throughput() {
    let mut machine = Machine::ready(configure());
    machine.out(&format!("mount -t tmpfs none /mnt && head -c {BYTES} /dev/urandom >/mnt/random"));
    raw(&mut machine, "/mnt/random");
    raw(&mut machine, "/dev/zero");
    for kind in ["/mnt/random", "/dev/zero"] {
        let stream = machine.exec(shell(&format!("head -c {BYTES} {kind}")), false);
        drain(&mut machine, &format!("exec, out, {kind}"), stream);
    }
    let direction = Direction::Read(v1::ReadArchive { path: "/mnt/random".to_owned() });
    let stream = machine.open(|connection| connection.archive(direction));
    drain(&mut machine, "archive, out, random", stream);
    let stream = machine.exec(shell("cat >/dev/null"), true);
    fill(&mut machine, "exec, in", stream, b"");
    let mut header = tar::Header::new_gnu();
    header.set_path("in").expect("short");
    header.set_size(BYTES as u64);
    header.set_cksum();
    let write = v1::WriteArchive { path: "/mnt/in".to_owned(), into_directory: false, keep_owner: true };
    let stream = machine.open(|connection| connection.archive(Direction::Write(write)));
    fill(&mut machine, "archive, in", stream, header.as_bytes());
}
