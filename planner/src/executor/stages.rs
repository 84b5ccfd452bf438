//! Which layers a stage of a pipeline has.
//!
//! | executor | layers of stages |
//! |---|---|
//! | Megatron, DeepSpeed | equal; where they do not divide, but would with embedding and head counted as one each, the two ends have one less |
//! | Nanotron | by cost: a stage takes layers until their products, with the head's, exceed its share of all |
//!
//! The first is Megatron-DeepSpeed's `partition_method="type:transformer|embedding"`, the other `get_block_compute_costs` in Nanotron's `models/base.py`:
//! a layer costs the weights of its products, the head `vocab · hidden`, the embedding nothing.

use super::{Decoder, Executor, Layout};

/// Layers of the stages that are told apart. A pipeline of one stage has all in `first` and in `last`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Stages {
    pub first: f64,
    /// Most layers of a stage that is not the last.
    pub most: f64,
    pub last: f64,
}

impl Stages {
    pub fn of(model: &Decoder, layout: &Layout, executor: Executor) -> Stages {
        let (layers, pp) = (model.layers, layout.pp);
        if pp == 1 {
            return Stages { first: layers as f64, most: layers as f64, last: layers as f64 };
        }
        if executor == Executor::Nanotron {
            return by_cost(model, pp);
        }
        if !layers.is_multiple_of(pp) && (layers + 2).is_multiple_of(pp) {
            let each = (layers + 2) / pp;
            return Stages { first: (each - 1) as f64, most: each as f64, last: (each - 1) as f64 };
        }
        let each = layers as f64 / pp as f64;
        Stages { first: each, most: each, last: each }
    }
}

/// Costs are whole numbers, so a share is compared by `cost · pp > all · (stage + 1)`.
fn by_cost(model: &Decoder, pp: u64) -> Stages {
    let layer = u128::from(model.layer_products());
    let all = layer * u128::from(model.layers) + u128::from(model.vocab * model.hidden);
    let mut counts = vec![0u64; pp as usize];
    let mut stage = 0u64;
    for placed in 1..=model.layers {
        counts[stage as usize] += 1;
        if layer * u128::from(placed) * u128::from(pp) > all * u128::from(stage + 1) {
            stage = (stage + 1).min(pp - 1);
        }
    }
    let (last, others) = counts.split_last().expect("a pipeline has stages");
    Stages { first: others.first().copied().unwrap_or(*last) as f64, most: others.iter().copied().max().unwrap_or(*last) as f64, last: *last as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::{Activations, Embeddings, Mlp, Precision, Recompute};

    fn decoder(layers: u64) -> Decoder {
        Decoder {
            layers,
            hidden: 2048,
            heads: 32,
            kv_heads: 32,
            head_dim: 64,
            ffn: 4096,
            mlp: Mlp::Gated,
            vocab: 50257,
            embeddings: Embeddings::Tied,
            sequence: 4096,
        }
    }

    fn layout(pp: u64) -> Layout {
        Layout {
            dp: 1,
            tp: 1,
            pp,
            cp: 1,
            virtual_stages: 1,
            micro_batch: 1,
            micro_batches: 8,
            zero: 0,
            recompute: Recompute::None,
            activations: Activations::Replicated,
            precision: Precision::Mixed,
        }
    }

    /// A layer costs 42 M, the head 103 M: as 2.45 layers. Shares are 26.45 / pp.
    #[test]
    fn nanotron_gives_the_first_stages_more_layers_and_the_head_company() {
        let rows = [(1, (24.0, 24.0, 24.0)), (2, (14.0, 14.0, 10.0)), (4, (7.0, 7.0, 4.0)), (8, (4.0, 4.0, 0.0)), (16, (2.0, 2.0, 0.0))];
        for (pp, (first, most, last)) in rows {
            assert_eq!(Stages::of(&decoder(24), &layout(pp), Executor::Nanotron), Stages { first, most, last }, "pp {pp}");
        }
    }

    #[test]
    fn others_have_equal_stages_or_lighter_ends() {
        assert_eq!(Stages::of(&decoder(24), &layout(8), Executor::Megatron2021), Stages { first: 3.0, most: 3.0, last: 3.0 });
        assert_eq!(Stages::of(&decoder(70), &layout(12), Executor::DeepSpeed), Stages { first: 5.0, most: 6.0, last: 5.0 });
    }
}
