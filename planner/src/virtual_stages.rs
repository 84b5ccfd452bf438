//! All stages of one tuple with several virtual stages on each stage, exactly, over the *even cuts*.
//!
//! Memory is a stage's, and its layers are not next to each other, so cuts and choices do not part into a program over layers in order, as they do with one virtual stage
//! ([`crate::stages`]). The space is therefore smaller: the first and the last virtual stage, with the embedding and the head, hold any number of layers, and those
//! between share the rest evenly, sizes differing by one layer at most:
//!
//! ```text
//! the i-th of n between has ⌊(i + 1) · r / n⌋ − ⌊i · r / n⌋ of r layers
//! ```
//! Inside a cut each stage is a bag of layers as ever, and its choices are exact. Which layers of a stage make which choice does not matter to bag or objective; they are
//! spread over the stage's virtual stages, which keeps these balanced.
//!
//! Cuts are bounded by least shares, then by the relaxation of every stage; those that remain are solved best first: Pareto sets of all stages, combined stage by stage.

use crate::expansion::Effort;
use crate::objective::{StageTime, total};
use crate::outlook::Outlook;
use crate::stage::{Group, Point, Relaxed};
use crate::stages::{Solution, Solved, Stages, bag};
use std::collections::HashMap;
use std::rc::Rc;

/// First layers of the virtual stages, and the end.
type Cut = Vec<usize>;

/// Every even cut of so many layers into so many virtual stages, of which there are at least four.
pub fn even_cuts(layers: usize, parts: usize) -> impl Iterator<Item = Vec<usize>> {
    let between = parts - 2;
    let most = layers.saturating_sub(between);
    let ends = (1..most).flat_map(move |first| (1..=most - first).map(move |last| (first, last)));
    ends.map(move |(first, last)| {
        let rest = layers - first - last;
        let inner = (0..=between).map(|i| first + i * rest / between);
        std::iter::once(0).chain(inner).chain([layers]).collect()
    })
}

/// A cut that may be part of a wanted plan.
struct Candidate {
    cut: Cut,
    bags: Vec<Rc<[Group]>>,
    borders: Vec<StageTime>,
    relaxed: Vec<Relaxed>,
    bound: u64,
}

/// A plan of the stages so far. Schedules with several virtual stages count the slowest once, as they do every other.
struct Label {
    sum: u64,
    end: u64,
    from: usize,
    point: Point,
}

/// For a plan that need not be the best. Time is not looked at: an answer needs some plan.
pub(crate) fn little() -> Effort<'static> {
    Effort { labels: 100_000, at_once: 50_000, late: &|| false }
}

/// The best plan below `cut`, if there is one, and the effort is enough.
pub(crate) fn solve(stages: &Stages<'_>, cut: u64, effort: &mut Effort<'_>) -> Solved {
    let mut best: Option<Solution> = None;
    let mut below = cut;
    // Cuts whose fronts were not complete, by what none of their plans is below.
    let mut open = u64::MAX;
    for candidate in candidates(stages, cut) {
        if candidate.bound >= below {
            break;
        }
        let (found, complete) = combine(stages, &candidate, below, effort);
        if !complete {
            open = open.min(candidate.bound);
        }
        if let Some(solution) = found {
            below = solution.objective;
            best = Some(solution);
        }
    }
    Solved { best, bound: open.min(below), complete: open >= below }
}

/// The least number of bytes by which every plan misses the budget, and the stage that misses it by so many; nothing if that is `bound` or more.
pub(crate) fn shortage(stages: &Stages<'_>, bound: u64) -> Option<(u64, usize)> {
    let mut best: Option<(u64, usize)> = None;
    for cut in cuts(stages) {
        let bags = bags(stages, &cut);
        let excess = |stage: usize| match stages.menus.room(stages.budget, stage as u64) {
            Some(room) => stages.least_arena(&bags[stage]).saturating_sub(room),
            None => u64::MAX,
        };
        let worst = (0..bags.len()).map(|s| (excess(s), s)).rev().max_by_key(|w| w.0)?;
        if worst.0 < best.map_or(bound, |b| b.0) {
            best = Some(worst);
        }
    }
    best
}

fn cuts(stages: &Stages<'_>) -> impl Iterator<Item = Cut> + use<> {
    even_cuts(stages.layers.len(), stages.menus.tuple.pipeline().all_virtual() as usize)
}

/// The ranges of layers of each stage.
fn ranges(stages: &Stages<'_>, cut: &Cut) -> Vec<Vec<(usize, usize)>> {
    let pipeline = stages.menus.tuple.pipeline();
    let of = |stage: u64| pipeline.virtual_stages_of(stage).map(|c| (cut[c as usize], cut[c as usize + 1])).collect();
    (0..pipeline.stages).map(of).collect()
}

fn bags(stages: &Stages<'_>, cut: &Cut) -> Vec<Rc<[Group]>> {
    let of = |(stage, (ranges, slots)): (usize, (Vec<(usize, usize)>, &Vec<_>))| {
        let layers = ranges.iter().zip(slots).flat_map(|(&(start, end), &slots)| (start..end).map(move |layer| (layer, slots)));
        bag(layers.map(|(layer, slots)| (stages.menus.row(stage, stages.layers[layer]), stages.home(layer, &ranges), slots))).into()
    };
    ranges(stages, cut).into_iter().zip(&stages.menus.slots).enumerate().map(of).collect()
}

/// The messages of each stage.
fn borders(stages: &Stages<'_>, cut: &Cut) -> Vec<StageTime> {
    let pipeline = stages.menus.tuple.pipeline();
    let of = |stage: u64| pipeline.virtual_stages_of(stage).map(|c| stages.menus.border(c, cut[c as usize + 1] - 1)).sum();
    (0..pipeline.stages).map(of).collect()
}

/// Cuts that may hold a plan below `below`, those with the least bound first.
fn candidates(stages: &Stages<'_>, below: u64) -> Vec<Candidate> {
    let pipeline = stages.menus.tuple.pipeline();
    let objective = |of: &[StageTime]| total(of, &pipeline, stages.menus.constant);
    let mut found: Vec<Candidate> = Vec::new();
    for cut in cuts(stages) {
        let borders = borders(stages, &cut);
        let least = |c: u64| stages.before[cut[c as usize + 1]] - stages.before[cut[c as usize]];
        let at_least: Vec<StageTime> =
            (0..pipeline.stages).zip(&borders).map(|(s, &border)| pipeline.virtual_stages_of(s).map(least).sum::<StageTime>() + border).collect();
        if objective(&at_least) >= below {
            continue;
        }
        let bags = bags(stages, &cut);
        let relax = |(stage, border): (usize, &StageTime)| Some(stages.with_border(stages.relax(stage, &bags[stage])?, *border));
        let Some(relaxed) = borders.iter().enumerate().map(relax).collect::<Option<Vec<_>>>() else { continue };
        let bound = (0..relaxed.len()).map(|s| outlook(stages, &relaxed, s, below).bound(relaxed[s].time, relaxed[s].end, relaxed[s].joint)).max();
        let bound = bound.unwrap_or(0);
        if bound < below {
            found.push(Candidate { cut, bags, borders, relaxed, bound });
        }
    }
    // Equal bounds stay in the order of cuts.
    found.sort_by_key(|c| c.bound);
    found
}

/// What is known of the other stages while one is solved.
fn outlook(stages: &Stages<'_>, relaxed: &[Relaxed], stage: usize, cut: u64) -> Outlook {
    let others = || relaxed.iter().enumerate().filter(|(s, _)| *s != stage).map(|(_, r)| r);
    Outlook {
        cut,
        repeats: stages.repeats,
        others: others().map(|r| r.time).sum(),
        slowest: others().map(|r| r.time).max().unwrap_or(0),
        end: others().map(|r| r.end).max().unwrap_or(0),
        constant: stages.menus.constant,
    }
}

/// The best plan of a cut below `below`, and whether none was left out.
fn combine(stages: &Stages<'_>, candidate: &Candidate, below: u64, effort: &mut Effort<'_>) -> (Option<Solution>, bool) {
    let count = candidate.bags.len();
    let constant = stages.menus.constant;
    let mut complete = true;
    let mut done: Vec<Vec<Label>> = Vec::with_capacity(count);
    let mut known: HashMap<(Rc<[Group]>, u64, StageTime, Outlook), Rc<[Point]>> = HashMap::new();
    for stage in 0..count {
        let (room, border) = (stages.rooms[stage], candidate.borders[stage]);
        let outlook = outlook(stages, &candidate.relaxed, stage, below);
        let points = known.entry((Rc::clone(&candidate.bags[stage]), room, border, outlook)).or_insert_with(|| {
            let front = stages.store.front(&candidate.bags[stage], room, border, &outlook, effort);
            complete &= front.complete;
            front.points.into()
        });
        let rest = candidate.relaxed[stage + 1..].iter();
        let (left, end_left) = rest.fold((0, 0), |(sum, end), r| (sum + r.time, r.end.max(end)));
        let befores = done.last().map_or(vec![(0, 0)], |labels| labels.iter().map(|l| (l.sum, l.end)).collect());
        let mut next: Vec<Label> = Vec::new();
        for (from, &(sum, end)) in befores.iter().enumerate() {
            for point in points.iter() {
                let (sum, end) = (sum + point.time, end.max(point.end));
                if sum + left + end.max(end_left) + constant < below {
                    next.push(Label { sum, end, from, point: point.clone() });
                }
            }
        }
        undominated(&mut next);
        done.push(next);
    }
    let last = &done[count - 1];
    let best = (0..last.len()).min_by_key(|&i| last[i].sum + last[i].end);
    (best.map(|at| trace(stages, candidate, &done, at)), complete)
}

/// Drops labels that another is at least as good as; of equal ones the first stays.
fn undominated(labels: &mut Vec<Label>) {
    labels.sort_by_key(|l| (l.sum, l.end));
    let mut least = u64::MAX;
    labels.retain(|l| {
        let better = l.end < least;
        least = least.min(l.end);
        better
    });
}

/// The plan that ends in a label of the last stage.
fn trace(stages: &Stages<'_>, candidate: &Candidate, done: &[Vec<Label>], mut at: usize) -> Solution {
    let ranges = ranges(stages, &candidate.cut);
    let mut choices = vec![0; stages.layers.len()];
    let mut times = Vec::new();
    for (stage, labels) in done.iter().enumerate().rev() {
        let label = &labels[at];
        for (group, of) in candidate.bags[stage].iter().enumerate() {
            let mut chosen: Vec<(u32, usize)> = label.point.counts.iter().filter(|c| c.0 == group).map(|c| (c.1, c.2)).collect();
            chosen.sort_unstable();
            // Members in turn of the virtual stages: the first layers of each, then the second of each.
            let with_slots = ranges[stage].iter().zip(&stages.menus.slots[stage]).enumerate().filter(|(_, (_, slots))| **slots == of.slots);
            let layers = with_slots.flat_map(|(nth, (&(start, end), _))| (start..end).map(move |layer| (layer - start, nth, layer)));
            let mut members: Vec<(usize, usize, usize)> =
                layers.filter(|&(.., l)| stages.menus.row(stage, stages.layers[l]) == of.row && stages.home(l, &ranges[stage]) == of.home).collect();
            members.sort_unstable();
            let of_group = chosen.into_iter().flat_map(|(choice, count)| std::iter::repeat_n(choice, count));
            members.into_iter().zip(of_group).for_each(|((.., layer), choice)| choices[layer] = choice);
        }
        times.push(StageTime { time: label.point.time, end: label.point.end });
        at = label.from;
    }
    let objective = total(&times, &stages.menus.tuple.pipeline(), stages.menus.constant);
    let stages = candidate.cut.windows(2).map(|w| (w[0], w[1] - 1)).collect();
    Solution { objective, stages, choices }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_cuts_are_all_of_their_kind_and_no_other() {
        for (layers, parts) in [(4, 4), (7, 4), (9, 6), (12, 8), (3, 4)] {
            let cuts: Vec<Cut> = even_cuts(layers, parts).collect();
            for cut in &cuts {
                assert_eq!((cut.len(), cut[0], cut[parts]), (parts + 1, 0, layers));
                let sizes: Vec<usize> = cut.windows(2).map(|w| w[1] - w[0]).collect();
                let between = &sizes[1..parts - 1];
                assert!(sizes.iter().all(|&n| n > 0) && between.iter().max().unwrap() - between.iter().min().unwrap() <= 1, "{sizes:?}");
            }
            let free = (layers + 2).saturating_sub(parts);
            assert_eq!(cuts.len(), free * free.saturating_sub(1) / 2, "{layers} layers in {parts}");
        }
    }
}
