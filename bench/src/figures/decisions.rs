//! How many places the operator finds in a second, without anything but the deciding.

use std::{collections::BTreeMap, time::Instant};

use anyhow::{Result, ensure};
use kibo_crds::{Bytes, MilliCpu};
use kibo_operator::placement::{CandidateNode, CandidatePool, Demand, Disk, PoolAccess, Strategy, Used, decide};

use super::as_float;
use crate::{
    report::{Aim, Section},
    spread::Spread,
};

const NODES: usize = 5000;
const REQUESTS: usize = 5000;
const ROUNDS: usize = 5;
const A_SECOND: Aim = Aim::AtLeast(20_000.0);

const EXPLAINED: &str = "\
5000 nodes, half full and each a little otherwise, and 5000 requests of one CPU, 1 GiB and a new layer of 10 GiB, decided by \
the function that the operator runs, in one thread and without the API. A batch is what came while the one before was written; \
the nodes are looked at anew for each, so that many small ones cost more. In the second row every node puts layers into one pool \
that all of them share.";

pub fn measure() -> Result<Vec<Section>> {
    let mut section = Section::new("Decisions of placement", EXPLAINED, ["", "median", "min", "max", "aim", ""]);
    for (name, batch, is_shared, aim) in [
        ("a batch of 5000, a pool for each node", REQUESTS, false, Some(A_SECOND)),
        ("a batch of 5000, one pool for all", REQUESTS, true, Some(A_SECOND)),
        ("batches of 500", 500, false, None),
        ("batches of 50", 50, false, None),
    ] {
        let rounds = (0..ROUNDS).map(|_| a_second(batch, is_shared)).collect::<Result<Vec<_>>>()?;
        let rates = Spread::of(rounds);
        let show = |rate: f64| format!("{rate:.0} /s");
        let cells = rates.cells(show).into_iter();
        section.row(name, cells.chain(aim.into_iter().flat_map(|aim| aim.cells(rates.median, show))));
    }
    Ok(vec![section])
}

/// Requests that are decided in a second, in batches of so many.
fn a_second(batch: usize, is_shared: bool) -> Result<f64> {
    let nodes: Vec<_> = (0..NODES).map(|number| node(number, is_shared)).collect::<Result<_>>()?;
    let demands = vec![demand(); batch];
    let begun = Instant::now();
    for _ in 0..REQUESTS / batch {
        let decided = decide(nodes.clone(), &demands, Strategy::Spread);
        ensure!(decided.iter().all(Result::is_ok), "a request found no place");
    }
    Ok(as_float(REQUESTS) / begun.elapsed().as_secs_f64())
}

fn node(number: usize, is_shared: bool) -> Result<CandidateNode> {
    let id = format!("node-{number}");
    let pool = if is_shared { "shared".to_owned() } else { format!("local-{id}") };
    let used = 8 + u64::try_from(number % 16)?;
    Ok(CandidateNode {
        id: id.parse()?,
        labels: BTreeMap::new(),
        closed: None,
        schedulable_cpu: Some(MilliCpu(32_000)),
        schedulable_memory: Some(Bytes(64 << 30)),
        slots: Some(100),
        used: Used { cpu: MilliCpu(used * 1000), memory: Bytes(used << 30), instances: u32::try_from(used)? },
        pools: vec![CandidatePool {
            id: pool.parse()?,
            default: true,
            access: PoolAccess::Reached,
            free: Some(Bytes(1 << 50)),
            unallocated: Some(Bytes(1 << 50)),
        }],
        last_assigned: u64::try_from(number)?,
    })
}

fn demand() -> Demand {
    Demand {
        cpu: MilliCpu(1000),
        memory: Bytes(1 << 30),
        disks: vec![Disk::New { pool: None, size: Bytes(10 << 30) }],
        node_selector: BTreeMap::new(),
        pin: None,
        refusals: BTreeMap::new(),
    }
}
