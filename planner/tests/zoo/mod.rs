//! Seeded small models and seeded legal plans for them.
#![allow(dead_code)]

use dplan_ir::build::Builder;
use dplan_ir::data::data_split;
use dplan_ir::dtype::DType;
use dplan_ir::entity::{DimId, ValueId};
use dplan_ir::extent::node_rule;
use dplan_ir::grad::differentiate;
use dplan_ir::graph::{Graph, Init, Layout};
use dplan_ir::interp::Tensor;
use dplan_ir::mesh::{AxisSet, Mesh};
use dplan_ir::op::{Activation, Attention, Mask, Op, Renormalize, Rope, Rotation, Router, Spec};
use dplan_ir::optimizer::Optimizer;
use dplan_ir::pipeline::Pipeline;
use dplan_ir::plan::{Clip, Gathered, LayerPlan, Offload, Plan, Recompute, Schedule, StagePlan, Zero};
use dplan_ir::rule::{Assignment, Split};

/// splitmix64 (doi:10.1145/2714064.2660195).
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % sides
    }
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.roll(of.len() as u64) as usize]
    }
    pub fn one_in(&mut self, n: u64) -> bool {
        self.roll(n) == 0
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ffn {
    Gated,
    Plain,
    Experts,
}

/// Shape of a small decoder.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    pub blocks: u32,
    pub batch: u64,
    pub seq: u64,
    pub kv_heads: u64,
    pub group: u64,
    pub vocab: u64,
    pub ffn: Ffn,
    pub tied: bool,
    pub learned_positions: bool,
    pub dtype: DType,
}

pub fn model(dice: &mut Dice, batch: u64) -> Model {
    Model {
        blocks: dice.pick(&[1, 2, 3]),
        batch,
        seq: 4,
        kv_heads: dice.pick(&[1, 2, 3]),
        group: dice.pick(&[1, 2, 3]),
        vocab: dice.pick(&[5, 8, 11]),
        ffn: dice.pick(&[Ffn::Gated, Ffn::Plain, Ffn::Experts]),
        tied: dice.one_in(2),
        learned_positions: dice.one_in(2),
        dtype: DType::F64,
    }
}

fn spec(text: &str) -> Op {
    Op::Einsum(parse(text))
}
fn parse(text: &str) -> Spec {
    let (operands, out) = text.split_once("->").unwrap();
    let (left, right) = operands.split_once(',').unwrap();
    Spec { left: left.into(), right: right.into(), out: out.into() }
}

/// The differentiated graph of a decoder: an embedding, blocks, a head.
pub fn graph(m: &Model) -> Graph {
    let mut b = Builder::new("zoo");
    let t = m.dtype;
    let mut dim = |name: &str, size| b.dim(name, size);
    let (n, s, h, g, r, d) = (dim("b", m.batch), dim("s", m.seq), dim("h", 6), dim("g", m.kv_heads), dim("r", m.group), dim("d", 4));
    let (f, v, p, e) = (dim("f", 10), dim("v", m.vocab), dim("p", m.seq + 1), dim("e", 4));
    (b.graph.batch, b.graph.sequence) = (Some(n), Some(s));
    let tokens = b.input("tokens", DType::I32, &[n, s]);
    let targets = b.input("targets", DType::I32, &[n, s]);
    let normal = Init::Normal { std: 0.4 };
    let weight = |b: &mut Builder, name: String, dims: &[DimId]| b.param(&name, t, dims, normal, vec![]);
    let table = weight(&mut b, "table".into(), &[v, h]);
    let mut x = b.op("embed", Op::Embed, &[table, tokens]).unwrap();
    if m.learned_positions {
        let positions = weight(&mut b, "positions".into(), &[p, h]);
        x = b.op("embed.pos", Op::AddPosition, &[x, positions]).unwrap();
    }
    for layer in 1..=m.blocks {
        b.set_layer(layer);
        let name = |what: &str| format!("l{layer}.{what}");
        let norm = |b: &mut Builder, what: &str, x: ValueId| {
            let w = weight(b, name(&format!("{what}.w")), &[h]);
            if m.ffn == Ffn::Plain {
                let bias = weight(b, name(&format!("{what}.b")), &[h]);
                b.op(&name(what), Op::LayerNorm { eps: 1e-5 }, &[x, w, bias]).unwrap()
            } else {
                b.op(&name(what), Op::RmsNorm { eps: 1e-5 }, &[x, w]).unwrap()
            }
        };
        let y = norm(&mut b, "norm1", x);
        let wq = weight(&mut b, name("wq"), &[g, r, d, h]);
        let (wk, wv) = (weight(&mut b, name("wk"), &[g, d, h]), weight(&mut b, name("wv"), &[g, d, h]));
        let q = b.op(&name("q"), spec("bsh,grdh->bsgrd"), &[y, wq]).unwrap();
        let k = b.op(&name("k"), spec("bsh,gdh->bsgd"), &[y, wk]).unwrap();
        let val = b.op(&name("v"), spec("bsh,gdh->bsgd"), &[y, wv]).unwrap();
        let rope = |b: &mut Builder, what: &str, x| {
            let rope = Rope::whole(Rotation::Forward, vec![1.0, 0.1]);
            b.op(&name(what), Op::Rope(rope), &[x]).unwrap()
        };
        let (q, k) = (rope(&mut b, "rq", q), rope(&mut b, "rk", k));
        let attention = Attention { mask: Mask { causal: true, window: None }, scale: 0.5 };
        let o = b.node(&name("attn"), Op::Attention(attention), &[q, k, val]).unwrap()[0];
        let wo = weight(&mut b, name("wo"), &[h, g, r, d]);
        let o = b.op(&name("o"), spec("bsgrd,hgrd->bsh"), &[o, wo]).unwrap();
        let x1 = b.op(&name("res1"), Op::Add, &[x, o]).unwrap();
        let y = norm(&mut b, "norm2", x1);
        let out = match m.ffn {
            Ffn::Gated => {
                let (w1, w2, w3) = (weight(&mut b, name("w1"), &[f, h]), weight(&mut b, name("w2"), &[h, f]), weight(&mut b, name("w3"), &[f, h]));
                let gate = b.op(&name("gate"), spec("bsh,fh->bsf"), &[y, w1]).unwrap();
                let up = b.op(&name("up"), spec("bsh,fh->bsf"), &[y, w3]).unwrap();
                let z = b.op(&name("gated"), Op::Gated(Activation::Silu), &[gate, up]).unwrap();
                b.op(&name("down"), spec("bsf,hf->bsh"), &[z, w2]).unwrap()
            }
            Ffn::Plain => {
                let (w1, w2) = (weight(&mut b, name("w1"), &[f, h]), weight(&mut b, name("w2"), &[h, f]));
                let (b1, b2) = (weight(&mut b, name("b1"), &[f]), weight(&mut b, name("b2"), &[h]));
                let z = b.op(&name("up"), spec("bsh,fh->bsf"), &[y, w1]).unwrap();
                let z = b.op(&name("up.b"), Op::AddBias, &[z, b1]).unwrap();
                let z = b.op(&name("act"), Op::Act(Activation::GeluTanh), &[z]).unwrap();
                let z = b.op(&name("down"), spec("bsf,hf->bsh"), &[z, w2]).unwrap();
                b.op(&name("down.b"), Op::AddBias, &[z, b2]).unwrap()
            }
            Ffn::Experts => {
                let router = weight(&mut b, name("router"), &[e, h]);
                let (w1, w2) = (weight(&mut b, name("w1"), &[e, f, h]), weight(&mut b, name("w2"), &[e, h, f]));
                let scores = b.op(&name("scores"), spec("bsh,eh->bse"), &[y, router]).unwrap();
                let gate = b.op(&name("topk"), Op::TopKGate(Router::softmax(2, Renormalize::Yes)), &[scores]).unwrap();
                let rows = b.op(&name("dispatch"), Op::Dispatch, &[y, gate]).unwrap();
                let z = b.op(&name("up"), Op::ExpertEinsum(parse("bseh,efh->bsef")), &[rows, w1, gate]).unwrap();
                let z = b.op(&name("act"), Op::Act(Activation::Silu), &[z]).unwrap();
                let z = b.op(&name("down"), Op::ExpertEinsum(parse("bsef,ehf->bseh")), &[z, w2, gate]).unwrap();
                b.op(&name("combine"), Op::Combine, &[z, gate]).unwrap()
            }
        };
        x = b.op(&name("res2"), Op::Add, &[x1, out]).unwrap();
    }
    b.set_layer(m.blocks + 1);
    let w = weight(&mut b, "norm.w".into(), &[h]);
    let y = b.op("norm", Op::RmsNorm { eps: 1e-5 }, &[x, w]).unwrap();
    let head = if m.tied { table } else { weight(&mut b, "head".into(), &[v, h]) };
    let logits = b.op("logits", spec("bsh,vh->bsv"), &[y, head]).unwrap();
    let stats = b.node("lse", Op::CeStats, &[logits, targets]).unwrap();
    let losses = b.op("losses", Op::Sub, &stats).unwrap();
    b.graph.loss = Some(b.op("loss", Op::Mean, &[losses]).unwrap());
    differentiate(&b.graph).unwrap()
}

/// Token inputs of a micro-batch.
pub fn inputs(graph: &Graph, vocab: u64, dice: &mut Dice) -> Vec<Tensor> {
    graph.inputs.iter().map(|&v| Tensor::from_fn(&graph.shape(v), |_| dice.roll(vocab) as f64)).collect()
}

/// A strategy for one layer: each tensor-parallel axis splits a random factor of each node, or none.
pub fn strategy(graph: &Graph, mesh: &Mesh, layer: u32, dice: &mut Dice) -> Vec<Assignment> {
    // Parameters that layers share, and the packed rows of experts, need one choice.
    let experts = dice.pick(&['e', 'f', '-']);
    let table = dice.pick(&['v', '-']);
    let free = dplan_planner::padding::paddable(graph);
    let mut all = Vec::new();
    for (_, node) in graph.forward_nodes().filter(|(_, n)| n.layer == layer) {
        let rule = node_rule(graph, node);
        let data = data_split(graph, node, &rule, mesh);
        let mut assignment = Assignment::default();
        let routed = node.inputs.iter().chain(&node.outputs).any(|&v| graph.values[v].ty.layout != Layout::Dense);
        let shared = node.inputs.iter().any(|&v| graph.values[v].name == "table");
        for axis in mesh.tp().iter() {
            let axes = AxisSet::one(axis);
            let letters: Vec<char> = rule.factors.iter().filter(|f| f.split != Split::Whole).map(|f| f.label).collect();
            let label = match (routed, shared) {
                // `act` works on rows `bsef`, with letters of its own.
                (true, _) if rule.ins.len() == 1 => match experts {
                    'e' => 'c',
                    'f' => 'd',
                    other => other,
                },
                (true, _) => experts,
                (false, true) => table,
                (false, false) if dice.one_in(4) || letters.is_empty() => continue,
                (false, false) => dice.pick(&letters),
            };
            let fits = letters.contains(&label) && {
                let mut with = assignment.clone();
                with.assign(label, axes);
                let sides = rule.ins.iter().chain(rule.outs.iter().map(|(l, _)| l)).zip(node.inputs.iter().chain(&node.outputs));
                let mut dims = sides.flat_map(|(l, &v)| l.iter().zip(&graph.values[v].ty.dims)).filter(|(l, _)| **l == label).map(|(_, &d)| d);
                dims.all(|d| free[d] || graph.size(d).is_multiple_of(mesh.size(data.axes(label)) * mesh.size(with.axes(label))))
            };
            if fits {
                assignment.assign(label, axes);
            }
        }
        all.push(assignment);
    }
    all
}

#[derive(Clone, Copy, Debug)]
pub struct Degrees {
    pub dp: u64,
    pub tp: u64,
    pub pp: u64,
    pub micro_batches: u64,
}

/// A legal pipeline of so many stages and micro-batches, each schedule that there is with the same chance.
fn pipeline(stages: u64, micro_batches: u64, layers: u64, dice: &mut Dice) -> Pipeline {
    let of = |schedule| (1..=layers / stages).map(move |virtual_stages| Pipeline { schedule, stages, virtual_stages, micro_batches });
    let legal = Schedule::ALL.map(|s| of(s).filter(|p| p.refusal().is_none()).collect::<Vec<_>>());
    let legal: Vec<&Vec<Pipeline>> = legal.iter().filter(|l| !l.is_empty()).collect();
    let of_schedule = legal[dice.roll(legal.len() as u64) as usize];
    dice.pick(of_schedule)
}

/// A legal plan for a graph whose batch is `dp · micro_batch`.
pub fn plan(graph: &Graph, degrees: Degrees, dice: &mut Dice) -> Plan {
    let cp = if dice.one_in(3) { 2 } else { 1 };
    // Four experts, if any.
    let ep = if degrees.dp.is_multiple_of(2) && dice.one_in(2) { 2 } else { 1 };
    let mesh = Mesh::of(dplan_ir::mesh::Degrees { dp: degrees.dp, ep, cp, tp: degrees.tp });
    let layers = graph.layer_count();
    let boundary = if 4 % (cp * degrees.tp) == 0 && dice.one_in(2) { Some(1) } else { None };
    let tied_zero = dice.roll(4) as u8;
    let pp = degrees.pp.min(u64::from(layers));
    let pipeline = pipeline(pp, degrees.micro_batches, u64::from(layers), dice);
    let most_zero = if pipeline.parts_backward() { 1 } else { 3 };
    let options: Vec<LayerPlan> = (0..layers)
        .map(|layer| LayerPlan {
            zero: Zero(most_zero.min(if layer == 0 || layer + 1 == layers { tied_zero } else { dice.roll(4) as u8 })),
            offload: dice.pick(&Offload::ALL),
            recompute: dice.pick(&Recompute::ALL),
            gathered: dice.pick(&[Gathered::Keep, Gathered::Again]),
            strategy: Vec::new(),
        })
        .collect();
    let mut cuts: Vec<u32> = vec![0, layers];
    while (cuts.len() as u64) < pipeline.all_virtual() + 1 {
        let cut = 1 + dice.roll(u64::from(layers) - 1) as u32;
        if !cuts.contains(&cut) {
            cuts.push(cut);
        }
    }
    cuts.sort_unstable();
    let mut plan = Plan {
        dp: degrees.dp,
        ep,
        cp,
        tp: degrees.tp,
        micro_batch: graph.size(graph.batch.unwrap()) / degrees.dp,
        micro_batches: degrees.micro_batches,
        schedule: pipeline.schedule,
        virtual_stages: pipeline.virtual_stages,
        boundary,
        stages: cuts.windows(2).map(|w| StagePlan { first: w[0], last: w[1] - 1 }).collect(),
        options,
        layers: (0..layers).collect(),
        compute: DType::F64,
        optimizer: dice.pick(&Optimizer::ALL),
        clip: dice.pick(&[Clip::None, Clip::GlobalNorm]),
    };
    for layer in 0..layers {
        plan.options[layer as usize].strategy = strategy(graph, &mesh, layer, dice);
    }
    // The embedding and the head share their table, so they share its sharding.
    let first = plan.options[0].strategy[0].clone();
    for (at, (_, node)) in graph.forward_nodes().filter(|(_, n)| n.layer + 1 == layers).enumerate() {
        if node.inputs.iter().any(|&v| graph.values[v].name == "table") {
            plan.options[layers as usize - 1].strategy[at] = first.clone();
        }
    }
    plan
}

/// The textbook strategy (arXiv:1909.08053, arXiv:2205.05198): heads, feed-forward and vocabulary over all tensor-parallel axes, the sequence elsewhere.
pub fn textbook(graph: &Graph, mesh: &Mesh, layer: u32) -> Vec<Assignment> {
    let nodes = graph.forward_nodes().filter(|(_, n)| n.layer == layer);
    let strategy = nodes.map(|(_, node)| {
        let rule = node_rule(graph, node);
        let sides = rule.ins.iter().chain(rule.outs.iter().map(|(l, _)| l)).zip(node.inputs.iter().chain(&node.outputs));
        let letters: Vec<(char, &str)> = sides
            .flat_map(|(labels, &v)| labels.iter().zip(&graph.values[v].ty.dims).map(|(&l, &d)| (l, graph.dims[d].name.as_str())))
            .filter(|(l, _)| rule.factor(*l).is_some_and(|f| f.split != Split::Whole))
            .collect();
        let mut assignment = Assignment::default();
        if let Some(&(label, _)) = ["e", "g", "f", "v", "s"].iter().find_map(|name| letters.iter().find(|(_, n)| n == name)) {
            assignment.assign(label, mesh.tp());
        }
        assignment
    });
    strategy.collect()
}
