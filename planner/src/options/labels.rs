//! The exact Pareto set of a layer's options: labels over its network.
//!
//! A label is a path from the source with its cost. One that another label at the same node covers is dropped: whatever comes after costs both the same.
//! Labels are also bounded: each coordinate of what is still to come has a least value, computed backwards over the network, and a label that some
//! complete path beats even with the least rest is dropped. Which complete paths are tried decides only how soon, never what is found.

use super::form::{Cost, Measure};
use super::net::Stage;

/// A complete path: for each step, which of the stage's outcomes.
pub(super) type Path = Vec<u32>;

/// Weights of (time, parameters, frame, both kinds of bytes) of the complete paths that serve as bounds, relative to the least that any path needs of each.
const SEEDS: [[f64; 4]; 6] =
    [[1.0, 1e-6, 1e-6, 1e-6], [1.0, 0.1, 1e-6, 1e-6], [1.0, 0.3, 1e-6, 0.1], [1.0, 1e-6, 0.3, 0.1], [1.0, 0.1, 0.1, 0.3], [0.01, 0.1, 1.0, 1.0]];

#[derive(Clone, Copy)]
struct Label {
    measure: Measure,
    parent: u32,
    outcome: u32,
}

/// Number of nodes behind the last step.
pub(super) fn sinks(stages: &[Stage]) -> usize {
    stages.last().map_or(1, |s| s.arcs.iter().map(|a| a.to as usize + 1).max().unwrap_or(0))
}

/// The undominated paths under one variant to each sink; of paths that measure the same, the first in the order of choices.
pub(super) fn pareto(stages: &[Stage], variant: usize, measure: impl Fn(&Cost) -> Measure) -> Vec<(u32, Measure, Path)> {
    let sinks = sinks(stages);
    let weights: Vec<Vec<Measure>> = stages.iter().map(|s| s.outcomes.iter().map(|o| measure(&o.costs[variant])).collect()).collect();
    let rest = least_rest(stages, &weights, sinks);
    // A path bounds only those that end where it does.
    let mut seeds = if sinks == 1 { seeds(stages, &weights, &rest) } else { Vec::new() };
    // Whether some seed beats what a label can at best become; the one that did is tried first next time.
    let mut beaten = |reaches: &Measure| match seeds.iter().position(|s| s.covers(reaches) && s != reaches) {
        Some(at) => {
            seeds[..=at].rotate_right(1);
            true
        }
        None => false,
    };
    let mut labels: Vec<Label> = vec![Label { measure: Measure::default(), parent: 0, outcome: 0 }];
    let mut at: Vec<std::ops::Range<usize>> = vec![0..1];
    for (step, stage) in stages.iter().enumerate() {
        let mut next: Vec<Vec<Label>> = vec![Vec::new(); rest[step + 1].len()];
        // The least of each coordinate at each node, to drop arcs as a whole.
        let least_here: Vec<Measure> = at.iter().map(|r| labels[r.clone()].iter().fold(Measure::MOST, |least, l| least.least(&l.measure))).collect();
        for arc in &stage.arcs {
            let from = at[arc.from as usize].clone();
            let onward = weights[step][arc.outcome as usize].plus(&rest[step + 1][arc.to as usize]);
            if from.is_empty() || from.len() > 1 && beaten(&least_here[arc.from as usize].plus(&onward)) {
                continue;
            }
            let more = &weights[step][arc.outcome as usize];
            for parent in from {
                let label = &labels[parent].measure;
                if !beaten(&label.plus(&onward)) {
                    next[arc.to as usize].push(Label { measure: label.plus(more), parent: parent as u32, outcome: arc.outcome });
                }
            }
        }
        at = next
            .into_iter()
            .map(|mut here| {
                // What covers comes before what it covers.
                here.sort_by_key(|a| a.measure);
                let first = labels.len();
                for label in here {
                    if !labels[first..].iter().any(|l| l.measure.covers(&label.measure)) {
                        labels.push(label);
                    }
                }
                first..labels.len()
            })
            .collect();
    }
    let mut found = Vec::new();
    for (sink, here) in at.iter().enumerate() {
        for last in here.clone() {
            let mut path = vec![0; stages.len()];
            let mut label = last;
            for step in path.iter_mut().rev() {
                *step = labels[label].outcome;
                label = labels[label].parent as usize;
            }
            found.push((sink as u32, labels[last].measure, path));
        }
    }
    found
}

/// For each node, the least that each coordinate adds on any way to a sink.
fn least_rest(stages: &[Stage], weights: &[Vec<Measure>], sinks: usize) -> Vec<Vec<Measure>> {
    let mut rest: Vec<Vec<Measure>> = stages.iter().map(|s| vec![Measure::MOST; s.nodes]).collect();
    rest.push(vec![Measure::default(); sinks]);
    for (step, stage) in stages.iter().enumerate().rev() {
        for arc in &stage.arcs {
            let through = weights[step][arc.outcome as usize].plus(&rest[step + 1][arc.to as usize]);
            let least = &mut rest[step][arc.from as usize];
            *least = least.least(&through);
        }
    }
    rest
}

/// Measures of the best complete paths under some weights.
fn seeds(stages: &[Stage], weights: &[Vec<Measure>], rest: &[Vec<Measure>]) -> Vec<Measure> {
    let scale = rest[0][0].0.map(|least| 1.0 / least.max(1) as f64);
    let mut found: Vec<Measure> = SEEDS
        .iter()
        .map(|[time, params, frame, bytes]| {
            let by = [*time, *params, 0.1 * time, *frame, *bytes];
            best(stages, weights, |m| m.0.iter().zip(&by).zip(&scale).map(|((&m, by), scale)| m as f64 * by * scale).sum())
        })
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// The measure of a complete path whose sum is least.
fn best(stages: &[Stage], weights: &[Vec<Measure>], weigh: impl Fn(&Measure) -> f64) -> Measure {
    let mut ways: Vec<Vec<(f64, u32)>> = Vec::with_capacity(stages.len());
    let mut after = vec![0.0; sinks(stages)];
    for (stage, weights) in stages.iter().zip(weights).rev() {
        let weights: Vec<f64> = weights.iter().map(&weigh).collect();
        let mut here = vec![(f64::INFINITY, 0); stage.nodes];
        for (at, arc) in stage.arcs.iter().enumerate() {
            let through = weights[arc.outcome as usize] + after[arc.to as usize];
            let way = &mut here[arc.from as usize];
            if through < way.0 {
                *way = (through, at as u32);
            }
        }
        after = here.iter().map(|w| w.0).collect();
        ways.push(here);
    }
    let (mut measure, mut node) = (Measure::default(), 0);
    for ((stage, weights), ways) in stages.iter().zip(weights).zip(ways.iter().rev()) {
        let arc = &stage.arcs[ways[node as usize].1 as usize];
        measure = measure.plus(&weights[arc.outcome as usize]);
        node = arc.to;
    }
    measure
}
