//! Random programs of every level: well formed as text demands (ids and names resolve), otherwise nonsense.

use crate::dtype::DType;
use crate::entity::{BucketId, BufferId, DimId, EventId, FormId, NodeId, ParamId, SegmentId, Table, ValueId};
use crate::graph::{Def, Dim, Graph, Init, Layout, Narrow, Node, Param, Phase, Piece, Type, Value};
use crate::mesh::{Axis, AxisId, AxisSet, Mesh};
use crate::op::{
    Activation, Attention, Correction, Documents, GroupScore, Groups, Mask, Op, Pairs, Renormalize, Rope, Rotation, Router, Score, Spec,
};
use crate::optimizer::Optimizer;
use crate::order::Order;
use crate::program::{
    Bucket, Buffer, Call, Channel, Content, Instr, Issue, Member, Pattern, Program, Region, Role, Scalar, Segment, SegmentKind, StageProgram, Stream,
    Updates, Write,
};
use crate::reshard::Step;
use crate::ring::Ring;
use crate::rule::Assignment;
use crate::sharded::{Form, Pass, Sharded, Stmt};
use crate::sharding::{Monoid, Padded, Sharding};

/// SplitMix64.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        crate::splitmix::next(&mut self.0)
    }
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }
    pub fn coin(&mut self) -> bool {
        self.next() & 1 == 0
    }
    pub fn pick<'t, T>(&mut self, of: &'t [T]) -> &'t T {
        &of[self.below(of.len() as u64) as usize]
    }
    pub fn vec<T>(&mut self, most: u64, mut item: impl FnMut(&mut Rng) -> T) -> Vec<T> {
        (0..self.below(most + 1)).map(|_| item(self)).collect()
    }
    pub fn some<T>(&mut self, item: impl FnOnce(&mut Rng) -> T) -> Option<T> {
        if self.coin() { Some(item(self)) } else { None }
    }
    /// Small numbers often, any number sometimes.
    pub fn number(&mut self) -> u64 {
        if self.below(8) == 0 { self.next() } else { self.below(300) }
    }
    /// Any bits but a NaN's.
    pub fn real(&mut self) -> f64 {
        let x = match self.below(3) {
            0 => f64::from_bits(self.next()),
            1 => *self.pick(&[0.0, -0.0, 1.0, 1e-5, f64::INFINITY, f64::NEG_INFINITY, f64::MIN_POSITIVE, 0.1]),
            _ => self.below(1000) as f64 / 64.0,
        };
        if x.is_nan() { 0.5 } else { x }
    }
    pub fn name(&mut self) -> String {
        const NAMES: [&str; 18] =
            ["x", "model.layers.0.q", "", "a b", "\"", "#3", "%", "_", "layer", "0", "größe", "//", "x", "y.1", "-", "\\n\n", "}", "f32"];
        let name = self.pick(&NAMES).to_string();
        if self.below(4) == 0 { name } else { format!("{name}{}", self.below(1000)) }
    }
}

pub const OPS: u64 = 45;

/// The op of one kind, with any attributes.
pub fn op(kind: u64, rng: &mut Rng) -> Op {
    let letters = |rng: &mut Rng| if rng.below(6) == 0 { rng.name() } else { rng.vec(5, |r| *r.pick(&['b', 's', 'h'])).into_iter().collect() };
    let spec = |rng: &mut Rng| Spec { left: letters(rng), right: letters(rng), out: letters(rng) };
    let act = |rng: &mut Rng| match rng.below(7) {
        0 => Activation::Silu,
        1 => Activation::Gelu,
        2 => Activation::GeluTanh,
        3 => Activation::Relu,
        4 => Activation::QuickGelu,
        5 => Activation::Clamp { limit: rng.below(20) as u32 },
        _ => Activation::ClampAbove { limit: rng.below(20) as u32 },
    };
    let documents = |rng: &mut Rng| if rng.coin() { Documents::Apart } else { Documents::Joined };
    let mask = |rng: &mut Rng| Mask { causal: rng.coin(), window: rng.some(Rng::number), documents: documents(rng) };
    let attention = |rng: &mut Rng| Attention { mask: mask(rng), scale: rng.real() };
    let router = |rng: &mut Rng| Router {
        k: rng.number(),
        score: *rng.pick(&[Score::Softmax, Score::Sigmoid]),
        renormalize: *rng.pick(&[Renormalize::Yes, Renormalize::No]),
        groups: rng.some(|r| Groups { count: r.number(), kept: r.number(), by: *r.pick(&[GroupScore::Best, GroupScore::TwoBest]) }),
        correction: *rng.pick(&[Correction::No, Correction::Added]),
        scale: rng.real(),
    };
    match kind {
        0 => Op::Einsum(spec(rng)),
        1 => Op::AddBias,
        2 => Op::SumLeading { keep: rng.below(9) as u32 },
        3 => Op::Add,
        4 => Op::Sub,
        5 => Op::Neg,
        6 => Op::Act(act(rng)),
        7 => Op::ActGrad(act(rng)),
        8 => Op::Gated(act(rng)),
        9 => Op::GatedGrad(act(rng)),
        10 => Op::RmsNorm { eps: rng.real() },
        11 => Op::RmsNormGradInput { eps: rng.real() },
        12 => Op::RmsNormGradWeight { eps: rng.real() },
        13 => Op::LayerNorm { eps: rng.real() },
        14 => Op::LayerNormGradInput { eps: rng.real() },
        15 => Op::LayerNormGradWeight { eps: rng.real() },
        16 => {
            let rotation = if rng.coin() { Rotation::Forward } else { Rotation::Inverse };
            let inv_freq = if rng.coin() { vec![1.0, 0.1] } else { rng.vec(20, Rng::real) };
            let pairs = *rng.pick(&[Pairs::Halves, Pairs::Neighbours]);
            Op::Rope(Rope { rotation, pairs, start: rng.below(3), scale: rng.real(), inv_freq })
        }
        17 => Op::Attention(attention(rng)),
        18 => Op::AttentionGrad(attention(rng)),
        19 => Op::Embed,
        20 => Op::EmbedGrad,
        21 => Op::AddPosition,
        22 => Op::AddPositionGrad,
        23 => Op::CeStats,
        24 => Op::CeStatsGrad,
        25 => Op::Mean,
        26 => Op::MeanGrad,
        27 => Op::TopKGate(router(rng)),
        28 => Op::TopKGateGrad(router(rng)),
        29 => Op::Dispatch,
        30 => Op::Undispatch,
        31 => Op::ExpertEinsum(spec(rng)),
        32 => Op::Combine,
        33 => Op::CombineGradRows,
        34 => Op::AttentionSink(attention(rng)),
        35 => Op::SinkGrad,
        36 => Op::Append,
        37 => Op::AppendGradHead,
        38 => Op::AppendGradTail,
        39 => Op::CorrectionGrad,
        40 => Op::AddExpertBias,
        41 => Op::ExpertBiasGrad,
        42 => Op::Dropout { rate: rng.real() },
        43 => Op::Capacity { tokens: rng.number() },
        _ => Op::CombineGradGate,
    }
}

fn ty(dims: usize, rng: &mut Rng) -> Type {
    Type {
        dtype: *rng.pick(&DType::ALL),
        dims: if dims == 0 { Vec::new() } else { rng.vec(4, |r| DimId(r.below(dims as u64) as u32)) },
        layout: if rng.below(4) == 0 { Layout::TopK { k: rng.number(), capacity: rng.some(Rng::number) } } else { Layout::Dense },
    }
}

fn piece(rng: &mut Rng) -> Piece {
    let shape = rng.vec(3, Rng::number);
    Piece {
        tensor: rng.name(),
        view: if rng.coin() { shape.clone() } else { rng.vec(3, Rng::number) },
        shape,
        narrow: rng.some(|r| Narrow { dim: r.below(4) as u32, start: r.number(), len: r.number() }),
        at: rng.some(Rng::number),
    }
}

/// A graph of about `size` nodes, with every op if `size` is at least their number; half of them with values out of order and names repeated.
pub fn graph(size: usize, rng: &mut Rng) -> Graph {
    let mut graph = Graph { name: rng.name(), ..Graph::default() };
    for _ in 0..rng.below(6) {
        let (name, size) = (rng.name(), rng.number());
        graph.dims.push(Dim { name, size });
    }
    let dims = graph.dims.len();
    if dims > 0 {
        let mut role = || rng.some(|r| DimId(r.below(dims as u64) as u32));
        (graph.batch, graph.sequence) = (role(), role());
        if graph.sequence.is_some() && rng.coin() {
            graph.order = Order::Zigzag { blocks: rng.number() };
        }
    }
    // What defines each value, in any order or in theirs.
    let mut defs = Vec::new();
    for (node, left) in (0..size).rev().enumerate() {
        while rng.below(3) == 0 {
            defs.push(if rng.coin() { Def::Input } else { Def::Param(ParamId(0)) });
        }
        let results = 1 + rng.below(3) as u32;
        defs.extend((0..results).map(|i| Def::Node(NodeId(node as u32), i)));
        let kind = if left < OPS as usize { left as u64 } else { rng.below(OPS) };
        let op = op(kind, rng);
        graph.nodes.push(Node {
            op,
            inputs: vec![],
            outputs: vec![ValueId(0); results as usize],
            layer: 0,
            phase: Phase::Forward,
            origin: NodeId(0),
        });
    }
    let mut order: Vec<usize> = (0..defs.len()).collect();
    if rng.coin() {
        for i in (1..order.len()).rev() {
            order.swap(i, rng.below(i as u64 + 1) as usize);
        }
    }
    let plain = rng.coin();
    for at in order {
        let id = ValueId(graph.values.len() as u32);
        let mut def = defs[at];
        match &mut def {
            Def::Input => graph.inputs.push(id),
            Def::Param(param) => {
                let init = match rng.below(3) {
                    0 => Init::Zeros,
                    1 => Init::Ones,
                    _ => Init::Normal { std: rng.real() },
                };
                *param = graph.params.push(Param { value: id, init, pieces: rng.vec(2, piece) });
            }
            Def::Node(node, i) => graph.nodes[*node].outputs[*i as usize] = id,
        }
        let name = if plain { format!("v{}", id.0) } else { rng.name() };
        graph.values.push(Value { name, ty: ty(dims, rng), def });
    }
    let (nodes, values) = (graph.nodes.len() as u64, graph.values.len() as u64);
    let any = |rng: &mut Rng| ValueId(rng.below(values) as u32);
    for id in graph.nodes.ids() {
        let node = &mut graph.nodes[id];
        node.layer = rng.below(4) as u32;
        node.phase = *rng.pick(&[Phase::Forward, Phase::InputGrad, Phase::WeightGrad]);
        node.origin = if rng.coin() { id } else { NodeId(rng.below(nodes) as u32) };
        node.inputs = rng.vec(4, any);
    }
    if values > 0 {
        graph.loss = rng.some(any);
        if rng.coin() {
            graph.grads = graph.params.ids().map(|_| rng.vec(2, any)).collect();
            let len = if rng.coin() { values } else { rng.below(values) + 1 };
            graph.cotangents = (0..len).map(|_| rng.some(any)).collect::<Table<ValueId, _>>();
        }
    }
    graph
}

fn mesh(rng: &mut Rng) -> Mesh {
    let mut axes = rng.vec(4, |r| Axis { name: r.name(), size: r.number() });
    axes.iter_mut().enumerate().for_each(|(i, axis)| axis.name.push_str(["", "a", "b", "c"][i]));
    axes.dedup_by(|a, b| a.name == b.name);
    let mut seen = Vec::new();
    axes.retain(|a| {
        !seen.contains(&a.name) && {
            seen.push(a.name.clone());
            true
        }
    });
    let mut mesh = Mesh { axes, nesting: Vec::new() };
    let mut nesting: Vec<AxisId> = mesh.ids().collect();
    (0..nesting.len()).for_each(|at| nesting.swap(at, rng.below(at as u64 + 1) as usize));
    mesh.nest(nesting);
    mesh
}

fn axes(mesh: &Mesh, rng: &mut Rng) -> AxisSet {
    AxisSet(rng.next() as u32).and(mesh.all())
}

fn monoid(rng: &mut Rng) -> Monoid {
    *rng.pick(&[Monoid::Sum, Monoid::Max, Monoid::LogSumExp])
}

fn sharding(mesh: &Mesh, rng: &mut Rng) -> Sharding {
    let dims = rng.vec(3, |r| axes(mesh, r));
    let sharding = Sharding::of_dims(dims).with_partial(monoid(rng), if rng.coin() { AxisSet::EMPTY } else { axes(mesh, rng) });
    let ring = |rng: &mut Rng| Ring { axes: axes(mesh, rng), ranks: rng.number(), turn: rng.number(), over: rng.next() };
    Sharding { ring: rng.some(ring), ..sharding }
}

fn padded(graph: &Graph, rng: &mut Rng) -> Padded {
    Padded(graph.dims.map(|_, d| if rng.coin() { d.size } else { rng.number() }))
}

/// A sharded graph over a graph that has nodes.
pub fn sharded(graph: &Graph, size: usize, rng: &mut Rng) -> Sharded {
    let mesh = mesh(rng);
    let values = graph.values.len() as u64;
    let mut forms: Table<FormId, Form> = Table::new();
    let mut body = Vec::new();
    let form = |rng: &mut Rng| Form { value: ValueId(rng.below(values) as u32), sharding: sharding(&mesh, rng) };
    forms.push(form(rng));
    for _ in 0..size {
        let any = |n: usize, rng: &mut Rng| FormId(rng.below(n as u64) as u32);
        let known = forms.len();
        if rng.coin() {
            let outs: Vec<FormId> = (0..1 + rng.below(2)).map(|_| forms.push(form(rng))).collect();
            let node = NodeId(rng.below(graph.nodes.len() as u64) as u32);
            let assignment = Assignment(rng.vec(3, |r| (*r.pick(&['b', 'é', '"', '_']), axes(&mesh, r))));
            body.push(Stmt::Run { node, assignment, ins: rng.vec(3, |r| any(known, r)), outs });
        } else {
            let (axes, dim, monoid) = (axes(&mesh, rng), rng.below(4) as u32, monoid(rng));
            let step = *rng.pick(&[
                Step::AllReduce { axes, monoid },
                Step::ReduceScatter { axes, dim, monoid },
                Step::AllGather { axes, dim },
                Step::Slice { axes, dim },
            ]);
            let from = any(known, rng);
            let pass = *rng.pick(&[Pass::Forward, Pass::Backward]);
            body.push(Stmt::Reshard { from, to: forms.push(form(rng)), step, layer: rng.below(9) as u32, pass });
        }
    }
    let padded = padded(graph, rng);
    Sharded { mesh, padded, forms, body }
}

const INSTRS: u64 = 19;

fn instr(kind: u64, graph: &Graph, mesh: &Mesh, rng: &mut Rng) -> Instr {
    let buf = |rng: &mut Rng| BufferId(rng.below(40) as u32);
    let channel = |rng: &mut Rng| *rng.pick(&[Channel::Forward, Channel::Backward]);
    let stages = |rng: &mut Rng| rng.vec(2, |r| r.below(9) as u32);
    match kind {
        0 => Instr::Run {
            node: NodeId(rng.below(graph.nodes.len() as u64) as u32),
            ins: rng.vec(3, buf),
            outs: rng.vec(2, buf),
            scratch: rng.some(buf),
            write: *rng.pick(&[Write::Set, Write::Add]),
        },
        1 => Instr::Input { dst: buf(rng) },
        2 => Instr::Slice { src: buf(rng), dst: buf(rng), axes: axes(mesh, rng), dim: rng.below(3) as u32 },
        3 => Instr::Collective {
            pattern: *rng.pick(&Pattern::ALL),
            axes: axes(mesh, rng),
            stages: stages(rng),
            dim: rng.below(3) as u32,
            monoid: monoid(rng),
            src: buf(rng),
            dst: buf(rng),
        },
        4 => Instr::Send { to: rng.below(9) as u32, channel: channel(rng), src: buf(rng) },
        5 => Instr::Recv { from: rng.below(9) as u32, channel: channel(rng), dst: buf(rng) },
        6 => Instr::Zero { dst: buf(rng) },
        7 => Instr::AddInto { src: buf(rng), dst: buf(rng) },
        8 => Instr::SquareSum { src: buf(rng), dst: buf(rng), once: axes(mesh, rng) },
        9 => Instr::ClipScale { src: buf(rng), dst: buf(rng) },
        10 => Instr::Update {
            state: buf(rng),
            grad: buf(rng),
            moments: rng.vec(2, buf),
            param: rng.some(buf),
            scale: rng.some(buf),
            trust: rng.some(buf),
        },
        13 => Instr::TrustSums { state: buf(rng), grad: buf(rng), moments: rng.vec(2, buf), scale: rng.some(buf), dst: buf(rng) },
        14 => Instr::Cast { src: buf(rng), dst: buf(rng) },
        15 => Instr::SumShares { src: buf(rng), dst: buf(rng) },
        17 => Instr::Compress { src: buf(rng), residual: buf(rng), dst: buf(rng) },
        16 => Instr::Join { monoid: monoid(rng), left: rng.vec(2, buf), right: rng.vec(2, buf), dst: rng.vec(2, buf) },
        11 => Instr::Copy { src: buf(rng), dst: buf(rng) },
        12 => Instr::Record(EventId(rng.below(9) as u32)),
        _ => Instr::Wait(EventId(rng.below(9) as u32)),
    }
}

fn buffer(graph: &Graph, mesh: &Mesh, rng: &mut Rng) -> Buffer {
    let bucket = BucketId(rng.below(9) as u32);
    let role = *rng.pick(&Role::ALL);
    let content = match rng.below(7) {
        0 if !graph.params.is_empty() => Content::Member { bucket, role, param: ParamId(rng.below(graph.params.len() as u64) as u32) },
        0 | 1 => Content::Flat { bucket, role, pieces: axes(mesh, rng) },
        2 => Content::Scalar(*rng.pick(&Scalar::ALL)),
        3 => Content::Scratch,
        4 => Content::Trust { bucket },
        5 => Content::Wire { bucket, from: axes(mesh, rng), kept: rng.some(|r| r.number()) },
        6 => Content::Frame,
        _ => Content::Value { value: ValueId(rng.below(graph.values.len() as u64) as u32), sharding: sharding(mesh, rng) },
    };
    let (slots, slot_stride) = if rng.coin() { (1, 0) } else { (rng.number(), rng.number()) };
    Buffer { content, dtype: *rng.pick(&DType::ALL), bytes: rng.number(), offset: rng.number(), slots, slot_stride, piece_axes: axes(mesh, rng) }
}

fn stage(graph: &Graph, mesh: &Mesh, size: usize, rng: &mut Rng) -> StageProgram {
    let member = |r: &mut Rng| Member {
        param: ParamId(r.below(graph.params.len() as u64) as u32),
        sharding: sharding(mesh, r),
        offset: r.number(),
        elems: r.number(),
    };
    let members = |r: &mut Rng| if graph.params.is_empty() { Vec::new() } else { r.vec(3, member) };
    let bucket = |r: &mut Rng| Bucket { members: members(r), elems: r.number(), partial: axes(mesh, r), tied: r.vec(2, |r| r.below(9) as u32) };
    let issue = |i: usize, r: &mut Rng| {
        let kind = if i < INSTRS as usize { i as u64 } else { r.below(INSTRS) };
        Issue { stream: *r.pick(&Stream::ALL), instr: instr(kind, graph, mesh, r) }
    };
    let segment = |r: &mut Rng| Segment { kind: *r.pick(&SegmentKind::ALL), body: (0..size).map(|i| issue(i, r)).collect() };
    let segments: Table<SegmentId, Segment> = rng.vec(6, segment).into_iter().collect();
    let mut schedule: Vec<Call> = Vec::new();
    while !segments.is_empty() && schedule.len() < size {
        let call = |r: &mut Rng| Call { segment: SegmentId(r.below(segments.len() as u64) as u32), micro_batch: r.number() };
        let period = rng.vec(5, call);
        for time in 0..rng.below(6) {
            schedule.extend(period.iter().map(|c| Call { micro_batch: c.micro_batch.saturating_add(time), ..*c }));
        }
        if rng.below(3) == 0 {
            break;
        }
    }
    StageProgram {
        arena_bytes: rng.number(),
        host_bytes: rng.number(),
        file_bytes: rng.number(),
        regions: rng.vec(3, |r| Region { name: r.name(), offset: r.number(), bytes: r.number() }),
        buckets: rng.vec(3, bucket).into_iter().collect(),
        buffers: rng.vec(30, |r| buffer(graph, mesh, r)).into_iter().collect(),
        segments,
        schedule,
        events: rng.below(30) as u32,
    }
}

/// A program over a graph that has nodes, with every instruction in each segment if `size` is at least their number.
pub fn program(graph: &Graph, size: usize, rng: &mut Rng) -> Program {
    let mesh = mesh(rng);
    let stages = rng.vec(3, |r| stage(graph, &mesh, size, r));
    let optimizer = rng.some(|r| *r.pick(&Optimizer::ALL));
    let updates = *rng.pick(&Updates::ALL);
    Program { padded: padded(graph, rng), micro_batches: rng.number(), optimizer, updates, stages, mesh }
}
