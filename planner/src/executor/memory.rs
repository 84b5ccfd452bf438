//! Memory of the fullest rank, for the executors whose buffers are documented: Megatron and DeepSpeed, and Nanotron, which cuts as Megatron does.
//!
//! ```text
//! allocated = bytes a parameter · parameters + in flight · layers · kept + one layer's working set + logits + buckets
//! ```
//! ZeRO 1 divides master copies and moments by the ranks that see different data, 2 gradients too, 3 parameters too, of which two layers are whole at a time.
//!
//! Kept activations: arXiv:2205.05198 §4 for unfused attention; with flash attention and a gated MLP, the inputs of every product, of both norms, of
//! attention and of the activation, 16 bits each, and attention's 32-bit statistic of each head and token. Nanotron also keeps
//!
//! - the activation's output beside the gate (`GLUActivation`), and, split over the sequence, the gathered inputs of products (`tensor_parallel/functional.py`);
//! - of more than one sequence, attention's output once more in the order its product reads (`CausalSelfAttention.forward`: a transposed view, copied by the product);
//! - with as many keys as queries, keys and values before their rotation: one tensor holds all three, and queries, rotated in place, stay a part of it
//!   (`CausalSelfAttention.forward`; flash-attention's `layers/rotary.py`, `apply_rotary_emb_func(..., inplace=True)`).

use super::decoder::Block;
use super::stages::{Stage, stages};
use super::{Activations, Decoder, Embeddings, Executor, Layout, Memory, Precision, Recompute};
use crate::units::Bytes;

/// Driver context and kernels (0.5 to 1.8 GiB on A100), communicators (1 to 2 GiB) and the allocator's spare blocks (median 2 to 3 GiB): the middle of each.
const OUTSIDE: f64 = 6.0 * (1u64 << 30) as f64;

/// `reduce_bucket_size` and `allgather_bucket_size`, 5·10⁸ elements of 16 bits each as DeepSpeed sets them.
const DEEPSPEED_BUCKETS: f64 = 2.0 * 2.0 * 5e8;

/// Bytes of a logit: in 16 bits, in 32, and its gradient in 32.
const LOGIT: f64 = 10.0;

/// Nanotron's: in 32 bits (`cast_to_fp32` of `models/llama.py`, after which nothing refers to those in 16), and less the largest (`sharded_cross_entropy`).
const EAGER_LOGIT: f64 = 8.0;

/// DeepSpeed's `BF16_Optimizer` gathers updated parameters into lists of tensors (`all_gather_dp_groups`), for which PyTorch has a second tensor of the size of all
/// (`ProcessGroupNCCL::allgather`, `newLikeFlat`). The next one is asked for before the last one's stream is done with it, so all parameters are there twice.
const GATHERED_TWICE: f64 = 2.0;

/// Peak of the fullest rank; nothing for the executors whose allocator decides (FSDP keeps what it once had).
pub fn memory(model: &Decoder, layout: &Layout, executor: Executor) -> Option<Memory> {
    if !executor.megatron() {
        return None;
    }
    let rank = Rank { model, layout, executor };
    let stages = stages(model, layout, executor);
    let allocated = stages.into_iter().enumerate().map(|(at, stage)| rank.allocated(at as u64, stage)).fold(0.0, f64::max);
    Some(Memory { allocated: Bytes(allocated as u64), device: Bytes((allocated + OUTSIDE) as u64) })
}

struct Rank<'a> {
    model: &'a Decoder,
    layout: &'a Layout,
    executor: Executor,
}

impl Rank<'_> {
    fn deepspeed(&self) -> bool {
        self.executor == Executor::DeepSpeed
    }

    fn allocated(&self, at: u64, stage: Stage) -> f64 {
        let (model, layout) = (self.model, self.layout);
        let (t, tokens) = (layout.tp as f64, layout.tokens(model));
        let (first, last) = (at == 0, at + 1 == layout.pp);

        let embedding = (model.vocab * model.hidden) as f64 / t;
        let own_head = last && (model.embeddings == Embeddings::Apart || layout.pp > 1);
        let common = stage.sum(|block| model.common_parameters(block, t)) + f64::from(u8::from(first) + u8::from(own_head)) * embedding;
        let experts = stage.routed * model.expert_parameters() / (layout.ep * layout.tp) as f64;
        let states = self.states(common, layout.replicas()) + self.states(experts, layout.expert_replicas());
        // Two layers are whole at a time.
        let gathered = if layout.zero >= 3 { 2.0 * 2.0 * (common + experts) / stage.layers().max(2.0) } else { 0.0 };
        // ZeRO's buckets; the optimizer with 32-bit gradients has none.
        let buckets = if self.deepspeed() && layout.zero >= 1 && layout.precision == Precision::Half { DEEPSPEED_BUCKETS } else { 0.0 };

        let in_flight = match layout.virtual_stages {
            1 => layout.micro_batches.min(layout.pp - at) as f64,
            v => (layout.micro_batches as f64).min(layout.pp as f64 + (layout.pp as f64 - 1.0) / v as f64),
        };
        let whole = stage.sum(|block| self.kept(block));
        let largest = [(stage.dense, Block::Dense), (stage.routed, Block::Routed)];
        let largest = largest.into_iter().filter(|of| of.0 > 0.0).map(|of| self.kept(of.1)).fold(0.0, f64::max);
        let activations = match layout.recompute {
            Recompute::None => in_flight * whole,
            Recompute::Selective if self.executor.flash() => in_flight * whole,
            Recompute::Selective => in_flight * (whole - stage.layers() * self.scores()) + self.scores(),
            // Inputs of layers, DeepSpeed's buffers between stages, and one layer computed again with its gradients.
            Recompute::Full => {
                let input = 2.0 * tokens * model.hidden as f64 / self.sharded();
                in_flight * (stage.layers() + f64::from(u8::from(self.deepspeed() && layout.pp > 1)) * 2.0) * input + 1.4 * largest
            }
        };
        let logit = if self.executor == Executor::Nanotron { EAGER_LOGIT } else { LOGIT };
        let logits = if last { logit * tokens * model.vocab as f64 / t } else { 0.0 };
        states + gathered + buckets + activations + logits
    }

    /// Parameter, gradient, and master copy with moments, of parameters that `replicas` ranks have.
    fn states(&self, parameters: f64, replicas: u64) -> f64 {
        // DeepSpeed keeps 16-bit gradients beside the 32-bit ones it updates with.
        let (gradient, state, again) = match (self.deepspeed(), self.layout.precision) {
            (true, Precision::Mixed) => (6.0, 12.0, if self.layout.zero >= 1 { GATHERED_TWICE } else { 0.0 }),
            (true, _) => (2.0, 16.0, 0.0),
            (false, _) => (4.0, 12.0, 0.0),
        };
        let shards = |from: u64| if self.layout.zero >= from { replicas as f64 } else { 1.0 };
        (2.0 / shards(3) + gradient / shards(2) + state / shards(1) + again) * parameters
    }

    fn sharded(&self) -> f64 {
        if self.layout.activations == Activations::Sharded { self.layout.tp as f64 } else { 1.0 }
    }

    /// What unfused attention makes of queries and keys: scores, what softmax makes of them, and a mask of dropout.
    fn scores(&self) -> f64 {
        if self.executor.flash() {
            0.0
        } else {
            5.0 * (self.model.heads * self.model.sequence) as f64 * self.layout.tokens(self.model) / self.layout.tp as f64
        }
    }

    /// Activations of one layer and micro-batch that the backward pass reads.
    fn kept(&self, block: Block) -> f64 {
        let (model, t, tokens, sharded) = (self.model, self.layout.tp as f64, self.layout.tokens(self.model), self.sharded());
        let hidden = model.hidden as f64;
        if !self.executor.flash() {
            return tokens * (10.0 * hidden / sharded + 24.0 * hidden / t) + self.scores();
        }
        let (query, keys) = ((model.heads * model.head_dim) as f64, (model.kv_heads * model.head_dim) as f64);
        let attention = match model.latent {
            None => 4.0 * query + 4.0 * keys,
            // Queries, keys, values and output; the compressed vectors are kept twice, before and after their norms.
            Some(latent) => 4.0 * model.query_width() + 4.0 * query + 4.0 * (latent.query + latent.key_value) as f64 * t,
        };
        let narrow = model.common_ffn(block) as f64;
        let eager = self.executor == Executor::Nanotron;
        let norms = if eager { 4.0 * hidden / sharded + 4.0 * hidden } else { 8.0 * hidden / sharded };
        let statistic = 4.0 * model.heads as f64;
        let unfused = if eager {
            let reordered = if self.layout.micro_batch > 1 { 2.0 * query } else { 0.0 };
            let unrotated = if model.kv_heads == model.heads { 4.0 * keys } else { 0.0 };
            reordered + unrotated + 2.0 * narrow
        } else {
            0.0
        };
        // Rows as experts take them and give them back, and what is between.
        let routed = model.experts_of(block).map_or(0.0, |experts| {
            let ffn = experts.ffn as f64 / t;
            experts.chosen as f64 * (4.0 * hidden + 2.0 * (model.wide(ffn) + ffn))
        });
        tokens * (norms + (attention + statistic + 2.0 * (model.wide(narrow) + narrow) + unfused) / t + routed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::fixtures;

    fn decoder(kv_heads: u64) -> Decoder {
        Decoder { kv_heads, ..fixtures::decoder() }
    }

    fn layout(dp: u64, micro_batch: u64, precision: Precision) -> Layout {
        Layout { dp, micro_batch, precision, zero: 1, ..fixtures::layout() }
    }

    /// Two inputs of norms, two of products, queries with the keys and values before rotation, keys and values after, attention's output twice, gate and up, the
    /// activation and the product: 19 tensors of the hidden width, an MLP's width being two of them, and a statistic of 4 bytes a head. The published runs without
    /// tensor parallelism grow by 19.2 a layer and token.
    #[test]
    fn nanotron_keeps_nineteen_tensors_of_a_layer() {
        let kept = |kv_heads, micro_batch| {
            let (model, layout) = (decoder(kv_heads), layout(1, micro_batch, Precision::Mixed));
            Rank { model: &model, layout: &layout, executor: Executor::Nanotron }.kept(Block::Dense) / layout.tokens(&model)
        };
        assert_eq!(kept(32, 4), 2.0 * 19.0 * 2048.0 + 128.0);
        // One sequence is in the order that the product reads.
        assert_eq!(kept(32, 1), 2.0 * 18.0 * 2048.0 + 128.0);
        // Grouped keys and values are tensors of their own, and a quarter as wide.
        assert_eq!(kept(8, 4), 2.0 * (19.0 - 2.0 - 1.5) * 2048.0 + 128.0);
    }

    /// Of a parameter: 2 bytes, 6 of gradients, 2 while parameters are gathered, and an eighth of 12; with 16-bit gradients 2, 2 and an eighth of 16.
    #[test]
    fn the_optimizer_with_long_gradients_has_parameters_twice() {
        let states = |zero, precision| {
            let (model, layout) = (decoder(32), Layout { zero, ..layout(8, 1, precision) });
            Rank { model: &model, layout: &layout, executor: Executor::DeepSpeed }.states(1.0, 8)
        };
        assert_eq!(states(1, Precision::Mixed), 11.5);
        assert_eq!(states(1, Precision::Half), 6.0);
        assert_eq!(states(0, Precision::Mixed), 20.0);
    }
}
