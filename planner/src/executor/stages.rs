//! Which layers a stage of a pipeline has.
//!
//! | executor | layers of stages |
//! |---|---|
//! | Megatron, DeepSpeed | equal, in parts of a layer if need be; where they do not divide, but would with embedding and head counted as one each, the two ends have one less |
//! | Nanotron | by cost: a stage takes layers until their products, with the head's, exceed its share of all |
//!
//! The first is Megatron-DeepSpeed's `partition_method="type:transformer|embedding"`, the other `get_block_compute_costs` in Nanotron's `models/base.py`:
//! a layer costs the weights of its products, the head `vocab · hidden`, the embedding nothing.

use super::decoder::Block;
use super::{Decoder, Executor, Layout};

/// Layers of a stage, by kind.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Stage {
    pub dense: f64,
    pub routed: f64,
}

impl Stage {
    pub fn layers(self) -> f64 {
        self.dense + self.routed
    }
    /// The sum over its layers.
    pub fn sum(self, of: impl Fn(Block) -> f64) -> f64 {
        let part = |layers: f64, block: Block| if layers > 0.0 { layers * of(block) } else { 0.0 };
        part(self.dense, Block::Dense) + part(self.routed, Block::Routed)
    }
}

/// All stages, in the order of layers.
pub fn stages(model: &Decoder, layout: &Layout, executor: Executor) -> Vec<Stage> {
    let mut dense = model.dense_layers() as f64;
    let kinds = |layers: f64| {
        let first = dense.min(layers);
        dense -= first;
        Stage { dense: first, routed: layers - first }
    };
    counts(model, layout.pp, executor).into_iter().map(kinds).collect()
}

fn counts(model: &Decoder, pp: u64, executor: Executor) -> Vec<f64> {
    let layers = model.layers;
    if executor == Executor::Nanotron {
        return by_cost(model, pp);
    }
    if pp > 1 && !layers.is_multiple_of(pp) && (layers + 2).is_multiple_of(pp) {
        let each = (layers + 2) / pp;
        return (0..pp).map(|stage| (each - u64::from(stage == 0 || stage + 1 == pp)) as f64).collect();
    }
    vec![layers as f64 / pp as f64; pp as usize]
}

fn by_cost(model: &Decoder, pp: u64) -> Vec<f64> {
    let layer = model.common_parameters(Block::Dense, 1.0) - 2.0 * model.hidden as f64;
    let all = layer * model.layers as f64 + (model.vocab * model.hidden) as f64;
    let mut counts = vec![0.0; pp as usize];
    let mut stage = 0;
    for placed in 1..=model.layers {
        counts[stage] += 1.0;
        if layer * placed as f64 * pp as f64 > all * (stage + 1) as f64 {
            stage = (stage + 1).min(pp as usize - 1);
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::{Experts, fixtures};

    fn decoder(layers: u64) -> Decoder {
        Decoder { layers, ..fixtures::decoder() }
    }

    fn layout(pp: u64) -> Layout {
        Layout { pp, ..fixtures::layout() }
    }

    /// A layer costs 42 M, the head 103 M: as 2.45 layers. Shares are 26.45 / pp.
    #[test]
    fn nanotron_gives_the_first_stages_more_layers_and_the_head_company() {
        let rows: [(u64, &[f64]); 4] = [(1, &[24.0]), (2, &[14.0, 10.0]), (4, &[7.0, 7.0, 6.0, 4.0]), (8, &[4.0, 3.0, 3.0, 4.0, 3.0, 3.0, 4.0, 0.0])];
        for (pp, layers) in rows {
            let found: Vec<f64> = stages(&decoder(24), &layout(pp), Executor::Nanotron).into_iter().map(Stage::layers).collect();
            assert_eq!(found, layers, "pp {pp}");
        }
    }

    #[test]
    fn others_have_equal_stages_or_lighter_ends() {
        let layers = |n, pp, executor| -> Vec<f64> { stages(&decoder(n), &layout(pp), executor).into_iter().map(Stage::layers).collect() };
        assert_eq!(layers(24, 8, Executor::Megatron2021), [3.0; 8]);
        assert_eq!(layers(22, 4, Executor::DeepSpeed), [5.0, 6.0, 6.0, 5.0]);
    }

    #[test]
    fn layers_without_experts_come_first() {
        let experts = Experts { count: 8, chosen: 2, ffn: 1024, shared: 0, dense_layers: 3 };
        let found = stages(&Decoder { experts: Some(experts), ..decoder(8) }, &layout(4), Executor::MegatronCore);
        let kinds: Vec<(f64, f64)> = found.into_iter().map(|s| (s.dense, s.routed)).collect();
        assert_eq!(kinds, [(2.0, 0.0), (1.0, 1.0), (0.0, 2.0), (0.0, 2.0)]);
    }
}
