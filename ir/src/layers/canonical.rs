//! An order and names that depend on nothing but what a graph computes.

use crate::entity::{Id, Table};
use crate::graph::{Def, Graph, Piece};
use crate::layers::rebuild::rebuild;
use crate::layers::{is_forward, post_order};
use crate::text::op_name;

/// A forward graph with its nodes in the order of the walk from the loss (operands first, in order), layer by layer, and with values, parameters and dims in
/// order of first use. Graphs that differ in names and in the order of their tables only become the same but for names. What the loss does not depend on
/// is left out, but for inputs and parameters. The order of inputs has a meaning and stays.
///
/// A graph without a loss, or with a backward pass, is returned as it is: make it canonical first, then differentiate it.
pub fn canonicalize(graph: &Graph) -> Graph {
    let Some(loss) = graph.loss.filter(|_| graph.nodes.ids().all(|n| is_forward(graph, n))) else {
        return graph.clone();
    };
    let mut order = post_order(graph, &[loss], &mut Table::filled(graph.nodes.len(), false), |_| true);
    order.sort_by_key(|&n| graph.nodes[n].layer);
    rebuild(graph, &order)
}

/// The graph with names that say what things are and which, not what somebody called them. A parameter that names no file tensors is still stored under the
/// name it had.
pub fn canonical_names(graph: &Graph) -> Graph {
    let mut named = graph.clone();
    for (id, dim) in named.dims.iter_mut() {
        dim.name = format!("dim{}", id.0);
    }
    for (_, param) in named.params.iter_mut().filter(|(_, p)| p.pieces.is_empty()) {
        let shape = graph.shape(param.value);
        param.pieces.push(Piece { tensor: graph.values[param.value].name.clone(), view: shape.clone(), shape, narrow: None, at: None });
    }
    for (id, value) in named.values.iter_mut() {
        value.name = match value.def {
            Def::Input => format!("input{}", graph.inputs.iter().position(|&v| v == id).unwrap_or(id.index())),
            Def::Param(param) => format!("param{}", param.0),
            Def::Node(node, 0) => format!("{}{}", op_name(&graph.nodes[node].op), node.0),
            Def::Node(node, at) => format!("{}{}.{at}", op_name(&graph.nodes[node].op), node.0),
        };
    }
    named
}
