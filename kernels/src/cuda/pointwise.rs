//! Elementwise ops, and sums down columns.

use dplan_ir::dtype::DType;
use dplan_ir::op::{Activation, Op};

use super::source::{Builder, Config, Size, int};
use super::{Arg, Family};

const THREADS: u64 = 256;

/// What an op makes of operands x, y, z at one place: its results u, v, and the activation that it computes.
pub fn expression(op: &Op) -> Option<(&'static str, Option<Activation>)> {
    match op {
        Op::Add => Some(("u = x + y;", None)),
        Op::Sub => Some(("u = x - y;", None)),
        Op::Neg => Some(("u = -x;", None)),
        Op::MeanGrad => Some(("u = x;", None)),
        Op::Act(f) => Some(("acc s; activation(x, u, s);", Some(*f))),
        Op::ActGrad(f) => Some(("acc s; activation(x, v, s); u = y * s;", Some(*f))),
        Op::Gated(f) => Some(("acc s; activation(x, u, s); u = u * y;", Some(*f))),
        Op::GatedGrad(f) => Some(("acc a, s; activation(x, a, s); u = z * y * s; v = z * a;", Some(*f))),
        _ => None,
    }
}

/// Results are an expression of operands at the same place.
pub fn elementwise(b: &mut Builder<'_>, (expression, activation): (&str, Option<Activation>)) {
    launch(b, expression, activation, None);
}

/// x + y, where y repeats every `cols` elements.
pub fn repeated(b: &mut Builder<'_>, cols: u64) {
    launch(b, "u = x + y;", None, Some(cols));
}

fn launch(b: &mut Builder<'_>, expression: &str, activation: Option<Activation>, repeat: Option<u64>) {
    let n = b.d.outs[0].elems();
    let cols = repeat.unwrap_or(1);
    let pack = if repeat.is_some() { b.pack(&[n, cols]) } else { b.pack(&[n]) };
    let out = b.d.outs[0].dtype;
    let config = config(b.elem, out, b.acc, [b.d.ins.len() as u64, b.d.outs.len() as u64], pack)
        .flag("ADD", b.add())
        .signed("REPEATS", if repeat.is_some() { 1 } else { -1 });
    let text = text(config, expression, activation);
    let args = vec![b.input(0), b.input(1), b.input(2), b.output(0), b.output(1), Arg::Scalars, int(n), int(cols)];
    b.launch(Family::Pointwise, "dp_pointwise", text, Size::over(n.div_ceil(pack), THREADS), args);
}

/// The part of the config that every elementwise text has.
pub fn config(input: DType, output: DType, acc: DType, [ins, outs]: [u64; 2], pack: u64) -> Config {
    Config::default().ty("in_t", input).ty("out_t", output).ty("acc", acc).int("IN", ins).int("OUT", outs).int("VEC", pack).int("THREADS", THREADS)
}

/// The text of an elementwise kernel: operands x, y, z, results u, v.
pub fn text(config: Config, expression: &str, activation: Option<Activation>) -> String {
    let (config, act) = match activation {
        None => (config, ""),
        Some(f) => self::activation(config, f),
    };
    let expression = format!("DP_DEVICE void expression(acc x, acc y, acc z, acc& u, acc& v) {{ {expression} }}\n");
    config.text(&[act, &expression, include_str!("text/pointwise.cuh")])
}

/// Which activation the text `activation` computes, and that text. Config: acc.
pub fn activation(config: Config, f: Activation) -> (Config, &'static str) {
    let (number, limit) = number(f);
    (config.int("ACT", number).int("LIMIT", limit.into()), include_str!("text/activation.cuh"))
}

/// What the text calls an activation, and its limit.
fn number(f: Activation) -> (u64, u32) {
    match f {
        Activation::Silu => (0, 0),
        Activation::Gelu => (1, 0),
        Activation::GeluTanh => (2, 0),
        Activation::Relu => (3, 0),
        Activation::QuickGelu => (4, 0),
        Activation::Clamp { limit } => (5, limit),
        Activation::ClampAbove { limit } => (6, limit),
    }
}

/// Σ over rows of `cols` elements: parts of the rows first, then the parts.
pub fn sum_leading(b: &mut Builder<'_>, cols: u64) {
    let rows = b.d.ins[0].elems() / cols.max(1);
    sum_rows(b, (Arg::In(0), b.elem), rows, cols);
}

/// The first result ← (+) the sum of `rows` rows at an address.
pub fn sum_rows(b: &mut Builder<'_>, (from, elem): (Arg, DType), rows: u64, cols: u64) {
    let parts = rows.div_ceil(ROWS_OF_A_PART).clamp(1, MOST_PARTS);
    let chunk = rows.div_ceil(parts);
    let parts = rows.div_ceil(chunk.max(1)).max(1);
    let (acc, out) = (b.acc, b.d.outs[0].dtype);
    if parts == 1 {
        let args = vec![from, Arg::Out(0), int(rows), int(cols), int(rows)];
        b.launch(Family::Columns, "dp_columns", columns(elem, out, acc, b.add()), strips(cols, 1), args);
        return;
    }
    let aux = b.take(parts * cols * acc.size());
    let args = vec![from, aux, int(rows), int(cols), int(chunk)];
    b.launch(Family::Columns, "dp_columns", columns(elem, acc, acc, false), strips(cols, parts), args);
    sum_parts(b, aux, parts, cols, 0);
}

const ROWS_OF_A_PART: u64 = 32;
const MOST_PARTS: u64 = 256;

/// Result `out` ← (+) the sum of `parts` rows of working memory.
pub fn sum_parts(b: &mut Builder<'_>, aux: Arg, parts: u64, cols: u64, out: usize) {
    let text = columns(b.acc, b.d.outs[out].dtype, b.acc, b.add());
    let args = vec![aux, Arg::Out(out), int(parts), int(cols), int(parts)];
    b.launch(Family::Columns, "dp_columns", text, strips(cols, 1), args);
}

fn columns(input: DType, output: DType, acc: DType, add: bool) -> String {
    let config = Config::default().ty("in_t", input).ty("out_t", output).ty("acc", acc).int("THREADS", COLUMN_THREADS).flag("ADD", add);
    config.text(&[include_str!("text/columns.cuh")])
}

const COLUMN_THREADS: u64 = 128;

fn strips(cols: u64, parts: u64) -> Size {
    Size::blocks(cols.div_ceil(COLUMN_THREADS) * parts, COLUMN_THREADS, 0)
}
