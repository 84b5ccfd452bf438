//! Operations: a keyword, then attributes.

use std::collections::BTreeMap;

use crate::op::{
    Activation, Attention, Correction, Documents, GroupScore, Groups, Mask, Op, Pairs, Renormalize, Rope, Rotation, Router, Score, Spec,
};
use crate::text::lexer::{is_word, quote};
use crate::text::parser::{Parsed, Parser};

/// What an op is called in text.
pub fn op_name(op: &Op) -> &'static str {
    match op {
        Op::Einsum(_) => "einsum",
        Op::AddBias => "add_bias",
        Op::SumLeading { .. } => "sum_leading",
        Op::Add => "add",
        Op::Sub => "sub",
        Op::Neg => "neg",
        Op::Dropout { .. } => "dropout",
        Op::Act(_) => "act",
        Op::ActGrad(_) => "act_grad",
        Op::Gated(_) => "gated",
        Op::GatedGrad(_) => "gated_grad",
        Op::RmsNorm { .. } => "rms_norm",
        Op::RmsNormGradInput { .. } => "rms_norm_grad_input",
        Op::RmsNormGradWeight { .. } => "rms_norm_grad_weight",
        Op::LayerNorm { .. } => "layer_norm",
        Op::LayerNormGradInput { .. } => "layer_norm_grad_input",
        Op::LayerNormGradWeight { .. } => "layer_norm_grad_weight",
        Op::Rope(_) => "rope",
        Op::Attention(_) => "attention",
        Op::AttentionGrad(_) => "attention_grad",
        Op::AttentionSink(_) => "attention_sink",
        Op::SinkGrad => "sink_grad",
        Op::Append => "append",
        Op::AppendGradHead => "append_grad_head",
        Op::AppendGradTail => "append_grad_tail",
        Op::Embed => "embed",
        Op::EmbedGrad => "embed_grad",
        Op::AddPosition => "add_position",
        Op::AddPositionGrad => "add_position_grad",
        Op::CeStats => "ce_stats",
        Op::CeStatsGrad => "ce_stats_grad",
        Op::Mean => "mean",
        Op::MeanGrad => "mean_grad",
        Op::TopKGate(_) => "top_k_gate",
        Op::TopKGateGrad(_) => "top_k_gate_grad",
        Op::CorrectionGrad => "correction_grad",
        Op::Capacity { .. } => "capacity",
        Op::AddExpertBias => "add_expert_bias",
        Op::ExpertBiasGrad => "expert_bias_grad",
        Op::Dispatch => "dispatch",
        Op::Undispatch => "undispatch",
        Op::ExpertEinsum(_) => "expert_einsum",
        Op::Combine => "combine",
        Op::CombineGradRows => "combine_grad_rows",
        Op::CombineGradGate => "combine_grad_gate",
    }
}

/// Every name of an op.
const NAMES: [&str; 44] = [
    "einsum",
    "add_bias",
    "sum_leading",
    "add",
    "sub",
    "neg",
    "act",
    "act_grad",
    "gated",
    "gated_grad",
    "rms_norm",
    "rms_norm_grad_input",
    "rms_norm_grad_weight",
    "layer_norm",
    "layer_norm_grad_input",
    "layer_norm_grad_weight",
    "rope",
    "attention",
    "attention_grad",
    "attention_sink",
    "sink_grad",
    "append",
    "append_grad_head",
    "append_grad_tail",
    "embed",
    "embed_grad",
    "add_position",
    "add_position_grad",
    "ce_stats",
    "ce_stats_grad",
    "mean",
    "mean_grad",
    "top_k_gate",
    "top_k_gate_grad",
    "correction_grad",
    "capacity",
    "add_expert_bias",
    "expert_bias_grad",
    "dispatch",
    "undispatch",
    "expert_einsum",
    "combine",
    "combine_grad_rows",
    "combine_grad_gate",
];

const ACTIVATIONS: [&str; 7] = ["silu", "gelu", "gelu_tanh", "relu", "quick_gelu", "clamp", "clamp_above"];

/// Rotary tables of a text, each stated once.
#[derive(Default)]
pub struct Tables {
    by_name: BTreeMap<String, Vec<f64>>,
    /// Elements that nodes hold so far.
    used: usize,
}

/// Bound on what rotary tables may take in all nodes together: text must not make a graph that is much larger than itself.
const MAX_TABLE_ELEMS: usize = 1 << 22;

impl Tables {
    /// Whether `name` was not there yet.
    pub fn insert(&mut self, name: &str, table: Vec<f64>) -> bool {
        self.by_name.insert(name.to_string(), table).is_none()
    }

    fn take(&mut self, p: &mut Parser<'_>) -> Parsed<Vec<f64>> {
        let at = p.at();
        let name = p.any_word("the name of a table")?;
        let Some(table) = self.by_name.get(name) else {
            return Err(p.unknown(at, "table", name, &self.by_name.keys().collect::<Vec<_>>()));
        };
        self.used += table.len();
        if self.used > MAX_TABLE_ELEMS {
            return Err(p.wrong(at, "more table elements in all nodes than any model has", format!("at most {MAX_TABLE_ELEMS}")));
        }
        Ok(table.clone())
    }
}

/// Rotary tables of a graph, by first use; equal means bitwise equal.
#[derive(Default)]
pub struct TableNames {
    by_bits: BTreeMap<Vec<u64>, usize>,
}

impl TableNames {
    /// The table's number, and whether it is new.
    pub fn number(&mut self, table: &[f64]) -> (usize, bool) {
        let next = self.by_bits.len();
        let number = *self.by_bits.entry(bits(table)).or_insert(next);
        (number, number == next)
    }
    fn find(&self, table: &[f64]) -> usize {
        self.by_bits.get(&bits(table)).copied().unwrap_or(usize::MAX)
    }
}

fn bits(table: &[f64]) -> Vec<u64> {
    table.iter().map(|x| x.to_bits()).collect()
}

/// Appends a number so that it reads back to the same bits (of a NaN: to a NaN).
pub fn put_real(out: &mut String, x: f64) {
    if x.is_nan() { out.push_str("nan") } else { out.push_str(&format!("{x:?}")) }
}

pub fn put_op(out: &mut String, op: &Op, tables: &TableNames) {
    out.push_str(op_name(op));
    match op {
        Op::Einsum(spec) | Op::ExpertEinsum(spec) => put_spec(out, spec),
        Op::SumLeading { keep } => out.push_str(&format!(" keep={keep}")),
        Op::Act(f) | Op::ActGrad(f) | Op::Gated(f) | Op::GatedGrad(f) => {
            put_activation(out, *f);
        }
        Op::RmsNorm { eps }
        | Op::RmsNormGradInput { eps }
        | Op::RmsNormGradWeight { eps }
        | Op::LayerNorm { eps }
        | Op::LayerNormGradInput { eps }
        | Op::LayerNormGradWeight { eps } => {
            out.push_str(" eps=");
            put_real(out, *eps);
        }
        Op::Rope(rope) => {
            if rope.rotation == Rotation::Inverse {
                out.push_str(" inverse");
            }
            if rope.pairs == Pairs::Neighbours {
                out.push_str(" neighbours");
            }
            if rope.start != 0 {
                out.push_str(&format!(" start={}", rope.start));
            }
            if rope.scale != 1.0 {
                out.push_str(" scale=");
                put_real(out, rope.scale);
            }
            out.push_str(&format!(" t{}", tables.find(&rope.inv_freq)));
        }
        Op::Attention(a) | Op::AttentionGrad(a) | Op::AttentionSink(a) => put_attention(out, a),
        Op::TopKGate(r) | Op::TopKGateGrad(r) => put_router(out, r),
        Op::Capacity { tokens } => out.push_str(&format!(" tokens={tokens}")),
        Op::Dropout { rate } => {
            out.push_str(" rate=");
            put_real(out, *rate);
        }
        Op::AddBias
        | Op::Add
        | Op::Sub
        | Op::Neg
        | Op::SinkGrad
        | Op::Append
        | Op::AppendGradHead
        | Op::AppendGradTail
        | Op::CorrectionGrad
        | Op::AddExpertBias
        | Op::ExpertBiasGrad
        | Op::Embed
        | Op::EmbedGrad
        | Op::AddPosition
        | Op::AddPositionGrad
        | Op::CeStats
        | Op::CeStatsGrad
        | Op::Mean
        | Op::MeanGrad
        | Op::Dispatch
        | Op::Undispatch
        | Op::Combine
        | Op::CombineGradRows
        | Op::CombineGradGate => {}
    }
}

pub fn op(p: &mut Parser<'_>, tables: &mut Tables) -> Parsed<Op> {
    let at = p.at();
    let name = p.any_word("an op")?;
    let op = match name {
        "einsum" => Op::Einsum(spec(p)?),
        "add_bias" => Op::AddBias,
        "sum_leading" => Op::SumLeading { keep: p.integer_of("keep")? },
        "add" => Op::Add,
        "sub" => Op::Sub,
        "neg" => Op::Neg,
        "dropout" => Op::Dropout { rate: p.real_of("rate")? },
        "act" => Op::Act(activation(p)?),
        "act_grad" => Op::ActGrad(activation(p)?),
        "gated" => Op::Gated(activation(p)?),
        "gated_grad" => Op::GatedGrad(activation(p)?),
        "rms_norm" => Op::RmsNorm { eps: p.real_of("eps")? },
        "rms_norm_grad_input" => Op::RmsNormGradInput { eps: p.real_of("eps")? },
        "rms_norm_grad_weight" => Op::RmsNormGradWeight { eps: p.real_of("eps")? },
        "layer_norm" => Op::LayerNorm { eps: p.real_of("eps")? },
        "layer_norm_grad_input" => Op::LayerNormGradInput { eps: p.real_of("eps")? },
        "layer_norm_grad_weight" => Op::LayerNormGradWeight { eps: p.real_of("eps")? },
        "rope" => {
            let rotation = if p.take_word("inverse") { Rotation::Inverse } else { Rotation::Forward };
            let pairs = if p.take_word("neighbours") { Pairs::Neighbours } else { Pairs::Halves };
            let start = if p.is_word("start") { p.integer_of("start")? } else { 0 };
            let scale = if p.is_word("scale") { p.real_of("scale")? } else { 1.0 };
            Op::Rope(Rope { rotation, pairs, start, scale, inv_freq: tables.take(p)? })
        }
        "attention" => Op::Attention(attention(p)?),
        "attention_grad" => Op::AttentionGrad(attention(p)?),
        "attention_sink" => Op::AttentionSink(attention(p)?),
        "sink_grad" => Op::SinkGrad,
        "append" => Op::Append,
        "append_grad_head" => Op::AppendGradHead,
        "append_grad_tail" => Op::AppendGradTail,
        "embed" => Op::Embed,
        "embed_grad" => Op::EmbedGrad,
        "add_position" => Op::AddPosition,
        "add_position_grad" => Op::AddPositionGrad,
        "ce_stats" => Op::CeStats,
        "ce_stats_grad" => Op::CeStatsGrad,
        "mean" => Op::Mean,
        "mean_grad" => Op::MeanGrad,
        "top_k_gate" => Op::TopKGate(router(p)?),
        "top_k_gate_grad" => Op::TopKGateGrad(router(p)?),
        "correction_grad" => Op::CorrectionGrad,
        "capacity" => Op::Capacity { tokens: p.integer_of("tokens")? },
        "add_expert_bias" => Op::AddExpertBias,
        "expert_bias_grad" => Op::ExpertBiasGrad,
        "dispatch" => Op::Dispatch,
        "undispatch" => Op::Undispatch,
        "expert_einsum" => Op::ExpertEinsum(spec(p)?),
        "combine" => Op::Combine,
        "combine_grad_rows" => Op::CombineGradRows,
        "combine_grad_gate" => Op::CombineGradGate,
        _ => return Err(p.unknown(at, "op", name, &NAMES)),
    };
    Ok(op)
}

fn put_spec(out: &mut String, spec: &Spec) {
    for (before, letters) in [(" ", &spec.left), (",", &spec.right), ("->", &spec.out)] {
        out.push_str(before);
        if is_word(letters) { out.push_str(letters) } else { quote(out, letters) }
    }
}

fn spec(p: &mut Parser<'_>) -> Parsed<Spec> {
    let left = p.label("the letters of a product, like `bsh,fh->bsf`")?.into_owned();
    p.sign(',')?;
    let right = p.label("the letters of the right operand")?.into_owned();
    p.arrow()?;
    let out = p.label("the letters of the result")?.into_owned();
    Ok(Spec { left, right, out })
}

fn put_activation(out: &mut String, f: Activation) {
    let (name, limit) = match f {
        Activation::Silu => ("silu", None),
        Activation::Gelu => ("gelu", None),
        Activation::GeluTanh => ("gelu_tanh", None),
        Activation::Relu => ("relu", None),
        Activation::QuickGelu => ("quick_gelu", None),
        Activation::Clamp { limit } => ("clamp", Some(limit)),
        Activation::ClampAbove { limit } => ("clamp_above", Some(limit)),
    };
    out.push_str(&format!(" {name}"));
    if let Some(limit) = limit {
        out.push_str(&format!(" limit={limit}"));
    }
}

fn activation(p: &mut Parser<'_>) -> Parsed<Activation> {
    let at = p.at();
    Ok(match p.any_word("an activation")? {
        "silu" => Activation::Silu,
        "gelu" => Activation::Gelu,
        "gelu_tanh" => Activation::GeluTanh,
        "relu" => Activation::Relu,
        "quick_gelu" => Activation::QuickGelu,
        "clamp" => Activation::Clamp { limit: p.integer_of("limit")? },
        "clamp_above" => Activation::ClampAbove { limit: p.integer_of("limit")? },
        word => return Err(p.unknown(at, "activation", word, &ACTIVATIONS)),
    })
}

fn put_attention(out: &mut String, a: &Attention) {
    if a.mask.causal {
        out.push_str(" causal");
    }
    if let Some(window) = a.mask.window {
        out.push_str(&format!(" window={window}"));
    }
    match a.mask.documents {
        Documents::Joined => {}
        Documents::Apart => out.push_str(" documents"),
    }
    out.push_str(" scale=");
    put_real(out, a.scale);
}

fn attention(p: &mut Parser<'_>) -> Parsed<Attention> {
    let causal = p.take_word("causal");
    let window = if p.is_word("window") { Some(p.integer_of("window")?) } else { None };
    let documents = if p.take_word("documents") { Documents::Apart } else { Documents::Joined };
    Ok(Attention { mask: Mask { causal, window, documents }, scale: p.real_of("scale")? })
}

fn put_router(out: &mut String, r: &Router) {
    out.push_str(&format!(" k={}", r.k));
    if r.score == Score::Sigmoid {
        out.push_str(" sigmoid");
    }
    if r.renormalize == Renormalize::Yes {
        out.push_str(" renormalize");
    }
    if let Some(groups) = r.groups {
        let by = match groups.by {
            GroupScore::Best => "best",
            GroupScore::TwoBest => "two_best",
        };
        out.push_str(&format!(" groups={} kept={} {by}", groups.count, groups.kept));
    }
    if r.correction == Correction::Added {
        out.push_str(" corrected");
    }
    if r.scale != 1.0 {
        out.push_str(" scale=");
        put_real(out, r.scale);
    }
}

fn router(p: &mut Parser<'_>) -> Parsed<Router> {
    let k = p.integer_of("k")?;
    let score = if p.take_word("sigmoid") { Score::Sigmoid } else { Score::Softmax };
    let renormalize = if p.take_word("renormalize") { Renormalize::Yes } else { Renormalize::No };
    let groups = if p.is_word("groups") {
        let (count, kept) = (p.integer_of("groups")?, p.integer_of("kept")?);
        let at = p.at();
        let by = match p.any_word("what a group is worth")? {
            "best" => GroupScore::Best,
            "two_best" => GroupScore::TwoBest,
            word => return Err(p.unknown(at, "worth of a group", word, &["best", "two_best"])),
        };
        Some(Groups { count, kept, by })
    } else {
        None
    };
    let correction = if p.take_word("corrected") { Correction::Added } else { Correction::No };
    let scale = if p.is_word("scale") { p.real_of("scale")? } else { 1.0 };
    Ok(Router { k, score, renormalize, groups, correction, scale })
}
