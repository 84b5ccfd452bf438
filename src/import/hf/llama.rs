//! The Llama-like families: rotary positions, RMS norms, grouped-query heads, gated feed-forward; mixtral's is a mixture of experts.
//!
//! x ← x + attention(norm(x)); x ← x + W_down·(f(W_gate·n) ⊙ (W_up·n)), n = norm(x). What differs between families is data: [`Family`].

use dplan_ir::entity::ValueId;
use dplan_ir::graph::Init;
use dplan_ir::op::{Activation, Attention, Mask, Op, Rope};

use super::net::{Net, Sizes};
use super::{Context, mixtral, rope};
use crate::import::json::At;
use crate::import::{ImportError, limits};

/// Largest head: its rotary frequencies are stored in the graph.
const MAX_HEAD: u64 = 1 << 16;
const MAX_HEADS: u64 = 1 << 20;

/// Defaults of absent keys, and the parts a family has.
struct Family {
    vocab: u64,
    ffn: u64,
    /// If absent, as many as heads.
    kv_heads: Option<u64>,
    /// If absent, hidden / heads.
    head_dim: Option<u64>,
    positions: u64,
    eps: f64,
    theta: f64,
    qkv_bias: Bias,
    /// Bias of the output projection and, if the family has that key, of the feed-forward.
    o_bias: Bias,
    mlp_bias: Bias,
    qk_norm: QkNorm,
    window: WindowRule,
    ffn_kind: FfnKind,
}

#[derive(Clone, Copy)]
enum Bias {
    Never,
    Always,
    /// If this key is true.
    Key(&'static str),
}

/// Norms of each query and key head, before rotation.
#[derive(Clone, Copy, PartialEq)]
enum QkNorm {
    No,
    Yes,
}

#[derive(Clone, Copy)]
enum WindowRule {
    /// The family ignores `sliding_window`.
    Never,
    /// `sliding_window` holds for all layers; absent, it is this; null, there is none.
    All { absent: Option<u64> },
    /// `sliding_window` (4096 if absent) holds if `use_sliding_window`, in the layers `layer_types` names or from `max_window_layers` on.
    Opted,
}

#[derive(Clone, Copy)]
enum FfnKind {
    Dense,
    Experts,
}

const LLAMA: Family = Family {
    vocab: 32000,
    ffn: 11008,
    kv_heads: None,
    head_dim: None,
    positions: 2048,
    eps: 1e-6,
    theta: 1e4,
    qkv_bias: Bias::Key("attention_bias"),
    o_bias: Bias::Key("attention_bias"),
    mlp_bias: Bias::Key("mlp_bias"),
    qk_norm: QkNorm::No,
    window: WindowRule::Never,
    ffn_kind: FfnKind::Dense,
};

const MISTRAL: Family = Family {
    ffn: 14336,
    kv_heads: Some(8),
    positions: 131072,
    qkv_bias: Bias::Never,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    window: WindowRule::All { absent: Some(4096) },
    ..LLAMA
};

const QWEN2: Family = Family {
    vocab: 151936,
    ffn: 22016,
    kv_heads: Some(32),
    positions: 32768,
    qkv_bias: Bias::Always,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    window: WindowRule::Opted,
    ..LLAMA
};

const QWEN3: Family =
    Family { head_dim: Some(128), qkv_bias: Bias::Key("attention_bias"), o_bias: Bias::Key("attention_bias"), qk_norm: QkNorm::Yes, ..QWEN2 };

const MIXTRAL: Family = Family { eps: 1e-5, theta: 1e6, window: WindowRule::All { absent: None }, ffn_kind: FfnKind::Experts, ..MISTRAL };

/// What all blocks share.
struct Block {
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    head: u64,
    ffn: u64,
    activation: Activation,
    eps: f64,
    rope: Rope,
    qkv_bias: bool,
    o_bias: bool,
    mlp_bias: bool,
    qk_norm: QkNorm,
    experts: Option<mixtral::Experts>,
}

/// The graph, and how many positions the model has.
pub fn build(context: &mut Context<'_>, family: &str) -> Result<(Net, u64), ImportError> {
    let family = match family {
        "mistral" => &MISTRAL,
        "qwen2" => &QWEN2,
        "qwen3" => &QWEN3,
        "mixtral" => &MIXTRAL,
        _ => &LLAMA,
    };
    let layers = context.layers(&["num_hidden_layers"], 32)?;
    let vocab = context.size("vocab_size", family.vocab)?;
    let positions = context.size("max_position_embeddings", family.positions)?;
    let mut block = block(context, family, positions)?;
    context.note_dropout(&["attention_dropout"])?;
    let seq = context.seq(positions)?;
    let windows = windows(context, family.window, layers)?;
    let sizes =
        Sizes { seq, hidden: block.hidden, kv_heads: block.kv_heads, group: block.heads / block.kv_heads, head: block.head, ffn: block.ffn, vocab };
    let mut net = Net::new(context, &sizes)?;
    if let FfnKind::Experts = family.ffn_kind {
        block.experts = Some(mixtral::experts(context, &mut net, layers)?);
    }

    let d = net.dims;
    let table = net.whole_matrix("model.embed_tokens.weight", &[d.v, d.h], &[vocab, block.hidden]);
    let mut x = net.embed(table)?;
    for (layer, window) in (1..=layers).zip(windows) {
        net.builder.set_layer(layer as u32);
        // A window that holds the whole sequence hides nothing.
        x = self::layer(&mut net, &block, layer, window.filter(|w| *w < seq), x)?;
    }
    net.builder.set_layer(layers as u32 + 1);
    let x = norm(&mut net, "norm", "model.norm.weight", block.eps, x)?;
    let head =
        if context.flag("tie_word_embeddings", false)? { table } else { net.whole_matrix("lm_head.weight", &[d.v, d.h], &[vocab, block.hidden]) };
    net.head(x, head)?;
    Ok((net, positions))
}

fn block(context: &Context<'_>, family: &Family, positions: u64) -> Result<Block, ImportError> {
    let config = context.config;
    let hidden = context.size("hidden_size", 4096)?;
    let heads = context.bounded(&["num_attention_heads"], 32, MAX_HEADS)?;
    let heads_at = config.get("num_attention_heads").unwrap_or_else(|| config.clone());
    // In `transformers` a null is as good as absence here, but the defaults differ: null is "as many as heads", absence the family's number.
    let (kv_heads, kv_at) = match config.get_or_null("num_key_value_heads") {
        Some(at) if at.value().is_null() => (heads, at),
        Some(at) => (at.integer(1..=MAX_HEADS)?, at),
        None => (family.kv_heads.unwrap_or(heads), heads_at.clone()),
    };
    if heads % kv_heads != 0 {
        return Err(kv_at.wrong(
            &format!("makes {kv_heads} key/value heads, which do not divide the {heads} attention heads"),
            &format!("a number of key/value heads that divides {heads}"),
        ));
    }
    let head_at = config.get("head_dim");
    // A null head_dim is hidden / heads in every family, an absent one may have a default of its own.
    let default = if config.get_or_null("head_dim").is_none() { family.head_dim } else { None };
    let head = match (&head_at, default) {
        (Some(at), _) => at.integer(1..=MAX_HEAD)?,
        (None, Some(default)) => default,
        (None, None) if hidden % heads == 0 => hidden / heads,
        (None, None) => {
            return Err(heads_at.wrong(
                &format!("gives {heads} heads, which do not divide hidden_size {hidden}, and there is no head_dim"),
                "a divisor of hidden_size, or head_dim should be given",
            ));
        }
    };
    if head % 2 != 0 || head > MAX_HEAD {
        let at = head_at.unwrap_or(heads_at);
        return Err(at.wrong(
            &format!("makes heads of {head} elements"),
            &format!("so that heads have an even number of elements, at most {MAX_HEAD}: rotary positions turn pairs"),
        ));
    }
    let bias = |bias: Bias| match bias {
        Bias::Never => Ok(false),
        Bias::Always => Ok(true),
        Bias::Key(key) => context.flag(key, false),
    };
    Ok(Block {
        hidden,
        heads,
        kv_heads,
        head,
        ffn: context.size("intermediate_size", family.ffn)?,
        activation: context.activation("hidden_act", Activation::Silu)?,
        eps: context.positive("rms_norm_eps", family.eps)?,
        rope: rope::rope(config, head, family.theta, positions)?,
        qkv_bias: bias(family.qkv_bias)?,
        o_bias: bias(family.o_bias)?,
        mlp_bias: bias(family.mlp_bias)?,
        qk_norm: family.qk_norm,
        experts: None,
    })
}

/// The attention window of each layer.
fn windows(context: &Context<'_>, rule: WindowRule, layers: u64) -> Result<Vec<Option<u64>>, ImportError> {
    let config = context.config;
    let size = |absent: Option<u64>| match config.get_or_null("sliding_window") {
        Some(at) if at.value().is_null() => Ok(None),
        Some(at) => at.integer(1..=limits::MAX_DIM).map(Some),
        None => Ok(absent),
    };
    let count = layers as usize;
    match rule {
        WindowRule::Never => Ok(vec![None; count]),
        WindowRule::All { absent } => Ok(vec![size(absent)?; count]),
        WindowRule::Opted if !context.flag("use_sliding_window", false)? => Ok(vec![None; count]),
        WindowRule::Opted => {
            let window = size(Some(4096))?;
            if let Some(types) = config.get("layer_types") {
                return layer_types(&types, window, count);
            }
            let first = match config.get("max_window_layers") {
                Some(at) => at.integer(0..=u64::MAX)?,
                None => 28,
            };
            Ok((0..layers).map(|i| window.filter(|_| i >= first)).collect())
        }
    }
}

fn layer_types(types: &At<'_>, window: Option<u64>, layers: usize) -> Result<Vec<Option<u64>>, ImportError> {
    let types_array = types.array()?;
    if types_array.len() != layers {
        return Err(types.wrong(&format!("has {} elements", types_array.len()), &format!("one for each of {layers} layers")));
    }
    types_array
        .iter()
        .map(|at| match at.string()? {
            "full_attention" => Ok(None),
            "sliding_attention" => Ok(window),
            _ => Err(at.wrong(&at.found(), "full_attention or sliding_attention")),
        })
        .collect()
}

fn layer(net: &mut Net, block: &Block, layer: u64, window: Option<u64>, x: ValueId) -> Result<ValueId, ImportError> {
    let tensor = |part: &str| format!("model.layers.{}.{part}", layer - 1);
    let name = |part: &str| format!("l{layer}.{part}");
    let normed = norm(net, &name("norm1"), &tensor("input_layernorm.weight"), block.eps, x)?;
    let attended = attention(net, block, layer, window, normed)?;
    let x = net.op(&name("res1"), Op::Add, &[x, attended])?;
    let normed = norm(net, &name("norm2"), &tensor("post_attention_layernorm.weight"), block.eps, x)?;
    let fed = match &block.experts {
        Some(experts) => mixtral::feed_forward(net, experts, block.activation, layer, normed)?,
        None => feed_forward(net, block, layer, normed)?,
    };
    net.op(&name("res2"), Op::Add, &[x, fed])
}

fn attention(net: &mut Net, block: &Block, layer: u64, window: Option<u64>, x: ValueId) -> Result<ValueId, ImportError> {
    let tensor = |part: &str| format!("model.layers.{}.self_attn.{part}", layer - 1);
    let name = |part: &str| format!("l{layer}.{part}");
    let d = net.dims;
    let mut qkv = Vec::with_capacity(3);
    for label in ["q", "k", "v"] {
        let (spec, heads, count) = match label {
            "q" => ("bsh,grdh->bsgrd", vec![d.g, d.r, d.d], block.heads),
            _ => ("bsh,gdh->bsgd", vec![d.g, d.d], block.kv_heads),
        };
        let weight_dims: Vec<_> = heads.iter().copied().chain([d.h]).collect();
        let weight = net.whole_matrix(&tensor(&format!("{label}_proj.weight")), &weight_dims, &[count * block.head, block.hidden]);
        let mut y = net.product(&name(label), spec, x, weight)?;
        if block.qkv_bias {
            let bias = net.whole_vector(&tensor(&format!("{label}_proj.bias")), &heads, Init::Zeros);
            y = net.op(&name(&format!("{label}.bias")), Op::AddBias, &[y, bias])?;
        }
        if label != "v" {
            if block.qk_norm == QkNorm::Yes {
                let weight = net.whole_vector(&tensor(&format!("{label}_norm.weight")), &[d.d], Init::Ones);
                y = net.op(&name(&format!("{label}.norm")), Op::RmsNorm { eps: block.eps }, &[y, weight])?;
            }
            y = net.op(&name(&format!("{label}.rope")), Op::Rope(block.rope.clone()), &[y])?;
        }
        qkv.push(y);
    }
    let scale = 1.0 / (block.head as f64).sqrt();
    let o = net.op(&name("attn"), Op::Attention(Attention { mask: Mask { causal: true, window }, scale }), &qkv)?;
    let weight = net.whole_matrix(&tensor("o_proj.weight"), &[d.h, d.g, d.r, d.d], &[block.hidden, block.heads * block.head]);
    let y = net.product(&name("o"), "bsgrd,hgrd->bsh", o, weight)?;
    if !block.o_bias {
        return Ok(y);
    }
    let bias = net.whole_vector(&tensor("o_proj.bias"), &[d.h], Init::Zeros);
    net.op(&name("o.bias"), Op::AddBias, &[y, bias])
}

fn feed_forward(net: &mut Net, block: &Block, layer: u64, x: ValueId) -> Result<ValueId, ImportError> {
    let gate = linear(net, block, layer, "gate", x)?;
    let up = linear(net, block, layer, "up", x)?;
    let gated = net.op(&format!("l{layer}.gated"), Op::Gated(block.activation), &[gate, up])?;
    linear(net, block, layer, "down", gated)
}

/// One product of the feed-forward, with its bias if it has one.
fn linear(net: &mut Net, block: &Block, layer: u64, label: &str, x: ValueId) -> Result<ValueId, ImportError> {
    let d = net.dims;
    let (spec, out, dims, shape) = match label {
        "down" => ("bsf,hf->bsh", d.h, [d.h, d.f], [block.hidden, block.ffn]),
        _ => ("bsh,fh->bsf", d.f, [d.f, d.h], [block.ffn, block.hidden]),
    };
    let tensor = format!("model.layers.{}.mlp.{label}_proj", layer - 1);
    let weight = net.whole_matrix(&format!("{tensor}.weight"), &dims, &shape);
    let y = net.product(&format!("l{layer}.{label}"), spec, x, weight)?;
    if !block.mlp_bias {
        return Ok(y);
    }
    let bias = net.whole_vector(&format!("{tensor}.bias"), &[out], Init::Zeros);
    net.op(&format!("l{layer}.{label}.bias"), Op::AddBias, &[y, bias])
}

fn norm(net: &mut Net, name: &str, tensor: &str, eps: f64, x: ValueId) -> Result<ValueId, ImportError> {
    let weight = net.whole_vector(tensor, &[net.dims.h], Init::Ones);
    net.op(name, Op::RmsNorm { eps }, &[x, weight])
}
