//! Tiny graphs that between them, once differentiated, contain every op.
//!
//! Sizes are odd or otherwise awkward where a dim may be padded, and divisible by 2 and 3 where it may not.

use dplan_ir::build::Builder;
use dplan_ir::documents;
use dplan_ir::dropout::{self, Rates};
use dplan_ir::dtype::DType;
use dplan_ir::entity::{DimId, ParamId, Table, ValueId};
use dplan_ir::graph::{Graph, Init, Phase, Type};
use dplan_ir::init;
use dplan_ir::interp::Tensor;
use dplan_ir::op::{Activation, Attention, Correction, GroupScore, Groups, Mask, Op, Pairs, Renormalize, Rope, Rotation, Router, Score, Spec};

/// A graph and data to run it on.
#[allow(dead_code)] // Not every test reads every field.
pub struct Case {
    pub graph: Graph,
    pub params: Table<ParamId, Tensor>,
    pub inputs: Vec<Tensor>,
    pub inv_tokens: f64,
}

pub fn all() -> Vec<Case> {
    let mut all = vec![gpt(), grouped_query_window_tied(), experts(Renormalize::Yes), experts(Renormalize::No), sums(), latent_attention()];
    all.extend([Renormalize::Yes, Renormalize::No].map(grouped_experts));
    all.push(sinks());
    all.push(dropped());
    all.push(experts_of_a_capacity());
    all.extend([grouped_query_window_tied(), latent_attention(), sinks()].map(packed));
    all
}

const RATES: Rates = Rates { embedding: 0.2, residual: 0.4 };

/// Dropout of the embedding and of all that is added to the residual stream.
fn dropped() -> Case {
    let case = gpt();
    let mut graph = dropout::insert(&case.graph, RATES);
    graph.name = "dropped".into();
    Case { graph, ..case }
}

/// Where the documents of packed sequences begin, of two of them.
#[allow(dead_code)] // Not every test makes data of its own.
pub const FIRST: [[u8; 6]; 2] = [[0, 0, 0, 3, 4, 4], [0, 1, 2, 2, 2, 2]];

/// Three documents in each sequence of six tokens, the second of one token, and where they lie not the same in all sequences.
fn packed(case: Case) -> Case {
    let mut graph = documents::keep_apart(&case.graph).unwrap_or_else(|why| panic!("{why}"));
    graph.name = format!("packed_{}", case.graph.name);
    let batch = case.inputs[0].dims[0];
    let first = Tensor::from_fn(&[batch, 6], |i| FIRST[i[0] as usize % 2][i[1] as usize].into());
    // Parameters may be numbered in another order.
    let params = init::params(&graph, 3);
    Case { params, inputs: case.inputs.into_iter().chain([first]).collect(), graph, ..case }
}

/// Layer norms with biases, learned positions, every activation.
fn gpt() -> Case {
    let mut m = Model::new("gpt", 2);
    let x = m.embed();
    let (p, f) = (m.b.dim("positions", 8), m.b.dim("ffn", 5));
    let table = m.param("wpe", &[p, m.h]);
    let mut x = m.op("embed.pos", Op::AddPosition, &[x, table]);
    for (layer, act) in [(1, Activation::Gelu), (2, Activation::GeluTanh), (3, Activation::Silu), (4, Activation::Relu)] {
        m.b.set_layer(layer);
        let at = |s: &str| format!("l{layer}.{s}");
        let (w, bias) = (m.param(&at("ln.w"), &[m.h]), m.param(&at("ln.b"), &[m.h]));
        let n = m.op(&at("ln"), Op::LayerNorm { eps: 1e-5 }, &[x, w, bias]);
        let up = m.linear(&at("up"), "bsh,hf->bsf", n, &[m.h, f]);
        let bias = m.param(&at("up.b"), &[f]);
        let up = m.op(&at("up_b"), Op::AddBias, &[up, bias]);
        let a = m.op(&at("act"), Op::Act(act), &[up]);
        let down = m.linear(&at("down"), "bsf,fh->bsh", a, &[f, m.h]);
        x = m.op(&at("out"), Op::Add, &[x, down]);
    }
    m.b.set_layer(5);
    m.head(x, None)
}

/// Two key heads of three queries each, rotary positions, a sliding window, norms on queries, gated feed-forward, and the embedding used as head.
fn grouped_query_window_tied() -> Case {
    let mut m = Model::new("gqa", 3);
    let (g, r, d, f) = (m.b.dim("kv", 2), m.b.dim("q_per_kv", 3), m.b.dim("head", 4), m.b.dim("ffn", 5));
    let x = m.embed();
    let table = m.graph_value("embed.weight");
    m.b.set_layer(1);
    let w = m.param("n1.w", &[m.h]);
    let n = m.op("n1", Op::RmsNorm { eps: 1e-6 }, &[x, w]);
    let q = m.linear("q", "bsh,grdh->bsgrd", n, &[g, r, d, m.h]);
    let bias = m.param("q.b", &[g, r, d]);
    let q = m.op("q_b", Op::AddBias, &[q, bias]);
    let w = m.param("q_norm.w", &[d]);
    let q = m.op("q_norm", Op::RmsNorm { eps: 1e-6 }, &[q, w]);
    let k = m.linear("k", "bth,gdh->btgd", n, &[g, d, m.h]);
    let v = m.linear("v", "bth,geh->btge", n, &[g, d, m.h]);
    let rope = Op::Rope(Rope::whole(Rotation::Forward, vec![1.0, 0.3]));
    let (q, k) = (m.op("q_rope", rope.clone(), &[q]), m.op("k_rope", rope, &[k]));
    let mask = Mask { window: Some(3), ..Mask::CAUSAL };
    let o = m.op("attn", Op::Attention(Attention { mask, scale: 0.5 }), &[q, k, v]);
    let o = m.linear("o", "bsgre,hgre->bsh", o, &[m.h, g, r, d]);
    let x = m.op("res1", Op::Add, &[x, o]);
    let w = m.param("n2.w", &[m.h]);
    let n = m.op("n2", Op::RmsNorm { eps: 1e-6 }, &[x, w]);
    let gate = m.linear("gate", "bsh,fh->bsf", n, &[f, m.h]);
    let up = m.linear("up", "bsh,fh->bsf", n, &[f, m.h]);
    let a = m.op("gated", Op::Gated(Activation::Silu), &[gate, up]);
    let down = m.linear("down", "bsf,hf->bsh", a, &[m.h, f]);
    let x = m.op("res2", Op::Add, &[x, down]);
    m.b.set_layer(2);
    m.head(x, Some(table))
}

/// A mixture of five experts, two for each token; a further path that sums rows without weights.
fn experts(renormalize: Renormalize) -> Case {
    let mut m = Model::new("experts", 2);
    let (e, f) = (m.b.dim("experts", 6), m.b.dim("ffn", 5));
    let x = m.embed();
    m.b.set_layer(1);
    let logits = m.linear("router", "bsh,eh->bse", x, &[e, m.h]);
    let gate = m.op("gate", Op::TopKGate(Router::softmax(2, renormalize)), &[logits]);
    let rows = m.op("rows", Op::Dispatch, &[x, gate]);
    let w1 = m.param("w1", &[e, f, m.h]);
    let w3 = m.param("w3", &[e, f, m.h]);
    let w2 = m.param("w2", &[e, m.h, f]);
    let a = m.op("a", expert("bseh,efh->bsef"), &[rows, w1, gate]);
    let b = m.op("b", expert("bseh,efh->bsef"), &[rows, w3, gate]);
    let c = m.op("c", Op::Gated(Activation::Silu), &[a, b]);
    let c2 = m.op("c2", Op::Act(Activation::GeluTanh), &[b]);
    let c3 = m.op("c3", Op::Add, &[c, c2]);
    let y = m.op("y", expert("bsef,ehf->bseh"), &[c3, w2, gate]);
    let out = m.op("out", Op::Combine, &[y, gate]);
    let flat = m.op("flat", Op::Undispatch, &[y, gate]);
    let sum = m.op("sum", Op::Add, &[out, flat]);
    let x = m.op("res", Op::Add, &[x, sum]);
    m.b.set_layer(2);
    m.head(x, None)
}

/// Experts that take two tokens of six at most.
fn experts_of_a_capacity() -> Case {
    let mut m = Model::new("capacity", 2);
    let (e, f) = (m.b.dim("experts", 3), m.b.dim("ffn", 5));
    let x = m.embed();
    m.b.set_layer(1);
    let logits = m.linear("router", "bsh,eh->bse", x, &[e, m.h]);
    let gate = m.op("gate", Op::TopKGate(Router::softmax(2, Renormalize::Yes)), &[logits]);
    let gate = m.op("kept", Op::Capacity { tokens: 2 }, &[gate]);
    let rows = m.op("rows", Op::Dispatch, &[x, gate]);
    let w1 = m.param("w1", &[e, f, m.h]);
    let w2 = m.param("w2", &[e, m.h, f]);
    let a = m.op("a", expert("bseh,efh->bsef"), &[rows, w1, gate]);
    let a = m.op("c", Op::Act(Activation::Silu), &[a]);
    let y = m.op("y", expert("bsef,ehf->bseh"), &[a, w2, gate]);
    let out = m.op("out", Op::Combine, &[y, gate]);
    let x = m.op("res", Op::Add, &[x, out]);
    m.b.set_layer(2);
    m.head(x, None)
}

/// Heads that share a part of their keys, rotated in neighbouring pairs; a norm over heads.
fn latent_attention() -> Case {
    let mut m = Model::new("latent", 2);
    let (g, r, d, n, o) = (m.b.dim("heads", 2), m.b.dim("one", 1), m.b.dim("head", 6), m.b.dim("own", 2), m.b.dim("shared", 4));
    let x = m.embed();
    m.b.set_layer(1);
    let rope = |start| Op::Rope(Rope { rotation: Rotation::Forward, pairs: Pairs::Neighbours, start, scale: 1.2, inv_freq: vec![1.0, 0.3] });
    let q = m.linear("q", "bsh,grdh->bsgrd", x, &[g, r, d, m.h]);
    let w = m.param("q_norm.w", &[g, r, d]);
    let q = m.op("q_norm", Op::RmsNorm { eps: 1e-6 }, &[q, w]);
    let q = m.op("q_rope", rope(2), &[q]);
    let own = m.linear("k_own", "bsh,gnh->bsgn", x, &[g, n, m.h]);
    let shared = m.linear("k_shared", "bsh,oh->bso", x, &[o, m.h]);
    let shared = m.op("k_rope", rope(0), &[shared]);
    let (batch, s) = (m.batch, m.s);
    let ty = Type::dense(DType::F64, vec![batch, s, g, d]);
    let k = m.b.typed_node("k", Op::Append, &[own, shared], vec![ty], Phase::Forward, None)[0];
    let v = m.linear("v", "bsh,geh->bsge", x, &[g, n, m.h]);
    let mask = Mask::CAUSAL;
    let y = m.op("attn", Op::Attention(Attention { mask, scale: 0.5 }), &[q, k, v]);
    let y = m.linear("o", "bsgre,hgre->bsh", y, &[m.h, g, r, n]);
    let x = m.op("res", Op::Add, &[x, y]);
    m.b.set_layer(2);
    m.head(x, None)
}

/// Sigmoid scores with a correction, out of two of three groups of experts; experts with biases; limited activations.
fn grouped_experts(renormalize: Renormalize) -> Case {
    let mut m = Model::new("grouped", 2);
    let (e, f) = (m.b.dim("experts", 6), m.b.dim("ffn", 5));
    let x = m.embed();
    m.b.set_layer(1);
    let logits = m.linear("router", "bsh,eh->bse", x, &[e, m.h]);
    let bias = m.param("router.correction", &[e]);
    let by = if renormalize == Renormalize::Yes { GroupScore::TwoBest } else { GroupScore::Best };
    let groups = Some(Groups { count: 3, kept: 2, by });
    let router = Router { k: 3, score: Score::Sigmoid, renormalize, groups, correction: Correction::Added, scale: 2.5 };
    let gate = m.op("gate", Op::TopKGate(router), &[logits, bias]);
    let rows = m.op("rows", Op::Dispatch, &[x, gate]);
    let (w1, b1) = (m.param("w1", &[e, f, m.h]), m.param("b1", &[e, f]));
    let (w2, b2) = (m.param("w2", &[e, m.h, f]), m.param("b2", &[e, m.h]));
    let a = m.op("a", expert("bseh,efh->bsef"), &[rows, w1, gate]);
    let a = m.op("a_b", Op::AddExpertBias, &[a, b1, gate]);
    let above = m.op("above", Op::Act(Activation::ClampAbove { limit: 1 }), &[a]);
    let both = m.op("both", Op::Act(Activation::Clamp { limit: 1 }), &[a]);
    let c = m.op("c", Op::Gated(Activation::QuickGelu), &[above, both]);
    let y = m.op("y", expert("bsef,ehf->bseh"), &[c, w2, gate]);
    let y = m.op("y_b", Op::AddExpertBias, &[y, b2, gate]);
    let out = m.op("out", Op::Combine, &[y, gate]);
    let x = m.op("res", Op::Add, &[x, out]);
    m.b.set_layer(2);
    m.head(x, None)
}

/// Attention with a sink for each head.
fn sinks() -> Case {
    let mut m = Model::new("sinks", 2);
    let (g, r, d) = (m.b.dim("kv", 2), m.b.dim("q_per_kv", 3), m.b.dim("head", 4));
    let x = m.embed();
    m.b.set_layer(1);
    let q = m.linear("q", "bsh,grdh->bsgrd", x, &[g, r, d, m.h]);
    let k = m.linear("k", "bsh,gdh->bsgd", x, &[g, d, m.h]);
    let v = m.linear("v", "bsh,geh->bsge", x, &[g, d, m.h]);
    let sink = m.param("sink", &[g, r]);
    let mask = Mask { window: Some(3), ..Mask::CAUSAL };
    let o = m.op("attn", Op::AttentionSink(Attention { mask, scale: 0.5 }), &[q, k, v, sink]);
    let o = m.linear("o", "bsgre,hgre->bsh", o, &[m.h, g, r, d]);
    let x = m.op("res", Op::Add, &[x, o]);
    m.b.set_layer(2);
    m.head(x, None)
}

/// Values used several times in one op and in several, differences, full attention, a product of two activations.
fn sums() -> Case {
    let mut m = Model::new("sums", 2);
    let (g, r) = (m.b.dim("g", 1), m.b.dim("r", 1));
    let x = m.embed();
    let w = m.param("pos_like", &[m.s, m.h]);
    let x = m.op("bias2", Op::AddBias, &[x, w]);
    m.b.set_layer(1);
    let d = m.b.dim("d", 4);
    let q = m.linear("q", "bsh,grdh->bsgrd", x, &[g, r, d, m.h]);
    let k = m.linear("k", "bth,gdh->btgd", x, &[g, d, m.h]);
    let mask = Mask::FULL;
    // Keys are values too.
    let o = m.op("attn", Op::Attention(Attention { mask, scale: 0.7 }), &[q, k, k]);
    let o = m.linear("o", "bsgre,hgre->bsh", o, &[m.h, g, r, d]);
    let twice = m.op("twice", Op::Add, &[o, o]);
    let minus = m.op("minus", Op::Neg, &[twice]);
    let diff = m.op("diff", Op::Sub, &[x, minus]);
    let scores = m.op("scores", einsum("bsh,bth->bst"), &[diff, x]);
    let mixed = m.op("mixed", einsum("bst,bth->bsh"), &[scores, diff]);
    // The sum of two parameters.
    let (w1, w2) = (m.param("w1", &[m.h]), m.param("w2", &[m.h]));
    let w = m.op("w", Op::Add, &[w1, w2]);
    let y = m.op("y", Op::RmsNorm { eps: 1e-6 }, &[mixed, w]);
    let y = m.op("out", Op::Sub, &[y, x]);
    m.b.set_layer(2);
    m.head(y, None)
}

/// A builder with the dims and the ends that all models share.
struct Model {
    b: Builder,
    batch: DimId,
    s: DimId,
    h: DimId,
    v: DimId,
    tokens: ValueId,
    targets: ValueId,
}

impl Model {
    fn new(name: &str, batch: u64) -> Model {
        let mut b = Builder::new(name);
        let (batch, s, h, v) = (b.dim("batch", batch), b.dim("seq", 6), b.dim("hidden", 4), b.dim("vocab", 7));
        let (tokens, targets) = (b.input("tokens", DType::I32, &[batch, s]), b.input("targets", DType::I32, &[batch, s]));
        b.graph.batch = Some(batch);
        Model { b, batch, s, h, v, tokens, targets }
    }
    fn param(&mut self, name: &str, dims: &[DimId]) -> ValueId {
        self.b.param(name, DType::F64, dims, Init::Normal { std: 0.7 }, Vec::new())
    }
    fn op(&mut self, name: &str, op: Op, ins: &[ValueId]) -> ValueId {
        self.b.node(name, op, ins).unwrap_or_else(|why| panic!("{why}"))[0]
    }
    fn linear(&mut self, name: &str, spec: &str, x: ValueId, dims: &[DimId]) -> ValueId {
        let w = self.param(&format!("{name}.weight"), dims);
        self.op(name, einsum(spec), &[x, w])
    }
    fn embed(&mut self) -> ValueId {
        let table = self.param("embed.weight", &[self.v, self.h]);
        self.op("embed", Op::Embed, &[table, self.tokens])
    }
    fn graph_value(&self, name: &str) -> ValueId {
        self.b.graph.values.iter().find(|(_, v)| v.name == name).map(|(id, _)| id).expect("a value of that name")
    }
    fn head(mut self, x: ValueId, table: Option<ValueId>) -> Case {
        let table = table.unwrap_or_else(|| self.param("head.weight", &[self.v, self.h]));
        let logits = self.op("logits", einsum("bsh,vh->bsv"), &[x, table]);
        let stats = self.b.node("lse", Op::CeStats, &[logits, self.targets]).unwrap_or_else(|why| panic!("{why}"));
        let nll = self.op("nll", Op::Sub, &[stats[0], stats[1]]);
        let loss = self.op("loss", Op::Mean, &[nll]);
        self.b.graph.loss = Some(loss);
        let graph = self.b.graph;
        let ids =
            |salt: u64| Tensor::from_fn(&[graph.size(self.batch), graph.size(self.s)], |i| ((i[0] * 5 + i[1] * 3 + i[1] * i[1] + salt) % 7) as f64);
        let (params, inputs) = (init::params(&graph, 3), vec![ids(0), ids(2)]);
        // Not one over the tokens at hand: a step may have more of them elsewhere.
        Case { params, inputs, inv_tokens: 0.1, graph }
    }
}

pub fn einsum(spec: &str) -> Op {
    Op::Einsum(parse(spec))
}

fn expert(spec: &str) -> Op {
    Op::ExpertEinsum(parse(spec))
}

fn parse(spec: &str) -> Spec {
    let (ins, out) = spec.split_once("->").expect("an arrow");
    let (left, right) = ins.split_once(',').expect("two operands");
    Spec { left: left.into(), right: right.into(), out: out.into() }
}
