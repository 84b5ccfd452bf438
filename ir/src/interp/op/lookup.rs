//! Ops indexed by tokens and positions: embeddings and the statistics of the loss. A rank holds a block of the table; what lies outside gives zero.

use crate::extent::{Extent, OpContext};
use crate::interp::Tensor;
use crate::sharding::LocalType;

pub(super) fn embed(ctx: &OpContext, table: &Tensor, tokens: &Tensor) -> Tensor {
    let h = table.dim(1);
    let mut out = vec![0.0; tokens.data.len() * h];
    for (row, &token) in out.chunks_exact_mut(h).zip(&tokens.data) {
        if let Some(at) = ctx.extent('v').local(token as u64) {
            row.copy_from_slice(&table.data[at as usize * h..][..h]);
        }
    }
    Tensor::dense(&[tokens.dims[0], tokens.dims[1], h as u64], out)
}

pub(super) fn embed_grad(ctx: &OpContext, tokens: &Tensor, dy: &Tensor, out: &LocalType) -> Tensor {
    let mut table = Tensor::zeros(out);
    let h = table.dim(1);
    for (row, &token) in dy.data.chunks_exact(h).zip(&tokens.data) {
        if let Some(at) = ctx.extent('v').local(token as u64) {
            accumulate(&mut table.data[at as usize * h..][..h], row);
        }
    }
    table
}

/// Each token takes the row of its position.
pub(super) fn add_position(ctx: &OpContext, x: &Tensor, table: &Tensor) -> Tensor {
    let (seq, h) = (x.dim(1), x.dim(2));
    let mut out = x.clone();
    for (row, y) in out.data.chunks_exact_mut(h).enumerate() {
        let position = ctx.position('s', (row % seq) as u64) as usize;
        accumulate(y, &table.data[position * h..][..h]);
    }
    out
}

pub(super) fn add_position_grad(ctx: &OpContext, dy: &Tensor, out: &LocalType) -> Tensor {
    let (seq, h) = (dy.dim(1), dy.dim(2));
    let mut table = Tensor::zeros(out);
    for (row, dy) in dy.data.chunks_exact(h).enumerate() {
        let position = ctx.position('s', (row % seq) as u64) as usize;
        accumulate(&mut table.data[position * h..][..h], dy);
    }
    table
}

/// lse = log Σ exp over a rank's columns that are not padding (−∞ if it has none), picked = the target's logit, or 0 where the rank does not have it.
pub(super) fn ce_stats(columns: Extent, logits: &Tensor, targets: &Tensor) -> Vec<Tensor> {
    let (mut lse, mut picked) = (Vec::new(), Vec::new());
    for (row, &target) in logits.data.chunks_exact(columns.len as usize).zip(&targets.data) {
        let valid = &row[..columns.valid() as usize];
        let max = valid.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = valid.iter().map(|x| (x - max).exp()).sum();
        lse.push(if valid.is_empty() { f64::NEG_INFINITY } else { max + sum.ln() });
        picked.push(columns.local(target as u64).map_or(0.0, |at| row[at as usize]));
    }
    vec![Tensor::dense(&targets.dims, lse), Tensor::dense(&targets.dims, picked)]
}

/// dlogits = dlse · exp(logits − lse) + dpicked · onehot(targets); zero in padding.
pub(super) fn ce_stats_grad(columns: Extent, ins: &[&Tensor]) -> Tensor {
    let (logits, targets, lse, dlse, dpicked) = (ins[0], ins[1], ins[2], ins[3], ins[4]);
    let mut out = logits.map(|_| 0.0);
    for (token, dlogits) in out.data.chunks_exact_mut(columns.len as usize).enumerate() {
        let row = &logits.data[token * columns.len as usize..];
        for (y, x) in dlogits[..columns.valid() as usize].iter_mut().zip(row) {
            *y = dlse.data[token] * (x - lse.data[token]).exp();
        }
        if let Some(at) = columns.local(targets.data[token] as u64) {
            dlogits[at as usize] += dpicked.data[token];
        }
    }
    out
}

fn accumulate(to: &mut [f64], from: &[f64]) {
    for (x, y) in to.iter_mut().zip(from) {
        *x += y;
    }
}
