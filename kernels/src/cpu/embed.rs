//! Table lookups: token embedding and learned positions.

use dplan_ir::extent::Extent;
use dplan_ir::program::Write;

use super::PrepareError;
use super::block::{Block, BlockMut};
use super::float::{Float, clear, fill};

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

/// Token positions of a block.
#[derive(Debug)]
pub struct Positions {
    first: usize,
    count: usize,
    width: usize,
}

impl Positions {
    /// `x`: sizes `[batch, seq, width]` of the block at `positions`; the table has `rows` rows.
    ///
    /// # Errors
    /// If the table is too short for the last position.
    pub fn new(positions: Extent, x: &[usize], rows: usize) -> Result<Positions, PrepareError> {
        let first = positions.start as usize;
        if first + x[1] > rows {
            return Err(PrepareError::Sizes(format!("{rows} positions in the table, {} in the sequence", first + x[1])));
        }
        Ok(Positions { first, count: x[1], width: x[2] })
    }
    /// Elements of the table that the block's positions use.
    fn range(&self) -> std::ops::Range<usize> {
        self.first * self.width..(self.first + self.count) * self.width
    }
}

impl Embed {
    pub fn run<T: Float>(&self, ins: &[Block<'_>], outs: &mut [BlockMut<'_>], write: Write) {
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
                let (x, table) = (T::of(ins[0]), &T::of(ins[1])[at.range()]);
                for (x, out) in x.chunks_exact(table.len()).zip(out.chunks_exact_mut(table.len())) {
                    fill(out, write, |i| x[i] + table[i]);
                }
            }
            Embed::PositionGrad(at) => {
                clear(out, write);
                let out = &mut out[at.range()];
                for dy in T::of(ins[0]).chunks_exact(out.len()) {
                    out.iter_mut().zip(dy).for_each(|(o, d)| *o += *d);
                }
            }
        }
    }
}

/// Where this rank's part of the table has the row of a token.
fn row(table: &Extent, token: i32) -> Option<usize> {
    u64::try_from(token).ok().and_then(|t| table.local(t)).map(|r| r as usize)
}
