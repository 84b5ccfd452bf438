//! What each op means, on one rank's blocks.
//!
//! [`eval`] takes a rank's blocks of the operands, in the shardings its factor rule gives them, and returns its blocks (or partial terms) of the results.
//! On one device, with [`crate::extent::whole_context`], that is the meaning of the op itself.

mod attention;
mod linear;
mod lookup;
mod moe;
mod norm;
mod pointwise;

use crate::extent::OpContext;
use crate::interp::Tensor;
use crate::op::Op;
use crate::sharding::LocalType;

/// Results of `op` on local blocks; `outs` are their local types.
///
/// # Panics
/// If the operands are not of types the op's type rule accepts; call it on verified graphs.
pub fn eval(op: &Op, ctx: &OpContext, ins: &[&Tensor], outs: &[LocalType]) -> Vec<Tensor> {
    let one = |t: Tensor| vec![t];
    match op {
        Op::Einsum(spec) => one(linear::einsum(spec, ins[0], ins[1], &outs[0].dims)),
        Op::AddBias => one(linear::add_bias(ins[0], ins[1])),
        Op::SumLeading { .. } => one(linear::sum_leading(ins[0], &outs[0])),
        Op::Add => one(ins[0].zip(ins[1], |x, y| x + y)),
        Op::Sub => one(ins[0].zip(ins[1], |x, y| x - y)),
        Op::Neg => one(ins[0].map(|x| -x)),
        Op::Dropout { rate } => one(pointwise::dropout(ctx, *rate, ins[0])),
        Op::Act(f) => one(ins[0].map(|x| pointwise::value(*f, x))),
        Op::ActGrad(f) => one(ins[0].zip(ins[1], |x, dy| dy * pointwise::slope(*f, x))),
        Op::Gated(f) => one(ins[0].zip(ins[1], |gate, up| pointwise::value(*f, gate) * up)),
        Op::GatedGrad(f) => {
            let (gate, up, dy) = (ins[0], ins[1], ins[2]);
            let dgate = gate.zip(up, |g, u| pointwise::slope(*f, g) * u).zip(dy, |x, dy| x * dy);
            vec![dgate, gate.zip(dy, |g, dy| pointwise::value(*f, g) * dy)]
        }
        Op::RmsNorm { eps } => one(norm::rms(ins[0], ins[1], *eps)),
        Op::RmsNormGradInput { eps } => one(norm::rms_grad_input(ins[0], ins[1], ins[2], *eps)),
        Op::RmsNormGradWeight { eps } => one(norm::rms_grad_weight(ins[0], ins[1], *eps, &outs[0])),
        Op::LayerNorm { eps } => one(norm::layer(ins[0], ins[1], ins[2], *eps)),
        Op::LayerNormGradInput { eps } => one(norm::layer_grad_input(ins[0], ins[1], ins[2], *eps)),
        Op::LayerNormGradWeight { eps } => norm::layer_grad_weight(ins[0], ins[1], *eps),
        Op::Rope(rope) => one(attention::rope(rope, ctx, ins[0])),
        Op::Attention(a) => attention::forward(a, ctx, ins, None, outs),
        Op::AttentionSink(a) => attention::forward(a, ctx, ins, Some(ins[3]), outs),
        Op::SinkGrad => one(attention::sink_grad(ctx, ins)),
        Op::Append => one(attention::append(ctx, ins[0], ins[1], &outs[0])),
        Op::AppendGradHead => one(attention::append_grad_head(ins[0], &outs[0])),
        Op::AppendGradTail => one(attention::append_grad_tail(ins[0], &outs[0])),
        Op::AttentionGrad(a) => attention::backward(a, ctx, ins),
        Op::Embed => one(lookup::embed(ctx, ins[0], ins[1])),
        Op::EmbedGrad => one(lookup::embed_grad(ctx, ins[0], ins[1], &outs[0])),
        Op::AddPosition => one(lookup::add_position(ctx, ins[0], ins[1])),
        Op::AddPositionGrad => one(lookup::add_position_grad(ctx, ins[0], &outs[0])),
        Op::CeStats => lookup::ce_stats(columns(ctx, ins[0]), ins[0], ins[1]),
        Op::CeStatsGrad => one(lookup::ce_stats_grad(columns(ctx, ins[0]), ins)),
        Op::Mean => one(Tensor::dense(&[], vec![ins[0].data.iter().sum::<f64>() * ctx.inv_tokens])),
        Op::MeanGrad => one(Tensor::zeros(&outs[0]).map(|_| ctx.inv_tokens * ctx.loss_scale)),
        Op::TopKGate(router) => one(moe::top_k_gate(router, ctx, ins)),
        Op::TopKGateGrad(router) => one(moe::top_k_gate_grad(router, ctx, ins)),
        Op::CorrectionGrad => one(Tensor::zeros(&outs[0])),
        Op::Dispatch => one(moe::dispatch(ins[0], ins[1], &outs[0])),
        Op::Undispatch => one(moe::undispatch(ins[0], ins[1])),
        Op::ExpertEinsum(spec) => one(moe::expert_einsum(spec, ins, &outs[0])),
        Op::Capacity { tokens } => one(moe::capacity(*tokens, ctx, ins[0])),
        Op::AddExpertBias => one(moe::add_expert_bias(ins[0], ins[1], ins[2])),
        Op::ExpertBiasGrad => one(moe::expert_bias_grad(ins[0], ins[1], &outs[0])),
        Op::Combine => one(moe::combine(ins[0], ins[1])),
        Op::CombineGradRows => one(moe::combine_grad_rows(ins[0], ins[1], &outs[0])),
        Op::CombineGradGate => one(moe::combine_grad_gate(ins[0], ins[1], ins[2])),
    }
}

/// The extent of the last dim of logits: its letter depends on how many dims they have.
fn columns(ctx: &OpContext, logits: &Tensor) -> crate::extent::Extent {
    ctx.extent((b'a' + logits.dims.len() as u8 - 1) as char)
}
