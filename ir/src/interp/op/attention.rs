//! Attention and rotary position embedding.

use crate::extent::OpContext;
use crate::interp::Tensor;
use crate::op::{Attention, Documents, Rope, Rotation};
use crate::sharding::LocalType;

/// Each pair rotated by position × inv_freq_i and scaled; what is in no pair stays.
pub(super) fn rope(rope: &Rope, ctx: &OpContext, x: &Tensor) -> Tensor {
    // The rule of a pointwise op spells the dims a, b, …: the sequence is `b`.
    let (seq, width) = (x.dim(1), x.dim(x.dims.len() - 1));
    let rows_of_token = x.dims[2..x.dims.len() - 1].iter().product::<u64>() as usize;
    let mut out = x.clone();
    for (row, y) in out.data.chunks_exact_mut(width).enumerate() {
        let position = ctx.position('b', (row / rows_of_token % seq) as u64);
        for i in 0..rope.inv_freq.len() {
            let (sin, cos) = (position as f64 * rope.inv_freq[i]).sin_cos();
            let sin = match rope.rotation {
                Rotation::Forward => sin,
                Rotation::Inverse => -sin,
            };
            let (a, b) = rope.pair(i);
            // A rank with a part of each vector, which the factor rule forbids, has a part of the pairs.
            if b >= width {
                continue;
            }
            (y[a], y[b]) = (rope.scale * (y[a] * cos - y[b] * sin), rope.scale * (y[b] * cos + y[a] * sin));
        }
    }
    out
}

/// o = softmax(scale · q·k over visible keys) · v, lse = log Σ exp of the scores. With sinks, each head has one score more, of value zero.
pub(super) fn forward(a: &Attention, ctx: &OpContext, ins: &[&Tensor], sinks: Option<&Tensor>, outs: &[LocalType]) -> Vec<Tensor> {
    let (q, v) = (ins[0], ins[2]);
    let (mut o, mut lse) = (Tensor::zeros(&outs[0]), Tensor::zeros(&outs[1]));
    for_each_query(ctx, q, |b, s, g, r| {
        let scores = scores(a, ctx, ins, [b, s, g, r]);
        let sink = sinks.filter(|_| ctx.turn == 0).map(|sink| sink.data[sink.at(&[g, r])]);
        let max = scores.iter().map(|&(_, x)| x).chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|&(_, x)| x).chain(sink).map(|x| (x - max).exp()).sum();
        let at = lse.at(&[b, s, g, r]);
        // A query may see nothing of one block of the keys.
        lse.data[at] = if sum > 0.0 { max + sum.ln() } else { f64::NEG_INFINITY };
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
        for (t, x) in scores(a, ctx, ins, [b, s, g, r]) {
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

/// dsink = −Σ exp(sink − lse) · ⟨do, o⟩.
pub(super) fn sink_grad(ctx: &OpContext, ins: &[&Tensor]) -> Tensor {
    let (sink, o, lse, dout) = (ins[0], ins[1], ins[2], ins[3]);
    let mut dsink = sink.map(|_| 0.0);
    let e = o.dim(4);
    for_each_query(ctx, o, |b, s, g, r| {
        let row = o.at(&[b, s, g, r, 0]);
        let p = (sink.data[sink.at(&[g, r])] - lse.data[lse.at(&[b, s, g, r])]).exp();
        let at = dsink.at(&[g, r]);
        dsink.data[at] -= p * dot(&dout.data[row..][..e], &o.data[row..][..e]);
    });
    dsink
}

/// Each head's x, then y.
pub(super) fn append(ctx: &OpContext, x: &Tensor, y: &Tensor, out: &LocalType) -> Tensor {
    let n = x.dims[3];
    Tensor::from_fn(&out.dims, |i| {
        if i[2] >= ctx.extent('g').valid() {
            0.0
        } else if i[3] < n {
            x.data[x.at(i)]
        } else {
            y.data[y.at(&[i[0], i[1], i[3] - n])]
        }
    })
}

pub(super) fn append_grad_head(dz: &Tensor, out: &LocalType) -> Tensor {
    Tensor::from_fn(&out.dims, |i| dz.data[dz.at(i)])
}

/// The last elements, summed over heads.
pub(super) fn append_grad_tail(dz: &Tensor, out: &LocalType) -> Tensor {
    let n = dz.dims[3] - out.dims[2];
    Tensor::from_fn(&out.dims, |i| (0..dz.dims[2]).map(|g| dz.data[dz.at(&[i[0], i[1], g, n + i[2]])]).sum())
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
fn scores(a: &Attention, ctx: &OpContext, ins: &[&Tensor], [b, s, g, r]: [u64; 4]) -> Vec<(u64, f64)> {
    let (q, k) = (ins[0], ins[1]);
    let first = match (a.mask.documents, ins) {
        (Documents::Apart, [.., first]) => first.data[first.at(&[b, s])] as u64,
        (Documents::Apart | Documents::Joined, _) => 0,
    };
    let d = q.dim(4);
    let query = &q.data[q.at(&[b, s, g, r, 0])..][..d];
    let position = ctx.position('s', s);
    (0..k.dims[1])
        .filter(|t| a.mask.sees(position, first, ctx.position('t', *t)))
        .map(|t| (t, a.scale * dot(query, &k.data[k.at(&[b, t, g, 0])..][..d])))
        .collect()
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}
