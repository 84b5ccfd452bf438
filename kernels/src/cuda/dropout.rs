//! Dropout of a block of `x[b,s,…]`, see [`dplan_ir::dropout`].

use dplan_ir::dropout::{scale, threshold};
use dplan_ir::extent::Extent;

use super::embed::{is_zigzag, order_args};
use super::source::{Builder, Size, int};
use super::{Arg, Family, PrepareError};

const THREADS: u64 = 256;
/// Elements that one call of the generator decides on.
const WORDS: u64 = 4;

/// `dims`: the block's.
///
/// # Errors
/// If the block is split in more dims than the kernel can tell apart.
pub fn dropout(b: &mut Builder<'_>, rate: f64, dims: &[Extent]) -> Result<(), PrepareError> {
    let &[batch, positions, ref rest @ ..] = dims else { return Err(PrepareError::Sizes(format!("dropout of a value of {} dims", dims.len()))) };
    let (outer, inner) = match merged(rest)[..] {
        [] => (Extent::whole(1), Extent::whole(1)),
        [inner] => (Extent::whole(1), inner),
        [outer, inner] => (outer, inner),
        ref more => return Err(PrepareError::Sizes(format!("dropout of a value that is split or padded in {} of its inner dims", more.len()))),
    };
    let n = b.d.outs[0].elems();
    let fours = [inner.start, inner.len, inner.logical].iter().all(|e| e.is_multiple_of(WORDS));
    let lanes = if fours { WORDS } else { 1 };
    let config =
        b.config(THREADS).int("LANES", lanes).int("VEC", b.pack(&[inner.len]).min(lanes)).flag("ZIGZAG", is_zigzag(b)).real("SCALE", scale(rate));
    let text = config.text(&[include_str!("text/positions.cuh"), include_str!("text/dropout.cuh")]);
    let mut args = vec![Arg::In(0), Arg::Out(0), Arg::Scalars, int(n), int(u64::from(b.d.context.node.0)), int(u64::from(threshold(rate)))];
    args.extend([Arg::MicroBatch(batch.logical as i64), int(batch.start), int(positions.len), int(positions.start)]);
    args.extend(order_args(b, positions.logical));
    args.extend([outer.len, outer.start, inner.len, inner.start, inner.logical, outer.logical * inner.logical].map(int));
    b.launch(Family::Pointwise, "dp_dropout", text, Size::over(n / lanes, THREADS), args);
    Ok(())
}

/// The same elements in the fewest dims: one that is whole goes with the one before it.
fn merged(dims: &[Extent]) -> Vec<Extent> {
    let mut all: Vec<Extent> = Vec::new();
    for &dim in dims {
        match all.last_mut() {
            Some(outer) if dim == Extent::whole(dim.logical) => {
                *outer = Extent { start: outer.start * dim.len, len: outer.len * dim.len, logical: outer.logical * dim.len };
            }
            _ => all.push(dim),
        }
    }
    all
}
