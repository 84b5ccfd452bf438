//! Seeded randomness.

use dplan_ir::splitmix;

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
        splitmix::next(&mut self.0)
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
