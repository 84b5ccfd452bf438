//! Dynamic loss scaling, for types in which small gradients vanish (arXiv:1710.03740, section 3.2; the rule of PyTorch's `GradScaler`).
//!
//! The loss's gradient is multiplied by a power of two, so that multiplying and dividing are exact; the update divides by it. Gradients that overflow give a norm that
//! is not finite: that step changes nothing, by a select in the update ([`dplan_ir::optimizer::skips`]), and the scale halves. After a number of clean steps it doubles.

use serde::{Deserialize, Serialize};

/// A scale of 2^`exponent`, and how many steps in a row did not overflow under it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScale {
    pub exponent: i32,
    pub clean: u64,
}

/// What a step did to its gradients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    Finite,
    Overflow,
}

impl Default for LossScale {
    fn default() -> LossScale {
        LossScale { exponent: 16, clean: 0 }
    }
}

impl LossScale {
    /// Beyond it even f32, in which gradients are summed, would overflow.
    pub const MOST: i32 = 64;

    /// The scale that a number is, if it is a power of two from 1 to 2⁶⁴.
    pub fn from_value(value: f64) -> Option<LossScale> {
        (0..=LossScale::MOST).find(|&e| f64::from(e).exp2() == value).map(|exponent| LossScale { exponent, clean: 0 })
    }
    pub fn value(self) -> f64 {
        f64::from(self.exponent).exp2()
    }
    /// Whether a smaller one is left to try.
    pub fn can_fall(self) -> bool {
        self.exponent > 0
    }
    /// The next step's, when `window` clean steps double it.
    pub fn after(self, outcome: Outcome, window: u64) -> LossScale {
        match outcome {
            Outcome::Overflow => LossScale { exponent: (self.exponent - 1).max(0), clean: 0 },
            Outcome::Finite if self.clean + 1 < window => LossScale { clean: self.clean + 1, ..self },
            Outcome::Finite => LossScale { exponent: (self.exponent + 1).min(LossScale::MOST), clean: 0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_halves_at_once_and_doubles_after_the_window() {
        let mut scale = LossScale::from_value(4.0).unwrap();
        for _ in 0..2 {
            scale = scale.after(Outcome::Finite, 3);
        }
        assert_eq!((scale.value(), scale.clean), (4.0, 2));
        assert_eq!(scale.after(Outcome::Finite, 3), LossScale { exponent: 3, clean: 0 });
        assert_eq!(scale.after(Outcome::Overflow, 3), LossScale { exponent: 1, clean: 0 });
        let least = LossScale { exponent: 0, clean: 5 };
        assert!(!least.can_fall() && least.after(Outcome::Overflow, 3) == LossScale { exponent: 0, clean: 0 });
        let most = LossScale { exponent: LossScale::MOST, clean: 2 };
        assert_eq!(most.after(Outcome::Finite, 3).exponent, LossScale::MOST);
        assert_eq!([0.5, 3.0, 0.0, f64::NAN].map(LossScale::from_value), [None; 4]);
    }
}
