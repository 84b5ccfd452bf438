//! Normalisation over the last dim, or over the last dims that the weight has.

use crate::interp::Tensor;
use crate::sharding::LocalType;

/// y = x · r · w, with r = 1/√(mean(x²) + ε).
pub(super) fn rms(x: &Tensor, w: &Tensor, eps: f64) -> Tensor {
    rows(x, w.data.len(), None, |x, _, y| {
        let r = inv_rms(x, eps);
        for i in 0..x.len() {
            y[i] = x[i] * r * w.data[i];
        }
    })
}

/// dx = r · (w·dy) − x · r³ · mean(w·dy·x).
pub(super) fn rms_grad_input(x: &Tensor, w: &Tensor, dy: &Tensor, eps: f64) -> Tensor {
    rows(x, w.data.len(), Some(dy), |x, dy, dx| {
        let r = inv_rms(x, eps);
        let dot = mean(x.len(), |i| w.data[i] * dy[i] * x[i]);
        for i in 0..x.len() {
            dx[i] = r * w.data[i] * dy[i] - x[i] * r * r * r * dot;
        }
    })
}

/// dw = Σ dy · x · r.
pub(super) fn rms_grad_weight(x: &Tensor, dy: &Tensor, eps: f64, out: &LocalType) -> Tensor {
    let width = out.elems() as usize;
    let mut dw = vec![0.0; width];
    for (x, dy) in x.data.chunks_exact(width).zip(dy.data.chunks_exact(width)) {
        let r = inv_rms(x, eps);
        for i in 0..x.len() {
            dw[i] += dy[i] * x[i] * r;
        }
    }
    Tensor::dense(&out.dims, dw)
}

/// y = x̂ · w + bias, with x̂ = (x − mean) / √(var + ε).
pub(super) fn layer(x: &Tensor, w: &Tensor, bias: &Tensor, eps: f64) -> Tensor {
    rows(x, width(x), None, |x, _, y| {
        let (mean, r) = mean_and_inv_std(x, eps);
        for i in 0..x.len() {
            y[i] = (x[i] - mean) * r * w.data[i] + bias.data[i];
        }
    })
}

/// dx = r · (w·dy − mean(w·dy) − x̂ · mean(w·dy·x̂)).
pub(super) fn layer_grad_input(x: &Tensor, w: &Tensor, dy: &Tensor, eps: f64) -> Tensor {
    rows(x, width(x), Some(dy), |x, dy, dx| {
        let (mu, r) = mean_and_inv_std(x, eps);
        let hat = |i: usize| (x[i] - mu) * r;
        let sum = mean(x.len(), |i| w.data[i] * dy[i]);
        let dot = mean(x.len(), |i| w.data[i] * dy[i] * hat(i));
        for i in 0..x.len() {
            dx[i] = r * (w.data[i] * dy[i] - sum - hat(i) * dot);
        }
    })
}

/// dw = Σ dy · x̂, dbias = Σ dy.
pub(super) fn layer_grad_weight(x: &Tensor, dy: &Tensor, eps: f64) -> Vec<Tensor> {
    let (mut dw, mut dbias) = (vec![0.0; width(x)], vec![0.0; width(x)]);
    for (x, dy) in x.data.chunks_exact(width(x)).zip(dy.data.chunks_exact(width(x))) {
        let (mean, r) = mean_and_inv_std(x, eps);
        for i in 0..x.len() {
            dw[i] += dy[i] * (x[i] - mean) * r;
            dbias[i] += dy[i];
        }
    }
    [dw, dbias].into_iter().map(|d| Tensor::dense(&[d.len() as u64], d)).collect()
}

/// Calls `f(row of x, row of dy, row of the result)` for every row of `n` elements; without `dy` its row is empty.
fn rows(x: &Tensor, n: usize, dy: Option<&Tensor>, f: impl Fn(&[f64], &[f64], &mut [f64])) -> Tensor {
    let mut out = vec![0.0; x.data.len()];
    for (at, (x, y)) in x.data.chunks_exact(n).zip(out.chunks_exact_mut(n)).enumerate() {
        f(x, dy.map_or(&[], |dy| &dy.data[at * n..][..n]), y);
    }
    Tensor::dense(&x.dims, out)
}

fn width(x: &Tensor) -> usize {
    x.dims.last().map_or(1, |&n| n as usize)
}

fn mean(n: usize, f: impl Fn(usize) -> f64) -> f64 {
    (0..n).map(f).sum::<f64>() / n as f64
}

fn inv_rms(x: &[f64], eps: f64) -> f64 {
    1.0 / (mean(x.len(), |i| x[i] * x[i]) + eps).sqrt()
}

fn mean_and_inv_std(x: &[f64], eps: f64) -> (f64, f64) {
    let mu = mean(x.len(), |i| x[i]);
    (mu, 1.0 / (mean(x.len(), |i| (x[i] - mu) * (x[i] - mu)) + eps).sqrt())
}
