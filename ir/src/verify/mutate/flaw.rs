//! Flaws of the graph: what a program takes from it and cannot have wrong by itself.
//!
//! A program draws dropout and divides the loss by running nodes. It names no key and no divisor of its own, so a wrong one is a wrong node (which is
//! [`super::Damage::WrongKey`]) or a wrong graph, and that is drawn here. The same goes for what experts take, and for the backward pass itself: that it is the
//! derivative of the forward pass is the graph's to be right about ([`crate::verify::chain`]).

use super::words;
use crate::entity::{NodeId, ParamId, ValueId};
use crate::graph::{Graph, Node, Phase};
use crate::op::{Activation, Attention, Op, Rope, Router};

/// Kinds of flaws.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Flaw {
    /// A backward dropout draws with the key of another node.
    WrongKey,
    /// A backward dropout drops more than its forward node.
    WrongRate,
    /// A backward dropout masks another cotangent.
    WrongMask,
    /// The loss is a plain sum.
    NoDivisor,
    /// A forward value stands where a cotangent should: what follows has the divisor not once.
    DropDivisor,
    /// A cotangent stands where a forward value should: what follows has the divisor twice.
    RepeatDivisor,
    /// A backward pass starts from another node too.
    OtherSeed,
    /// Two parameters have each other's gradients.
    WrongParam,
    DropContribution,
    RepeatContribution,
    /// Experts take more tokens of a sequence than their rows have room for, or fewer.
    WrongCapacity,
    /// What takes the gate that is left takes the router's, or the other way round.
    OtherGate,
    /// A backward node computes the derivative of another function.
    OtherDerivative,
    /// A derivative is taken at other values.
    OtherPoint,
    /// A cotangent lacks the term of one use.
    DropTerm,
    /// A cotangent has the term of one use in place of another's.
    RepeatTerm,
    /// A cotangent is that of another value.
    OtherCotangent,
}

impl Flaw {
    pub const ALL: [Flaw; 17] = [
        Flaw::WrongKey,
        Flaw::WrongRate,
        Flaw::WrongMask,
        Flaw::NoDivisor,
        Flaw::DropDivisor,
        Flaw::RepeatDivisor,
        Flaw::OtherSeed,
        Flaw::WrongParam,
        Flaw::DropContribution,
        Flaw::RepeatContribution,
        Flaw::WrongCapacity,
        Flaw::OtherGate,
        Flaw::OtherDerivative,
        Flaw::OtherPoint,
        Flaw::DropTerm,
        Flaw::RepeatTerm,
        Flaw::OtherCotangent,
    ];

    /// In words: `wrong key`.
    pub fn name(self) -> String {
        words(&format!("{self:?}"))
    }

    /// The graph with one such flaw, and where it is; `None` if the graph has no place for it.
    pub fn apply(self, graph: &Graph, pick: u64) -> Option<(Graph, String)> {
        let mut draw = Draw { graph, pick };
        let mut flawed = graph.clone();
        let at = match self {
            Flaw::WrongKey => {
                let node = draw.one(draw.dropouts(Phase::InputGrad))?;
                let mut others = draw.dropouts(Phase::Forward);
                others.retain(|&other| other != graph.nodes[node].origin);
                flawed.nodes[node].origin = draw.one(others)?;
                node.to_string()
            }
            Flaw::WrongRate => {
                let node = draw.one(draw.dropouts(Phase::InputGrad))?;
                if let Op::Dropout { rate } = &mut flawed.nodes[node].op {
                    *rate = (1.0 + *rate) / 2.0;
                }
                node.to_string()
            }
            Flaw::WrongMask => {
                let node = draw.one(draw.dropouts(Phase::InputGrad))?;
                flawed.nodes[node].inputs[0] = draw.other(node, graph.nodes[node].inputs[0], |phase| phase != Phase::Forward)?;
                node.to_string()
            }
            Flaw::NoDivisor => {
                let node = graph.producer(graph.loss?)?;
                flawed.nodes[node].op = Op::SumLeading { keep: 0 };
                node.to_string()
            }
            Flaw::DropDivisor => draw.replace(&mut flawed, |phase| phase != Phase::Forward, |phase| phase == Phase::Forward)?,
            Flaw::RepeatDivisor => draw.replace(&mut flawed, |phase| phase == Phase::Forward, |phase| phase != Phase::Forward)?,
            Flaw::OtherSeed => {
                let one = |(id, n): (NodeId, &crate::graph::Node)| {
                    (n.phase == Phase::InputGrad && n.outputs.len() == 1 && n.op != Op::MeanGrad).then_some(id)
                };
                let node = draw.one(graph.nodes.iter().filter_map(one).collect())?;
                flawed.nodes[node].op = Op::MeanGrad;
                flawed.nodes[node].inputs.clear();
                node.to_string()
            }
            Flaw::WrongParam => {
                let dims = |p: ParamId| &graph.values[graph.params[p].value].ty.dims;
                let all = graph.params.ids().flat_map(|a| graph.params.ids().map(move |b| (a, b)));
                let (a, b) = draw.one(all.filter(|&(a, b)| a < b && dims(a) == dims(b)).collect())?;
                (flawed.grads[a], flawed.grads[b]) = (graph.grads[b].clone(), graph.grads[a].clone());
                format!("{a} and {b}")
            }
            Flaw::DropContribution => {
                let param = draw.one(graph.params.ids().filter(|&p| !graph.grads[p].is_empty()).collect())?;
                flawed.grads[param].pop();
                param.to_string()
            }
            Flaw::RepeatContribution => {
                let param = draw.one(graph.params.ids().filter(|&p| !graph.grads[p].is_empty()).collect())?;
                flawed.grads[param].push(graph.grads[param][0]);
                param.to_string()
            }
            Flaw::WrongCapacity => {
                let node = draw.one(draw.capacities())?;
                let by = draw.one(vec![true, false])?;
                if let Op::Capacity { tokens } = &mut flawed.nodes[node].op {
                    *tokens = if by { *tokens + 1 } else { *tokens - 1 };
                }
                node.to_string()
            }
            Flaw::OtherGate => {
                let limit = draw.one(draw.capacities())?;
                let gates = [graph.nodes[limit].inputs[0], graph.nodes[limit].outputs[0]];
                let operands = graph.nodes.iter().flat_map(|(id, n)| (0..n.inputs.len()).map(move |at| (id, at)));
                let (node, at) = draw.one(operands.filter(|&(id, at)| gates.contains(&graph.nodes[id].inputs[at])).collect())?;
                let is = graph.nodes[node].inputs[at];
                flawed.nodes[node].inputs[at] = if is == gates[0] { gates[1] } else { gates[0] };
                format!("{node} operand {at}")
            }
            Flaw::OtherDerivative => {
                let other = |(id, n): (NodeId, &Node)| (n.phase != Phase::Forward && another(&n.op).is_some()).then_some(id);
                let node = draw.one(graph.nodes.iter().filter_map(other).collect())?;
                flawed.nodes[node].op = another(&graph.nodes[node].op)?;
                node.to_string()
            }
            Flaw::OtherPoint => draw.replace(&mut flawed, |phase| phase == Phase::Forward, |phase| phase == Phase::Forward)?,
            Flaw::DropTerm => {
                let sum = draw.one(draw.sums())?;
                let (result, only) = (graph.nodes[sum].outputs[0], graph.nodes[sum].inputs[0]);
                let taken = flawed.nodes.iter_mut().flat_map(|(_, n)| &mut n.inputs);
                let named = flawed.cotangents.iter_mut().filter_map(|(_, c)| c.as_mut());
                taken.chain(named).filter(|v| **v == result).for_each(|v| *v = only);
                sum.to_string()
            }
            Flaw::RepeatTerm => {
                let sum = draw.one(draw.sums())?;
                flawed.nodes[sum].inputs[0] = graph.nodes[sum].inputs[1];
                sum.to_string()
            }
            Flaw::OtherCotangent => draw.replace(&mut flawed, |phase| phase != Phase::Forward, |phase| phase != Phase::Forward)?,
        };
        Some((flawed, at))
    }
}

/// An op of the same operands and results that computes something else.
fn another(op: &Op) -> Option<Op> {
    let off = |eps: f64| 2.0 * eps + 1e-3;
    match op {
        Op::ActGrad(f) => Some(Op::ActGrad(if *f == Activation::Relu { Activation::Silu } else { Activation::Relu })),
        Op::GatedGrad(f) => Some(Op::GatedGrad(if *f == Activation::Relu { Activation::Silu } else { Activation::Relu })),
        Op::RmsNormGradInput { eps } => Some(Op::RmsNormGradInput { eps: off(*eps) }),
        Op::RmsNormGradWeight { eps } => Some(Op::RmsNormGradWeight { eps: off(*eps) }),
        Op::LayerNormGradInput { eps } => Some(Op::LayerNormGradInput { eps: off(*eps) }),
        Op::LayerNormGradWeight { eps } => Some(Op::LayerNormGradWeight { eps: off(*eps) }),
        Op::Rope(rope) => Some(Op::Rope(Rope { scale: 2.0 * rope.scale, ..rope.clone() })),
        Op::AttentionGrad(a) => Some(Op::AttentionGrad(Attention { scale: 2.0 * a.scale, ..*a })),
        Op::TopKGateGrad(r) => Some(Op::TopKGateGrad(Router { scale: 2.0 * r.scale, ..*r })),
        Op::Add => Some(Op::Sub),
        _ => None,
    }
}

/// Draws from a pick, digit by digit.
struct Draw<'g> {
    graph: &'g Graph,
    pick: u64,
}

impl Draw<'_> {
    fn one<T: Copy>(&mut self, of: Vec<T>) -> Option<T> {
        let n = of.len().max(1) as u64;
        let at = (self.pick % n) as usize;
        self.pick /= n;
        of.get(at).copied()
    }
    fn dropouts(&self, phase: Phase) -> Vec<NodeId> {
        let is = |n: &crate::graph::Node| n.phase == phase && matches!(n.op, Op::Dropout { .. });
        self.graph.nodes.iter().filter(|(_, n)| is(n)).map(|(id, _)| id).collect()
    }
    /// Sums of cotangents.
    fn sums(&self) -> Vec<NodeId> {
        self.graph.nodes.iter().filter(|(_, n)| n.phase != Phase::Forward && n.op == Op::Add).map(|(id, _)| id).collect()
    }
    fn capacities(&self) -> Vec<NodeId> {
        self.graph.nodes.iter().filter(|(_, n)| matches!(n.op, Op::Capacity { .. })).map(|(id, _)| id).collect()
    }
    /// Another value of the same type that is made before a node, in some phases.
    fn other(&mut self, node: NodeId, value: ValueId, made: impl Fn(Phase) -> bool) -> Option<ValueId> {
        let graph = self.graph;
        let fits = |v: ValueId| {
            let producer = graph.producer(v).filter(|&p| p < node);
            v != value && graph.values[v].ty == graph.values[value].ty && producer.is_some_and(|p| made(graph.nodes[p].phase))
        };
        self.one(graph.values.ids().filter(|&v| fits(v)).collect())
    }
    /// Lets a backward node take a value of other phases for one of some phases.
    fn replace(&mut self, flawed: &mut Graph, was: impl Fn(Phase) -> bool, is: impl Fn(Phase) -> bool) -> Option<String> {
        let graph = self.graph;
        let backward = graph.nodes.iter().filter(|(_, n)| n.phase != Phase::Forward);
        let operands = backward.flat_map(|(id, n)| (0..n.inputs.len()).map(move |at| (id, at)));
        let before = |v: ValueId| graph.producer(v).is_some_and(|p| was(graph.nodes[p].phase));
        let all: Vec<(NodeId, usize)> = operands.filter(|&(id, at)| before(graph.nodes[id].inputs[at])).collect();
        let open: Vec<(NodeId, usize)> =
            all.into_iter().filter(|&(id, at)| Draw { graph, pick: 0 }.other(id, graph.nodes[id].inputs[at], &is).is_some()).collect();
        let (node, at) = self.one(open)?;
        flawed.nodes[node].inputs[at] = self.other(node, graph.nodes[node].inputs[at], &is)?;
        Some(format!("{node} operand {at}"))
    }
}
