//! Attention and rotary position embedding.

use crate::extent::OpContext;
use crate::interp::Tensor;
use crate::op::{Attention, Rope, Rotation};
use crate::sharding::LocalType;

/// Each pair `(x_i, x_{i+d/2})` rotated by position × inv_freq_i.
pub(super) fn rope(rope: &Rope, ctx: &OpContext, x: &Tensor) -> Tensor {
    // The rule of a pointwise op spells the dims a, b, …: the sequence is `b`.
    let (seq, width) = (x.dim(1), x.dim(x.dims.len() - 1));
    let rows_of_token = x.dims[2..x.dims.len() - 1].iter().product::<u64>() as usize;
    let half = width / 2;
    let mut out = x.clone();
    for (row, y) in out.data.chunks_exact_mut(width).enumerate() {
        let position = ctx.position('b', (row / rows_of_token % seq) as u64);
        for i in 0..half {
            let (sin, cos) = (position as f64 * rope.inv_freq[i]).sin_cos();
            let sin = match rope.rotation {
                Rotation::Forward => sin,
                Rotation::Inverse => -sin,
            };
            (y[i], y[i + half]) = (y[i] * cos - y[i + half] * sin, y[i + half] * cos + y[i] * sin);
        }
    }
    out
}

/// o = softmax(scale · q·k over visible keys) · v, lse = log Σ exp of the scores.
pub(super) fn forward(a: &Attention, ctx: &OpContext, ins: &[&Tensor], outs: &[LocalType]) -> Vec<Tensor> {
    let (q, k, v) = (ins[0], ins[1], ins[2]);
    let (mut o, mut lse) = (Tensor::zeros(&outs[0]), Tensor::zeros(&outs[1]));
    for_each_query(ctx, q, |b, s, g, r| {
        let scores = scores(a, ctx, q, k, [b, s, g, r]);
        let max = scores.iter().fold(f64::NEG_INFINITY, |m, &(_, x)| m.max(x));
        let sum: f64 = scores.iter().map(|&(_, x)| (x - max).exp()).sum();
        let at = lse.at(&[b, s, g, r]);
        lse.data[at] = max + sum.ln();
        let row = o.at(&[b, s, g, r, 0]);
        for (t, x) in scores {
            let p = (x - max).exp() / sum;
            for e in 0..v.dims[3] {
                o.data[row + e as usize] += p * v.data[v.at(&[b, t, g, e])];
            }
        }
    });
    vec![o, lse]
}

/// With p = exp(score − lse) and δ = ⟨do, o⟩: dv += p·do, ds = scale · p · (⟨do, v⟩ − δ), dq += ds·k, dk += ds·q.
pub(super) fn backward(a: &Attention, ctx: &OpContext, ins: &[&Tensor]) -> Vec<Tensor> {
    let (q, k, v, o, lse, dout) = (ins[0], ins[1], ins[2], ins[3], ins[4], ins[5]);
    let zero = |x: &Tensor| x.map(|_| 0.0);
    let (mut dq, mut dk, mut dv) = (zero(q), zero(k), zero(v));
    let (d, e) = (q.dim(4), v.dim(3));
    for_each_query(ctx, q, |b, s, g, r| {
        let (row, vrow) = (q.at(&[b, s, g, r, 0]), o.at(&[b, s, g, r, 0]));
        let dout = &dout.data[vrow..][..e];
        let delta: f64 = dot(dout, &o.data[vrow..][..e]);
        for (t, x) in scores(a, ctx, q, k, [b, s, g, r]) {
            let p = (x - lse.data[lse.at(&[b, s, g, r])]).exp();
            let (key, val) = (k.at(&[b, t, g, 0]), v.at(&[b, t, g, 0]));
            let ds = a.scale * p * (dot(dout, &v.data[val..][..e]) - delta);
            for (i, x) in dout.iter().enumerate() {
                dv.data[val + i] += p * x;
            }
            for i in 0..d {
                dq.data[row + i] += ds * k.data[key + i];
                dk.data[key + i] += ds * q.data[row + i];
            }
        }
    });
    vec![dq, dk, dv]
}

/// Every query of heads that are not padding.
fn for_each_query(ctx: &OpContext, q: &Tensor, mut f: impl FnMut(u64, u64, u64, u64)) {
    for b in 0..q.dims[0] {
        for s in 0..q.dims[1] {
            for g in 0..ctx.extent('g').valid() {
                for r in 0..ctx.extent('r').valid() {
                    f(b, s, g, r);
                }
            }
        }
    }
}

/// `(key, scale · ⟨q, k⟩)` for every visible key.
fn scores(a: &Attention, ctx: &OpContext, q: &Tensor, k: &Tensor, [b, s, g, r]: [u64; 4]) -> Vec<(u64, f64)> {
    let d = q.dim(4);
    let query = &q.data[q.at(&[b, s, g, r, 0])..][..d];
    let position = ctx.position('s', s);
    (0..k.dims[1])
        .filter(|t| a.mask.sees(position, ctx.position('t', *t)))
        .map(|t| (t, a.scale * dot(query, &k.data[k.at(&[b, t, g, 0])..][..d])))
        .collect()
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}
