//! Elementwise ops, and the bias pair: a bias added to every row, and its gradient, the sum over rows.

use dplan_ir::op::Activation;
use dplan_ir::program::Write;

use super::block::{Block, BlockMut};
use super::float::{Float, column_sums, fill};

#[derive(Debug)]
pub enum Pointwise {
    Add,
    Sub,
    Neg,
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
        let operand = |i: usize| T::of(ins[i]);
        match self {
            Pointwise::Add => map2(operand(0), operand(1), T::of_mut(&mut outs[0]), write, |x, y| x + y),
            Pointwise::Sub => map2(operand(0), operand(1), T::of_mut(&mut outs[0]), write, |x, y| x - y),
            Pointwise::Neg => map(operand(0), T::of_mut(&mut outs[0]), write, |x| -x),
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
                match f {
                    Activation::Silu => map(x, out, write, |x| silu(x).0),
                    Activation::Gelu => map(x, out, write, |x| gelu(x).0),
                    Activation::GeluTanh => map(x, out, write, |x| gelu_tanh(x).0),
                    Activation::Relu => map(x, out, write, |x| relu(x).0),
                }
            }
            Pointwise::ActGrad(f) => {
                let (x, dy, out) = (operand(0), operand(1), T::of_mut(&mut outs[0]));
                match f {
                    Activation::Silu => map2(x, dy, out, write, |x, dy| dy * silu(x).1),
                    Activation::Gelu => map2(x, dy, out, write, |x, dy| dy * gelu(x).1),
                    Activation::GeluTanh => map2(x, dy, out, write, |x, dy| dy * gelu_tanh(x).1),
                    Activation::Relu => map2(x, dy, out, write, |x, dy| dy * relu(x).1),
                }
            }
            Pointwise::Gated(f) => {
                let (gate, up, out) = (operand(0), operand(1), T::of_mut(&mut outs[0]));
                match f {
                    Activation::Silu => map2(gate, up, out, write, |g, u| silu(g).0 * u),
                    Activation::Gelu => map2(gate, up, out, write, |g, u| gelu(g).0 * u),
                    Activation::GeluTanh => map2(gate, up, out, write, |g, u| gelu_tanh(g).0 * u),
                    Activation::Relu => map2(gate, up, out, write, |g, u| relu(g).0 * u),
                }
            }
            Pointwise::GatedGrad(f) => match f {
                Activation::Silu => gated_grad::<T>(ins, outs, write, silu),
                Activation::Gelu => gated_grad::<T>(ins, outs, write, gelu),
                Activation::GeluTanh => gated_grad::<T>(ins, outs, write, gelu_tanh),
                Activation::Relu => gated_grad::<T>(ins, outs, write, relu),
            },
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
