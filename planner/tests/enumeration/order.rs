//! Orders of passes, each written down for itself.

use dplan_ir::plan::Schedule;

/// Stages, virtual stages on each, and the order of micro-batches.
#[derive(Clone, Copy)]
pub struct Order {
    pub schedule: Schedule,
    pub pp: u64,
    pub v: u64,
    pub m: u64,
}

impl Order {
    pub fn halves(&self) -> bool {
        matches!(self.schedule, Schedule::ZbH1 | Schedule::ZbV)
    }

    /// Whether every micro-batch has an update of its own.
    pub fn is_stale(&self) -> bool {
        self.schedule == Schedule::PipeDream
    }
    pub fn place(&self, c: u64) -> u64 {
        let round = c % self.pp;
        if self.schedule == Schedule::ZbV && c >= self.pp { self.pp - 1 - round } else { round }
    }

    /// (frames, held) of the virtual stages of a stage, counted along the order of its passes.
    pub fn kept(&self, stage: u64) -> Vec<(u64, u64)> {
        // Passes as (F, I or W; virtual stage; micro-batch), in the words of PyTorch's schedules.
        let Order { schedule, pp, v, m } = *self;
        let mut passes: Vec<(char, u64, u64)> = Vec::new();
        if schedule == Schedule::ZbV {
            let mut count = std::collections::BTreeMap::new();
            let mut pass = |what: char, nth: u64| {
                let next = count.entry((what, nth)).or_insert(0);
                passes.push((what, nth, *next));
                *next += 1;
            };
            (0..2 * (pp - stage) - 1).for_each(|_| pass('F', 0));
            (0..stage).for_each(|_| ['1', '0'].into_iter().for_each(|n| pass('F', u64::from(n == '1'))));
            (0..pp - stage).for_each(|_| ['F', 'I', 'W'].into_iter().for_each(|what| pass(what, 1)));
            let (mut first, mut second) = (2 * pp - 1 - stage, pp);
            while second < first || first < m {
                if first < m {
                    pass('F', 0);
                    first += 1;
                }
                [('I', 0), ('W', 0), ('F', 1), ('I', 1), ('W', 1)].into_iter().for_each(|(what, nth)| pass(what, nth));
                second += 1;
            }
            (0..stage).for_each(|_| [0, 1].into_iter().for_each(|nth| pass('I', nth)));
            (0..pp - stage).for_each(|_| ['I', 'W'].into_iter().for_each(|what| pass(what, 0)));
            (0..stage).for_each(|_| pass('W', 1));
            (0..stage).for_each(|_| pass('W', 0));
        } else {
            let all = v * m;
            let of = |k: u64| if v == 1 { (0, k) } else { (k / pp % v, k / (pp * v) * pp + k % pp) };
            let ahead = match schedule {
                Schedule::GPipe => all,
                _ if v == 1 => all.min(pp - 1 - stage),
                _ => all.min((v - 1) * pp + 2 * (pp - 1 - stage)),
            };
            let late = if self.halves() { stage } else { 0 };
            let (mut f, mut b, mut w) = (0, 0, 0);
            while w < all {
                if b < all {
                    while f < all && f <= b + ahead {
                        passes.push(('F', of(f).0, of(f).1));
                        f += 1;
                    }
                    passes.push(('I', v - 1 - of(b).0, of(b).1));
                    b += 1;
                }
                if b == all || b > w + late {
                    passes.push(('W', v - 1 - of(w).0, of(w).1));
                    w += 1;
                }
            }
        }
        let own: Vec<u64> = (0..pp * v).filter(|&c| self.place(c) == stage).collect();
        let most = |nth: usize, begins: char, neighbour: Option<u64>| {
            let beside = own.iter().position(|&c| Some(c) == neighbour);
            let at = |what: char, nth: u64, i: u64| passes.iter().position(|p| *p == (what, nth, i)).unwrap();
            let spans = (0..m).map(|i| {
                let begun = [Some(nth), beside].into_iter().flatten().map(|n| at(begins, n as u64, i)).min().unwrap();
                (begun, at('W', nth as u64, i))
            });
            let spans: Vec<(usize, usize)> = spans.collect();
            (0..passes.len()).map(|t| spans.iter().filter(|s| (s.0..=s.1).contains(&t)).count() as u64).max().unwrap()
        };
        let held = |nth: usize| if self.halves() { most(nth, 'I', Some(own[nth] + 1)) } else { 0 };
        (0..own.len()).map(|nth| (most(nth, 'F', own[nth].checked_sub(1)), held(nth))).collect()
    }
}
