//! `kibo top nodes`.

use clap::Args;
use jiff::Timestamp;
use kibo_crds::{Node, Percent};
use kube::{ResourceExt, api::ListParams};
use serde::Serialize;

use crate::{
    client::{Cluster, Listed, Paging, remark_next_page},
    errors::Result,
    node::{HostUsageView, Measured, memory_tight, shares, subject, yes_no},
    output::{
        OutputArgs, Present, Table, present, remark,
        words::{ABSENT, age, binary, cores, or_absent},
    },
};

#[derive(Args, Debug)]
pub struct Nodes {
    /// Only those with these labels
    #[arg(short = 'l', long, value_name = "LABELS")]
    selector: Option<String>,
    #[command(flatten)]
    paging: Paging,
    #[command(flatten)]
    output: OutputArgs,
}

pub async fn nodes(cluster: &Cluster, args: Nodes) -> Result<()> {
    let params = ListParams { label_selector: args.selector, ..ListParams::default() };
    let listed = args.paging.list(&cluster.cluster_wide::<Node>(), params, &subject("")).await?;
    if listed.items.is_empty() {
        remark("no nodes");
    }
    let many = Many { listed, now: Cluster::now() };
    present(args.output.form(), &many)?;
    remark_next_page(&many.listed);
    Ok(())
}

struct Many {
    listed: Listed<Node>,
    now: Timestamp,
}

#[derive(Serialize)]
struct OneView {
    node_id: String,
    host_usage: Option<HostUsageView>,
}

impl Present for Many {
    fn view(&self) -> impl Serialize {
        let one = |node: &Node| OneView {
            node_id: node.name_any(),
            host_usage: node.status.as_ref().and_then(HostUsageView::of),
        };
        self.listed.view("nodes", one)
    }

    fn names(&self) -> Vec<String> {
        self.listed.items.iter().map(ResourceExt::name_any).collect()
    }

    /// VM memory stands against what was allocated: by that a memory ratio is set.
    fn text(&self, _wide: bool) -> String {
        let mut table = Table::new([
            "NODE",
            "VM_CPU",
            "CPU_IDLE",
            "CPU_PRESSURE",
            "VM_MEM/ALLOC",
            "MEM_AVAIL/TOTAL",
            "MEM_PRESSURE",
            "MEM_TIGHT",
            "SAMPLE_AGE",
        ]);
        for node in &self.listed.items {
            let status = node.status.clone().unwrap_or_default();
            let Some(usage) = &status.host_usage else {
                let absent = std::iter::repeat_n(ABSENT.to_owned(), 8);
                table.row([node.name_any()].into_iter().chain(absent).collect());
                continue;
            };
            let percent = |share: Option<Percent>| or_absent(share.map(|share| format!("{share}%")));
            table.row(vec![
                node.name_any(),
                or_absent(usage.vm_cpu_milli.map(cores)),
                percent(usage.cpu_idle),
                percent(usage.cpu_pressure_some),
                shares(usage.vm_memory_bytes, Measured::from(status.allocated.as_ref()).memory, binary),
                shares(usage.memory_available_bytes, usage.memory_total_bytes, binary),
                percent(usage.memory_pressure_some),
                or_absent(memory_tight(&status).map(yes_no)),
                age(Some(&usage.sampled_at), self.now),
            ]);
        }
        table.render()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_hosts() {
        let used = serde_json::json!({ "metadata": { "name": "node-1" }, "spec": {}, "status": {
            "allocated": { "cpu": "2", "memory": "4Gi" },
            "hostUsage": {
                "sampledAt": "1970-01-01T00:01:20Z", "vmCpuMilli": 1250, "vmMemoryBytes": 1_610_612_736_u64,
                "memoryAvailableBytes": 838_860_800_u64, "memoryTotalBytes": 8_589_934_592_u64, "cpuIdle": "47.5",
                "cpuPressureSome": "1.5", "memoryTightSince": "1970-01-01T00:00:30Z",
            },
        }});
        let silent = serde_json::json!({ "metadata": { "name": "node-2" }, "spec": {} });
        let items = [used, silent].map(|json| serde_json::from_value(json).unwrap()).into();
        let many = Many { listed: Listed { items, next_page_token: None }, now: Timestamp::from_second(90).unwrap() };
        let expected = "\
NODE     VM_CPU   CPU_IDLE   CPU_PRESSURE   VM_MEM/ALLOC   MEM_AVAIL/TOTAL   MEM_PRESSURE   MEM_TIGHT   SAMPLE_AGE
node-1   1.25     47.5%      1.5%           1.5Gi/4.0Gi    800.0Mi/8.0Gi     -              yes         10s
node-2   -        -          -              -              -                 -              -           -
";
        assert_eq!(many.text(false), expected);
    }
}
