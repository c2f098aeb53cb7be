//! Amounts and ratios.

use serde_json::json;

use super::case::{Accepted, Case, Refused, create, named, template};

pub fn amounts() -> Vec<Case> {
    let ok = |rule, cpu, memory, layer| create(rule, "Template", template(cpu, memory, layer), Accepted);
    let bad = |rule, cpu, memory, layer, parts| create(rule, "Template", template(cpu, memory, layer), Refused(parts));
    vec![
        ok("the smallest cpu", json!("1m"), "128Mi", "16Mi"),
        ok("cpu as a number", json!(2), "256Mi", "1Gi"),
        ok("cpu with a fraction in quotes", json!("0.5"), "256Mi", "1Gi"),
        bad("cpu below 1m", json!("0"), "256Mi", "1Gi", &["spec.resources.cpu", "cpu must be at least 1m"]),
        bad("cpu below 1m, as a number", json!(0), "256Mi", "1Gi", &["spec.resources.cpu", "cpu must be at least 1m"]),
        bad("cpu in parts of a millicore", json!("0.0005"), "256Mi", "1Gi", &["spec.resources.cpu", "cpu must be"]),
        bad("cpu beyond any host", json!("1025"), "256Mi", "1Gi", &["cpu must be at most 1024"]),
        bad("cpu that is no quantity", json!("many"), "256Mi", "1Gi", &["spec.resources.cpu", "must be a quantity"]),
        bad("negative cpu", json!("-1"), "256Mi", "1Gi", &["cpu must be at least 1m"]),
        bad(
            "memory below 128Mi",
            json!(1),
            "127Mi",
            "1Gi",
            &["spec.resources.memory", "memory must be at least 128Mi"],
        ),
        ok("memory with a fraction that is whole MiB", json!(1), "1.5Gi", "0.5Gi"),
        bad("a fraction that is not whole MiB", json!(1), "1.0001Gi", "1Gi", &["memory must be a whole number of MiB"]),
        bad("memory not in whole MiB", json!(1), "200000k", "1Gi", &["memory must be a whole number of MiB"]),
        bad(
            "a layer not in whole MiB",
            json!(1),
            "256Mi",
            "1000M",
            &["spec.writableLayer.size", "a whole number of MiB"],
        ),
        bad("a layer below 16Mi", json!(1), "256Mi", "15Mi", &["size must be at least 16Mi"]),
    ]
}

pub fn ratios() -> Vec<Case> {
    let node = |cpu: &str| json!({"overcommit": {"cpu": cpu}});
    let mut cases: Vec<_> = ["16", "0", "2.5", "0.001", "16.000", "1.10"]
        .into_iter()
        .map(|ratio| create("a ratio in range", "Node", node(ratio), Accepted))
        .collect();
    for ratio in ["16.001", "1.0001", "-1", "1e3", "", "NaN", "17", "1."] {
        cases.push(create(
            "a ratio out of range or form",
            "Node",
            node(ratio),
            Refused(&["spec.overcommit.cpu", "from 0 to 16"]),
        ));
    }
    let policy = || json!({"cpu": "2", "memory": "1"});
    cases.push(named(create("the one policy", "OvercommitPolicy", policy(), Accepted), "default"));
    cases.push(named(create("another policy", "OvercommitPolicy", policy(), Refused(&["named default"])), "second"));
    cases
}
