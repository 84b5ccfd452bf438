//! Lookups by token and position: embedding tables, learned positions, rotary angles.

use dplan_ir::extent::{Extent, OpContext};
use dplan_ir::op::{Pairs, Rope, Rotation};
use dplan_ir::order::Order;

use super::source::{Builder, Size, int};
use super::{Arg, Family, PrepareError};

/// Blocks of the table's gradient.
const GRAD_BLOCKS: u64 = 1024;
const THREADS: u64 = 256;

pub fn lookup(b: &mut Builder<'_>, table: Extent) {
    let (width, tokens) = (b.d.ins[0].dims[1], b.d.ins[1].elems());
    let pack = b.pack(&[width]);
    let text = b.config(THREADS).int("VEC", pack).text(&[include_str!("text/embed.cuh")]);
    let args = vec![Arg::In(0), Arg::In(1), Arg::Out(0), int(tokens), int(width), int(table.start), int(table.len)];
    b.launch(Family::Embed, "dp_embed", text, Size::over(tokens * width / pack, THREADS), args);
}

pub fn lookup_grad(b: &mut Builder<'_>, table: Extent) {
    let (tokens, width) = (b.d.ins[0].elems(), b.d.outs[0].dims[1]);
    if !b.add() {
        fill_zero(b);
    }
    let pack = b.pack(&[width]);
    let strips = width.div_ceil(THREADS * pack).max(1);
    // Enough blocks to fill a GPU, as each goes through all tokens.
    let rows_of_block = table.len.div_ceil((GRAD_BLOCKS / strips).max(1)).max(1);
    let text = b.config(THREADS).int("VEC", pack).ty("grad_t", b.d.outs[0].dtype).text(&[include_str!("text/embed_grad.cuh")]);
    let numbers = [tokens, width, table.start, table.len, rows_of_block].map(int);
    let args = [Arg::In(0), Arg::In(1), Arg::Out(0)].into_iter().chain(numbers).collect();
    let size = Size::blocks(table.len.div_ceil(rows_of_block) * strips, THREADS, 128 + 32 * THREADS);
    b.launch(Family::Embed, "dp_embed_grad", text, size, args);
}

/// Rows that no token names have no gradient.
fn fill_zero(b: &mut Builder<'_>) {
    let (n, out) = (b.d.outs[0].elems(), b.d.outs[0].dtype);
    let config = super::pointwise::config(b.elem, out, b.acc, [0, 1], 1).flag("ADD", false).signed("REPEATS", -1);
    let text = super::pointwise::text(config, "u = acc(0);", None);
    let args = vec![Arg::Scalars, Arg::Scalars, Arg::Scalars, Arg::Out(0), Arg::Out(0), Arg::Scalars, int(n), int(1)];
    b.launch(Family::Pointwise, "dp_pointwise", text, Size::over(n, THREADS), args);
}

/// (x, table) → x + the table's row of each position.
pub fn positions_add(b: &mut Builder<'_>, positions: Extent) {
    let (n, width) = (b.d.outs[0].elems(), b.d.ins[0].dims[2]);
    let pack = b.pack(&[width]);
    let config = b.config(THREADS).int("VEC", pack).flag("ZIGZAG", is_zigzag(b));
    let text = config.text(&[include_str!("text/positions.cuh"), include_str!("text/positions_add.cuh")]);
    let mut args = vec![Arg::In(0), Arg::In(1), Arg::Out(0), int(n), int(positions.len), int(width), int(positions.start)];
    args.extend(order_args(b, positions.logical));
    b.launch(Family::Embed, "dp_positions_add", text, Size::over(n / pack, THREADS), args);
}

pub fn positions_grad(b: &mut Builder<'_>, positions: Extent) {
    let (batch, width, rows) = (b.d.ins[0].dims[0], b.d.ins[0].dims[2], b.d.outs[0].dims[0]);
    let config = b.config(THREADS).ty("grad_t", b.d.outs[0].dtype).flag("ZIGZAG", is_zigzag(b));
    let text = config.text(&[include_str!("text/positions.cuh"), include_str!("text/positions_grad.cuh")]);
    let numbers = [batch, positions.len, width, positions.start, rows, positions.logical].map(int);
    let args = [Arg::In(0), Arg::Out(0)].into_iter().chain(numbers).chain(order_args(b, positions.logical)).collect();
    b.launch(Family::Embed, "dp_positions_grad", text, Size::over(rows * width, THREADS), args);
}

/// Whether positions are not where their indices are.
pub fn is_zigzag(b: &Builder<'_>) -> bool {
    b.d.context.order != Order::Straight
}

/// Chunk and blocks of the order of a sequence, as `positions.cuh` takes them.
pub fn order_args(b: &Builder<'_>, length: u64) -> [Arg; 2] {
    order_args_of(b.d.context, length)
}

/// The same of some op.
pub fn order_args_of(context: &OpContext, length: u64) -> [Arg; 2] {
    match context.order {
        Order::Straight => [int(1), int(1)],
        Order::Zigzag { blocks } => [int(context.order.chunk(length)), int(blocks)],
    }
}

/// # Errors
/// If there is no pair, or more pairs than vectors have room for.
pub fn rope(b: &mut Builder<'_>, rope: &Rope, positions: Extent) -> Result<(), PrepareError> {
    let dims = &b.d.ins[0].dims;
    let (half, width) = (rope.inv_freq.len() as u64, dims[dims.len() - 1]);
    if half == 0 || rope.end() > width {
        return Err(PrepareError::Sizes(format!("{half} pairs from element {} on of vectors of {width}", rope.start)));
    }
    let sign = match rope.rotation {
        Rotation::Forward => 1.0,
        Rotation::Inverse => -1.0,
    };
    let turns: Vec<String> = rope.inv_freq.iter().map(|f| format!("{:e}", sign * f / std::f64::consts::PI)).collect();
    let table = format!("DP_CONSTANT double TURNS[{half}] = {{{}}};", turns.join(", "));
    let text = b
        .config(THREADS)
        .int("HALF", half)
        .int("WIDTH", width)
        .int("START", rope.start)
        .flag("NEIGHBOURS", rope.pairs == Pairs::Neighbours)
        .real("SCALE", rope.scale)
        .flag("ZIGZAG", is_zigzag(b))
        .line(&table)
        .text(&[include_str!("text/positions.cuh"), include_str!("text/rope.cuh")]);
    let heads: u64 = dims[2..dims.len() - 1].iter().product();
    let mut args = vec![Arg::In(0), Arg::Out(0), int(dims[0]), int(dims[1]), int(heads), int(positions.start)];
    args.extend(order_args(b, positions.logical));
    let size = Size::over(dims[0] * dims[1] * half, THREADS);
    b.launch(Family::Rope, "dp_rope", text, size, args);
    Ok(())
}
