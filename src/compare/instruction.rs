//! What profiles call an instruction: the contract between a run that is recorded and the plan that it is laid over.
//!
//! A name is `STAGE.SEGMENT@NUMBER.POSITION WORD CLASS`: the place ([`Instruction`]), what is done there and, of computation, what bounds it ([`label`]).

use dplan_ir::cost::{Unit, op_cost};
use dplan_ir::entity::{BufferId, SegmentId};
use dplan_ir::graph::{Graph, Layout};
use dplan_ir::op::Op;
use dplan_ir::program::{Buffer, Content, Instr, Program, SegmentKind};
use dplan_ir::sharding::{LocalType, local_type};
use dplan_ir::text::op_name;

/// Where an instruction is, as profiles name it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Instruction {
    pub stage: u32,
    pub kind: SegmentKind,
    /// A stage has a segment of a kind for each of its virtual stages.
    pub segment: SegmentId,
    pub at: u32,
}

impl Instruction {
    pub fn name(&self) -> String {
        format!("{}.{}@{}.{}", self.stage, self.kind.name(), self.segment.0, self.at)
    }
    /// From the first word of an event's name.
    pub fn parse(name: &str) -> Option<Instruction> {
        let mut parts = name.split(' ').next()?.split('.');
        let stage = parts.next()?.parse().ok()?;
        let (kind, segment) = parts.next()?.split_once('@')?;
        let (kind, segment) = (SegmentKind::from_name(kind)?, SegmentId(segment.parse().ok()?));
        let at = parts.next()?.parse().ok()?;
        parts.next().is_none().then_some(Instruction { stage, kind, segment, at })
    }
}

/// What an instruction is called in profiles, after its place: a word for what it does and, of computation, the class of it.
pub fn label(graph: &Graph, program: &Program, stage: usize, instr: &Instr) -> String {
    let compute = |word: &str| format!("{word} {}", class_of(graph, program, stage, instr));
    match instr {
        Instr::Run { node, .. } => compute(op_name(&graph.nodes[*node].op)),
        Instr::Collective { pattern, .. } => pattern.name().into(),
        Instr::Send { .. } => "send".into(),
        Instr::Recv { .. } => "recv".into(),
        Instr::Copy { .. } => "copy".into(),
        Instr::Input { .. } => compute("load"),
        Instr::Slice { .. } => compute("slice"),
        Instr::Zero { .. } => compute("zero"),
        Instr::AddInto { .. } => compute("add"),
        Instr::Cast { .. } => compute("cast"),
        Instr::Compress { .. } => compute("compress"),
        Instr::SumShares { .. } => compute("sum_shares"),
        Instr::Join { .. } => compute("join"),
        Instr::SquareSum { .. } => compute("square_sum"),
        Instr::ClipScale { .. } => compute("clip_scale"),
        Instr::TrustSums { .. } => compute("trust_sums"),
        Instr::Update { .. } => compute("update"),
        Instr::Record(_) | Instr::Wait(_) => "event".into(),
    }
}

/// What bounds a node, in the words profiles are read by.
pub fn class_of(graph: &Graph, program: &Program, stage: usize, instr: &Instr) -> &'static str {
    let Instr::Run { node, ins, outs, .. } = instr else { return "elementwise" };
    let op = &graph.nodes[*node].op;
    if matches!(op, Op::Attention(_) | Op::AttentionGrad(_) | Op::AttentionSink(_)) {
        return "attention";
    }
    let (Some(ins), Some(outs)) = (local_types(graph, program, stage, ins), local_types(graph, program, stage, outs)) else { return "elementwise" };
    match op_cost(op, &ins.iter().collect::<Vec<_>>(), &outs.iter().collect::<Vec<_>>()).unit {
        Unit::Matrix { .. } => "gemm",
        Unit::Vector => "elementwise",
    }
}

/// Bytes that an instruction moves between ranks: of a collective the larger of what is given and what is got.
pub fn moved_bytes(program: &Program, stage: usize, instr: &Instr) -> Option<u64> {
    let bytes = |buffer: &BufferId| program.stages[stage].buffers[*buffer].bytes;
    match instr {
        Instr::Collective { src, dst, .. } => Some(bytes(src).max(bytes(dst))),
        Instr::Send { src, .. } => Some(bytes(src)),
        Instr::Recv { dst, .. } => Some(bytes(dst)),
        Instr::Run { .. }
        | Instr::Input { .. }
        | Instr::Slice { .. }
        | Instr::Copy { .. }
        | Instr::Zero { .. }
        | Instr::AddInto { .. }
        | Instr::Cast { .. }
        | Instr::Compress { .. }
        | Instr::SumShares { .. }
        | Instr::Join { .. }
        | Instr::SquareSum { .. }
        | Instr::ClipScale { .. }
        | Instr::TrustSums { .. }
        | Instr::Update { .. }
        | Instr::Record(_)
        | Instr::Wait(_) => None,
    }
}

/// The types of a node's operands and results on one rank, as its buffers hold them.
pub fn local_types(graph: &Graph, program: &Program, stage: usize, buffers: &[BufferId]) -> Option<Vec<LocalType>> {
    let stage = &program.stages[stage];
    let one = |buffer: &Buffer| {
        let (value, sharding) = match &buffer.content {
            Content::Value { value, sharding } => (*value, sharding.clone()),
            Content::Member { bucket, param, .. } => {
                let member = stage.buckets[*bucket].members.iter().find(|m| m.param == *param)?;
                (graph.params[*param].value, member.sharding.clone())
            }
            // A scalar stands for the loss, which nothing is priced by.
            Content::Scalar(_) | Content::Trust { .. } | Content::Flat { .. } | Content::Wire { .. } | Content::Frame | Content::Scratch => {
                return Some(LocalType { dtype: buffer.dtype, dims: Vec::new(), layout: Layout::Dense, experts: 0 });
            }
        };
        Some(local_type(&graph.values[value].ty, &sharding, &program.padded, &program.mesh))
    };
    buffers.iter().map(|&b| one(&stage.buffers[b])).collect()
}
