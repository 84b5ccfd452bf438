//! Mixture of experts: the gate chooses experts of a token, and with them the rows that top-k values store.

use super::linear;
use crate::extent::OpContext;
use crate::interp::Tensor;
use crate::op::{Renormalize, Spec};
use crate::sharding::LocalType;

/// Softmax over experts, the `k` largest kept (of equals the lowest index).
pub(super) fn top_k_gate(k: u64, renormalize: Renormalize, ctx: &OpContext, logits: &Tensor) -> Tensor {
    let experts = logits.dim(2);
    let mut gate = logits.map(|_| 0.0);
    for (row, out) in logits.data.chunks_exact(experts).zip(gate.data.chunks_exact_mut(experts)) {
        let p = softmax(&row[..ctx.extent('e').valid() as usize]);
        let mut order: Vec<usize> = (0..p.len()).collect();
        order.sort_by(|&i, &j| row[j].total_cmp(&row[i]).then(i.cmp(&j)));
        order.truncate(k as usize);
        let sum = match renormalize {
            Renormalize::Yes => order.iter().map(|&e| p[e]).sum(),
            Renormalize::No => 1.0,
        };
        for e in order {
            out[e] = p[e] / sum;
        }
    }
    gate
}

/// Renormalised, the gate is a softmax over the chosen experts: dlogits = gate · (dgate − ⟨gate, dgate⟩). Otherwise it is the chosen part of the softmax p over
/// all of them: dlogits = gate · dgate − p · ⟨gate, dgate⟩.
pub(super) fn top_k_gate_grad(renormalize: Renormalize, ctx: &OpContext, ins: &[&Tensor]) -> Tensor {
    let (logits, gate, dgate) = (ins[0], ins[1], ins[2]);
    let experts = logits.dim(2);
    let mut out = logits.map(|_| 0.0);
    for (token, dlogits) in out.data.chunks_exact_mut(experts).enumerate() {
        let row = |t: &Tensor| t.data[token * experts..][..ctx.extent('e').valid() as usize].to_vec();
        let (gate, dgate) = (row(gate), row(dgate));
        let dot: f64 = gate.iter().zip(&dgate).map(|(g, d)| g * d).sum();
        let over = match renormalize {
            Renormalize::Yes => gate.clone(),
            Renormalize::No => softmax(&row(logits)),
        };
        for e in 0..gate.len() {
            dlogits[e] = gate[e] * dgate[e] - over[e] * dot;
        }
    }
    out
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
