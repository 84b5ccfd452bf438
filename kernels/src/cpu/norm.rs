//! RMS and layer normalisation over the last dims, those that the weight has.
//!
//! With r = 1 / √(mean(x − μ)² + ε), x̂ = (x − μ) · r and g = w · dy (μ = 0 for RMS):
//! - y = x̂ · w (+ bias);
//! - dx = r · (g − x̂ · mean(g · x̂) − mean(g)), the last term for layer normalisation only;
//! - dw = Σ dy · x̂ and dbias = Σ dy over rows.

use dplan_ir::program::Write;

use super::block::{Block, BlockMut};
use super::float::{Float, SUM_ROWS, column_sums, fill, sum};
use super::vector::vectorized;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Which {
    Rms,
    Layer,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    Forward,
    GradInput,
    GradWeight,
}

#[derive(Debug)]
pub struct Norm {
    which: Which,
    part: Part,
    eps: f64,
    width: usize,
}

impl Norm {
    /// `weight`: sizes of the weight.
    pub fn new(which: Which, part: Part, eps: f64, weight: &[usize]) -> Norm {
        Norm { which, part, eps, width: weight.iter().product() }
    }

    pub fn run<T: Float>(&self, ins: &[Block<'_>], outs: &mut [BlockMut<'_>], write: Write) {
        vectorized(|| self.loops::<T>(ins, outs, write));
    }

    #[inline(always)]
    fn loops<T: Float>(&self, ins: &[Block<'_>], outs: &mut [BlockMut<'_>], write: Write) {
        let x = T::of(ins[0]);
        match self.part {
            Part::Forward => {
                let bias = match self.which {
                    Which::Rms => None,
                    Which::Layer => Some(T::of(ins[2])),
                };
                self.forward(x, T::of(ins[1]), bias, T::of_mut(&mut outs[0]), write);
            }
            Part::GradInput => self.grad_input(x, T::of(ins[1]), T::of(ins[2]), T::of_mut(&mut outs[0]), write),
            Part::GradWeight => self.grad_weight::<T>(x, T::of(ins[1]), outs, write),
        }
    }

    #[inline(always)]
    fn forward<T: Float>(&self, x: &[T], w: &[T], bias: Option<&[T]>, out: &mut [T], write: Write) {
        let n = self.width;
        for (x, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
            let (mean, r) = self.stats(x);
            let (mean, r) = (T::from_f64(mean), T::from_f64(r));
            match bias {
                None => fill(out, write, |i| x[i] * r * w[i]),
                Some(bias) => fill(out, write, |i| (x[i] - mean) * r * w[i] + bias[i]),
            }
        }
    }

    #[inline(always)]
    fn grad_input<T: Float>(&self, x: &[T], w: &[T], dy: &[T], out: &mut [T], write: Write) {
        let n = self.width;
        for ((x, dy), out) in x.chunks_exact(n).zip(dy.chunks_exact(n)).zip(out.chunks_exact_mut(n)) {
            let (mean, r) = self.stats(x);
            let along = sum(n, |i| w[i].to_f64() * dy[i].to_f64() * ((x[i].to_f64() - mean) * r)) / n as f64;
            let level = match self.which {
                Which::Rms => 0.0,
                Which::Layer => sum(n, |i| w[i].to_f64() * dy[i].to_f64()) / n as f64,
            };
            let (mean, r, along, level) = (T::from_f64(mean), T::from_f64(r), T::from_f64(along), T::from_f64(level));
            fill(out, write, |i| r * (w[i] * dy[i] - (x[i] - mean) * r * along - level));
        }
    }

    #[inline(always)]
    fn grad_weight<T: Float>(&self, x: &[T], dy: &[T], outs: &mut [BlockMut<'_>], write: Write) {
        let n = self.width;
        let rows = x.len() / n;
        let stats = |first: usize, count: usize| {
            let mut facts = (first, [(0.0, 0.0); SUM_ROWS]);
            for (row, fact) in (first..first + count).zip(&mut facts.1) {
                *fact = self.stats(&x[row * n..(row + 1) * n]);
            }
            facts
        };
        column_sums(rows, T::of_mut(&mut outs[0]), write, stats, |(first, stats), row, c| {
            let (mean, r) = stats[row - first];
            dy[row * n + c].to_f64() * ((x[row * n + c].to_f64() - mean) * r)
        });
        if self.which == Which::Layer {
            column_sums(rows, T::of_mut(&mut outs[1]), write, |_, _| (), |(), row, c| dy[row * n + c].to_f64());
        }
    }

    /// (μ, r) of a row.
    #[inline(always)]
    fn stats<T: Float>(&self, x: &[T]) -> (f64, f64) {
        let n = x.len() as f64;
        let mean = match self.which {
            Which::Rms => 0.0,
            Which::Layer => sum(x.len(), |i| x[i].to_f64()) / n,
        };
        let variance = sum(x.len(), |i| (x[i].to_f64() - mean) * (x[i].to_f64() - mean)) / n;
        (mean, 1.0 / (variance + self.eps).sqrt())
    }
}
