//! Admissible bounds: what no plan of a tuple can beat.
//!
//! Layers are spread perfectly over stages, and every layer runs at its least. Two bounds leave memory out; of these the greater counts:
//!
//! ```text
//! p · (T − c) ≥ Σ_layers min_choice ((p + n − 1) · time + end) + messages of the same        the greatest share of a stage is the mean at least
//! T − c ≥ Σ min time + messages + (n − 1) · max(mean, ⌈n_kind / p⌉ · min time_kind) + max(mean end, ⌈n_kind / p⌉ · min end_kind)
//! ```
//! with `time`, `end` and `n` as the objective adds them up, whatever the schedule ([`crate::objective`]). Before layers are priced, their least time `t` alone counts:
//! a ramp is at least its part of that ([`spread`]). A third bound, before pricing too, knows memory: layers have to fit, and the slowest stage is then no quicker than
//! [`crate::capacity`] says ([`fitting`]).

use crate::capacity::Layers;
use crate::memory::LayerBytes;
use crate::menu::{Choice, Menus};
use crate::objective::{Home, LayerSync, StageTime, Terms, repeats};
use crate::prices::{Floor, Links, Prices, Reference};
use crate::problem::Problem;
use crate::search::NEVER;
use crate::space::Tuple;
use dplan_ir::plan::Schedule;

/// Whether the inputs of layers alone, which are kept for every micro-batch in flight, are more than all stages can hold. The first layer has no input.
pub fn is_crowded(problem: &Problem, prices: &mut dyn Prices, tuple: &Tuple) -> bool {
    let layers = problem.layers.len() as u64 - 1;
    let least = (0..layers).map(|layer| prices.boundary_bytes(layer as u32, tuple.shape())).min().unwrap_or(0);
    let held = |stage| problem.budget.checked_div(tuple.in_flight(stage) * least).unwrap_or(u64::MAX);
    (0..tuple.pp).map(held).fold(0, u64::saturating_add) < layers
}

/// What no plan with these menus can beat.
pub fn priced(menus: &Menus, layers: &[usize]) -> u64 {
    let pipeline = menus.tuple.pipeline();
    let (p, n) = (u128::from(pipeline.stages), u128::from(repeats(&pipeline)));
    let joined = |of: StageTime| (p + n - 1) * u128::from(of.time) + u128::from(of.end);
    let messages: StageTime = (0..pipeline.all_virtual()).map(|c| menus.least_border(c)).sum();
    let shares = |c: &Choice| Home::ALL.map(|h| c.share(h));
    let least = |of: &dyn Fn(StageTime) -> u128| -> Vec<u128> {
        menus.choices.iter().map(|menu| menu.iter().flat_map(shares).map(of).min().unwrap_or(0)).collect()
    };
    let (time, end, joint) = (least(&|s| u128::from(s.time)), least(&|s| u128::from(s.end)), least(&joined));
    let sum = |of: &[u128]| layers.iter().map(|&kind| of[kind]).sum::<u128>();

    let together = (sum(&joint) + joined(messages)).div_ceil(p);
    let count = |kind: usize| layers.iter().filter(|&&k| k == kind).count() as u128;
    // The stage that has most is at least the mean, and some stage has its share of the layers of a kind, rounded up.
    let most = |of: &[u128], total: u128| (0..of.len()).map(|kind| count(kind).div_ceil(p) * of[kind]).max().unwrap_or(0).max(total.div_ceil(p));
    let total = sum(&time) + u128::from(messages.time);
    let apart = total + (n - 1) * most(&time, total) + most(&end, sum(&end) + u128::from(messages.end));
    narrow(together.max(apart) + u128::from(menus.constant))
}

/// What no plan of a tuple can beat, before its layers are priced ([`Prices::floor`]), memory aside.
pub fn floor(problem: &Problem, prices: &mut dyn Prices, tuple: &Tuple) -> u64 {
    let least: Vec<u64> = problem.floors(prices, tuple, Reference::Rank).iter().map(Floor::time).collect();
    spread(problem, tuple, &least, 0)
}

/// The same where layers have to fit, as known from a reference.
pub fn fitting(problem: &Problem, prices: &mut dyn Prices, tuple: &Tuple, from: Reference) -> u64 {
    let floors = problem.floors(prices, tuple, from);
    held(problem, prices, tuple, &floors)
}

/// The objective of layers that take the least of their kinds, the slowest stage no quicker than those of each kind allow that have to fit.
fn held(problem: &Problem, prices: &dyn Prices, tuple: &Tuple, floors: &[Floor]) -> u64 {
    let least: Vec<u64> = floors.iter().map(Floor::time).collect();
    let mesh = tuple.mesh();
    let links: &dyn Links = prices;
    let terms = Terms { links, mesh: &mesh, types: problem.types, clip: problem.clip, homes: 1 };
    let mut slowest = 0;
    // Halves of a backward pass and virtual stages keep other frames. A kind without ways is for its pricing to find.
    for (at, (kind, floor)) in
        problem.kinds.iter().zip(floors).enumerate().filter(|(_, (_, floor))| tuple.schedule.is_plain() && !floor.trades.is_empty())
    {
        let bytes = LayerBytes { buckets: floor.buckets.clone(), ..LayerBytes::default() };
        let syncs: Vec<LayerSync> = kind.states(tuple).map(|states| terms.sync(&bytes, states, Home::Together)).collect();
        let count = problem.layers.iter().filter(|&&k| k == at).count();
        let layers = Layers { trades: &floor.trades, part: floor.part, syncs: &syncs, count };
        match layers.slowest((0..tuple.pp).map(|s| tuple.in_flight(s)), problem.budget) {
            Some(time) => slowest = slowest.max(time),
            None => return NEVER,
        }
    }
    spread(problem, tuple, &least, slowest)
}

/// The objective of layers that take the least time of their kinds, perfectly spread over stages, of which the slowest takes so much at least: with mean time `t` of
/// a stage, `(p + m − 1) · t` where the ramp is all of it, `((p − 1) / v + m) · t` where it is one of `v` parts, `m · t` where weight gradients may fill it.
fn spread(problem: &Problem, tuple: &Tuple, least: &[u64], slowest: u64) -> u64 {
    let total: u128 = problem.layers.iter().map(|&kind| u128::from(least[kind])).sum();
    let (p, m) = (u128::from(tuple.pp), u128::from(tuple.micro_batches));
    let (times, parts) = match tuple.schedule {
        Schedule::GPipe | Schedule::OneFOneB => (p + m - 1, 1),
        Schedule::Interleaved => (p - 1 + u128::from(tuple.virtual_stages) * m, u128::from(tuple.virtual_stages)),
        Schedule::ZbH1 | Schedule::ZbV => (m, 1),
    };
    let uneven = if slowest > 0 { total + (m - 1) * u128::from(slowest) } else { 0 };
    narrow((total * times).div_ceil(p * parts).max(uneven))
}

fn narrow(bound: u128) -> u64 {
    u64::try_from(bound).unwrap_or(u64::MAX)
}
