//! Vectors of heads put together from their own part and a shared one.

use dplan_ir::extent::Extent;

use super::source::{Builder, Size, int};
use super::{Arg, Family};

const THREADS: u64 = 256;

/// (x, y) → z.
pub fn forward(b: &mut Builder<'_>, heads: Extent) {
    let args = vec![int(heads.len), int(heads.valid()), int(b.d.ins[0].dims[3]), int(b.d.outs[0].dims[3])];
    launch(b, "dp_append", vec![Arg::In(0), Arg::In(1), Arg::Out(0)], args);
}

/// dz → dx.
pub fn grad_head(b: &mut Builder<'_>) {
    let args = vec![int(b.d.outs[0].dims[3]), int(b.d.ins[0].dims[3])];
    launch(b, "dp_append_grad_head", vec![Arg::In(0), Arg::Out(0)], args);
}

/// dz → dy, summed over heads.
pub fn grad_tail(b: &mut Builder<'_>) {
    let (heads, whole) = (b.d.ins[0].dims[2], b.d.ins[0].dims[3]);
    let args = vec![int(heads), int(whole - b.d.outs[0].dims[2]), int(whole)];
    launch(b, "dp_append_grad_tail", vec![Arg::In(0), Arg::Out(0)], args);
}

fn launch(b: &mut Builder<'_>, entry: &'static str, operands: Vec<Arg>, numbers: Vec<Arg>) {
    let n = b.d.outs[0].elems();
    let text = b.config(THREADS).text(&[include_str!("text/append.cuh")]);
    let args = operands.into_iter().chain([int(n)]).chain(numbers).collect();
    b.launch(Family::Pointwise, entry, text, Size::over(n, THREADS), args);
}
