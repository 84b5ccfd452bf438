//! The Llama-like families: rotary positions, RMS norms, grouped-query or latent attention, gated feed-forwards or mixtures of experts.
//!
//! x ← x + attention(norm(x)); x ← x + W_down·(f(W_gate·n) ⊙ (W_up·n)), n = norm(x). What differs between families is data: [`Family`].

use dplan_ir::op::{Activation, Rope};

use super::decoder;
use super::experts;
use super::families::{AttentionKind, Bias, Family, FfnKind, Turning, WindowRule, family};
use super::latent;
use super::net::{Net, Sizes, Targets};
use super::{Context, Dropped, rope};
use crate::import::json::At;
use crate::import::{ImportError, limits};

/// Largest head: its rotary frequencies are stored in the graph.
const MAX_HEAD: u64 = 1 << 16;
const MAX_HEADS: u64 = 1 << 20;

/// What all blocks share.
pub struct Block {
    pub family: &'static Family,
    pub hidden: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head: u64,
    pub ffn: u64,
    pub activation: Activation,
    pub eps: f64,
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub mlp_bias: bool,
    pub latent: Option<latent::Latent>,
    pub experts: Option<experts::Experts>,
}

/// What a block has of its own.
pub struct Own {
    pub window: Option<u64>,
    pub rope: Rope,
    pub ffn: Ffn,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Ffn {
    Dense,
    Experts,
}

/// The graph, and how many positions the model has.
pub fn build(context: &mut Context<'_>, name: &str) -> Result<(Net, u64), ImportError> {
    let family = family(name);
    let layers = context.layers(&["num_hidden_layers"], family.layers)?;
    let vocab = context.size("vocab_size", family.vocab)?;
    let positions = context.size("max_position_embeddings", family.positions)?;
    context.dropout(&[("attention_dropout", &[Dropped::Attention], 0.0)])?;
    if name == "phi3" {
        context.dropout(&[("resid_pdrop", &[Dropped::Residual], 0.0), ("embd_pdrop", &[Dropped::Embedding], 0.0)])?;
    }
    leave_out(context, name)?;
    let seq = context.seq(positions)?;
    let latent = match family.attention {
        AttentionKind::Latent => Some(latent::numbers(context, positions, seq)?),
        AttentionKind::Grouped | AttentionKind::Sinks => None,
    };
    let mut block = block(context, family, latent.as_ref().map(latent::Numbers::head))?;
    let experts = match family.ffn_kind {
        FfnKind::Dense => None,
        FfnKind::Experts(style) => Some(experts::numbers(context, style, layers)?),
    };
    let windows = windows(context, family.window, layers)?;
    if let Some(experts) = experts.as_ref().filter(|e| e.sparse.iter().all(|&s| s)) {
        block.ffn = experts.width;
    }
    let own = own(context, &block, (positions, seq), windows, experts.as_ref())?;
    let sizes =
        Sizes { seq, hidden: block.hidden, kv_heads: block.kv_heads, group: block.heads / block.kv_heads, head: block.head, ffn: block.ffn, vocab };
    let mut net = Net::new(context, &sizes, Targets::PerToken)?;
    block.latent = latent.map(|numbers| numbers.latent(&mut net));
    block.experts = experts.filter(|e| e.sparse.contains(&true)).map(|e| e.experts(&mut net));

    let d = net.dims;
    let table = net.whole_matrix("model.embed_tokens.weight", &[d.v, d.h], &[vocab, block.hidden]);
    let mut x = net.embed(table)?;
    for (layer, own) in (1..=layers).zip(&own) {
        net.builder.set_layer(layer as u32);
        x = decoder::layer(&mut net, &block, layer, own, x)?;
    }
    net.builder.set_layer(layers as u32 + 1);
    let x = net.rms_norm("norm", "model.norm.weight", &[d.h], block.eps, x)?;
    let head =
        if context.flag("tie_word_embeddings", false)? { table } else { net.whole_matrix("lm_head.weight", &[d.v, d.h], &[vocab, block.hidden]) };
    net.head(x, head)?;
    Ok((net, positions))
}

/// Says, or refuses, what the family's graph does not compute.
fn leave_out(context: &mut Context<'_>, name: &str) -> Result<(), ImportError> {
    let config = context.config;
    if let Some(at) = config.get("num_nextn_predict_layers")
        && at.integer(0..=u64::MAX)? > 0
    {
        context.notes.push(format!("the {} layers that predict further tokens are left out", at.value()));
    }
    if name == "glm_moe_dsa" {
        context
            .notes
            .push("the indexer of sparse attention, which has no gradient of the loss, is left out: every query sees all keys before it".into());
    }
    for (key, right) in [("swiglu_limit", f64::from(experts::LIMIT)), ("swiglu_alpha", 1.702)] {
        if let Some(at) = config.get(key).filter(|_| name == "gpt_oss")
            && at.number()? != right
        {
            return Err(at.wrong(&at.found(), &format!("{right}")));
        }
    }
    Ok(())
}

/// Window, rotation and kind of feed-forward of each block.
fn own(
    context: &Context<'_>,
    block: &Block,
    (positions, seq): (u64, u64),
    windows: Vec<Option<u64>>,
    experts: Option<&experts::Numbers>,
) -> Result<Vec<Own>, ImportError> {
    let defaults = rope::Defaults { head: block.head, theta: block.family.theta, part: 1.0, positions, seq };
    let (full, sliding) = match (block.family.attention, block.family.window) {
        // Latent attention has a rotation of its own.
        (AttentionKind::Latent, _) => {
            let none = Rope::whole(dplan_ir::op::Rotation::Forward, Vec::new());
            (none.clone(), none)
        }
        (_, WindowRule::Turns { rotation: Turning::Plain, .. }) => {
            (rope::rope(context.config, defaults, "full_attention")?, rope::plain(context.config, defaults)?)
        }
        _ => {
            let full = rope::rope(context.config, defaults, "full_attention")?;
            (full.clone(), full)
        }
    };
    let ffn = |i: usize| if experts.is_some_and(|e| e.sparse[i]) { Ffn::Experts } else { Ffn::Dense };
    let rope = |window: &Option<u64>| if window.is_some() { sliding.clone() } else { full.clone() };
    // A window that holds the whole sequence hides nothing.
    Ok(windows.iter().enumerate().map(|(i, w)| Own { window: w.filter(|&w| w < seq), rope: rope(w), ffn: ffn(i) }).collect())
}

fn block(context: &Context<'_>, family: &'static Family, latent_head: Option<u64>) -> Result<Block, ImportError> {
    let config = context.config;
    let hidden = context.size("hidden_size", family.hidden)?;
    let heads = context.bounded(&["num_attention_heads"], family.heads, MAX_HEADS)?;
    let heads_at = config.get("num_attention_heads").unwrap_or_else(|| config.clone());
    // Of a latent, every head gets keys and values of its own.
    if let Some(head) = latent_head {
        return rest(context, family, Heads { hidden, heads, kv_heads: heads, head });
    }
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
    rest(context, family, Heads { hidden, heads, kv_heads, head })
}

struct Heads {
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    head: u64,
}

fn rest(context: &Context<'_>, family: &'static Family, Heads { hidden, heads, kv_heads, head }: Heads) -> Result<Block, ImportError> {
    let bias = |bias: Bias| match bias {
        Bias::Never => Ok(false),
        Bias::Always => Ok(true),
        Bias::Key(key, default) => context.flag(key, default),
    };
    Ok(Block {
        family,
        hidden,
        heads,
        kv_heads,
        head,
        ffn: context.size("intermediate_size", family.ffn)?,
        activation: context.activation("hidden_act", Activation::Silu)?,
        eps: context.positive("rms_norm_eps", family.eps)?,
        qkv_bias: bias(family.qkv_bias)?,
        o_bias: bias(family.o_bias)?,
        mlp_bias: bias(family.mlp_bias)?,
        latent: None,
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
        WindowRule::Flagged => {
            let window = if context.flag("use_sliding_window", false)? { size(Some(4096))? } else { None };
            Ok(vec![window; count])
        }
        WindowRule::Turns { absent, full, .. } => {
            let window = size(Some(absent))?;
            match config.get("layer_types") {
                Some(types) => layer_types(&types, window, count),
                None => Ok((1..=layers).map(|i| window.filter(|_| i % full != 0)).collect()),
            }
        }
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
