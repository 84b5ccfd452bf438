//! The dimensions of the space, and draws in which none of them is rare.

use dplan_ir::dtype::DType;
use dplan_ir::mesh::{Keys, Mesh};
use dplan_ir::nest::Nest;
use dplan_ir::op::Documents;
use dplan_ir::optimizer::{DecayGroups, Optimizer};
use dplan_ir::plan::{Away, Clip, Gathered, Offload, Recompute, Schedule, Store, Wire};
use dplan_ir::sync::Sync;
use dplan_planner::drawn::{Boundary, Case, Dice, Ffn, Sight, Split, Way};

/// One thing that a case can have.
pub type Dimension = (&'static str, fn(&Case) -> bool);

/// Everything that a case can have. Something that needs several ranks to mean anything is only counted where there are several.
pub const DIMENSIONS: [Dimension; 79] = [
    ("gated", |c| c.model.ffn == Ffn::Gated),
    ("plain", |c| c.model.ffn == Ffn::Plain),
    ("experts", |c| c.model.ffn == Ffn::Experts),
    ("experts with biases", |c| c.model.ffn == Ffn::Biased),
    ("window", |c| c.model.sight == Sight::Window),
    ("sinks", |c| c.model.sight == Sight::Sinks),
    ("grouped queries", |c| c.model.group > 1),
    ("tied table", |c| c.model.tied),
    ("tied over stages", |c| c.model.tied && c.pp() > 1 && !matches!(c.schedule, Schedule::ZbV)),
    ("learned positions", |c| c.model.learned_positions),
    ("dropout", |c| c.model.dropout > 0),
    ("documents apart", |c| c.model.documents == Documents::Apart),
    ("capacity", |c| c.model.capacity > 0),
    ("dp 2", |c| c.dp == 2),
    ("dp 3", |c| c.dp == 3),
    ("dp 4", |c| c.dp == 4),
    ("ep 2", |c| c.ep == 2),
    ("ep 4", |c| c.ep == 4),
    ("cp 2", |c| c.cp == 2),
    ("cp 3", |c| c.cp == 3),
    ("ring", |c| c.keys == Keys::Ring),
    ("ring of 3", |c| c.keys == Keys::Ring && c.cp == 3),
    ("ring with a window", |c| c.keys == Keys::Ring && c.model.sight == Sight::Window),
    ("tp 2", |c| c.tp == 2),
    ("tp 3", |c| c.tp == 3),
    ("tp 4", |c| c.tp == 4),
    ("sp", |c| c.tp > 1 && c.boundary == Boundary::Sequence),
    ("tp without sp", |c| c.tp > 1 && c.boundary == Boundary::Whole),
    ("textbook split", |c| c.tp > 1 && c.split == Split::Textbook),
    ("drawn split", |c| c.tp > 1 && matches!(c.split, Split::Drawn(_))),
    ("gather again", |c| c.tp > 1 && some(c, |w| w.gathered == Gathered::Again)),
    ("pp 2", |c| c.pp() == 2),
    ("pp 3", |c| c.pp() == 3),
    ("pp 4", |c| c.pp() == 4),
    ("uneven stages", uneven),
    ("gpipe", |c| c.pp() > 1 && c.schedule == Schedule::GPipe),
    ("1f1b", |c| c.pp() > 1 && c.schedule == Schedule::OneFOneB),
    ("interleaved", |c| c.schedule == Schedule::Interleaved),
    ("virtual 3", |c| c.virtual_stages == 3),
    ("zb-h1", |c| c.schedule == Schedule::ZbH1),
    ("zb-v", |c| c.schedule == Schedule::ZbV),
    ("pipedream", |c| c.schedule == Schedule::PipeDream),
    ("stale weights", |c| c.schedule == Schedule::PipeDream && c.pp() > 1 && c.micro_batches > 1),
    ("one micro-batch", |c| c.micro_batches == 1),
    ("micro-batches", |c| (2..=4).contains(&c.micro_batches)),
    ("many micro-batches", |c| c.micro_batches > 4),
    ("micro-batch of several", |c| c.micro_batch > 1),
    ("zero 0", |c| shares(c) && some(c, |w| w.zero.0 == 0)),
    ("zero 1", |c| shares(c) && some(c, |w| w.zero.0 == 1)),
    ("zero 2", |c| shares(c) && some(c, |w| w.zero.0 == 2)),
    ("zero 3", |c| shares(c) && some(c, |w| w.zero.0 == 3)),
    ("mixed zero", |c| shares(c) && c.ways.iter().any(|w| w.zero != c.ways[0].zero)),
    ("offload", |c| some(c, |w| w.offload.store() == Some(Store::Cpu))),
    ("offload of gradients", |c| some(c, |w| matches!(w.offload, Offload::Gradients(_)))),
    ("offload of parameters", |c| some(c, |w| matches!(w.offload, Offload::Parameters(_)))),
    ("offload to a file", |c| some(c, |w| w.offload.store() == Some(Store::Nvme))),
    ("offload of activations", |c| some(c, |w| w.activations == Some(Store::Cpu))),
    ("offload of activations to a file", |c| some(c, |w| w.activations == Some(Store::Nvme))),
    ("offload of optimizer and activations", |c| some(c, |w| w.activations.is_some() && w.offload != Offload::None)),
    ("no offload", |c| c.ways.iter().all(|w| w.away() == Away::default())),
    ("recompute none", |c| some(c, |w| w.recompute == Recompute::None)),
    ("recompute selective", |c| some(c, |w| w.recompute == Recompute::Selective)),
    ("recompute full", |c| some(c, |w| w.recompute == Recompute::Full)),
    ("adamw", |c| c.optimizer == Optimizer::AdamW),
    ("adam", |c| c.optimizer == Optimizer::Adam),
    ("sgd", |c| c.optimizer == Optimizer::Sgd),
    ("lamb", |c| c.optimizer == Optimizer::Lamb),
    ("clip", |c| c.clip == Clip::GlobalNorm),
    ("wire bf16", |c| c.wire == Wire::Bf16 && shares(c)),
    ("wire topk", |c| c.wire.kept().is_some() && shares(c)),
    ("hierarchical sums", |c| matches!(c.sync, Sync::Hierarchical { .. }) && steps(c) > 1),
    ("tree of sums", |c| c.sync == Sync::Tree && steps(c) > 1),
    ("servers", |c| c.sync == Sync::Server && shares(c)),
    ("other nesting", |c| !Mesh::of(c.degrees()).nesting.is_empty() && c.nest != Nest::default()),
    ("decay groups", |c| c.decay == DecayGroups::Matrices),
    ("masters", |c| c.compute != DType::F64),
    ("loss scale", |c| c.compute == DType::F16),
    ("streams in any order", |c| c.streams.is_some()),
    ("one rank", |c| c.ranks() == 1),
];

/// A case by its number: `count` of them have every dimension about equally often at least, and, if there are a few times as many as dimensions, every pair of
/// dimensions that goes together. Case `k` is drawn until it has dimension `k mod n` and, if that can be, one further on by as much as `k / n`.
pub fn nth(seed: u64, number: u64) -> Case {
    let count = DIMENSIONS.len() as u64;
    let (first, round) = (number % count, number / count);
    let second = (first + 1 + round % (count - 1)) % count;
    let wanted = [DIMENSIONS[first as usize].1, DIMENSIONS[second as usize].1];
    let mut dice = Dice::of(seed, number);
    let mut nearest: Option<Case> = None;
    for _ in 0..TRIES {
        let case = Case::drawn(&mut dice);
        match wanted.map(|has| has(&case)) {
            [true, true] => return case,
            [true, false] => nearest = nearest.or(Some(case)),
            [false, _] => {}
        }
    }
    nearest.unwrap_or_else(|| Case::drawn(&mut dice))
}

/// The same among cases of few ranks, which say as much about a verifier for which all ranks of a stage are one.
pub fn small(seed: u64, number: u64) -> Case {
    let mut rounds = (0..TRIES).map(|round| nth(seed, number + round * DIMENSIONS.len() as u64));
    rounds.find(|case| case.ranks() <= FEW && case.model.blocks <= 2).unwrap_or_else(Case::smallest)
}

/// Few ranks.
const FEW: u64 = 8;

/// Draws before a case is taken as it comes.
const TRIES: u64 = 2000;

/// How many of some cases have each dimension.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Seen {
    pub cases: u64,
    /// In the order of [`DIMENSIONS`].
    pub dimensions: Vec<u64>,
    /// By first and second dimension, the first before the second.
    pairs: Vec<u64>,
}

impl Default for Seen {
    fn default() -> Seen {
        let n = DIMENSIONS.len();
        Seen { cases: 0, dimensions: vec![0; n], pairs: vec![0; n * n] }
    }
}

impl Seen {
    pub fn add(&mut self, case: &Case) {
        self.cases += 1;
        let has: Vec<usize> = (0..DIMENSIONS.len()).filter(|&d| DIMENSIONS[d].1(case)).collect();
        for (at, &first) in has.iter().enumerate() {
            self.dimensions[first] += 1;
            has[at + 1..].iter().for_each(|&second| self.pairs[first * DIMENSIONS.len() + second] += 1);
        }
    }
    /// The dimension that the fewest cases have.
    pub fn rarest(&self) -> (&'static str, u64) {
        let each = DIMENSIONS.iter().zip(&self.dimensions).map(|(d, &n)| (d.0, n));
        each.min_by_key(|&(_, n)| n).unwrap_or_default()
    }
    /// Pairs of dimensions that some case has.
    pub fn pairs(&self) -> usize {
        self.pairs.iter().filter(|&&n| n > 0).count()
    }
}

fn some(case: &Case, of: impl Fn(&Way) -> bool) -> bool {
    case.ways.iter().any(of)
}

/// Whether there is anybody to share states with.
fn shares(case: &Case) -> bool {
    case.dp * case.cp > 1
}

/// By how many collectives gradients are summed.
fn steps(case: &Case) -> usize {
    let mesh = Mesh::of(case.degrees());
    case.sync.steps(&mesh, mesh.data()).len()
}

/// Whether virtual stages have different numbers of layers.
fn uneven(case: &Case) -> bool {
    let starts: Vec<u32> = std::iter::once(0).chain(case.cuts.iter().copied()).chain([case.model.layers()]).collect();
    starts.windows(2).any(|w| w[1] - w[0] != starts[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_dimension_is_rare() {
        for (cases, least) in [(200, 5), (2000, 50)] {
            let mut seen = Seen::default();
            (0..cases).for_each(|number| seen.add(&nth(1, number)));
            let (name, count) = seen.rarest();
            assert!(count >= least, "{count} of {cases} cases have {name}");
        }
    }
}
