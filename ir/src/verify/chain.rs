//! The chain rule: the backward pass gives the gradient of the loss.
//!
//! A value has a *cotangent* if the loss depends smoothly on it, and it on a parameter. With ȳ for the cotangent of y,
//!
//! ```text
//! x̄ = Σ over every use of x, as operand i of a node y = f(…, x, …), of  (∂f/∂xᵢ)ᵀ ȳ        and of the loss, the mean: 1
//! ```
//!
//! For each op, [`rules`] says which op of which operands gives the terms of which of its own operands; where ∂f/∂xᵢ is the identity the term is ȳ itself. It is a
//! table of its own, not what [`crate::grad`] differentiates with. What is checked:
//! 1. every backward node is what a rule asks for of the node that it derives from, or the sum or a copy of backward values: so it has a meaning, the terms that it stands for;
//! 2. every cotangent, and the gradients of every parameter together, stand for the terms of all uses, each once;
//! 3. `mean` makes the loss and nothing else, nothing is computed from the loss, and nothing has a part in it by an op, or a result of one, that there is no rule for.
//!
//! Nodes are in the order of their operands, so by induction from the loss every cotangent is the gradient of the loss, and has its divisor and the scale of the loss
//! (both are [`Op::MeanGrad`]'s) exactly once.

use crate::entity::{NodeId, Table, ValueId};
use crate::graph::{Graph, Node, Phase};
use crate::op::{Activation, Attention, Correction, Documents, Op, Rope, Rotation, Spec};
use crate::text::Place;

/// What is wrong with a gradient.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ChainFault {
    #[error("is no `mean`, so the loss is not divided by the step's tokens")]
    Undivided,
    #[error("divides by the step's tokens what is not the loss")]
    DividesOther,
    #[error("is computed from the loss, which has been divided")]
    FromLoss,
    #[error("is no derivative of the node that it derives from (`{0}`), nor a sum or a copy of backward values")]
    NotDerivative(String),
    #[error("has a part in the loss by a result that its op's derivative does not know: `{0}`")]
    Result(String),
    #[error("has a part in the loss, and its op has no derivative")]
    NoRule,
    #[error("has a part in the loss, so it should have a cotangent")]
    NoCotangent,
    #[error("has no part in the loss, or depends on no parameter, so it should have no cotangent")]
    Idle,
    #[error("its gradient lacks what `{user}` makes of its operand {operand}")]
    Lacks { user: String, operand: usize },
    #[error("its gradient has `{0}` in it, which is no part of it, or no more")]
    Extra(String),
}

/// All faults of a differentiated graph's gradients. Types and order of the graph are right.
pub fn check(graph: &Graph) -> Vec<(Place, ChainFault)> {
    let rules = graph.nodes.map(|_, node| if node.phase == Phase::Forward { rules(graph, node) } else { Vec::new() });
    let active = active(graph, &rules);
    let uses = uses(graph, &rules, &active);
    let mut check = Check { graph, rules, active, uses, faults: Vec::new() };
    check.loss();
    check.meanings();
    check.gradients();
    check.faults
}

/// How operands of a node get their terms.
enum Rule {
    /// The term of this operand is the cotangent of the first result.
    Same(usize),
    /// These operands' terms are the results of a node of this op and operands; `None` is a cotangent that is not there.
    By { op: Op, inputs: Vec<Option<ValueId>>, targets: &'static [usize] },
}

impl Rule {
    fn targets(&self) -> &[usize] {
        match self {
            Rule::Same(at) => std::slice::from_ref(at),
            Rule::By { targets, .. } => targets,
        }
    }
}

/// What the cotangent of a use is made of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Term {
    /// A backward value as it is, or a copy of it.
    Value(ValueId),
    /// What the derivative of a node gives for an operand.
    Of(NodeId, usize),
}

/// The derivative of each op, by operand.
fn rules(graph: &Graph, node: &Node) -> Vec<Rule> {
    let (x, y) = (|at: usize| node.inputs.get(at).copied(), |at: usize| node.outputs.get(at).copied());
    let bar = |at: usize| y(at).and_then(|y| graph.cotangents.get(y).copied().flatten());
    let by = |op: Op, inputs: &[Option<ValueId>], targets: &'static [usize]| Rule::By { op, inputs: inputs.to_vec(), targets };
    let rank = |at: usize| x(at).map_or(0, |v| graph.values[v].ty.dims.len());
    let attention = |a: &Attention, first: usize| {
        let first = (a.mask.documents == Documents::Apart).then(|| x(first));
        let inputs: Vec<_> = [x(0), x(1), x(2), y(0), y(1), bar(0)].into_iter().chain(first).collect();
        by(Op::AttentionGrad(*a), &inputs, &[0, 1, 2])
    };
    match &node.op {
        Op::Einsum(spec) => products(spec, [x(0), x(1)], bar(0), &[], Op::Einsum),
        Op::ExpertEinsum(spec) => products(spec, [x(0), x(1)], bar(0), &[x(2)], Op::ExpertEinsum),
        // A bias of as many dims is added as it is.
        Op::AddBias if rank(0) == rank(1) => vec![Rule::Same(0), Rule::Same(1)],
        Op::AddBias => vec![Rule::Same(0), by(Op::SumLeading { keep: rank(1) as u32 }, &[bar(0)], &[1])],
        Op::Add => vec![Rule::Same(0), Rule::Same(1)],
        Op::Sub => vec![Rule::Same(0), by(Op::Neg, &[bar(0)], &[1])],
        Op::Neg => vec![by(Op::Neg, &[bar(0)], &[0])],
        Op::Dropout { rate } => vec![by(Op::Dropout { rate: *rate }, &[bar(0)], &[0])],
        Op::Act(f) => vec![by(Op::ActGrad(*f), &[x(0), bar(0)], &[0])],
        Op::Gated(f) => vec![by(Op::GatedGrad(*f), &[x(0), x(1), bar(0)], &[0, 1])],
        Op::RmsNorm { eps } => {
            vec![by(Op::RmsNormGradInput { eps: *eps }, &[x(0), x(1), bar(0)], &[0]), by(Op::RmsNormGradWeight { eps: *eps }, &[x(0), bar(0)], &[1])]
        }
        Op::LayerNorm { eps } => {
            vec![
                by(Op::LayerNormGradInput { eps: *eps }, &[x(0), x(1), bar(0)], &[0]),
                by(Op::LayerNormGradWeight { eps: *eps }, &[x(0), bar(0)], &[1, 2]),
            ]
        }
        // A rotation's transpose turns back; a factor stays.
        Op::Rope(rope) => {
            let back = match rope.rotation {
                Rotation::Forward => Rotation::Inverse,
                Rotation::Inverse => Rotation::Forward,
            };
            vec![by(Op::Rope(Rope { rotation: back, ..rope.clone() }), &[bar(0)], &[0])]
        }
        Op::Attention(a) => vec![attention(a, 3)],
        Op::AttentionSink(a) => vec![attention(a, 4), by(Op::SinkGrad, &[x(3), y(0), y(1), bar(0)], &[3])],
        Op::Append => vec![by(Op::AppendGradHead, &[bar(0)], &[0]), by(Op::AppendGradTail, &[bar(0)], &[1])],
        Op::Embed => vec![by(Op::EmbedGrad, &[x(1), bar(0)], &[0])],
        Op::AddPosition => vec![Rule::Same(0), by(Op::AddPositionGrad, &[bar(0)], &[1])],
        Op::CeStats => vec![by(Op::CeStatsGrad, &[x(0), x(1), y(0), bar(0), bar(1)], &[0])],
        Op::Mean => vec![by(Op::MeanGrad, &[], &[0])],
        Op::TopKGate(router) => {
            let logits = by(Op::TopKGateGrad(*router), &[x(0), y(0), bar(0)], &[0]);
            match router.correction {
                Correction::No => vec![logits],
                Correction::Added => vec![logits, by(Op::CorrectionGrad, &[bar(0)], &[1])],
            }
        }
        // One where an entry is left, which is positive then, and zero where it is zero.
        Op::Capacity { .. } => vec![by(Op::ActGrad(Activation::Relu), &[y(0), bar(0)], &[0])],
        Op::AddExpertBias => vec![Rule::Same(0), by(Op::ExpertBiasGrad, &[bar(0), x(2)], &[1])],
        Op::Dispatch => vec![by(Op::Undispatch, &[bar(0), x(1)], &[0])],
        Op::Undispatch => vec![by(Op::Dispatch, &[bar(0), x(1)], &[0])],
        Op::Combine => vec![by(Op::CombineGradRows, &[bar(0), x(1)], &[0]), by(Op::CombineGradGate, &[bar(0), x(0), x(1)], &[1])],
        Op::SumLeading { .. }
        | Op::ActGrad(_)
        | Op::GatedGrad(_)
        | Op::RmsNormGradInput { .. }
        | Op::RmsNormGradWeight { .. }
        | Op::LayerNormGradInput { .. }
        | Op::LayerNormGradWeight { .. }
        | Op::AttentionGrad(_)
        | Op::SinkGrad
        | Op::AppendGradHead
        | Op::AppendGradTail
        | Op::EmbedGrad
        | Op::AddPositionGrad
        | Op::CeStatsGrad
        | Op::MeanGrad
        | Op::TopKGateGrad(_)
        | Op::CorrectionGrad
        | Op::ExpertBiasGrad
        | Op::CombineGradRows
        | Op::CombineGradGate => Vec::new(),
    }
}

/// A product's cotangent times one operand, with the letters of the other: in whichever order the two stand.
fn products(spec: &Spec, of: [Option<ValueId>; 2], bar: Option<ValueId>, more: &[Option<ValueId>], op: fn(Spec) -> Op) -> Vec<Rule> {
    let one = |letters: &str, other: &str, with: Option<ValueId>, targets: &'static [usize]| {
        let (result, operand) = ((spec.out.as_str(), bar), (other, with));
        [(result, operand), (operand, result)].map(|((left, a), (right, b))| {
            let spec = Spec { left: left.into(), right: right.into(), out: letters.into() };
            Rule::By { op: op(spec), inputs: [a, b].iter().chain(more).copied().collect(), targets }
        })
    };
    let [left, right] = of;
    one(&spec.left, &spec.right, right, &[0]).into_iter().chain(one(&spec.right, &spec.left, left, &[1])).collect()
}

/// Whether each value has a part in the loss and depends on a parameter, along operands that have rules; of an op that has none, along all, for nobody knows its derivative.
fn active(graph: &Graph, rules: &Table<NodeId, Vec<Rule>>) -> Table<ValueId, bool> {
    let smooth = |id: NodeId, at: usize| rules[id].is_empty() || rules[id].iter().any(|rule| rule.targets().contains(&at));
    let mut depends = graph.values.map(|id, _| graph.param_of(id).is_some());
    for (id, node) in graph.forward_nodes() {
        let any = node.inputs.iter().enumerate().any(|(at, &x)| depends[x] && smooth(id, at));
        node.outputs.iter().for_each(|&y| depends[y] = any);
    }
    let mut counts = graph.values.map(|id, _| Some(id) == graph.loss);
    for (id, node) in graph.nodes.iter().rev().filter(|(_, n)| n.phase == Phase::Forward) {
        if node.outputs.iter().any(|&y| counts[y]) {
            node.inputs.iter().enumerate().filter(|&(at, _)| smooth(id, at)).for_each(|(_, &x)| counts[x] = true);
        }
    }
    graph.values.map(|id, _| depends[id] && counts[id])
}

/// An operand of a node.
type Use = (NodeId, usize);

/// Of each value, those that its gradient has terms of: operands with rules, of nodes that have a part in the loss.
fn uses(graph: &Graph, rules: &Table<NodeId, Vec<Rule>>, active: &Table<ValueId, bool>) -> Table<ValueId, Vec<Use>> {
    let mut uses = graph.values.map(|_, _| Vec::new());
    for (id, node) in graph.forward_nodes().filter(|(_, n)| n.outputs.iter().any(|&y| active[y])) {
        for (at, &value) in node.inputs.iter().enumerate().filter(|(at, _)| rules[id].iter().any(|rule| rule.targets().contains(at))) {
            uses[value].push((id, at));
        }
    }
    uses
}

struct Check<'g> {
    graph: &'g Graph,
    rules: Table<NodeId, Vec<Rule>>,
    active: Table<ValueId, bool>,
    uses: Table<ValueId, Vec<Use>>,
    faults: Vec<(Place, ChainFault)>,
}

impl Check<'_> {
    fn fault(&mut self, place: Place, fault: ChainFault) {
        self.faults.push((place, fault));
    }

    fn name(&self, value: ValueId) -> String {
        self.graph.values[value].name.clone()
    }

    fn name_of(&self, node: NodeId) -> String {
        self.graph.nodes[node].outputs.first().map_or_else(|| node.to_string(), |&v| self.name(v))
    }

    /// One mean, at the end; and what has a part in it has one by results whose cotangents the rules take.
    fn loss(&mut self) {
        let graph = self.graph;
        let loss = graph.loss.and_then(|v| graph.producer(v));
        for (id, node) in graph.forward_nodes() {
            let at = Place::Node(id);
            if Some(id) == loss && node.op != Op::Mean {
                self.fault(at, ChainFault::Undivided);
            }
            if Some(id) != loss && node.op == Op::Mean {
                self.fault(at, ChainFault::DividesOther);
            }
            if node.inputs.iter().any(|&v| Some(v) == graph.loss) {
                self.fault(at, ChainFault::FromLoss);
            }
            if self.rules[id].is_empty() && node.outputs.iter().any(|&v| self.active[v]) {
                self.fault(at, ChainFault::NoRule);
            }
            let known = match node.op {
                Op::CeStats => 2,
                _ => 1,
            };
            let unknown: Vec<ValueId> = node.outputs.iter().copied().skip(known).filter(|&v| self.active[v]).collect();
            unknown.into_iter().for_each(|v| self.fault(at, ChainFault::Result(self.name(v))));
        }
    }

    /// Every backward node is of a kind that a sum of terms can be read from.
    fn meanings(&mut self) {
        let graph = self.graph;
        let is_backward = |v: &ValueId| graph.producer(*v).is_some_and(|p| graph.nodes[p].phase != Phase::Forward);
        for (id, node) in graph.nodes.iter().filter(|(_, n)| n.phase != Phase::Forward) {
            let sums = node.op == Op::Add && node.inputs.iter().all(is_backward);
            let copies = self.copied(id).is_some_and(|v| is_backward(&v));
            if !sums && !copies && self.targets(id).is_none() {
                let of = self.name_of(node.origin);
                self.fault(Place::Node(id), ChainFault::NotDerivative(of));
            }
        }
    }

    fn gradients(&mut self) {
        let graph = self.graph;
        for value in graph.values.ids().filter(|&v| Some(v) != graph.loss) {
            let place = Place::Value(value);
            match (graph.param_of(value), graph.cotangents.get(value).copied().flatten()) {
                (Some(param), None) => self.adds_up(place, value, graph.grads.get(param).map_or(&[], Vec::as_slice)),
                (None, Some(cotangent)) if self.active[value] => self.adds_up(place, value, &[cotangent]),
                (None, None) if self.active[value] => self.fault(place, ChainFault::NoCotangent),
                (_, Some(_)) => self.fault(place, ChainFault::Idle),
                (None, None) => {}
            }
        }
    }

    /// Whether these values together stand for the terms of all uses of a value. Depth first: whatever is doubled without end is soon one too many.
    fn adds_up(&mut self, place: Place, of: ValueId, values: &[ValueId]) {
        let mut left: Vec<(Term, Use)> = self.uses[of].iter().map(|&(id, at)| (self.term(id, at), (id, at))).collect();
        let mut open: Vec<ValueId> = values.to_vec();
        while let Some(value) = open.pop() {
            let mut take = |term: Term| left.iter().position(|&(t, _)| t == term).map(|at| left.swap_remove(at)).is_some();
            let Some(node) = self.graph.producer(value) else {
                return self.fault(place, ChainFault::Extra(self.name(value)));
            };
            let of = &self.graph.nodes[node];
            let result = of.outputs.iter().position(|&y| y == value);
            let term = self.targets(node).zip(result).and_then(|(targets, at)| targets.get(at)).map(|&at| Term::Of(of.origin, at));
            if take(Term::Value(value)) || term.is_some_and(&mut take) {
                continue;
            }
            match (&of.op, self.copied(node)) {
                (Op::Add, _) if of.phase != Phase::Forward => open.extend(&of.inputs),
                (_, Some(copied)) => open.push(copied),
                _ => return self.fault(place, ChainFault::Extra(self.name(value))),
            }
        }
        for (_, (user, operand)) in left {
            let user = self.name_of(user);
            self.fault(place, ChainFault::Lacks { user, operand });
        }
    }

    /// The term of a use.
    fn term(&self, id: NodeId, at: usize) -> Term {
        let same = self.rules[id].iter().any(|rule| matches!(rule, Rule::Same(same) if *same == at));
        let node = &self.graph.nodes[id];
        match node.outputs.first().and_then(|&y| self.graph.cotangents.get(y).copied().flatten()) {
            Some(bar) if same => Term::Value(bar),
            _ => Term::Of(id, at),
        }
    }

    /// The operands of its origin that a backward node gives the terms of.
    fn targets(&self, id: NodeId) -> Option<&'static [usize]> {
        let node = &self.graph.nodes[id];
        let is = |rule: &Rule| match rule {
            Rule::Same(_) => None,
            Rule::By { op, inputs, targets } => {
                (*op == node.op && inputs.iter().copied().eq(node.inputs.iter().map(|&v| Some(v)))).then_some(*targets)
            }
        };
        self.rules[node.origin].iter().find_map(is)
    }

    /// What a backward node copies, if that is all it does: a sum over no dim.
    fn copied(&self, id: NodeId) -> Option<ValueId> {
        let node = &self.graph.nodes[id];
        match (&node.op, node.inputs.first()) {
            (Op::SumLeading { keep }, Some(&v)) if node.phase != Phase::Forward && *keep as usize == self.graph.values[v].ty.dims.len() => Some(v),
            _ => None,
        }
    }
}
