//! The table of nodes.

use jiff::Timestamp;
use kibo_crds::Node;
use kube::ResourceExt;
use serde::Serialize;

use super::view::{Measured, View, memory_tight, shares, yes_no};
use crate::{
    client::Listed,
    output::{
        Present, Table,
        words::{age, binary, cores, enum_word, or_absent},
    },
};

pub struct Many {
    pub listed: Listed<Node>,
    pub now: Timestamp,
}

impl Present for Many {
    fn view(&self) -> impl Serialize {
        self.listed.view("nodes", View::one_of_many)
    }

    fn names(&self) -> Vec<String> {
        self.listed.items.iter().map(ResourceExt::name_any).collect()
    }

    fn text(&self, wide: bool) -> String {
        let mut table = Table::new([
            "NODE",
            "STATUS",
            "RELEASE",
            "CLOCK",
            "INSTANCES",
            "CPU_ALLOC/SCHED",
            "MEM_ALLOC/SCHED",
            "MEM_TIGHT",
            "AGE",
        ]);
        if wide {
            table = table.columns(["INCARNATION", "REG_VERSION"]);
        }
        for node in &self.listed.items {
            let status = node.status.clone().unwrap_or_default();
            let schedulable = Measured::from(status.schedulable.as_ref());
            let allocated = Measured::from(status.allocated.as_ref());
            let mut row = vec![
                node.name_any(),
                status.phase.as_ref().map(enum_word).unwrap_or_default(),
                status.session.as_ref().map(|session| session.version.clone()).unwrap_or_default(),
                or_absent(status.clock.as_ref().map(|clock| &clock.shown)),
                or_absent(status.report.as_ref().map(|report| report.instances)),
                shares(allocated.cpu, schedulable.cpu, cores),
                shares(allocated.memory, schedulable.memory, binary),
                or_absent(memory_tight(&status).map(yes_no)),
                age(node.creation_timestamp().as_ref(), self.now),
            ];
            if wide {
                row.push(or_absent(status.incarnation));
                row.push(node.resource_version().unwrap_or_default());
            }
            table.row(row);
        }
        table.render()
    }
}
