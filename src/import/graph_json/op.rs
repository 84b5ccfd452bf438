//! The ops of graph JSON and their attributes: the forward ops of [`Op`], under the names of the text form, and `cross_entropy`, which is three of them.

use dplan_ir::op::{Activation, Attention, Mask, Op, Renormalize, Rope, Rotation, Router, Spec};

use crate::import::ImportError;
use crate::import::json::At;

/// What a node says it does, before the sizes of its operands are known.
pub enum Written {
    Op(Op),
    Rope {
        theta: f64,
    },
    Attention {
        mask: Mask,
        scale: Option<f64>,
    },
    TopKGate {
        k: u64,
        renormalize: Renormalize,
    },
    /// (logits, targets) → mean of lse − picked.
    CrossEntropy,
}

const RATE: &str = "the part of the elements that becomes zero, from 0 to less than 1";

/// Each op, and the attributes it may have.
pub const OPS: [(&str, &[&str]); 20] = [
    ("einsum", &["spec"]),
    ("add_bias", &[]),
    ("add", &[]),
    ("sub", &[]),
    ("neg", &[]),
    ("dropout", &["rate"]),
    ("act", &["function"]),
    ("gated", &["function"]),
    ("rms_norm", &["eps"]),
    ("layer_norm", &["eps"]),
    ("rope", &["theta", "inv_freq"]),
    ("attention", &["causal", "window", "scale"]),
    ("embed", &[]),
    ("add_position", &[]),
    ("ce_stats", &[]),
    ("mean", &[]),
    ("top_k_gate", &["k", "renormalize"]),
    ("dispatch", &[]),
    ("expert_einsum", &["spec"]),
    ("combine", &[]),
];

/// Keys that every node may have.
pub const NODE_KEYS: [&str; 4] = ["name", "op", "in", "layer"];

pub const FUNCTIONS: [(&str, Activation); 4] =
    [("silu", Activation::Silu), ("gelu", Activation::Gelu), ("gelu_tanh", Activation::GeluTanh), ("relu", Activation::Relu)];

/// Reads the op of a node.
pub fn read(node: &At<'_>) -> Result<Written, ImportError> {
    let names: Vec<&str> = OPS.iter().map(|(name, _)| *name).chain(["cross_entropy"]).collect();
    let name_at = node.need("op", &format!("one of {}", names.join(", ")))?;
    let name = name_at.string()?;
    if name == "cross_entropy" {
        node.only(&NODE_KEYS)?;
        return Ok(Written::CrossEntropy);
    }
    let Some((_, attributes)) = OPS.iter().find(|(n, _)| *n == name) else {
        let near = crate::import::nearest(name, names.iter().copied()).map(|n| format!("; did you mean `{n}`?")).unwrap_or_default();
        return Err(name_at.wrong(&name_at.found(), &format!("one of {}{near}", names.join(", "))));
    };
    node.only(&[&NODE_KEYS, *attributes].concat())?;
    Ok(Written::Op(match name {
        "einsum" => Op::Einsum(spec(node)?),
        "expert_einsum" => Op::ExpertEinsum(expert_spec(node)?),
        "add_bias" => Op::AddBias,
        "add" => Op::Add,
        "sub" => Op::Sub,
        "neg" => Op::Neg,
        "dropout" => Op::Dropout { rate: node.need("rate", RATE)?.rate(RATE)? },
        "act" => Op::Act(function(node)?),
        "gated" => Op::Gated(function(node)?),
        "rms_norm" => Op::RmsNorm { eps: eps(node)? },
        "layer_norm" => Op::LayerNorm { eps: eps(node)? },
        "embed" => Op::Embed,
        "add_position" => Op::AddPosition,
        "ce_stats" => Op::CeStats,
        "mean" => Op::Mean,
        "dispatch" => Op::Dispatch,
        "combine" => Op::Combine,
        "rope" => return rope(node),
        "attention" => return attention(node),
        _ => return top_k_gate(node),
    }))
}

impl Written {
    /// The op, now that the sizes of the dims of its first operand are known.
    ///
    /// # Errors
    /// What does not fit, in words.
    pub fn resolve(self, sizes: &[u64]) -> Result<Op, String> {
        let last = sizes.last().copied().unwrap_or(0);
        match self {
            Written::Op(Op::Rope(rope)) if rope.inv_freq.len() as u64 * 2 != last => {
                Err(format!("has {} frequencies for heads of {last} elements, which need half as many as elements", rope.inv_freq.len()))
            }
            Written::Op(op) => Ok(op),
            Written::Rope { .. } if last % 2 != 0 => Err(format!("turns pairs, but heads have {last} elements")),
            Written::Rope { theta } => {
                let inv_freq = (0..last / 2).map(|i| theta.powf(-(2.0 * i as f64) / last as f64)).collect();
                Ok(Op::Rope(Rope::whole(Rotation::Forward, inv_freq)))
            }
            Written::Attention { mask, scale } => {
                let scale = scale.unwrap_or(1.0 / (last.max(1) as f64).sqrt());
                Ok(Op::Attention(Attention { mask, scale }))
            }
            Written::TopKGate { k, .. } if k > last => Err(format!("keeps {k} of {last} experts")),
            Written::TopKGate { k, renormalize } => Ok(Op::TopKGate(Router::softmax(k, renormalize))),
            Written::CrossEntropy => Ok(Op::CeStats),
        }
    }
}

fn function(node: &At<'_>) -> Result<Activation, ImportError> {
    let right = "one of silu, gelu, gelu_tanh, relu";
    let at = node.need("function", right)?;
    let name = at.string()?;
    FUNCTIONS.iter().find(|(n, _)| *n == name).map(|&(_, f)| f).ok_or_else(|| at.wrong(&at.found(), right))
}

fn eps(node: &At<'_>) -> Result<f64, ImportError> {
    node.get_or_null("eps").map_or(Ok(1e-5), |at| at.positive_number())
}

fn rope(node: &At<'_>) -> Result<Written, ImportError> {
    if let Some(at) = node.get_or_null("inv_freq") {
        let inv_freq = at.array()?.iter().map(At::number).collect::<Result<Vec<f64>, _>>()?;
        return Ok(Written::Op(Op::Rope(Rope::whole(Rotation::Forward, inv_freq))));
    }
    let theta = node.get_or_null("theta").map_or(Ok(10_000.0), |at| at.positive_number())?;
    Ok(Written::Rope { theta })
}

fn attention(node: &At<'_>) -> Result<Written, ImportError> {
    let causal = node.get_or_null("causal").map_or(Ok(true), |at| at.boolean())?;
    let window = match node.get_or_null("window") {
        Some(at) if !causal => return Err(at.wrong("is a window of attention that is not causal", "absent")),
        Some(at) => Some(at.integer(1..=u64::MAX)?),
        None => None,
    };
    let scale = match node.get_or_null("scale") {
        Some(at) => Some(at.number()?),
        None => None,
    };
    Ok(Written::Attention { mask: Mask { causal, window, ..Mask::FULL }, scale })
}

fn top_k_gate(node: &At<'_>) -> Result<Written, ImportError> {
    let k = node.need("k", "how many experts a token goes to")?.integer(1..=u64::MAX)?;
    let renormalize = match node.get_or_null("renormalize") {
        Some(at) if !at.boolean()? => Renormalize::No,
        _ => Renormalize::Yes,
    };
    Ok(Written::TopKGate { k, renormalize })
}

/// Reads a product, and checks that it is a matrix product without transposition: see [`Spec`].
fn spec(node: &At<'_>) -> Result<Spec, ImportError> {
    let at = node.need("spec", "a product like \"bsh,fh->bsf\"")?;
    let text: String = at.string()?.chars().filter(|c| *c != ' ').collect();
    let parts = text.split_once("->").and_then(|(operands, out)| operands.split_once(',').map(|(left, right)| (left, right, out)));
    let Some((left, right, out)) = parts else {
        return Err(at.wrong(&at.found(), "two operands and a result, like \"bsh,fh->bsf\""));
    };
    let spec = Spec { left: left.into(), right: right.into(), out: out.into() };
    match fault(&spec) {
        Some(why) => Err(at.wrong(&format!("{}: {why}", at.found()), "a matrix product, like \"bsh,fh->bsf\"")),
        None => Ok(spec),
    }
}

fn expert_spec(node: &At<'_>) -> Result<Spec, ImportError> {
    let spec = spec(node)?;
    if spec.left.starts_with("bse") && spec.out.starts_with("bse") && spec.right.starts_with('e') {
        return Ok(spec);
    }
    let at = node.need("spec", "a product")?;
    Err(at.wrong(&at.found(), "routed rows times weights of each expert, like \"bseh,efh->bsef\""))
}

/// Why a spec is no (batched) matrix product, if it is none.
fn fault(spec: &Spec) -> Option<String> {
    let sides = [&spec.left, &spec.right, &spec.out];
    for side in sides {
        if side.len() > super::MAX_RANK || !side.chars().all(|c| c.is_ascii_lowercase()) {
            return Some(format!("a dim is a letter from a to z, and there are at most {}", super::MAX_RANK));
        }
        if let Some(twice) = side.chars().find(|&c| side.matches(c).count() > 1) {
            return Some(format!("`{twice}` stands twice in one operand"));
        }
    }
    let role = |c: char| sides.map(|s| s.contains(c));
    for c in sides.iter().flat_map(|s| s.chars()) {
        if role(c).into_iter().filter(|&has| has).count() < 2 {
            return Some(format!("`{c}` is in one operand only"));
        }
    }
    // Letters of one role stand together and in the same order.
    for side in sides {
        let roles: Vec<_> = side.chars().map(role).collect();
        let runs = 1 + roles.windows(2).filter(|w| w[0] != w[1]).count();
        let mut kinds = roles.clone();
        kinds.sort_unstable();
        kinds.dedup();
        if runs > kinds.len().max(1) {
            return Some(format!("in `{side}`, letters of one role do not stand together"));
        }
    }
    let of_role = |side: &str, r: [bool; 3]| side.chars().filter(|&c| role(c) == r).collect::<String>();
    for r in [[true, true, false], [true, false, true], [false, true, true], [true, true, true]] {
        let spellings: Vec<String> = (0..3).filter(|&i| r[i]).map(|i| of_role(sides[i], r)).collect();
        if spellings.windows(2).any(|w| w[0] != w[1]) {
            return Some(format!("`{}` and `{}` are in different order", spellings[0], spellings[spellings.len() - 1]));
        }
    }
    None
}
