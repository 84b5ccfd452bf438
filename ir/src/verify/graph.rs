//! The graph verifier. It checks what [`crate::graph`] states:
//!
//! 1. *references*: every id exists, and definitions and what they define name each other; only if that holds, the rest is checked;
//! 2. *names and sizes*: names are unique, sizes are not 0, no value has more than 2⁶² elements;
//! 3. *order*: operands are defined before they are used; forward nodes come before backward nodes; input gradients need no weight gradients;
//! 4. *types*: each node keeps its op's type rule, its attributes make sense;
//! 5. *layers*: numbered without gaps, in order over forward nodes, in reverse over backward nodes; one value crosses from each to the next, forward and backward;
//! 6. *loss*: a scalar, made by a forward node of the last layer;
//! 7. *parameters*: pieces of files cover each exactly; gradients and cotangents have the types of what they are gradients of;
//! 8. *chain rule*: these are the gradients of the loss ([`super::chain`]). It is asked for where nothing else is wrong.

use std::collections::{BTreeMap, BTreeSet};

use crate::dtype::DType;
use crate::entity::{DimId, NodeId, ParamId, Table, ValueId};
use crate::graph::{Def, Graph, Init, Narrow, Param, Phase, Piece, Type};
use crate::infer;
use crate::op::Op;
use crate::text::Place;
use crate::verify::chain::{self, ChainFault};
use crate::verify::node;
use crate::verify::report::Located;

/// One thing that is wrong with a graph.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{entity}: {problem}")]
pub struct GraphError {
    pub place: Place,
    /// What the text form calls the entity at `place`.
    pub entity: String,
    pub problem: Problem,
}

impl Located for GraphError {
    fn place(&self) -> Place {
        self.place
    }
}

/// What is wrong.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Problem {
    #[error("refers to {0}, which does not exist")]
    Missing(String),
    #[error("lays out a sequence of {0} in chunks that do not divide it")]
    Zigzag(u64),
    #[error("is not defined by what it names as its definition")]
    Definition,
    #[error("has no name")]
    Unnamed,
    #[error("has the name of an earlier one")]
    Renamed,
    #[error("has size 0")]
    Empty,
    #[error("has more than 2^62 elements")]
    TooLarge,
    #[error("uses `{0}` before it is defined")]
    Order(String),
    #[error("is a forward node behind backward nodes")]
    ForwardLate,
    #[error("is an input gradient that needs weight gradient `{0}`")]
    NeedsWeightGrad(String),
    #[error("{0}")]
    Rule(String),
    #[error("result {result} should be {expected}")]
    Result { result: usize, expected: String },
    #[error("should derive from a forward node of its own layer")]
    Origin,
    #[error("is in layer {found} behind layer {before}")]
    LayerOrder { before: u32, found: u32 },
    #[error("is in layer {found}, but layer {missing} is empty")]
    LayerGap { missing: u32, found: u32 },
    #[error("uses `{value}` of layer {from}, which only layer {} may", match .pass { Pass::Forward => .from + 1, Pass::Backward => .from.saturating_sub(1) })]
    Skips { value: String, from: u32, pass: Pass },
    #[error("uses `{value}` of layer {from}, but `{boundary}` is what crosses from there: only one value may")]
    SecondBoundary { value: String, boundary: String, from: u32 },
    #[error("is in layer {0}, which uses nothing of the layer before")]
    NoBoundary(u32),
    #[error("reads forward value `{value}` of layer {from}: a backward node may read those of its own layer and its layer's input")]
    ForeignForward { value: String, from: u32 },
    #[error("has no loss")]
    NoLoss,
    #[error("is the loss, so it should be a scalar made by a forward node of the last layer")]
    Loss,
    #[error("begins with a standard deviation of {0}")]
    Init(String),
    #[error("piece {at}: {why}")]
    Piece { at: usize, why: PieceProblem },
    #[error("pieces should fill each slice of its first dim once, or be one that fills it all")]
    Pieces,
    #[error("gradient `{grad}` should have its dims, the type {dtype}, and be made by a backward node")]
    Gradient { grad: String, dtype: DType },
    #[error("{0}")]
    Chain(ChainFault),
    #[error("cotangent `{0}` should have its type")]
    Cotangent(String),
    #[error("{table} has {found} rows, not {expected}")]
    Rows { table: &'static str, found: usize, expected: usize },
}

/// Which pass a value crosses layers in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pass {
    Forward,
    Backward,
}

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PieceProblem {
    #[error("the view has other elements than the tensor")]
    View,
    #[error("narrows what is not in the view")]
    Narrow,
    #[error("has {found} elements for {expected}")]
    Elements { found: u64, expected: u64 },
}

/// Everything that is wrong with `graph`; empty if it is right.
pub fn verify_graph(graph: &Graph) -> Vec<GraphError> {
    let mut check = Check { graph, errors: Vec::new() };
    check.references();
    if check.errors.is_empty() {
        check.names();
        check.sizes();
        check.order();
        check.types();
        check.layers();
        check.loss();
        check.params();
        check.cotangents();
    }
    if check.errors.is_empty() && graph.is_differentiated() {
        chain::check(graph).into_iter().for_each(|(place, fault)| check.error(place, Problem::Chain(fault)));
    }
    check.errors
}

struct Check<'g> {
    graph: &'g Graph,
    errors: Vec<GraphError>,
}

impl Check<'_> {
    fn error(&mut self, place: Place, problem: Problem) {
        let graph = self.graph;
        let value_name = |id: ValueId| graph.values.get(id).map_or(id.to_string(), |v| format!("`{}`", v.name));
        let entity = match place {
            Place::Top => "the graph".to_string(),
            Place::Dim(id) => graph.dims.get(id).map_or(id.to_string(), |d| format!("dim `{}`", d.name)),
            Place::Value(id) => value_name(id),
            Place::Param(id) => graph.params.get(id).map_or(id.to_string(), |p| value_name(p.value)),
            Place::Node(id) => graph.nodes.get(id).and_then(|n| n.outputs.first()).map_or(id.to_string(), |&v| value_name(v)),
            other => format!("{other:?}"),
        };
        self.errors.push(GraphError { place, entity, problem });
    }

    fn name(&self, id: ValueId) -> String {
        self.graph.values[id].name.clone()
    }

    /// Ids exist, and definitions agree on both sides.
    fn references(&mut self) {
        let graph = self.graph;
        let missing = |id: &dyn std::fmt::Display| Problem::Missing(id.to_string());
        let value = |id: ValueId| graph.values.get(id).is_none();
        for dim in [graph.batch, graph.sequence].into_iter().flatten().filter(|&d| graph.dims.get(d).is_none()) {
            self.error(Place::Top, missing(&dim));
        }
        let length = graph.sequence.and_then(|d| graph.dims.get(d)).map_or(0, |d| d.size);
        if !graph.order.fits(length) {
            self.error(Place::Top, Problem::Zigzag(length));
        }
        for (id, v) in graph.values.iter() {
            for dim in v.ty.dims.iter().filter(|&&d| graph.dims.get(d).is_none()) {
                self.error(Place::Value(id), missing(dim));
            }
            let named_back = match v.def {
                Def::Input => graph.inputs.iter().filter(|&&i| i == id).count() == 1,
                Def::Param(p) => graph.params.get(p).is_some_and(|p| p.value == id),
                Def::Node(n, at) => graph.nodes.get(n).is_some_and(|n| n.outputs.get(at as usize) == Some(&id)),
            };
            if !named_back {
                self.error(Place::Value(id), Problem::Definition);
            }
        }
        for &input in &graph.inputs {
            if graph.values.get(input).is_none_or(|v| v.def != Def::Input) {
                self.error(Place::Top, missing(&input));
            }
        }
        for (id, param) in graph.params.iter() {
            if graph.values.get(param.value).is_none_or(|v| v.def != Def::Param(id)) {
                self.error(Place::Param(id), Problem::Definition);
            }
        }
        for (id, node) in graph.nodes.iter() {
            node.inputs.iter().filter(|&&v| value(v)).for_each(|v| self.error(Place::Node(id), missing(v)));
            for (at, &output) in node.outputs.iter().enumerate() {
                if graph.values.get(output).is_none_or(|v| v.def != Def::Node(id, at as u32)) {
                    self.error(Place::Node(id), Problem::Definition);
                }
            }
            if graph.nodes.get(node.origin).is_none() {
                self.error(Place::Node(id), missing(&node.origin));
            }
        }
        for (table, found, expected) in [("grads", graph.grads.len(), graph.params.len()), ("cotangents", graph.cotangents.len(), graph.values.len())]
        {
            if found != 0 && found != expected {
                self.error(Place::Top, Problem::Rows { table, found, expected });
            }
        }
        let named = graph.loss.iter().chain(graph.grads.values().flatten()).chain(graph.cotangents.values().flatten());
        named.filter(|&&v| value(v)).for_each(|v| self.error(Place::Top, missing(v)));
    }

    fn names(&mut self) {
        let graph = self.graph;
        let values = graph.values.iter().map(|(id, v)| (Place::Value(id), v.name.as_str()));
        let dims = graph.dims.iter().map(|(id, d)| (Place::Dim(id), d.name.as_str()));
        self.unique(values);
        self.unique(dims);
    }

    fn unique<'n>(&mut self, names: impl Iterator<Item = (Place, &'n str)>) {
        let mut seen = BTreeSet::new();
        for (place, name) in names {
            if name.is_empty() {
                self.error(place, Problem::Unnamed);
            } else if !seen.insert(name) {
                self.error(place, Problem::Renamed);
            }
        }
    }

    fn sizes(&mut self) {
        let graph = self.graph;
        for (id, _) in graph.dims.iter().filter(|(_, d)| d.size == 0) {
            self.error(Place::Dim(id), Problem::Empty);
        }
        for id in graph.values.ids() {
            if product(&graph.shape(id)).is_none_or(|n| n > 1 << 62) {
                self.error(Place::Value(id), Problem::TooLarge);
            }
        }
    }

    fn order(&mut self) {
        let graph = self.graph;
        let mut backward = false;
        for (id, node) in graph.nodes.iter() {
            for &input in &node.inputs {
                let Some(producer) = graph.producer(input) else { continue };
                if producer >= id {
                    self.error(Place::Node(id), Problem::Order(self.name(input)));
                } else if node.phase == Phase::InputGrad && graph.nodes[producer].phase == Phase::WeightGrad {
                    self.error(Place::Node(id), Problem::NeedsWeightGrad(self.name(input)));
                }
            }
            match node.phase {
                Phase::Forward if backward => self.error(Place::Node(id), Problem::ForwardLate),
                Phase::Forward => {}
                Phase::InputGrad | Phase::WeightGrad => backward = true,
            }
            let origin = &graph.nodes[node.origin];
            let right = match node.phase {
                Phase::Forward => node.origin == id,
                Phase::InputGrad | Phase::WeightGrad => origin.phase == Phase::Forward && origin.layer == node.layer,
            };
            if !right {
                self.error(Place::Node(id), Problem::Origin);
            }
        }
    }

    fn types(&mut self) {
        let graph = self.graph;
        for (id, node) in graph.nodes.iter() {
            let ty = |&v: &ValueId| &graph.values[v].ty;
            let ins: Vec<_> = node.inputs.iter().map(ty).collect();
            let outs: Vec<_> = node.outputs.iter().map(ty).collect();
            let before = self.errors.len();
            if let Op::Einsum(spec) | Op::ExpertEinsum(spec) = &node.op
                && let Err(why) = spec.check()
            {
                self.error(Place::Node(id), Problem::Rule(why));
            }
            if let Err(why) = infer::check(&node.op, &ins, &outs) {
                self.error(Place::Node(id), Problem::Rule(why));
            }
            if self.errors.len() > before {
                continue;
            }
            for why in [node::attributes(graph, node), node::routing(graph, node)].into_iter().flatten() {
                self.error(Place::Node(id), Problem::Rule(why));
            }
            // Of ops whose results follow from their operands; the layout of routed rows is the gate's.
            if node.phase == Phase::Forward
                && let Ok(results) = infer::results(&node.op, &ins)
            {
                let float = |t: &&Type| t.dtype != DType::I32;
                let mut floats = ins.iter().enumerate().filter(|(_, t)| float(t));
                if let Some((_, first)) = floats.next()
                    && let Some((at, other)) = floats.find(|(_, t)| t.dtype != first.dtype)
                {
                    self.error(Place::Node(id), Problem::Rule(format!("operand {at} is {}, but the first is {}", other.dtype, first.dtype)));
                }
                for (at, (expected, found)) in results.iter().zip(&outs).enumerate() {
                    if (expected.dtype, &expected.dims) != (found.dtype, &found.dims) {
                        self.error(Place::Node(id), Problem::Result { result: at, expected: self.spell(expected.dtype, &expected.dims) });
                    }
                }
            }
        }
    }

    fn spell(&self, dtype: DType, dims: &[DimId]) -> String {
        let dims: Vec<&str> = dims.iter().map(|&d| self.graph.dims[d].name.as_str()).collect();
        format!("{dtype}[{}]", dims.join(", "))
    }

    fn layers(&mut self) {
        let graph = self.graph;
        let (mut forward, mut backward) = (None, None);
        for (id, node) in graph.nodes.iter() {
            let last: &mut Option<u32> = if node.phase == Phase::Forward { &mut forward } else { &mut backward };
            let before = last.replace(node.layer).unwrap_or(node.layer);
            let late = if node.phase == Phase::Forward { node.layer < before } else { node.layer > before };
            if late {
                self.error(Place::Node(id), Problem::LayerOrder { before, found: node.layer });
            }
        }
        let used: BTreeSet<u32> = graph.forward_nodes().map(|(_, n)| n.layer).collect();
        for (expected, &found) in (0..).zip(&used) {
            if found != expected {
                let first = graph.forward_nodes().find(|(_, n)| n.layer == found).map_or(Place::Top, |(id, _)| Place::Node(id));
                return self.error(first, Problem::LayerGap { missing: expected, found });
            }
        }
        let boundary = self.crossings(Pass::Forward);
        self.crossings(Pass::Backward);
        for (id, node) in graph.nodes.iter().filter(|(_, n)| n.phase != Phase::Forward) {
            for &value in &node.inputs {
                let Some(from) = graph.producer(value).map(|p| &graph.nodes[p]).filter(|n| n.phase == Phase::Forward) else { continue };
                let input = from.layer + 1 == node.layer && boundary.get(&from.layer) == Some(&value);
                if from.layer != node.layer && !input {
                    self.error(Place::Node(id), Problem::ForeignForward { value: self.name(value), from: from.layer });
                }
            }
        }
        for layer in 1..used.len() as u32 {
            if !boundary.contains_key(&(layer - 1)) {
                let first = graph.forward_nodes().find(|(_, n)| n.layer == layer).map_or(Place::Top, |(id, _)| Place::Node(id));
                self.error(first, Problem::NoBoundary(layer));
            }
        }
    }

    /// The one value of each layer that the layer behind it (in the direction of the pass) uses.
    fn crossings(&mut self, pass: Pass) -> BTreeMap<u32, ValueId> {
        let graph = self.graph;
        let in_pass = |id: NodeId| (graph.nodes[id].phase == Phase::Forward) == (pass == Pass::Forward);
        let mut crossing: BTreeMap<u32, ValueId> = BTreeMap::new();
        for (id, node) in graph.nodes.iter().filter(|&(id, _)| in_pass(id)) {
            for &value in &node.inputs {
                let Some(from) = graph.producer(value).filter(|&p| in_pass(p)).map(|p| graph.nodes[p].layer) else { continue };
                let next = match pass {
                    Pass::Forward => from.checked_add(1),
                    Pass::Backward => from.checked_sub(1),
                };
                if from == node.layer {
                    continue;
                }
                if next != Some(node.layer) {
                    self.error(Place::Node(id), Problem::Skips { value: self.name(value), from, pass });
                    continue;
                }
                let boundary = *crossing.entry(from).or_insert(value);
                if boundary != value {
                    self.error(Place::Node(id), Problem::SecondBoundary { value: self.name(value), boundary: self.name(boundary), from });
                }
            }
        }
        crossing
    }

    fn loss(&mut self) {
        let graph = self.graph;
        let Some(loss) = graph.loss else {
            return self.error(Place::Top, Problem::NoLoss);
        };
        let last = graph.layer_count().saturating_sub(1);
        let right = graph.producer(loss).is_some_and(|p| graph.nodes[p].phase == Phase::Forward && graph.nodes[p].layer == last);
        if !right || !graph.values[loss].ty.dims.is_empty() {
            self.error(Place::Value(loss), Problem::Loss);
        }
    }

    fn params(&mut self) {
        for (id, param) in self.graph.params.iter() {
            if let Init::Normal { std } = param.init
                && !(std.is_finite() && std >= 0.0)
            {
                self.error(Place::Param(id), Problem::Init(std.to_string()));
            }
            self.pieces(id, param);
            self.gradients(id, param);
        }
    }

    fn pieces(&mut self, id: ParamId, param: &Param) {
        let shape = self.graph.shape(param.value);
        let rest = shape.get(1..).unwrap_or_default();
        for (at, piece) in param.pieces.iter().enumerate() {
            let expected = product(if piece.at.is_some() { rest } else { &shape });
            let Some(expected) = expected else { continue };
            if let Err(why) =
                piece_elems(piece).and_then(|found| if found == expected { Ok(()) } else { Err(PieceProblem::Elements { found, expected }) })
            {
                self.error(Place::Param(id), Problem::Piece { at, why });
            }
        }
        let mut slices: Vec<Option<u64>> = param.pieces.iter().map(|p| p.at).collect();
        slices.sort_unstable();
        let sliced = !shape.is_empty() && slices.len() as u64 == shape[0] && slices.iter().zip(0..).all(|(&slice, at)| slice == Some(at));
        if !(slices.is_empty() || slices == [None] || sliced) {
            self.error(Place::Param(id), Problem::Pieces);
        }
    }

    fn gradients(&mut self, id: ParamId, param: &Param) {
        let graph = self.graph;
        let ty = &graph.values[param.value].ty;
        for &grad in graph.grads.get(id).into_iter().flatten() {
            let made = graph.producer(grad).is_some_and(|p| graph.nodes[p].phase != Phase::Forward);
            let found = &graph.values[grad].ty;
            let dtype = ty.dtype.accumulator();
            if !made || found.dims != ty.dims || found.dtype != dtype {
                self.error(Place::Param(id), Problem::Gradient { grad: self.name(grad), dtype });
            }
        }
    }

    fn cotangents(&mut self) {
        let graph = self.graph;
        let pairs: &Table<ValueId, Option<ValueId>> = &graph.cotangents;
        for (value, cotangent) in pairs.iter().filter_map(|(v, c)| c.map(|c| (v, c))) {
            if graph.values[value].ty != graph.values[cotangent].ty {
                self.error(Place::Value(value), Problem::Cotangent(self.name(cotangent)));
            }
        }
    }
}

fn product(sizes: &[u64]) -> Option<u64> {
    sizes.iter().try_fold(1u64, |n, &size| n.checked_mul(size))
}

/// Elements that a piece takes from its file.
fn piece_elems(piece: &Piece) -> Result<u64, PieceProblem> {
    let all = product(&piece.view).filter(|_| product(&piece.shape) == product(&piece.view)).ok_or(PieceProblem::View)?;
    let Some(Narrow { dim, start, len }) = piece.narrow else { return Ok(all) };
    let size = *piece.view.get(dim as usize).ok_or(PieceProblem::Narrow)?;
    if start.checked_add(len).is_none_or(|end| end > size) || size == 0 {
        return Err(PieceProblem::Narrow);
    }
    Ok(all / size * len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entity::Table;
    use crate::text::arbitrary::{self, Rng};

    #[test]
    fn nonsense_is_wrong_but_never_a_panic() {
        for seed in 0..600 {
            let mut rng = Rng(seed);
            let mut graph = arbitrary::graph(1 + seed as usize % 40, &mut rng);
            if rng.coin() {
                // Sizes that overflow, and all dims alike, so that more type rules are reached.
                graph.dims = graph.dims.map(|_, d| crate::graph::Dim { name: d.name.clone(), size: d.size.wrapping_mul(1 << 40) });
                graph.values.iter_mut().for_each(|(_, v)| v.ty.dims.fill(DimId(0)));
            }
            match rng.below(4) {
                0 => graph.loss = Some(ValueId(rng.next() as u32)),
                1 => graph.grads = Table::filled(rng.below(9) as usize, vec![ValueId(rng.next() as u32)]),
                _ => {}
            }
            assert!(!verify_graph(&graph).is_empty(), "seed {seed}: this cannot be right");
        }
    }

    #[test]
    fn broken_references_are_all_listed() {
        let text = "graph \"g\" dim b = 1 input %x: f32[b] layer 0 { %y = neg (%x): f32[b] %l = mean (%y): f32[] } loss %l";
        let good = crate::text::parse_graph(text).expect("good text");
        assert_eq!(verify_graph(&good), []);
        let mut bad = good.clone();
        bad.nodes[NodeId(0)].inputs[0] = ValueId(77);
        bad.nodes[NodeId(1)].origin = NodeId(9);
        bad.values[ValueId(1)].ty.dims[0] = DimId(5);
        bad.values[ValueId(2)].def = Def::Param(ParamId(3));
        bad.loss = Some(ValueId(8));
        let errors: Vec<String> = verify_graph(&bad).iter().map(ToString::to_string).collect();
        let expected = [
            "`y`: refers to d5, which does not exist",
            "`l`: is not defined by what it names as its definition",
            "`y`: refers to %77, which does not exist",
            "`l`: is not defined by what it names as its definition",
            "`l`: refers to n9, which does not exist",
            "the graph: refers to %8, which does not exist",
        ];
        assert_eq!(errors, expected);
    }
}
