//! The pipeline, event by event: the second number beside the objective.
//!
//! Each stage runs its passes in the fixed order of its schedule ([`dplan_ir::pipeline`]), a pass as soon as the one before it on its stage is done and its message has come.
//! Messages of one direction from a stage go one after the other, beside compute. When its last pass is done, a stage ends its step.
//!
//! **Bounds.** With forward `f`, backward `b`, weight half `w` and message `x` of virtual stages, `t = f + b + 2x` and `W_s` the sum of `f + b + w` on stage `s`, the
//! makespan is at least `max_s (Σ_{i<s} t_i + m · W_s)` for whole backward passes and `max_s (Σ_{i<s} (f_i + x_i) + m · W_s)` for parted ones, `i` over the first virtual
//! stages. The longest path grows with every time, so it is at most that of balanced virtual stages with the greatest `F = f + x`, `B = b + x` and `W = w`:
//!
//! ```text
//! gpipe, 1f1b    Σ_s t_s + (m − 1) · (F + B)       and for 1f1b with one ratio of passes Σ_s t_s + (m − 1) · max t
//! interleaved    (v · m + p − 1) · (F + B)
//! zb-h1          m · (F + B + W) + (p − 1) · max(F + B − W, F, B)
//! zb-v           2m · (F + B + W) + (p − 1) · max(F, B, 2 (B − W))       where F ≤ B and W ≤ B
//! ```

use dplan_ir::pipeline::{Pass, Pipeline, Turn};

/// Nanoseconds of one virtual stage.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StageWork {
    pub forward: u64,
    /// All of the backward pass, or its input half.
    pub backward: u64,
    pub weight: u64,
    /// One message to or from the next virtual stage.
    pub message: u64,
}

/// When a pass ran.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    pub virtual_stage: u64,
    pub turn: Turn,
    pub start: u64,
    pub end: u64,
}

/// When each pass runs, in order of stages and within a stage of passes. `works` are the virtual stages, in order.
pub fn spans(works: &[StageWork], pipeline: &Pipeline) -> Vec<Vec<Span>> {
    let (p, all, m) = (pipeline.stages as usize, works.len(), pipeline.micro_batches as usize);
    let turns: Vec<Vec<Turn>> = (0..pipeline.stages).map(|s| pipeline.turns(s)).collect();
    let own: Vec<Vec<u64>> = (0..pipeline.stages).map(|s| pipeline.virtual_stages_of(s).collect()).collect();
    let mut spans: Vec<Vec<Span>> = turns.iter().map(|o| Vec::with_capacity(o.len())).collect();
    // When the message that a pass waits for has come; the first virtual stage's inputs and the last one's cotangents are there.
    let mut arrived_forward = vec![vec![None; m]; all];
    let mut arrived_backward = vec![vec![None; m]; all];
    if let Some(first) = arrived_forward.first_mut() {
        first.fill(Some(0));
    }
    if let Some(last) = arrived_backward.last_mut() {
        last.fill(Some(0));
    }
    let (mut free, mut link_forward, mut link_backward) = (vec![0; p], vec![0; p], vec![0; p]);
    // A message over a border, from the moment it is made.
    let sent = |link: &mut u64, made: u64, message: u64, elsewhere: bool| {
        if !elsewhere {
            return Some(made);
        }
        *link = made.max(*link) + message;
        Some(*link)
    };
    let mut moved = true;
    while moved {
        moved = false;
        // Down and up again, so that a wave passes all stages at once.
        for s in (0..p).chain((0..p).rev()) {
            while let Some(&turn) = turns[s].get(spans[s].len()) {
                let (virtual_stage, i) = (own[s][turn.nth as usize], turn.micro_batch as usize);
                let c = virtual_stage as usize;
                let (arrival, length) = match turn.pass {
                    Pass::Forward => (arrived_forward[c][i], works[c].forward),
                    Pass::Backward | Pass::Input => (arrived_backward[c][i], works[c].backward),
                    Pass::Weight => (Some(0), works[c].weight),
                };
                let Some(arrival) = arrival else { break };
                let start = free[s].max(arrival);
                let end = start + length;
                spans[s].push(Span { virtual_stage, turn, start, end });
                free[s] = end;
                moved = true;
                let elsewhere = |neighbour: usize| pipeline.stage_of(neighbour as u64) != s as u64;
                match turn.pass {
                    Pass::Forward if c + 1 < all => {
                        arrived_forward[c + 1][i] = sent(&mut link_forward[s], end, works[c].message, elsewhere(c + 1));
                    }
                    Pass::Backward | Pass::Input if c > 0 => {
                        arrived_backward[c - 1][i] = sent(&mut link_backward[s], end, works[c - 1].message, elsewhere(c - 1));
                    }
                    Pass::Forward | Pass::Backward | Pass::Input | Pass::Weight => {}
                }
            }
        }
    }
    spans
}

/// Nanoseconds from the first pass to the end of the last stage's step; `ends` is how long each stage takes from its last pass to there.
pub fn simulate(works: &[StageWork], ends: &[u64], pipeline: &Pipeline) -> u64 {
    let spans = spans(works, pipeline);
    spans.iter().zip(ends).map(|(spans, end)| spans.last().map_or(0, |s| s.end) + end).max().unwrap_or(0)
}

#[cfg(test)]
#[path = "simulate_tests.rs"]
mod tests;
