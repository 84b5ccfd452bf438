//! Experts of a capacity: what they take, what others of their sequence lose, and what a graph may not say of them.

use dplan_ir::build::Builder;
use dplan_ir::capacity::{self, CapacityError};
use dplan_ir::dtype::DType;
use dplan_ir::entity::ValueId;
use dplan_ir::grad::differentiate;
use dplan_ir::graph::{Graph, Init, Layout};
use dplan_ir::init;
use dplan_ir::interp::Tensor;
use dplan_ir::interp::graph::GraphRun;
use dplan_ir::op::{Activation, Op, Renormalize, Router, Spec};
use dplan_ir::order::Order;
use dplan_ir::verify::verify_graph;

const SEQUENCES: u64 = 3;
const TOKENS: u64 = 8;
const EXPERTS: u64 = 4;
const CHOSEN: u64 = 2;
const HIDDEN: u64 = 5;
const INNER: u64 = 7;

fn product(left: &str, right: &str, out: &str) -> Spec {
    Spec { left: left.into(), right: right.into(), out: out.into() }
}

/// `y = Σ over chosen experts gate · W₂ silu(W₁ x)`, and its mean as loss.
fn experts() -> Graph {
    let mut b = Builder::new("experts");
    let [n, s, h, f, e] = [("b", SEQUENCES), ("s", TOKENS), ("h", HIDDEN), ("f", INNER), ("e", EXPERTS)].map(|(name, size)| b.dim(name, size));
    (b.graph.batch, b.graph.sequence) = (Some(n), Some(s));
    let x = b.input("x", DType::F64, &[n, s, h]);
    let normal = Init::Normal { std: 0.7 };
    let router = b.param("router", DType::F64, &[e, h], normal, vec![]);
    let w1 = b.param("w1", DType::F64, &[e, f, h], normal, vec![]);
    let w2 = b.param("w2", DType::F64, &[e, h, f], normal, vec![]);
    let mut op = |name: &str, op: Op, ins: &[ValueId]| b.op(name, op, ins).unwrap_or_else(|why| panic!("{why}"));
    let scores = op("scores", Op::Einsum(product("bsh", "eh", "bse")), &[x, router]);
    let gate = op("gate", Op::TopKGate(Router::softmax(CHOSEN, Renormalize::Yes)), &[scores]);
    let rows = op("rows", Op::Dispatch, &[x, gate]);
    let a = op("a", Op::ExpertEinsum(product("bseh", "efh", "bsef")), &[rows, w1, gate]);
    let a = op("act", Op::Act(Activation::Silu), &[a]);
    let z = op("z", Op::ExpertEinsum(product("bsef", "ehf", "bseh")), &[a, w2, gate]);
    let y = op("y", Op::Combine, &[z, gate]);
    let loss = op("loss", Op::Mean, &[y]);
    b.graph.loss = Some(loss);
    b.graph
}

fn value(graph: &Graph, name: &str) -> ValueId {
    graph.values.iter().find(|(_, v)| v.name == name).map(|(id, _)| id).unwrap_or_else(|| panic!("{name}"))
}

/// The same weights whatever the numbers of parameters.
fn run(graph: &Graph) -> GraphRun {
    let of_name = |name: &str, dims: &[u64]| {
        let seed = name.bytes().fold(7u64, |h, c| h * 31 + u64::from(c));
        Tensor::from_fn(dims, |i| (i.iter().fold(seed, |h, &i| (h * 13 + i * 7 + 3) % 1009) as f64 / 504.5 - 1.0) * 0.9)
    };
    let params = init::params(graph, 1);
    let params = params.map(|p, t| of_name(&graph.values[graph.params[p].value].name, &t.dims));
    let inputs: Vec<Tensor> = graph.inputs.iter().map(|&v| of_name("x", &graph.shape(v))).collect();
    GraphRun::new(graph, &params, &inputs, 0.1)
}

/// y by loops over tokens: each expert counts who came, in each sequence anew.
fn naive(run: &GraphRun, graph: &Graph, most: u64) -> (Vec<f64>, u64) {
    let of = |name: &str| run.get(value(graph, name));
    let (x, gate, w1, w2) = (of("x"), of("gate"), of("w1"), of("w2"));
    let mut y = Tensor::from_fn(&[SEQUENCES, TOKENS, HIDDEN], |_| 0.0);
    let mut dropped = 0;
    for b in 0..SEQUENCES {
        let mut taken = [0; EXPERTS as usize];
        for position in 0..TOKENS {
            let s = graph.order.index(position, TOKENS);
            for e in 0..EXPERTS {
                let weight = gate.data[gate.at(&[b, s, e])];
                if weight == 0.0 {
                    continue;
                }
                taken[e as usize] += 1;
                if taken[e as usize] > most {
                    dropped += 1;
                    continue;
                }
                for f in 0..INNER {
                    let a: f64 = (0..HIDDEN).map(|h| x.data[x.at(&[b, s, h])] * w1.data[w1.at(&[e, f, h])]).sum();
                    let a = a / (1.0 + (-a).exp());
                    (0..HIDDEN).for_each(|h| y.data[(b * TOKENS * HIDDEN + s * HIDDEN + h) as usize] += weight * a * w2.data[w2.at(&[e, h, f])]);
                }
            }
        }
    }
    (y.data, dropped)
}

#[test]
fn the_first_tokens_of_a_sequence_stay_and_others_pass_by() {
    for (factor, most) in [(0.2, 1), (0.5, 2), (0.7, 3), (1.0, 4), (1.3, 6)] {
        for order in [Order::Straight, Order::Zigzag { blocks: 2 }] {
            let mut graph = capacity::limit(&experts(), factor).unwrap();
            graph.order = order;
            let graph = differentiate(&graph).unwrap();
            assert!(verify_graph(&graph).is_empty());
            let rows = &graph.values[value(&graph, "rows")].ty;
            assert_eq!(rows.layout, Layout::TopK { k: CHOSEN, capacity: Some(most) });
            let run = run(&graph);
            let stored = run.get(value(&graph, "rows")).data.len() as u64;
            assert_eq!(stored, SEQUENCES * (TOKENS * CHOSEN).min(EXPERTS * most) * HIDDEN);
            let (want, dropped) = naive(&run, &graph, most);
            assert!(most > 2 || dropped > 0, "capacity {most} drops nothing");
            let y = &run.get(value(&graph, "y")).data;
            assert!(y.iter().zip(&want).all(|(x, y)| (x - y).abs() < 1e-12), "{factor} {order:?}");
        }
    }
}

#[test]
fn a_capacity_that_nobody_reaches_changes_not_one_bit() {
    let plain = differentiate(&experts()).unwrap();
    let want = run(&plain);
    let (_, dropped) = naive(&want, &plain, TOKENS - 1);
    assert_eq!(dropped, 0, "an expert takes all tokens of a sequence: draw others");
    let limited = differentiate(&capacity::limit(&experts(), 1.7).unwrap()).unwrap();
    assert!(limited.nodes.values().any(|n| n.op == Op::Capacity { tokens: TOKENS - 1 }));
    let found = run(&limited);
    assert_eq!(found.get(value(&limited, "y")).data, want.get(value(&plain, "y")).data);
    for (param, row) in plain.params.iter() {
        let name = &plain.values[row.value].name;
        let other = limited.params.iter().find(|(_, p)| limited.values[p.value].name == *name).unwrap().0;
        assert_eq!(found.grad(&limited, other).data, want.grad(&plain, param).data, "gradient of {name}");
    }
    // No room is less than that of a whole sequence: nothing is there to limit.
    assert_eq!(capacity::limit(&experts(), 2.0).unwrap().nodes.len(), experts().nodes.len());
}

/// A graph whose rows have less room than its experts take, or that takes the router's choice for what is left of it, is no graph.
#[test]
fn what_does_not_fit_the_capacity_is_noticed() {
    let graph = differentiate(&capacity::limit(&experts(), 0.5).unwrap()).unwrap();
    let (gate, kept) = (value(&graph, "gate"), value(&graph, "gate.kept"));
    let mut tried = 0;
    let mut wrong = |what: String, change: &dyn Fn(&mut Graph)| {
        let mut damaged = graph.clone();
        change(&mut damaged);
        assert!(!verify_graph(&damaged).is_empty(), "{what}");
        tried += 1;
    };
    for (id, node) in graph.nodes.iter() {
        for (at, &input) in node.inputs.iter().enumerate() {
            if input == gate || input == kept {
                let other = if input == gate { kept } else { gate };
                wrong(format!("{id} takes the other gate as operand {at}"), &|g| g.nodes[id].inputs[at] = other);
            }
        }
        for &output in &node.outputs {
            if graph.values[output].ty.layout != Layout::Dense {
                for capacity in [None, Some(1), Some(3), Some(0)] {
                    wrong(format!("{id} stores {capacity:?}"), &|g| g.values[output].ty.layout = Layout::TopK { k: CHOSEN, capacity });
                }
            }
        }
        if let Op::Capacity { tokens } = node.op {
            for tokens in [0, tokens - 1, tokens + 1, TOKENS] {
                wrong(format!("{id} keeps {tokens}"), &|g| g.nodes[id].op = Op::Capacity { tokens });
            }
        }
    }
    assert!(tried > 40, "{tried} ways");
}

#[test]
fn what_has_no_capacity_says_so() {
    let limited = capacity::limit(&experts(), 0.5).unwrap();
    assert_eq!(capacity::limit(&limited, 0.5), Err(CapacityError::Already("gate.kept".into())));
    for factor in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(matches!(capacity::limit(&experts(), factor), Err(CapacityError::Factor(_))));
    }
    let mut without = experts();
    without.sequence = without.batch;
    assert_eq!(capacity::limit(&without, 0.5), Err(CapacityError::Places("gate".into())));
    let mut plain = Builder::new("plain");
    let h = plain.dim("h", 3);
    let x = plain.input("x", DType::F64, &[h]);
    plain.op("y", Op::Neg, &[x]).unwrap();
    assert_eq!(capacity::limit(&plain.graph, 0.5), Err(CapacityError::NoRouter));
}
