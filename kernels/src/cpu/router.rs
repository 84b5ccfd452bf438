//! The top-k router: softmax over experts, the k largest kept.
//!
//! With chosen experts C and p = softmax(logits): gate = p on C, divided by Σ_C p if renormalised (which makes it the softmax over C alone).
//! Gradient, with s = Σ gate · dgate: gate · dgate − gate · s if renormalised, otherwise gate · dgate − p · s.

use dplan_ir::extent::Extent;
use dplan_ir::op::Renormalize;
use dplan_ir::program::Write;

use super::block::{Block, BlockMut};
use super::float::{Float, clear, put, sum};

#[derive(Debug)]
pub struct Router {
    part: Part,
    k: usize,
    renormalize: Renormalize,
    /// Experts, and how many of them are no padding.
    experts: usize,
    valid: usize,
}

#[derive(Debug)]
enum Part {
    Gate,
    Grad,
}

impl Router {
    pub fn gate(k: u64, renormalize: Renormalize, experts: Extent) -> Router {
        let (experts, valid) = (experts.len as usize, experts.valid() as usize);
        Router { part: Part::Gate, k: (k as usize).min(valid), renormalize, experts, valid }
    }
    pub fn grad(k: u64, renormalize: Renormalize, experts: Extent) -> Router {
        Router { part: Part::Grad, ..Router::gate(k, renormalize, experts) }
    }

    pub fn run<T: Float>(&self, ins: &[Block<'_>], outs: &mut [BlockMut<'_>], write: Write) {
        let n = self.experts;
        let rows = T::of(ins[0]).chunks_exact(n).zip(T::of_mut(&mut outs[0]).chunks_exact_mut(n));
        match self.part {
            Part::Gate => rows.for_each(|(logits, gate)| self.choose(&logits[..self.valid], gate, write)),
            Part::Grad => {
                let gradients = T::of(ins[1]).chunks_exact(n).zip(T::of(ins[2]).chunks_exact(n));
                rows.zip(gradients).for_each(|((logits, out), (gate, dgate))| self.slope(logits, gate, dgate, out, write));
            }
        }
    }

    fn choose<T: Float>(&self, logits: &[T], gate: &mut [T], write: Write) {
        let (max, total) = softmax(logits);
        let p = |i: usize| (logits[i].to_f64() - max).exp();
        let chosen = |visit: &mut dyn FnMut(usize)| {
            let mut last = None;
            for _ in 0..self.k {
                let next = next_largest(logits, last);
                next.into_iter().for_each(&mut *visit);
                last = next;
            }
        };
        let mut divisor = total;
        if self.renormalize == Renormalize::Yes {
            divisor = 0.0;
            chosen(&mut |i| divisor += p(i));
        }
        clear(gate, write);
        chosen(&mut |i| gate[i] += T::from_f64(p(i) / divisor));
    }

    fn slope<T: Float>(&self, logits: &[T], gate: &[T], dgate: &[T], out: &mut [T], write: Write) {
        let (valid, padding) = out.split_at_mut(self.valid);
        clear(padding, write);
        let (logits, gate, dgate) = (&logits[..self.valid], &gate[..self.valid], &dgate[..self.valid]);
        let along = sum(gate.len(), |i| gate[i].to_f64() * dgate[i].to_f64());
        let (max, total) = softmax(logits);
        for (i, out) in valid.iter_mut().enumerate() {
            let over = match self.renormalize {
                Renormalize::Yes => gate[i].to_f64(),
                Renormalize::No => (logits[i].to_f64() - max).exp() / total,
            };
            let slope = gate[i].to_f64() * dgate[i].to_f64() - over * along;
            put(out, T::from_f64(slope), write);
        }
    }
}

/// The largest logit, and Σ exp(logit − largest).
fn softmax<T: Float>(logits: &[T]) -> (f64, f64) {
    let max = logits.iter().fold(f64::NEG_INFINITY, |m, l| m.max(l.to_f64()));
    (max, sum(logits.len(), |i| (logits[i].to_f64() - max).exp()))
}

/// The expert that follows `last` in order of falling logit; of equal logits the lower index comes first.
fn next_largest<T: Float>(logits: &[T], last: Option<usize>) -> Option<usize> {
    let after = |i: usize| last.is_none_or(|l| logits[i] < logits[l] || (logits[i] == logits[l] && i > l));
    (0..logits.len()).filter(|&i| after(i)).reduce(|best, i| if logits[i] > logits[best] { i } else { best })
}
