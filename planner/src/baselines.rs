//! Textbook plans, priced under the same model, each at the best of its own degrees, micro-batch and recompute: all of them are in the space that was searched, so
//! none is better than the plan (pins of the request apart).

use crate::memory::{BucketSize, bucket_elems};
use crate::menu::{Choice, Menus};
use crate::objective::{Home, Terms, beside};
use crate::options::LayerOption;
use crate::pins::Pins;
use crate::placement::Seat;
use crate::prices::Prices;
use crate::problem::Problem;
use crate::search::{Found, explore};
use crate::space::divisors;
use crate::units::Nanos;
use dplan_ir::plan::{States, Zero};
use dplan_ir::program::Role;

/// One row of the comparison.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Baseline {
    pub name: &'static str,
    /// Nothing if it does not fit, or cannot cover devices and batch.
    pub step: Option<Nanos>,
    pub fits: bool,
    /// Trains on stale weights: printed, and does not count.
    pub asynchronous: bool,
}

/// Widest tensor parallelism of Megatron-LM's published runs: one node.
const MEGATRON_TP: u64 = 8;

/// All baselines. `late` says that time is up; what was not finished then counts with the best it had.
pub fn baselines(problem: &Problem, prices: &mut dyn Prices, per_node: u64, late: &dyn Fn() -> bool) -> Vec<Baseline> {
    let mut best = |texts: &[String]| -> Option<Found> {
        let mut best: Option<Found> = None;
        // Textbook systems recompute everywhere or nowhere.
        for (text, recompute) in texts.iter().flat_map(|t| ["none", "full"].map(|r| (t, r))) {
            let Ok(pins) = Pins::parse(&format!("{text},recompute={recompute}")) else { continue };
            let narrowed = problem.under(prices, pins);
            if let Some(found) = explore(&narrowed, prices, late).best
                && best.as_ref().is_none_or(|b| found.solution.objective < b.solution.objective)
            {
                best = Some(found);
            }
        }
        best
    };
    let data = |zero: u8| vec![format!("tp=1,cp=1,ep=1,pp=1,zero={zero}")];
    let stages: Vec<String> = divisors(problem.devices).filter(|&p| p > 1).map(|p| p.to_string()).collect();
    let pipeline = if stages.is_empty() { vec![] } else { vec![format!("tp=1,cp=1,ep=1,zero=0,schedule=gpipe,pp={}", stages.join("+"))] };
    let widths: Vec<String> = divisors(problem.devices).filter(|&t| t <= MEGATRON_TP.min(per_node)).map(|t| t.to_string()).collect();
    let megatron: Vec<String> = [0, 1].map(|zero| format!("tp={},cp=1,ep=1,zero={zero},schedule=1f1b", widths.join("+"))).into();

    let ddp = best(&data(0));
    let mut rows = vec![
        ("DDP", ddp.as_ref().map(|f| f.solution.objective)),
        ("ZeRO-1", best(&data(1)).map(|f| f.solution.objective)),
        ("ZeRO-2", best(&data(2)).map(|f| f.solution.objective)),
        ("ZeRO-3", best(&data(3)).map(|f| f.solution.objective)),
        ("GPipe", best(&pipeline).map(|f| f.solution.objective)),
        ("Megatron 3-D", best(&megatron).map(|f| f.solution.objective)),
    ];
    // Fully sharded data parallelism is ZeRO-3 under another name.
    rows.insert(1, ("FSDP", rows[3].1));
    let nodes = problem.devices.div_ceil(per_node);
    rows.push(("parameter server", ddp.as_ref().map(|f| served(problem, prices, f, nodes))));
    rows.insert(0, ("DataParallel", ddp.map(|f| f.solution.objective + blocking(problem, prices, &f))));
    let row = |(name, step): (&'static str, Option<u64>)| Baseline { name, step: step.map(Nanos), fits: step.is_some(), asynchronous: false };
    rows.into_iter().map(row).collect()
}

/// What a plan takes if one device of each node serves an equal part of the parameters: all workers push gradients to it, beside the backward pass, and pull
/// parameters when it has updated them. What `n` workers send to one of `k` servers goes through one link: `(n − 1) · G / k` bytes.
fn served(problem: &Problem, prices: &dyn Prices, found: &Found, servers: u64) -> u64 {
    let (tuple, site) = (&found.menus.tuple, found.menus.sites[0].0);
    let mesh = tuple.mesh();
    // Plain data parallelism is one stage, so there is one site; what a server sends goes to ranks behind those of a stage.
    let (here, there) = (Seat { site, first: 0 }, Seat { site, first: mesh.ranks() });
    let terms = Terms { links: prices, site, mesh: &mesh, types: problem.types, clip: problem.clip, homes: 1 };
    let mut step = found.solution.objective;
    for Layer { choice, option, home } in layers(problem, found) {
        let own = |b: &&BucketSize| !b.tied || home != Home::Repeated;
        let elems: u64 = option.bytes.buckets.iter().filter(own).map(|b| bucket_elems(b.elems, b.ways(&mesh))).sum();
        let through =
            |role: Role| prices.message(&mesh, here, there, (elems * problem.types.dtype(role).size() * (tuple.dp - 1)).div_ceil(servers)).0;
        let backward = option.backward.0;
        // A server updates more than a worker of ZeRO-1 does, launches included.
        let updates = [choice.states.zero, Zero(1)].map(|zero| terms.sync(&option.bytes, States { zero, ..choice.states }, home).update());
        let update = updates[0].div_ceil(servers).max(updates[1]);
        let end = beside(backward, through(Role::Grad)) - backward + update + through(Role::Param);
        step = step + end - choice.terms(home).end;
    }
    step
}

/// What a plan takes longer if gradients are reduced after the backward pass and parameters are sent out from one rank in every step.
fn blocking(problem: &Problem, prices: &dyn Prices, found: &Found) -> u64 {
    let (mesh, site) = (found.menus.tuple.mesh(), found.menus.sites[0].0);
    let terms = Terms { links: prices, site, mesh: &mesh, types: problem.types, clip: problem.clip, homes: 1 };
    let late = |l: Layer<'_>| terms.sync(&l.option.bytes, l.choice.states, l.home).blocking(l.option.backward);
    layers(problem, found).map(late).sum()
}

/// A layer of a plan of one stage.
struct Layer<'a> {
    choice: &'a Choice,
    option: &'a LayerOption,
    home: Home,
}

/// The layers of a plan of one stage, in order.
fn layers<'a>(problem: &Problem, found: &'a Found) -> impl Iterator<Item = Layer<'a>> {
    let Menus { choices, offers, tied, .. } = &found.menus;
    let mut seen = false;
    // The kinds are those of the narrowed problem, whose layers come in the same order.
    kinds_of(problem).into_iter().zip(&found.solution.choices).map(move |(kind, &choice)| {
        let home = if tied[kind] && seen { Home::Repeated } else { Home::Together };
        seen |= tied[kind];
        let choice = &choices[kind][choice as usize];
        Layer { choice, option: &offers[kind][choice.offer as usize].option, home }
    })
}

/// Kinds of a problem without ranges in its pins: one for each class, in order of appearance.
fn kinds_of(problem: &Problem) -> Vec<usize> {
    let mut classes = Vec::new();
    let kinds = problem.layers.iter().map(|&kind| {
        let class = problem.kinds[kind].class;
        classes.iter().position(|&c| c == class).unwrap_or_else(|| {
            classes.push(class);
            classes.len() - 1
        })
    });
    kinds.collect()
}
