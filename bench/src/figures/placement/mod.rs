//! Placements in a second, beside kube-scheduler with as many nodes on the same API server.

mod arena;
mod contest;
mod kibotos;
mod scheduler;

use anyhow::Result;
use kibo_e2e::local::Progress;

use self::{
    arena::Arena,
    contest::{Outcome, Score},
};
use crate::{
    report::{Aim, Section, millis, ratio},
    site::Site,
};

const TIMES: Aim = Aim::AtLeast(2.0);

/// How much is placed on how many nodes.
#[derive(Clone, Debug)]
pub struct Sizes {
    pub nodes: Vec<u32>,
    pub objects: u32,
}

const EXPLAINED: &str = "\
kube-scheduler of the API server's own release, its client limits lifted, with Pods; then the operator with Workspaces, and \
nodes that are the daemon's own sessions and admission without virtual machines, all in one process. Each has as many nodes, and \
the same API server, one after the other. All objects are created as fast as the API server takes them from 32 clients at once; \
the rate is from the first creation to the moment in which a watch has shown the last placement, and the latency from the \
beginning of each creation to its own, which is mostly waiting. Below it the same of objects that are created at a steady pace, \
where nobody has to wait. The machine is shared by the API server, etcd, whoever places, the clients and, with the operator, \
all nodes.";

pub async fn measure(site: &Site, sizes: &Sizes) -> Result<Vec<Section>> {
    let header = ["", "kube-scheduler", "Kibotos", "ratio", "aim", ""];
    let mut section = Section::new("Placements in a second", EXPLAINED, header);
    for &nodes in &sizes.nodes {
        let arena = Arena::up(site, nodes).await?;
        let (theirs, ours) = play(&arena, nodes, sizes.objects).await?;
        arena.down().await?;
        tell(&mut section, nodes, &theirs, &ours);
    }
    Ok(vec![section])
}

async fn play(arena: &Arena<'_>, nodes: u32, objects: u32) -> Result<(Score, Score)> {
    let progress = Progress::Shown;
    let theirs =
        progress.step(&format!("kube-scheduler, {nodes} nodes"), scheduler::play(arena, nodes, objects)).await?;
    let ours = progress.step(&format!("Kibotos, {nodes} nodes"), kibotos::play(arena, nodes, objects)).await?;
    Ok((theirs, ours))
}

fn tell(section: &mut Section, nodes: u32, theirs: &Score, ours: &Score) {
    let quotient = ours.burst.rate() / theirs.burst.rate();
    let rates = [theirs, ours].map(|score| format!("{:.0} /s", score.burst.rate()));
    let [aim, met] = TIMES.cells(quotient, ratio);
    section.row(&format!("{nodes} nodes: placed in a second"), rates.into_iter().chain([ratio(quotient), aim, met]));
    for (what, part) in
        [("all at once", (|score| &score.burst) as fn(&Score) -> &Outcome), ("steady", |score| &score.steady)]
    {
        for (name, quantile) in [("median", 0.5), ("99th of 100", 0.99)] {
            let latency = |score| part(score).latency(quantile);
            let cells = [latency(theirs), latency(ours)].map(millis);
            section.row(&format!("{nodes} nodes: {what}, latency, {name}"), cells);
        }
    }
    let writes = [theirs, ours].map(|score| format!("{:.1}", score.writes_each));
    section.row(&format!("{nodes} nodes: writes for each object"), writes);
}
