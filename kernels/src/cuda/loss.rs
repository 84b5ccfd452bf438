//! Vocabulary-parallel cross entropy: statistics of this rank's columns, and their derivative.

use dplan_ir::extent::Extent;

use super::source::{Builder, Size, int};
use super::{Arg, Family};

pub fn stats(b: &mut Builder<'_>, columns: Extent) {
    let rows = b.d.ins[1].elems();
    let pack = b.pack(&[columns.len]);
    let threads = (columns.len.div_ceil(pack * 4).next_power_of_two()).clamp(32, 512);
    let text = b.config(threads).int("VEC", pack).text(&[include_str!("text/loss.cuh"), include_str!("text/loss_stats.cuh")]);
    let args = vec![Arg::In(0), Arg::In(1), Arg::Out(0), Arg::Out(1), int(columns.len), int(columns.start), int(columns.valid())];
    b.launch(Family::Loss, "dp_loss_stats", text, Size::blocks(rows, threads, 32 * b.acc.size()), args);
}

pub fn grad(b: &mut Builder<'_>, columns: Extent) {
    const THREADS: u64 = 256;
    let rows = b.d.ins[1].elems();
    let pack = b.pack(&[columns.len]);
    let text = b.config(THREADS).int("VEC", pack).text(&[include_str!("text/loss.cuh"), include_str!("text/loss_grad.cuh")]);
    let mut args: Vec<Arg> = (0..5).map(Arg::In).collect();
    args.extend([Arg::Out(0), int(rows), int(columns.len), int(columns.start), int(columns.valid())]);
    b.launch(Family::Loss, "dp_loss_grad", text, Size::over(rows * columns.len / pack, THREADS), args);
}
