//! Admissible bounds: what no plan of a tuple can beat.
//!
//! Memory is left out, layers are spread perfectly over stages, and every layer runs at its least. Two bounds, of which the greater counts:
//!
//! ```text
//! p · (T − c) ≥ Σ_layers min_choice ((p + m − 1) · t + e) + (p + m − 1) · messages        the slowest stage is no quicker than the mean
//! T − c ≥ Σ min t + messages + (m − 1) · max(mean, ⌈n_kind / p⌉ · min t_kind) + max(mean e, max min e)
//! ```

use crate::menu::{Choice, Menus};
use crate::objective::Home;
use crate::prices::Prices;
use crate::problem::Problem;
use crate::space::Tuple;

/// Whether the inputs of layers alone, which are kept for every micro-batch in flight, are more than all stages can hold. The first layer has no input.
pub fn is_crowded(problem: &Problem, prices: &mut dyn Prices, tuple: &Tuple) -> bool {
    let layers = problem.layers.len() as u64 - 1;
    let least = (0..layers).map(|layer| prices.boundary_bytes(layer as u32, tuple.shape())).min().unwrap_or(0);
    let held = |stage| problem.budget.checked_div(tuple.in_flight(stage) * least).unwrap_or(u64::MAX);
    (0..tuple.pp).map(held).fold(0, u64::saturating_add) < layers
}

/// What no plan with these menus can beat.
pub fn priced(menus: &Menus, layers: &[usize]) -> u64 {
    let (p, m) = (menus.tuple.pp, menus.tuple.micro_batches);
    let messages: u64 = (0..p).map(|s| menus.least_message(s)).sum();
    let end = |c: &Choice| Home::ALL.map(|h| c.terms(h).end).into_iter().min().unwrap_or(0);
    let least = |of: &dyn Fn(&Choice) -> u128| -> Vec<u128> { menus.choices.iter().map(|menu| menu.iter().map(of).min().unwrap_or(0)).collect() };
    let time = least(&|c| u128::from(c.terms(Home::Together).time));
    let ends = least(&|c| u128::from(end(c)));
    let joint = least(&|c| u128::from(p + m - 1) * u128::from(c.terms(Home::Together).time) + u128::from(end(c)));
    let sum = |of: &[u128]| layers.iter().map(|&kind| of[kind]).sum::<u128>();
    let (p, m, messages) = (u128::from(p), u128::from(m), u128::from(messages));

    let together = (sum(&joint) + (p + m - 1) * messages).div_ceil(p);
    let total = sum(&time) + messages;
    let share = |kind: usize| (layers.iter().filter(|&&k| k == kind).count() as u128).div_ceil(p) * time[kind];
    let slowest = (0..time.len()).map(share).max().unwrap_or(0).max(total.div_ceil(p));
    let longest = layers.iter().map(|&kind| ends[kind]).max().unwrap_or(0).max(sum(&ends).div_ceil(p));
    let apart = total + (m - 1) * slowest + longest;
    narrow(together.max(apart) + u128::from(menus.constant))
}

/// What no plan of a tuple can beat, before its layers are priced: each takes at least its floor ([`Prices::floor`]).
pub fn floor(problem: &Problem, prices: &mut dyn Prices, tuple: &Tuple) -> u64 {
    spread(problem, tuple, |class| prices.floor(class, tuple.shape()).0)
}

/// The same by the trend of a larger micro-batch ([`Prices::trend`]).
pub fn trend(problem: &Problem, prices: &mut dyn Prices, tuple: &Tuple, largest: u64) -> u64 {
    spread(problem, tuple, |class| prices.trend(class, tuple.shape(), largest).0)
}

/// The objective of layers that take the least time of their classes, perfectly spread over stages.
fn spread(problem: &Problem, tuple: &Tuple, least: impl FnMut(u32) -> u64) -> u64 {
    let least: Vec<u64> = problem.kinds.iter().map(|k| k.class).map(least).collect();
    let total: u128 = problem.layers.iter().map(|&kind| u128::from(least[kind])).sum();
    let (p, m) = (u128::from(tuple.pp), u128::from(tuple.micro_batches));
    narrow((total * (p + m - 1)).div_ceil(p))
}

fn narrow(bound: u128) -> u64 {
    u64::try_from(bound).unwrap_or(u64::MAX)
}
