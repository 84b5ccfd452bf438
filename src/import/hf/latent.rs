//! Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).
//!
//! Queries come from a latent vector, q = W_qb · norm(W_qa · x), or from x. Keys and values come from another, c = norm(W_kva · x), of which each head
//! has its own part: k = (W_kb · c, ρ), v = W_vb · c. ρ = rotated W_kr · x carries the positions and is shared by all heads; of a query, the last elements turn.

use dplan_ir::entity::{DimId, ValueId};
use dplan_ir::op::{Attention, Mask, Op, Pairs, Rope};

use super::net::{Net, slice};
use super::{Context, rope};
use crate::import::ImportError;

/// Largest part of a head.
const MAX_PART: u64 = 1 << 16;
const MAX_RANK: u64 = 1 << 24;

/// Numbers of a config that come before the graph.
pub struct Numbers {
    q_rank: Option<u64>,
    kv_rank: u64,
    /// Elements of a head that do not turn, that turn, and of a value.
    own: u64,
    turned: u64,
    value: u64,
    rope: Rope,
    scale: f64,
    bias: bool,
}

/// The attention of every block.
pub struct Latent {
    numbers: Numbers,
    /// Latent queries, latent keys and values, parts of a head as above.
    cq: Option<DimId>,
    c: DimId,
    n: DimId,
    m: DimId,
    e: DimId,
}

/// The norms of latent vectors have this ε in the reference implementation, whatever the config says.
const EPS: f64 = 1e-6;

/// Reads the sizes.
pub fn numbers(context: &Context<'_>, positions: u64, seq: u64) -> Result<Numbers, ImportError> {
    let config = context.config;
    let q_rank = match config.get_or_null("q_lora_rank") {
        Some(at) if at.value().is_null() => None,
        Some(at) => Some(at.integer(1..=MAX_RANK)?),
        None => Some(1536),
    };
    let own = context.bounded(&["qk_nope_head_dim"], 128, MAX_PART)?;
    let turned = context.bounded(&["qk_rope_head_dim"], 64, MAX_PART)?;
    if turned % 2 != 0 {
        let at = config.get("qk_rope_head_dim").unwrap_or_else(|| config.clone());
        return Err(at.wrong(&at.found(), "an even number: rotary positions turn pairs"));
    }
    let pairs = if context.flag("rope_interleave", true)? { Pairs::Neighbours } else { Pairs::Halves };
    let defaults = rope::Defaults { head: turned, theta: 1e4, part: 1.0, positions, seq };
    Ok(Numbers {
        q_rank,
        kv_rank: context.bounded(&["kv_lora_rank"], 512, MAX_RANK)?,
        own,
        turned,
        value: context.bounded(&["v_head_dim"], 128, MAX_PART)?,
        rope: Rope { pairs, ..rope::rope(config, defaults, "full_attention")? },
        scale: rope::score_factor(config)? / ((own + turned) as f64).sqrt(),
        bias: context.flag("attention_bias", false)?,
    })
}

impl Numbers {
    /// Elements of a query and of a key.
    pub fn head(&self) -> u64 {
        self.own + self.turned
    }
    pub fn latent(self, net: &mut Net) -> Latent {
        let cq = self.q_rank.map(|rank| net.builder.dim("cq", rank));
        let [c, n, m, e] =
            [("c", self.kv_rank), ("n", self.own), ("m", self.turned), ("dv", self.value)].map(|(name, size)| net.builder.dim(name, size));
        Latent { numbers: self, cq, c, n, m, e }
    }
}

/// The attention of block `layer` (from 1).
pub fn attention(net: &mut Net, latent: &Latent, layer: u64, x: ValueId) -> Result<ValueId, ImportError> {
    let tensor = |part: &str| format!("model.layers.{}.self_attn.{part}", layer - 1);
    let name = |part: &str| format!("l{layer}.{part}");
    let (numbers, d) = (&latent.numbers, net.dims);
    let (hidden, heads) = (net.builder.graph.size(d.h), net.builder.graph.size(d.g));
    let turn = |start| Op::Rope(Rope { start, ..numbers.rope.clone() });

    let q = match (latent.cq, numbers.q_rank) {
        (Some(cq), Some(rank)) => {
            let weight = net.whole_matrix(&tensor("q_a_proj.weight"), &[cq, d.h], &[rank, hidden]);
            let mut y = net.product(&name("q_a"), "bsh,qh->bsq", x, weight)?;
            if numbers.bias {
                y = net.bias(&name("q_a.bias"), &tensor("q_a_proj.bias"), &[cq], y)?;
            }
            let y = net.rms_norm(&name("q_a.norm"), &tensor("q_a_layernorm.weight"), &[cq], EPS, y)?;
            let weight = net.whole_matrix(&tensor("q_b_proj.weight"), &[d.g, d.r, d.d, cq], &[heads * numbers.head(), rank]);
            net.product(&name("q"), "bsq,grdq->bsgrd", y, weight)?
        }
        _ => {
            let weight = net.whole_matrix(&tensor("q_proj.weight"), &[d.g, d.r, d.d, d.h], &[heads * numbers.head(), hidden]);
            net.product(&name("q"), "bsh,grdh->bsgrd", x, weight)?
        }
    };
    let q = net.op(&name("q.rope"), turn(numbers.own), &[q])?;

    // One tensor holds the latent and the shared part of the key.
    let (rows, all) = ([(latent.c, 0, numbers.kv_rank), (latent.m, numbers.kv_rank, numbers.turned)], numbers.kv_rank + numbers.turned);
    let (weights, biases) = (tensor("kv_a_proj_with_mqa.weight"), tensor("kv_a_proj_with_mqa.bias"));
    let mut parts = Vec::with_capacity(2);
    for ((dim, start, len), label) in rows.into_iter().zip(["kv_a", "k_shared"]) {
        let piece = slice(&weights, &[all, hidden], &[all, hidden], 0, start, len);
        let weight = net.matrix(&format!("{weights}.{label}"), &[dim, d.h], vec![piece]);
        let mut y = net.product(&name(label), "bsh,ch->bsc", x, weight)?;
        if numbers.bias {
            let bias =
                net.vector(&format!("{biases}.{label}"), &[dim], dplan_ir::graph::Init::Zeros, vec![slice(&biases, &[all], &[all], 0, start, len)]);
            y = net.op(&name(&format!("{label}.bias")), Op::AddBias, &[y, bias])?;
        }
        parts.push(y);
    }
    let c = net.rms_norm(&name("kv_a.norm"), &tensor("kv_a_layernorm.weight"), &[latent.c], EPS, parts[0])?;
    let shared = net.op(&name("k_shared.rope"), turn(0), &[parts[1]])?;

    let (weights, per_head) = (tensor("kv_b_proj.weight"), numbers.own + numbers.value);
    let mut sides = Vec::with_capacity(2);
    for (dim, start, len, label) in [(latent.n, 0, numbers.own, "k_own"), (latent.e, numbers.own, numbers.value, "v")] {
        let piece = slice(&weights, &[heads * per_head, numbers.kv_rank], &[heads, per_head, numbers.kv_rank], 1, start, len);
        let weight = net.matrix(&format!("{weights}.{label}"), &[d.g, dim, latent.c], vec![piece]);
        sides.push(net.product(&name(label), "bsc,gnc->bsgn", c, weight)?);
    }
    let k = net.append(&name("k"), sides[0], shared, d.d);
    let attention = Attention { mask: Mask::CAUSAL, scale: numbers.scale };
    let o = net.op(&name("attn"), Op::Attention(attention), &[q, k, sides[1]])?;
    let weight = net.whole_matrix(&tensor("o_proj.weight"), &[d.h, d.g, d.r, latent.e], &[hidden, heads * numbers.value]);
    let y = net.product(&name("o"), "bsgre,hgre->bsh", o, weight)?;
    if numbers.bias { net.bias(&name("o.bias"), &tensor("o_proj.bias"), &[d.h], y) } else { Ok(y) }
}
