//! Building a forward graph, one node at a time, with inferred types.

use crate::capacity;
use crate::dtype::DType;
use crate::entity::{DimId, NodeId, ValueId};
use crate::graph::{Def, Dim, Graph, Init, Node, Param, Phase, Piece, Type, Value};
use crate::infer;
use crate::op::Op;

/// A forward graph under construction.
#[derive(Default)]
pub struct Builder {
    pub graph: Graph,
    layer: u32,
}

impl Builder {
    pub fn new(name: &str) -> Builder {
        Builder { graph: Graph { name: name.into(), ..Graph::default() }, layer: 0 }
    }
    /// Layer of the nodes built from now on.
    pub fn set_layer(&mut self, layer: u32) {
        self.layer = layer;
    }
    pub fn dim(&mut self, name: &str, size: u64) -> DimId {
        self.graph.dims.push(Dim { name: name.into(), size })
    }
    pub fn input(&mut self, name: &str, dtype: DType, dims: &[DimId]) -> ValueId {
        let value = self.graph.values.push(Value { name: name.into(), ty: Type::dense(dtype, dims.to_vec()), def: Def::Input });
        self.graph.inputs.push(value);
        value
    }
    pub fn param(&mut self, name: &str, dtype: DType, dims: &[DimId], init: Init, pieces: Vec<Piece>) -> ValueId {
        let value = ValueId(self.graph.values.len() as u32);
        let param = self.graph.params.push(Param { value, init, pieces });
        self.graph.values.push(Value { name: name.into(), ty: Type::dense(dtype, dims.to_vec()), def: Def::Param(param) })
    }
    /// Adds a forward node; its results are called `name` (or `name.1`, … for further results).
    ///
    /// # Errors
    /// The op's type rule, in words, behind the node's name.
    pub fn node(&mut self, name: &str, op: Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, String> {
        let types: Vec<&Type> = inputs.iter().map(|&v| &self.graph.values[v].ty).collect();
        let mut results = infer::results(&op, &types).map_err(|why| format!("`{name}`: {why}"))?;
        if op == Op::Dispatch
            && let Some(layout) = capacity::layout_of(&self.graph, inputs[1])
        {
            results[0].layout = layout;
        }
        Ok(self.typed_node(name, op, inputs, results, Phase::Forward, None))
    }
    /// The single result of [`Builder::node`].
    ///
    /// # Errors
    /// As [`Builder::node`].
    pub fn op(&mut self, name: &str, op: Op, inputs: &[ValueId]) -> Result<ValueId, String> {
        self.node(name, op, inputs).map(|results| results[0])
    }
    /// Adds a node whose result types are given. `origin` is the node itself if absent.
    pub fn typed_node(&mut self, name: &str, op: Op, inputs: &[ValueId], results: Vec<Type>, phase: Phase, origin: Option<NodeId>) -> Vec<ValueId> {
        let id = NodeId(self.graph.nodes.len() as u32);
        let outputs: Vec<ValueId> = results
            .into_iter()
            .enumerate()
            .map(|(i, ty)| {
                let name = if i == 0 { name.to_string() } else { format!("{name}.{i}") };
                self.graph.values.push(Value { name, ty, def: Def::Node(id, i as u32) })
            })
            .collect();
        let node = Node { op, inputs: inputs.to_vec(), outputs: outputs.clone(), layer: self.layer, phase, origin: origin.unwrap_or(id) };
        self.graph.nodes.push(node);
        outputs
    }
}
