//! Damage to proved programs and flaws of their graphs, and rewrites of them.
//!
//! What the verifier accepts of damaged programs is run by the program's interpreter, with its streams in several orders, and must compute what the undamaged
//! program computes: the same bits, or the same sums with their terms in another order. Anything else is a hole in the verifier. Nothing of what it rejects
//! is run: some of it would not end.

use std::collections::BTreeMap;

use dplan_ir::graph::Graph;
use dplan_ir::init;
use dplan_ir::interp::program::ProgramRun;
use dplan_ir::program::{Program, Role};
use dplan_ir::verify::mutate::{Damage, Flaw, Rewrite};
use dplan_ir::verify::verify_program;
use dplan_planner::drawn::{Case, Dice};

use super::run::{Fault, batches, lowered, scalars};

/// What became of the mutants of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    pub rejected: u64,
    /// Accepted, and they compute the same bits.
    pub same: u64,
    /// Accepted, and they compute the same sums, with the terms in another order.
    pub reordered: u64,
    /// Accepted, and they compute something else.
    pub wrong: u64,
}

/// What is wrong with the verifier.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hole {
    pub case: String,
    pub change: String,
    pub place: String,
    pub why: String,
}

/// What became of all mutants.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Outcome {
    pub programs: u64,
    pub damages: BTreeMap<Damage, Tally>,
    pub flaws: BTreeMap<Flaw, Tally>,
    pub rewrites: BTreeMap<Rewrite, Tally>,
    /// Damage that was accepted and harms.
    pub holes: Vec<Hole>,
    /// Right programs, or right rewrites of them, that were rejected, or rewrites that compute something else.
    pub alarms: Vec<Hole>,
}

impl Outcome {
    /// All kinds of damage together, those of graphs included.
    pub fn damaged(&self) -> Tally {
        sum(self.damages.values().chain(self.flaws.values()))
    }
    pub fn rewritten(&self) -> Tally {
        sum(self.rewrites.values())
    }
    pub fn is_sound(&self) -> bool {
        self.holes.is_empty() && self.alarms.is_empty()
    }

    /// Damages and rewrites a case's program and its graph, each kind at so many drawn places.
    ///
    /// # Errors
    /// If the case itself is refused, or does not run.
    pub fn mutate(&mut self, case: &Case, places: u64, dice: &mut Dice) -> Result<(), Fault> {
        let (graph, program) = lowered(case)?;
        self.programs += 1;
        let hole = |change: String, place: String, why: String| Hole { case: case.to_string(), change, place, why };
        if let Err(violations) = verify_program(&graph, &program) {
            self.alarms.push(hole("nothing".into(), "nowhere".into(), violations[0].to_string()));
            return Ok(());
        }
        let subject = Subject { case, want: trained(case, &graph, &program, 1).map_err(Fault::Stopped)? };
        for damage in Damage::ALL {
            for _ in 0..places {
                let Some((mutant, place)) = damage.apply(&graph, &program, dice.roll(1 << 40)) else { continue };
                let verdict = subject.judge(&graph, &mutant);
                self.damages.entry(damage).or_default().note(&verdict);
                if let Verdict::Wrong(why) = verdict {
                    self.holes.push(hole(damage.name(), place, why));
                }
            }
        }
        for flaw in Flaw::ALL {
            for _ in 0..places {
                let Some((mutant, place)) = flaw.apply(&graph, dice.roll(1 << 40)) else { continue };
                let verdict = subject.judge(&mutant, &program);
                self.flaws.entry(flaw).or_default().note(&verdict);
                if let Verdict::Wrong(why) = verdict {
                    self.holes.push(hole(format!("graph: {}", flaw.name()), place, why));
                }
            }
        }
        for rewrite in Rewrite::ALL {
            for _ in 0..places {
                let Some((mutant, place)) = rewrite.apply(&graph, &program, dice.roll(1 << 40)) else { continue };
                let verdict = subject.judge(&graph, &mutant);
                self.rewrites.entry(rewrite).or_default().note(&verdict);
                if let Verdict::Rejected(why) | Verdict::Wrong(why) = verdict {
                    self.alarms.push(hole(rewrite.name(), place, why));
                }
            }
        }
        Ok(())
    }
}

impl Tally {
    fn note(&mut self, verdict: &Verdict) {
        match verdict {
            Verdict::Rejected(_) => self.rejected += 1,
            Verdict::Same => self.same += 1,
            Verdict::Reordered => self.reordered += 1,
            Verdict::Wrong(_) => self.wrong += 1,
        }
    }
    /// Accepted, and right.
    pub fn equivalent(&self) -> u64 {
        self.same + self.reordered
    }
    pub fn all(&self) -> u64 {
        self.rejected + self.equivalent() + self.wrong
    }
}

fn sum<'a>(all: impl Iterator<Item = &'a Tally>) -> Tally {
    all.fold(Tally::default(), |s, t| Tally {
        rejected: s.rejected + t.rejected,
        same: s.same + t.same,
        reordered: s.reordered + t.reordered,
        wrong: s.wrong + t.wrong,
    })
}

/// What the verifier and the interpreter say of a mutant.
enum Verdict {
    Rejected(String),
    Same,
    Reordered,
    Wrong(String),
}

/// Orders of streams that a mutant is tried in: an edge that it lacks shows in some of them.
const ORDERS: u64 = 3;

/// How near two sums of the same terms are.
const REORDERED: f64 = 1e-10;

/// An undamaged program, by what it computes.
struct Subject<'a> {
    case: &'a Case,
    want: Vec<f64>,
}

impl Subject<'_> {
    fn judge(&self, graph: &Graph, mutant: &Program) -> Verdict {
        if let Err(violations) = verify_program(graph, mutant) {
            return Verdict::Rejected(violations[0].to_string());
        }
        let mut verdict = Verdict::Same;
        for seed in 2..2 + ORDERS {
            let found = match trained(self.case, graph, mutant, seed) {
                Ok(found) => found,
                Err(why) => return Verdict::Wrong(why),
            };
            let pairs = || found.iter().zip(&self.want);
            if let Some(at) = pairs().position(|(x, y)| (x - y).abs() > REORDERED * y.abs().max(1.0) || x.is_nan()) {
                return Verdict::Wrong(format!("number {at} is {}, not {} (order {seed})", found[at], self.want[at]));
            }
            if pairs().any(|(x, y)| x.to_bits() != y.to_bits()) {
                verdict = Verdict::Reordered;
            }
        }
        verdict
    }
}

/// Losses, norms and parameters of two steps; why there are none, if ranks get stuck or disagree.
fn trained(case: &Case, graph: &Graph, program: &Program, seed: u64) -> Result<Vec<f64>, String> {
    let mut run = ProgramRun::new(graph, program, seed).decaying(case.decay);
    init::params(graph, 9).iter().for_each(|(p, value)| run.set_param(p, value));
    let mut numbers = Vec::new();
    for step in 1..=2 {
        let report = run.step(&batches(case, graph, step), &scalars(case, graph, step)).map_err(|e| e.to_string())?;
        numbers.extend([report.loss, report.grad_norm.unwrap_or(0.0)]);
    }
    for param in graph.params.ids() {
        numbers.extend(run.state(param, Role::Param).map_err(|e| e.to_string())?.data);
    }
    Ok(numbers)
}
