//! The same graph with its tables in another order.

use crate::entity::{DimId, Id, NodeId, ParamId, Table, ValueId};
use crate::graph::{Def, Graph, Param};

/// The graph with the given forward nodes, in that order, which must define operands before their uses. Values are numbered in order: inputs, then for each node its
/// parameters at their first use and its results; dims by first use.
pub fn rebuild(graph: &Graph, order: &[NodeId]) -> Graph {
    let mut new = Rebuilt {
        from: graph,
        to: Graph { name: graph.name.clone(), ..Graph::default() },
        values: Table::filled(graph.values.len(), None),
        dims: Table::filled(graph.dims.len(), None),
    };
    for &input in &graph.inputs {
        let id = new.value(input, Def::Input);
        new.to.inputs.push(id);
    }
    for &id in order {
        new.node(id);
    }
    for param in graph.params.ids() {
        new.operand(graph.params[param].value);
    }
    new.to.batch = graph.batch.map(|d| new.dim(d));
    (new.to.sequence, new.to.order) = (graph.sequence.map(|d| new.dim(d)), graph.order);
    new.to.loss = graph.loss.and_then(|v| new.values[v]);
    new.to
}

struct Rebuilt<'g> {
    from: &'g Graph,
    to: Graph,
    values: Table<ValueId, Option<ValueId>>,
    dims: Table<DimId, Option<DimId>>,
}

impl Rebuilt<'_> {
    fn dim(&mut self, dim: DimId) -> DimId {
        if let Some(id) = self.dims[dim] {
            return id;
        }
        let id = self.to.dims.push(self.from.dims[dim].clone());
        self.dims[dim] = Some(id);
        id
    }

    fn value(&mut self, value: ValueId, def: Def) -> ValueId {
        let mut row = self.from.values[value].clone();
        row.ty.dims = row.ty.dims.iter().map(|&d| self.dim(d)).collect();
        row.def = def;
        let id = self.to.values.push(row);
        self.values[value] = Some(id);
        id
    }

    fn operand(&mut self, value: ValueId) -> ValueId {
        if let Some(id) = self.values[value] {
            return id;
        }
        let param = self.from.param_of(value).map(|p| self.from.params[p].clone());
        let def = Def::Param(ParamId::from_index(self.to.params.len()));
        let id = self.value(value, def);
        if let Some(row) = param {
            self.to.params.push(Param { value: id, ..row });
        }
        id
    }

    fn node(&mut self, id: NodeId) {
        let mut node = self.from.nodes[id].clone();
        node.inputs = node.inputs.iter().map(|&v| self.operand(v)).collect();
        let new = NodeId::from_index(self.to.nodes.len());
        node.outputs = node.outputs.iter().zip(0..).map(|(&v, at)| self.value(v, Def::Node(new, at))).collect();
        node.origin = new;
        self.to.nodes.push(node);
    }
}
