//! Rotary position embedding: at position p the pair (xᵢ, xᵢ₊d/₂) turns by the angle p · fᵢ.

use dplan_ir::extent::OpContext;
use dplan_ir::op::{Rope, Rotation};
use dplan_ir::program::Write;
use dplan_ir::rule::Label;

use super::PrepareError;
use super::float::{Float, put};

#[derive(Debug)]
pub struct RopeKernel {
    /// Angle per position, with the sign of the rotation.
    frequencies: Vec<f64>,
    /// Position of each token of the block.
    places: Vec<u64>,
    batch: usize,
    positions: usize,
    /// Vectors (heads) at one position.
    heads: usize,
}

/// Pairs whose sines are computed at once, for all vectors at a position.
const PAIRS: usize = 64;

impl RopeKernel {
    /// # Errors
    /// If there is not one frequency for each pair.
    pub fn new(rope: &Rope, context: &OpContext, label: Label, x: &[usize]) -> Result<RopeKernel, PrepareError> {
        let width = x[x.len() - 1];
        if rope.inv_freq.len() * 2 != width {
            return Err(PrepareError::Sizes(format!("{} frequencies for vectors of {width}", rope.inv_freq.len())));
        }
        let sign = match rope.rotation {
            Rotation::Forward => 1.0,
            Rotation::Inverse => -1.0,
        };
        Ok(RopeKernel {
            frequencies: rope.inv_freq.iter().map(|f| sign * f).collect(),
            places: (0..x[1] as u64).map(|s| context.position(label, s)).collect(),
            batch: x[0],
            positions: x[1],
            heads: x[2..x.len() - 1].iter().product(),
        })
    }

    pub fn run<T: Float>(&self, x: &[T], out: &mut [T], write: Write) {
        let half = self.frequencies.len();
        let (mut sin, mut cos) = ([T::ZERO; PAIRS], [T::ZERO; PAIRS]);
        for s in 0..self.positions {
            let position = self.places[s] as f64;
            for p0 in (0..half).step_by(PAIRS) {
                let n = PAIRS.min(half - p0);
                for (j, f) in self.frequencies[p0..p0 + n].iter().enumerate() {
                    let (a, b) = (position * f).sin_cos();
                    (sin[j], cos[j]) = (T::from_f64(a), T::from_f64(b));
                }
                for vector in (0..self.batch).flat_map(|b| (0..self.heads).map(move |h| (b * self.positions + s) * self.heads + h)) {
                    let at = vector * 2 * half + p0;
                    let (low, high) = (&x[at..at + n], &x[at + half..at + half + n]);
                    let (first, second) = out[at..at + half + n].split_at_mut(half);
                    for j in 0..n {
                        put(&mut first[j], low[j] * cos[j] - high[j] * sin[j], write);
                        put(&mut second[j], high[j] * cos[j] + low[j] * sin[j], write);
                    }
                }
            }
        }
    }
}
