//! Mixture of experts: the router, and rows between tokens and experts.

use dplan_ir::extent::Extent;
use dplan_ir::op::{Correction, GroupScore, Groups, Renormalize, Router, Score};

use super::embed::{is_zigzag, order_args};
use super::source::{Builder, Size, int};
use super::{Arg, Family, PrepareError};

const THREADS: u64 = 256;
/// Columns of a block that sums down them.
const COLUMNS: u64 = 128;
/// Most experts that a warp routes to, 32 for each register of a lane.
const MOST_EXPERTS: u64 = 1024;
/// Most groups of experts, one for each lane.
const MOST_GROUPS: u64 = 32;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gated {
    Yes,
    No,
}

/// # Errors
/// If there are more experts than a warp can hold.
pub fn router(b: &mut Builder<'_>, k: u64, renormalize: Renormalize, experts: Extent) -> Result<(), PrepareError> {
    route(b, k, renormalize, experts, "dp_router", &[include_str!("text/best_of_warp.cuh"), include_str!("text/router.cuh")])
}

/// # Errors
/// As [`router`].
pub fn router_grad(b: &mut Builder<'_>, k: u64, renormalize: Renormalize, experts: Extent) -> Result<(), PrepareError> {
    route(b, k, renormalize, experts, "dp_router_grad", &[include_str!("text/router_grad.cuh")])
}

fn route(
    b: &mut Builder<'_>,
    k: u64,
    renormalize: Renormalize,
    experts: Extent,
    entry: &'static str,
    texts: &[&'static str],
) -> Result<(), PrepareError> {
    if experts.len > MOST_EXPERTS {
        return Err(PrepareError::Sizes(format!("{} experts, at most {MOST_EXPERTS} are routed to", experts.len)));
    }
    let tokens = b.d.ins[0].elems() / experts.len.max(1);
    let config = b.config(THREADS).int("L", experts.len.div_ceil(32)).int("K", k).flag("RENORMALIZE", renormalize == Renormalize::Yes);
    let mut args: Vec<Arg> = (0..b.d.ins.len()).map(Arg::In).collect();
    args.extend([Arg::Out(0), int(tokens), int(experts.len), int(experts.valid())]);
    b.launch(Family::Router, entry, config.text(texts), Size::blocks(tokens.div_ceil(THREADS / 32), THREADS, 0), args);
    Ok(())
}

/// Whether a router routes, or takes gradients back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pass {
    Forward,
    Backward,
}

/// A router of any score, with groups and a correction if it has them.
///
/// # Errors
/// If there are more experts or groups than a warp can hold, or groups that are not equal.
pub fn scored(b: &mut Builder<'_>, router: &Router, experts: Extent, pass: Pass) -> Result<(), PrepareError> {
    let valid = experts.valid();
    let groups = router.groups.unwrap_or(Groups { count: 0, kept: 0, by: GroupScore::Best });
    if experts.len > MOST_EXPERTS || groups.count > MOST_GROUPS || groups.count > 0 && !valid.is_multiple_of(groups.count) {
        return Err(PrepareError::Sizes(format!(
            "{valid} experts in {} equal groups; at most {MOST_EXPERTS} in {MOST_GROUPS} are routed to",
            groups.count.max(1)
        )));
    }
    let tokens = b.d.ins[0].elems() / experts.len.max(1);
    let config = b.config(THREADS).int("L", experts.len.div_ceil(32)).int("K", router.k).flag("RENORMALIZE", router.renormalize == Renormalize::Yes);
    let config = config.flag("SIGMOID", router.score == Score::Sigmoid).int("GROUPS", groups.count).int("KEPT", groups.kept);
    let config = config.flag("TWO_BEST", groups.by == GroupScore::TwoBest).flag("CORRECTED", router.correction == Correction::Added);
    let text = config.real("SCALE", router.scale).text(&[include_str!("text/best_of_warp.cuh"), include_str!("text/router_scored.cuh")]);
    let (entry, operands) = match pass {
        Pass::Forward => ("dp_router_scored", vec![Arg::In(0), b.input(1)]),
        Pass::Backward => ("dp_router_scored_grad", vec![Arg::In(0), Arg::In(1), Arg::In(2)]),
    };
    let args = operands.into_iter().chain([Arg::Out(0), int(tokens), int(experts.len), int(valid)]).collect();
    b.launch(Family::Router, entry, text, Size::blocks(tokens.div_ceil(THREADS / 32), THREADS, 0), args);
    Ok(())
}

/// (gate) → gate, of which each expert keeps the first `most` tokens of each sequence.
pub fn first_tokens(b: &mut Builder<'_>, most: u64) {
    let &[sequences, sequence, experts] = &b.d.ins[0].dims[..] else { return };
    let config = b.config(THREADS).flag("ZIGZAG", is_zigzag(b));
    let text = config.text(&[include_str!("text/positions.cuh"), include_str!("text/capacity.cuh")]);
    let numbers = [sequence, experts, most.min(sequence)].map(int);
    let args = [Arg::In(0), Arg::Out(0)].into_iter().chain(numbers).chain(order_args(b, sequence)).collect();
    b.launch(Family::Router, "dp_capacity", text, Size::blocks(sequences * experts, THREADS, THREADS / 32 * 4), args);
}

/// Where rows lie, in working memory.
#[derive(Clone, Copy, Debug)]
pub struct Map {
    pub starts: Arg,
    pub slots: Arg,
    pub places: Arg,
    pub tokens: u64,
    pub experts: u64,
    pub capacity: u64,
}

/// Launches that find the rows of the operand `gate`, for values of `capacity` rows.
pub fn map(b: &mut Builder<'_>, gate: usize, capacity: u64) -> Map {
    let dims = &b.d.ins[gate].dims;
    let (tokens, experts) = (dims[0] * dims[1], dims[2]);
    let counts = b.take(experts * 4);
    let starts = b.take((experts + 1) * 4);
    let slots = b.take(capacity * 4);
    let places = b.take(tokens * experts * 4);
    let count = b.config(THREADS).text(&[include_str!("text/moe_map.cuh")]);
    let args = vec![Arg::In(gate), counts, int(tokens), int(experts)];
    b.launch(Family::Moe, "dp_moe_count", count, Size::blocks(experts, THREADS, 32 * 4), args);
    let place = b.config(THREADS).text(&[include_str!("text/moe_place.cuh")]);
    let args = vec![Arg::In(gate), counts, starts, slots, places, int(tokens), int(experts), int(capacity)];
    b.launch(Family::Moe, "dp_moe_place", place, Size::blocks(experts, THREADS, THREADS / 32 * 4), args);
    Map { starts, slots, places, tokens, experts, capacity }
}

/// Rows of an operand or result in top-k layout whose rows have `width` elements.
pub fn capacity(elems: u64, width: u64) -> u64 {
    elems / width.max(1)
}

/// (x, gate) → rows.
pub fn rows(b: &mut Builder<'_>, gated: Gated) {
    let width = b.d.ins[0].dims[2];
    let map = map(b, 1, capacity(b.d.outs[0].elems(), width));
    let pack = b.pack(&[width]);
    let text = b.config(THREADS).int("VEC", pack).flag("GATED", gated == Gated::Yes).text(&[include_str!("text/moe_rows.cuh")]);
    let args = vec![Arg::In(0), Arg::In(1), map.slots, Arg::Out(0), int(map.capacity), int(width), int(map.experts)];
    b.launch(Family::Moe, "dp_moe_rows", text, Size::over(map.capacity * width / pack, THREADS), args);
}

/// (rows, gate) → Σ over the rows of a token.
pub fn tokens(b: &mut Builder<'_>, gated: Gated) {
    let width = b.d.outs[0].dims[2];
    let map = map(b, 1, capacity(b.d.ins[0].elems(), width));
    let pack = b.pack(&[width]);
    let text = b.config(THREADS).int("VEC", pack).flag("GATED", gated == Gated::Yes).text(&[include_str!("text/moe_tokens.cuh")]);
    let args = vec![Arg::In(0), Arg::In(1), map.places, Arg::Out(0), int(map.tokens), int(width), int(map.experts)];
    b.launch(Family::Moe, "dp_moe_tokens", text, Size::over(map.tokens * width / pack, THREADS), args);
}

/// (dy, rows, gate) → ⟨dy, row⟩ for each token and expert.
pub fn dot(b: &mut Builder<'_>) {
    let width = b.d.ins[0].dims[2];
    let map = map(b, 2, capacity(b.d.ins[1].elems(), width));
    let text = b.config(THREADS).text(&[include_str!("text/moe_dot.cuh")]);
    let args = vec![Arg::In(0), Arg::In(1), map.places, Arg::Out(0), int(map.tokens), int(width), int(map.experts)];
    b.launch(Family::Moe, "dp_moe_dot", text, Size::blocks((map.tokens * map.experts).div_ceil(THREADS / 32), THREADS, 0), args);
}

/// (rows, bias, gate) → rows, each plus its expert's bias.
pub fn bias(b: &mut Builder<'_>) {
    let width = b.d.ins[1].dims[1];
    let map = map(b, 2, capacity(b.d.outs[0].elems(), width));
    let pack = b.pack(&[width]);
    let text = b.config(THREADS).int("VEC", pack).text(&[include_str!("text/moe_bias.cuh")]);
    let args = vec![Arg::In(0), Arg::In(1), map.slots, Arg::Out(0), int(map.capacity), int(width), int(map.experts)];
    b.launch(Family::Moe, "dp_moe_bias", text, Size::over(map.capacity * width / pack, THREADS), args);
}

/// (dy, gate) → the sum of the rows of each expert.
pub fn bias_grad(b: &mut Builder<'_>) {
    let (experts, width) = (b.d.outs[0].dims[0], b.d.outs[0].dims[1]);
    let map = map(b, 1, capacity(b.d.ins[0].elems(), width));
    let text = b.config(COLUMNS).ty("grad_t", b.d.outs[0].dtype).text(&[include_str!("text/moe_bias_grad.cuh")]);
    let args = vec![Arg::In(0), map.starts, Arg::Out(0), int(map.capacity), int(width)];
    b.launch(Family::Moe, "dp_moe_bias_grad", text, Size::blocks(experts * width.div_ceil(COLUMNS), COLUMNS, 0), args);
}

/// Zeroes the rows of the result past the last.
pub fn tail(b: &mut Builder<'_>, map: &Map, width: u64) {
    let text = b.config(THREADS).text(&[include_str!("text/moe_tail.cuh")]);
    let args = vec![map.starts, Arg::Out(0), int(map.capacity), int(width), int(map.experts)];
    b.launch(Family::Moe, "dp_moe_tail", text, Size::over(map.capacity * width, THREADS), args);
}
