//! GPT-NeoX and Phi: layer norms with biases, heads of which a part turns, and attention and feed-forward side by side.
//!
//! x ← x + attention(norm₁(x)) + W₂·gelu(W₁·norm₂(x)); Phi has one norm for both, GPT-NeoX may have them one behind the other.

use dplan_ir::entity::{DimId, ValueId};
use dplan_ir::graph::Init;
use dplan_ir::op::{Activation, Attention, Mask, Op, Rope};

use super::net::{Net, Place, Sizes, Targets, slice};
use super::{Context, Dropped, rope};
use crate::import::{ImportError, limits};

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Family {
    GptNeoX,
    Phi,
}

/// What all blocks share.
struct Block {
    family: Family,
    layout: Residual,
    activation: Activation,
    eps: f64,
    rope: Rope,
    /// Whether query, key and value, and the output projection, have biases.
    bias: bool,
    head_norm: bool,
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    head: u64,
    ffn: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Residual {
    Parallel,
    OneByOne,
}

const MAX_HEADS: u64 = 1 << 16;

/// The graph, and how many positions the model has.
pub fn build(context: &mut Context<'_>, family: Family) -> Result<(Net, u64), ImportError> {
    let neox = family == Family::GptNeoX;
    let pick = |a: u64, b: u64| if neox { a } else { b };
    let layers = context.layers(&["num_hidden_layers"], pick(44, 24))?;
    let vocab = context.size("vocab_size", pick(50432, 51200))?;
    let positions = context.size("max_position_embeddings", 2048)?;
    context.dropout(&[("attention_dropout", &[Dropped::Attention], 0.0)])?;
    match family {
        Family::GptNeoX => context.dropout(&[("hidden_dropout", &[Dropped::Embedding, Dropped::Residual], 0.0)])?,
        Family::Phi => context.dropout(&[("resid_pdrop", &[Dropped::Residual], 0.0), ("embd_pdrop", &[Dropped::Embedding], 0.0)])?,
    }
    let seq = context.seq(positions)?;
    let block = block(context, family, positions, seq)?;
    let group = block.heads / block.kv_heads;
    let sizes = Sizes { seq, hidden: block.hidden, kv_heads: block.kv_heads, group, head: block.head, ffn: block.ffn, vocab };
    let mut net = Net::new(context, &sizes, Targets::PerToken)?;

    let d = net.dims;
    let [embed, last, head] = match family {
        Family::GptNeoX => ["gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm", "embed_out.weight"],
        Family::Phi => ["model.embed_tokens.weight", "model.final_layernorm", "lm_head.weight"],
    };
    let table = net.whole_matrix(embed, &[d.v, d.h], &[vocab, block.hidden]);
    let mut x = net.embed(table)?;
    for layer in 1..=layers {
        net.builder.set_layer(layer as u32);
        x = self::layer(&mut net, &block, layer, x)?;
    }
    net.builder.set_layer(layers as u32 + 1);
    let x = net.layer_norm("norm", last, block.eps, x)?;
    let head = if context.flag("tie_word_embeddings", false)? { table } else { net.whole_matrix(head, &[d.v, d.h], &[vocab, block.hidden]) };
    match family {
        Family::GptNeoX => net.head(x, head)?,
        Family::Phi => {
            let logits = net.product("logits.matmul", "bsh,vh->bsv", x, head)?;
            let logits = net.bias("logits", "lm_head.bias", &[d.v], logits)?;
            net.loss(logits)?;
        }
    }
    Ok((net, positions))
}

fn block(context: &Context<'_>, family: Family, positions: u64, seq: u64) -> Result<Block, ImportError> {
    let config = context.config;
    let neox = family == Family::GptNeoX;
    let hidden = context.size("hidden_size", if neox { 6144 } else { 2048 })?;
    let heads = context.bounded(&["num_attention_heads"], if neox { 64 } else { 32 }, MAX_HEADS)?;
    let heads_at = config.get("num_attention_heads").unwrap_or_else(|| config.clone());
    if hidden % heads != 0 || hidden / heads > MAX_HEADS {
        return Err(heads_at
            .wrong(&format!("gives {heads} heads for hidden_size {hidden}"), "a divisor of hidden_size, with heads of at most 65536 elements"));
    }
    let kv_heads = if neox { heads } else { context.bounded(&["num_key_value_heads"], heads, MAX_HEADS)? };
    if heads % kv_heads != 0 {
        let at = config.get("num_key_value_heads").unwrap_or(heads_at);
        return Err(at.wrong(&format!("makes {kv_heads} key/value heads of {heads} heads"), &format!("a divisor of {heads}")));
    }
    let defaults = rope::Defaults { head: hidden / heads, theta: 1e4, part: if neox { 0.25 } else { 0.5 }, positions, seq };
    Ok(Block {
        family,
        layout: if neox && !context.flag("use_parallel_residual", true)? { Residual::OneByOne } else { Residual::Parallel },
        activation: context.activation("hidden_act", if neox { Activation::Gelu } else { Activation::GeluTanh })?,
        eps: context.positive("layer_norm_eps", 1e-5)?,
        rope: rope::rope(config, defaults, "full_attention")?,
        bias: !neox || context.flag("attention_bias", true)?,
        head_norm: !neox && context.flag("qk_layernorm", false)?,
        hidden,
        heads,
        kv_heads,
        head: hidden / heads,
        ffn: context.bounded(&["intermediate_size"], if neox { 24576 } else { 8192 }, limits::MAX_DIM)?,
    })
}

fn layer(net: &mut Net, block: &Block, layer: u64, x: ValueId) -> Result<ValueId, ImportError> {
    let start = match block.family {
        Family::GptNeoX => format!("gpt_neox.layers.{}", layer - 1),
        Family::Phi => format!("model.layers.{}", layer - 1),
    };
    let at = Place { layer, start: &start };
    let normed = net.layer_norm(&at.name("norm1"), &at.tensor("input_layernorm"), block.eps, x)?;
    let attended = attention(net, block, at, normed)?;
    let second = |net: &mut Net, x| net.layer_norm(&at.name("norm2"), &at.tensor("post_attention_layernorm"), block.eps, x);
    match (block.layout, block.family) {
        (Residual::OneByOne, _) => {
            let x = net.op(&at.name("res1"), Op::Add, &[x, attended])?;
            let normed = second(net, x)?;
            let fed = feed_forward(net, block, at, normed)?;
            net.op(&at.name("res2"), Op::Add, &[x, fed])
        }
        (Residual::Parallel, family) => {
            let normed = if family == Family::GptNeoX { second(net, x)? } else { normed };
            let fed = feed_forward(net, block, at, normed)?;
            let both = net.op(&at.name("both"), Op::Add, &[attended, fed])?;
            net.op(&at.name("res"), Op::Add, &[x, both])
        }
    }
}

fn attention(net: &mut Net, block: &Block, at: Place<'_>, x: ValueId) -> Result<ValueId, ImportError> {
    let d = net.dims;
    let mut qkv = Vec::with_capacity(3);
    for (index, label) in ["q", "k", "v"].into_iter().enumerate() {
        let (spec, dims) = if label == "q" { ("bsh,grdh->bsgrd", vec![d.g, d.r, d.d]) } else { ("bsh,gdh->bsgd", vec![d.g, d.d]) };
        let (weight, bias) = projection(net, block, at, (index as u64, label), &dims);
        let mut y = net.product(&at.name(&format!("{label}.matmul")), spec, x, weight)?;
        if let Some(bias) = bias {
            y = net.op(&at.name(label), Op::AddBias, &[y, bias])?;
        }
        if label != "v" {
            if block.head_norm {
                y =
                    net.layer_norm_over(d.d, &at.name(&format!("{label}.norm")), &at.tensor(&format!("self_attn.{label}_layernorm")), block.eps, y)?;
            }
            y = net.op(&at.name(&format!("{label}.rope")), Op::Rope(block.rope.clone()), &[y])?;
        }
        qkv.push(y);
    }
    let scale = 1.0 / (block.head as f64).sqrt();
    let o = net.op(&at.name("attn"), Op::Attention(Attention { mask: Mask::CAUSAL, scale }), &qkv)?;
    let tensor = if block.family == Family::GptNeoX { "attention.dense" } else { "self_attn.dense" };
    let weight = net.whole_matrix(&at.tensor(&format!("{tensor}.weight")), &[d.h, d.g, d.r, d.d], &[block.hidden, block.heads * block.head]);
    let y = net.product(&at.name("o"), "bsgrd,hgrd->bsh", o, weight)?;
    if block.bias { net.bias(&at.name("o.bias"), &at.tensor(&format!("{tensor}.bias")), &[d.h], y) } else { Ok(y) }
}

/// Weight and bias of query, key or value. GPT-NeoX keeps all three in one tensor, head by head.
fn projection(net: &mut Net, block: &Block, at: Place<'_>, (index, label): (u64, &str), dims: &[DimId]) -> (ValueId, Option<ValueId>) {
    let weight_dims: Vec<DimId> = dims.iter().copied().chain([net.dims.h]).collect();
    match block.family {
        Family::GptNeoX => {
            let (weight, bias) = (at.tensor("attention.query_key_value.weight"), at.tensor("attention.query_key_value.bias"));
            let (all, view) = (3 * block.hidden, [block.heads, 3, block.head]);
            let piece = slice(&weight, &[all, block.hidden], &[block.heads, 3, block.head, block.hidden], 1, index, 1);
            let matrix = net.matrix(&format!("{weight}.{label}"), &weight_dims, vec![piece]);
            let bias = block.bias.then(|| net.vector(&format!("{bias}.{label}"), dims, Init::Zeros, vec![slice(&bias, &[all], &view, 1, index, 1)]));
            (matrix, bias)
        }
        Family::Phi => {
            let heads = if label == "q" { block.heads } else { block.kv_heads };
            let tensor = at.tensor(&format!("self_attn.{label}_proj"));
            let matrix = net.whole_matrix(&format!("{tensor}.weight"), &weight_dims, &[heads * block.head, block.hidden]);
            (matrix, Some(net.whole_vector(&format!("{tensor}.bias"), dims, Init::Zeros)))
        }
    }
}

fn feed_forward(net: &mut Net, block: &Block, at: Place<'_>, x: ValueId) -> Result<ValueId, ImportError> {
    let d = net.dims;
    let [up, down] = match block.family {
        Family::GptNeoX => ["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"],
        Family::Phi => ["mlp.fc1", "mlp.fc2"],
    };
    let weight = net.whole_matrix(&at.tensor(&format!("{up}.weight")), &[d.f, d.h], &[block.ffn, block.hidden]);
    let y = net.product(&at.name("up.matmul"), "bsh,fh->bsf", x, weight)?;
    let y = net.bias(&at.name("up"), &at.tensor(&format!("{up}.bias")), &[d.f], y)?;
    let y = net.op(&at.name("act"), Op::Act(block.activation), &[y])?;
    let weight = net.whole_matrix(&at.tensor(&format!("{down}.weight")), &[d.h, d.f], &[block.hidden, block.ffn]);
    let y = net.product(&at.name("down.matmul"), "bsf,hf->bsh", y, weight)?;
    net.bias(&at.name("down"), &at.tensor(&format!("{down}.bias")), &[d.h], y)
}
