//! Mixture of experts: the gate chooses experts of a token, and with them the rows that top-k values store.

use super::linear;
use crate::extent::OpContext;
use crate::interp::Tensor;
use crate::op::{Correction, GroupScore, Renormalize, Router, Score, Spec};
use crate::sharding::LocalType;

/// The weights of the `k` experts a token chooses, zero for the others.
pub(super) fn top_k_gate(router: &Router, ctx: &OpContext, ins: &[&Tensor]) -> Tensor {
    let logits = ins[0];
    let experts = logits.dim(2);
    let mut gate = logits.map(|_| 0.0);
    for (row, out) in logits.data.chunks_exact(experts).zip(gate.data.chunks_exact_mut(experts)) {
        let row = &row[..ctx.extent('e').valid() as usize];
        let scores = scores(router.score, row);
        let bias = |e: usize| ins.get(1).map_or(0.0, |bias| bias.data[e]);
        let choice: Vec<f64> = scores.iter().enumerate().map(|(e, s)| s + bias(e)).collect();
        // Equal scores may come of different logits, if rounding makes them so: the larger logit goes first where nothing else was added.
        let better = |&i: &usize, &j: &usize| match router.correction {
            Correction::No => row[j].total_cmp(&row[i]).then(i.cmp(&j)),
            Correction::Added => choice[j].total_cmp(&choice[i]).then(i.cmp(&j)),
        };
        let mut order: Vec<usize> = candidates(router, &choice);
        order.sort_by(better);
        order.truncate(router.k as usize);
        let sum = match router.renormalize {
            Renormalize::Yes => order.iter().map(|&e| scores[e]).sum(),
            Renormalize::No => 1.0,
        };
        for e in order {
            out[e] = router.scale * scores[e] / sum;
        }
    }
    gate
}

/// With s the scores, ĝ = gate / scale, and d = ⟨gate, dgate⟩: softmax gives gate · dgate − over · d, where `over` is ĝ if renormalised and else s; a sigmoid gives
/// (1 − s) · (gate · dgate − ĝ · d) if renormalised and else (1 − s) · gate · dgate.
pub(super) fn top_k_gate_grad(router: &Router, ctx: &OpContext, ins: &[&Tensor]) -> Tensor {
    let (logits, gate, dgate) = (ins[0], ins[1], ins[2]);
    let experts = logits.dim(2);
    let mut out = logits.map(|_| 0.0);
    for (token, dlogits) in out.data.chunks_exact_mut(experts).enumerate() {
        let row = |t: &Tensor| t.data[token * experts..][..ctx.extent('e').valid() as usize].to_vec();
        let (s, gate, dgate) = (scores(router.score, &row(logits)), row(gate), row(dgate));
        let dot: f64 = gate.iter().zip(&dgate).map(|(g, d)| g * d).sum();
        for e in 0..gate.len() {
            let share = match router.renormalize {
                Renormalize::Yes => gate[e] / router.scale,
                Renormalize::No if router.score == Score::Softmax => s[e],
                Renormalize::No => 0.0,
            };
            let slope = gate[e] * dgate[e] - share * dot;
            dlogits[e] = match router.score {
                Score::Softmax => slope,
                Score::Sigmoid => (1.0 - s[e]) * slope,
            };
        }
    }
    out
}

/// The gate, of which each expert keeps the first `tokens` tokens of each sequence, by position.
pub(super) fn capacity(tokens: u64, ctx: &OpContext, gate: &Tensor) -> Tensor {
    let (len, experts) = (gate.dim(1), gate.dim(2));
    let mut kept = gate.map(|_| 0.0);
    for (from, to) in gate.data.chunks_exact(len * experts).zip(kept.data.chunks_exact_mut(len * experts)) {
        for e in 0..experts {
            let by_position = (0..len as u64).map(|position| ctx.order.index(position, len as u64) as usize * experts + e);
            by_position.filter(|&at| from[at] != 0.0).take(tokens as usize).for_each(|at| to[at] = from[at]);
        }
    }
    kept
}

/// Experts of the groups that are kept (of equals the lowest index), or all.
fn candidates(router: &Router, choice: &[f64]) -> Vec<usize> {
    let Some(groups) = router.groups else { return (0..choice.len()).collect() };
    let size = choice.len() / groups.count as usize;
    let worth = |g: usize| {
        let mut best = choice[g * size..][..size].to_vec();
        best.sort_by(|a, b| b.total_cmp(a));
        match groups.by {
            GroupScore::Best => best[0],
            GroupScore::TwoBest => best.iter().take(2).sum(),
        }
    };
    let mut order: Vec<usize> = (0..groups.count as usize).collect();
    order.sort_by(|&i, &j| worth(j).total_cmp(&worth(i)).then(i.cmp(&j)));
    order.truncate(groups.kept as usize);
    order.into_iter().flat_map(|g| g * size..(g + 1) * size).collect()
}

fn scores(score: Score, logits: &[f64]) -> Vec<f64> {
    match score {
        Score::Softmax => softmax(logits),
        Score::Sigmoid => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
    }
}

/// Chosen rows and the bias of their expert.
pub(super) fn add_expert_bias(rows: &Tensor, bias: &Tensor, gate: &Tensor) -> Tensor {
    let dense = rows.to_dense(gate);
    let sum = Tensor::from_fn(&dense.dims, |i| match gate.data[gate.at(&i[..3])] {
        0.0 => 0.0,
        _ => dense.data[dense.at(i)] + bias.data[bias.at(&i[2..])],
    });
    sum.to_layout(rows.layout, gate)
}

/// Σ over tokens of each expert's rows.
pub(super) fn expert_bias_grad(rows: &Tensor, gate: &Tensor, out: &LocalType) -> Tensor {
    let dense = rows.to_dense(gate);
    let (b, s) = (dense.dims[0], dense.dims[1]);
    Tensor::from_fn(&out.dims, |i| (0..b * s).map(|t| dense.data[dense.at(&[t / s, t % s, i[0], i[1]])]).sum())
}

/// The token's x for every chosen expert.
pub(super) fn dispatch(x: &Tensor, gate: &Tensor, out: &LocalType) -> Tensor {
    let all = Tensor::from_fn(&out.dims, |i| x.data[x.at(&[i[0], i[1], i[3]])]);
    all.to_layout(out.layout, gate)
}

/// Σ over experts.
pub(super) fn undispatch(rows: &Tensor, gate: &Tensor) -> Tensor {
    sum_experts(&rows.to_dense(gate))
}

/// Σ over experts of gate · rows.
pub(super) fn combine(rows: &Tensor, gate: &Tensor) -> Tensor {
    let rows = rows.to_dense(gate);
    sum_experts(&Tensor::from_fn(&rows.dims, |i| gate.data[gate.at(&i[..3])] * rows.data[rows.at(i)]))
}

pub(super) fn combine_grad_rows(dy: &Tensor, gate: &Tensor, out: &LocalType) -> Tensor {
    let all = Tensor::from_fn(&out.dims, |i| gate.data[gate.at(&i[..3])] * dy.data[dy.at(&[i[0], i[1], i[3]])]);
    all.to_layout(out.layout, gate)
}

/// ⟨dy, rows⟩ of the chosen experts.
pub(super) fn combine_grad_gate(dy: &Tensor, rows: &Tensor, gate: &Tensor) -> Tensor {
    let rows = rows.to_dense(gate);
    Tensor::from_fn(&gate.dims, |i| {
        if gate.data[gate.at(i)] == 0.0 {
            return 0.0;
        }
        let h = dy.dim(2);
        let (at, of) = (dy.at(&[i[0], i[1], 0]), rows.at(&[i[0], i[1], i[2], 0]));
        dy.data[at..][..h].iter().zip(&rows.data[of..][..h]).map(|(x, y)| x * y).sum()
    })
}

/// A product in which rows of experts that were not chosen are zero.
pub(super) fn expert_einsum(spec: &Spec, ins: &[&Tensor], out: &LocalType) -> Tensor {
    let gate = ins[2];
    let product = linear::einsum(spec, &ins[0].to_dense(gate), &ins[1].to_dense(gate), &out.dims);
    product.to_layout(out.layout, gate)
}

fn sum_experts(rows: &Tensor) -> Tensor {
    let mut out = Tensor::from_fn(&[rows.dims[0], rows.dims[1], rows.dims[3]], |_| 0.0);
    let (experts, h) = (rows.dim(2), rows.dim(3));
    for (row, x) in rows.data.chunks_exact(h).enumerate() {
        for (y, x) in out.data[row / experts * h..][..h].iter_mut().zip(x) {
            *y += x;
        }
    }
    out
}

fn softmax(row: &[f64]) -> Vec<f64> {
    let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exp: Vec<f64> = row.iter().map(|x| (x - max).exp()).collect();
    let sum: f64 = exp.iter().sum();
    exp.into_iter().map(|x| x / sum).collect()
}
