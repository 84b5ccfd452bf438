//! Gradients of norms' weights: a row stays in the registers of a warp or of a block.

use super::pointwise::sum_parts;
use super::source::{Builder, Size, int};
use super::{Arg, Family, PrepareError};

pub use crate::cpu::norm::Which;

/// Threads of a block where a warp has a row.
const WARPS: u64 = 256;
/// Most packs that a thread keeps.
pub const MOST_PACKS: u64 = 32;
/// Groups of threads that sum rows for the weights' gradient: enough to fill a GPU, few enough that their sums are little traffic.
const MOST_GROUPS: u64 = 264;

/// Sums over rows for the gradient of a norm's weights; [`super::rows`] has its other parts.
///
/// # Errors
/// If a row does not fit in the registers of a block.
pub fn grad_weight(b: &mut Builder<'_>, which: Which, eps: f64) -> Result<(), PrepareError> {
    let cols = b.d.outs[0].elems();
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
    let text = config.text(&[include_str!("text/norm.cuh"), include_str!("text/norm_grad_weight.cuh")]);
    // A group sums at least 32 rows: its sums, written and read again in f32, are then little beside what it reads.
    let blocks = rows.div_ceil(32).div_ceil(groups_of_block).clamp(1, MOST_GROUPS.div_ceil(groups_of_block));
    let (groups, results) = (blocks * groups_of_block, b.d.outs.len() as u64);
    let start = b.aux;
    let aux = b.take(results * groups * cols * b.acc.size());
    let args = vec![Arg::In(0), Arg::In(1), aux, int(rows), int(cols)];
    b.launch(Family::Norm, "dp_norm_grad_weight", text, Size::blocks(blocks, threads, 32 * b.acc.size()), args);
    for result in 0..results {
        sum_parts(b, Arg::Aux(start + result * groups * cols * b.acc.size()), groups, cols, result as usize);
    }
    Ok(())
}

/// Threads of a row of `packs` packs: a warp for short ones, else as many as have about four packs each.
pub fn row_threads(packs: u64) -> u64 {
    if packs <= 128 { 32 } else { packs.div_ceil(4).next_power_of_two().clamp(64, 1024) }
}
