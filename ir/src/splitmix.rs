//! splitmix64 (doi:10.1145/2714064.2660195): numbers that look random, from a seed alone.

/// What the state moves by: 2⁶⁴ over the golden ratio.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The number that follows a state; also a mixer of 64 bits.
pub fn mix(state: u64) -> u64 {
    let x = state.wrapping_add(STEP);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The next number, and the state moves on.
pub fn next(state: &mut u64) -> u64 {
    let number = mix(*state);
    *state = state.wrapping_add(STEP);
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers of the reference implementation (prng.di.unimi.it/splitmix64.c) from the seed 1234567.
    #[test]
    fn numbers_are_those_of_the_reference() {
        let mut state = 1_234_567;
        assert_eq!([(); 3].map(|()| next(&mut state)), [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }
}
