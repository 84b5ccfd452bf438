//! Element types kernels compute in, and sums with a fixed order.

use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

use dplan_ir::program::Write;

use super::block::{Block, BlockMut};

/// f32 or f64.
pub trait Float:
    Copy
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + Send
    + Sync
    + std::fmt::Debug
    + 'static
{
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;
    fn of(block: Block<'_>) -> &[Self];
    fn of_mut<'a>(block: &'a mut BlockMut<'_>) -> &'a mut [Self];
    fn from_f64(x: f64) -> Self;
    fn to_f64(self) -> f64;
    /// Bits of [`Float::magnitude`].
    const MAGNITUDE: u32;
    /// A number that rises with what is without its sign; what is no number comes behind all that are.
    fn magnitude(self) -> u64;
    /// A place among elements, in the bits of one. It is moved only.
    fn of_place(place: usize) -> Self;
    fn place(self) -> usize;
    fn sqrt(self) -> Self;
    /// eˣ to about one unit in the last place, in arithmetic a compiler turns into vector instructions. Results below the least normal number are 0.
    fn exp(self) -> Self;
    fn erf(self) -> Self;

    fn sigmoid(self) -> Self {
        Self::ONE / (Self::ONE + (-self).exp())
    }
    fn tanh(self) -> Self {
        let two = Self::ONE + Self::ONE;
        Self::ONE - two / (Self::ONE + (two * self).exp())
    }
}

macro_rules! float {
    ($t:ident, $variant:ident, $bits:ident, $mantissa:expr, $low:expr, $high:expr, $ln2_hi:expr, $ln2_lo:expr, $erf:path, $terms:expr) => {
        impl Float for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = $t::NEG_INFINITY;
            #[inline(always)]
            fn of(block: Block<'_>) -> &[Self] {
                match block {
                    Block::$variant(s) => s,
                    other => panic!("{} where {} was expected", other.dtype(), stringify!($t)),
                }
            }
            #[inline(always)]
            fn of_mut<'a>(block: &'a mut BlockMut<'_>) -> &'a mut [Self] {
                match block {
                    BlockMut::$variant(s) => s,
                    other => panic!("{} where {} was expected", other.dtype(), stringify!($t)),
                }
            }
            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                x as $t
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            const MAGNITUDE: u32 = $bits::BITS - 1;
            #[inline(always)]
            fn magnitude(self) -> u64 {
                #[allow(clippy::unnecessary_cast, reason = "f64 has 64 bits already")]
                (self.abs().to_bits() as u64)
            }
            #[inline(always)]
            fn of_place(place: usize) -> Self {
                $t::from_bits(place as $bits)
            }
            #[inline(always)]
            fn place(self) -> usize {
                self.to_bits() as usize
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                $t::sqrt(self)
            }
            // eˣ = 2ⁿ · eʳ with n = round(x / ln 2), |r| ≤ ln 2 / 2, and eʳ by its Taylor series.
            #[inline(always)]
            fn exp(self) -> Self {
                const LOW: $t = $low;
                const HIGH: $t = $high;
                // Adding 1.5 · 2^mantissa rounds to an integer and leaves it in the low bits.
                const ROUND: $t = 1.5 * (1u64 << $mantissa) as $t;
                let x = if self < LOW { LOW } else { self };
                let x = if x > HIGH { HIGH } else { x };
                let shifted = x * std::$t::consts::LOG2_E + ROUND;
                let n = shifted - ROUND;
                let r = (x - n * $ln2_hi) - n * $ln2_lo;
                let mut p: $t = 0.0;
                for term in $terms {
                    p = p * r + (1.0 / term as $t);
                }
                // 2ⁿ as 2 · 2ⁿ⁻¹, since 2¹²⁸ has no f32.
                let half = $t::from_bits(shifted.to_bits().wrapping_sub(1).wrapping_shl($mantissa).wrapping_add($t::to_bits(1.0)));
                if self < LOW { 0.0 } else { p * half * 2.0 }
            }
            #[inline]
            fn erf(self) -> Self {
                $erf(self)
            }
        }
    };
}

float!(f32, F32, u32, 23, -86.5, 89.0, 0.693_359_4, -2.121_944_4e-4, libm::erff, [5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0]);
float!(
    f64,
    F64,
    u64,
    52,
    -707.5,
    710.0,
    6.931_471_803_691_238e-1,
    1.908_214_929_270_587_7e-10,
    libm::erf,
    [6227020800.0, 479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0]
);

/// Sets or adds one element.
#[inline(always)]
pub fn put<T: Float>(dst: &mut T, value: T, write: Write) {
    *dst = match write {
        Write::Set => value,
        Write::Add => *dst + value,
    };
}

/// dst ← f(i) or dst + f(i), for each element.
#[inline(always)]
pub fn fill<T: Float>(dst: &mut [T], write: Write, f: impl Fn(usize) -> T) {
    match write {
        // Loops of their own, no `for_each`: what is inlined becomes vector code of the caller.
        Write::Set => {
            for (i, d) in dst.iter_mut().enumerate() {
                *d = f(i);
            }
        }
        Write::Add => {
            for (i, d) in dst.iter_mut().enumerate() {
                *d += f(i);
            }
        }
    }
}

/// Zeroes what is about to be accumulated into, unless it is added to.
pub fn clear<T: Float>(dst: &mut [T], write: Write) {
    if write == Write::Set {
        dst.fill(T::ZERO);
    }
}

const LANES: usize = 8;

/// Σ f(i) for i < n in f64: lane j sums the i ≡ j (mod 8) in order, then the lanes are summed in order, then the rest.
#[inline(always)]
pub fn sum(n: usize, f: impl Fn(usize) -> f64) -> f64 {
    let mut lanes = [0.0; LANES];
    let whole = n / LANES * LANES;
    let mut i = 0;
    while i < whole {
        for (j, lane) in lanes.iter_mut().enumerate() {
            *lane += f(i + j);
        }
        i += LANES;
    }
    let rest: f64 = (whole..n).map(f).sum();
    lanes.iter().sum::<f64>() + rest
}

/// Σ x·y in f64, in the order of [`sum`].
#[inline(always)]
pub fn dot<T: Float>(x: &[T], y: &[T]) -> f64 {
    let (n, y) = (x.len(), &y[..x.len()]);
    sum(n, |i| x[i].to_f64() * y[i].to_f64())
}

/// The largest element, −∞ of none; NaN counts as none.
#[inline(always)]
pub fn max<T: Float>(x: &[T]) -> T {
    let larger = |a: T, b: T| if b > a { b } else { a };
    let mut lanes = [T::NEG_INFINITY; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &v) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, v);
        }
    }
    lanes.iter().chain(rest).fold(T::NEG_INFINITY, |a, &b| larger(a, b))
}

/// Elements whose exponentials are computed before any is summed, so that both loops are vector loops.
pub const EXP_CHUNK: usize = 64;

/// Σ exp(x − shift) in f64: chunks of [`EXP_CHUNK`] elements, each in the order of [`sum`], chunks in order.
#[inline(always)]
pub fn exp_sum<T: Float>(x: &[T], shift: T) -> f64 {
    let mut exps = [T::ZERO; EXP_CHUNK];
    let mut total = 0.0;
    for chunk in x.chunks(EXP_CHUNK) {
        let exps = &mut exps[..chunk.len()];
        fill(exps, Write::Set, |i| (chunk[i] - shift).exp());
        total += sum(exps.len(), |i| exps[i].to_f64());
    }
    total
}

/// Rows of a block of [`column_sums`].
pub const SUM_ROWS: usize = 64;
const SUM_COLUMNS: usize = 64;

/// `dst[c] ← (dst[c] +) Σ over rows of term(row, c)`: blocks of [`SUM_ROWS`] rows are summed in f64 in row order, and added to `dst` in block order.
/// `block(first, n)` is told which rows come next and returns what `term` may want to know about them.
#[inline(always)]
pub fn column_sums<T: Float, B>(rows: usize, dst: &mut [T], write: Write, block: impl Fn(usize, usize) -> B, term: impl Fn(&B, usize, usize) -> f64) {
    clear(dst, write);
    let cols = dst.len();
    for first in (0..rows).step_by(SUM_ROWS) {
        let n = SUM_ROWS.min(rows - first);
        let facts = block(first, n);
        for c0 in (0..cols).step_by(SUM_COLUMNS) {
            let width = SUM_COLUMNS.min(cols - c0);
            let mut acc = [0.0f64; SUM_COLUMNS];
            for row in first..first + n {
                for (c, a) in acc[..width].iter_mut().enumerate() {
                    *a += term(&facts, row, c0 + c);
                }
            }
            for (d, a) in dst[c0..c0 + width].iter_mut().zip(&acc) {
                *d += T::from_f64(*a);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn max_finds_the_largest_wherever_it_is() {
        for n in 1..40 {
            for at in 0..n {
                let x: Vec<f32> = (0..n).map(|i| if i == at { -1.0 } else { -2.0 - i as f32 }).collect();
                assert_eq!(max(&x), -1.0, "{at} of {n}");
            }
        }
        assert_eq!(max::<f64>(&[]), f64::NEG_INFINITY);
    }

    #[test]
    fn exp_is_within_two_units_of_the_last_place() {
        for i in -100_000..100_000 {
            let x = f64::from(i) * 7.1e-3;
            let (got, want) = (Float::exp(x), f64::exp(x));
            assert!((got - want).abs() <= want * 4.5e-16 || (x < -707.4 && got == 0.0) || got == want, "exp({x}) = {got}, not {want}");
            let x = x as f32 * 0.125;
            let (got, want) = (Float::exp(x), f64::exp(f64::from(x)));
            assert!(
                (f64::from(got) - want).abs() <= want * 2.4e-7 || want > f64::from(f32::MAX) || (x < -86.4 && got == 0.0),
                "exp({x}) = {got}, not {want}"
            );
        }
        assert_eq!(Float::exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(Float::exp(f64::NEG_INFINITY), 0.0);
        assert!(Float::exp(f32::NAN).is_nan() && Float::exp(f64::NAN).is_nan());
        assert!(Float::exp(88.8f32).is_infinite() && Float::exp(709.9f64).is_infinite());
    }
}
