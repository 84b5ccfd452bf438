//! Differentiation: from a forward graph to the same graph with its backward pass behind it.
//!
//! For a value x let x̄ be its cotangent ∂loss/∂x. A node y = f(x₁, …) adds to each x̄ᵢ a *contribution*, one per use; x̄ is their sum. Contributions to
//! parameters are not summed here: [`Graph::grads`] lists them, and whoever runs the graph accumulates them, over uses and micro-batches alike.
//!
//! Invariants of the result:
//! - forward nodes are unchanged; backward nodes follow, layers from last to first and forward nodes in reverse order within a layer; the input gradient
//!   of a node comes before its weight gradient;
//! - the sum of several contributions is a chain of `Add`, in forward order of the uses. It stands right before the backward nodes of the producer, in
//!   its layer; but contributions to a value of an earlier layer are first summed in the layer of the users, so that one cotangent crosses;
//! - an op that passes its cotangent on unchanged (`Add`, the first operand of `AddBias`) has no backward node: operand and result share a cotangent;
//! - gradients of parameters have the accumulator type, all other cotangents the type of their value.
//!
//! The seed is the op [`Op::Mean`] that must give the loss: its derivative, `MeanGrad`, needs no operand.

use crate::entity::{NodeId, ParamId, Table, ValueId};
use crate::graph::{Def, Graph, Node, Phase, Type, Value};
use crate::op::{Activation, Attention, Correction, Documents, Op, Rope, Rotation, Spec};
use std::collections::{BTreeMap, BTreeSet};

/// Why a graph has no derivative.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GradError {
    #[error("the graph has no loss")]
    NoLoss,
    #[error("the loss must be the result of `mean`")]
    LossNotMean,
    #[error("the graph already has a backward pass")]
    AlreadyDifferentiated,
    #[error("the loss does not depend on: {}", .params.join(", "))]
    Unreachable { params: Vec<String> },
    #[error("`{result}`: its op has no derivative here, and a parameter depends on it")]
    NotDifferentiable { result: String },
    #[error("`{result}` is a result that the loss must depend on, or not depend on, together with the other results of its op")]
    Results { result: String },
    #[error("layer {layer} only adds to what it is given: `{value}` and its cotangent would pass through unchanged")]
    PassThrough { layer: u32, value: String },
}

/// The graph with its backward pass.
///
/// # Errors
/// See [`GradError`].
pub fn differentiate(graph: &Graph) -> Result<Graph, GradError> {
    let loss = graph.loss.ok_or(GradError::NoLoss)?;
    if graph.nodes.values().any(|n| n.phase != Phase::Forward) {
        return Err(GradError::AlreadyDifferentiated);
    }
    if !graph.producer(loss).is_some_and(|p| graph.nodes[p].op == Op::Mean) {
        return Err(GradError::LossNotMean);
    }
    let uses = active_uses(graph, loss)?;
    let mut backward = Backward {
        names: graph.values.values().map(|v| v.name.clone()).collect(),
        pending: BTreeMap::new(),
        cotangents: BTreeMap::new(),
        out: graph.clone(),
        uses,
    };
    let mut layer = graph.layer_count();
    for id in graph.nodes.ids().rev() {
        let node = &graph.nodes[id];
        if node.layer < layer {
            backward.leave_layer(layer)?;
            layer = node.layer;
        }
        backward.node(id, node)?;
    }
    Ok(backward.finish())
}

/// An operand of a node.
type Use = (NodeId, usize);

/// For every value that has a cotangent, in forward order, the uses that contribute to it. The loss is in it, without uses.
fn active_uses(graph: &Graph, loss: ValueId) -> Result<BTreeMap<ValueId, Vec<Use>>, GradError> {
    let mut depends = graph.values.map(|_, v| matches!(v.def, Def::Param(_)));
    for node in graph.nodes.values() {
        let any = node.inputs.iter().enumerate().any(|(at, &v)| depends[v] && has_derivative(&node.op, at));
        node.outputs.iter().for_each(|&v| depends[v] = any);
    }
    let mut reaches = graph.values.map(|id, _| id == loss);
    for node in graph.nodes.values().rev() {
        if node.outputs.iter().any(|&v| reaches[v]) {
            node.inputs.iter().enumerate().filter(|&(at, _)| has_derivative(&node.op, at)).for_each(|(_, &v)| reaches[v] = true);
        }
    }
    let missing: Vec<String> = graph.params.values().filter(|p| !reaches[p.value]).map(|p| graph.values[p.value].name.clone()).collect();
    if !missing.is_empty() {
        return Err(GradError::Unreachable { params: missing });
    }
    let mut uses: BTreeMap<ValueId, Vec<Use>> = graph.values.ids().filter(|&v| depends[v] && reaches[v]).map(|v| (v, Vec::new())).collect();
    for (id, node) in graph.nodes.iter().filter(|(_, n)| n.outputs.iter().any(|&v| reaches[v])) {
        for (at, value) in node.inputs.iter().enumerate().filter(|&(at, _)| has_derivative(&node.op, at)) {
            if let Some(list) = uses.get_mut(value) {
                list.push((id, at));
            }
        }
    }
    Ok(uses)
}

/// Whether the results depend smoothly on operand `at`: not on token ids, nor on which rows a gate chooses.
fn has_derivative(op: &Op, at: usize) -> bool {
    match op {
        Op::Embed | Op::CeStats | Op::Dispatch | Op::Undispatch => at == 0,
        Op::ExpertEinsum(_) | Op::AddExpertBias => at < 2,
        Op::ExpertBiasGrad => at == 0,
        Op::Attention(_) => at < 3,
        Op::AttentionSink(_) => at < 4,
        Op::AttentionGrad(_) => at < 6,
        Op::CeStatsGrad => at != 1,
        Op::EmbedGrad => at == 1,
        Op::Einsum(_)
        | Op::AddBias
        | Op::SumLeading { .. }
        | Op::Add
        | Op::Sub
        | Op::Neg
        | Op::Dropout { .. }
        | Op::Act(_)
        | Op::ActGrad(_)
        | Op::Gated(_)
        | Op::GatedGrad(_)
        | Op::RmsNorm { .. }
        | Op::RmsNormGradInput { .. }
        | Op::RmsNormGradWeight { .. }
        | Op::LayerNorm { .. }
        | Op::LayerNormGradInput { .. }
        | Op::LayerNormGradWeight { .. }
        | Op::Rope(_)
        | Op::AddPosition
        | Op::AddPositionGrad
        | Op::Mean
        | Op::MeanGrad
        | Op::SinkGrad
        | Op::Append
        | Op::AppendGradHead
        | Op::AppendGradTail
        | Op::TopKGate(_)
        | Op::TopKGateGrad(_)
        | Op::Capacity { .. }
        | Op::CorrectionGrad
        | Op::Combine
        | Op::CombineGradRows
        | Op::CombineGradGate => true,
    }
}

struct Backward {
    /// The forward graph, growing.
    out: Graph,
    names: BTreeSet<String>,
    /// Uses that contribute to each value that has a cotangent.
    uses: BTreeMap<ValueId, Vec<Use>>,
    /// Contributions made and not yet summed.
    pending: BTreeMap<ValueId, BTreeMap<Use, ValueId>>,
    cotangents: BTreeMap<ValueId, ValueId>,
}

impl Backward {
    /// Emits the backward nodes of one forward node: first the sums of its results' cotangents, then the derivative.
    fn node(&mut self, id: NodeId, node: &Node) -> Result<(), GradError> {
        if !node.outputs.iter().any(|v| self.uses.contains_key(v)) {
            return Ok(());
        }
        for &value in &node.outputs {
            if let Some(terms) = self.pending.remove(&value) {
                let name = format!("{}.grad", self.out.values[value].name);
                let sum = self.sum(value, &name, terms.into_values().collect(), node.layer, id);
                self.cotangents.insert(value, sum);
            }
        }
        self.derivative(id, node)
    }

    /// The chain rule of one op.
    fn derivative(&mut self, id: NodeId, node: &Node) -> Result<(), GradError> {
        let x = |at: usize| node.inputs[at];
        let y = |at: usize| node.outputs[at];
        let name_of = |b: &Backward, v: ValueId| b.out.values[v].name.clone();
        if node.op == Op::Mean {
            if self.out.loss != Some(y(0)) {
                return Err(GradError::LossNotMean);
            }
            self.emit(id, Op::MeanGrad, &[], &[0]);
            return Ok(());
        }
        // Results that the op's derivative takes the cotangents of.
        let through = match node.op {
            Op::CeStats => 2,
            _ => 1,
        };
        if let Some(&odd) = node.outputs.iter().enumerate().find(|&(at, v)| self.cotangents.contains_key(v) != (at < through)).map(|(_, v)| v) {
            return Err(GradError::Results { result: name_of(self, odd) });
        }
        let dy = self.cotangents[&y(0)];
        let attended = |a: &Attention, first: usize| -> Vec<ValueId> {
            let first = (a.mask.documents == Documents::Apart).then(|| x(first));
            [x(0), x(1), x(2), y(0), y(1), dy].into_iter().chain(first).collect()
        };
        match &node.op {
            Op::Einsum(spec) => {
                for at in [0, 1] {
                    let (op, ins) = product_grad(spec, at, x(1 - at), dy);
                    self.emit(id, Op::Einsum(op), &ins, &[at]);
                }
            }
            Op::ExpertEinsum(spec) => {
                for at in [0, 1] {
                    let (op, ins) = product_grad(spec, at, x(1 - at), dy);
                    self.emit(id, Op::ExpertEinsum(op), &[ins[0], ins[1], x(2)], &[at]);
                }
            }
            Op::AddBias => {
                self.pass(id, 0, dy);
                self.emit(id, Op::SumLeading { keep: self.rank(x(1)) }, &[dy], &[1]);
            }
            Op::Add => {
                self.pass(id, 0, dy);
                self.pass(id, 1, dy);
            }
            Op::Sub => {
                self.pass(id, 0, dy);
                self.emit(id, Op::Neg, &[dy], &[1]);
            }
            Op::Neg => self.emit(id, Op::Neg, &[dy], &[0]),
            Op::Dropout { rate } => self.emit(id, Op::Dropout { rate: *rate }, &[dy], &[0]),
            Op::Act(f) => self.emit(id, Op::ActGrad(*f), &[x(0), dy], &[0]),
            Op::Gated(f) => self.emit(id, Op::GatedGrad(*f), &[x(0), x(1), dy], &[0, 1]),
            Op::RmsNorm { eps } => {
                self.emit(id, Op::RmsNormGradInput { eps: *eps }, &[x(0), x(1), dy], &[0]);
                self.emit(id, Op::RmsNormGradWeight { eps: *eps }, &[x(0), dy], &[1]);
            }
            Op::LayerNorm { eps } => {
                self.emit(id, Op::LayerNormGradInput { eps: *eps }, &[x(0), x(1), dy], &[0]);
                self.emit(id, Op::LayerNormGradWeight { eps: *eps }, &[x(0), dy], &[1, 2]);
            }
            Op::Rope(rope) => {
                let rotation = match rope.rotation {
                    Rotation::Forward => Rotation::Inverse,
                    Rotation::Inverse => Rotation::Forward,
                };
                self.emit(id, Op::Rope(Rope { rotation, ..rope.clone() }), &[dy], &[0]);
            }
            Op::Attention(a) => self.emit(id, Op::AttentionGrad(*a), &attended(a, 3), &[0, 1, 2]),
            Op::AttentionSink(a) => {
                self.emit(id, Op::AttentionGrad(*a), &attended(a, 4), &[0, 1, 2]);
                self.emit(id, Op::SinkGrad, &[x(3), y(0), y(1), dy], &[3]);
            }
            Op::Append => {
                self.emit(id, Op::AppendGradHead, &[dy], &[0]);
                self.emit(id, Op::AppendGradTail, &[dy], &[1]);
            }
            Op::Embed => self.emit(id, Op::EmbedGrad, &[x(1), dy], &[0]),
            Op::AddPosition => {
                self.pass(id, 0, dy);
                self.emit(id, Op::AddPositionGrad, &[dy], &[1]);
            }
            Op::CeStats => self.emit(id, Op::CeStatsGrad, &[x(0), x(1), y(0), dy, self.cotangents[&y(1)]], &[0]),
            Op::TopKGate(router) => {
                self.emit(id, Op::TopKGateGrad(*router), &[x(0), y(0), dy], &[0]);
                if router.correction == Correction::Added {
                    self.emit(id, Op::CorrectionGrad, &[dy], &[1]);
                }
            }
            // One where the result is positive, and zero where it is zero.
            Op::Capacity { .. } => self.emit(id, Op::ActGrad(Activation::Relu), &[y(0), dy], &[0]),
            Op::AddExpertBias => {
                self.pass(id, 0, dy);
                self.emit(id, Op::ExpertBiasGrad, &[dy, x(2)], &[1]);
            }
            Op::Dispatch => self.emit(id, Op::Undispatch, &[dy, x(1)], &[0]),
            Op::Undispatch => self.emit(id, Op::Dispatch, &[dy, x(1)], &[0]),
            Op::Combine => {
                self.emit(id, Op::CombineGradRows, &[dy, x(1)], &[0]);
                self.emit(id, Op::CombineGradGate, &[dy, x(0), x(1)], &[1]);
            }
            Op::Mean
            | Op::MeanGrad
            | Op::SumLeading { .. }
            | Op::ActGrad(_)
            | Op::GatedGrad(_)
            | Op::RmsNormGradInput { .. }
            | Op::RmsNormGradWeight { .. }
            | Op::LayerNormGradInput { .. }
            | Op::LayerNormGradWeight { .. }
            | Op::AttentionGrad(_)
            | Op::EmbedGrad
            | Op::AddPositionGrad
            | Op::CeStatsGrad
            | Op::SinkGrad
            | Op::AppendGradHead
            | Op::AppendGradTail
            | Op::TopKGateGrad(_)
            | Op::CorrectionGrad
            | Op::ExpertBiasGrad
            | Op::CombineGradRows
            | Op::CombineGradGate => return Err(GradError::NotDifferentiable { result: name_of(self, y(0)) }),
        }
        Ok(())
    }

    /// Emits a node whose results are the contributions of forward node `of` to its operands `targets`; nothing if none of them has a cotangent.
    fn emit(&mut self, of: NodeId, op: Op, inputs: &[ValueId], targets: &[usize]) {
        let operands: Vec<ValueId> = targets.iter().map(|&at| self.out.nodes[of].inputs[at]).collect();
        let wanted: Vec<ValueId> = operands.iter().copied().filter(|v| self.uses.contains_key(v)).collect();
        if wanted.is_empty() {
            return;
        }
        let phase = if wanted.iter().all(|&v| self.out.param_of(v).is_some()) { Phase::WeightGrad } else { Phase::InputGrad };
        let node = NodeId(self.out.nodes.len() as u32);
        let mut outputs = Vec::new();
        for (result, (&at, &value)) in targets.iter().zip(&operands).enumerate() {
            let name = match self.uses.get(&value) {
                Some(uses) if uses.len() > 1 => {
                    let nth = uses.iter().position(|&u| u == (of, at)).unwrap_or(0);
                    format!("{}.grad.{nth}", self.out.values[value].name)
                }
                _ => format!("{}.grad", self.out.values[value].name),
            };
            let contribution = self.value(&name, self.grad_type(value), Def::Node(node, result as u32));
            outputs.push(contribution);
            self.contribute((of, at), value, contribution);
        }
        let layer = self.out.nodes[of].layer;
        self.out.nodes.push(Node { op, inputs: inputs.to_vec(), outputs, layer, phase, origin: of });
    }

    /// The cotangent of the result is also the contribution to operand `at`.
    fn pass(&mut self, of: NodeId, at: usize, dy: ValueId) {
        let value = self.out.nodes[of].inputs[at];
        if self.out.param_of(value).is_some() {
            // A parameter's gradient has its own type and buffer: summing over no dim is a copy.
            self.emit(of, Op::SumLeading { keep: self.rank(value) }, &[dy], &[at]);
        } else {
            self.contribute((of, at), value, dy);
        }
    }

    fn contribute(&mut self, of: Use, value: ValueId, contribution: ValueId) {
        if self.uses.contains_key(&value) {
            self.pending.entry(value).or_default().insert(of, contribution);
        }
    }

    /// Sums what the nodes of `layer` contribute to values of earlier layers.
    fn leave_layer(&mut self, layer: u32) -> Result<(), GradError> {
        let earlier = |b: &Backward, v: ValueId| b.out.producer(v).is_some_and(|p| b.out.nodes[p].layer < layer);
        let crossing: Vec<ValueId> = self.pending.keys().copied().filter(|&v| earlier(self, v)).collect();
        for value in crossing {
            let terms = self.pending.remove(&value).unwrap_or_default();
            let Some((&first, &term)) = terms.first_key_value() else { continue };
            // What the next layer gave back must not go through this one untouched: the cotangents of two boundaries would be one value.
            if terms.len() == 1 && self.out.producer(term).is_some_and(|p| self.out.nodes[p].layer > layer) {
                return Err(GradError::PassThrough { layer, value: self.out.values[value].name.clone() });
            }
            let others = self.uses[&value].len() > terms.len();
            let name = format!("{}.grad{}", self.out.values[value].name, if others { ".next" } else { "" });
            let sum = self.sum(value, &name, terms.into_values().collect(), layer, first.0);
            self.pending.entry(value).or_default().insert(first, sum);
        }
        Ok(())
    }

    /// A chain of `Add` over contributions to `value`; the last is called `name`.
    fn sum(&mut self, value: ValueId, name: &str, terms: Vec<ValueId>, layer: u32, origin: NodeId) -> ValueId {
        let count = terms.len();
        let add = |(at, left): (usize, ValueId), right: ValueId| {
            let node = NodeId(self.out.nodes.len() as u32);
            let name = if at + 2 == count { name.to_string() } else { format!("{name}.sum.{at}") };
            let sum = self.value(&name, self.out.values[value].ty.clone(), Def::Node(node, 0));
            self.out.nodes.push(Node { op: Op::Add, inputs: vec![left, right], outputs: vec![sum], layer, phase: Phase::InputGrad, origin });
            (at + 1, sum)
        };
        let mut terms = terms.into_iter();
        // A value is summed only when something contributed to it.
        let first = terms.next().expect("a cotangent has a contribution");
        terms.fold((0, first), add).1
    }

    fn value(&mut self, name: &str, ty: Type, def: Def) -> ValueId {
        let mut unique = name.to_string();
        let mut n = 1;
        while !self.names.insert(unique.clone()) {
            n += 1;
            unique = format!("{name}_{n}");
        }
        self.out.values.push(Value { name: unique, ty, def })
    }

    fn grad_type(&self, value: ValueId) -> Type {
        let mut ty = self.out.values[value].ty.clone();
        if self.out.param_of(value).is_some() {
            ty.dtype = ty.dtype.accumulator();
        }
        ty
    }

    fn rank(&self, value: ValueId) -> u32 {
        self.out.values[value].ty.dims.len() as u32
    }

    fn finish(mut self) -> Graph {
        let contributions = |p: ParamId| -> Vec<ValueId> {
            self.pending.get(&self.out.params[p].value).map(|terms| terms.values().copied().collect()).unwrap_or_default()
        };
        let grads: Table<ParamId, Vec<ValueId>> = self.out.params.ids().map(contributions).collect();
        self.out.cotangents = self.out.values.ids().map(|v| self.cotangents.get(&v).copied()).collect();
        self.out.grads = grads;
        self.out
    }
}

/// Derivative of a product with respect to operand `at`: the product of the result's cotangent with the other operand. Its own operands are ordered so that
/// the result's letters are those of the left operand, then those of the right.
fn product_grad(spec: &Spec, at: usize, other: ValueId, dy: ValueId) -> (Spec, [ValueId; 2]) {
    let (target, other_letters) = if at == 0 { (&spec.left, &spec.right) } else { (&spec.right, &spec.left) };
    let of_other = |l: char| other_letters.contains(l) && !spec.out.contains(l);
    let of_dy = |l: char| spec.out.contains(l) && !other_letters.contains(l);
    let other_first = match (target.chars().position(of_other), target.chars().position(of_dy)) {
        (Some(other), Some(dy)) => other < dy,
        _ => false,
    };
    let (left, right) = if other_first { (other_letters, &spec.out) } else { (&spec.out, other_letters) };
    let op = Spec { left: left.clone(), right: right.clone(), out: target.clone() };
    (op, if other_first { [other, dy] } else { [dy, other] })
}
