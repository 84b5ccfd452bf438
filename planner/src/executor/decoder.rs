//! The models that executors run: decoders.
//!
//! A layer is attention and an MLP. Its products are matrices of which tensor parallelism splits one side, or none; a rank's share of a layer is what it has of
//! them. In a model with experts all layers but the first few are *routed*: a router sends each token to some of many small MLPs, beside one that all tokens take.

/// A decoder-only transformer.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Decoder {
    pub layers: u64,
    pub hidden: u64,
    pub heads: u64,
    pub kv_heads: u64,
    /// With latent attention that of values, and of keys without their positions.
    pub head_dim: u64,
    pub latent: Option<Latent>,
    /// Of layers without experts.
    pub ffn: u64,
    pub mlp: Mlp,
    pub experts: Option<Experts>,
    pub vocab: u64,
    pub embeddings: Embeddings,
    pub sequence: u64,
}

/// Queries, keys and values from compressed vectors (multi-head latent attention, arXiv:2405.04434 §2.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Latent {
    /// Width of compressed queries.
    pub query: u64,
    /// Width of compressed keys and values.
    pub key_value: u64,
    /// Width of the part of queries and keys that has positions.
    pub rope: u64,
}

/// Experts of a routed layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Experts {
    pub count: u64,
    /// Experts that a token is sent to.
    pub chosen: u64,
    pub ffn: u64,
    /// Width of the MLP that all tokens take; 0 if there is none.
    pub shared: u64,
    /// First layers without experts.
    pub dense_layers: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mlp {
    /// Up, activation, down.
    Plain,
    /// Gate and up, product, down.
    Gated,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Embeddings {
    Tied,
    Apart,
}

/// Kinds of layers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Block {
    Dense,
    Routed,
}

/// `width × depth`: each token's `depth` numbers become `width`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Product {
    pub width: f64,
    pub depth: f64,
}

impl Decoder {
    /// Products of attention on one of `t` ranks.
    pub(super) fn attention_products(&self, t: f64) -> Vec<Product> {
        let (hidden, values) = (self.hidden as f64, (self.heads * self.head_dim) as f64 / t);
        let output = Product { width: hidden, depth: values };
        match self.latent {
            None => vec![Product { width: values + 2.0 * (self.kv_heads * self.head_dim) as f64 / t, depth: hidden }, output],
            Some(latent) => vec![
                Product { width: latent.query as f64, depth: hidden },
                Product { width: self.query_width() / t, depth: latent.query as f64 },
                Product { width: (latent.key_value + latent.rope) as f64, depth: hidden },
                Product { width: 2.0 * values, depth: latent.key_value as f64 },
                output,
            ],
        }
    }

    /// Products that every token takes part in, in the MLP of a layer, on one of `t` ranks.
    pub(super) fn mlp_products(&self, block: Block, t: f64) -> Vec<Product> {
        let router = self.experts_of(block).map(|experts| Product { width: experts.count as f64, depth: self.hidden as f64 });
        let ffn = self.common_ffn(block);
        router.into_iter().chain(if ffn > 0 { self.mlp_of(ffn, t) } else { vec![] }).collect()
    }

    /// Experts of a layer, if it has any.
    pub(super) fn experts_of(&self, block: Block) -> Option<Experts> {
        match block {
            Block::Dense => None,
            Block::Routed => self.experts,
        }
    }

    /// Width of the MLP that all tokens take.
    pub(super) fn common_ffn(&self, block: Block) -> u64 {
        self.experts_of(block).map_or(self.ffn, |experts| experts.shared)
    }

    /// Products of one expert on one of `t` ranks.
    pub(super) fn expert_products(&self, experts: Experts, t: f64) -> Vec<Product> {
        self.mlp_of(experts.ffn, t)
    }

    fn mlp_of(&self, ffn: u64, t: f64) -> Vec<Product> {
        let (hidden, narrow) = (self.hidden as f64, ffn as f64 / t);
        vec![Product { width: self.wide(narrow), depth: hidden }, Product { width: hidden, depth: narrow }]
    }

    /// Width of what the first product of an MLP of width `narrow` makes.
    pub(super) fn wide(&self, narrow: f64) -> f64 {
        match self.mlp {
            Mlp::Plain => narrow,
            Mlp::Gated => 2.0 * narrow,
        }
    }

    /// All heads' queries, or keys.
    pub(super) fn query_width(&self) -> f64 {
        (self.heads * (self.head_dim + self.latent.map_or(0, |l| l.rope))) as f64
    }

    /// Weights of a layer, without its experts, on one of `t` ranks.
    pub(super) fn common_parameters(&self, block: Block, t: f64) -> f64 {
        weights(&self.attention_products(t)) + weights(&self.mlp_products(block, t)) + 2.0 * self.hidden as f64
    }

    /// Weights of all experts of a routed layer.
    pub(super) fn expert_parameters(&self) -> f64 {
        self.experts.map_or(0.0, |experts| experts.count as f64 * weights(&self.expert_products(experts, 1.0)))
    }

    /// Layers without experts, which come first.
    pub(super) fn dense_layers(&self) -> u64 {
        self.experts.map_or(self.layers, |experts| experts.dense_layers.min(self.layers))
    }
}

fn weights(products: &[Product]) -> f64 {
    products.iter().map(|p| p.width * p.depth).sum()
}
