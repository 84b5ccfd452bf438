//! Sizes that no model has: below these bounds the costs and memory of a graph fit 64 bits with room for batch and devices.
//!
//! With one sequence: elements of a value ≤ 2⁴⁸, elements of all parameters ≤ 2⁴⁸, multiplications of one node ≤ 2⁵⁶.

use dplan_ir::graph::Graph;
use dplan_ir::op::Op;

use super::ImportError;

/// Largest single dim.
pub const MAX_DIM: u64 = 1 << 40;
/// Most layers.
pub const MAX_LAYERS: u64 = 10_000;
/// Most tensors of a weights file that a model may name.
pub const MAX_TENSORS: u64 = 1 << 20;
const MAX_ELEMENTS: u128 = 1 << 48;
const MAX_WORK: u128 = 1 << 56;

/// # Errors
/// The first value, node or sum that is too large.
pub fn check(file: &str, graph: &Graph) -> Result<(), ImportError> {
    let too_large = |what: String, why: String| Err(ImportError::TooLarge { file: file.into(), what, why });
    let product = |dims: &[u64]| dims.iter().fold(1u128, |n, &d| n.saturating_mul(d.into()));
    for value in graph.values.values() {
        let shape: Vec<u64> = value.ty.dims.iter().map(|&d| graph.size(d)).collect();
        if product(&shape) > MAX_ELEMENTS {
            return too_large(format!("`{}`", value.name), format!("{shape:?} is more than 2^48 elements"));
        }
    }
    let params: u128 = graph.params.values().map(|p| product(&graph.shape(p.value))).sum();
    if params > MAX_ELEMENTS {
        return too_large("the model".into(), format!("{params} parameters are more than 2^48"));
    }
    for node in graph.nodes.values() {
        let mut dims: Vec<_> = node.inputs.iter().chain(&node.outputs).flat_map(|&v| graph.values[v].ty.dims.iter().copied()).collect();
        dims.sort_unstable();
        dims.dedup();
        // Queries and keys are different dims of one size.
        if let Op::Attention(_) | Op::AttentionSink(_) = node.op {
            dims.extend(node.inputs.get(1).and_then(|&k| graph.values[k].ty.dims.get(1)));
        }
        let sizes: Vec<u64> = dims.iter().map(|&d| graph.size(d)).collect();
        if product(&sizes) > MAX_WORK {
            let name = node.outputs.first().map_or("a node", |&v| &graph.values[v].name);
            return too_large(format!("`{name}`"), format!("the product of its dims {sizes:?} is more than 2^56"));
        }
    }
    Ok(())
}
