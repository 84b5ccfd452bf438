//! Random programs of every level: well formed as text demands (ids and names resolve), otherwise nonsense.

use crate::dtype::DType;
use crate::entity::{DimId, NodeId, ParamId, Table, ValueId};
use crate::graph::{Def, Dim, Graph, Init, Layout, Narrow, Node, Param, Phase, Piece, Type, Value};
use crate::op::{Activation, Attention, Mask, Op, Renormalize, Rope, Rotation, Spec};

/// SplitMix64.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
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

const OPS: u64 = 35;

/// The op of one kind, with any attributes.
pub fn op(kind: u64, rng: &mut Rng) -> Op {
    let letters = |rng: &mut Rng| if rng.below(6) == 0 { rng.name() } else { rng.vec(5, |r| *r.pick(&['b', 's', 'h'])).into_iter().collect() };
    let spec = |rng: &mut Rng| Spec { left: letters(rng), right: letters(rng), out: letters(rng) };
    let act = |rng: &mut Rng| *rng.pick(&[Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Relu]);
    let attention = |rng: &mut Rng| Attention { mask: Mask { causal: rng.coin(), window: rng.some(Rng::number) }, scale: rng.real() };
    let renormalize = |rng: &mut Rng| if rng.coin() { Renormalize::Yes } else { Renormalize::No };
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
            Op::Rope(Rope { rotation, inv_freq })
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
        27 => Op::TopKGate { k: rng.number(), renormalize: renormalize(rng) },
        28 => Op::TopKGateGrad { k: rng.number(), renormalize: renormalize(rng) },
        29 => Op::Dispatch,
        30 => Op::Undispatch,
        31 => Op::ExpertEinsum(spec(rng)),
        32 => Op::Combine,
        33 => Op::CombineGradRows,
        _ => Op::CombineGradGate,
    }
}

fn ty(dims: usize, rng: &mut Rng) -> Type {
    Type {
        dtype: *rng.pick(&DType::ALL),
        dims: if dims == 0 { Vec::new() } else { rng.vec(4, |r| DimId(r.below(dims as u64) as u32)) },
        layout: if rng.below(4) == 0 { Layout::TopK { k: rng.number() } } else { Layout::Dense },
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
    graph.batch = if dims == 0 { None } else { rng.some(|r| DimId(r.below(dims as u64) as u32)) };
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
