use super::*;

const GOOD: &str = r#"
state_dir = "/var/lib/kibotos"
[node]
id = "node-a"
[node.labels]
zone = "a"
[resources]
cpu = "4"
memory = "8Gi"
max_instances = 64
[[storage_pools]]
id = "local-a"
path = "/var/lib/kibotos-pool"
default = true
[vmm]
accelerator = "tcg"
qemu = "/usr/bin/qemu-system-x86_64"
kernel = "/boot/vmlinux"
initrd = "/boot/initrd.lz4"
[images]
dir = "/images"
[network]
range = "10.77.0.0/16"
uplinks = ["eth0"]
dns_servers = ["192.0.2.53"]
mtu = 1400
[control]
endpoints = ["https://127.0.0.1:7443"]
ca_file = "/etc/ca.crt"
"#;

fn problems(text: &str) -> Vec<String> {
    Config::parse(text).unwrap_err().0.iter().map(ToString::to_string).collect()
}

#[test]
fn a_good_file_is_understood() {
    let config = Config::parse(GOOD).unwrap();
    assert_eq!(config.node.id.as_ref().map(NodeId::as_str), Some("node-a"));
    assert_eq!(config.node.labels["zone"], "a");
    assert_eq!(config.resources.cpu, MilliCpu(4000));
    assert_eq!(config.resources.memory, Bytes(8 << 30));
    assert_eq!((config.vmm.accelerator, config.vmm.disk_io), (Accelerator::Tcg, DiskIo::Auto));
    assert_eq!((config.vmm.uid, config.vmm.gid), (65534, 65534));
    assert_eq!(config.vmm.cgroup_root, PathBuf::from("/sys/fs/cgroup"));
    assert_eq!(config.fence.freeze_after, Duration::from_secs(15));
    assert!(config.to_string().contains("local-a at /var/lib/kibotos-pool (default)"), "{config}");
}

#[test]
fn each_bad_value_is_named_with_key_value_and_rule() {
    for (good, bad, expected) in [
        (
            "state_dir = \"/var/lib/kibotos\"",
            "state_dir = \"state\"",
            "state_dir = \"state\": must be an absolute path",
        ),
        ("cpu = \"4\"", "cpu = \"4 cores\"", "resources.cpu = \"4 cores\": invalid quantity"),
        ("cpu = \"4\"", "cpu = 0", "resources.cpu = \"0\": must be above 0"),
        ("cpu = \"4\"", "cpu = true", "resources.cpu = true: must be a string"),
        ("memory = \"8Gi\"", "", "resources.memory: is required"),
        (
            "max_instances = 64",
            "max_instances = 0",
            "resources.max_instances = 0: must be a whole number of at least 1",
        ),
        ("max_instances = 64", "max_instance = 64", "resources.max_instance = 64: is not a known key"),
        ("id = \"node-a\"", "id = \"Node A\"", "node.id = \"Node A\": invalid node id"),
        ("zone = \"a\"", "zone = \"a b\"", "node.labels.zone = \"a b\": the value must be"),
        ("zone = \"a\"", "\"kibotos.dev/x\" = \"a\"", "the prefix is reserved"),
        ("id = \"local-a\"", "id = \"local.a\"", "storage_pools[0].id = \"local.a\": invalid pool id"),
        (
            "[vmm]",
            "[fence]\nfreeze_after_seconds = 4\n[vmm]",
            "fence.freeze_after_seconds = 4: must be a whole number of at least 5",
        ),
        ("accelerator = \"tcg\"", "accelerator = \"xen\"", "vmm.accelerator = \"xen\": must be \"kvm\" or \"tcg\""),
        (
            "accelerator = \"tcg\"",
            "accelerator = \"tcg\"\ndisk_io = \"native\"",
            "vmm.disk_io = \"native\": must be \"auto\", \"threads\" or \"io_uring\"",
        ),
        (
            "accelerator = \"tcg\"",
            "accelerator = \"tcg\"\nuid = 0",
            "vmm.uid = 0: must be a whole number of at least 1",
        ),
        ("\"https://127.0.0.1:7443\"", "\"http://a:1\"", "control.endpoints[0] = \"http://a:1\": must be https://"),
        ("\"https://127.0.0.1:7443\"", "", "control.endpoints = []: must have at least one entry"),
        ("[images]", "[image]", "image = {"),
        ("\"10.77.0.0/16\"", "\"10.77.0.1/16\"", "network.range = \"10.77.0.1/16\": must begin with its first address"),
        ("range = \"10.77.0.0/16\"", "", "network.range: is required"),
        ("[\"eth0\"]", "[\"eth 0\"]", "network.uplinks[0] = \"eth 0\": must be the name of a network interface"),
        ("[\"eth0\"]", "['a\"b']", "must be the name of a network interface"),
        ("[\"eth0\"]", "[\"kt0\"]", "network.uplinks[0] = \"kt0\": must not begin with kt"),
        ("192.0.2.53", "::1", "network.dns_servers[0] = \"::1\": must be an IPv4 address"),
        ("192.0.2.53", "127.0.0.53", "network.dns_servers[0] = \"127.0.0.53\": must be the address of another host"),
        ("mtu = 1400", "mtu = 500", "network.mtu = 500: must be a whole number of at least 576"),
        ("mtu = 1400", "mtu = 70000", "network.mtu = 70000: must be at most 65535"),
        ("mtu = 1400", "nft = \"nft\"", "network.nft = \"nft\": must be an absolute path"),
    ] {
        assert!(GOOD.contains(good), "{good}");
        let found = problems(&GOOD.replacen(good, bad, 1));
        assert!(found.iter().any(|problem| problem.contains(expected)), "{bad}: {found:?} lacks {expected:?}");
    }
}

#[test]
fn all_problems_are_found_at_once() {
    let found = problems("");
    for key in ["state_dir", "resources.cpu", "resources.memory", "storage_pools", "vmm.qemu", "control.ca_file"] {
        assert!(found.iter().any(|problem| problem.starts_with(key)), "{found:?} lacks {key}");
    }
}

#[test]
fn exactly_one_pool_is_the_default() {
    let second = |default| format!("{GOOD}\n[[storage_pools]]\nid = \"b\"\npath = \"/b\"\ndefault = {default}");
    assert!(Config::parse(&second(false)).is_ok());
    assert_eq!(problems(&second(true)), ["storage_pools: exactly one must have default = true, not 2"]);
    let none = second(false).replacen("default = true", "", 1);
    assert_eq!(problems(&none), ["storage_pools: exactly one must have default = true, not 0"]);
}

#[test]
fn the_only_pool_is_the_default() {
    let config = Config::parse(&GOOD.replacen("default = true", "", 1)).unwrap();
    assert_eq!(config.default_pool().map(|pool| pool.id.as_str()), Some("local-a"));
}

#[test]
fn a_pool_stands_once() {
    let text = format!("{GOOD}\n[[storage_pools]]\nid = \"local-a\"\npath = \"/var/lib/kibotos-pool\"");
    let found = problems(&text);
    assert!(found[0].starts_with("storage_pools[1].id = \"local-a\": names a pool a second time"), "{found:?}");
    assert!(found[1].starts_with("storage_pools[1].path"), "{found:?}");
}

#[test]
fn what_is_no_toml_is_told_with_its_line() {
    assert!(problems("a = ")[0].contains("line 1"));
}

#[test]
fn a_network_has_defaults_and_its_absence_is_said() {
    let config = Config::parse(GOOD).unwrap();
    let network = config.network.as_ref().unwrap();
    assert_eq!(network.nft, PathBuf::from("/usr/sbin/nft"));
    assert!(config.to_string().contains("10.77.0.0/16, uplinks eth0, DNS 192.0.2.53, MTU 1400"), "{config}");
    let (before, after) = GOOD.split_once("uplinks").unwrap();
    let shortest = format!("{before}{}", after.split_once("mtu = 1400\n").unwrap().1);
    let network = Config::parse(&shortest).unwrap().network.unwrap();
    assert_eq!((network.uplinks.len(), network.dns_servers, network.mtu), (0, None, None));
    let (before, after) = GOOD.split_once("[network]").unwrap();
    let without = format!("{before}{}", after.split_once("mtu = 1400\n").unwrap().1);
    let config = Config::parse(&without).unwrap();
    assert_eq!(config.network, None);
    assert!(config.to_string().contains("no [network] section"), "{config}");
}
