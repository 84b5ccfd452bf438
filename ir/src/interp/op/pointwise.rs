//! Activation functions and their derivatives; dropout.

use crate::extent::OpContext;
use crate::interp::Tensor;
use crate::op::Activation;
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, PI};

/// Dropout of a block of `x[b,s,…]`.
pub(super) fn dropout(ctx: &OpContext, rate: f64, x: &Tensor) -> Tensor {
    let draws = ctx.draws.of_node(ctx.node, rate);
    // The one operand's factors are its dims, in order.
    let extents: Vec<_> = ctx.extents.iter().map(|&(_, e)| e).collect();
    Tensor::from_fn(&x.dims, |index| {
        let at = |dim: usize| extents[dim].start + index[dim];
        let position = ctx.order.position(at(1), extents[1].logical);
        let element = (2..index.len()).fold(position, |element, dim| element * extents[dim].logical + at(dim));
        x.data[x.at(index)] * draws.factor(at(0), element)
    })
}

/// f(x).
pub(super) fn value(f: Activation, x: f64) -> f64 {
    match f {
        Activation::Silu => x * sigmoid(x),
        Activation::Gelu => x * normal_cdf(x),
        Activation::GeluTanh => 0.5 * x * (1.0 + tanh_inner(x).tanh()),
        Activation::Relu => x.max(0.0),
        Activation::QuickGelu => x * sigmoid(QUICK * x),
        Activation::Clamp { limit } => x.clamp(-f64::from(limit), f64::from(limit)),
        Activation::ClampAbove { limit } => x.min(f64::from(limit)),
    }
}

/// f′(x).
pub(super) fn slope(f: Activation, x: f64) -> f64 {
    match f {
        Activation::Silu => sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x))),
        Activation::Gelu => normal_cdf(x) + x * (-0.5 * x * x).exp() / (2.0 * PI).sqrt(),
        Activation::GeluTanh => {
            let t = tanh_inner(x).tanh();
            let inner = (2.0 / PI).sqrt() * (1.0 + 3.0 * TANH_CUBIC * x * x);
            0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
        }
        Activation::Relu => f64::from(x > 0.0),
        Activation::QuickGelu => {
            let s = sigmoid(QUICK * x);
            s * (1.0 + QUICK * x * (1.0 - s))
        }
        Activation::Clamp { limit } => f64::from(x.abs() <= f64::from(limit)),
        Activation::ClampAbove { limit } => f64::from(x <= f64::from(limit)),
    }
}

const QUICK: f64 = 1.702;
const TANH_CUBIC: f64 = 0.044715;

fn tanh_inner(x: f64) -> f64 {
    (2.0 / PI).sqrt() * (x + TANH_CUBIC * x * x * x)
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn normal_cdf(x: f64) -> f64 {
    0.5 * (1.0 + erf(x * FRAC_1_SQRT_2))
}

/// erf x = 2/√π · e^(−x²) · Σ 2ⁿ x^(2n+1) / (1·3·…·(2n+1)): every term has the same sign, so nothing cancels. Beyond 6 it is 1 in f64.
fn erf(x: f64) -> f64 {
    if x.abs() >= 6.0 {
        return x.signum();
    }
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while term.abs() > sum.abs() * 1e-17 {
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
    }
    FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erf_has_the_published_values() {
        // Abramowitz and Stegun, table 7.1 (and DLMF 7.24), to all digits given there.
        for (x, y) in [(0.0, 0.0), (0.5, 0.520_499_877_8), (1.0, 0.842_700_792_9), (-1.5, -0.966_105_146_5), (2.0, 0.995_322_265_0)] {
            assert!((erf(x) - y).abs() < 1e-10, "erf {x} = {}", erf(x));
        }
        assert!((erf(3.0) - 0.999_977_909_503_001_4).abs() < 1e-15);
    }
}
