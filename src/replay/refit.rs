//! The executors' constants fitted again, and how well each source is predicted by a fit without it: a constant that
//! only its rows inform keeps the committed value there.
//!
//! The loss is the mean error of each source over the error aimed at, and what is above 0.97 of that counts again, threefold; the median over all rows
//! counts like a source, and so does the share of pairs in the wrong order. Steps are taken along one constant at a time, halved where none helps; the order
//! is fixed, so the same rows give the same constants.

use super::Row;
use super::score::pairs;
use dplan_planner::executor::{CONSTANTS, Constants};
use std::collections::BTreeMap;

/// Sources and the mean error aimed at; of others, an error of a half counts as one aim missed.
const AIMS: [(&str, f64); 7] = [
    ("megatron_recompute22", 0.03),
    ("megatron_sc21", 0.08),
    ("llmfoundry", 0.08),
    ("bloom_tr11", 0.08),
    ("bloom_final", 0.08),
    ("torchtitan", 0.08),
    ("simumax_b200", 0.08),
];

/// The median error aimed at over all rows.
const MEDIAN_AIM: f64 = 0.05;

/// The share of pairs in the wrong order aimed at.
const DISORDER_AIM: f64 = 0.05;

/// A row cannot count for more than this: a run that is not understood should not bend the others.
const MOST_ERROR: f64 = 0.5;

/// Rounds over all constants.
const ROUNDS: usize = 14;

#[derive(Clone, Debug, PartialEq)]
pub struct Refit {
    pub constants: Constants,
    /// Mean error of each source under constants fitted to all others.
    pub left_out: BTreeMap<String, f64>,
}

/// Fits the constants to the rows.
pub fn refit(rows: &[Row]) -> Refit {
    let mut sources: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
    for row in rows.iter().filter(|r| r.run.is_ok() && r.measured.seconds.is_some()) {
        sources.entry(&row.source).or_default().push(row);
    }
    let without = |left_out: Option<&str>| descend(&sources, left_out);
    let left_out = sources.iter().map(|(source, rows)| (source.to_string(), mean_error(rows, &without(Some(source)), f64::INFINITY))).collect();
    Refit { constants: without(None), left_out }
}

fn descend(sources: &BTreeMap<&str, Vec<&Row>>, left_out: Option<&str>) -> Constants {
    let penalty = |source: &str, error: f64| match AIMS.iter().find(|a| a.0 == source) {
        Some(&(_, aim)) => error / aim + 3.0 * (error / aim - 0.97).max(0.0),
        None => 2.0 * error,
    };
    let loss = |c: &Constants| -> f64 {
        let kept = sources.iter().filter(|(source, _)| Some(**source) != left_out);
        let by_source: f64 = kept.clone().map(|(source, rows)| penalty(source, mean_error(rows, c, MOST_ERROR))).sum();
        let runs: Vec<(&Row, f64)> =
            kept.flat_map(|(_, rows)| rows.iter().filter_map(|r| Some((*r, r.run.as_ref().ok()?.step(c).seconds())))).collect();
        let mut all: Vec<f64> = runs.iter().filter_map(|(row, predicted)| Some((predicted / row.measured.seconds? - 1.0).abs())).collect();
        all.sort_by(f64::total_cmp);
        let pairs = pairs(runs.into_iter());
        let disorder = (pairs.different - pairs.right) as f64 / pairs.different.max(1) as f64;
        by_source + all.get(all.len() / 2).map_or(0.0, |median| median / MEDIAN_AIM) + disorder / DISORDER_AIM
    };
    let mut constants = Constants::FITTED;
    let mut best = loss(&constants);
    let mut step = [0.1; CONSTANTS];
    for _ in 0..ROUNDS {
        for i in 0..CONSTANTS {
            let tried = [1.0, -1.0].map(|sign| {
                let mut next = constants;
                next.0[i] *= 1.0 + sign * step[i];
                (loss(&next), next)
            });
            match tried.into_iter().filter(|t| t.0 < best).min_by(|a, b| a.0.total_cmp(&b.0)) {
                Some((value, next)) => (best, constants) = (value, next),
                None => step[i] *= 0.5,
            }
        }
    }
    constants
}

fn mean_error(rows: &[&Row], constants: &Constants, most: f64) -> f64 {
    let errors: Vec<f64> = rows.iter().filter_map(|r| error(r, constants)).map(|e| e.min(most)).collect();
    errors.iter().sum::<f64>() / errors.len().max(1) as f64
}

fn error(row: &Row, constants: &Constants) -> Option<f64> {
    let predicted = row.run.as_ref().ok()?.step(constants).seconds();
    Some((predicted / row.measured.seconds? - 1.0).abs())
}
