//! How far predictions are from measurements: by source, and over pairs of layouts.

use super::{Priced, Row, Run};
use std::collections::BTreeMap;

/// Demand this near capacity is no verdict.
pub const BORDERLINE: f64 = 0.08;

/// Runs of one group whose throughput differs by more than this should be ranked right.
pub const DIFFERENT: f64 = 0.10;

/// Errors of one source, or of all rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    pub rows: usize,
    pub priced: usize,
    pub compared: usize,
    /// Mean of absolute errors, their median and largest, and the median error with its sign.
    pub mean: Option<f64>,
    pub median: Option<f64>,
    pub largest: Option<f64>,
    pub bias: Option<f64>,
    pub memory_rows: usize,
    pub memory_mean: Option<f64>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    pub sources: BTreeMap<String, Score>,
    pub all: Score,
    pub pairs: Pairs,
    /// Rows whose memory was priced and whose end is known: right, wrong, too near to say.
    pub fits_right: usize,
    pub fits_wrong: usize,
    pub fits_borderline: usize,
}

pub fn score(priced: &[Priced<'_>]) -> Scores {
    let mut by_source: BTreeMap<String, Vec<&Priced<'_>>> = BTreeMap::new();
    for p in priced {
        by_source.entry(p.row.source.clone()).or_default().push(p);
    }
    let sources = by_source.iter().map(|(source, rows)| (source.clone(), of(rows))).collect();
    let mut scores = Scores { sources, all: of(&priced.iter().collect::<Vec<_>>()), ..Scores::default() };
    scores.pairs = pairs(priced.iter().filter_map(|p| Some((p.row, p.seconds?))));
    for p in priced {
        let ended = p.row.measured.out_of_memory || p.row.measured.seconds.is_some();
        match (p.fits, p.margin()) {
            (Some(_), Some(margin)) if ended && margin.abs() <= BORDERLINE => scores.fits_borderline += 1,
            (Some(fits), Some(_)) if ended && fits != p.row.measured.out_of_memory => scores.fits_right += 1,
            (Some(_), Some(_)) if ended => scores.fits_wrong += 1,
            _ => {}
        }
    }
    scores
}

fn of(rows: &[&Priced<'_>]) -> Score {
    let errors: Vec<f64> = rows.iter().filter_map(|p| p.error()).collect();
    let memory: Vec<f64> = rows.iter().filter_map(|p| p.memory_error()).map(f64::abs).collect();
    let absolute: Vec<f64> = errors.iter().map(|e| e.abs()).collect();
    Score {
        rows: rows.len(),
        priced: rows.iter().filter(|p| p.seconds.is_some()).count(),
        compared: errors.len(),
        mean: mean(&absolute),
        median: median(&absolute),
        largest: absolute.iter().copied().reduce(f64::max),
        bias: median(&errors),
        memory_rows: memory.len(),
        memory_mean: mean(&memory),
    }
}

/// Pairs of layouts of one group whose measured throughput differs by more than [`DIFFERENT`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pairs {
    pub different: usize,
    /// Those of them that are predicted in the right order.
    pub right: usize,
    /// One layout measured twice, this far apart: nothing to rank, and how far measurements themselves can be trusted.
    pub repeated: usize,
    /// Pairs of which one's time is doubted by its own source, and those of them that are predicted in its order.
    pub doubted: usize,
    pub doubted_right: usize,
}

/// Of runs and their predicted seconds.
pub(super) fn pairs<'a>(runs: impl Iterator<Item = (&'a Row, f64)>) -> Pairs {
    struct Rates<'a> {
        run: &'a Run,
        predicted: f64,
        measured: f64,
        doubted: bool,
    }
    let mut groups: BTreeMap<&str, Vec<Rates<'_>>> = BTreeMap::new();
    for (row, predicted) in runs {
        if let (Ok(run), Some(measured)) = (&row.run, row.measured.seconds) {
            let doubted = row.measured.doubted;
            groups.entry(&row.group).or_default().push(Rates {
                run,
                predicted: run.tokens() / predicted,
                measured: run.tokens() / measured,
                doubted,
            });
        }
    }
    let mut pairs = Pairs::default();
    for runs in groups.values() {
        for (i, a) in runs.iter().enumerate() {
            for b in &runs[i + 1..] {
                if (a.measured / b.measured).max(b.measured / a.measured) <= 1.0 + DIFFERENT {
                    continue;
                }
                if a.run.is_laid_out_as(b.run) {
                    pairs.repeated += 1;
                    continue;
                }
                let right = usize::from(a.predicted.total_cmp(&b.predicted) == a.measured.total_cmp(&b.measured));
                let (all, ordered) =
                    if a.doubted || b.doubted { (&mut pairs.doubted, &mut pairs.doubted_right) } else { (&mut pairs.different, &mut pairs.right) };
                *all += 1;
                *ordered += right;
            }
        }
    }
    pairs
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

fn median(values: &[f64]) -> Option<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
