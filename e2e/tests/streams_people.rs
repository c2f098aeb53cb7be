//! kibo as people use it in a guest: at a terminal, with files, with ports.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kibo_crds::workspace::WorkspacePhase;
use kibo_e2e::local::Component;
use kibo_e2e::suite::program::{Program, Terminal};
use kibo_e2e::suite::{Place, STOP, Suite, eventually};
use rustix::process::Signal;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(90);

fn main() -> ExitCode {
    Suite::with_everything()
        .test("a_program_in_the_guest_has_the_terminal", terminal)
        .test("signals_and_bytes_pass_to_a_command", signals)
        .test("files_are_copied_as_they_are", copies)
        .test("a_copy_that_fails_leaves_nothing_half", broken_copies)
        .test("ports_lead_into_the_guest", ports)
        .run()
}

async fn running(place: &Place) -> Result<()> {
    place.node("1", "512Mi").await?;
    place.create_workspace("w", json!({})).await?;
    place.available("w").await.map(drop)
}

/// A line for the guest that tells whether a program with such arguments runs; its own arguments do not match.
fn runs(pattern: &str) -> String {
    format!("grep -laE '{pattern}' /proc/[0-9]*/cmdline >/dev/null 2>&1 && echo yes || echo no")
}

async fn becomes(place: &Place, line: &str, expected: &str) -> Result<()> {
    eventually(&format!("{line} says {expected}"), SOON, || async {
        let said = place.sh("w", line).await?;
        ensure!(said == expected, "{said:?}");
        Ok(Some(()))
    })
    .await
}

async fn terminal(place: Arc<Place>) -> Result<()> {
    running(&place).await?;
    let command = place.kibo_command(&["workspace", "exec", "w", "-it", "--", "sh"]);
    let mut at = Terminal::start(&command, 100, 40)?;
    at.is_raw().await?;
    at.types("stty size; echo term=$TERM\r")?;
    at.says("40 100\r\n").await?;
    at.says("term=xterm-256color").await?;
    // Keys and sizes come on ways of their own.
    at.resize(132, 43)?;
    at.types("until stty size | grep '43 132'; do sleep 0.1; done\r")?;
    at.says("43 132\r\n").await?;
    // ^C is the program's, not kibo's.
    at.types("sleep 4242\r")?;
    becomes(&place, &runs("^sleep.[4]242"), "yes").await?;
    at.types("\u{3}")?;
    at.types("echo ended-$?\r")?;
    at.says("ended-130").await?;
    at.types("exit 7\r")?;
    ensure!(at.ended().await? == 7, "{:?}", at.text());

    let mut at = Terminal::start(&place.kibo_command(&["workspace", "shell", "w"]), 80, 24)?;
    at.is_raw().await?;
    at.types("PS1='at-''the-prompt '; tty\r")?;
    at.says("/dev/pts/").await?;
    // A key that comes while the shell does not edit a line is the terminal's to understand.
    at.says("at-the-prompt ").await?;
    at.types("\u{4}")?;
    ensure!(at.ended().await? == 0, "^D ends a shell: {:?}", at.text());

    // A signal to kibo itself gives the terminal back too, and what ran hears of it.
    let command = place.kibo_command(&["workspace", "exec", "w", "-it", "--", "sleep", "5353"]);
    let mut at = Terminal::start(&command, 80, 24)?;
    at.is_raw().await?;
    becomes(&place, &runs("^sleep.[5]353"), "yes").await?;
    at.signal(Signal::TERM)?;
    ensure!(at.ended().await? == 128 + 15, "{:?}", at.text());
    becomes(&place, &runs("^sleep.[5]353"), "no").await?;

    // A Workspace that stops ends it, and says so.
    let command = place.kibo_command(&["workspace", "exec", "w", "-it", "--", "sleep", "6464"]);
    let mut at = Terminal::start(&command, 80, 24)?;
    at.is_raw().await?;
    becomes(&place, &runs("^sleep.[6]464"), "yes").await?;
    place.power("w", json!({"state": "Stopped"})).await?;
    let code = at.ended().await?;
    ensure!(code != 0 && at.text().contains("Workspace"), "{code} {:?}", at.text());

    let ran = place.kibo(&["workspace", "exec", "w", "-t", "--", "true"]).await?;
    ensure!(ran.code == 10 && ran.stderr.contains("terminal"), "{ran:?}");
    Ok(())
}

async fn signals(place: Arc<Place>) -> Result<()> {
    running(&place).await?;
    let line = "trap 'echo got; exit 9' INT; echo ready; while :; do sleep 0.1; done";
    let mut program = Program::start(place.kibo_command(&["workspace", "exec", "w", "--", "sh", "-c", line]))?;
    program.says("ready").await?;
    program.signal(Signal::INT)?;
    ensure!(program.ended().await? == 9, "{}", program.stderr());
    ensure!(program.stdout().ends_with(b"got\n"));

    // The second one ends kibo, whatever the command thinks of the first.
    let stubborn = "trap '' INT TERM; echo ready; exec sleep 4242";
    let mut program = Program::start(place.kibo_command(&["workspace", "exec", "w", "--", "sh", "-c", stubborn]))?;
    program.says("ready").await?;
    program.signal(Signal::TERM)?;
    becomes(&place, &runs("^sleep.[4]242"), "yes").await?;
    ensure!(!program.has_ended());
    program.signal(Signal::INT)?;
    ensure!(program.ended().await? == 130, "{}", program.stderr());
    becomes(&place, &runs("^sleep.[4]242"), "no").await?;

    // Every byte comes through the command, and its input has an end.
    let sent: Vec<u8> = (0..3_u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let command = ["workspace", "exec", "w", "-i", "--", "sh", "-c", "cat; echo err >&2; exit 3"];
    let mut program = Program::start(place.kibo_command(&command))?;
    let mut stdin = program.stdin.take().context("stdin")?;
    let data = sent.clone();
    let feed = tokio::spawn(async move { stdin.write_all(&data).await });
    ensure!(program.ended().await? == 3, "{}", program.stderr());
    feed.await??;
    eventually("all bytes came", SOON, || async { Ok((program.stdout().len() >= sent.len()).then_some(())) }).await?;
    ensure!(program.stdout() == sent && program.stderr() == "err\n", "other bytes came");

    // A command that does not read: nobody keeps what it does not take, and a signal still ends it.
    let deaf = "echo ready; exec sleep 5353";
    let mut program = Program::start(place.kibo_command(&["workspace", "exec", "w", "-i", "--", "sh", "-c", deaf]))?;
    program.says("ready").await?;
    let mut stdin = program.stdin.take().context("stdin")?;
    let zeros = vec![0; 1 << 20];
    let mut taken = 0_u64;
    while timeout(Duration::from_secs(3), stdin.write_all(&zeros)).await.is_ok() {
        taken += 1;
        ensure!(taken < 64, "{taken} MiB were taken for a command that reads nothing");
    }
    let memory = program.memory_bytes()?;
    ensure!(memory < 96 << 20, "kibo holds {memory} bytes");
    program.signal(Signal::INT)?;
    ensure!(program.ended().await? == 130, "{}", program.stderr());
    becomes(&place, &runs("^sleep.[5]353"), "no").await
}

/// A directory with everything that a copy can meet.
fn tree(root: &Path) -> Result<()> {
    fs::create_dir_all(root.join("deep/er"))?;
    fs::create_dir(root.join("empty"))?;
    let random: Vec<u8> = (0..5_u32 << 20).map(|at| (at.wrapping_mul(2_246_822_519) >> 24) as u8).collect();
    fs::write(root.join("deep/er/large"), random)?;
    fs::write(root.join("program"), "#!/bin/sh\necho ran\n")?;
    fs::set_permissions(root.join("program"), fs::Permissions::from_mode(0o750))?;
    fs::write(root.join("secret"), "")?;
    fs::set_permissions(root.join("secret"), fs::Permissions::from_mode(0o400))?;
    fs::write(root.join(format!("{}-ü", "long-name".repeat(20))), "long")?;
    symlink("deep/er", root.join("link"))?;
    let time = fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH + Duration::from_secs(1_234_567_890));
    fs::File::options().append(true).open(root.join("program"))?.set_times(time)?;
    Ok(())
}

/// What a tree is: names, kinds, modes, sizes, times and owners of files, contents.
fn listing(root: &Path) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    let mut left = vec![root.to_owned()];
    while let Some(path) = left.pop() {
        let metadata = path.symlink_metadata()?;
        let name = path.strip_prefix(root)?.display().to_string();
        let owner = (metadata.uid(), metadata.gid());
        if metadata.is_dir() {
            lines.push(format!("{name}/ {:o} {owner:?}", metadata.mode()));
            left.extend(fs::read_dir(&path)?.flatten().map(|entry| entry.path()));
        } else if metadata.is_symlink() {
            lines.push(format!("{name} -> {}", fs::read_link(&path)?.display()));
        } else {
            let data = fs::read(&path)?;
            let hash = <sha2::Sha256 as sha2::Digest>::digest(&data);
            lines.push(format!("{name} {:o} {} {owner:?} {hash:x}", metadata.mode(), metadata.mtime()));
        }
    }
    lines.sort();
    Ok(lines)
}

/// Runs `kibo workspace cp` and checks its exit status and what it says.
async fn cp(place: &Place, from: &str, to: &str, code: i32, says: &str) -> Result<()> {
    let ran = place.kibo(&["workspace", "cp", from, to]).await?;
    ensure!(ran.code == code && ran.stderr.contains(says), "cp {from} {to}: expected {code} and {says:?}: {ran:?}");
    Ok(())
}

async fn copies(place: Arc<Place>) -> Result<()> {
    running(&place).await?;
    let directory = tempfile::tempdir()?;
    let here = |name: &str| directory.path().join(name).display().to_string();
    tree(&directory.path().join("tree"))?;
    std::os::unix::fs::lchown(directory.path().join("tree/secret"), Some(1234), Some(5678))?;
    let expected = listing(&directory.path().join("tree"))?;

    // There and back again.
    cp(&place, &here("tree"), "w:/root/copy", 0, "").await?;
    ensure!(place.sh("w", "/root/copy/program; stat -c '%a %Y' /root/copy/program").await? == "ran\n750 1234567890");
    ensure!(place.sh("w", "stat -c '%a %u %g' /root/copy/secret").await? == "400 1234 5678");
    cp(&place, "w:/root/copy", &here("back"), 0, "").await?;
    let back = listing(&directory.path().join("back"))?;
    ensure!(back == expected, "sent:\n{}\ncame back:\n{}", expected.join("\n"), back.join("\n"));

    // Somebody who sits at a terminal sees how far it is, and keeps one line of it.
    let mut at = Terminal::start(&place.kibo_command(&["workspace", "cp", &here("tree"), "w:/root/seen"]), 100, 40)?;
    ensure!(at.ended().await? == 0, "{:?}", at.text());
    at.says("files to /root/seen: 5.").await?;
    ensure!(at.text().contains("copied 5 files"), "{:?}", at.text());

    // Where things go is as cp has it.
    cp(&place, &here("tree"), "w:/root/copy", 0, "").await?;
    cp(&place, &format!("{}/.", here("tree")), "w:/srv", 0, "").await?;
    cp(&place, &format!("{}/.", here("tree")), "w:/root/made", 0, "").await?;
    cp(&place, &here("tree/program"), "w:/root/renamed", 0, "").await?;
    cp(&place, &here("tree/program"), "w:/root/copy/empty", 0, "").await?;
    let line = "cd /root && test -d copy/tree/deep -a -f /srv/deep/er/large -a -f made/deep/er/large -a -f renamed -a \
                -f copy/empty/program && echo all";
    ensure!(place.sh("w", line).await? == "all");
    cp(&place, "w:/root/copy/program", directory.path().to_str().context("UTF-8")?, 0, "").await?;
    cp(&place, "w:/root/copy/deep/.", &here("contents"), 0, "").await?;
    cp(&place, "w:/root/copy/link", &here("link"), 0, "").await?;
    ensure!(fs::read(here("program"))? == fs::read(here("tree/program"))?);
    ensure!(fs::metadata(here("contents/er/large"))?.len() == 5 << 20);
    ensure!(fs::read_link(here("link"))? == Path::new("deep/er"));
    cp(&place, "--no-preserve=", "w:/x", 2, "").await?;
    place.kibo(&["workspace", "cp", "--no-preserve", &here("tree/secret"), "w:/root/mine"]).await?.ok()?;
    ensure!(place.sh("w", "stat -c '%a %u %g' /root/mine").await? == "400 0 0");

    // As tar streams.
    let read = place.kibo_command(&["workspace", "cp", "w:/root/copy/deep", "-"]);
    let mut program = Program::start(read)?;
    ensure!(program.ended().await? == 0, "{}", program.stderr());
    eventually("the archive is there", SOON, || async { Ok((program.stdout().len() > 5 << 20).then_some(())) }).await?;
    let archive = program.stdout();
    let mut write = Program::start(place.kibo_command(&["workspace", "cp", "-", "w:/tmp"]))?;
    let mut stdin = write.stdin.take().context("stdin")?;
    stdin.write_all(&archive).await?;
    drop(stdin);
    ensure!(write.ended().await? == 0, "{}", write.stderr());
    ensure!(place.sh("w", "cmp /tmp/deep/er/large /root/copy/deep/er/large && echo same").await? == "same");

    for (from, to, code, says) in [
        ("w:/no/such", here("x"), 12, "/no/such"),
        ("/no/such", "w:/root".to_owned(), 12, "/no/such"),
        ("w:/root/copy", here("tree/program"), 13, "not a directory"),
        ("w:/root/copy/program", here("missing/"), 12, "missing"),
        ("w:/root/copy/program", here("missing/x"), 12, "missing"),
        (&here("tree/program"), "w:/no/such/x".to_owned(), 12, "/no/such"),
        ("w:/a", "w:/b".to_owned(), 10, "local"),
        ("a", "b".to_owned(), 10, "WORKSPACE:PATH"),
        ("nobody:/a", here("x"), 12, "nobody"),
    ] {
        cp(&place, from, &to, code, says).await?;
    }
    let ran = place.kibo(&["workspace", "cp", &here("tree"), "w:/root/renamed"]).await?;
    ensure!(ran.code != 0 && ran.stderr.contains("/root/renamed"), "a directory onto a file: {ran:?}");
    ensure!(!directory.path().join("x").exists());
    Ok(())
}

async fn broken_copies(place: Arc<Place>) -> Result<()> {
    const HUGE: u64 = 4 << 30;
    running(&place).await?;
    let directory = tempfile::tempdir()?;
    let here = |name: &str| directory.path().join(name).display().to_string();
    fs::File::create(here("huge"))?.set_len(HUGE)?;

    // No room: it says so, and nothing is left.
    place.sh("w", "mkdir -p /small && mount -t tmpfs -o size=2m tmpfs /small && echo old > /small/file").await?;
    fs::write(here("large"), vec![7; 4 << 20])?;
    let ran = place.kibo(&["workspace", "cp", &here("large"), "w:/small/file"]).await?;
    ensure!(ran.code != 0 && ran.stderr.to_lowercase().contains("space"), "{ran:?}");
    ensure!(place.sh("w", "cat /small/*; ls -A /small").await? == "old\nfile");

    // Interrupted on the way there.
    place.sh("w", "mkdir /root/to").await?;
    let mut program = Program::start(place.kibo_command(&["workspace", "cp", &here("huge"), "w:/root/to/huge"]))?;
    becomes(&place, "test -n \"$(find /root/to -size +1M)\" && echo growing", "growing").await?;
    ensure!(place.sh("w", "test -e /root/to/huge || echo not yet").await? == "not yet");
    program.signal(Signal::INT)?;
    ensure!(program.ended().await? == 130, "{}", program.stderr());
    becomes(&place, "ls -A /root/to | wc -l", "0").await?;

    // Interrupted on the way here, while memory stays as it is.
    place.sh("w", &format!("truncate -s {HUGE} /root/huge")).await?;
    fs::create_dir(here("here"))?;
    fs::write(here("here/huge"), "old")?;
    let mut program = Program::start(place.kibo_command(&["workspace", "cp", "w:/root/huge", &here("here/huge")]))?;
    let part = || -> Result<Option<u64>> {
        let entries = fs::read_dir(here("here"))?.flatten();
        let mut parts = entries.filter(|entry| entry.file_name().to_string_lossy().ends_with(".part"));
        Ok(parts.next().and_then(|entry| entry.metadata().ok()).map(|part| part.len()))
    };
    eventually("some of it is here", SOON, || async { Ok(part()?.filter(|length| *length > 6 << 20)) }).await?;
    let memory = program.memory_bytes()?;
    ensure!(memory < 64 << 20, "kibo holds {memory} bytes");
    program.signal(Signal::TERM)?;
    ensure!(program.ended().await? == 130, "{}", program.stderr());
    ensure!(part()?.is_none() && fs::read_to_string(here("here/huge"))? == "old");

    // The daemon goes in the middle: the same, and it says so.
    let mut program = Program::start(place.kibo_command(&["workspace", "cp", "w:/root/huge", &here("here/huge")]))?;
    eventually("some of it is here", SOON, || async { Ok(part()?.filter(|length| *length > 1 << 20)) }).await?;
    let node = Component::Node(place.nodes().first().context("a node")?.clone());
    place.cluster().kill(&node).await?;
    let code = program.ended().await?;
    ensure!(code == 17 && program.stderr().contains("lost"), "{code} {}", program.stderr());
    ensure!(part()?.is_none() && fs::read_to_string(here("here/huge"))? == "old");
    place.cluster().start(&node).await.map_err(Into::into)
}

/// Answers each connection with what it sends, and says goodbye when that has ended.
const SERVER: &str = r#"
$SIG{CHLD} = "IGNORE";
my $s = IO::Socket::INET->new(LocalAddr => "127.0.0.1", LocalPort => 8080, Listen => 64, ReuseAddr => 1) or die $@;
while (1) {
    my $c = $s->accept or next;
    if (fork) { close $c; next }
    while (sysread($c, my $data, 65536)) {
        while (length $data) { substr($data, 0, syswrite($c, $data), "") }
    }
    syswrite($c, "goodbye");
    exit;
}"#;

async fn ports(place: Arc<Place>) -> Result<()> {
    place.node("1", "512Mi").await?;
    let mut template = place.template();
    template["spec"]["entrypoint"] = json!({"command": ["/usr/bin/perl", "-MIO::Socket::INET", "-e", SERVER]});
    place.create(template).await?;
    place.create_workspace("w", json!({})).await?;
    place.available("w").await?;

    let command = place.kibo_command(&["workspace", "port-forward", "w", ":8080", ":9", "--address", "127.0.0.1"]);
    let mut forward = Program::start(command)?;
    forward.says("-> 9\n").await?;
    let lines = String::from_utf8(forward.stdout())?;
    let port = |line: &str| -> Result<u16> {
        let rest = line.strip_prefix("Forwarding from 127.0.0.1:").context("the line")?;
        Ok(rest.split(' ').next().context("a port")?.parse()?)
    };
    let ports = lines.lines().map(port).collect::<Result<Vec<_>>>()?;
    let [open, refused] = ports[..] else { anyhow::bail!("{lines}") };
    let connect = move || TcpStream::connect(("127.0.0.1", open));

    // The server may still be on its way.
    eventually("it answers", SOON, || async {
        let mut socket = connect().await?;
        socket.write_all(b"hello").await?;
        let mut answer = [0; 5];
        socket.read_exact(&mut answer).await?;
        Ok((&answer == b"hello").then_some(()))
    })
    .await?;

    // Many at once; each direction ends by itself.
    let many = (0..16_u8).map(|number| async move {
        let (mut read, mut write) = connect().await?.into_split();
        let sent = vec![number; 200 * 1024 + usize::from(number)];
        let data = sent.clone();
        let writer = tokio::spawn(async move {
            write.write_all(&data).await?;
            write.shutdown().await?;
            anyhow::Ok(write)
        });
        let mut answer = Vec::new();
        timeout(SOON, read.read_to_end(&mut answer)).await??;
        writer.await??;
        let echoed = answer.strip_suffix(b"goodbye").context("the server saw the end of what was sent")?;
        ensure!(echoed == sent, "connection {number}: {} of {} bytes", echoed.len(), sent.len());
        anyhow::Ok(())
    });
    futures::future::try_join_all(many).await?;

    // A port where nobody listens ends that connection, with a word; the others go on.
    let mut nobody = TcpStream::connect(("127.0.0.1", refused)).await?;
    let read = timeout(SOON, nobody.read(&mut [0; 8])).await?;
    ensure!(!matches!(read, Ok(1..)), "{read:?}");
    forward.remarks("nothing listens on port 9").await?;

    // The daemon goes: the connection ends and says so; the next one works when the daemon is back.
    let mut lasting = connect().await?;
    lasting.write_all(b"x").await?;
    lasting.read_exact(&mut [0]).await?;
    let node = Component::Node(place.nodes().first().context("a node")?.clone());
    place.cluster().kill(&node).await?;
    let read = timeout(SOON, lasting.read(&mut [0; 8])).await?;
    ensure!(read.is_err(), "a part must not look like the whole: {read:?}");
    forward.remarks("connection to port 8080: ").await?;
    place.cluster().start(&node).await?;
    let mut lasting = eventually("a new connection works", SOON, || async {
        let mut socket = connect().await?;
        socket.write_all(b"y").await?;
        socket.read_exact(&mut [0]).await?;
        Ok(Some(socket))
    })
    .await?;

    // The Workspace stops: it ends, and says why.
    ensure!(!forward.has_ended());
    place.power("w", json!({"state": "Stopped"})).await?;
    let read = timeout(SOON, lasting.read(&mut [0; 8])).await?;
    ensure!(!matches!(read, Ok(1..)), "{read:?}");
    let code = forward.ended().await?;
    ensure!(code == 13 && forward.stderr().contains("forwarded no more"), "{code} {}", forward.stderr());
    place.phase("w", WorkspacePhase::Stopped, STOP).await?;
    let ran = place.kibo(&["workspace", "port-forward", "w", "80"]).await?;
    ensure!(ran.code == 13 && ran.stderr.contains("kibo workspace start w"), "{ran:?}");
    Ok(())
}
