//! The network of the guests: what they reach and what they do not, against real guests and a real outside.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kibo_crds::Workspace;
use kibo_crds::workspace::WorkspacePhase;
use kibo_e2e::local::process::virtual_machines;
use kibo_e2e::local::{Component, LocalNode, networks_of};
use kibo_e2e::suite::outside::{ECHO, METADATA, NOTED, Outside, RESOLVED};
use kibo_e2e::suite::{Place, STOP, Suite, eventually, execution, has_failed, why};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

fn main() -> ExitCode {
    Suite::with_everything()
        .test("a_guest_reaches_the_outside_and_no_host_guest_or_metadata", reach)
        .test("a_guest_that_may_not_go_out_reaches_nothing", deny)
        .test("rules_and_connections_outlive_a_killed_daemon", killed_daemon)
        .test("without_rules_no_guest_is_started", no_rules)
        .test("a_range_that_somebody_has_is_refused", taken_range)
        .run()
}

/// Long enough for whatever answers, on a machine with other guests.
const SILENCE: u64 = 3;

/// A node whose guests go out to this outside and ask it for names.
async fn node(place: &Place, outside: &Outside, change: impl FnOnce(&mut LocalNode)) -> Result<LocalNode> {
    let mut made = None;
    place
        .node_with("2", "1Gi", |node| {
            if let Some(network) = &mut node.network {
                network.uplinks = vec![outside.uplink.clone()];
                network.dns_servers = Some(vec![outside.address.to_string()]);
            }
            change(node);
            made = Some(node.clone());
        })
        .await?;
    made.context("the node was changed")
}

fn on(node: &LocalNode, more: &Value) -> Value {
    let mut spec = json!({"power": {"state": "Running", "node": node.id}});
    if let (Some(all), Some(more)) = (spec.as_object_mut(), more.as_object()) {
        all.extend(more.clone());
    }
    spec
}

fn address(workspace: &Workspace) -> Result<Ipv4Addr> {
    let execution = workspace.status.as_ref().and_then(|status| status.execution.as_ref()).context("no execution")?;
    execution.address.as_deref().context("no address")?.parse().context("no IPv4 address")
}

/// The line that asks a TCP service for its greeting.
fn greeting(at: &str, port: u16) -> String {
    format!("timeout {SILENCE} bash -c 'exec 3<>/dev/tcp/{at}/{port}; head -n 1 <&3'")
}

/// Which of these a guest can connect to, all tried at once.
async fn reached(place: &Place, name: &str, targets: &[(String, u16)]) -> Result<Vec<String>> {
    let tries = targets.iter().map(|(at, port)| {
        format!("(timeout {SILENCE} bash -c 'exec 3<>/dev/tcp/{at}/{port}' 2>/dev/null && echo {at}:{port}) &")
    });
    let line = format!("{} wait; true", tries.collect::<Vec<_>>().join(" "));
    Ok(place.sh(name, &line).await?.lines().map(str::to_owned).collect())
}

/// Serves TCP inside a guest, and makes sure that it does.
async fn serve_in(place: &Place, name: &str, own: Ipv4Addr, port: u16) -> Result<()> {
    let server = format!(
        "use IO::Socket::INET; my $l = IO::Socket::INET->new(LocalPort => {port}, Listen => 5, ReuseAddr => 1) or die; \
         while (my $c = $l->accept) {{ print $c \"guest\\n\"; close $c }}"
    );
    place.sh(name, &format!("setsid perl -e '{server}' >/dev/null 2>&1 </dev/null &")).await?;
    eventually(&format!("{name} serves"), Duration::from_secs(20), || async {
        let answer = place.sh(name, &format!("{}; true", greeting(&own.to_string(), port))).await?;
        Ok((answer == "guest").then_some(()))
    })
    .await
}

/// A program for the guest that puts UDP packets on its wire as they are told: source address, source MAC or `-` for its
/// own, and text, for each.
fn forge(from: Ipv4Addr, to: Ipv4Addr, gateway: Ipv4Addr, packets: &[(&str, &str, &str)]) -> String {
    let packets: Vec<String> =
        packets.iter().map(|(source, mac, text)| format!("[\"{source}\", \"{mac}\", \"{text}\"]")).collect();
    let packets = packets.join(", ");
    format!(
        r#"
use Socket;
opendir my $d, "/sys/class/net"; my ($if) = grep {{ !/^\./ && $_ ne "lo" }} readdir $d;
sub text {{ open my $f, "<", $_[0] or die; local $/; my $t = <$f>; $t =~ s/\s+\z//; $t }}
my $own = text("/sys/class/net/$if/address"); my $index = text("/sys/class/net/$if/ifindex");
# The gateway's MAC is known once something was sent there.
socket(my $u, PF_INET, SOCK_DGRAM, 0); my $gw = "";
for (1..100) {{
    send($u, "x", 0, pack_sockaddr_in(9, inet_aton("{gateway}")));
    ($gw) = text("/proc/net/arp") =~ /^\Q{gateway}\E\s+\S+\s+0x2\s+(\S+)/m and last;
    select(undef, undef, undef, 0.1);
}}
$gw or die "the gateway has no MAC";
sub mac {{ pack("H*", join "", split /:/, $_[0]) }}
sub sum {{ my $s = 0; $s += $_ for unpack "n*", $_[0]; $s = ($s >> 16) + ($s & 0xffff) while $s >> 16; ~$s & 0xffff }}
socket(my $p, 17, SOCK_RAW, unpack("S", pack("n", 0x0800))) or die "packet socket: $!";
for my $packet ({packets}) {{
    my ($source, $mac, $text) = @$packet;
    $source = "{from}" if $source eq "-"; $mac = $own if $mac eq "-";
    my $udp = pack("nnnn", 7001, {NOTED}, 8 + length $text, 0) . $text;
    my @ip = (0x45, 0, 20 + length $udp, 1, 0, 64, 17, 0, inet_aton($source), inet_aton("{to}"));
    $ip[7] = sum(pack "CCnnnCCna4a4", @ip);
    my $frame = mac($gw) . mac($mac) . pack("n", 0x0800) . pack("CCnnnCCna4a4", @ip) . $udp;
    send($p, $frame, 0, pack("SniSCCa8", 17, 0x0800, $index, 0, 0, 6, mac($gw))) or die "send: $!";
}}
"#
    )
}

async fn perl(place: &Place, name: &str, program: &str) -> Result<()> {
    let ran = place.kibo(&["workspace", "exec", name, "--", "perl", "-e", program]).await?;
    ran.ok().map(drop)
}

/// This host's own IPv4 addresses.
fn host_addresses() -> Result<Vec<Ipv4Addr>> {
    let listed = std::process::Command::new("ip").args(["-4", "-o", "addr", "show"]).output()?;
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let addresses = listed.lines().filter_map(|line| line.split_whitespace().nth(3)?.split('/').next()?.parse().ok());
    let mut addresses: Vec<Ipv4Addr> = addresses.filter(|it: &Ipv4Addr| !it.is_loopback()).collect();
    addresses.sort_unstable();
    addresses.dedup();
    Ok(addresses)
}

async fn reach(place: Arc<Place>) -> Result<()> {
    let outside = place.outside().await?;
    let here = node(&place, &outside, |_| {}).await?;
    let there = node(&place, &outside, |_| {}).await?;
    for (name, node) in [("a", &here), ("b", &here), ("c", &there)] {
        place.create_workspace(name, on(node, &json!({}))).await?;
    }
    let own = address(&place.available("a").await?)?;
    let (near, far) = (address(&place.available("b").await?)?, address(&place.available("c").await?)?);

    // Out: the outside sees the host, and knows the name.
    let hello = place.sh("a", &greeting(&outside.address.to_string(), ECHO)).await?;
    ensure!(hello == format!("hello {}", outside.host), "{hello}");
    let found = place.sh("a", "getent ahostsv4 www.example.test | head -n 1").await?;
    ensure!(found.starts_with(&RESOLVED.to_string()), "{found}");

    // Neither the host, by whatever address of its, nor link-local addresses, nor other guests.
    let service = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await?;
    let port = service.local_addr()?.port();
    let mut targets: Vec<(String, u16)> = Vec::new();
    for address in host_addresses()? {
        let control = timeout(Duration::from_secs(5), TcpStream::connect((address, port))).await;
        ensure!(control.is_ok_and(|it| it.is_ok()), "the host's own service answers at {address}");
        targets.push((address.to_string(), port));
    }
    let gateway = Ipv4Addr::from(u32::from(own) & 0xffff_ff00 | 1).to_string();
    ensure!(targets.iter().any(|(at, _)| *at == gateway), "{targets:?} has the gateway {gateway}");
    let control = timeout(Duration::from_secs(5), TcpStream::connect((METADATA, 80))).await;
    ensure!(control.is_ok_and(|it| it.is_ok()), "metadata answers the host");
    targets.push((METADATA.to_string(), 80));
    for (name, address) in [("b", near), ("c", far)] {
        serve_in(&place, name, address, 7100).await?;
        targets.push((address.to_string(), 7100));
    }
    let reached = reached(&place, "a", &targets).await?;
    ensure!(reached.is_empty(), "a guest reached {reached:?}");
    // Nor is a guest reached from the host.
    for address in [near, far] {
        let connected = timeout(Duration::from_secs(2), TcpStream::connect((address, 7100))).await;
        ensure!(!connected.is_ok_and(|it| it.is_ok()), "the host reached {address}");
    }
    // On the host's end there is no IPv6 that a guest could talk to.
    let ipv6 = std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    ensure!(!ipv6.lines().any(|line| line.split_whitespace().last().is_some_and(|it| it.starts_with("kt"))), "{ipv6}");

    // What says that it comes from somebody else goes nowhere; the last packet shows that the way is open.
    let (near, gateway) = (near.to_string(), gateway.parse()?);
    let packets = [
        (near.as_str(), "-", "as another guest"),
        ("203.0.113.9", "-", "as a stranger"),
        ("-", "02:00:00:00:00:99", "with another card"),
        ("-", "-", "as itself"),
    ];
    perl(&place, "a", &forge(own, outside.address, gateway, &packets)).await?;
    outside.has_noted("as itself").await?;
    let noted = outside.noted();
    ensure!(noted.len() == 1, "{noted:?}");
    ensure!(noted.values().all(|from: &SocketAddr| from.ip() == outside.host), "{noted:?}");
    Ok(())
}

async fn deny(place: Arc<Place>) -> Result<()> {
    let outside = place.outside().await?;
    let node = node(&place, &outside, |_| {}).await?;
    place.create_workspace("open", on(&node, &json!({}))).await?;
    place.create_workspace("shut", on(&node, &json!({"network": {"egress": "Deny"}}))).await?;
    let open = address(&place.available("open").await?)?;
    let shut = address(&place.available("shut").await?)?;

    let routes = place.sh("shut", "grep -c '[[:space:]]00000000[[:space:]]00000000' /proc/net/route; true").await?;
    ensure!(routes == "0", "it has a default route");
    let servers = place.sh("shut", "grep -c nameserver /etc/resolv.conf; true").await?;
    ensure!(servers == "0", "it has a DNS server");
    let reached = reached(&place, "shut", &[(outside.address.to_string(), ECHO)]).await?;
    ensure!(reached.is_empty(), "{reached:?}");
    // Also when it finds the way by itself.
    let gateway = Ipv4Addr::from(u32::from(open) & 0xffff_ff00 | 1);
    perl(&place, "shut", &forge(shut, outside.address, gateway, &[("-", "-", "shut")])).await?;
    perl(&place, "open", &forge(open, outside.address, gateway, &[("-", "-", "open")])).await?;
    outside.has_noted("open").await?;
    ensure!(!outside.noted().contains_key("shut"), "{:?}", outside.noted());

    // It is changed while nothing runs, and counts from the next start.
    let open_up = ["workspace", "update", "shut", "--egress", "allow"];
    let change = place.kibo(&open_up).await?;
    ensure!(change.code == 13 && change.stderr.contains("stop it first"), "{change:?}");
    place.power("shut", json!({"state": "Stopped"})).await?;
    place.phase("shut", WorkspacePhase::Stopped, STOP).await?;
    let changed = place.kibo(&open_up).await?.ok()?;
    ensure!(changed.contains("counts from the next start"), "{changed}");
    place.power("shut", json!({"state": "Running"})).await?;
    place.available("shut").await?;
    let hello = place.sh("shut", &greeting(&outside.address.to_string(), ECHO)).await?;
    ensure!(hello == format!("hello {}", outside.host), "{hello}");
    Ok(())
}

async fn killed_daemon(place: Arc<Place>) -> Result<()> {
    let outside = place.outside().await?;
    let node = node(&place, &outside, |_| {}).await?;
    let daemon = Component::Node(node.id.clone());
    place.create_workspace("w", json!({})).await?;
    let before = place.available("w").await?;
    let (id, instance) = execution(&before)?;
    // One connection that is used all the time.
    let client = format!(
        "exec 3<>/dev/tcp/{}/{ECHO}; read -r hello <&3; n=0; \
         while sleep 0.1; do n=$((n+1)); echo $n >&3; read -r -t 20 back <&3 || break; echo $back >/run/count; done; \
         echo broken >/run/count",
        outside.address
    );
    place.sh("w", &format!("setsid bash -c '{client}' >/dev/null 2>&1 </dev/null &")).await?;
    let count = counted(&place, 0).await?;

    place.cluster().kill(&daemon).await?;
    let there = networks_of(std::slice::from_ref(&node));
    ensure!(there.len() == 2, "rules and tap stay: {there:?}");
    place.cluster().start(&daemon).await?;
    let after = place.available("w").await?;
    ensure!(execution(&after)? == execution(&before)? && address(&after)? == address(&before)?);
    ensure!(networks_of(std::slice::from_ref(&node)) == there, "they are the same");
    let more = counted(&place, count).await?;
    ensure!(more > count, "the connection goes on");
    let service = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await?;
    let host = (outside.host.to_string(), service.local_addr()?.port());
    let reached = reached(&place, "w", &[host]).await?;
    ensure!(reached.is_empty(), "{reached:?}");

    place.power("w", json!({"state": "Stopped"})).await?;
    place.phase("w", WorkspacePhase::Stopped, STOP).await?;
    place.no_trace_of(&id, &instance).await?;
    // A daemon that ends and leaves nothing running leaves no rules either.
    ensure!(networks_of(std::slice::from_ref(&node)).len() == 1, "the rules of the node");
    ensure!(place.cluster().stop(&daemon).await?, "it ends when asked");
    let left = networks_of(std::slice::from_ref(&node));
    ensure!(left.is_empty(), "{left:?}");
    Ok(())
}

/// How far the counting client in the guest has come, once that is beyond `from`.
async fn counted(place: &Place, from: u64) -> Result<u64> {
    eventually("the guest's connection goes on", Duration::from_secs(30), || async {
        let text = place.sh("w", "cat /run/count 2>/dev/null; true").await?;
        ensure!(text != "broken", "the guest's connection was cut");
        Ok(text.parse().ok().filter(|count: &u64| *count > from))
    })
    .await
}

/// An `nft` that can be made to fail: then nothing is started, and nothing is left once it works again.
async fn no_rules(place: Arc<Place>) -> Result<()> {
    let outside = place.outside().await?;
    // It stays until the cluster is taken down, which needs it once more.
    let dir = place.cluster().layout().root().join("nft");
    std::fs::create_dir_all(&dir)?;
    let (script, broken, tried) = (dir.join("nft"), dir.join("broken"), dir.join("tried"));
    let text = format!(
        "#!/bin/sh\nif [ -e {} ]; then echo tried >> {}; echo 'no rules today' >&2; exit 1; fi\nexec /usr/sbin/nft \"$@\"\n",
        broken.display(),
        tried.display()
    );
    std::fs::write(&script, text)?;
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let nft = |node: &mut LocalNode| {
        if let Some(network) = &mut node.network {
            network.nft = Some(script.clone());
        }
    };
    let node = node(&place, &outside, nft).await?;
    std::fs::write(&broken, "")?;
    place.create_workspace("w", json!({})).await?;
    eventually("the rules were tried", Duration::from_secs(60), || async { Ok(tried.exists().then_some(())) }).await?;
    ensure!(virtual_machines(&node.id).is_empty(), "a guest runs without rules");
    let starting = place.api::<Workspace>().get("w").await?;
    let (id, instance) = execution(&starting)?;
    ensure!(kibo_e2e::local::network_of(&instance).is_empty(), "it has a tap without rules");
    std::fs::remove_file(&broken)?;
    let failed = place.workspace("w", "has failed", 60, has_failed).await?;
    ensure!(why(&failed).starts_with("NetworkFailed: ") && why(&failed).contains("no rules today"), "{}", why(&failed));
    place.no_trace_of(&id, &instance).await?;
    place.power("w", json!({"state": "Running", "requestId": "again"})).await?;
    place.available("w").await.map(drop)
}

async fn taken_range(place: Arc<Place>) -> Result<()> {
    let outside = place.outside().await?;
    let node = node(&place, &outside, |_| {}).await?;
    let range = node.network.context("it has a network")?.range;
    let dir = place.cluster().layout().node(&node.id);
    let config = std::fs::read_to_string(dir.join("config.toml"))?;
    let other = tempfile::tempdir()?;
    let state = (dir.join("state").display().to_string(), other.path().join("state").display().to_string());
    for (range_of_other, expected) in [
        (range.clone(), "another node-daemon on this host has"),
        (format!("{}/30", Ipv4Addr::from(u32::from(outside.host) - 1)), "overlaps the address"),
    ] {
        let config = config.replace(&state.0, &state.1).replace(&range, &range_of_other);
        let path = other.path().join("config.toml");
        std::fs::write(&path, config)?;
        let daemon = tokio::process::Command::new(place.cluster().programs().node_daemon())
            .args(["run", "--config"])
            .arg(&path)
            .kill_on_drop(true)
            .output();
        let ended = timeout(Duration::from_secs(20), daemon).await.context("the second daemon goes on")??;
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        ensure!(!ended.status.success() && said.contains(expected), "{range_of_other}: {said}");
        ensure!(said.contains(&format!("network.range = {range_of_other}")), "{said}");
    }
    Ok(())
}
