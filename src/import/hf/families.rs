//! The Llama-like families, as data: what differs between them and what their configs leave out.

use super::experts::Style;

/// Defaults of absent keys, and the parts a family has.
pub struct Family {
    pub vocab: u64,
    pub hidden: u64,
    pub layers: u64,
    pub heads: u64,
    pub ffn: u64,
    /// If absent, as many as heads.
    pub kv_heads: Option<u64>,
    /// If absent, hidden / heads.
    pub head_dim: Option<u64>,
    pub positions: u64,
    pub eps: f64,
    pub theta: f64,
    pub qkv_bias: Bias,
    /// Bias of the output projection and, if the family has that key, of the feed-forward.
    pub o_bias: Bias,
    pub mlp_bias: Bias,
    pub norms: Norms,
    pub qk_norm: QkNorm,
    pub attention: AttentionKind,
    pub tensors: Tensors,
    pub window: WindowRule,
    pub ffn_kind: FfnKind,
}

#[derive(Clone, Copy)]
pub enum Bias {
    Never,
    Always,
    /// If this key is true, or absent and the default is.
    Key(&'static str, bool),
}

/// Where a block has its norms: x + f(norm(x)), or x + norm(f(x)).
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Norms {
    Before,
    After,
}

/// Norms of queries and keys, before rotation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    No,
    /// Of each head, all with the same weights.
    Heads,
    /// Of all heads together.
    Whole,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum AttentionKind {
    Grouped,
    /// Grouped, with a sink for each head.
    Sinks,
    Latent,
}

/// How a checkpoint keeps query, key and value, and gate and up.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tensors {
    Apart,
    /// One behind the other in one tensor.
    Fused,
}

#[derive(Clone, Copy)]
pub enum WindowRule {
    /// The family ignores `sliding_window`.
    Never,
    /// `sliding_window` holds for all layers; absent, it is this; null, there is none.
    All { absent: Option<u64> },
    /// As `All` with 4096, if `use_sliding_window`.
    Flagged,
    /// `sliding_window` (4096 if absent) holds if `use_sliding_window`, in the layers `layer_types` names or from `max_window_layers` on.
    Opted,
    /// `sliding_window` holds in the layers `layer_types` names; absent, in all but every `full`-th.
    Turns { absent: u64, full: u64, rotation: Turning },
}

/// Whether layers with a window rotate as those without, or without any scaling.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Turning {
    Same,
    Plain,
}

#[derive(Clone, Copy)]
pub enum FfnKind {
    Dense,
    Experts(Style),
}

/// The family called `name`, as `model_type` spells it.
pub fn family(name: &str) -> &'static Family {
    match name {
        "mistral" => &MISTRAL,
        "qwen2" => &QWEN2,
        "qwen3" => &QWEN3,
        "mixtral" => &MIXTRAL,
        "phi3" => &PHI3,
        "olmo2" => &OLMO2,
        "olmo3" => &OLMO3,
        "qwen3_moe" => &QWEN3_MOE,
        "deepseek_v2" => &DEEPSEEK_V2,
        "deepseek_v3" | "kimi_k2" => &DEEPSEEK_V3,
        "glm_moe_dsa" => &GLM_MOE_DSA,
        "minimax_m2" => &MINIMAX_M2,
        "gpt_oss" => &GPT_OSS,
        _ => &LLAMA,
    }
}

const LLAMA: Family = Family {
    vocab: 32000,
    hidden: 4096,
    layers: 32,
    heads: 32,
    ffn: 11008,
    kv_heads: None,
    head_dim: None,
    positions: 2048,
    eps: 1e-6,
    theta: 1e4,
    qkv_bias: Bias::Key("attention_bias", false),
    o_bias: Bias::Key("attention_bias", false),
    mlp_bias: Bias::Key("mlp_bias", false),
    norms: Norms::Before,
    qk_norm: QkNorm::No,
    attention: AttentionKind::Grouped,
    tensors: Tensors::Apart,
    window: WindowRule::Never,
    ffn_kind: FfnKind::Dense,
};

/// No biases at all.
const BARE: Family = Family { qkv_bias: Bias::Never, o_bias: Bias::Never, mlp_bias: Bias::Never, ..LLAMA };

const MISTRAL: Family = Family { ffn: 14336, kv_heads: Some(8), positions: 131072, window: WindowRule::All { absent: Some(4096) }, ..BARE };

const QWEN2: Family =
    Family { vocab: 151936, ffn: 22016, kv_heads: Some(32), positions: 32768, qkv_bias: Bias::Always, window: WindowRule::Opted, ..BARE };

const QWEN3: Family = Family {
    head_dim: Some(128),
    qkv_bias: Bias::Key("attention_bias", false),
    o_bias: Bias::Key("attention_bias", false),
    qk_norm: QkNorm::Heads,
    ..QWEN2
};

const MIXTRAL: Family =
    Family { eps: 1e-5, theta: 1e6, window: WindowRule::All { absent: None }, ffn_kind: FfnKind::Experts(Style::Mixtral), ..MISTRAL };

const PHI3: Family = Family {
    vocab: 32064,
    hidden: 3072,
    ffn: 8192,
    positions: 4096,
    eps: 1e-5,
    tensors: Tensors::Fused,
    window: WindowRule::All { absent: None },
    ..BARE
};

const OLMO2: Family = Family { vocab: 50304, eps: 1e-5, norms: Norms::After, qk_norm: QkNorm::Whole, mlp_bias: Bias::Never, ..LLAMA };

const OLMO3: Family = Family { theta: 5e5, window: WindowRule::Turns { absent: 4096, full: 4, rotation: Turning::Plain }, ..OLMO2 };

const QWEN3_MOE: Family = Family {
    hidden: 2048,
    layers: 24,
    ffn: 6144,
    kv_heads: Some(4),
    // Absent, a head is hidden / heads here.
    head_dim: None,
    window: WindowRule::Flagged,
    ffn_kind: FfnKind::Experts(Style::Qwen3),
    ..QWEN3
};

const DEEPSEEK_V2: Family =
    Family { vocab: 102400, mlp_bias: Bias::Never, attention: AttentionKind::Latent, ffn_kind: FfnKind::Experts(Style::DeepseekV2), ..LLAMA };

const DEEPSEEK_V3: Family = Family {
    vocab: 129280,
    hidden: 7168,
    layers: 61,
    heads: 128,
    ffn: 18432,
    positions: 4096,
    ffn_kind: FfnKind::Experts(Style::DeepseekV3),
    ..DEEPSEEK_V2
};

const GLM_MOE_DSA: Family = Family { vocab: 154880, hidden: 6144, layers: 78, heads: 64, ffn: 12288, positions: 202752, eps: 1e-5, ..DEEPSEEK_V3 };

const MINIMAX_M2: Family = Family {
    vocab: 200064,
    hidden: 3072,
    layers: 62,
    heads: 48,
    ffn: 1536,
    kv_heads: Some(8),
    head_dim: Some(128),
    positions: 196608,
    theta: 5e6,
    qk_norm: QkNorm::Whole,
    ffn_kind: FfnKind::Experts(Style::MiniMax),
    ..BARE
};

const GPT_OSS: Family = Family {
    vocab: 201088,
    hidden: 2880,
    layers: 36,
    heads: 64,
    ffn: 2880,
    kv_heads: Some(8),
    head_dim: Some(64),
    positions: 131072,
    eps: 1e-5,
    theta: 1.5e5,
    qkv_bias: Bias::Key("attention_bias", true),
    o_bias: Bias::Key("attention_bias", true),
    attention: AttentionKind::Sinks,
    window: WindowRule::Turns { absent: 128, full: 2, rotation: Turning::Same },
    ffn_kind: FfnKind::Experts(Style::GptOss),
    ..BARE
};
