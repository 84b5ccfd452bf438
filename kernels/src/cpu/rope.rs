//! Rotary position embedding: at position p the i-th pair of a vector turns by the angle p · fᵢ and is scaled; what is in no pair stays.

use dplan_ir::extent::OpContext;
use dplan_ir::op::{Pairs, Rope, Rotation};
use dplan_ir::program::Write;
use dplan_ir::rule::Label;

use super::PrepareError;
use super::float::{Float, fill, put};
use super::vector::vectorized;

#[derive(Debug)]
pub struct RopeKernel {
    /// Angle per position, with the sign of the rotation.
    frequencies: Vec<f64>,
    /// Position of each token of the block.
    places: Vec<u64>,
    pairs: Pairs,
    scale: f64,
    /// First element that turns, and elements of a vector.
    start: usize,
    width: usize,
    batch: usize,
    positions: usize,
    /// Vectors (heads) at one position.
    heads: usize,
}

/// Pairs whose sines are computed at once, for all vectors at a position.
const PAIRS: usize = 64;

impl RopeKernel {
    /// # Errors
    /// If there are more pairs than vectors have room for.
    pub fn new(rope: &Rope, context: &OpContext, label: Label, x: &[usize]) -> Result<RopeKernel, PrepareError> {
        let width = x[x.len() - 1];
        if rope.end() > width as u64 {
            return Err(PrepareError::Sizes(format!("{} frequencies for vectors of {width}", rope.inv_freq.len())));
        }
        let sign = match rope.rotation {
            Rotation::Forward => 1.0,
            Rotation::Inverse => -1.0,
        };
        Ok(RopeKernel {
            pairs: rope.pairs,
            scale: rope.scale,
            start: rope.start as usize,
            width,
            frequencies: rope.inv_freq.iter().map(|f| sign * f).collect(),
            places: (0..x[1] as u64).map(|s| context.position(label, s)).collect(),
            batch: x[0],
            positions: x[1],
            heads: x[2..x.len() - 1].iter().product(),
        })
    }

    pub fn run<T: Float>(&self, x: &[T], out: &mut [T], write: Write) {
        vectorized(|| self.loops(x, out, write));
    }

    #[inline(always)]
    fn loops<T: Float>(&self, x: &[T], out: &mut [T], write: Write) {
        let half = self.frequencies.len();
        let turned = self.start..self.start + 2 * half;
        let (mut sin, mut cos) = ([T::ZERO; PAIRS], [T::ZERO; PAIRS]);
        for s in 0..self.positions {
            let position = self.places[s] as f64;
            for p0 in (0..half).step_by(PAIRS) {
                let n = PAIRS.min(half - p0);
                for (j, f) in self.frequencies[p0..p0 + n].iter().enumerate() {
                    let (a, b) = (position * f).sin_cos();
                    (sin[j], cos[j]) = (T::from_f64(self.scale * a), T::from_f64(self.scale * b));
                }
                for vector in (0..self.batch).flat_map(|b| (0..self.heads).map(move |h| (b * self.positions + s) * self.heads + h)) {
                    let at = vector * self.width + self.start;
                    match self.pairs {
                        Pairs::Halves => {
                            let (low, high) = (&x[at + p0..at + p0 + n], &x[at + half + p0..at + half + p0 + n]);
                            let (first, second) = out[at + p0..at + half + p0 + n].split_at_mut(half);
                            for j in 0..n {
                                put(&mut first[j], low[j] * cos[j] - high[j] * sin[j], write);
                                put(&mut second[j], high[j] * cos[j] + low[j] * sin[j], write);
                            }
                        }
                        Pairs::Neighbours => {
                            let part = at + 2 * p0..at + 2 * (p0 + n);
                            for (j, (out, x)) in out[part.clone()].chunks_exact_mut(2).zip(x[part].chunks_exact(2)).enumerate() {
                                put(&mut out[0], x[0] * cos[j] - x[1] * sin[j], write);
                                put(&mut out[1], x[1] * cos[j] + x[0] * sin[j], write);
                            }
                        }
                    }
                }
            }
        }
        if turned.len() < self.width {
            for (out, x) in out.chunks_exact_mut(self.width).zip(x.chunks_exact(self.width)) {
                for part in [0..turned.start, turned.end..self.width] {
                    fill(&mut out[part.clone()], write, |i| x[part.start + i]);
                }
            }
        }
    }
}
