//! Parts of one value that are of different blocks ([`dplan_ir::ring`]), joined into the first of them. 16-bit elements are joined in f32 and rounded once.

use half::{bf16, f16};

use super::block::{Block, BlockMut};
use super::float::Float;
use super::vector::vectorized;

/// Elements that parts are made of.
trait Element: Copy {
    type Wide: Float;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
}

macro_rules! element {
    ($t:ident as $wide:ident, $widen:expr, $narrow:expr) => {
        impl Element for $t {
            type Wide = $wide;
            #[inline(always)]
            fn widen(self) -> $wide {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(wide: $wide) -> $t {
                $narrow(wide)
            }
        }
    };
}
element!(f32 as f32, std::convert::identity, std::convert::identity);
element!(f64 as f64, std::convert::identity, std::convert::identity);
element!(bf16 as f32, bf16::to_f32, bf16::from_f32);
element!(f16 as f32, f16::to_f32, f16::from_f32);

/// sum ← sum + part.
///
/// # Panics
/// If they are not floating-point elements of one type.
pub fn sums(part: Block<'_>, sum: BlockMut<'_>) {
    match (part, sum) {
        (Block::F32(x), BlockMut::F32(y)) => add(x, y),
        (Block::F64(x), BlockMut::F64(y)) => add(x, y),
        (Block::Bf16(x), BlockMut::Bf16(y)) => add(x, y),
        (Block::F16(x), BlockMut::F16(y)) => add(x, y),
        (x, y) => panic!("{} joined with {}", y.dtype(), x.dtype()),
    }
}

/// (o, lse) ← (o, lse) and a part: lse = log(exp lse₁ + exp lse₂), o = o₁ · exp(lse₁ − lse) + o₂ · exp(lse₂ − lse). A row that has seen nothing has o = 0, lse = −∞.
///
/// # Panics
/// If they are not floating-point elements, o of one type and lse of that which sums of it have.
pub fn attention([part, part_lse]: [Block<'_>; 2], [o, lse]: [BlockMut<'_>; 2]) {
    match (part, part_lse, o, lse) {
        (Block::F32(x), Block::F32(a), BlockMut::F32(y), BlockMut::F32(b)) => merge(x, a, y, b),
        (Block::F64(x), Block::F64(a), BlockMut::F64(y), BlockMut::F64(b)) => merge(x, a, y, b),
        (Block::Bf16(x), Block::F32(a), BlockMut::Bf16(y), BlockMut::F32(b)) => merge(x, a, y, b),
        (Block::F16(x), Block::F32(a), BlockMut::F16(y), BlockMut::F32(b)) => merge(x, a, y, b),
        (x, a, y, b) => panic!("({}, {}) joined with ({}, {})", y.dtype(), b.dtype(), x.dtype(), a.dtype()),
    }
}

fn add<E: Element>(x: &[E], y: &mut [E]) {
    vectorized(|| y.iter_mut().zip(x).for_each(|(y, x)| *y = E::narrow(y.widen() + x.widen())));
}

fn merge<E: Element>(x: &[E], x_lse: &[E::Wide], y: &mut [E], y_lse: &mut [E::Wide]) {
    let width = y.len() / y_lse.len().max(1);
    if width == 0 {
        return;
    }
    let zero = E::Wide::ZERO;
    for (((x, y), a), b) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).zip(x_lse).zip(y_lse) {
        let top = if *a > *b { *a } else { *b };
        if top.to_f64() == f64::NEG_INFINITY {
            continue;
        }
        let (u, v) = ((*a - top).exp(), (*b - top).exp());
        let sum = u.to_f64() + v.to_f64();
        let (u, v) = (E::Wide::from_f64(u.to_f64() / sum), E::Wide::from_f64(v.to_f64() / sum));
        *b = E::Wide::from_f64(top.to_f64() + sum.ln());
        // What weighs nothing may not be a number of its own.
        let weighed = |weight: E::Wide, value: E| if weight > zero { weight * value.widen() } else { zero };
        vectorized(|| y.iter_mut().zip(x).for_each(|(y, &x)| *y = E::narrow(weighed(v, *y) + weighed(u, x))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_softmax_over_all_is_that_of_its_parts_joined() {
        // Scores of five keys, of which the first two are one part and the rest the other; values of width 2.
        let scores = [0.3, -2.0, 4.0, 1.0, -0.5f64];
        let values: Vec<[f64; 2]> = (0..5).map(|i| [f64::from(i), 1.0 / (1.0 + f64::from(i))]).collect();
        let of = |keys: std::ops::Range<usize>| {
            let sum: f64 = scores[keys.clone()].iter().map(|s| s.exp()).sum();
            let o = [0, 1].map(|e| keys.clone().map(|k| scores[k].exp() / sum * values[k][e]).sum::<f64>());
            (o, sum.ln())
        };
        let ((mut o, lse), (part, part_lse), (whole, whole_lse)) = (of(0..2), of(2..5), of(0..5));
        let mut lse = [lse];
        attention([Block::F64(&part), Block::F64(&[part_lse])], [BlockMut::F64(&mut o), BlockMut::F64(&mut lse)]);
        assert!((lse[0] - whole_lse).abs() < 1e-14 && o.iter().zip(whole).all(|(a, b)| (a - b).abs() < 1e-14), "{o:?} {lse:?}");
    }

    #[test]
    fn nothing_seen_adds_nothing() {
        let nothing = f32::NEG_INFINITY;
        let (mut o, mut lse) = ([2.0f32, 0.0], [1.0f32, nothing]);
        attention([Block::F32(&[0.0, 3.0]), Block::F32(&[nothing, 5.0])], [BlockMut::F32(&mut o), BlockMut::F32(&mut lse)]);
        assert_eq!((o, lse), ([2.0, 3.0], [1.0, 5.0]));
        let (mut o, mut lse) = ([0.0f32], [nothing]);
        attention([Block::F32(&[0.0]), Block::F32(&[nothing])], [BlockMut::F32(&mut o), BlockMut::F32(&mut lse)]);
        assert_eq!((o, lse), ([0.0], [nothing]));
    }

    #[test]
    fn halves_are_added_in_f32() {
        let (part, mut sum) = ([bf16::from_f32(1.0 / 256.0)], [bf16::from_f32(1.0)]);
        sums(Block::Bf16(&part), BlockMut::Bf16(&mut sum));
        assert_eq!(sum[0].to_f32(), 1.0, "a tie goes to the even one");
    }
}
