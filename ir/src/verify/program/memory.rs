//! The arena of a stage's symbolic rank, cut into *cells*: the ranges between all ends of buffers, slots and bucket members. An access touches whole cells.
//!
//! A cell has two contents: of the bytes that lie in the rank's own piece of a flat buffer, and of the rest. They differ only after an access through a piece in
//! place, whose *grid* (where the pieces lie, over which axes) says which bytes are own; for all other accesses both must be right.

use std::ops::Range;

use super::clock::{Clock, Point};
use super::content::Fact;
use crate::entity::{BufferId, Id};
use crate::mesh::AxisSet;
use crate::program::{Buffer, Content, Program, StageProgram, Stream};

#[derive(Clone, Debug)]
pub(super) struct Cell {
    pub own: Fact,
    pub rest: Fact,
    /// Grid (or [`NO_GRID`]) that `own` refers to, where the two differ.
    pub grid: u32,
    pub written: Point,
    /// Latest read since, by stream.
    pub read: [u32; Stream::ALL.len()],
}

/// No pieces in place: all bytes are alike.
pub(super) const NO_GRID: u32 = 0;

impl Cell {
    /// The contents that an access through `grid` meets.
    pub fn seen(&self, grid: u32) -> (Fact, Fact) {
        if grid != NO_GRID && (grid == self.grid || self.own == self.rest) { (self.own, self.own) } else { (self.own, self.rest) }
    }
    pub fn set(&mut self, grid: u32, fact: Fact) {
        if grid == NO_GRID {
            self.rest = fact;
        } else if self.grid != grid && self.own != self.rest {
            self.rest = Fact::Garbage;
        }
        self.own = fact;
        self.grid = grid;
    }
    /// Notes a read; an earlier write that does not happen before it.
    pub fn reads(&mut self, clock: &Clock, at: Point) -> Option<Point> {
        self.read[at.stream as usize] = at.time;
        (!clock.covers(self.written)).then_some(self.written)
    }
    /// Notes a write; an earlier access that does not happen before it.
    pub fn writes(&mut self, clock: &Clock, at: Point) -> Option<Point> {
        let read = |stream: usize| Point { stream: stream as u8, time: self.read[stream] };
        let race = Some(self.written).into_iter().chain((0..self.read.len()).map(read)).find(|&p| !clock.covers(p));
        self.written = at;
        self.read = [0; Stream::ALL.len()];
        race
    }
}

/// Where a buffer lies in the cells.
pub(super) struct View {
    /// By slot: its cells, and the byte where it (or the flat buffer it is a part of) begins.
    pub slots: Vec<(Range<usize>, u64)>,
    pub grid: u32,
}

/// Cells of a stage's arena and every buffer's view of them.
pub(super) struct Layout {
    pub views: Vec<View>,
    /// First byte of each cell, and the end of the last.
    pub starts: Vec<u64>,
}

impl Layout {
    pub fn new(program: &Program, stage: &StageProgram) -> Layout {
        let mut starts = vec![0, stage.arena_bytes, stage.end()];
        let slots = |buffer: &Buffer| buffer.slots.min(program.micro_batches);
        let footprint = |buffer: &Buffer| buffer.bytes * program.mesh.size(buffer.piece_axes);
        for buffer in stage.buffers.values() {
            for slot in 0..slots(buffer) {
                let start = buffer.offset + slot * buffer.slot_stride;
                starts.extend([start, start + footprint(buffer)]);
                if let Content::Flat { bucket, pieces, .. } = buffer.content
                    && pieces == buffer.piece_axes
                {
                    for member in &stage.buckets[bucket].members {
                        let at = start + member.offset * buffer.dtype.size();
                        starts.extend([at, at + member.elems * buffer.dtype.size()]);
                    }
                }
            }
        }
        starts.sort_unstable();
        starts.dedup();
        let mut grids: Vec<(u64, u64, AxisSet)> = vec![(0, 0, AxisSet::EMPTY)];
        let cell = |byte: u64| starts.binary_search(&byte).unwrap_or_else(|at| at);
        let mut views = Vec::with_capacity(stage.buffers.len());
        for buffer in stage.buffers.values() {
            let grid = if buffer.piece_axes.is_empty() {
                NO_GRID
            } else {
                let key = (buffer.offset, buffer.bytes, buffer.piece_axes);
                let at = grids.iter().position(|&g| g == key).unwrap_or_else(|| {
                    grids.push(key);
                    grids.len() - 1
                });
                at as u32
            };
            let before = match buffer.content {
                Content::Member { bucket, param, .. } => {
                    let member = stage.buckets[bucket].members.iter().find(|m| m.param == param);
                    member.map_or(0, |m| m.offset * buffer.dtype.size())
                }
                Content::Value { .. }
                | Content::Flat { .. }
                | Content::Scalar(_)
                | Content::Trust { .. }
                | Content::Wire { .. }
                | Content::Frame
                | Content::Scratch => 0,
            };
            let at = |slot: u64| {
                let start = buffer.offset + slot * buffer.slot_stride;
                (cell(start)..cell(start + footprint(buffer)), start - before)
            };
            views.push(View { slots: (0..slots(buffer)).map(at).collect(), grid });
        }
        Layout { views, starts }
    }

    pub fn cells(&self) -> Vec<Cell> {
        let garbage = Cell { own: Fact::Garbage, rest: Fact::Garbage, grid: NO_GRID, written: Point::default(), read: [0; Stream::ALL.len()] };
        vec![garbage; self.starts.len().saturating_sub(1)]
    }
    pub fn view(&self, buffer: BufferId) -> &View {
        &self.views[buffer.index()]
    }
}
