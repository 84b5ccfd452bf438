//! Kernels on flat buffers: what the optimizer and the accumulation of gradients need.

use std::ops::Range;

use dplan_ir::optimizer::{Optimizer, StepScalars, skips};

use super::float::{Float, sum};
use super::vector::vectorized;

/// dst ← dst + src.
pub fn add_into<T: Float>(src: &[T], dst: &mut [T]) {
    vectorized(|| {
        for (d, s) in dst.iter_mut().zip(src) {
            *d += *s;
        }
    });
}

/// Elements whose squares are summed in one go.
const SQUARES: usize = 4096;

/// Σ x², in f64: in blocks of 4096 elements, each in the order of [`sum`], blocks in order.
pub fn square_sum<T: Float>(x: &[T]) -> f64 {
    vectorized(|| x.chunks(SQUARES).map(|x| sum(x.len(), |i| x[i].to_f64() * x[i].to_f64())).sum())
}

/// One step of an optimizer on a flat buffer, of which `stretches` says what weight decay pulls; none, where the gradients' `scale` says so. A moment that it does not have is empty.
pub fn update<T: Float>(
    optimizer: Optimizer,
    stretches: &[(Range<usize>, bool)],
    p: &mut [T],
    g: &[T],
    [m, v]: [&mut [T]; 2],
    scale: f64,
    at: &StepScalars,
) {
    if skips(scale) {
        return;
    }
    for (range, pulled) in stretches {
        let at = if *pulled { *at } else { at.without_decay() };
        let (p, g, m) = (&mut p[range.clone()], &g[range.clone()], &mut m[range.clone()]);
        match optimizer {
            Optimizer::AdamW => vectorized(|| adam(Pull::OfWeight, p, g, m, &mut v[range.clone()], scale, &at)),
            Optimizer::Adam => vectorized(|| adam(Pull::OfGradient, p, g, m, &mut v[range.clone()], scale, &at)),
            Optimizer::Sgd => vectorized(|| sgd(p, g, m, scale, &at)),
        }
    }
}

/// What weight decay is added to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pull {
    OfWeight,
    OfGradient,
}

/// [`dplan_ir::optimizer::adamw`] or [`dplan_ir::optimizer::adam`] on every element, computed in f64.
#[inline(always)]
fn adam<T: Float>(pull: Pull, p: &mut [T], g: &[T], m: &mut [T], v: &mut [T], scale: f64, at: &StepScalars) {
    let h = &at.hyper;
    let t = i32::try_from(at.step).unwrap_or(i32::MAX);
    let (decay, coupled) = match pull {
        Pull::OfWeight => (1.0 - h.lr * h.weight_decay, 0.0),
        Pull::OfGradient => (1.0, h.weight_decay),
    };
    let step = h.lr / (1.0 - h.beta1.powi(t));
    let root = (1.0 - h.beta2.powi(t)).sqrt();
    let (beta1, beta2, eps) = (h.beta1, h.beta2, h.eps);
    let n = p.len();
    let (g, m, v) = (&g[..n], &mut m[..n], &mut v[..n]);
    for i in 0..n {
        let pi = p[i].to_f64();
        let gi = g[i].to_f64() * scale + coupled * pi;
        let mi = beta1 * m[i].to_f64() + (1.0 - beta1) * gi;
        let vi = beta2 * v[i].to_f64() + (1.0 - beta2) * gi * gi;
        let denominator = vi.sqrt() / root + eps;
        p[i] = T::from_f64(pi * decay - step * mi / denominator);
        m[i] = T::from_f64(mi);
        v[i] = T::from_f64(vi);
    }
}

/// [`dplan_ir::optimizer::sgd`] on every element, computed in f64.
#[inline(always)]
fn sgd<T: Float>(p: &mut [T], g: &[T], v: &mut [T], scale: f64, at: &StepScalars) {
    let n = p.len();
    let (g, v) = (&g[..n], &mut v[..n]);
    for i in 0..n {
        let (pi, vi) = dplan_ir::optimizer::sgd(p[i].to_f64(), g[i].to_f64() * scale, v[i].to_f64(), at);
        p[i] = T::from_f64(pi);
        v[i] = T::from_f64(vi);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dplan_ir::optimizer::{self, Hyper};

    #[test]
    fn flat_updates_are_the_scalar_equations_with_decay_where_it_pulls() {
        let hyper = Hyper { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, momentum: 0.5, clip: f64::INFINITY };
        for optimizer in Optimizer::ALL {
            let (mut p, mut m, mut v) = (vec![0.3, -1.5, 2.0], vec![0.0; 3], vec![0.0; 3]);
            let (mut q, g) = ([(0.3, [0.0; 2]), (-1.5, [0.0; 2]), (2.0, [0.0; 2])], [0.7, -0.1, 0.0]);
            for step in 1..=5 {
                let at = StepScalars::new(hyper, step, 1.0);
                update(optimizer, &[(0..1, false), (1..3, true)], &mut p, &g, [&mut m, &mut v], 0.5, &at);
                for (i, (q, g)) in q.iter_mut().zip(g).enumerate() {
                    let at = if i == 0 { at.without_decay() } else { at };
                    *q = optimizer::update(optimizer, q.0, g * 0.5, q.1, &at);
                }
            }
            for i in 0..3 {
                assert!((p[i] - q[i].0).abs() < 1e-15 && (m[i] - q[i].1[0]).abs() < 1e-16 && (v[i] - q[i].1[1]).abs() < 1e-16, "{optimizer:?} {i}");
            }
        }
    }

    #[test]
    fn squares_of_a_long_f32_vector_lose_nothing() {
        let x = vec![0.1f32; 1_000_003];
        let want = 1_000_003.0 * f64::from(0.1f32) * f64::from(0.1f32);
        assert!((square_sum(&x) - want).abs() < 1e-9 * want);
    }
}
