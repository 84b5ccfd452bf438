//! What tests of executors run: a model of published runs, and one device.

use super::{Activations, Decoder, Embeddings, Layout, Mlp, Precision, Recompute};

/// Llama of a billion parameters, as Nanotron's benchmark has it.
pub fn decoder() -> Decoder {
    Decoder {
        layers: 24,
        hidden: 2048,
        heads: 32,
        kv_heads: 32,
        head_dim: 64,
        latent: None,
        ffn: 4096,
        mlp: Mlp::Gated,
        experts: None,
        vocab: 50257,
        embeddings: Embeddings::Tied,
        sequence: 4096,
    }
}

/// Eight micro-batches of one sequence on one device.
pub fn layout() -> Layout {
    Layout {
        dp: 1,
        tp: 1,
        pp: 1,
        cp: 1,
        ep: 1,
        virtual_stages: 1,
        micro_batch: 1,
        micro_batches: 8,
        zero: 0,
        recompute: Recompute::None,
        activations: Activations::Replicated,
        precision: Precision::Mixed,
    }
}
