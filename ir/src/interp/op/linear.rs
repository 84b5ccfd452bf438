//! Products and sums.

use crate::interp::Tensor;
use crate::interp::tensor::advance;
use crate::op::Spec;
use crate::sharding::LocalType;

/// The product of two dense blocks by a spec, with result dims `out`.
///
/// Both operands are brought into the order (common, own, summed) of their letters, so that the product is a plain triple loop.
pub(super) fn einsum(spec: &Spec, left: &Tensor, right: &Tensor, out: &[u64]) -> Tensor {
    let all = letters(&spec.left, left).into_iter().chain(letters(&spec.right, right));
    let mut size: Vec<(char, u64)> = Vec::new();
    for (letter, n) in all {
        if size.iter().all(|(l, _)| *l != letter) {
            size.push((letter, n));
        }
    }
    let with = |in_left: bool, in_right: bool, in_out: bool| -> Vec<(char, u64)> {
        let has = |s: &str, l| s.contains(l);
        size.iter()
            .copied()
            .filter(|&(l, _)| has(&spec.out, l) == in_out && has(&spec.left, l) == in_left && has(&spec.right, l) == in_right)
            .collect()
    };
    let common = with(true, true, true);
    let (own_left, own_right) = (with(true, false, true), with(false, true, true));
    let summed: Vec<(char, u64)> = size.iter().copied().filter(|&(l, _)| !spec.out.contains(l)).collect();

    let a = gather(&spec.left, left, &[&common, &own_left, &summed]);
    let b = gather(&spec.right, right, &[&common, &summed, &own_right]);
    let count = |group: &[(char, u64)]| group.iter().map(|&(_, n)| n).product::<u64>() as usize;
    let (batch, m, k, n) = (count(&common), count(&own_left), count(&summed), count(&own_right));
    let mut c = vec![0.0; batch * m * n];
    for (at, row) in c.chunks_exact_mut(n.max(1)).enumerate() {
        for (p, &x) in a[at * k..][..k].iter().enumerate() {
            for (y, &z) in row.iter_mut().zip(&b[(at / m * k + p) * n..][..n]) {
                *y += x * z;
            }
        }
    }
    // Read in the order of the result's letters.
    let order: Vec<(char, u64)> = [common, own_left, own_right].concat();
    let from: String = order.iter().map(|&(l, _)| l).collect();
    let product = Tensor::dense(&order.iter().map(|&(_, n)| n).collect::<Vec<_>>(), c);
    let to: Vec<(char, u64)> = spec.out.chars().zip(out.iter().copied()).collect();
    Tensor::dense(out, gather(&from, &product, &[&to]))
}

/// x + b, b repeated over the leading dims.
pub(super) fn add_bias(x: &Tensor, bias: &Tensor) -> Tensor {
    Tensor { data: x.data.iter().enumerate().map(|(i, &x)| x + bias.data[i % bias.data.len()]).collect(), ..x.clone() }
}

pub(super) fn sum_leading(x: &Tensor, out: &LocalType) -> Tensor {
    let mut sum = Tensor::zeros(out);
    let n = sum.data.len();
    for (i, &x) in x.data.iter().enumerate() {
        sum.data[i % n] += x;
    }
    sum
}

fn letters(spec: &str, x: &Tensor) -> Vec<(char, u64)> {
    spec.chars().zip(x.dims.iter().copied()).collect()
}

/// Elements of `x`, whose dims are spelled `spec`, in row-major order of the groups' letters; letters that `x` lacks repeat it.
fn gather(spec: &str, x: &Tensor, groups: &[&[(char, u64)]]) -> Vec<f64> {
    let order: Vec<(char, u64)> = groups.concat();
    let dims: Vec<u64> = order.iter().map(|&(_, n)| n).collect();
    let strides: Vec<u64> = order.iter().map(|&(l, _)| spec.chars().position(|s| s == l).map_or(0, |at| x.dims[at + 1..].iter().product())).collect();
    let mut index = vec![0; dims.len()];
    (0..dims.iter().product::<u64>())
        .map(|_| {
            let at: u64 = index.iter().zip(&strides).map(|(i, s)| i * s).sum();
            advance(&mut index, &dims);
            x.data[at as usize]
        })
        .collect()
}
