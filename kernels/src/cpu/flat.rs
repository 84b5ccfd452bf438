//! Kernels on flat buffers: what the optimizer and the accumulation of gradients need.

use std::ops::Range;

use dplan_ir::dtype::DType;
use dplan_ir::optimizer::{Optimizer, StepScalars, skips};
use dplan_ir::program::Write;
use half::bf16;

use super::float::{Float, fill, sum};
use super::vector::vectorized;

/// dst ← dst + src.
pub fn add_into<T: Float>(src: &[T], dst: &mut [T]) {
    vectorized(|| {
        for (d, s) in dst.iter_mut().zip(src) {
            *d += *s;
        }
    });
}

/// dst ← src, rounded to the nearest, of two to the even one.
pub fn cast<T: Float>(src: &[T], dst: &mut [bf16]) {
    for (d, s) in dst.iter_mut().zip(src) {
        // Rounded once: a conversion by way of f32 would round an f64 twice.
        *d = bf16::from_f64(DType::Bf16.round(s.to_f64()));
    }
}

/// dst ← Σ over stretches of `src` as long as it, in their order, starting from the first.
pub fn sum_shares<S: Copy + Into<f64>, T: Float>(src: &[S], dst: &mut [T]) {
    for (number, share) in src.chunks_exact(dst.len().max(1)).enumerate() {
        let write = if number == 0 { Write::Set } else { Write::Add };
        vectorized(|| fill(dst, write, |i| T::from_f64(share[i].into())));
    }
}

/// Elements whose squares are summed in one go.
const SQUARES: usize = 4096;

/// Σ x², in f64: in blocks of 4096 elements, each in the order of [`sum`], blocks in order.
pub fn square_sum<T: Float>(x: &[T]) -> f64 {
    vectorized(|| x.chunks(SQUARES).map(|x| sum(x.len(), |i| x[i].to_f64() * x[i].to_f64())).sum())
}

/// What each part of a flat buffer adds to the sums of its trust ratio ([`dplan_ir::optimizer::trust_terms`]); `add` is told of the part by number.
pub fn trust_sums<T: Float>(
    stretches: &[(Range<usize>, bool)],
    p: &[T],
    g: &[T],
    [m, v]: [&[T]; 2],
    scale: f64,
    at: &StepScalars,
    mut add: impl FnMut(usize, [f64; 2]),
) {
    for (number, (range, pulled)) in stretches.iter().enumerate() {
        let towards = Towards::new(if *pulled { *at } else { at.without_decay() });
        let direction = |i: usize| towards.of(p[i].to_f64(), g[i].to_f64() * scale, m[i].to_f64(), v[i].to_f64()).0;
        let (start, n) = (range.start, range.len());
        let weight = vectorized(|| sum(n, |i| p[start + i].to_f64() * p[start + i].to_f64()));
        add(number, [weight, vectorized(|| sum(n, |i| direction(start + i) * direction(start + i)))]);
    }
}

/// One step of an optimizer on a flat buffer, of which `stretches` says what weight decay pulls; none, where the gradients' `scale` says so. A moment that it does not have is empty.
/// `trust` is the ratio of each stretch, for an optimizer that has them: its stretches are parameters, or parts of them.
#[allow(clippy::too_many_arguments)]
pub fn update<T: Float>(
    optimizer: Optimizer,
    stretches: &[(Range<usize>, bool)],
    p: &mut [T],
    g: &[T],
    [m, v]: [&mut [T]; 2],
    scale: f64,
    at: &StepScalars,
    trust: impl Fn(usize) -> f64,
) {
    if skips(scale) {
        return;
    }
    for (number, (range, pulled)) in stretches.iter().enumerate() {
        let at = if *pulled { *at } else { at.without_decay() };
        let (p, g, m) = (&mut p[range.clone()], &g[range.clone()], &mut m[range.clone()]);
        match optimizer {
            Optimizer::AdamW => vectorized(|| adam(Pull::OfWeight, p, g, m, &mut v[range.clone()], scale, &at)),
            Optimizer::Adam => vectorized(|| adam(Pull::OfGradient, p, g, m, &mut v[range.clone()], scale, &at)),
            Optimizer::Sgd => vectorized(|| sgd(p, g, m, scale, &at)),
            Optimizer::Lamb => vectorized(|| lamb(p, g, m, &mut v[range.clone()], scale, &at, trust(number))),
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

/// [`dplan_ir::optimizer::lamb_direction`] with what is the same for all elements computed once.
struct Towards {
    at: StepScalars,
    bias: f64,
    root: f64,
}

impl Towards {
    fn new(at: StepScalars) -> Towards {
        let t = i32::try_from(at.step).unwrap_or(i32::MAX);
        Towards { at, bias: 1.0 - at.hyper.beta1.powi(t), root: (1.0 - at.hyper.beta2.powi(t)).sqrt() }
    }
    /// The direction and the new moments.
    #[inline(always)]
    fn of(&self, p: f64, g: f64, m: f64, v: f64) -> (f64, f64, f64) {
        let h = &self.at.hyper;
        let m = h.beta1 * m + (1.0 - h.beta1) * g;
        let v = h.beta2 * v + (1.0 - h.beta2) * g * g;
        (m / self.bias / (v.sqrt() / self.root + h.eps) + h.weight_decay * p, m, v)
    }
}

/// LAMB's step on every element of a parameter, computed in f64.
#[inline(always)]
fn lamb<T: Float>(p: &mut [T], g: &[T], m: &mut [T], v: &mut [T], scale: f64, at: &StepScalars, trust: f64) {
    let towards = Towards::new(*at);
    let step = at.hyper.lr * trust;
    let n = p.len();
    let (g, m, v) = (&g[..n], &mut m[..n], &mut v[..n]);
    for i in 0..n {
        let pi = p[i].to_f64();
        let (u, mi, vi) = towards.of(pi, g[i].to_f64() * scale, m[i].to_f64(), v[i].to_f64());
        p[i] = T::from_f64(pi - step * u);
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
                let mut ratios = [1.0; 2];
                if optimizer.trusts() {
                    let stretches = [(0..1, false), (1..3, true)];
                    trust_sums(&stretches, &p, &g, [&m, &v], 0.5, &at, |number, sums| ratios[number] = optimizer::trust_ratio(sums));
                }
                update(optimizer, &[(0..1, false), (1..3, true)], &mut p, &g, [&mut m, &mut v], 0.5, &at, |number| ratios[number]);
                let terms = |i: usize, q: &[(f64, [f64; 2]); 3]| {
                    optimizer::trust_terms(q[i].0, g[i] * 0.5, q[i].1, &if i == 0 { at.without_decay() } else { at })
                };
                let (first, second, third) = (terms(0, &q), terms(1, &q), terms(2, &q));
                let ratio = [optimizer::trust_ratio(first), optimizer::trust_ratio([second[0] + third[0], second[1] + third[1]])];
                for (i, (q, g)) in q.iter_mut().zip(g).enumerate() {
                    let at = if i == 0 { at.without_decay() } else { at };
                    *q = optimizer::update(optimizer, q.0, g * 0.5, q.1, &at, if optimizer.trusts() { ratio[i.min(1)] } else { 1.0 });
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
