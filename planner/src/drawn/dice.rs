//! Seeded randomness: splitmix64 (doi:10.1145/2714064.2660195).

/// A source of numbers; the seed is all its state.
#[derive(Clone, Debug)]
pub struct Dice(pub u64);

impl Dice {
    /// Dice of their own for one of several draws, independent of how many rolls the others took.
    pub fn of(seed: u64, number: u64) -> Dice {
        let mut dice = Dice(seed);
        Dice(dice.bits() ^ number.wrapping_mul(0xd1b5_4a32_d192_ed03))
    }
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
    /// A number below `sides`.
    pub fn roll(&mut self, sides: u64) -> u64 {
        self.bits() % sides
    }
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.roll(of.len() as u64) as usize]
    }
    pub fn one_in(&mut self, n: u64) -> bool {
        self.roll(n) == 0
    }
}
