//! The options of small layers against their lowering and against enumeration.

use super::form::{Compare, Costs};
use super::net::Net;
use super::*;
use crate::machine::Machine;
use crate::strategy::{follow, is_follower, strategies};
use dplan_ir::build::Builder;
use dplan_ir::dtype::DType;
use dplan_ir::entity::{NodeId, ValueId};
use dplan_ir::extent::node_rule;
use dplan_ir::grad::differentiate;
use dplan_ir::graph::Init;
use dplan_ir::op::{Activation, Attention, Mask, Op, Renormalize, Rope, Rotation, Router, Spec};
use dplan_ir::plan::{Offload, Zero};

/// Sizes of a small decoder.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub batch: u64,
    pub seq: u64,
    pub hidden: u64,
    pub kv_heads: u64,
    pub queries: u64,
    pub head: u64,
    pub mlp: u64,
    pub vocab: u64,
    pub blocks: u32,
    pub tied: bool,
    pub experts: Option<(u64, u64)>,
}

pub(super) const SMALL: Sizes =
    Sizes { batch: 2, seq: 8, hidden: 12, kv_heads: 2, queries: 2, head: 4, mlp: 16, vocab: 20, blocks: 1, tied: false, experts: None };

fn einsum(left: &str, right: &str, out: &str) -> Op {
    Op::Einsum(Spec { left: left.into(), right: right.into(), out: out.into() })
}

/// Embedding, blocks and head in the manner of Llama, differentiated.
pub(crate) fn llama(s: Sizes, dtype: DType) -> Graph {
    let mut b = Builder::new("llama");
    let [batch, seq, h, g, r, d, f, v] =
        [("b", s.batch), ("s", s.seq), ("h", s.hidden), ("g", s.kv_heads), ("r", s.queries), ("d", s.head), ("f", s.mlp), ("v", s.vocab)]
            .map(|(n, size)| b.dim(n, size));
    b.graph.batch = Some(batch);
    let tokens = b.input("tokens", DType::I32, &[batch, seq]);
    let targets = b.input("targets", DType::I32, &[batch, seq]);
    let normal = Init::Normal { std: 0.02 };
    let table = b.param("embed", dtype, &[v, h], normal, vec![]);
    let mut x = b.op("x", Op::Embed, &[table, tokens]).unwrap();
    for layer in 0..s.blocks {
        b.set_layer(layer + 1);
        let n = |name: &str| format!("{layer}.{name}");
        let norm = b.param(&n("norm"), dtype, &[h], Init::Ones, vec![]);
        let y = b.op(&n("normed"), Op::RmsNorm { eps: 1e-5 }, &[x, norm]).unwrap();
        let [wq, wo] = [("wq", vec![g, r, d, h]), ("wo", vec![h, g, r, d])].map(|(name, dims)| b.param(&n(name), dtype, &dims, normal, vec![]));
        let [wk, wv] = ["wk", "wv"].map(|name| b.param(&n(name), dtype, &[g, d, h], normal, vec![]));
        let q = b.op(&n("q"), einsum("bsh", "grdh", "bsgrd"), &[y, wq]).unwrap();
        let k = b.op(&n("k"), einsum("bsh", "gdh", "bsgd"), &[y, wk]).unwrap();
        let v = b.op(&n("v"), einsum("bsh", "gdh", "bsgd"), &[y, wv]).unwrap();
        let rope = || Op::Rope(Rope::whole(Rotation::Forward, vec![1.0; s.head as usize / 2]));
        let q = b.op(&n("rq"), rope(), &[q]).unwrap();
        let k = b.op(&n("rk"), rope(), &[k]).unwrap();
        let attention = Op::Attention(Attention { mask: Mask::CAUSAL, scale: 0.5 });
        let o = b.node(&n("o"), attention, &[q, k, v]).unwrap()[0];
        let o = b.op(&n("p"), einsum("bsgrd", "hgrd", "bsh"), &[o, wo]).unwrap();
        x = b.op(&n("r"), Op::Add, &[x, o]).unwrap();
        let norm = b.param(&n("norm2"), dtype, &[h], Init::Ones, vec![]);
        let y = b.op(&n("normed2"), Op::RmsNorm { eps: 1e-5 }, &[x, norm]).unwrap();
        let down = match s.experts {
            None => {
                let [wg, wu] = ["wg", "wu"].map(|name| b.param(&n(name), dtype, &[f, h], normal, vec![]));
                let wd = b.param(&n("wd"), dtype, &[h, f], normal, vec![]);
                let gate = b.op(&n("g"), einsum("bsh", "fh", "bsf"), &[y, wg]).unwrap();
                let up = b.op(&n("u"), einsum("bsh", "fh", "bsf"), &[y, wu]).unwrap();
                let a = b.op(&n("a"), Op::Gated(Activation::Silu), &[gate, up]).unwrap();
                b.op(&n("d"), einsum("bsf", "hf", "bsh"), &[a, wd]).unwrap()
            }
            Some((experts, k)) => {
                let e = b.dim(&n("e"), experts);
                let router = b.param(&n("router"), dtype, &[e, h], normal, vec![]);
                let [wg, wu] = ["wg", "wu"].map(|name| b.param(&n(name), dtype, &[e, f, h], normal, vec![]));
                let wd = b.param(&n("wd"), dtype, &[e, h, f], normal, vec![]);
                let logits = b.op(&n("l"), einsum("bsh", "eh", "bse"), &[y, router]).unwrap();
                let gate = b.op(&n("gate"), Op::TopKGate(Router::softmax(k, Renormalize::Yes)), &[logits]).unwrap();
                let rows = b.op(&n("rows"), Op::Dispatch, &[y, gate]).unwrap();
                let expert = |l: &str, r: &str, o: &str| Op::ExpertEinsum(Spec { left: l.into(), right: r.into(), out: o.into() });
                let g = b.op(&n("g"), expert("bseh", "efh", "bsef"), &[rows, wg, gate]).unwrap();
                let u = b.op(&n("u"), expert("bseh", "efh", "bsef"), &[rows, wu, gate]).unwrap();
                let a = b.op(&n("a"), Op::Gated(Activation::Silu), &[g, u]).unwrap();
                let y = b.op(&n("d"), expert("bsef", "ehf", "bseh"), &[a, wd, gate]).unwrap();
                b.op(&n("c"), Op::Combine, &[y, gate]).unwrap()
            }
        };
        x = b.op(&n("out"), Op::Add, &[x, down]).unwrap();
    }
    b.set_layer(s.blocks + 1);
    let norm = b.param("norm", dtype, &[h], Init::Ones, vec![]);
    let y = b.op("normed", Op::RmsNorm { eps: 1e-5 }, &[x, norm]).unwrap();
    let head = if s.tied { table } else { b.param("head", dtype, &[v, h], normal, vec![]) };
    let logits = b.op("logits", einsum("bsh", "vh", "bsv"), &[y, head]).unwrap();
    let stats = b.node("lse", Op::CeStats, &[logits, targets]).unwrap();
    let nll = b.op("nll", Op::Sub, &[stats[0], stats[1]]).unwrap();
    let loss = b.op("loss", Op::Mean, &[nll]).unwrap();
    b.graph.loss = Some(loss);
    differentiate(&b.graph).unwrap()
}

/// A small deterministic stream of numbers.
pub(super) struct Draw(pub u64);

impl Draw {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// Random branching layers of a few ops over one boundary: `layers` of them between an embedding and a head.
pub(super) fn branching(draw: &mut Draw, ops: u64) -> Graph {
    let mut b = Builder::new("branching");
    let sizes = |draw: &mut Draw| [2, 4, 6, 8][draw.below(4) as usize];
    let [batch, seq] = [("b", 4), ("s", 4)].map(|(n, s)| b.dim(n, s));
    let [h, f, v] = ["h", "f", "v"].map(|n| b.dim(n, sizes(draw)));
    b.graph.batch = Some(batch);
    let tokens = b.input("tokens", DType::I32, &[batch, seq]);
    let targets = b.input("targets", DType::I32, &[batch, seq]);
    let normal = Init::Normal { std: 0.02 };
    let table = b.param("embed", DType::F32, &[v, h], normal, vec![]);
    let mut x = b.op("x", Op::Embed, &[table, tokens]).unwrap();
    b.set_layer(1);
    // Narrow values have dim h, wide ones f.
    let mut narrow = vec![x];
    let mut wide = Vec::new();
    let mut name = 0;
    let mut fresh = |what: &str| {
        name += 1;
        format!("{what}{name}")
    };
    for _ in 0..ops {
        let at = |draw: &mut Draw, list: &[ValueId]| list[draw.below(list.len() as u64) as usize];
        let from = at(draw, &narrow);
        match draw.below(7) {
            0 | 1 => {
                let w = b.param(&fresh("w"), DType::F32, &[f, h], normal, vec![]);
                wide.push(b.op(&fresh("p"), einsum("bsh", "fh", "bsf"), &[from, w]).unwrap());
            }
            2 if !wide.is_empty() => {
                let w = b.param(&fresh("w"), DType::F32, &[h, f], normal, vec![]);
                let from = at(draw, &wide);
                narrow.push(b.op(&fresh("q"), einsum("bsf", "hf", "bsh"), &[from, w]).unwrap());
            }
            3 if wide.len() > 1 => {
                let (left, right) = (at(draw, &wide), at(draw, &wide));
                wide.push(b.op(&fresh("a"), Op::Gated(Activation::Silu), &[left, right]).unwrap());
            }
            4 => {
                let (w, bias) = (fresh("w"), fresh("w"));
                let [w, bias] = [w, bias].map(|n| b.param(&n, DType::F32, &[h], Init::Ones, vec![]));
                narrow.push(b.op(&fresh("n"), Op::LayerNorm { eps: 1e-5 }, &[from, w, bias]).unwrap());
            }
            5 => {
                let bias = b.param(&fresh("w"), DType::F32, &[h], Init::Zeros, vec![]);
                narrow.push(b.op(&fresh("b"), Op::AddBias, &[from, bias]).unwrap());
            }
            _ => {
                let right = at(draw, &narrow);
                narrow.push(b.op(&fresh("s"), Op::Add, &[from, right]).unwrap());
            }
        }
    }
    // Everything made so far reaches the boundary.
    if let Some(&first) = wide.first() {
        let all = wide[1..].iter().fold(first, |sum, &w| b.op(&fresh("s"), Op::Add, &[sum, w]).unwrap());
        let w = b.param(&fresh("w"), DType::F32, &[h, f], normal, vec![]);
        narrow.push(b.op(&fresh("q"), einsum("bsf", "hf", "bsh"), &[all, w]).unwrap());
    }
    let all = narrow[1..].iter().fold(narrow[0], |sum, &n| b.op(&fresh("s"), Op::Add, &[sum, n]).unwrap());
    let norm = b.param(&fresh("w"), DType::F32, &[h], Init::Ones, vec![]);
    x = b.op("out", Op::RmsNorm { eps: 1e-5 }, &[all, norm]).unwrap();
    b.set_layer(2);
    let head = b.param("head", DType::F32, &[v, h], normal, vec![]);
    let logits = b.op("logits", einsum("bsh", "vh", "bsv"), &[x, head]).unwrap();
    let stats = b.node("lse", Op::CeStats, &[logits, targets]).unwrap();
    let nll = b.op("nll", Op::Sub, &[stats[0], stats[1]]).unwrap();
    b.graph.loss = Some(b.op("loss", Op::Mean, &[nll]).unwrap());
    differentiate(&b.graph).unwrap()
}

/// Checks that a path through the network costs what its lowering does, under every variant, and says so where neither can be done.
fn same_as_lowering(pricing: &Pricing<'_>, layer: u32, net: &mut Net<'_>, path: &[usize]) -> Option<Costs> {
    let walked = net.walk(path);
    let strategy: Vec<Assignment> = net.strategy(path).iter().map(|a| Assignment::clone(a)).collect();
    for (variant, &(recompute, gathered)) in VARIANTS.iter().enumerate() {
        let plan = LayerPlan { zero: Zero(0), offload: Offload::None, activations: None, recompute, gathered, strategy: strategy.clone() };
        match (&walked, pricing.price(layer, &plan)) {
            (None, Err(_)) => {}
            (None, Ok(_)) => panic!("only the lowering allows {strategy:?}"),
            (Some(_), Err(why)) => panic!("the lowering refuses {strategy:?}: {why}"),
            (Some(costs), Ok(priced)) => {
                let found =
                    [priced.forward.0, priced.backward.0, priced.param_elems(), priced.partial_elems(), priced.bytes.frame, priced.bytes.workspace];
                assert_eq!(costs[variant].0, found, "layer {layer}, {recompute:?} {gathered:?}, {strategy:?}");
            }
        }
    }
    walked
}

fn every_pricing<'a>(graph: &'a Graph, machine: &'a Machine, tps: &[u64]) -> Vec<Pricing<'a>> {
    let micro_batch = graph.size(graph.batch.unwrap());
    tps.iter().flat_map(|&tp| [None, Some(1), Some(2)].into_iter().flat_map(move |b| Pricing::all(graph, machine, tp, micro_batch, b))).collect()
}

#[test]
fn random_strategies_cost_what_their_lowering_does() {
    let machine = Machine::parse("cpu:8").unwrap();
    let mut draw = Draw(7);
    let graphs = [
        llama(SMALL, DType::F32),
        llama(Sizes { tied: true, vocab: 21, ..SMALL }, DType::F32),
        llama(Sizes { experts: Some((4, 2)), ..SMALL }, DType::Bf16),
        branching(&mut Draw(1), 5),
        branching(&mut Draw(2), 7),
        branching(&mut Draw(3), 9),
    ];
    let mut walked = 0;
    for graph in &graphs {
        for pricing in every_pricing(graph, &machine, &[1, 2, 4, 6]) {
            for layer in 0..graph.layer_count() {
                let blueprint = Blueprint::new(graph, layer).unwrap();
                let Some(mut net) = Net::new(&pricing, &blueprint) else { continue };
                for _ in 0..12 {
                    let path: Vec<usize> = net.choices.iter().map(|c| draw.below(c.len() as u64) as usize).collect();
                    walked += usize::from(same_as_lowering(&pricing, layer, &mut net, &path).is_some());
                }
            }
        }
    }
    assert!(walked > 500, "{walked} strategies were possible");
}

/// Every strategy of a layer, one assignment per op.
fn every_path(net: &Net<'_>) -> Vec<Vec<usize>> {
    net.choices.iter().fold(vec![Vec::new()], |paths, choices| {
        paths.iter().flat_map(|p| (0..choices.len()).map(|c| p.iter().copied().chain([c]).collect())).collect()
    })
}

/// Whether every op of a layer that should follows its first operand, as far as one of its strategies does.
fn follows(pricing: &Pricing<'_>, layer: u32, strategy: &[Assignment]) -> bool {
    let graph = pricing.graph;
    let nodes: Vec<NodeId> = graph.forward_nodes().filter(|(_, n)| n.layer == layer).map(|(id, _)| id).collect();
    let place = |value: ValueId| -> Option<Vec<AxisSet>> {
        let maker = graph.producer(value)?;
        let Some(at) = nodes.iter().position(|&n| n == maker) else { return Some(pricing.boundary_sharding(value)?.dims) };
        let node = &graph.nodes[maker];
        let result = node.outputs.iter().position(|&o| o == value)?;
        Some(node_rule(graph, node).place(&strategy[at]).outs[result].dims.clone())
    };
    nodes.iter().zip(strategy).all(|(&id, assignment)| {
        let node = &graph.nodes[id];
        let made = node.inputs.first().filter(|_| is_follower(&node.op)).and_then(|&v| place(v));
        made.is_none_or(|made| {
            let wanted = follow(&node_rule(graph, node), &made, pricing.mesh.tp());
            *assignment == wanted || !strategies(graph, node, &pricing.mesh, &pricing.padded).contains(&wanted)
        })
    })
}

#[test]
fn options_are_the_undominated_ones_of_all_strategies() {
    let machine = Machine::parse("cpu:8").unwrap();
    let (mut layers, mut strategies) = (0, 0);
    for seed in 0..120 {
        let mut draw = Draw(seed);
        let ops = 1 + draw.below(3);
        let graph = branching(&mut draw, ops);
        let pricings = every_pricing(&graph, &machine, &[2, 4]);
        let pricing = &pricings[draw.below(pricings.len() as u64) as usize];
        for layer in 0..graph.layer_count() {
            let blueprint = Blueprint::new(&graph, layer).unwrap();
            let Some(mut net) = Net::new(pricing, &blueprint) else { continue };
            if net.choices.iter().map(Vec::len).product::<usize>() > 1500 {
                continue;
            }
            let mut all = Vec::new();
            for path in every_path(&net) {
                let strategy: Vec<Assignment> = net.strategy(&path).iter().map(|a| Assignment::clone(a)).collect();
                if !follows(pricing, layer, &strategy) {
                    continue;
                }
                let costs = same_as_lowering(pricing, layer, &mut net, &path);
                all.extend(
                    costs
                        .into_iter()
                        .flat_map(|costs| VARIANTS.map(|v| v.0).into_iter().zip(costs))
                        .map(|(r, cost)| (r, net.rates.measure(&cost, Compare::All))),
                );
            }
            strategies += all.len() / VARIANTS.len();
            let better = |m: &(Recompute, Measure)| all.iter().any(|o| o.0 == m.0 && o.1.covers(&m.1) && o.1 != m.1);
            let mut best: Vec<(Recompute, Measure)> = all.iter().filter(|m| !better(m)).copied().collect();
            best.sort_unstable();
            best.dedup();
            let measure = |o: &LayerOption| {
                let bytes = [o.bytes.frame, o.bytes.workspace];
                net.rates
                    .measure(&super::form::Cost([o.forward.0, o.backward.0, o.param_elems(), o.partial_elems(), bytes[0], bytes[1]]), Compare::All)
            };
            let mut found: Vec<(Recompute, Measure)> = blueprint.offers(pricing).iter().map(|o| (o.option.recompute, measure(&o.option))).collect();
            found.sort_unstable();
            assert_eq!(found, best, "seed {seed}, layer {layer}, {:?} {:?}", pricing.boundary, pricing.mesh);
            layers += 1;
        }
    }
    assert!(layers > 60 && strategies > 1500, "{layers} layers, {strategies} strategies");
}

#[test]
fn an_option_is_what_its_plan_is_priced_at() {
    let machine = Machine::parse("h100:8x2").unwrap();
    let graph = llama(Sizes { tied: true, vocab: 21, ..SMALL }, DType::Bf16);
    for pricing in every_pricing(&graph, &machine, &[2, 4]) {
        for layer in 0..graph.layer_count() {
            for option in options(&pricing, layer).unwrap() {
                assert_eq!(
                    pricing.price(layer, &option.plan(Residence { states: States { zero: Zero(1), ..States::default() }, activations: None })),
                    Ok(option)
                );
            }
        }
    }
}
