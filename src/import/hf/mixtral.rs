//! Mixtral's feed-forward: a router keeps the `k` likeliest experts of each token and renormalises their probabilities; each expert is a gated
//! feed-forward; results are added with those weights. No token is dropped and no auxiliary loss is added.

use dplan_ir::entity::{DimId, ValueId};
use dplan_ir::graph::Piece;
use dplan_ir::op::{Activation, Op, Renormalize};

use super::Context;
use super::net::{Net, parse_spec, whole};
use crate::import::{ImportError, limits};

/// The experts of every block.
pub struct Experts {
    e: DimId,
    count: u64,
    chosen: u64,
}

/// Reads the router's sizes.
pub fn experts(context: &mut Context<'_>, net: &mut Net, layers: u64) -> Result<Experts, ImportError> {
    let config = context.config;
    let count = context.bounded(&["num_local_experts", "num_experts"], 8, limits::MAX_TENSORS)?;
    if count * layers * 3 > limits::MAX_TENSORS {
        let at = config.get("num_local_experts").unwrap_or_else(|| config.clone());
        return Err(at.wrong(&format!("makes {} expert tensors", count * layers * 3), &format!("so that there are at most {}", limits::MAX_TENSORS)));
    }
    let chosen = match config.get_or_null("num_experts_per_tok") {
        Some(at) => at.integer(1..=count)?,
        None => 2.min(count),
    };
    if let Some(at) = config.get("router_jitter_noise")
        && at.number()? != 0.0
    {
        context.notes.push(format!("router_jitter_noise {} of the config is not applied", at.value()));
    }
    if context.flag("output_router_logits", false)? {
        context.notes.push("the router's auxiliary loss is not part of the loss".into());
    }
    Ok(Experts { e: net.builder.dim("e", count), count, chosen })
}

/// The feed-forward of block `layer` (from 1).
pub fn feed_forward(net: &mut Net, experts: &Experts, activation: Activation, layer: u64, x: ValueId) -> Result<ValueId, ImportError> {
    let name = |part: &str| format!("l{layer}.{part}");
    let tensor = |part: &str| format!("model.layers.{}.block_sparse_moe.{part}", layer - 1);
    let (e, h, f) = (experts.e, net.dims.h, net.dims.f);
    let (hidden, ffn) = (net.builder.graph.size(h), net.builder.graph.size(f));

    let router = net.whole_matrix(&tensor("gate.weight"), &[e, h], &[experts.count, hidden]);
    let scores = net.product(&name("router"), "bsh,eh->bse", x, router)?;
    let gate = net.op(&name("topk"), Op::TopKGate { k: experts.chosen, renormalize: Renormalize::Yes }, &[scores])?;
    let rows = net.op(&name("dispatch"), Op::Dispatch, &[x, gate])?;

    let expert = |net: &mut Net, label: &str, part: &str, spec: &str, rows: ValueId, dims: [DimId; 3], shape: [u64; 2]| {
        let pieces: Vec<Piece> =
            (0..experts.count).map(|i| Piece { at: Some(i), ..whole(&tensor(&format!("experts.{i}.{part}.weight")), &shape) }).collect();
        let weight = net.matrix(&tensor(&format!("experts.{part}.weight")), &dims, pieces);
        net.op(&name(label), Op::ExpertEinsum(parse_spec(spec)), &[rows, weight, gate])
    };
    let gated = expert(net, "gate", "w1", "bseh,efh->bsef", rows, [e, f, h], [ffn, hidden])?;
    let up = expert(net, "up", "w3", "bseh,efh->bsef", rows, [e, f, h], [ffn, hidden])?;
    let active = net.op(&name("gated"), Op::Gated(activation), &[gated, up])?;
    let down = expert(net, "down", "w2", "bsef,ehf->bseh", active, [e, h, f], [hidden, ffn])?;
    net.op(&name("combine"), Op::Combine, &[down, gate])
}
