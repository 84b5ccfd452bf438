//! Table lookups: token embedding and learned positions.

use dplan_ir::extent::{Extent, OpContext};
use dplan_ir::program::Write;
use dplan_ir::rule::Label;

use super::PrepareError;
use super::block::{Block, BlockMut};
use super::float::{Float, clear, fill};
use super::vector::vectorized;

#[derive(Debug)]
pub enum Embed {
    /// Rows `table` of the table, `width` elements each.
    Lookup {
        table: Extent,
        width: usize,
    },
    LookupGrad {
        table: Extent,
        width: usize,
    },
    Position(Positions),
    PositionGrad(Positions),
}

/// The rows of the table that a block's positions use.
#[derive(Debug)]
pub struct Positions {
    places: Vec<usize>,
    width: usize,
}

impl Positions {
    /// `x`: sizes `[batch, seq, width]` of the block; its factor `label` counts positions; the table has `rows` rows.
    ///
    /// # Errors
    /// If the table is too short for the last position.
    pub fn new(context: &OpContext, label: Label, x: &[usize], rows: usize) -> Result<Positions, PrepareError> {
        let places: Vec<usize> = (0..x[1] as u64).map(|s| context.position(label, s) as usize).collect();
        match places.iter().max() {
            Some(&last) if last >= rows => Err(PrepareError::Sizes(format!("{rows} positions in the table, {} in the sequence", last + 1))),
            _ => Ok(Positions { places, width: x[2] }),
        }
    }
    /// The elements of each token's row, over and over for one sequence after the other.
    fn rows(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        self.places.iter().cycle().map(|p| p * self.width..(p + 1) * self.width)
    }
}

impl Embed {
    pub fn run<T: Float>(&self, ins: &[Block<'_>], outs: &mut [BlockMut<'_>], write: Write) {
        vectorized(|| self.loops::<T>(ins, outs, write));
    }

    #[inline(always)]
    fn loops<T: Float>(&self, ins: &[Block<'_>], outs: &mut [BlockMut<'_>], write: Write) {
        let out = T::of_mut(&mut outs[0]);
        match self {
            Embed::Lookup { table: extent, width } => {
                let (table, tokens) = (T::of(ins[0]), ins[1].indices());
                for (&token, out) in tokens.iter().zip(out.chunks_exact_mut(*width)) {
                    match row(extent, token) {
                        Some(row) => fill(out, write, |i| table[row * width + i]),
                        None => clear(out, write),
                    }
                }
            }
            Embed::LookupGrad { table: extent, width } => {
                let (tokens, dy) = (ins[0].indices(), T::of(ins[1]));
                clear(out, write);
                for (&token, dy) in tokens.iter().zip(dy.chunks_exact(*width)) {
                    if let Some(row) = row(extent, token) {
                        out[row * width..(row + 1) * width].iter_mut().zip(dy).for_each(|(o, d)| *o += *d);
                    }
                }
            }
            Embed::Position(at) => {
                let (x, table) = (T::of(ins[0]), T::of(ins[1]));
                for ((x, out), row) in x.chunks_exact(at.width).zip(out.chunks_exact_mut(at.width)).zip(at.rows()) {
                    let table = &table[row];
                    fill(out, write, |i| x[i] + table[i]);
                }
            }
            Embed::PositionGrad(at) => {
                clear(out, write);
                for (dy, row) in T::of(ins[0]).chunks_exact(at.width).zip(at.rows()) {
                    out[row].iter_mut().zip(dy).for_each(|(o, d)| *o += *d);
                }
            }
        }
    }
}

/// Where this rank's part of the table has the row of a token.
fn row(table: &Extent, token: i32) -> Option<usize> {
    u64::try_from(token).ok().and_then(|t| table.local(t)).map(|r| r as usize)
}
