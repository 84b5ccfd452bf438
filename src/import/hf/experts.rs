//! Feed-forwards that are mixtures of experts: a router weighs the `k` best experts of each token; each expert is a gated feed-forward; results are added
//! with those weights, and to those of experts that all tokens share. No token is dropped and no auxiliary loss is added.
//!
//! What differs between families is data: [`Style`] and the numbers of [`Experts`].

use dplan_ir::entity::{DimId, ValueId};
use dplan_ir::graph::{Init, Piece};
use dplan_ir::op::{Activation, Correction, GroupScore, Groups, Op, Renormalize, Router, Score};

use super::Context;
use super::net::{Net, Place, parse_spec, slice, whole};
use crate::import::json::At;
use crate::import::{ImportError, limits};

/// A family's router and the names of its tensors.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Style {
    Mixtral,
    Qwen3,
    DeepseekV2,
    DeepseekV3,
    MiniMax,
    GptOss,
}

/// The experts of every block that has some.
pub struct Experts {
    style: Style,
    e: DimId,
    f: DimId,
    count: u64,
    router: Router,
    /// The width of the experts all tokens share, taken as one.
    shared: Option<DimId>,
}

/// Numbers of a config that come before the graph.
pub struct Numbers {
    style: Style,
    count: u64,
    router: Router,
    /// Width of an expert, and of the shared ones together.
    pub width: u64,
    shared: u64,
    /// Whether each block has experts, or is dense.
    pub sparse: Vec<bool>,
}

/// What one expert's tensors are called: gate, up, down.
const LONG: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Reads the router's sizes.
pub fn numbers(context: &mut Context<'_>, style: Style, layers: u64) -> Result<Numbers, ImportError> {
    let config = context.config;
    let (count_default, k_default, width_default) = match style {
        Style::Mixtral => (8, 2, 14336),
        Style::Qwen3 => (128, 8, 768),
        Style::DeepseekV2 => (64, 6, 1407),
        Style::DeepseekV3 => (256, 8, 2048),
        Style::MiniMax => (256, 8, 1536),
        Style::GptOss => (128, 4, 2880),
    };
    let count_keys = ["num_local_experts", "num_experts", "n_routed_experts"];
    let count = context.bounded(&count_keys, count_default, limits::MAX_TENSORS)?;
    if count * layers * 3 > limits::MAX_TENSORS {
        let at = count_keys.iter().find_map(|key| config.get(key)).unwrap_or_else(|| config.clone());
        return Err(at.wrong(&format!("makes {} expert tensors", count * layers * 3), &format!("so that there are at most {}", limits::MAX_TENSORS)));
    }
    let groups = groups(context, style, count)?;
    let from = groups.map_or(count, |g| count / g.count * g.kept);
    let k = match config.get_or_null("num_experts_per_tok").or_else(|| config.get("experts_per_token")) {
        Some(at) => at.integer(1..=from)?,
        None => k_default.min(from),
    };
    let renormalize = match style {
        Style::Mixtral | Style::MiniMax | Style::GptOss => Renormalize::Yes,
        Style::Qwen3 => renormalize(context, false)?,
        // The reference implementation does not read `norm_topk_prob` for this family.
        Style::DeepseekV2 => Renormalize::No,
        Style::DeepseekV3 => renormalize(context, true)?,
    };
    let (score, correction) = match style {
        Style::Mixtral | Style::Qwen3 | Style::DeepseekV2 | Style::GptOss => (Score::Softmax, Correction::No),
        Style::DeepseekV3 | Style::MiniMax => (Score::Sigmoid, Correction::Added),
    };
    if let Some(at) = config.get("scoring_func") {
        let right = if score == Score::Sigmoid { "sigmoid" } else { "softmax" };
        if at.string()? != right {
            return Err(at.wrong(&at.found(), &format!("{right}, as the family scores experts")));
        }
    }
    let scale = match style {
        Style::DeepseekV2 => context.positive("routed_scaling_factor", 1.0)?,
        Style::DeepseekV3 => context.positive("routed_scaling_factor", 2.5)?,
        Style::Mixtral | Style::Qwen3 | Style::MiniMax | Style::GptOss => 1.0,
    };
    let width = match style {
        Style::Mixtral | Style::MiniMax | Style::GptOss => context.size("intermediate_size", width_default)?,
        Style::Qwen3 | Style::DeepseekV2 | Style::DeepseekV3 => context.size("moe_intermediate_size", width_default)?,
    };
    let shared = match style {
        Style::DeepseekV2 => context.count("n_shared_experts", 2, 1 << 20)?,
        Style::DeepseekV3 => context.count("n_shared_experts", 1, 1 << 20)?,
        Style::Mixtral | Style::Qwen3 | Style::MiniMax | Style::GptOss => 0,
    };
    notes(context, correction)?;
    let router = Router { k, score, renormalize, groups, correction, scale };
    Ok(Numbers { style, count, router, width, shared: shared * width, sparse: sparse(context, style, layers)? })
}

impl Numbers {
    /// The dims of the experts; `f` is the feed-forward dim if no block is dense, and then an expert's width.
    pub fn experts(&self, net: &mut Net) -> Experts {
        let e = net.builder.dim("e", self.count);
        let f = if self.sparse.iter().all(|&s| s) { net.dims.f } else { net.builder.dim("fe", self.width) };
        let shared = (self.shared > 0).then(|| net.builder.dim("fs", self.shared));
        Experts { style: self.style, e, f, count: self.count, router: self.router, shared }
    }
}

fn renormalize(context: &Context<'_>, default: bool) -> Result<Renormalize, ImportError> {
    Ok(if context.flag("norm_topk_prob", default)? { Renormalize::Yes } else { Renormalize::No })
}

fn groups(context: &Context<'_>, style: Style, count: u64) -> Result<Option<Groups>, ImportError> {
    let config = context.config;
    let (default, by) = match style {
        Style::DeepseekV3 => ((8, 4), GroupScore::TwoBest),
        Style::DeepseekV2 => {
            let limited = match config.get("topk_method") {
                None => false,
                Some(at) => match at.string()? {
                    "greedy" => false,
                    "group_limited_greedy" => true,
                    _ => return Err(at.wrong(&at.found(), "greedy or group_limited_greedy")),
                },
            };
            if !limited {
                return Ok(None);
            }
            ((1, 1), GroupScore::Best)
        }
        Style::Mixtral | Style::Qwen3 | Style::MiniMax | Style::GptOss => return Ok(None),
    };
    let groups = context.bounded(&["n_group"], default.0.min(count), count)?;
    let kept = context.bounded(&["topk_group"], default.1.min(groups), groups)?;
    if !count.is_multiple_of(groups) {
        let at = config.get("n_group").unwrap_or_else(|| config.clone());
        return Err(at.wrong(&format!("makes {groups} groups of {count} experts"), &format!("a divisor of {count}")));
    }
    Ok((groups > 1).then_some(Groups { count: groups, kept, by }))
}

fn notes(context: &mut Context<'_>, correction: Correction) -> Result<(), ImportError> {
    if let Some(at) = context.config.get("router_jitter_noise")
        && at.number()? != 0.0
    {
        context.notes.push(format!("router_jitter_noise {} of the config is not applied", at.value()));
    }
    if context.flag("output_router_logits", false)? {
        context.notes.push("the router's auxiliary loss is not part of the loss".into());
    }
    if correction == Correction::Added {
        context.notes.push("the router's correction of each expert stays as it is loaded (zero without weights)".into());
    }
    Ok(())
}

/// Which blocks have experts.
fn sparse(context: &Context<'_>, style: Style, layers: u64) -> Result<Vec<bool>, ImportError> {
    let config = context.config;
    match style {
        Style::Mixtral | Style::MiniMax | Style::GptOss => Ok(vec![true; layers as usize]),
        Style::Qwen3 => {
            let step = context.bounded(&["decoder_sparse_step"], 1, limits::MAX_LAYERS)?;
            let dense = config.get("mlp_only_layers").map_or(Ok(Vec::new()), |at| at.array())?;
            let dense = dense.iter().map(|at| at.integer(0..=limits::MAX_LAYERS)).collect::<Result<Vec<u64>, _>>()?;
            Ok((0..layers).map(|i| !dense.contains(&i) && (i + 1) % step == 0).collect())
        }
        Style::DeepseekV2 | Style::DeepseekV3 => {
            if let Some(at) = config.get("moe_layer_freq")
                && at.integer(1..=u64::MAX)? != 1
            {
                return Err(at.wrong(&at.found(), "1: every block behind the dense ones has experts"));
            }
            if let Some(types) = config.get("mlp_layer_types") {
                let of = |at: &At<'_>| match at.string()? {
                    "sparse" => Ok(true),
                    "dense" => Ok(false),
                    _ => Err(at.wrong(&at.found(), "sparse or dense")),
                };
                let sparse = types.array()?.iter().map(of).collect::<Result<Vec<bool>, _>>()?;
                if sparse.len() as u64 != layers {
                    return Err(types.wrong(&types.found(), &format!("one for each of {layers} layers")));
                }
                return Ok(sparse);
            }
            let dense = context.count("first_k_dense_replace", if style == Style::DeepseekV3 { 3 } else { 0 }, limits::MAX_LAYERS)?;
            Ok((0..layers).map(|i| i >= dense).collect())
        }
    }
}

/// The feed-forward of block `layer` (from 1).
pub fn feed_forward(net: &mut Net, experts: &Experts, activation: Activation, layer: u64, x: ValueId) -> Result<ValueId, ImportError> {
    let block = match experts.style {
        Style::Mixtral | Style::MiniMax => format!("model.layers.{}.block_sparse_moe", layer - 1),
        Style::Qwen3 | Style::DeepseekV2 | Style::DeepseekV3 | Style::GptOss => format!("model.layers.{}.mlp", layer - 1),
    };
    let at = Place { layer, start: &block };
    let gate = gate(net, experts, at, x)?;
    let rows = net.op(&at.name("dispatch"), Op::Dispatch, &[x, gate])?;
    let down = match experts.style {
        Style::Mixtral | Style::MiniMax => gated(net, experts, at, ["w1", "w3", "w2"], activation, rows, gate)?,
        Style::Qwen3 | Style::DeepseekV2 | Style::DeepseekV3 => gated(net, experts, at, LONG, activation, rows, gate)?,
        Style::GptOss => limited(net, experts, at, rows, gate)?,
    };
    let routed = net.op(&at.name("combine"), Op::Combine, &[down, gate])?;
    match experts.shared {
        None => Ok(routed),
        Some(width) => {
            let shared = shared(net, at, width, activation, x)?;
            net.op(&at.name("experts"), Op::Add, &[routed, shared])
        }
    }
}

/// The weights of each token's experts.
fn gate(net: &mut Net, experts: &Experts, at: Place<'_>, x: ValueId) -> Result<ValueId, ImportError> {
    let (e, h) = (experts.e, net.dims.h);
    let hidden = net.builder.graph.size(h);
    let tensor = if experts.style == Style::GptOss { "router" } else { "gate" };
    let weight = net.whole_matrix(&at.tensor(&format!("{tensor}.weight")), &[e, h], &[experts.count, hidden]);
    let mut scores = net.product(&at.name("router"), "bsh,eh->bse", x, weight)?;
    if experts.style == Style::GptOss {
        scores = net.bias(&at.name("router.bias"), &at.tensor("router.bias"), &[e], scores)?;
    }
    let mut operands = vec![scores];
    if experts.router.correction == Correction::Added {
        let tensor = if experts.style == Style::MiniMax { "e_score_correction_bias" } else { "gate.e_score_correction_bias" };
        operands.push(net.whole_vector(&at.tensor(tensor), &[e], Init::Zeros));
    }
    net.op(&at.name("topk"), Op::TopKGate(experts.router), &operands)
}

/// W_down · (f(W_gate · x) ⊙ (W_up · x)), the weights of each expert being tensors of their own.
fn gated(
    net: &mut Net,
    experts: &Experts,
    at: Place<'_>,
    tensors: [&str; 3],
    activation: Activation,
    rows: ValueId,
    gate: ValueId,
) -> Result<ValueId, ImportError> {
    let (e, h, f) = (experts.e, net.dims.h, experts.f);
    let (hidden, ffn) = (net.builder.graph.size(h), net.builder.graph.size(f));
    let expert = |net: &mut Net, label: &str, part: &str, spec: &str, rows: ValueId, dims: [DimId; 3], shape: [u64; 2]| {
        let pieces: Vec<Piece> =
            (0..experts.count).map(|i| Piece { at: Some(i), ..whole(&at.tensor(&format!("experts.{i}.{part}.weight")), &shape) }).collect();
        let weight = net.matrix(&at.tensor(&format!("experts.{part}.weight")), &dims, pieces);
        net.op(&at.name(label), Op::ExpertEinsum(parse_spec(spec)), &[rows, weight, gate])
    };
    let [w_gate, w_up, w_down] = tensors;
    let gated = expert(net, "gate", w_gate, "bseh,efh->bsef", rows, [e, f, h], [ffn, hidden])?;
    let up = expert(net, "up", w_up, "bseh,efh->bsef", rows, [e, f, h], [ffn, hidden])?;
    let active = net.op(&at.name("gated"), Op::Gated(activation), &[gated, up])?;
    expert(net, "down", w_down, "bsef,ehf->bseh", active, [e, h, f], [hidden, ffn])
}

/// gpt-oss: with biases, and with g = min(W_gate · x, 7) and u = W_up · x held to ±7, W_down · (g · σ(1.702 g) · (u + 1)). Gate and up stand in one tensor, in
/// turns; weights are `[in, out]`.
fn limited(net: &mut Net, experts: &Experts, at: Place<'_>, rows: ValueId, gate: ValueId) -> Result<ValueId, ImportError> {
    let (e, h, f) = (experts.e, net.dims.h, experts.f);
    let (count, hidden, ffn) = (experts.count, net.builder.graph.size(h), net.builder.graph.size(f));
    let (weights, biases) = (at.tensor("experts.gate_up_proj"), at.tensor("experts.gate_up_proj_bias"));
    let mut sides = Vec::with_capacity(2);
    for (index, label, limit) in [(0, "gate", Activation::ClampAbove { limit: LIMIT }), (1, "up", Activation::Clamp { limit: LIMIT })] {
        let piece = slice(&weights, &[count, hidden, 2 * ffn], &[count, hidden, ffn, 2], 3, index, 1);
        let weight = net.matrix(&format!("{weights}.{label}"), &[e, h, f], vec![piece]);
        let piece = slice(&biases, &[count, 2 * ffn], &[count, ffn, 2], 2, index, 1);
        let bias = net.vector(&format!("{biases}.{label}"), &[e, f], Init::Zeros, vec![piece]);
        let y = net.op(&at.name(label), Op::ExpertEinsum(parse_spec("bseh,ehf->bsef")), &[rows, weight, gate])?;
        let y = net.op(&at.name(&format!("{label}.bias")), Op::AddExpertBias, &[y, bias, gate])?;
        sides.push(net.op(&at.name(&format!("{label}.limited")), Op::Act(limit), &[y])?);
    }
    let product = net.op(&at.name("gated"), Op::Gated(Activation::QuickGelu), &sides)?;
    let alone = net.op(&at.name("act"), Op::Act(Activation::QuickGelu), &sides[..1])?;
    let active = net.op(&at.name("active"), Op::Add, &[product, alone])?;
    let weight = net.whole_matrix(&at.tensor("experts.down_proj"), &[e, f, h], &[count, ffn, hidden]);
    let bias =
        net.vector(&at.tensor("experts.down_proj_bias"), &[e, h], Init::Zeros, vec![whole(&at.tensor("experts.down_proj_bias"), &[count, hidden])]);
    let down = net.op(&at.name("down"), Op::ExpertEinsum(parse_spec("bsef,efh->bseh")), &[active, weight, gate])?;
    net.op(&at.name("down.bias"), Op::AddExpertBias, &[down, bias, gate])
}

/// The limit of gpt-oss's activations.
pub const LIMIT: u32 = 7;

/// The experts all tokens share, as one feed-forward of their width together.
fn shared(net: &mut Net, at: Place<'_>, f: DimId, activation: Activation, x: ValueId) -> Result<ValueId, ImportError> {
    let h = net.dims.h;
    let (hidden, ffn) = (net.builder.graph.size(h), net.builder.graph.size(f));
    let mut sides = Vec::with_capacity(2);
    for label in ["gate", "up"] {
        let weight = net.whole_matrix(&at.tensor(&format!("shared_experts.{label}_proj.weight")), &[f, h], &[ffn, hidden]);
        sides.push(net.product(&at.name(&format!("shared.{label}")), "bsh,fh->bsf", x, weight)?);
    }
    let active = net.op(&at.name("shared.gated"), Op::Gated(activation), &sides)?;
    let weight = net.whole_matrix(&at.tensor("shared_experts.down_proj.weight"), &[h, f], &[hidden, ffn]);
    net.product(&at.name("shared.down"), "bsf,hf->bsh", active, weight)
}
