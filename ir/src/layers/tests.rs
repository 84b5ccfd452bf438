//! Layers, classes and canonical order on graphs whose answer is known.

use super::*;
use crate::build::Builder;
use crate::dtype::DType;
use crate::entity::{DimId, Id, ParamId};
use crate::graph::{Def, Init};
use crate::op::{Activation, Attention, Mask, Op, Spec};
use crate::text::arbitrary::Rng;
use crate::verify::verify_graph;

fn spec(left: &str, right: &str, out: &str) -> Op {
    Op::Einsum(Spec { left: left.into(), right: right.into(), out: out.into() })
}

struct Net {
    b: Builder,
    dims: [DimId; 6],
    tokens: ValueId,
    targets: ValueId,
    count: u32,
}

impl Net {
    fn new() -> Net {
        let mut b = Builder::new("net");
        let dims = [("b", 2), ("s", 4), ("h", 8), ("g", 2), ("d", 4), ("v", 11)].map(|(name, size)| b.dim(name, size));
        b.graph.batch = Some(dims[0]);
        let tokens = b.input("tokens", DType::I32, &dims[..2]);
        let targets = b.input("targets", DType::I32, &dims[..2]);
        Net { b, dims, tokens, targets, count: 0 }
    }
    fn op(&mut self, op: Op, inputs: &[ValueId]) -> ValueId {
        self.count += 1;
        self.b.op(&format!("v{}", self.count), op, inputs).expect("well typed")
    }
    fn param(&mut self, dims: &[DimId]) -> ValueId {
        self.count += 1;
        self.b.param(&format!("p{}", self.count), DType::F32, dims, Init::Zeros, Vec::new())
    }
    fn embed(&mut self, layer: u32) -> (ValueId, ValueId) {
        self.b.set_layer(layer);
        let [.., h, _, _, v] = self.dims;
        let table = self.param(&[v, h]);
        (table, self.op(Op::Embed, &[table, self.tokens]))
    }
    /// x + attention(norm x), then x + mlp(norm x).
    fn block(&mut self, layer: u32, window: Option<u64>, x: ValueId) -> ValueId {
        self.b.set_layer(layer);
        let x = self.attention(window, x);
        self.mlp(x)
    }
    fn attention(&mut self, window: Option<u64>, x: ValueId) -> ValueId {
        let [_, _, h, g, d, _] = self.dims;
        let w = self.param(&[h]);
        let n = self.op(Op::RmsNorm { eps: 1e-5 }, &[x, w]);
        let r = self.b.graph.dims.ids().find(|&d| self.b.graph.dims[d].name == "r").unwrap_or_else(|| self.b.dim("r", 1));
        let (wq, wk, wv, wo) = (self.param(&[g, r, d, h]), self.param(&[g, d, h]), self.param(&[g, d, h]), self.param(&[h, g, r, d]));
        let q = self.op(spec("bsh", "grdh", "bsgrd"), &[n, wq]);
        let k = self.op(spec("bsh", "gdh", "bsgd"), &[n, wk]);
        let v = self.op(spec("bsh", "gdh", "bsgd"), &[n, wv]);
        let o = self.op(Op::Attention(Attention { mask: Mask { window, ..Mask::CAUSAL }, scale: 0.5 }), &[q, k, v]);
        let y = self.op(spec("bsgrd", "hgrd", "bsh"), &[o, wo]);
        self.op(Op::Add, &[x, y])
    }
    /// Each with a hidden dim of its own.
    fn mlp(&mut self, x: ValueId) -> ValueId {
        let h = self.dims[2];
        self.count += 1;
        let f = self.b.dim(&format!("f{}", self.count), 16);
        let (w, up, down) = (self.param(&[h]), self.param(&[f, h]), self.param(&[h, f]));
        let n = self.op(Op::RmsNorm { eps: 1e-5 }, &[x, w]);
        let u = self.op(spec("bsh", "fh", "bsf"), &[n, up]);
        let a = self.op(Op::Act(Activation::Gelu), &[u]);
        let y = self.op(spec("bsf", "hf", "bsh"), &[a, down]);
        self.op(Op::Add, &[x, y])
    }
    fn head(mut self, layer: u32, table: ValueId, x: ValueId) -> Graph {
        self.b.set_layer(layer);
        let h = self.dims[2];
        let w = self.param(&[h]);
        let n = self.op(Op::RmsNorm { eps: 1e-5 }, &[x, w]);
        let logits = self.op(spec("bsh", "vh", "bsv"), &[n, table]);
        let stats = self.b.node("lse", Op::CeStats, &[logits, self.targets]).expect("well typed");
        let losses = self.op(Op::Sub, &stats);
        let loss = self.op(Op::Mean, &[losses]);
        self.b.graph.loss = Some(loss);
        self.b.graph
    }
}

/// Embedding, `windows.len()` blocks, head; the head's table is the embedding's if `tied`.
fn transformer(windows: &[Option<u64>], tied: bool) -> Graph {
    let mut net = Net::new();
    let (table, mut x) = net.embed(0);
    for (layer, &window) in (1..).zip(windows) {
        x = net.block(layer, window, x);
    }
    let [.., h, _, _, v] = net.dims;
    let table = if tied { table } else { net.param(&[v, h]) };
    net.head(windows.len() as u32 + 1, table, x)
}

/// The same graph with other names and every table in another order that is still legal.
fn shuffled(graph: &Graph, rng: &mut Rng) -> Graph {
    let mut shuffle = |n: usize| {
        let mut order: Vec<usize> = (0..n).collect();
        (1..n).rev().for_each(|i| order.swap(i, rng.below(i as u64 + 1) as usize));
        order
    };
    let (dims, values, params) = (shuffle(graph.dims.len()), shuffle(graph.values.len()), shuffle(graph.params.len()));
    let (dim, value) = (|d: DimId| DimId(dims[d.index()] as u32), |v: ValueId| ValueId(values[v.index()] as u32));
    // Nodes in any order that defines before it uses.
    let mut nodes: Vec<NodeId> = Vec::new();
    let mut left: Vec<NodeId> = graph.nodes.ids().collect();
    let priority = shuffle(graph.nodes.len());
    while !left.is_empty() {
        let ready = |id: NodeId| graph.nodes[id].inputs.iter().all(|&v| graph.producer(v).is_none_or(|p| nodes.contains(&p)));
        let next = left.iter().copied().filter(|&id| ready(id)).min_by_key(|id| priority[id.index()]).expect("no cycle");
        left.retain(|&id| id != next);
        nodes.push(next);
    }
    let node = |id: NodeId| NodeId(nodes.iter().position(|&n| n == id).expect("all nodes are there") as u32);
    let inverse = |of: &[usize]| {
        let mut back = vec![0; of.len()];
        of.iter().enumerate().for_each(|(from, &to)| back[to] = from);
        back
    };
    let mut new = Graph { name: graph.name.clone(), ..Graph::default() };
    for from in inverse(&dims) {
        let mut row = graph.dims[DimId(from as u32)].clone();
        row.name = format!("renamed{}", from * 7 % 101);
        new.dims.push(row);
    }
    for from in inverse(&values) {
        let mut row = graph.values[ValueId(from as u32)].clone();
        row.name = format!("renamed.{}", priority.len() + from * 31 % 1009);
        row.ty.dims.iter_mut().for_each(|d| *d = dim(*d));
        row.def = match row.def {
            Def::Input => Def::Input,
            Def::Param(p) => Def::Param(ParamId(params[p.index()] as u32)),
            Def::Node(n, at) => Def::Node(node(n), at),
        };
        new.values.push(row);
    }
    for from in inverse(&params) {
        let mut row = graph.params[ParamId(from as u32)].clone();
        row.value = value(row.value);
        new.params.push(row);
    }
    for &id in &nodes {
        let mut row = graph.nodes[id].clone();
        row.inputs.iter_mut().chain(&mut row.outputs).for_each(|v| *v = value(*v));
        row.origin = node(id);
        row.layer = 0;
        new.nodes.push(row);
    }
    new.inputs = graph.inputs.iter().map(|&v| value(v)).collect();
    (new.batch, new.loss) = (graph.batch.map(dim), graph.loss.map(value));
    new
}

/// Everything but what files call the parameters.
fn nameless(graph: &Graph) -> Graph {
    let mut graph = canonical_names(graph);
    graph.params.iter_mut().for_each(|(_, p)| p.pieces.clear());
    graph
}

fn layer_sizes(graph: &Graph) -> Vec<usize> {
    (0..graph.layer_count()).map(|l| graph.nodes.values().filter(|n| n.layer == l).count()).collect()
}

#[test]
fn a_shuffled_and_renamed_graph_is_the_same_graph() {
    let blocks = [None, Some(2), None, Some(2)];
    for (seed, tied) in (0..20).map(|seed| (seed, seed % 2 == 0)) {
        let graph = transformer(&blocks, tied);
        assert_eq!(verify_graph(&graph), []);
        let other = shuffled(&graph, &mut Rng(seed));
        let (expected, found) = (canonicalize(&detect(&graph)), canonicalize(&detect(&other)));
        assert_eq!(verify_graph(&found), [], "seed {seed}");
        assert!(nameless(&found) == nameless(&expected), "seed {seed}");
        assert_eq!(classes(&found), classes(&graph));
    }
}

#[test]
fn detected_layers_are_the_blocks() {
    for windows in [vec![None; 1], vec![None; 2], vec![None; 7], vec![None, Some(2), None, Some(2)], vec![Some(2), Some(2), None]] {
        let graph = transformer(&windows, false);
        let found = detect(&shuffled(&graph, &mut Rng(3)));
        if windows.len() == 1 {
            // Nothing repeats: each section with a product is a layer, and the norm goes with the head.
            assert_eq!(layer_sizes(&found), [1, 7, 5, 5]);
        } else {
            assert_eq!(layer_sizes(&found), layer_sizes(&graph), "{windows:?}");
            assert_eq!(classes(&found), classes(&graph), "{windows:?}");
        }
        assert_eq!(verify_graph(&found), []);
    }
}

#[test]
fn layers_of_a_plain_chain_are_its_repeated_pieces() {
    let mut net = Net::new();
    let (table, mut x) = net.embed(0);
    let h = net.dims[2];
    let f = net.b.dim("f", 16);
    for _ in 0..3 {
        let w = net.param(&[f, h]);
        x = net.op(spec("bsh", "fh", "bsf"), &[x, w]);
        x = net.op(Op::Act(Activation::Relu), &[x]);
        let w = net.param(&[h, f]);
        x = net.op(spec("bsf", "hf", "bsh"), &[x, w]);
    }
    let found = detect(&net.head(0, table, x));
    assert_eq!(layer_sizes(&found), [1, 3, 3, 3, 5]);
    assert_eq!(verify_graph(&found), []);
}

#[test]
fn a_long_repetition_is_a_layer_for_each_section() {
    let mut net = Net::new();
    let (table, mut x) = net.embed(0);
    let h = net.dims[2];
    // Products of five different widths in a row, three times.
    let wide: Vec<DimId> = (0..5).map(|i| net.b.dim(&format!("f{i}"), 16 + i)).collect();
    for f in wide.iter().cycle().take(15) {
        let (up, down) = (net.param(&[*f, h]), net.param(&[h, *f]));
        let u = net.op(spec("bsh", "fh", "bsf"), &[x, up]);
        let a = net.op(Op::Sub, &[u, u]);
        let y = net.op(spec("bsf", "hf", "bsh"), &[a, down]);
        x = net.op(Op::Add, &[x, y]);
    }
    let found = detect(&net.head(0, table, x));
    assert_eq!(layer_sizes(&found), [&[1][..], &[4; 15], &[5]].concat());
    assert_eq!(verify_graph(&found), []);
}

#[test]
fn what_only_adds_or_scales_is_no_layer() {
    let mut net = Net::new();
    let [_, s, h, ..] = net.dims;
    let (table, x) = net.embed(0);
    let (positions, bias, scale) = (net.param(&[s, h]), net.param(&[h]), net.param(&[h]));
    let x = net.op(Op::AddPosition, &[x, positions]);
    let x = net.op(Op::AddBias, &[x, bias]);
    let x = net.mlp(x);
    let y = net.op(Op::RmsNorm { eps: 0.0 }, &[x, scale]);
    let found = detect(&net.head(0, table, y));
    assert_eq!(layer_sizes(&found), [3, 5, 6]);
    assert!(crate::grad::differentiate(&found).is_ok());
}

#[test]
fn branches_that_need_no_earlier_layer_stay_with_their_user() {
    // Two embeddings that are added: only one of them can be a layer of its own.
    let mut net = Net::new();
    let (table, x) = net.embed(0);
    let (_, y) = net.embed(0);
    let y = net.op(Op::Act(Activation::Relu), &[y]);
    let x = net.op(Op::Add, &[x, y]);
    let x = net.block(0, None, x);
    let x = net.block(0, None, x);
    let graph = net.head(0, table, x);
    let found = detect(&graph);
    assert_eq!(verify_graph(&found), []);
    assert_eq!(layer_sizes(&found), [4, 12, 12, 5]);
}

#[test]
fn classes_tell_apart_what_differs() {
    assert_eq!(classes(&transformer(&[None; 4], false)), [0, 1, 1, 1, 1, 2]);
    assert_eq!(classes(&transformer(&[None; 4], true)), [0, 1, 1, 1, 1, 2]);
    assert_eq!(classes(&transformer(&[None, Some(2), None, Some(3)], false)), [0, 1, 2, 1, 3, 4]);
    let change = |change: &dyn Fn(&mut Graph)| {
        let mut graph = transformer(&[None; 3], false);
        change(&mut graph);
        classes(&graph)
    };
    let node = |g: &Graph, layer: u32, at: usize| g.nodes.iter().filter(|(_, n)| n.layer == layer).nth(at).map(|(id, _)| id).expect("a node");
    let own_dim = |g: &Graph| {
        let up = g.nodes[node(g, 2, 8)].inputs[1];
        g.values[up].ty.dims[0]
    };
    assert_eq!(change(&|_| {}), [0, 1, 1, 1, 2]);
    let cases: [(&str, &dyn Fn(&mut Graph)); 5] = [
        ("an attribute", &|g| {
            let id = node(g, 2, 0);
            g.nodes[id].op = Op::RmsNorm { eps: 1e-6 };
        }),
        ("an operand's place: both residuals are the boundary or not", &|g| {
            let id = node(g, 2, 6);
            g.nodes[id].inputs.swap(0, 1);
        }),
        ("a size", &|g| {
            let dim = own_dim(g);
            g.dims[dim].size = 17;
        }),
        ("a dim shared with another layer", &|g| {
            let (dim, v) = (own_dim(g), DimId(5));
            g.values.iter_mut().for_each(|(_, value)| value.ty.dims.iter_mut().filter(|d| **d == dim).for_each(|d| *d = v));
        }),
        ("one parameter used twice", &|g| {
            let (k, v) = (node(g, 2, 2), node(g, 2, 3));
            g.nodes[v].inputs[1] = g.nodes[k].inputs[1];
        }),
    ];
    for (what, f) in cases {
        assert_eq!(change(f), [0, 1, 2, 1, 3], "{what}");
    }
    let tied = change(&|g| {
        let (a, b) = (node(g, 1, 0), node(g, 2, 0));
        g.nodes[b].inputs[1] = g.nodes[a].inputs[1];
    });
    assert_eq!(tied, [0, 1, 1, 2, 3], "a parameter that two layers share");
}

#[test]
fn what_the_loss_does_not_need_is_left_out_and_graphs_without_loss_stay() {
    let mut graph = transformer(&[None; 2], false);
    let loss = graph.loss.take();
    assert!(detect(&graph) == graph && canonicalize(&graph) == graph);
    graph.loss = loss;
    let nodes = graph.nodes.len();
    let mut dead = Builder::new("dead");
    dead.graph = graph;
    let tail = dead.graph.nodes[NodeId(0)].outputs[0];
    dead.op("dead", Op::Neg, &[tail]).expect("well typed");
    assert_eq!(detect(&dead.graph).nodes.len(), nodes);
    assert_eq!(canonicalize(&dead.graph).nodes.len(), nodes);
}
