//! Elementwise ops, and the bias pair: a bias added to every row, and its gradient, the sum over rows.

use dplan_ir::op::Activation;
use dplan_ir::program::Write;

use super::block::{Block, BlockMut};
use super::float::{Float, clear, column_sums, fill};
use super::vector::vectorized;

/// Runs the body once, with the name bound to the function x ↦ (value, slope): each activation gets loops of its own.
macro_rules! with_function {
    ($activation:expr, $t:ident, |$f:ident| $body:expr) => {
        match $activation {
            Activation::Silu => {
                let $f = silu::<$t>;
                $body
            }
            Activation::Gelu => {
                let $f = gelu::<$t>;
                $body
            }
            Activation::GeluTanh => {
                let $f = gelu_tanh::<$t>;
                $body
            }
            Activation::Relu => {
                let $f = relu::<$t>;
                $body
            }
            Activation::QuickGelu => {
                let $f = quick_gelu::<$t>;
                $body
            }
            Activation::Clamp { limit } => {
                let $f = |x: $t| clamp(x, Some(-f64::from(limit)), f64::from(limit));
                $body
            }
            Activation::ClampAbove { limit } => {
                let $f = |x: $t| clamp(x, None, f64::from(limit));
                $body
            }
        }
    };
}

#[derive(Debug)]
pub enum Pointwise {
    Add,
    Sub,
    Neg,
    /// No operand matters.
    Zero,
    /// The bias has `cols` elements.
    AddBias {
        cols: usize,
    },
    /// Rows of `cols` elements are summed.
    SumLeading {
        cols: usize,
    },
    Act(Activation),
    ActGrad(Activation),
    Gated(Activation),
    GatedGrad(Activation),
}

impl Pointwise {
    pub fn run<T: Float>(&self, ins: &[Block<'_>], outs: &mut [BlockMut<'_>], write: Write) {
        vectorized(|| self.loops::<T>(ins, outs, write));
    }

    #[inline(always)]
    fn loops<T: Float>(&self, ins: &[Block<'_>], outs: &mut [BlockMut<'_>], write: Write) {
        let operand = |i: usize| T::of(ins[i]);
        match self {
            Pointwise::Add => map2(operand(0), operand(1), T::of_mut(&mut outs[0]), write, |x, y| x + y),
            Pointwise::Sub => map2(operand(0), operand(1), T::of_mut(&mut outs[0]), write, |x, y| x - y),
            Pointwise::Neg => map(operand(0), T::of_mut(&mut outs[0]), write, |x| -x),
            Pointwise::Zero => clear(T::of_mut(&mut outs[0]), write),
            Pointwise::AddBias { cols } => {
                let (x, bias) = (operand(0), operand(1));
                for (x, out) in x.chunks_exact(*cols).zip(T::of_mut(&mut outs[0]).chunks_exact_mut(*cols)) {
                    map2(x, bias, out, write, |x, b| x + b);
                }
            }
            Pointwise::SumLeading { cols } => {
                let x = operand(0);
                column_sums(x.len() / cols, T::of_mut(&mut outs[0]), write, |_, _| (), |(), row, c| x[row * cols + c].to_f64());
            }
            Pointwise::Act(f) => {
                let (x, out) = (operand(0), T::of_mut(&mut outs[0]));
                with_function!(*f, T, |f| map(x, out, write, |x| f(x).0));
            }
            Pointwise::ActGrad(f) => {
                let (x, dy, out) = (operand(0), operand(1), T::of_mut(&mut outs[0]));
                with_function!(*f, T, |f| map2(x, dy, out, write, |x, dy| dy * f(x).1));
            }
            Pointwise::Gated(f) => {
                let (gate, up, out) = (operand(0), operand(1), T::of_mut(&mut outs[0]));
                with_function!(*f, T, |f| map2(gate, up, out, write, |g, u| f(g).0 * u));
            }
            Pointwise::GatedGrad(f) => with_function!(*f, T, |f| gated_grad::<T>(ins, outs, write, f)),
        }
    }
}

#[inline(always)]
fn map<T: Float>(x: &[T], out: &mut [T], write: Write, f: impl Fn(T) -> T) {
    let x = &x[..out.len()];
    fill(out, write, |i| f(x[i]));
}

#[inline(always)]
fn map2<T: Float>(x: &[T], y: &[T], out: &mut [T], write: Write, f: impl Fn(T, T) -> T) {
    let (x, y) = (&x[..out.len()], &y[..out.len()]);
    fill(out, write, |i| f(x[i], y[i]));
}

/// dgate = dy · up · f′(gate); dup = dy · f(gate).
#[inline(always)]
fn gated_grad<T: Float>(ins: &[Block<'_>], outs: &mut [BlockMut<'_>], write: Write, f: impl Fn(T) -> (T, T)) {
    let (gate, up, dy) = (T::of(ins[0]), T::of(ins[1]), T::of(ins[2]));
    let [dgate, dup] = outs else { unreachable!("two results by the type rule") };
    let (dgate, dup) = (T::of_mut(dgate), T::of_mut(dup));
    // Values and slopes first, on the stack: each loop then writes to one place, which compilers turn into vector code.
    let (mut values, mut slopes) = ([T::ZERO; CHUNK], [T::ZERO; CHUNK]);
    for start in (0..gate.len()).step_by(CHUNK) {
        let at = start..gate.len().min(start + CHUNK);
        for (i, &x) in gate[at.clone()].iter().enumerate() {
            (values[i], slopes[i]) = f(x);
        }
        let (up, dy) = (&up[at.clone()], &dy[at.clone()]);
        fill(&mut dgate[at.clone()], write, |i| dy[i] * up[i] * slopes[i]);
        fill(&mut dup[at], write, |i| dy[i] * values[i]);
    }
}

/// Elements of a gated gradient at a time.
const CHUNK: usize = 64;

/// Value and slope of x · σ(x).
#[inline(always)]
fn silu<T: Float>(x: T) -> (T, T) {
    let s = x.sigmoid();
    (x * s, s * (T::ONE + x * (T::ONE - s)))
}

/// Value and slope of x · Φ(x).
#[inline(always)]
fn gelu<T: Float>(x: T) -> (T, T) {
    let half = T::from_f64(0.5);
    let phi = half * (T::ONE + (x * T::from_f64(std::f64::consts::FRAC_1_SQRT_2)).erf());
    // φ(x) = e^(−x²/2) / √(2π).
    let density = (-(half * x * x)).exp() * T::from_f64(0.398_942_280_401_432_7);
    (x * phi, phi + x * density)
}

/// Value and slope of x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³))).
#[inline(always)]
fn gelu_tanh<T: Float>(x: T) -> (T, T) {
    let (c, a, half) = (T::from_f64(0.797_884_560_802_865_4), T::from_f64(0.044_715), T::from_f64(0.5));
    let three = T::from_f64(3.0);
    let t = (c * (x + a * x * x * x)).tanh();
    (half * x * (T::ONE + t), half * (T::ONE + t) + half * x * (T::ONE - t * t) * c * (T::ONE + three * a * x * x))
}

#[inline(always)]
fn relu<T: Float>(x: T) -> (T, T) {
    if x > T::ZERO { (x, T::ONE) } else { (T::ZERO, T::ZERO) }
}

/// Value and slope of x · σ(1.702 x).
#[inline(always)]
fn quick_gelu<T: Float>(x: T) -> (T, T) {
    let a = T::from_f64(1.702);
    let s = (a * x).sigmoid();
    (x * s, s * (T::ONE + a * x * (T::ONE - s)))
}

/// Value and slope of x held between two limits.
#[inline(always)]
fn clamp<T: Float>(x: T, low: Option<f64>, high: f64) -> (T, T) {
    let high = T::from_f64(high);
    match low.map(T::from_f64) {
        _ if x > high => (high, T::ZERO),
        Some(low) if x < low => (low, T::ZERO),
        _ => (x, T::ONE),
    }
}
