//! The top-k router: a score for each expert, the k best kept.
//!
//! With scores s (softmax or sigmoid of the logits) and chosen experts C: gate = scale · s on C, divided by Σ_C s if renormalised. Experts are chosen by
//! s + correction, out of the best groups if there are groups. Gradient, with ĝ = gate / scale and d = Σ gate · dgate:
//! - softmax: gate · dgate − over · d, with `over` = ĝ if renormalised, else s;
//! - sigmoid: (1 − s) · (gate · dgate − over · d), with `over` = ĝ if renormalised, else 0.

use dplan_ir::extent::Extent;
use dplan_ir::op::{Correction, GroupScore, Groups, Renormalize, Score};
use dplan_ir::program::Write;

use super::PrepareError;
use super::block::{Block, BlockMut};
use super::float::{Float, clear, put, sum};

#[derive(Debug)]
pub struct Router {
    part: Part,
    router: dplan_ir::op::Router,
    k: usize,
    /// Experts, and how many of them are no padding.
    experts: usize,
    valid: usize,
}

#[derive(Debug)]
enum Part {
    Gate,
    Grad,
}

/// Most groups of a router.
const MAX_GROUPS: usize = 1024;

/// A set of groups.
type GroupSet = [u64; MAX_GROUPS / 64];

impl Router {
    /// # Errors
    /// If there are more groups than a token's choice keeps a note of, or they are not equal.
    pub fn gate(router: &dplan_ir::op::Router, experts: Extent) -> Result<Router, PrepareError> {
        let (experts, valid) = (experts.len as usize, experts.valid() as usize);
        if let Some(g) = router.groups
            && (g.count > MAX_GROUPS as u64 || g.count == 0 || !valid.is_multiple_of(g.count as usize))
        {
            return Err(PrepareError::Sizes(format!("{valid} experts in {} groups, of at most {MAX_GROUPS}", g.count)));
        }
        Ok(Router { part: Part::Gate, router: *router, k: (router.k as usize).min(valid), experts, valid })
    }
    /// # Errors
    /// As [`Router::gate`].
    pub fn grad(router: &dplan_ir::op::Router, experts: Extent) -> Result<Router, PrepareError> {
        Ok(Router { part: Part::Grad, ..Router::gate(router, experts)? })
    }

    pub fn run<T: Float>(&self, ins: &[Block<'_>], outs: &mut [BlockMut<'_>], write: Write) {
        let n = self.experts;
        let rows = T::of(ins[0]).chunks_exact(n).zip(T::of_mut(&mut outs[0]).chunks_exact_mut(n));
        match self.part {
            Part::Gate => {
                let bias = match self.router.correction {
                    Correction::No => None,
                    Correction::Added => Some(T::of(ins[1])),
                };
                rows.for_each(|(logits, gate)| self.choose(&Scores::new(self.router.score, &logits[..self.valid]), bias, gate, write));
            }
            Part::Grad => {
                let gradients = T::of(ins[1]).chunks_exact(n).zip(T::of(ins[2]).chunks_exact(n));
                rows.zip(gradients).for_each(|((logits, out), (gate, dgate))| self.slope(logits, gate, dgate, out, write));
            }
        }
    }

    fn choose<T: Float>(&self, scores: &Scores<'_, T>, bias: Option<&[T]>, gate: &mut [T], write: Write) {
        let choice = |e: usize| scores.at(e) + bias.map_or(0.0, |b| b[e].to_f64());
        // Without a correction logits are compared, which fall as scores do but are not rounded.
        let order = |e: usize| if bias.is_some() { choice(e) } else { scores.logits[e].to_f64() };
        let (groups, size) = self.groups(&choice);
        let allowed = |e: usize| groups.is_none_or(|set| set[e / size / 64] >> (e / size % 64) & 1 == 1);
        let chosen = |visit: &mut dyn FnMut(usize)| {
            let mut last = None;
            for _ in 0..self.k {
                let next = next_best((0..self.valid).filter(|&e| allowed(e)), &order, last);
                next.into_iter().for_each(&mut *visit);
                last = next;
            }
        };
        let mut divisor = 1.0;
        if self.router.renormalize == Renormalize::Yes {
            divisor = 0.0;
            chosen(&mut |e| divisor += scores.at(e));
        }
        clear(gate, write);
        chosen(&mut |e| gate[e] += T::from_f64(self.router.scale * scores.at(e) / divisor));
    }

    /// The groups a token may choose from, if not all, and how many experts each has.
    fn groups(&self, choice: &impl Fn(usize) -> f64) -> (Option<GroupSet>, usize) {
        let Some(Groups { count, kept, by }) = self.router.groups else { return (None, 1) };
        let size = self.valid / count as usize;
        let worth = |g: usize| {
            let (best, second) = (g * size..(g + 1) * size)
                .map(choice)
                .fold((f64::NEG_INFINITY, f64::NEG_INFINITY), |(best, second), c| if c > best { (c, best) } else { (best, second.max(c)) });
            match by {
                GroupScore::TwoBest if size > 1 => best + second,
                GroupScore::TwoBest | GroupScore::Best => best,
            }
        };
        let (mut set, mut last) = ([0; MAX_GROUPS / 64], None);
        for _ in 0..kept {
            last = next_best(0..count as usize, &worth, last);
            last.into_iter().for_each(|g| set[g / 64] |= 1 << (g % 64));
        }
        (Some(set), size.max(1))
    }

    fn slope<T: Float>(&self, logits: &[T], gate: &[T], dgate: &[T], out: &mut [T], write: Write) {
        let (valid, padding) = out.split_at_mut(self.valid);
        clear(padding, write);
        let (gate, dgate) = (&gate[..self.valid], &dgate[..self.valid]);
        let scores = Scores::new(self.router.score, &logits[..self.valid]);
        let along = sum(gate.len(), |e| gate[e].to_f64() * dgate[e].to_f64());
        for (e, out) in valid.iter_mut().enumerate() {
            let g = gate[e].to_f64();
            let over = match (self.router.renormalize, self.router.score) {
                (Renormalize::Yes, _) => g / self.router.scale,
                (Renormalize::No, Score::Softmax) => scores.at(e),
                (Renormalize::No, Score::Sigmoid) => 0.0,
            };
            let slope = g * dgate[e].to_f64() - over * along;
            let slope = match self.router.score {
                Score::Softmax => slope,
                Score::Sigmoid => (1.0 - scores.at(e)) * slope,
            };
            put(out, T::from_f64(slope), write);
        }
    }
}

/// Scores of one token.
struct Scores<'a, T> {
    score: Score,
    logits: &'a [T],
    /// The largest logit, and Σ exp(logit − largest).
    max: f64,
    total: f64,
}

impl<'a, T: Float> Scores<'a, T> {
    fn new(score: Score, logits: &'a [T]) -> Scores<'a, T> {
        let (max, total) = match score {
            Score::Softmax => {
                let max = logits.iter().fold(f64::NEG_INFINITY, |m, l| m.max(l.to_f64()));
                (max, sum(logits.len(), |i| (logits[i].to_f64() - max).exp()))
            }
            Score::Sigmoid => (0.0, 1.0),
        };
        Scores { score, logits, max, total }
    }
    fn at(&self, e: usize) -> f64 {
        let logit = self.logits[e].to_f64();
        match self.score {
            Score::Softmax => (logit - self.max).exp() / self.total,
            Score::Sigmoid => 1.0 / (1.0 + (-logit).exp()),
        }
    }
}

/// The candidate that follows `last` in order of falling worth; of equals the lower index comes first.
fn next_best(candidates: impl Iterator<Item = usize>, worth: &impl Fn(usize) -> f64, last: Option<usize>) -> Option<usize> {
    let last = last.map(|l| (l, worth(l)));
    let after = |i: usize, w: f64| last.is_none_or(|(l, lw)| w < lw || (w == lw && i > l));
    let worths = candidates.map(|i| (i, worth(i))).filter(|&(i, w)| after(i, w));
    worths.reduce(|best, next| if next.1 > best.1 { next } else { best }).map(|(i, _)| i)
}
