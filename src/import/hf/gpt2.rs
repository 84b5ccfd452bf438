//! GPT-2: learned positions, layer norms with biases, one fused projection for query, key and value, `Conv1D` weights (`[in, out]`).
//!
//! x ← x + attention(norm(x)); x ← x + W₂·gelu(W₁·norm(x)).

use dplan_ir::entity::ValueId;
use dplan_ir::graph::Init;
use dplan_ir::op::{Activation, Attention, Mask, Op};

use super::net::{Net, Sizes, Targets, part};
use super::{Context, Dropped};
use crate::import::{ImportError, limits};

/// Numbers all blocks share.
struct Block {
    activation: Activation,
    eps: f64,
    scale: Scale,
    hidden: u64,
    ffn: u64,
}

/// What attention scores are multiplied with.
#[derive(Clone, Copy)]
struct Scale {
    /// 1/√d, or 1.
    base: f64,
    by_layer: ByLayer,
}

#[derive(Clone, Copy)]
enum ByLayer {
    Same,
    /// Also divided by the block's number, from 1.
    Inverse,
}

/// The graph, and how many positions the model has.
pub fn build(context: &mut Context<'_>) -> Result<(Net, u64), ImportError> {
    let config = context.config;
    let hidden = context.bounded(&["n_embd", "hidden_size"], 768, limits::MAX_DIM)?;
    let heads = context.bounded(&["n_head", "num_attention_heads"], 12, 1 << 20)?;
    let layers = context.layers(&["n_layer", "num_hidden_layers"], 12)?;
    let positions = context.bounded(&["n_positions", "max_position_embeddings", "n_ctx"], 1024, limits::MAX_DIM)?;
    let vocab = context.size("vocab_size", 50257)?;
    let ffn = match config.get("n_inner") {
        Some(at) => at.integer(1..=limits::MAX_DIM)?,
        None => 4 * hidden,
    };
    if hidden % heads != 0 {
        let at = config.get("n_head").or_else(|| config.get("num_attention_heads")).unwrap_or_else(|| config.clone());
        return Err(at.wrong(&format!("gives {heads} heads, which do not divide n_embd {hidden}"), "a divisor of n_embd"));
    }
    if let Some(at) = config.get("add_cross_attention")
        && at.boolean()?
    {
        return Err(at.wrong("is true", "false: cross attention is not supported"));
    }
    let head = hidden / heads;
    let block = Block {
        activation: context.activation("activation_function", Activation::GeluTanh)?,
        eps: context.positive("layer_norm_epsilon", 1e-5)?,
        scale: Scale {
            base: if context.flag("scale_attn_weights", true)? { 1.0 / (head as f64).sqrt() } else { 1.0 },
            by_layer: if context.flag("scale_attn_by_inverse_layer_idx", false)? { ByLayer::Inverse } else { ByLayer::Same },
        },
        hidden,
        ffn,
    };
    context.dropout(&[
        ("resid_pdrop", &[Dropped::Residual], 0.1),
        ("embd_pdrop", &[Dropped::Embedding], 0.1),
        ("attn_pdrop", &[Dropped::Attention], 0.1),
    ])?;
    let seq = context.seq(positions)?;
    let mut net = Net::new(context, &Sizes { seq, hidden, kv_heads: heads, group: 1, head, ffn, vocab }, Targets::PerToken)?;

    let d = net.dims;
    let table = net.whole_matrix("transformer.wte.weight", &[d.v, d.h], &[vocab, hidden]);
    let p = net.builder.dim("p", positions);
    let places = net.whole_matrix("transformer.wpe.weight", &[p, d.h], &[positions, hidden]);
    let embedded = net.embed(table)?;
    let mut x = net.op("embed.pos", Op::AddPosition, &[embedded, places])?;
    for layer in 1..=layers {
        net.builder.set_layer(layer as u32);
        x = self::layer(&mut net, &block, layer, x)?;
    }
    net.builder.set_layer(layers as u32 + 1);
    let x = net.layer_norm("norm", "transformer.ln_f", block.eps, x)?;
    let head = if context.flag("tie_word_embeddings", true)? { table } else { net.whole_matrix("lm_head.weight", &[d.v, d.h], &[vocab, hidden]) };
    net.head(x, head)?;
    Ok((net, positions))
}

fn layer(net: &mut Net, block: &Block, layer: u64, x: ValueId) -> Result<ValueId, ImportError> {
    let name = |part: &str| format!("l{layer}.{part}");
    let tensor = |part: &str| format!("transformer.h.{}.{part}", layer - 1);
    let d = net.dims;

    let normed = net.layer_norm(&name("norm1"), &tensor("ln_1"), block.eps, x)?;
    let (fused_weight, fused_bias) = (tensor("attn.c_attn.weight"), tensor("attn.c_attn.bias"));
    let mut qkv = Vec::with_capacity(3);
    for (index, label) in ["q", "k", "v"].into_iter().enumerate() {
        let (spec, heads) = if label == "q" { ("bsh,hgrd->bsgrd", vec![d.g, d.r, d.d]) } else { ("bsh,hgd->bsgd", vec![d.g, d.d]) };
        let cut = |tensor: &str, shape: &[u64]| vec![part(tensor, shape, shape.len() - 1, index as u64, 3)];
        let weight_dims: Vec<_> = [d.h].into_iter().chain(heads.iter().copied()).collect();
        let weight = net.matrix(&format!("{fused_weight}.{label}"), &weight_dims, cut(&fused_weight, &[block.hidden, 3 * block.hidden]));
        let bias = net.vector(&format!("{fused_bias}.{label}"), &heads, Init::Zeros, cut(&fused_bias, &[3 * block.hidden]));
        let projected = net.product(&name(&format!("{label}.matmul")), spec, normed, weight)?;
        qkv.push(net.op(&name(label), Op::AddBias, &[projected, bias])?);
    }
    let scale = match block.scale.by_layer {
        ByLayer::Same => block.scale.base,
        ByLayer::Inverse => block.scale.base / layer as f64,
    };
    let attention = Op::Attention(Attention { mask: Mask::CAUSAL, scale });
    let o = net.op(&name("attn"), attention, &qkv)?;
    let weight = net.whole_matrix(&tensor("attn.c_proj.weight"), &[d.g, d.r, d.d, d.h], &[block.hidden, block.hidden]);
    let bias = net.whole_vector(&tensor("attn.c_proj.bias"), &[d.h], Init::Zeros);
    let projected = net.product(&name("o.matmul"), "bsgrd,grdh->bsh", o, weight)?;
    let projected = net.op(&name("o"), Op::AddBias, &[projected, bias])?;
    let x = net.op(&name("res1"), Op::Add, &[x, projected])?;

    let normed = net.layer_norm(&name("norm2"), &tensor("ln_2"), block.eps, x)?;
    let weight = net.whole_matrix(&tensor("mlp.c_fc.weight"), &[d.h, d.f], &[block.hidden, block.ffn]);
    let bias = net.whole_vector(&tensor("mlp.c_fc.bias"), &[d.f], Init::Zeros);
    let up = net.product(&name("up.matmul"), "bsh,hf->bsf", normed, weight)?;
    let up = net.op(&name("up"), Op::AddBias, &[up, bias])?;
    let active = net.op(&name("act"), Op::Act(block.activation), &[up])?;
    let weight = net.whole_matrix(&tensor("mlp.c_proj.weight"), &[d.f, d.h], &[block.ffn, block.hidden]);
    let bias = net.whole_vector(&tensor("mlp.c_proj.bias"), &[d.h], Init::Zeros);
    let down = net.product(&name("down.matmul"), "bsf,fh->bsh", active, weight)?;
    let down = net.op(&name("down"), Op::AddBias, &[down, bias])?;
    net.op(&name("res2"), Op::Add, &[x, down])
}
