//! The search over all tuples, best bound first. It stops when the next bound reaches the incumbent, and that stop is the proof: every plan that could be better
//! was evaluated, on the same objective.
//!
//! A tuple is bounded step by step, each bound dearer and closer than the one before ([`Level`]): without pricing its layers, by its menus, and by the linear relaxation of its stages,
//! whose rounding is a plan that lowers the incumbent. Exact searches come last, below values between the bound and the incumbent if they have to ([`Attempt`]): where such a
//! search finds nothing, that value is the tuple's next bound. Pipelines that run all forward passes
//! first (`gpipe`) cost the same as their one-forward-one-backward twin under the objective and need no less memory, so they are closed with it.
//!
//! Tuples of a *family* ([`Tuple::family`]) are bounded together as long as they can be: those that differ in how keys travel until more than whole sequences is looked at, those
//! that differ in how gradients get to their sum until a bound by menus, in which each layer is summed as is least for each quantity, no longer closes them all. Only then each has
//! bounds of its own. What closes several closes each of them, for no bound of several is above that of one.

use crate::bound::{self, Lives};
use crate::expansion::Effort;
use crate::menu::Menus;
use crate::prices::{Prices, Reference};
use crate::problem::Problem;
use crate::space::{Tuple, least_common_multiple, tuples};
use crate::stages::{Solution, Stages};
use dplan_ir::plan::Schedule;
use dplan_ir::sync::Sync;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::ops::Range;

/// Larger than any objective, small enough to add to.
pub const NEVER: u64 = u64::MAX / 4;

/// Labels that are followed at once where no exact search came to an end.
const LAST_AT_ONCE: usize = 4000;

/// How a tuple was closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    /// No plan of it is below this, found without pricing its layers.
    Floor(u64),
    /// No plan of it is below this, found by sketching its layers, for its own micro-batch or for so many sequences that every one of its tensor parallelism divides them.
    Trend(u64),
    /// No plan of it is below this.
    Bound(u64),
    /// Solved, exactly or by a relaxation that was enough: nothing below the incumbent of that moment, which was this.
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
    /// Tuples whose stages were solved, exactly or by a relaxation that was enough.
    pub solved: usize,
    /// No plan of the space is below this, nanoseconds.
    pub lower_bound: u64,
    /// (objective − lower bound) / objective.
    pub gap: f64,
    pub proved: bool,
}

impl Statistics {
    /// The same of another plan of the space, found without a proof.
    pub fn of_plan(self, objective: u64) -> Statistics {
        let gap = objective.saturating_sub(self.lower_bound) as f64 / objective.max(1) as f64;
        Statistics { gap, proved: false, ..self }
    }
    /// The same if plans outside the space may be as quick as `beyond`.
    pub fn above(self, beyond: u64, objective: u64) -> Statistics {
        let lower_bound = self.lower_bound.min(beyond);
        let gap = objective.saturating_sub(lower_bound) as f64 / objective.max(1) as f64;
        Statistics { lower_bound, gap, proved: self.proved && lower_bound >= objective, ..self }
    }
}

/// A plan in terms of menus.
#[derive(Clone, Debug)]
pub struct Found {
    pub menus: Menus,
    pub solution: Solution,
}

impl Found {
    /// For each layer, its row of the menus, and which choice of it.
    pub fn choices(&self, layers: &[usize]) -> Vec<(usize, u32)> {
        let pipeline = self.menus.tuple.pipeline();
        let spans = self.solution.stages.iter().zip(0..).flat_map(|(&(first, last), c)| (first..=last).map(move |_| c));
        let row = |(virtual_stage, &kind): (u64, &usize)| self.menus.row(pipeline.stage_of(virtual_stage) as usize, kind);
        spans.zip(layers).map(row).zip(self.solution.choices.iter().copied()).collect()
    }
}

#[derive(Clone, Debug)]
pub struct Outcome {
    pub best: Option<Found>,
    pub closed: Vec<Closed>,
    pub statistics: Statistics,
}

/// Menus of a tuple, one for each way of the tied parameter, with their bounds.
type Priced = Vec<(u64, Menus)>;

/// Tuples of one family that are looked at together: so many, from a place in the space on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Span {
    at: usize,
    count: usize,
}

impl Span {
    fn places(self) -> Range<usize> {
        self.at..self.at + self.count
    }
}

/// What no plan of some tuples is below, by what that is known, and which.
type Entry = (u64, Level, Span);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    /// By one rank's least times alone.
    Quick,
    /// By one rank's sketch, where layers have to fit.
    Rank,
    /// By the sketch of whole sequences.
    Whole,
    /// By the sketch of more sequences.
    Same,
    /// By its own sketch.
    Own,
    /// By menus of several, of which it is one.
    Apart,
    /// By its menus.
    Priced,
    /// By the relaxation of its stages, and by exact searches so far.
    Solved(Attempt),
}

/// What the next exact search of a tuple tries: all that is below some part, a power of a half, of the way from its bound to the incumbent. Where labels run out it
/// takes a shorter step with more of them; near the bound few plans are hopeful. If even that fails, the most promising of all that is below the incumbent are followed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
struct Attempt {
    shift: u32,
    /// How often labels ran out.
    failed: u32,
}

impl Attempt {
    const MOST_FAILED: u32 = 4;

    fn effort(self, late: &dyn Fn() -> bool) -> Effort<'_> {
        Effort { labels: 10_000 << (3 * self.failed), at_once: 50_000, late }
    }
    fn cut(self, bound: u64, objective: u64) -> u64 {
        bound + (objective.saturating_sub(bound) >> self.shift).max(1)
    }
    fn after_success(self) -> Attempt {
        Attempt { shift: self.shift.saturating_sub(1), ..self }
    }
    /// Nothing if it is time to give up.
    fn after_failure(self) -> Option<Attempt> {
        (self.failed < Attempt::MOST_FAILED).then_some(Attempt { shift: self.shift + 2, failed: self.failed + 1 })
    }
}

/// Finds the best plan of all tuples that the pins allow. `late` says that time is up.
pub fn explore(problem: &Problem, prices: &mut dyn Prices, late: &dyn Fn() -> bool) -> Outcome {
    explore_below(problem, prices, NEVER, late)
}

/// The same of plans below `cut` alone.
pub fn explore_below(problem: &Problem, prices: &mut dyn Prices, cut: u64, late: &dyn Fn() -> bool) -> Outcome {
    let space = tuples(prices, problem.devices, problem.batch, &problem.pins);
    let mut how: Vec<Option<How>> = vec![None; space.len()];
    let mut queue: BinaryHeap<Reverse<Entry>> = BinaryHeap::new();
    // One rank knows neither boundary nor padding.
    let one = |tuple: &Tuple| Tuple { boundary: None, padding: 0, ..*tuple };
    let mut floors: BTreeMap<Tuple, u64> = BTreeMap::new();
    for family in parts(&space, Span { at: 0, count: space.len() }, Tuple::family) {
        let tuple = &space[family.at];
        let twin = Tuple { schedule: Schedule::OneFOneB, ..*tuple };
        match space.binary_search(&twin) {
            Ok(twin) if tuple.schedule == Schedule::GPipe => family.places().zip(twin..).for_each(|(at, twin)| how[at] = Some(How::Twin(twin))),
            _ if bound::is_crowded(problem, prices, tuple) => how[family.places()].fill(Some(How::Crowded)),
            _ => {
                let floor = *floors.entry(one(tuple)).or_insert_with_key(|one| bound::floor(problem, prices, one));
                queue.push(Reverse((floor, Level::Quick, family)));
            }
        }
    }
    let trend_batches = trend_batches(space.iter().zip(&how).filter(|(_, how)| !matches!(how, Some(How::Crowded))).map(|(tuple, _)| tuple));
    // With the tuple it is of.
    let mut best: Option<(usize, Found)> = None;
    let mut objective = cut;
    let mut lower_bound = None;
    let mut open: Vec<(u64, usize)> = Vec::new();
    let (mut by_rank, mut lives) = (BTreeMap::new(), Lives::default());
    // Out of time without a plan, tuples are followed to their ends one by one: an answer needs some plan.
    let mut dive: Option<Reverse<Entry>> = None;
    loop {
        // A dive ends with a plan, or where there is none.
        queue.extend(dive.take_if(|Reverse((bound, ..))| best.is_some() || *bound >= objective));
        let Some(Reverse((bound, level, span))) = dive.take().or_else(|| queue.pop()) else { break };
        let is_late = late();
        // Out of time, any plan will do, and none is asked for below a cut.
        if bound >= objective || is_late && objective < NEVER {
            lower_bound = (bound < objective).then_some(bound);
            queue.push(Reverse((bound, level, span)));
            break;
        }
        // What is next known of them differs: each part is followed by itself, in a dive one after the other.
        let apart = match level {
            Level::Whole => parts(&space, span, |t| Tuple { sync: Sync::Flat, ..*t }),
            Level::Priced => parts(&space, span, |t| *t),
            Level::Quick | Level::Rank | Level::Same | Level::Own | Level::Apart | Level::Solved(_) => vec![span],
        };
        if apart.len() > 1 {
            let level = if level == Level::Priced { Level::Apart } else { level };
            let mut entries = apart.into_iter().map(|part| Reverse((bound, level, part)));
            dive = if is_late { entries.next() } else { None };
            queue.extend(entries);
            continue;
        }
        let (at, members) = (span.at, &space[span.places()]);
        let mut go_on = |entry| if is_late { dive = Some(Reverse(entry)) } else { queue.push(Reverse(entry)) };
        match level {
            Level::Quick => {
                let members: Vec<Tuple> = members.iter().map(one).collect();
                let known = by_rank.entry((members[0], span.count));
                let fitting = *known.or_insert_with(|| bound::fitting(problem, prices, &mut lives, &members, Reference::Rank));
                go_on((fitting.max(bound), Level::Rank, span));
            }
            Level::Rank | Level::Whole | Level::Same => {
                let sequences = trend_batches[&space[at].tp];
                let (from, next) = match level {
                    Level::Rank => (Reference::Whole { sequences }, Level::Whole),
                    Level::Whole => (Reference::Same { sequences }, Level::Same),
                    _ => (Reference::own(&space[at]), Level::Own),
                };
                go_on((bound::fitting(problem, prices, &mut lives, members, from).max(bound), next, span));
            }
            Level::Apart => match bound::fitting(problem, prices, &mut lives, members, Reference::own(&space[at])) {
                trend if trend >= objective => how[at] = Some(How::Trend(trend)),
                _ => match price(problem, prices, members, bound).first() {
                    None => how[at] = Some(How::Impossible),
                    Some(&(bound, _)) => go_on((bound, Level::Priced, span)),
                },
            },
            Level::Own => match price(problem, prices, members, bound).first() {
                None => how[span.places()].fill(Some(How::Impossible)),
                Some(&(bound, _)) => go_on((bound, Level::Priced, span)),
            },
            Level::Priced => {
                // Menus are made again: most are never asked for, and all together are large.
                let mut least = NEVER;
                for (priced, menus) in price(problem, prices, members, bound) {
                    // A plan is expected near its bound; what lies further up can wait for an incumbent.
                    let near = objective.min(priced.saturating_mul(2));
                    let rounded = Stages::new(&menus, &problem.layers, problem.budget).rounded(near);
                    least = least.min(rounded.bound.max(priced));
                    if let Some(solution) = rounded.best {
                        objective = solution.objective;
                        best = Some((at, Found { menus, solution }));
                    }
                }
                go_on((least, Level::Solved(Attempt::default()), span));
            }
            Level::Solved(attempt) => {
                let (mut least, mut complete) = (NEVER, true);
                for (priced, menus) in price(problem, prices, members, 0) {
                    if priced >= objective {
                        break;
                    }
                    let stages = Stages::new(&menus, &problem.layers, problem.budget);
                    let found = if attempt == Attempt::default() { nearly_best(&stages, bound, objective) } else { None };
                    objective = found.as_ref().map_or(objective, |solution| solution.objective);
                    let below = stages.solve(attempt.cut(bound, objective), &mut attempt.effort(late));
                    least = least.min(below.bound);
                    complete &= below.complete;
                    objective = below.best.as_ref().map_or(objective, |solution| solution.objective);
                    if let Some(solution) = below.best.or(found) {
                        best = Some((at, Found { menus, solution }));
                    }
                }
                least = least.max(bound);
                let next = if complete { Some(attempt.after_success()) } else { attempt.after_failure() };
                match next {
                    Some(next) if least < objective => go_on((least, Level::Solved(next), span)),
                    Some(_) => how[at] = Some(How::Nothing(objective)),
                    None => {
                        // An honest gap.
                        for (priced, menus) in price(problem, prices, members, 0) {
                            if priced >= objective {
                                break;
                            }
                            let mut effort = Effort { labels: usize::MAX, at_once: LAST_AT_ONCE, late };
                            if let Some(solution) = Stages::new(&menus, &problem.layers, problem.budget).solve(objective, &mut effort).best {
                                objective = solution.objective;
                                best = Some((at, Found { menus, solution }));
                            }
                        }
                        open.push((least, at));
                    }
                }
            }
        }
    }
    for (bound, at) in open {
        how[at] = Some(if bound < objective { How::Open(bound) } else { How::Nothing(objective) });
        if bound < objective {
            lower_bound = Some(lower_bound.map_or(bound, |b: u64| b.min(bound)));
        }
    }
    let proved = lower_bound.is_none();
    for Reverse((bound, level, span)) in queue {
        how[span.places()].fill(Some(match level {
            _ if bound < objective => How::Open(bound),
            Level::Quick | Level::Rank => How::Floor(bound),
            Level::Whole | Level::Same | Level::Own => How::Trend(bound),
            Level::Apart | Level::Priced => How::Bound(bound),
            Level::Solved(_) => How::Nothing(objective),
        }));
    }
    if let Some((at, _)) = best
        && matches!(how[at], Some(How::Nothing(_)))
    {
        how[at] = Some(How::Best(objective));
    }
    let lower_bound = lower_bound.unwrap_or(objective);
    let gap = if best.is_some() { (objective - lower_bound) as f64 / objective as f64 } else { 0.0 };
    let solved = how.iter().filter(|how| matches!(how, Some(How::Best(_) | How::Nothing(_)))).count();
    let statistics = Statistics { space: space.len(), solved, lower_bound, gap, proved };
    let closed = space.into_iter().zip(how).map(|(tuple, how)| Closed { tuple, how: how.unwrap_or(How::Open(0)) }).collect();
    Outcome { best: best.map(|(_, found)| found), closed, statistics }
}

/// The parts of a span that are alike in this.
fn parts(space: &[Tuple], span: Span, alike: impl Fn(&Tuple) -> Tuple) -> Vec<Span> {
    let mut at = span.at;
    let part = |part: &[Tuple]| {
        at += part.len();
        Span { at: at - part.len(), count: part.len() }
    };
    space[span.places()].chunk_by(|a, b| alike(a) == alike(b)).map(part).collect()
}

/// The menus of a tuple, or what bounds those of several, with what no plan of theirs can beat, the most promising first; none if some layer cannot run in it.
fn price(problem: &Problem, prices: &mut dyn Prices, members: &[Tuple], least: u64) -> Priced {
    let all = Menus::least(problem, prices, members).map_or_else(Vec::new, |menus| menus.by_tie());
    let mut priced: Priced = all.into_iter().map(|m| (bound::priced(&m, &problem.layers).max(least), m)).collect();
    priced.sort_by_key(|(bound, _)| *bound);
    priced
}

/// For each degree of tensor parallelism, the least number of sequences that all its micro-batches divide.
pub fn trend_batches<'a>(space: impl IntoIterator<Item = &'a Tuple>) -> BTreeMap<u64, u64> {
    let mut batches = BTreeMap::new();
    for tuple in space {
        let all = batches.entry(tuple.tp).or_insert(1);
        *all = least_common_multiple(*all, tuple.micro_batch);
    }
    batches
}

/// A plan below the incumbent that relaxation and rounding find. Without an incumbent any plan that fits is better than none.
fn nearly_best(stages: &Stages<'_>, bound: u64, objective: u64) -> Option<Solution> {
    if objective < NEVER {
        return stages.rounded(objective).best;
    }
    let mut cuts = (1..4).map(|shift| bound.saturating_mul(1 << shift).min(NEVER)).chain([NEVER]);
    cuts.find_map(|cut| stages.rounded(cut).best)
}
