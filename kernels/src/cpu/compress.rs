//! The largest elements of gradients, as pairs of value and place, and their sums.
//!
//! Pairs are so many values and then as many places, each place in the bits of one element. Which elements are largest is found without memory of its own: their
//! magnitudes' bits are looked at from the highest on, eleven at a time, among those elements that have so far what the last one to be kept has.

use super::float::Float;

/// Bits of a magnitude that one look counts.
const LOOK: u32 = 11;

/// Some elements by their magnitudes: all above the least, and the first so many of it.
struct Threshold {
    least: u64,
    ties: usize,
}

/// What the `kept` largest are.
fn threshold<T: Float>(of: &[T], kept: usize) -> Threshold {
    let (mut known, mut left, mut wanted) = (0u64, T::MAGNITUDE, kept);
    while left > 0 {
        let width = LOOK.min(left);
        let mut counts = [0usize; 1 << LOOK];
        let above = left;
        left -= width;
        let mask = (1u64 << width) - 1;
        for bits in of.iter().map(|x| x.magnitude()).filter(|bits| bits >> above == known >> above) {
            counts[(bits >> left & mask) as usize] += 1;
        }
        let mut digit = mask;
        while digit > 0 && counts[digit as usize] < wanted {
            wanted -= counts[digit as usize];
            digit -= 1;
        }
        known |= digit << left;
    }
    Threshold { least: known, ties: wanted }
}

/// residual ← gradients + residual; the `kept` largest by magnitude, of equal ones the first, go to the pairs in the order of their places, and leave 0.
pub fn compress<T: Float>(grads: &[T], residual: &mut [T], pairs: &mut [T]) {
    for (left, &grad) in residual.iter_mut().zip(grads) {
        *left = grad + *left;
    }
    let (values, places) = pairs.split_at_mut(pairs.len() / 2);
    let Threshold { least, mut ties } = threshold(residual, values.len());
    let mut slots = values.iter_mut().zip(places);
    for (at, left) in residual.iter_mut().enumerate() {
        let bits = left.magnitude();
        if bits < least || bits == least && ties == 0 {
            continue;
        }
        ties -= usize::from(bits == least);
        let Some((value, place)) = slots.next() else { return };
        (*value, *place) = (*left, T::of_place(at));
        *left = T::ZERO;
    }
}

/// sum ← of all elements from `start` on, what the pairs of each member (so many of each, in group order) have for it.
pub fn sum_pairs<T: Float>(pairs: &[T], kept: usize, start: usize, sum: &mut [T]) {
    sum.fill(T::ZERO);
    for (values, places) in pairs.chunks_exact(2 * kept).map(|of| of.split_at(kept)) {
        for (&value, place) in values.iter().zip(places) {
            // Places behind the piece are no places in it; before it they are none at all.
            if let Some(to) = place.place().checked_sub(start).and_then(|at| sum.get_mut(at)) {
                *to += value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dplan_ir::interp::program::largest;
    use dplan_ir::splitmix;

    fn held<T: Float>(of: fn(f64) -> T) {
        let mut random = 3;
        for round in 0..400u64 {
            let mut draw = |most: u64| splitmix::next(&mut random) % most;
            let len = 1 + draw(300) as usize;
            let kept = 1 + draw(len as u64) as usize;
            // Few different numbers, or many; of all sizes, zeros of both signs, infinities.
            let mut number = || match (round % 4, draw(8)) {
                (0, n) => n as f64 - 4.0,
                (1, n) => f64::powi(-1.5, draw(60) as i32 - 30 + n as i32),
                (2, 0) => f64::NEG_INFINITY,
                (2, 1) => -0.0,
                (2, _) => 0.0,
                (_, _) => draw(1 << 30) as f64 / 1e6 - 500.0,
            };
            let grads: Vec<T> = (0..len).map(|_| of(number())).collect();
            let before: Vec<T> = (0..len).map(|_| of(if round % 4 == 2 { 0.0 } else { number() })).collect();
            let sums: Vec<f64> = grads.iter().zip(&before).map(|(&g, &e)| (g + e).to_f64()).collect();
            let (mut residual, mut pairs) = (before, vec![T::ZERO; 2 * kept]);
            compress(&grads, &mut residual, &mut pairs);
            let found: Vec<(usize, f64)> = pairs[kept..].iter().zip(&pairs[..kept]).map(|(p, v)| (p.place(), v.to_f64())).collect();
            assert_eq!(found, largest(&sums, kept), "round {round}: {kept} of {len}");
            for (at, left) in residual.iter().enumerate() {
                let is_sent = found.iter().any(|&(place, _)| place == at);
                assert_eq!(left.to_f64(), if is_sent { 0.0 } else { sums[at] }, "round {round}");
            }
            // Two members' pairs, all of them and by pieces.
            let both = [&pairs[..], &pairs].concat();
            let mut sum = vec![T::ONE; len];
            sum_pairs(&both, kept, 0, &mut sum);
            let (cut, mut piece) = (len / 2, vec![T::ONE; len - len / 2]);
            sum_pairs(&both, kept, cut, &mut piece);
            for (at, x) in sum.iter().enumerate() {
                let sent = found.iter().find(|f| f.0 == at).map_or(0.0, |f| f.1);
                assert_eq!(x.to_f64(), sent + sent);
                assert!(at < cut || piece[at - cut].to_f64() == x.to_f64());
            }
        }
    }

    #[test]
    fn the_largest_go_with_their_places_and_the_rest_is_left_over() {
        held(|x| x as f32);
        held(|x| x);
    }

    #[test]
    fn what_is_no_number_is_sent_first_and_not_left_over() {
        let (mut residual, mut pairs) = ([1.0, 2.0, 3.0], [0.0; 2]);
        compress(&[0.0, f64::NAN, f64::INFINITY], &mut residual, &mut pairs);
        assert!(pairs[0].is_nan() && pairs[1].place() == 1);
        assert_eq!(residual, [1.0, 0.0, f64::INFINITY]);
    }
}
