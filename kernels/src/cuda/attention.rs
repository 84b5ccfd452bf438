//! Attention: which kernels, and their tiles.

use dplan_ir::dtype::DType;
use dplan_ir::op::{Attention, Documents};

use super::source::{Builder, Config, Size, int};
use super::{Alignment, Arg, Family, PrepareError, embed, pointwise};

/// Shared memory that one block may have on every architecture dplan knows (sm_80 has 163 KiB, later ones more).
const MOST_SHARED: u64 = 163 * 1024;

/// What a row's sum of exponentials begins with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Begins {
    Empty,
    /// The sink of its head, a score whose value is zero: operand 3.
    Sink,
}

/// (q, k, v) or (q, k, v, sink) → (o, lse).
///
/// # Errors
/// If a tile of the head does not fit in shared memory.
pub fn forward(b: &mut Builder<'_>, a: &Attention, begins: Begins) -> Result<(), PrepareError> {
    let s = Sizes::new(b, a);
    if halves(b.elem) && s.matrix_widths(MOST_FORWARD) {
        mma_forward(b, a, &s, begins)
    } else {
        plain_forward(b, a, &s, begins)?
    }
    Ok(())
}

/// (sink, o, lse, do) → dsink: a term of each row, summed down the rows of each head.
pub fn sink_grad(b: &mut Builder<'_>) {
    let o = &b.d.ins[1].dims;
    let (queries, groups, heads, dv) = (o[0] * o[1], o[2], o[3], o[4]);
    let rows = queries * groups * heads;
    let terms = b.take(rows * b.acc.size());
    let text = b.config(256).int("DV", dv).text(&[include_str!("text/attention_sink.cuh")]);
    let valid = ['g', 'r'].map(|label| int(b.d.context.extent(label).valid()));
    let args = [Arg::In(0), Arg::In(1), Arg::In(2), Arg::In(3), terms, int(rows), int(groups), int(heads)].into_iter().chain(valid).collect();
    b.launch(Family::Attention, "dp_sink_terms", text, Size::blocks(rows.div_ceil(8), 256, 0), args);
    pointwise::sum_rows(b, (terms, b.acc), queries, groups * heads);
}

/// (q, k, v, o, lse, do) → (dq, dk, dv).
///
/// # Errors
/// As [`forward`].
pub fn backward(b: &mut Builder<'_>, a: &Attention) -> Result<(), PrepareError> {
    let s = Sizes::new(b, a);
    let rows = s.batch * s.queries * s.groups * s.heads;
    let delta = b.take(rows * b.acc.size());
    let text = b.config(256).int("DV", s.dv).text(&[include_str!("text/attention_delta.cuh")]);
    let args = vec![Arg::In(3), Arg::In(5), delta, int(rows)];
    b.launch(Family::Attention, "dp_attention_delta", text, Size::blocks(rows.div_ceil(8), 256, 0), args);
    if halves(b.elem) && s.matrix_widths(MOST_BACKWARD) {
        mma_backward(b, a, &s, delta)
    } else {
        plain_backward(b, a, &s, delta)?
    }
    Ok(())
}

/// Sizes of the operands, and the numbers every attention kernel takes.
struct Sizes {
    batch: u64,
    queries: u64,
    keys: u64,
    groups: u64,
    heads: u64,
    d: u64,
    dv: u64,
    args: Vec<Arg>,
}

impl Sizes {
    fn new(b: &Builder<'_>, a: &Attention) -> Sizes {
        let (q, k, v) = (&b.d.ins[0].dims, &b.d.ins[1].dims, &b.d.ins[2].dims);
        let extent = |label: char| b.d.context.extent(label);
        // A window too long for a 64-bit sum is none.
        let window = a.mask.window.unwrap_or(NO_WINDOW).min(NO_WINDOW);
        let numbers = [q[1], k[1], q[2], q[3], extent('g').valid(), extent('r').valid(), extent('s').start, extent('t').start, window];
        // First positions come last of all operands.
        let documents = b.input(if a.mask.documents == Documents::Apart { b.d.ins.len() - 1 } else { b.d.ins.len() });
        let args = numbers.map(int).into_iter().chain(embed::order_args(b, extent('s').logical)).chain([documents]).collect();
        Sizes { batch: q[0], queries: q[1], keys: k[1], groups: q[2], heads: q[3], d: q[4], dv: v[3], args }
    }
    fn config(&self, b: &Builder<'_>, a: &Attention, threads: u64) -> Config {
        let config = b.config(threads).int("D", self.d).int("DV", self.dv).flag("BOUND", a.mask.looks_back());
        config.flag("DOCUMENTS", a.mask.documents == Documents::Apart).flag("ZIGZAG", embed::is_zigzag(b)).real("SCALE", a.scale)
    }
    /// Whether tiles of 16 cover the heads.
    fn matrix_widths(&self, most: u64) -> bool {
        [self.d, self.dv].iter().all(|w| w % 16 == 0 && *w <= most)
    }
    /// Config of the matrix-unit kernels, whose other side goes by in tiles of `step` rows.
    fn matrix_config(&self, b: &Builder<'_>, a: &Attention, step: u64) -> Config {
        self.config(b, a, 128).flag("ASYNC", b.d.alignment == Alignment::Packs).int("STEP", step)
    }
    /// Arguments of a forward kernel; any address will do for sinks that are not.
    fn forward(&self, b: &Builder<'_>, begins: Begins) -> Vec<Arg> {
        let sinks = b.input(if begins == Begins::Sink { 3 } else { b.d.ins.len() });
        self.with(&[Arg::In(0), Arg::In(1), Arg::In(2)], &[Arg::Out(0), Arg::Out(1)]).into_iter().chain([sinks]).collect()
    }
    /// Arguments: operands, results, numbers.
    fn with(&self, ins: &[Arg], outs: &[Arg]) -> Vec<Arg> {
        ins.iter().chain(outs).chain(&self.args).copied().collect()
    }
}

fn halves(dtype: DType) -> bool {
    matches!(dtype, DType::Bf16 | DType::F16)
}

/// Widest heads whose sums stay in a warp's registers: one matrix of 16 rows forward, two backward.
const MOST_FORWARD: u64 = 256;
const MOST_BACKWARD: u64 = 128;
/// Rows of a block on the matrix units.
const ROWS: u64 = 64;

const POSITIONS: &str = include_str!("text/positions.cuh");
const SHAPE: &str = include_str!("text/attention_shape.cuh");
const NO_WINDOW: u64 = 1 << 62;
const TILE: u64 = 32;

/// Bytes of the tiles of a plain kernel: `d` rows of queries and keys, `dv` of values, `s` of scores.
fn tiles(acc: DType, s: &Sizes, [d, dv, scores]: [u64; 3]) -> Result<u64, PrepareError> {
    let bytes = TILE * (d * (s.d + 1) + dv * (s.dv + 1) + scores * (TILE + 1)) * acc.size();
    if bytes > MOST_SHARED {
        return Err(PrepareError::Sizes(format!("heads of {} and {} elements in {acc} need {bytes} bytes of shared memory", s.d, s.dv)));
    }
    Ok(bytes)
}

fn plain_forward(b: &mut Builder<'_>, a: &Attention, s: &Sizes, begins: Begins) -> Result<(), PrepareError> {
    let shared = tiles(b.acc, s, [2, 1, 1])?;
    let config = s.config(b, a, 256).flag("SINK", begins == Begins::Sink);
    let text = config.text(&[POSITIONS, SHAPE, include_str!("text/attention_plain.cuh"), include_str!("text/attention_plain_forward.cuh")]);
    let blocks = s.queries.div_ceil(TILE) * s.batch * s.groups * s.heads;
    let args = s.forward(b, begins);
    b.launch(Family::Attention, "dp_attention", text, Size::blocks(blocks, 256, shared), args);
    Ok(())
}

fn plain_backward(b: &mut Builder<'_>, a: &Attention, s: &Sizes, delta: Arg) -> Result<(), PrepareError> {
    let shared = tiles(b.acc, s, [2, 2, 2])?;
    let text =
        s.config(b, a, 256).text(&[POSITIONS, SHAPE, include_str!("text/attention_plain.cuh"), include_str!("text/attention_plain_backward.cuh")]);
    let ins = [Arg::In(0), Arg::In(1), Arg::In(2), Arg::In(5), Arg::In(4), delta];
    let blocks = s.keys.div_ceil(TILE) * s.batch * s.groups;
    let args = s.with(&ins, &[Arg::Out(1), Arg::Out(2)]);
    b.launch(Family::Attention, "dp_attention_grad_keys", text.clone(), Size::blocks(blocks, 256, shared), args);
    let blocks = s.queries.div_ceil(TILE) * s.batch * s.groups * s.heads;
    b.launch(Family::Attention, "dp_attention_grad_queries", text, Size::blocks(blocks, 256, shared), s.with(&ins, &[Arg::Out(0)]));
    Ok(())
}

fn mma_forward(b: &mut Builder<'_>, a: &Attention, s: &Sizes, begins: Begins) {
    let step = if s.d.max(s.dv) > 128 { 32 } else { 64 };
    let texts =
        [POSITIONS, SHAPE, include_str!("text/tiles.cuh"), include_str!("text/attention_mma.cuh"), include_str!("text/attention_mma_forward.cuh")];
    let text = s.matrix_config(b, a, step).flag("SINK", begins == Begins::Sink).text(&texts);
    let shared = ((ROWS + 2 * step) * (s.d + 8) + 2 * step * (s.dv + 8)) * 2;
    let blocks = s.queries.div_ceil(ROWS) * s.batch * s.groups * s.heads;
    let args = s.forward(b, begins);
    b.launch(Family::Attention, "dp_attention", text, Size::blocks(blocks, 128, shared), args);
}

fn mma_backward(b: &mut Builder<'_>, a: &Attention, s: &Sizes, delta: Arg) {
    let step = if s.d.max(s.dv) > 64 { 32 } else { 64 };
    let texts =
        [POSITIONS, SHAPE, include_str!("text/tiles.cuh"), include_str!("text/attention_mma.cuh"), include_str!("text/attention_mma_backward.cuh")];
    let text = s.matrix_config(b, a, step).text(&texts);
    let shared = (ROWS + step) * (s.d + 8 + s.dv + 8) * 2;
    let ins = [Arg::In(0), Arg::In(1), Arg::In(2), Arg::In(5), Arg::In(4), delta];
    let blocks = s.keys.div_ceil(ROWS) * s.batch * s.groups;
    let args = s.with(&ins, &[Arg::Out(1), Arg::Out(2)]);
    b.launch(Family::Attention, "dp_attention_grad_keys", text.clone(), Size::blocks(blocks, 128, shared + 2 * step * 4), args);
    let blocks = s.queries.div_ceil(ROWS) * s.batch * s.groups * s.heads;
    b.launch(Family::Attention, "dp_attention_grad_queries", text, Size::blocks(blocks, 128, shared), s.with(&ins, &[Arg::Out(0)]));
}
