//! Loops in the instructions of the machine they run on.
//!
//! The binary is compiled for any x86-64; a loop inside [`vectorized`] is compiled once more for each wider vector unit, and the widest that the machine has runs. Every
//! element is computed by the same operations in the same order, sums have lanes of their own ([`super::float::sum`]), and no multiplication is fused with an addition, so
//! results are the same bits on all of them.

/// Runs `body`, of which everything that is inlined uses the widest vectors of this machine.
#[inline(always)]
pub fn vectorized<R>(body: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(body)
}

#[cfg(test)]
mod tests {
    use super::super::float::{Float, dot, exp_sum};
    use super::vectorized;

    #[test]
    fn wide_vectors_give_the_same_bits() {
        for n in [1, 7, 8, 63, 384, 1001] {
            let x: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin() * 9.0).collect();
            let y: Vec<f32> = (0..n).map(|i| (i as f32 * 0.11).cos()).collect();
            let all = || (dot(&x, &y).to_bits(), exp_sum(&x, 3.0f32).to_bits(), x.iter().map(|&v| Float::sigmoid(v).to_bits()).collect::<Vec<_>>());
            assert_eq!(vectorized(all), all());
        }
    }
}
