//! What is known about the rest of a plan while one stage is solved, and what that makes of the stage.
//!
//! Where the other stages take `S` together, the slowest of them `τ`, and their longest end of a step `ε`, each at least, a plan whose stage takes `t` and ends in `e` has
//!
//! ```text
//! T ≥ S + c + t + (n − 1) · max(t, τ) + max(e, ε)
//!   ≥ S + c + t + (n − 1) · (ν · t + (1 − ν) · τ) + μ · e + (1 − μ) · ε       for all 0 ≤ ν, μ ≤ 1
//! ```
//! The second is linear in the layers of the stage, so that their knapsack can be relaxed under it: a [`Slope`]. What time costs beyond `τ` it does not cost below, and the same
//! of ends; the slope that shows most is found by going where the relaxed stage is ([`Weights::toward`]).

/// What is known about the rest of the plan while a stage is solved.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Outlook {
    /// Only plans below this objective are wanted.
    pub cut: u64,
    /// How often the slowest stage counts.
    pub repeats: u64,
    /// The least that the other stages take together, the slowest of them, and their longest end of step.
    pub others: u64,
    pub slowest: u64,
    pub end: u64,
    pub constant: u64,
}

impl Outlook {
    /// No plan with a stage that takes at least this much is better. `joint` bounds `n · time + end` from below.
    pub fn bound(&self, time: u64, end: u64, joint: u64) -> u64 {
        let apart = time + (self.repeats - 1) * time.max(self.slowest) + end.max(self.end);
        self.others + self.constant + apart.max(joint)
    }
    pub fn hopeful(&self, time: u64, end: u64, joint: u64) -> bool {
        self.bound(time, end, joint) < self.cut
    }

    /// The linear bound with these weights.
    pub fn slope(&self, weights: Weights) -> Slope {
        let Weights { time, end } = weights;
        let more = |amount: u64, times: u64| u128::from(amount) * u128::from(times);
        let fixed = more(self.others + self.constant, WHOLE) + more(self.slowest, (WHOLE - time) * (self.repeats - 1)) + more(self.end, WHOLE - end);
        Slope { time: WHOLE + time * (self.repeats - 1), end, limit: more(self.cut, WHOLE).saturating_sub(fixed) }
    }
}

/// `ν` and `μ`, as parts of [`WHOLE`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Weights {
    time: u64,
    end: u64,
}

const WHOLE: u64 = 16;

impl Weights {
    /// As if the stage were the slowest, and ended last.
    pub const MOST: Weights = Weights { time: WHOLE, end: WHOLE };
    /// By how much they change, one after another.
    pub const STEPS: [u64; 6] = [8, 4, 2, 1, 1, 0];

    /// Nearer to the slope that shows most, seen from a stage that takes the least at these weights.
    pub fn toward(self, outlook: &Outlook, time: u64, end: u64, step: u64) -> Weights {
        let next = |weight: u64, more: bool| if more { WHOLE.min(weight + step) } else { weight.saturating_sub(step) };
        Weights { time: next(self.time, time >= outlook.slowest), end: next(self.end, end >= outlook.end) }
    }
}

/// A linear bound: what a nanosecond of a stage adds to so many times the objective.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slope {
    time: u64,
    end: u64,
    /// A stage that costs this much is in no wanted plan.
    pub limit: u128,
}

impl Slope {
    pub fn cost(&self, time: u64, end: u64) -> u64 {
        self.time * time + self.end * end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slope_bounds_the_objective_and_some_slope_reaches_it() {
        let outlook = Outlook { cut: 100_000, repeats: 8, others: 700, slowest: 300, end: 50, constant: 9 };
        for (time, end) in [(100, 20), (100, 400), (300, 50), (500, 20), (500, 400)] {
            let objective = u128::from(outlook.bound(time, end, 0));
            let shown = |weights| {
                let slope = outlook.slope(weights);
                u128::from(WHOLE * outlook.cut) - slope.limit + u128::from(slope.cost(time, end))
            };
            let all: Vec<u128> = (0..=WHOLE).flat_map(|t| (0..=WHOLE).map(move |e| shown(Weights { time: t, end: e }))).collect();
            assert_eq!(all.into_iter().max(), Some(u128::from(WHOLE) * objective), "{time} {end}");
            let mut weights = Weights::MOST;
            for step in Weights::STEPS {
                weights = weights.toward(&outlook, time, end, step);
            }
            assert_eq!(shown(weights), u128::from(WHOLE) * objective, "{time} {end}");
        }
    }
}
