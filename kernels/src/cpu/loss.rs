//! Cross entropy in two local halves, and the mean over tokens.
//!
//! With the vocabulary cut into blocks of columns, each rank gives log Σ exp over its own columns, and the logit of the target if it has it; the whole
//! loss is lse − picked after their reductions. Columns that are padding count as −∞, so their gradient is 0.

use dplan_ir::extent::Extent;

use super::Run;
use super::block::{Block, BlockMut};
use super::float::{Float, clear, exp_sum, fill, max, put, sum};
use super::vector::vectorized;

#[derive(Debug)]
pub enum Loss {
    Stats { columns: Extent },
    StatsGrad { columns: Extent },
    Mean,
    MeanGrad,
}

impl Loss {
    pub fn run<T: Float>(&self, ins: &[Block<'_>], outs: &mut [BlockMut<'_>], run: Run) {
        vectorized(|| self.loops::<T>(ins, outs, run));
    }

    #[inline(always)]
    fn loops<T: Float>(&self, ins: &[Block<'_>], outs: &mut [BlockMut<'_>], run: Run) {
        match self {
            Loss::Stats { columns } => {
                let (logits, targets) = (T::of(ins[0]), ins[1].indices());
                let [lse, picked] = outs else { unreachable!("two results by the type rule") };
                let (lse, picked) = (T::of_mut(lse), T::of_mut(picked));
                for (at, logits) in logits.chunks_exact(columns.len as usize).enumerate() {
                    put(&mut lse[at], log_sum_exp(&logits[..columns.valid() as usize]), run.write);
                    put(&mut picked[at], column(columns, targets[at]).map_or(T::ZERO, |c| logits[c]), run.write);
                }
            }
            Loss::StatsGrad { columns } => {
                let (logits, targets) = (T::of(ins[0]), ins[1].indices());
                let (lse, dlse, dpicked) = (T::of(ins[2]), T::of(ins[3]), T::of(ins[4]));
                let out = T::of_mut(&mut outs[0]);
                let width = columns.len as usize;
                for (at, (logits, out)) in logits.chunks_exact(width).zip(out.chunks_exact_mut(width)).enumerate() {
                    let (valid, padding) = out.split_at_mut(columns.valid() as usize);
                    let (lse, dlse) = (lse[at], dlse[at]);
                    fill(valid, run.write, |c| dlse * (logits[c] - lse).exp());
                    clear(padding, run.write);
                    if let Some(c) = column(columns, targets[at]) {
                        out[c] += dpicked[at];
                    }
                }
            }
            Loss::Mean => {
                let x = T::of(ins[0]);
                let mean = sum(x.len(), |i| x[i].to_f64()) * run.inv_tokens;
                match &mut outs[0] {
                    BlockMut::F64(out) => put(&mut out[0], mean, run.write),
                    BlockMut::F32(out) => put(&mut out[0], mean as f32, run.write),
                    BlockMut::I32(_) | BlockMut::Bf16(_) | BlockMut::F16(_) => unreachable!("refused when prepared"),
                }
            }
            Loss::MeanGrad => {
                let value = T::from_f64(run.inv_tokens * run.loss_scale);
                fill(T::of_mut(&mut outs[0]), run.write, |_| value);
            }
        }
    }
}

/// log Σ exp, −∞ of nothing.
#[inline(always)]
fn log_sum_exp<T: Float>(x: &[T]) -> T {
    if x.is_empty() {
        return T::NEG_INFINITY;
    }
    let largest = max(x);
    T::from_f64(largest.to_f64() + exp_sum(x, largest).ln())
}

/// Where this rank's columns have the target.
fn column(columns: &Extent, target: i32) -> Option<usize> {
    u64::try_from(target).ok().and_then(|t| columns.local(t)).filter(|&c| c < columns.valid()).map(|c| c as usize)
}
