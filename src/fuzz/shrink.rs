//! The smallest case that still fails.
//!
//! One choice after the other is made simpler; what still fails is kept, until nothing that is simpler fails. The measure is the number of choices that
//! are not the smallest case's and their sizes, and every step makes it less, so this ends.

use dplan_ir::dtype::DType;
use dplan_ir::mesh::Keys;
use dplan_ir::nest::Nest;
use dplan_ir::op::Documents;
use dplan_ir::optimizer::{DecayGroups, Optimizer};
use dplan_ir::plan::{Clip, Gathered, Offload, Recompute, Schedule, Wire, Zero};
use dplan_ir::sync::Sync;
use dplan_planner::drawn::{Boundary, Case, Ffn, Model, Sight, Split, Way};

/// Makes a failing case smaller; `fails` says whether one still does.
pub fn shrink(case: &Case, fails: impl Fn(&Case) -> bool) -> Case {
    let mut smallest = case.clone();
    while let Some(next) = simpler(&smallest).into_iter().find(|c| fails(c)) {
        smallest = next;
    }
    smallest
}

/// Legal cases that are simpler in one respect, the largest cuts first.
fn simpler(case: &Case) -> Vec<Case> {
    let mut all: Vec<Case> = Vec::new();
    let mut offer = |change: &dyn Fn(&mut Case)| {
        let mut next = case.clone();
        change(&mut next);
        next.settle();
        if next != *case && next.refusal().is_none() {
            all.push(next);
        }
    };
    // Whole pipelines first, then stage by stage.
    offer(&|c| {
        (c.schedule, c.virtual_stages) = (Schedule::OneFOneB, 1);
        c.cuts.clear();
    });
    offer(&|c| (c.schedule, c.virtual_stages) = (Schedule::OneFOneB, 1));
    for at in 0..case.cuts.len() {
        // A stage less, with all its virtual stages; then a virtual stage less on each.
        let (keep, of_stage, pp) = (case.virtual_stages - 1, case.virtual_stages as usize, case.pp() as usize);
        let fewer = |c: &mut Case, cuts: usize| drop(c.cuts.drain(at..(at + cuts).min(c.cuts.len())));
        offer(&|c| fewer(c, of_stage));
        offer(&|c| {
            c.virtual_stages = keep;
            fewer(c, pp);
        });
    }
    for layer in 1..=case.model.blocks {
        offer(&|c| {
            // What is behind the block moves up.
            c.model.blocks -= 1;
            c.ways.remove(layer as usize);
            c.cuts.iter_mut().for_each(|cut| *cut -= u32::from(*cut > layer));
            c.cuts.dedup();
        });
    }
    type Degree = (fn(&mut Case) -> &mut u64, u64);
    let degrees: [Degree; 9] = [
        (|c| &mut c.ep, 1),
        (|c| &mut c.dp, 1),
        (|c| &mut c.cp, 1),
        (|c| &mut c.tp, 1),
        (|c| &mut c.micro_batches, 1),
        (|c| &mut c.micro_batch, 1),
        (|c| &mut c.model.seq, Model::SMALLEST.seq),
        (|c| &mut c.model.kv_heads, 1),
        (|c| &mut c.model.group, 1),
    ];
    for (degree, least) in degrees {
        let now = *degree(&mut case.clone());
        for to in [least, now / 2, now - 1] {
            if (least..now).contains(&to) {
                offer(&|c| *degree(c) = to);
            }
        }
    }
    offer(&|c| c.boundary = Boundary::Whole);
    for split in [Split::None, Split::Textbook] {
        // A drawn strategy is worse to read than the textbook's, which is worse than none.
        offer(&|c| c.split = if c.split == Split::None { Split::None } else { split });
    }
    offer(&|c| c.ways.fill(Way::PLAIN));
    type Choice = fn(&mut Way);
    let choices: [Choice; 5] = [
        |w| w.zero = Zero(0),
        |w| w.offload = Offload::None,
        |w| w.activations = None,
        |w| w.recompute = Recompute::None,
        |w| w.gathered = Gathered::Keep,
    ];
    for choice in choices {
        offer(&|c| c.ways.iter_mut().for_each(choice));
        for layer in 0..case.ways.len() {
            offer(&|c| choice(&mut c.ways[layer]));
        }
    }
    for layer in (0..case.ways.len()).filter(|&l| case.ways[l].zero.0 > 1) {
        offer(&|c| c.ways[layer].zero.0 -= 1);
    }
    offer(&|c| c.model.ffn = Ffn::Gated);
    offer(&|c| c.model.ffn = if c.model.ffn == Ffn::Biased { Ffn::Experts } else { c.model.ffn });
    offer(&|c| c.model.sight = Sight::Causal);
    offer(&|c| c.model.tied = false);
    offer(&|c| c.model.learned_positions = false);
    offer(&|c| c.model.dropout = 0);
    offer(&|c| c.model.documents = Documents::Joined);
    offer(&|c| c.model.capacity = 0);
    offer(&|c| c.model.vocab = Model::SMALLEST.vocab);
    offer(&|c| c.optimizer = Optimizer::Sgd);
    offer(&|c| c.clip = Clip::None);
    offer(&|c| c.wire = Wire::Full);
    offer(&|c| c.keys = Keys::Gathered);
    offer(&|c| c.sync = Sync::Flat);
    offer(&|c| c.nest = Nest::default());
    offer(&|c| c.decay = DecayGroups::All);
    offer(&|c| c.streams = None);
    offer(&|c| c.compute = if c.compute == DType::F16 { DType::Bf16 } else { DType::F64 });
    offer(&|c| c.compute = DType::F64);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::space::nth;

    /// Whatever has the fault, the case that is left has it and little else.
    #[test]
    fn what_is_left_is_the_fault() {
        type Fault = fn(&Case) -> bool;
        let faults: [(Fault, &str); 6] = [
            (|c| c.tp > 1 && c.ways.iter().any(|w| w.zero.0 == 3), "tp=2 "),
            (|c| c.schedule == Schedule::ZbV && c.model.tied, "tied=on count=3 schedule=zb-v virtual=2 cuts=1,2,3"),
            (|c| c.ep > 1 && c.cp > 1, "ffn=experts dp=2 ep=2 cp=2"),
            (|c| c.ways[0].offload != Offload::None && c.compute != DType::F64, "compute=bf16"),
            (|c| c.model.dropout > 0 && c.ways.iter().any(|w| w.recompute == Recompute::Full), "dropout="),
            (|c| c.virtual_stages == 3 && c.micro_batches > 4, "virtual=3"),
        ];
        for (fault, says) in faults {
            let failing: Vec<Case> = (0..2000).map(|n| nth(3, n)).filter(fault).take(20).collect();
            assert!(failing.len() > 5, "{says}: {} cases", failing.len());
            for case in failing {
                let text = shrink(&case, fault).to_string();
                let smallest: Case = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
                assert!(fault(&smallest) && text.contains(says.trim()) && text.split(' ').count() <= 7, "{says}: {case} became {text}");
            }
        }
    }

    #[test]
    fn every_step_is_simpler() {
        // Otherwise shrinking a case that always fails would not end.
        for number in 0..30 {
            assert_eq!(shrink(&nth(4, number), |_| true), Case::smallest());
        }
    }
}
