//! Normalisation: a row stays in the registers of a warp or of a block.

use super::pointwise::sum_parts;
use super::source::{Builder, Size, int};
use super::{Arg, Family, PrepareError};

pub use crate::cpu::norm::{Part, Which};

/// Threads of a block where a warp has a row.
const WARPS: u64 = 256;
/// Most packs that a thread keeps.
const MOST_PACKS: u64 = 32;
/// Groups of threads that sum rows for the weights' gradient: enough to fill a GPU, few enough that their sums are little traffic.
const MOST_GROUPS: u64 = 264;

/// # Errors
/// If a row does not fit in the registers of a block.
pub fn norm(b: &mut Builder<'_>, which: Which, part: Part, eps: f64) -> Result<(), PrepareError> {
    let cols = b.d.ins[0].dims.last().copied().unwrap_or(1);
    let rows = b.d.ins[0].elems() / cols.max(1);
    let pack = b.pack(&[cols]);
    let row = row_threads(cols.div_ceil(pack));
    let packs = cols.div_ceil(pack).div_ceil(row);
    if packs > MOST_PACKS {
        return Err(PrepareError::Sizes(format!("a row of {cols} elements is longer than a block's registers hold")));
    }
    let threads = if row == 32 { WARPS } else { row };
    let groups_of_block = threads / row;
    let config = b.config(threads).int("T", row).int("E", packs).int("VEC", pack).flag("LAYER", which == Which::Layer).real("EPS", eps);
    let common = include_str!("text/norm.cuh");
    let shared = 32 * b.acc.size();
    let size = Size::blocks(rows.div_ceil(groups_of_block), threads, shared);
    match part {
        Part::Forward => {
            let text = config.text(&[common, include_str!("text/norm_forward.cuh")]);
            let bias = if which == Which::Layer { Arg::In(2) } else { Arg::In(1) };
            b.launch(Family::Norm, "dp_norm_forward", text, size, vec![Arg::In(0), Arg::In(1), bias, Arg::Out(0), int(rows), int(cols)]);
        }
        Part::GradInput => {
            let text = config.text(&[common, include_str!("text/norm_grad_input.cuh")]);
            let args = vec![Arg::In(0), Arg::In(1), Arg::In(2), Arg::Out(0), int(rows), int(cols)];
            b.launch(Family::Norm, "dp_norm_grad_input", text, size, args);
        }
        Part::GradWeight => {
            let text = config.text(&[common, include_str!("text/norm_grad_weight.cuh")]);
            // A group sums at least 32 rows: its sums, written and read again in f32, are then little beside what it reads.
            let blocks = rows.div_ceil(32).div_ceil(groups_of_block).clamp(1, MOST_GROUPS.div_ceil(groups_of_block));
            let (groups, results) = (blocks * groups_of_block, b.d.outs.len() as u64);
            let aux = b.take(results * groups * cols * b.acc.size());
            let args = vec![Arg::In(0), Arg::In(1), aux, int(rows), int(cols)];
            b.launch(Family::Norm, "dp_norm_grad_weight", text, Size::blocks(blocks, threads, shared), args);
            let Arg::Aux(start) = aux else { unreachable!("working memory") };
            for result in 0..results {
                sum_parts(b, Arg::Aux(start + result * groups * cols * b.acc.size()), groups, cols, result as usize);
            }
        }
    }
    Ok(())
}

/// Threads of a row of `packs` packs: a warp for short ones, else as many as have about four packs each.
pub fn row_threads(packs: u64) -> u64 {
    if packs <= 128 { 32 } else { packs.div_ceil(4).next_power_of_two().clamp(64, 1024) }
}
