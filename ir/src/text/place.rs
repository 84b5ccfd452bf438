//! Printed text that knows which line each entity stands on.

use crate::entity::{BucketId, BufferId, DimId, FormId, NodeId, ParamId, SegmentId, ValueId};

/// An entity of any level: what an error is about, and what a line of text shows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Place {
    /// The graph, sharded graph or program as a whole: its first line.
    Top,
    Dim(DimId),
    Value(ValueId),
    Param(ParamId),
    Node(NodeId),
    Form(FormId),
    /// A statement of a sharded graph, by position in its body.
    Stmt(u32),
    Stage(u32),
    /// A region of a stage's arena, by position.
    Region(u32, u32),
    Bucket(u32, BucketId),
    Buffer(u32, BufferId),
    Segment(u32, SegmentId),
    /// An instruction: stage, segment, position in its body.
    Instr(u32, SegmentId, u32),
    /// A call in a stage's schedule, by position.
    Call(u32, u32),
}

/// Text, and the line (from 0) on which each entity begins. A program's calls share lines.
#[derive(Clone, Debug, Default)]
pub struct Printed {
    pub text: String,
    pub lines: Vec<(Place, u32)>,
    line: u32,
}

impl Printed {
    /// The line in hand shows `place`.
    pub fn mark(&mut self, place: Place) {
        self.lines.push((place, self.line));
    }
    pub fn put(&mut self, s: &str) {
        self.text.push_str(s);
    }
    /// Ends the line in hand.
    pub fn end_line(&mut self) {
        self.text.push('\n');
        self.line += 1;
    }
}
