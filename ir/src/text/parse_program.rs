//! Parsing a program.

use crate::dtype::DType;
use crate::entity::{BucketId, BufferId, EventId, ParamId, SegmentId, Table};
use crate::graph::Def;
use crate::mesh::{AxisSet, Mesh};
use crate::optimizer::Optimizer;
use crate::program::{
    Bucket, Buffer, Call, Channel, Content, Instr, Issue, Member, Pattern, Program, Region, Role, Scalar, Segment, SegmentKind, StageProgram, Stream,
    Updates, Write,
};
use crate::sharding::Monoid;
use crate::text::mesh::{axes, mesh, monoid, padded, sharding};
use crate::text::parser::{Parsed, Parser};
use crate::text::scope::Known;

/// Bound on the calls of all stages together: a short text must not make a long schedule.
const MAX_CALLS: usize = 1 << 22;

pub fn program(p: &mut Parser<'_>, known: &Known<'_>) -> Parsed<Program> {
    p.word("program")?;
    let mesh = mesh(p)?;
    let padded = padded(p, known)?;
    p.word("micro_batches")?;
    let micro_batches = p.integer("the number of micro-batches")?;
    let optimizer =
        if p.take_word("optimizer") { Some(named(p, "optimizer", Optimizer::from_name, &Optimizer::ALL.map(Optimizer::name))?) } else { None };
    let updates =
        if p.take_word("updates") { named(p, "time of updates", Updates::from_name, &Updates::ALL.map(Updates::name))? } else { Updates::default() };
    let mut program = Program { mesh, padded, micro_batches, optimizer, updates, stages: Vec::new() };
    let mut reader = Reader { known, mesh: program.mesh.clone(), calls: 0 };
    while p.is_word("stage") {
        let stage = reader.stage(p, program.stages.len())?;
        program.stages.push(stage);
    }
    Ok(program)
}

struct Reader<'g> {
    known: &'g Known<'g>,
    mesh: Mesh,
    /// Calls of all stages so far.
    calls: usize,
}

/// A word out of a fixed set.
fn named<T>(p: &mut Parser<'_>, kind: &str, from_name: impl Fn(&str) -> Option<T>, known: &[&str]) -> Parsed<T> {
    let at = p.at();
    let word = p.any_word(kind)?;
    from_name(word).ok_or_else(|| p.unknown(at, kind, word, known))
}

/// An id that must be the next of its table.
fn numbered(p: &mut Parser<'_>, prefix: &str, len: usize) -> Parsed<()> {
    let at = p.at();
    let what = format!("`{prefix}{len}`: they are numbered in order");
    let id = p.id(prefix, &what)?;
    if id as usize == len { Ok(()) } else { Err(p.wrong(at, format!("`{prefix}{id}`"), what)) }
}

fn buffer_id(p: &mut Parser<'_>) -> Parsed<BufferId> {
    p.id("buf", "a buffer (`buf0`)").map(BufferId)
}

impl Reader<'_> {
    fn stage(&mut self, p: &mut Parser<'_>, number: usize) -> Parsed<StageProgram> {
        p.word("stage")?;
        let at = p.at();
        let said: usize = p.integer("the stage's number")?;
        if said != number {
            return Err(p.wrong(at, format!("stage {said}"), format!("stage {number}: they are numbered in order")));
        }
        p.sign('{')?;
        let mut stage = StageProgram::default();
        p.word("arena")?;
        stage.arena_bytes = p.integer("the arena's bytes")?;
        if p.take_word("host") {
            stage.host_bytes = p.integer("the bytes in the host's memory")?;
        }
        if p.take_word("file") {
            stage.file_bytes = p.integer("the bytes in the rank's file")?;
        }
        p.word("events")?;
        stage.events = p.integer("the number of events")?;
        while p.take_word("region") {
            let name = p.label("the region's name")?.into_owned();
            p.word("at")?;
            let offset = p.integer("the region's offset")?;
            p.word("bytes")?;
            stage.regions.push(Region { name, offset, bytes: p.integer("the region's size")? });
        }
        while p.is_id("bucket") {
            numbered(p, "bucket", stage.buckets.len())?;
            let bucket = self.bucket(p)?;
            stage.buckets.push(bucket);
        }
        while p.is_id("buf") {
            numbered(p, "buf", stage.buffers.len())?;
            let buffer = self.buffer(p)?;
            stage.buffers.push(buffer);
        }
        while p.take_word("segment") {
            let at = p.at();
            let kind = named(p, "segment", SegmentKind::from_name, &SegmentKind::ALL.map(SegmentKind::name))?;
            let next = stage.segments.len();
            if p.ordinal()?.is_some_and(|id| id as usize != next) {
                return Err(p.wrong(at, "another number", format!("`{}#{next}`: they are numbered in order", kind.name())));
            }
            let body = self.body(p)?;
            stage.segments.push(Segment { kind, body });
        }
        if !p.is_word("schedule") {
            return Err(p.expected("`region`, `bucketN`, `bufN`, `segment` (in this order) or `schedule`"));
        }
        stage.schedule = self.schedule(p, &stage.segments)?;
        p.sign('}')?;
        Ok(stage)
    }

    fn param(&self, p: &mut Parser<'_>) -> Parsed<ParamId> {
        let at = p.at();
        let value = self.known.value(p)?;
        match self.known.graph.values[value].def {
            Def::Param(param) => Ok(param),
            Def::Input | Def::Node(..) => Err(p.wrong(at, format!("`%{}`", self.known.graph.values[value].name), "a parameter")),
        }
    }

    fn bucket(&self, p: &mut Parser<'_>) -> Parsed<Bucket> {
        p.sign('=')?;
        let elems = p.integer("the bucket's elements")?;
        p.word("elems")?;
        p.word("partial")?;
        let partial = axes(p, &self.mesh)?;
        let tied = if p.take_word("tied") { p.list('[', ']', |p| p.integer("a stage"))? } else { Vec::new() };
        p.sign('{')?;
        let mut members = Vec::new();
        while !p.take_sign('}') {
            let param = self.param(p)?;
            let sharding = sharding(p, &self.mesh)?;
            p.word("at")?;
            let offset = p.integer("the member's offset, in elements")?;
            p.word("len")?;
            members.push(Member { param, sharding, offset, elems: p.integer("the member's elements")? });
        }
        Ok(Bucket { members, elems, partial, tied })
    }

    fn buffer(&self, p: &mut Parser<'_>) -> Parsed<Buffer> {
        p.sign('=')?;
        let content = self.content(p)?;
        let dtype = named(p, "element type", DType::from_name, &DType::ALL.map(DType::name))?;
        let bytes = p.integer("the buffer's bytes")?;
        p.word("bytes")?;
        p.word("at")?;
        let offset = p.integer("the buffer's offset")?;
        let (mut slots, mut slot_stride) = (1, 0);
        if p.take_word("slots") {
            slots = p.integer("the number of slots")?;
            p.word("stride")?;
            slot_stride = p.integer("bytes from slot to slot")?;
        }
        let piece_axes = if p.take_word("own") { axes(p, &self.mesh)? } else { AxisSet::EMPTY };
        Ok(Buffer { content, dtype, bytes, offset, slots, slot_stride, piece_axes })
    }

    fn content(&self, p: &mut Parser<'_>) -> Parsed<Content> {
        if p.is_name() {
            let value = self.known.value(p)?;
            return Ok(Content::Value { value, sharding: sharding(p, &self.mesh)? });
        }
        if p.take_word("scratch") {
            return Ok(Content::Scratch);
        }
        if p.take_word("frame") {
            return Ok(Content::Frame);
        }
        if p.take_word("trust") {
            return Ok(Content::Trust { bucket: p.id("bucket", "a bucket (`bucket0`)").map(BucketId)? });
        }
        if p.take_word("wire") {
            let bucket = p.id("bucket", "a bucket (`bucket0`)").map(BucketId)?;
            let from = if p.take_word("from") { axes(p, &self.mesh)? } else { AxisSet::EMPTY };
            let kept = if p.take_word("keeping") { Some(p.integer("how many pairs are kept")?) } else { None };
            return Ok(Content::Wire { bucket, from, kept });
        }
        if p.take_word("scalar") {
            return named(p, "scalar", Scalar::from_name, &Scalar::ALL.map(Scalar::name)).map(Content::Scalar);
        }
        let at = p.at();
        let word = p.any_word("a value, a role of a bucket, `scalar`, `trust`, `wire`, `frame` or `scratch`")?;
        let Some(role) = Role::from_name(word) else {
            let known: Vec<&str> = Role::ALL.map(Role::name).into_iter().chain(["scalar", "trust", "wire", "frame", "scratch"]).collect();
            return Err(p.unknown(at, "content", word, &known));
        };
        let bucket = p.id("bucket", "a bucket (`bucket0`)").map(BucketId)?;
        if p.is_name() {
            return Ok(Content::Member { bucket, role, param: self.param(p)? });
        }
        let pieces = if p.take_word("piece") { axes(p, &self.mesh)? } else { AxisSet::EMPTY };
        Ok(Content::Flat { bucket, role, pieces })
    }

    fn body(&self, p: &mut Parser<'_>) -> Parsed<Vec<Issue>> {
        p.sign('{')?;
        let mut body = Vec::new();
        while !p.take_sign('}') {
            let stream = named(p, "stream", Stream::from_name, &Stream::ALL.map(Stream::name))?;
            body.push(Issue { stream, instr: self.instr(p)? });
        }
        Ok(body)
    }

    fn instr(&self, p: &mut Parser<'_>) -> Parsed<Instr> {
        let at = p.at();
        let word = p.any_word("an instruction")?;
        let instr = match word {
            "run" => {
                let node = self.known.node(p)?;
                let ins = buffers(p)?;
                let write = if p.is_sign('+') { Write::Add } else { Write::Set };
                if write == Write::Add {
                    p.sign('+')?;
                    p.sign('>')?;
                } else {
                    p.arrow()?;
                }
                let outs = buffers(p)?;
                let scratch = if p.take_word("scratch") { Some(buffer_id(p)?) } else { None };
                Instr::Run { node, ins, outs, scratch, write }
            }
            "input" => Instr::Input { dst: buffer_id(p)? },
            "slice" => {
                let axes = axes(p, &self.mesh)?;
                p.word("dim")?;
                let dim = p.integer("the dim's position")?;
                let (src, dst) = copy(p)?;
                Instr::Slice { src, dst, axes, dim }
            }
            "send" => {
                let channel = channel(p)?;
                p.word("to")?;
                let to = p.integer("a stage")?;
                Instr::Send { to, channel, src: buffer_id(p)? }
            }
            "recv" => {
                let channel = channel(p)?;
                p.word("from")?;
                let from = p.integer("a stage")?;
                Instr::Recv { from, channel, dst: buffer_id(p)? }
            }
            "zero" => Instr::Zero { dst: buffer_id(p)? },
            "copy" => {
                let (src, dst) = copy(p)?;
                Instr::Copy { src, dst }
            }
            "add_into" => {
                let (src, dst) = copy(p)?;
                Instr::AddInto { src, dst }
            }
            "join" => {
                let monoid = monoid(p)?;
                let left = buffers(p)?;
                p.word("with")?;
                let right = buffers(p)?;
                p.arrow()?;
                Instr::Join { monoid, left, right, dst: buffers(p)? }
            }
            "cast" => {
                let (src, dst) = copy(p)?;
                Instr::Cast { src, dst }
            }
            "compress" => {
                let src = buffer_id(p)?;
                p.word("with")?;
                let residual = buffer_id(p)?;
                p.arrow()?;
                Instr::Compress { src, residual, dst: buffer_id(p)? }
            }
            "sum_shares" => {
                let (src, dst) = copy(p)?;
                Instr::SumShares { src, dst }
            }
            "square_sum" => {
                p.word("once")?;
                let once = axes(p, &self.mesh)?;
                let (src, dst) = copy(p)?;
                Instr::SquareSum { src, dst, once }
            }
            "clip_scale" => {
                let (src, dst) = copy(p)?;
                Instr::ClipScale { src, dst }
            }
            "trust_sums" => {
                let state = buffer_id(p)?;
                p.word("grad")?;
                let grad = buffer_id(p)?;
                p.word("moments")?;
                let moments = buffers(p)?;
                let scale = if p.take_word("scale") { Some(buffer_id(p)?) } else { None };
                p.arrow()?;
                Instr::TrustSums { state, grad, moments, scale, dst: buffer_id(p)? }
            }
            "update" => {
                let state = buffer_id(p)?;
                p.word("grad")?;
                let grad = buffer_id(p)?;
                p.word("moments")?;
                let moments = buffers(p)?;
                let param = if p.take_word("param") { Some(buffer_id(p)?) } else { None };
                let scale = if p.take_word("scale") { Some(buffer_id(p)?) } else { None };
                let trust = if p.take_word("trust") { Some(buffer_id(p)?) } else { None };
                Instr::Update { state, grad, moments, param, scale, trust }
            }
            "record" => Instr::Record(p.id("ev", "an event (`ev0`)").map(EventId)?),
            "wait" => Instr::Wait(p.id("ev", "an event (`ev0`)").map(EventId)?),
            _ => match Pattern::from_name(word) {
                Some(pattern) => self.collective(p, pattern)?,
                None => return Err(p.unknown(at, "instruction", word, &INSTRUCTIONS)),
            },
        };
        Ok(instr)
    }

    fn collective(&self, p: &mut Parser<'_>, pattern: Pattern) -> Parsed<Instr> {
        let axes = axes(p, &self.mesh)?;
        let stages = if p.take_word("stages") { p.list('[', ']', |p| p.integer("a stage"))? } else { Vec::new() };
        let dim = if p.take_word("dim") { p.integer("the dim's position")? } else { 0 };
        let monoid = if p.is_id("buf") { Monoid::Sum } else { monoid(p)? };
        let (src, dst) = copy(p)?;
        Ok(Instr::Collective { pattern, axes, stages, dim, monoid, src, dst })
    }

    fn schedule(&mut self, p: &mut Parser<'_>, segments: &Table<SegmentId, Segment>) -> Parsed<Vec<Call>> {
        p.word("schedule")?;
        p.sign('{')?;
        let mut calls = Vec::new();
        while !p.take_sign('}') {
            let at = p.at();
            let (times, period) = if p.take_word("repeat") {
                let times: u64 = p.integer("how often")?;
                (times, p.list('{', '}', |p| call(p, segments))?)
            } else {
                (1, vec![call(p, segments)?])
            };
            let more = usize::try_from(times).ok().and_then(|n| n.checked_mul(period.len()));
            self.calls = more.and_then(|n| n.checked_add(self.calls)).unwrap_or(usize::MAX);
            if self.calls > MAX_CALLS {
                return Err(p.wrong(at, "more calls than any step has", format!("at most {MAX_CALLS} in all stages")));
            }
            for time in 0..times {
                for &Call { segment, micro_batch } in &period {
                    let Some(micro_batch) = micro_batch.checked_add(time) else {
                        return Err(p.wrong(at, "a micro-batch number that is too large", "a smaller one"));
                    };
                    calls.push(Call { segment, micro_batch });
                }
            }
        }
        Ok(calls)
    }
}

const INSTRUCTIONS: [&str; 22] = [
    "trust_sums",
    "run",
    "input",
    "slice",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "shift",
    "join",
    "copy",
    "cast",
    "sum_shares",
    "send",
    "recv",
    "zero",
    "add_into",
    "square_sum",
    "clip_scale",
    "update",
    "record",
    "wait",
];

fn buffers(p: &mut Parser<'_>) -> Parsed<Vec<BufferId>> {
    p.list('(', ')', buffer_id)
}

/// `buf1 -> buf2`.
fn copy(p: &mut Parser<'_>) -> Parsed<(BufferId, BufferId)> {
    let src = buffer_id(p)?;
    p.arrow()?;
    Ok((src, buffer_id(p)?))
}

fn channel(p: &mut Parser<'_>) -> Parsed<Channel> {
    let from_name = |word: &str| match word {
        "forward" => Some(Channel::Forward),
        "backward" => Some(Channel::Backward),
        _ => None,
    };
    named(p, "channel", from_name, &["forward", "backward"])
}

/// `forward 3`: a segment by kind, with `#id` if its stage has several of that kind, for a micro-batch.
fn call(p: &mut Parser<'_>, segments: &Table<SegmentId, Segment>) -> Parsed<Call> {
    let at = p.at();
    let kind = named(p, "segment", SegmentKind::from_name, &SegmentKind::ALL.map(SegmentKind::name))?;
    let segment = match p.ordinal()? {
        Some(id) if segments.get(SegmentId(id)).is_some_and(|s| s.kind == kind) => SegmentId(id),
        Some(id) => return Err(p.wrong(at, format!("`{}#{id}`, which this stage has not", kind.name()), "a segment of the stage")),
        None => {
            let mut of_kind = segments.iter().filter(|(_, s)| s.kind == kind).map(|(id, _)| id);
            match (of_kind.next(), of_kind.next()) {
                (Some(id), None) => id,
                (Some(_), Some(_)) => return Err(p.wrong(at, format!("`{}`, of which this stage has several", kind.name()), "its number too")),
                (None, _) => return Err(p.wrong(at, format!("`{}`, which this stage has not", kind.name()), "a segment of the stage")),
            }
        }
    };
    Ok(Call { segment, micro_batch: p.integer("a micro-batch")? })
}
