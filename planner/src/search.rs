//! The search over all tuples, best bound first. It stops when the next bound reaches the incumbent, and that stop is the proof: every plan that could be better
//! was evaluated, on the same objective.
//!
//! A tuple is bounded three times, the first two times without pricing its layers. Its exact solution is asked for only below the incumbent. Pipelines that run all forward passes
//! first (`gpipe`) cost the same as their one-forward-one-backward twin under the objective and need no less memory, so they are closed with it.

use crate::bound;
use crate::menu::Menus;
use crate::prices::Prices;
use crate::problem::Problem;
use crate::space::{Tuple, tuples};
use crate::stages::{Solution, Solved, Stages};
use dplan_ir::plan::Schedule;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// Larger than any objective, small enough to add to.
pub const NEVER: u64 = u64::MAX / 4;

/// How a tuple was closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    /// No plan of it is below this, found without pricing its layers.
    Floor(u64),
    /// No plan of it is below this, found by pricing the largest micro-batch of its tensor parallelism.
    Trend(u64),
    /// No plan of it is below this.
    Bound(u64),
    /// Solved exactly: nothing below the incumbent of that moment, which was this.
    Nothing(u64),
    /// Solved exactly: this is its best.
    Best(u64),
    /// Some layer cannot run in it.
    Impossible,
    /// What layers hand over does not fit, even if nothing else is kept.
    Crowded,
    /// Not better than the tuple at this position, which differs in the schedule only.
    Twin(usize),
    /// Time ran out; no plan of it is below this.
    Open(u64),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Closed {
    pub tuple: Tuple,
    pub how: How,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Statistics {
    /// Tuples in the space.
    pub space: usize,
    /// Tuples solved exactly.
    pub solved: usize,
    /// No plan of the space is below this, nanoseconds.
    pub lower_bound: u64,
    /// (objective − lower bound) / objective.
    pub gap: f64,
    pub proved: bool,
}

/// A plan in terms of menus.
#[derive(Clone, Debug)]
pub struct Found {
    pub menus: Menus,
    pub solution: Solution,
}

#[derive(Clone, Debug)]
pub struct Outcome {
    pub best: Option<Found>,
    pub closed: Vec<Closed>,
    pub statistics: Statistics,
}

/// Menus of a tuple, one for each way of the tied parameter, with their bounds.
type Priced = Vec<(u64, Menus)>;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Floor,
    Trend,
    Priced,
}

/// Finds the best plan of all tuples that the pins allow. `late` says that time is up.
pub fn explore(problem: &Problem, prices: &mut dyn Prices, late: &dyn Fn() -> bool) -> Outcome {
    let space = tuples(prices, problem.devices, problem.batch, &problem.pins);
    let mut how: Vec<Option<How>> = vec![None; space.len()];
    let mut queue = BinaryHeap::new();
    for (at, tuple) in space.iter().enumerate() {
        let twin = Tuple { schedule: Schedule::OneFOneB, ..*tuple };
        match space.binary_search(&twin) {
            Ok(twin) if tuple.schedule == Schedule::GPipe => how[at] = Some(How::Twin(twin)),
            _ if bound::is_crowded(problem, prices, tuple) => how[at] = Some(How::Crowded),
            _ => queue.push(Reverse((bound::floor(problem, prices, tuple), Level::Floor, at))),
        }
    }
    let largest = largest(space.iter().zip(&how).filter(|(_, how)| !matches!(how, Some(How::Crowded))).map(|(tuple, _)| tuple));
    let mut best: Option<Found> = None;
    let mut objective = NEVER;
    let mut solved = 0;
    let mut lower_bound = None;
    let mut open: Vec<(u64, usize)> = Vec::new();
    // Out of time without a plan, tuples are followed to their ends one by one: an answer needs some plan.
    let mut dive: Option<Reverse<(u64, Level, usize)>> = None;
    while let Some(Reverse((bound, level, at))) = dive.take().or_else(|| queue.pop()) {
        if bound >= objective {
            queue.push(Reverse((bound, level, at)));
            break;
        }
        let late = late();
        if late && best.is_some() {
            lower_bound = Some(bound);
            queue.push(Reverse((bound, level, at)));
            break;
        }
        let mut go_on = |entry| if late { dive = Some(Reverse(entry)) } else { queue.push(Reverse(entry)) };
        match level {
            Level::Floor => {
                let trend = bound::trend(problem, prices, &space[at], largest[&space[at].tp]);
                go_on((trend.max(bound), Level::Trend, at));
            }
            Level::Trend => match price(problem, prices, space[at], bound).first() {
                None => how[at] = Some(How::Impossible),
                Some(&(bound, _)) => go_on((bound, Level::Priced, at)),
            },
            Level::Priced => {
                solved += 1;
                how[at] = Some(How::Nothing(objective));
                // Made again: most menus are never asked for, and all together are large.
                for (bound, menus) in price(problem, prices, space[at], bound) {
                    if bound >= objective {
                        break;
                    }
                    let solved = best_below(problem, &menus, bound, objective);
                    if let Some(solution) = solved.best {
                        objective = solution.objective;
                        how[at] = Some(How::Best(objective));
                        best = Some(Found { menus, solution });
                    }
                    if solved.bound < objective {
                        // The exact pass gave up: an honest gap.
                        open.push((solved.bound.max(bound), at));
                    }
                }
            }
        }
    }
    for (bound, at) in open {
        if bound < objective {
            lower_bound = Some(lower_bound.map_or(bound, |b: u64| b.min(bound)));
            how[at] = Some(How::Open(bound));
        }
    }
    let proved = lower_bound.is_none();
    for Reverse((bound, level, at)) in queue {
        how[at] = Some(match level {
            _ if bound < objective => How::Open(bound),
            Level::Floor => How::Floor(bound),
            Level::Trend => How::Trend(bound),
            Level::Priced => How::Bound(bound),
        });
    }
    let lower_bound = lower_bound.unwrap_or(objective);
    let gap = if best.is_some() { (objective - lower_bound) as f64 / objective as f64 } else { 0.0 };
    let statistics = Statistics { space: space.len(), solved, lower_bound, gap, proved };
    let closed = space.into_iter().zip(how).map(|(tuple, how)| Closed { tuple, how: how.unwrap_or(How::Open(0)) }).collect();
    Outcome { best, closed, statistics }
}

/// The menus of a tuple with what no plan of theirs can beat, the most promising first; none if some layer cannot run in it.
fn price(problem: &Problem, prices: &mut dyn Prices, tuple: Tuple, least: u64) -> Priced {
    let all = Menus::new(problem, prices, tuple).map_or_else(Vec::new, |menus| menus.by_tie());
    let mut priced: Priced = all.into_iter().map(|m| (bound::priced(&m, &problem.layers).max(least), m)).collect();
    priced.sort_by_key(|(bound, _)| *bound);
    priced
}

/// The largest micro-batch of each degree of tensor parallelism.
pub fn largest<'a>(space: impl IntoIterator<Item = &'a Tuple>) -> BTreeMap<u64, u64> {
    let mut largest = BTreeMap::new();
    for tuple in space {
        let most = largest.entry(tuple.tp).or_insert(tuple.micro_batch);
        *most = tuple.micro_batch.max(*most);
    }
    largest
}

/// The best plan with these menus that is below `cut`.
fn best_below(problem: &Problem, menus: &Menus, bound: u64, cut: u64) -> Solved {
    let stages = Stages::new(menus, &problem.layers, problem.budget);
    if cut < NEVER {
        return stages.solve(cut);
    }
    // Without an incumbent everything is hopeful: the cut comes down from above in steps until it is met.
    let steps = (0..6).rev().map(|shift| bound.saturating_add((bound >> shift).max(1)).min(NEVER)).chain([bound.saturating_mul(8).min(NEVER)]);
    let found = steps.map(|cut| stages.solve(cut)).find(|s| s.best.is_some());
    found.unwrap_or_else(|| stages.solve(NEVER))
}
