//! A stage's program as one rank sees it: where a buffer lies, what it holds, whom a collective meets.

use std::ops::Range;

use dplan_ir::dtype::DType;
use dplan_ir::entity::{BufferId, NodeId, ParamId, ValueId};
use dplan_ir::extent::{OpContext, Seat, context};
use dplan_ir::graph::{Graph, Layout, Node};
use dplan_ir::mesh::AxisSet;
use dplan_ir::program::{Bucket, Buffer, Content, Program, Space, StageProgram};
use dplan_ir::sharding::{LocalType, Sharding, local_type};

use super::block::Block;

/// Where a buffer lies in one of a rank's memories.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    pub offset: u64,
    pub stride: u64,
    pub slots: u64,
    pub bytes: u64,
    pub dtype: DType,
}

impl Place {
    /// First byte of the slot that serves a micro-batch.
    pub fn at(&self, micro_batch: u64) -> u64 {
        self.offset + micro_batch % self.slots * self.stride
    }
    pub fn elems(&self) -> u64 {
        self.bytes / self.dtype.size()
    }
    /// Whether every slot begins at a multiple of 16 bytes.
    pub fn aligned(&self) -> bool {
        self.offset.is_multiple_of(16) && (self.slots == 1 || self.stride.is_multiple_of(16))
    }
}

/// One rank of one stage.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    pub graph: &'a Graph,
    pub program: &'a Program,
    pub stage: usize,
    pub local_rank: u64,
}

/// An op as a rank runs it.
pub struct Local<'a> {
    pub node: &'a Node,
    pub context: OpContext,
    pub ins: Vec<LocalType>,
    pub outs: Vec<LocalType>,
}

impl<'a> View<'a> {
    pub fn of_stage(&self) -> &'a StageProgram {
        &self.program.stages[self.stage]
    }
    pub fn buffer(&self, id: BufferId) -> Result<&'a Buffer, String> {
        self.of_stage().buffers.get(id).ok_or_else(|| format!("{id} does not exist"))
    }
    /// Where a buffer lies in the device's memory.
    ///
    /// # Errors
    /// As [`View::anywhere`], and if it lies elsewhere.
    pub fn place(&self, id: BufferId) -> Result<Place, String> {
        match self.anywhere(id)? {
            (Space::Device, place) => Ok(place),
            (other @ (Space::Host | Space::File), _) => Err(format!("{id} is in {}, where only copies reach it", other.name())),
        }
    }
    /// The memory that a buffer is in, and where it lies there.
    ///
    /// # Errors
    /// If the buffer reaches past its memory or is not aligned to its elements.
    pub fn anywhere(&self, id: BufferId) -> Result<(Space, Place), String> {
        let (buffer, slots) = (self.buffer(id)?, self.buffer(id)?.slots.max(1));
        let address = buffer.offset_at(0, &self.program.mesh, self.local_rank);
        let space = self.of_stage().space_at(address);
        let (range, size) = (self.of_stage().range(space), self.of_stage().bytes_in(space));
        let offset = address.saturating_sub(range.start);
        let end = (slots - 1).checked_mul(buffer.slot_stride).and_then(|s| s.checked_add(offset)?.checked_add(buffer.bytes));
        if end.is_none_or(|end| end > size) {
            return Err(format!("{id}: its range ends past {} of {size} bytes", space.name()));
        }
        if [offset, buffer.slot_stride, buffer.bytes].iter().any(|x| x % buffer.dtype.size() != 0) {
            return Err(format!("{id}: its range is not aligned to {}", buffer.dtype));
        }
        Ok((space, Place { offset, stride: buffer.slot_stride, slots, bytes: buffer.bytes, dtype: buffer.dtype }))
    }
    /// # Errors
    /// If the node does not exist, or a buffer is no block of its operand.
    pub fn local(&self, node: NodeId, ins: &[BufferId], outs: &[BufferId]) -> Result<Local<'a>, String> {
        let node = self.graph.nodes.get(node).ok_or_else(|| format!("{node} does not exist"))?;
        if (node.inputs.len(), node.outputs.len()) != (ins.len(), outs.len()) {
            return Err(format!("{} operands and {} results", ins.len(), outs.len()));
        }
        let shardings = |ids: &[BufferId]| ids.iter().map(|&b| self.sharding(b)).collect::<Result<Vec<_>, _>>();
        let types = |ids: &[BufferId], values: &[ValueId], shardings: &[Sharding]| -> Result<Vec<LocalType>, String> {
            ids.iter().zip(values).zip(shardings).map(|((&b, &v), s)| self.local_type(b, v, s)).collect()
        };
        let (in_shardings, out_shardings) = (shardings(ins)?, shardings(outs)?);
        let (in_types, out_types) = (types(ins, &node.inputs, &in_shardings)?, types(outs, &node.outputs, &out_shardings)?);
        let seat = self.seat();
        let (i, o) = (in_shardings.iter().collect::<Vec<_>>(), out_shardings.iter().collect::<Vec<_>>());
        Ok(Local { node, context: context(self.graph, node, &i, &o, seat, 0.0), ins: in_types, outs: out_types })
    }
    /// Which graph input a buffer holds, this rank's block of it, and how many elements micro-batches are apart.
    ///
    /// # Errors
    /// If the buffer holds no input.
    pub fn input(&self, dst: BufferId) -> Result<(usize, Block, u64), String> {
        let Content::Value { value, sharding } = &self.buffer(dst)?.content else { return Err("an input is a value".into()) };
        let input = self.graph.inputs.iter().position(|v| v == value).ok_or_else(|| format!("{value} is no input of the graph"))?;
        let dims = &self.graph.values[*value].ty.dims;
        self.local_type(dst, *value, sharding)?;
        let longer = self.graph.batch.map(|b| (b, self.graph.size(b) * self.program.micro_batches));
        let block = Block::new(self.graph, dims, sharding, self.seat(), longer);
        // An input without sequences is the same for every micro-batch.
        let at = self.graph.batch.and_then(|b| Some((dims.iter().position(|&d| d == b)?, self.graph.size(b))));
        let step = at.map_or(0, |(at, sequences)| block.stride(at) as u64 * sequences);
        Ok((input, block, step))
    }
    /// The stored shape of a buffer as `[outer, row]`, `row` being the elements of a dim and all that follow it.
    pub fn shape(&self, id: BufferId, dim: u32) -> Result<[u64; 2], String> {
        let buffer = self.buffer(id)?;
        let dims: Vec<u64> = match &buffer.content {
            Content::Value { value, sharding } => {
                let local = self.local_type(id, *value, sharding)?;
                match local.layout {
                    Layout::Dense => local.dims,
                    // Packed rows stand for three dims, which cannot be cut.
                    Layout::TopK { .. } if dim < 3 => return Err(format!("{id} is in top-k layout: its dim {dim} cannot be cut")),
                    Layout::TopK { .. } => {
                        let rest: u64 = local.dims[3..].iter().product();
                        [&[local.elems() / rest.max(1), 1, 1], &local.dims[3..]].concat()
                    }
                }
            }
            Content::Flat { .. }
            | Content::Member { .. }
            | Content::Scalar(_)
            | Content::Trust { .. }
            | Content::Wire { .. }
            | Content::Frame
            | Content::Scratch => {
                vec![buffer.bytes / buffer.dtype.size()]
            }
        };
        if dim as usize >= dims.len() {
            return Err(format!("{id} has no dim {dim}"));
        }
        let (outer, row) = dims.split_at(dim as usize);
        Ok([outer.iter().product(), row.iter().product()])
    }
    /// The elements of a flat buffer, in stretches of parameters that `pulled` says the same of.
    ///
    /// # Errors
    /// If the buffer is not flat.
    pub fn stretches(&self, id: BufferId, pulled: impl Fn(ParamId) -> bool) -> Result<Vec<(Range<usize>, bool)>, String> {
        let (bucket, start, len) = self.flat(id)?;
        Ok(bucket.stretches(start, len, pulled))
    }
    /// The same, each parameter by itself; and its number in the bucket.
    ///
    /// # Errors
    /// If the buffer is not flat.
    pub fn parts(&self, id: BufferId, pulled: impl Fn(ParamId) -> bool) -> Result<(Vec<usize>, Vec<(Range<usize>, bool)>), String> {
        let (bucket, start, len) = self.flat(id)?;
        let parts = bucket.parts(start, len).into_iter();
        Ok(parts.map(|(at, range)| (at, (range, pulled(bucket.members[at].param)))).unzip())
    }
    /// The bucket of a flat buffer, the first element of it that the buffer has on this rank, and how many it has.
    fn flat(&self, id: BufferId) -> Result<(&'a Bucket, u64, u64), String> {
        let buffer = self.buffer(id)?;
        let Content::Flat { bucket, pieces, .. } = buffer.content else { return Err(format!("{id} is no flat buffer")) };
        let bucket = self.of_stage().buckets.get(bucket).ok_or_else(|| format!("{bucket} does not exist"))?;
        let mesh = &self.program.mesh;
        let start = mesh.position(self.local_rank, pieces) * (bucket.elems / mesh.size(pieces));
        Ok((bucket, start, buffer.bytes / buffer.dtype.size()))
    }
    /// Ranks of the whole program that a collective of this rank meets, in group order.
    pub fn group(&self, axes: AxisSet, stages: &[u32]) -> Vec<u64> {
        let (own, mesh) = ([self.stage as u32], &self.program.mesh);
        let stages = if stages.is_empty() { &own[..] } else { stages };
        let locals = mesh.group(self.local_rank, axes);
        stages.iter().flat_map(|&s| locals.iter().map(move |&r| u64::from(s) * mesh.ranks() + r)).collect()
    }

    fn seat(&self) -> Seat<'a> {
        Seat { mesh: &self.program.mesh, padded: &self.program.padded, local_rank: self.local_rank }
    }
    /// How a buffer's content is sharded.
    fn sharding(&self, id: BufferId) -> Result<Sharding, String> {
        match &self.buffer(id)?.content {
            Content::Value { sharding, .. } => Ok(sharding.clone()),
            Content::Member { bucket, param, .. } => {
                let bucket = self.of_stage().buckets.get(*bucket).ok_or_else(|| format!("{bucket} does not exist"))?;
                let member = bucket.members.iter().find(|m| m.param == *param).ok_or_else(|| format!("{param} is not in its bucket"))?;
                Ok(member.sharding.clone())
            }
            Content::Scalar(_) => Ok(Sharding::replicated(0)),
            Content::Flat { .. } | Content::Trust { .. } | Content::Wire { .. } | Content::Frame | Content::Scratch => {
                Err(format!("{id} holds no tensor"))
            }
        }
    }
    fn local_type(&self, id: BufferId, value: ValueId, sharding: &Sharding) -> Result<LocalType, String> {
        let ty = &self.graph.values.get(value).ok_or_else(|| format!("{value} does not exist"))?.ty;
        if ty.dims.len() != sharding.dims.len() {
            return Err(format!("{id} has a sharding of {} dims for {value}", sharding.dims.len()));
        }
        let divides = |(&dim, &axes)| self.program.padded.size(dim).is_multiple_of(self.program.mesh.size(axes));
        if !ty.dims.iter().zip(&sharding.dims).all(divides) {
            return Err(format!("{id}: the sharding of {value} does not divide its dims"));
        }
        let buffer = self.buffer(id)?;
        let local = LocalType { dtype: buffer.dtype, ..local_type(ty, sharding, &self.program.padded, &self.program.mesh) };
        if local.bytes() == buffer.bytes { Ok(local) } else { Err(format!("{id} has {} bytes for a block of {}", buffer.bytes, local.bytes())) }
    }
}
