//! One block of a Llama-like family: attention, feed-forward, their norms and the sums around them.

use dplan_ir::entity::{DimId, ValueId};
use dplan_ir::graph::Init;
use dplan_ir::op::{Attention, Mask, Op};

use super::families::{AttentionKind, Norms, QkNorm, Tensors};
use super::llama::{Block, Ffn, Own};
use super::net::{Net, part, slice};
use super::{experts, latent};
use crate::import::ImportError;

/// Block `layer` (from 1).
pub fn layer(net: &mut Net, block: &Block, layer: u64, own: &Own, x: ValueId) -> Result<ValueId, ImportError> {
    let tensor = |part: &str| format!("model.layers.{}.{part}", layer - 1);
    let name = |part: &str| format!("l{layer}.{part}");
    let norm = |net: &mut Net, label: &str, part: &str, x| net.rms_norm(&name(label), &tensor(part), &[net.dims.h], block.eps, x);
    match block.family.norms {
        Norms::Before => {
            let normed = norm(net, "norm1", "input_layernorm.weight", x)?;
            let attended = attention(net, block, layer, own, normed)?;
            let x = net.op(&name("res1"), Op::Add, &[x, attended])?;
            let normed = norm(net, "norm2", "post_attention_layernorm.weight", x)?;
            let fed = feed_forward(net, block, layer, own, normed)?;
            net.op(&name("res2"), Op::Add, &[x, fed])
        }
        Norms::After => {
            let attended = attention(net, block, layer, own, x)?;
            let normed = norm(net, "norm1", "post_attention_layernorm.weight", attended)?;
            let x = net.op(&name("res1"), Op::Add, &[x, normed])?;
            let fed = feed_forward(net, block, layer, own, x)?;
            let normed = norm(net, "norm2", "post_feedforward_layernorm.weight", fed)?;
            net.op(&name("res2"), Op::Add, &[x, normed])
        }
    }
}

fn attention(net: &mut Net, block: &Block, layer: u64, own: &Own, x: ValueId) -> Result<ValueId, ImportError> {
    if let Some(latent) = &block.latent {
        return latent::attention(net, latent, layer, x);
    }
    let tensor = |part: &str| format!("model.layers.{}.self_attn.{part}", layer - 1);
    let name = |part: &str| format!("l{layer}.{part}");
    let d = net.dims;
    let mut qkv = Vec::with_capacity(4);
    for label in ["q", "k", "v"] {
        let (spec, heads) = if label == "q" { ("bsh,grdh->bsgrd", vec![d.g, d.r, d.d]) } else { ("bsh,gdh->bsgd", vec![d.g, d.d]) };
        let weight = projection(net, block, layer, label, &heads);
        let mut y = net.product(&name(label), spec, x, weight)?;
        if block.qkv_bias {
            y = net.bias(&name(&format!("{label}.bias")), &tensor(&format!("{label}_proj.bias")), &heads, y)?;
        }
        if label != "v" {
            let over = match block.family.qk_norm {
                QkNorm::No => None,
                QkNorm::Heads => Some(vec![d.d]),
                QkNorm::Whole => Some(heads),
            };
            if let Some(over) = over {
                y = net.rms_norm(&name(&format!("{label}.norm")), &tensor(&format!("{label}_norm.weight")), &over, block.eps, y)?;
            }
            y = net.op(&name(&format!("{label}.rope")), Op::Rope(own.rope.clone()), &[y])?;
        }
        qkv.push(y);
    }
    let attention = Attention { mask: Mask { window: own.window, ..Mask::CAUSAL }, scale: 1.0 / (block.head as f64).sqrt() };
    let op = match block.family.attention {
        AttentionKind::Sinks => {
            qkv.push(net.whole_vector(&tensor("sinks"), &[d.g, d.r], Init::Zeros));
            Op::AttentionSink(attention)
        }
        AttentionKind::Grouped | AttentionKind::Latent => Op::Attention(attention),
    };
    let o = net.op(&name("attn"), op, &qkv)?;
    let weight = net.whole_matrix(&tensor("o_proj.weight"), &[d.h, d.g, d.r, d.d], &[block.hidden, block.heads * block.head]);
    let y = net.product(&name("o"), "bsgrd,hgrd->bsh", o, weight)?;
    if block.o_bias { net.bias(&name("o.bias"), &tensor("o_proj.bias"), &[d.h], y) } else { Ok(y) }
}

/// The weights of query, key or value.
fn projection(net: &mut Net, block: &Block, layer: u64, label: &str, heads: &[DimId]) -> ValueId {
    let tensor = |part: &str| format!("model.layers.{}.self_attn.{part}", layer - 1);
    let dims: Vec<DimId> = heads.iter().copied().chain([net.dims.h]).collect();
    let (q, kv) = (block.heads * block.head, block.kv_heads * block.head);
    let (start, rows) = match label {
        "q" => (0, q),
        "k" => (q, kv),
        _ => (q + kv, kv),
    };
    match block.family.tensors {
        Tensors::Apart => net.whole_matrix(&tensor(&format!("{label}_proj.weight")), &dims, &[rows, block.hidden]),
        Tensors::Fused => {
            let (fused, shape) = (tensor("qkv_proj.weight"), [q + 2 * kv, block.hidden]);
            net.matrix(&format!("{fused}.{label}"), &dims, vec![slice(&fused, &shape, &shape, 0, start, rows)])
        }
    }
}

fn feed_forward(net: &mut Net, block: &Block, layer: u64, own: &Own, x: ValueId) -> Result<ValueId, ImportError> {
    if let (Ffn::Experts, Some(experts)) = (own.ffn, &block.experts) {
        return experts::feed_forward(net, experts, block.activation, layer, x);
    }
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
    let start = format!("model.layers.{}.mlp", layer - 1);
    let tensor = format!("{start}.{label}_proj");
    let weight = match (block.family.tensors, label) {
        (Tensors::Fused, "gate" | "up") => {
            let fused = format!("{start}.gate_up_proj.weight");
            let piece = part(&fused, &[2 * block.ffn, block.hidden], 0, u64::from(label == "up"), 2);
            net.matrix(&format!("{fused}.{label}"), &dims, vec![piece])
        }
        _ => net.whole_matrix(&format!("{tensor}.weight"), &dims, &shape),
    };
    let y = net.product(&format!("l{layer}.{label}"), spec, x, weight)?;
    if block.mlp_bias { net.bias(&format!("l{layer}.{label}.bias"), &format!("{tensor}.bias"), &[out], y) } else { Ok(y) }
}
