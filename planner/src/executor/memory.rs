//! Memory of the fullest rank, for the executors whose buffers are documented: Megatron and DeepSpeed, and Nanotron, which cuts as Megatron does.
//!
//! ```text
//! allocated = bytes a parameter · parameters + in flight · layers · kept + one layer's working set + logits + buckets
//! ```
//! ZeRO 1 divides master copies and moments by the ranks that see different data, 2 gradients too, 3 parameters too, of which two layers are whole at a time.
//!
//! Kept activations: arXiv:2205.05198 §4 for unfused attention; with flash attention and a gated MLP, the inputs of every product, of both norms, of
//! attention and of the activation, 16 bits each. Nanotron also keeps attention's output in the order its product reads, the activation's output beside the
//! gate, and, split over the sequence, the gathered inputs of products (`models/llama.py`, `tensor_parallel/functional.py`).

use super::stages::Stages;
use super::{Activations, Decoder, Embeddings, Executor, Layout, Memory, Precision, Recompute};
use crate::units::Bytes;

/// Driver context and kernels (0.5 to 1.8 GiB on A100), communicators (1 to 2 GiB) and the allocator's spare blocks (median 2 to 3 GiB): the middle of each.
const OUTSIDE: f64 = 6.0 * (1u64 << 30) as f64;

/// `reduce_bucket_size` and `allgather_bucket_size`, 5·10⁸ elements of 16 bits each as DeepSpeed sets them.
const DEEPSPEED_BUCKETS: f64 = 2.0 * 2.0 * 5e8;

/// Peak of the fullest rank; nothing for the executors whose allocator decides (FSDP keeps what it once had).
pub fn memory(model: &Decoder, layout: &Layout, executor: Executor) -> Option<Memory> {
    if !executor.megatron() {
        return None;
    }
    // The second stage can have more layers than the first, and nearly as much under way.
    let allocated = [0, 1.min(layout.pp - 1), layout.pp - 1].into_iter().map(|stage| of_stage(model, layout, executor, stage)).fold(0.0, f64::max);
    Some(Memory { allocated: Bytes(allocated as u64), device: Bytes((allocated + OUTSIDE) as u64) })
}

fn of_stage(model: &Decoder, layout: &Layout, executor: Executor, stage: u64) -> f64 {
    let t = layout.tp as f64;
    let tokens = (model.sequence * layout.micro_batch) as f64 / layout.cp as f64;
    let (first, last) = (stage == 0, stage + 1 == layout.pp);
    let deepspeed = executor == Executor::DeepSpeed;

    let stages = Stages::of(model, layout, executor);
    let layers = match stage {
        _ if last => stages.last,
        0 => stages.first,
        _ => stages.most,
    };
    let embedding = (model.vocab * model.hidden) as f64 / t;
    let own_head = last && (model.embeddings == Embeddings::Apart || layout.pp > 1);
    let parameters = model.layer_parameters() as f64 * layers / t + f64::from(u8::from(first) + u8::from(own_head)) * embedding;
    // Parameter, gradient, and master copy with moments; DeepSpeed keeps 16-bit gradients beside the 32-bit ones it updates with.
    let (gradient, state) = match (deepspeed, layout.precision) {
        (true, Precision::Mixed) => (6.0, 12.0),
        (true, _) => (2.0, 16.0),
        (false, _) => (4.0, 12.0),
    };
    let shards = |from: u64| if layout.zero >= from { (layout.dp * layout.cp) as f64 } else { 1.0 };
    let bytes = 2.0 / shards(3) + gradient / shards(2) + state / shards(1);
    let gathered = if layout.zero >= 3 { 2.0 * 2.0 * model.layer_parameters() as f64 / t } else { 0.0 };
    // ZeRO's buckets; the optimizer with 32-bit gradients has none.
    let buckets = if deepspeed && layout.zero >= 1 && layout.precision == Precision::Half { DEEPSPEED_BUCKETS } else { 0.0 };

    let sharded = if layout.activations == Activations::Sharded { t } else { 1.0 };
    let hidden = model.hidden as f64;
    let input = 2.0 * tokens * hidden / sharded;
    let scores = 5.0 * (model.heads * model.sequence) as f64 * tokens / t;
    let (query, key_value) = ((model.heads * model.head_dim) as f64, (model.kv_heads * model.head_dim) as f64);
    let (wide, narrow) = (model.ffn_in() as f64, model.ffn as f64);
    let whole = if executor == Executor::Nanotron {
        tokens * (4.0 * hidden / sharded + 4.0 * hidden + (6.0 * query + 4.0 * key_value + 2.0 * wide + 4.0 * narrow) / t)
    } else if executor.flash() {
        tokens * (8.0 * hidden / sharded + (4.0 * query + 4.0 * key_value + 2.0 * (wide + narrow)) / t)
    } else {
        tokens * (10.0 * hidden / sharded + 24.0 * hidden / t) + scores
    };
    let in_flight = match layout.virtual_stages {
        1 => layout.micro_batches.min(layout.pp - stage) as f64,
        v => (layout.micro_batches as f64).min(layout.pp as f64 + (layout.pp as f64 - 1.0) / v as f64),
    };
    let activations = match layout.recompute {
        Recompute::None => in_flight * layers * whole,
        Recompute::Selective if executor.flash() => in_flight * layers * whole,
        Recompute::Selective => in_flight * layers * (whole - scores) + scores,
        // Inputs of layers, DeepSpeed's buffers between stages, and one layer computed again with its gradients.
        Recompute::Full => in_flight * (layers + f64::from(u8::from(deepspeed && layout.pp > 1)) * 2.0) * input + 1.4 * whole,
    };
    // 16-bit logits and their 32-bit copy and gradient.
    let logits = if last { 10.0 * tokens * model.vocab as f64 / t } else { 0.0 };
    bytes * parameters + gathered + buckets + activations + logits
}
