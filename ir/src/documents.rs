//! Several documents in one sequence, none of which sees another.
//!
//! A packed sequence is documents one after the other. What a token may see begins at the first position of its own document: one whole number a token,
//! `first[b,s]`, which is an input of the graph beside tokens and targets and an operand of every attention ([`crate::op::Documents`]). Keys need none, so that
//! queries can be cut as anything else is, whatever ranks hold of keys.
//!
//! ```text
//! tokens   a b c · d e · f          (· ends a document and belongs to it)
//! first    0 0 0 0 4 4 4 7
//! ```
//!
//! Positions still count from the sequence's beginning. A rotation depends on differences of positions alone, so a model that has no other positions computes for
//! each document what it would compute for it alone.

use crate::dtype::DType;
use crate::entity::{NodeId, ValueId};
use crate::graph::{Def, Graph, Phase, Type, Value};
use crate::layers::rebuild;
use crate::op::{Attention, Documents, Op};

/// Name of the input.
pub const INPUT: &str = "documents";

/// Why documents of a graph cannot be kept apart.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DocumentsError {
    #[error("no attention looks back over a sequence")]
    NoAttention,
    #[error("the attention `{0}` sees what comes after a token, so documents have ends for it as well as beginnings")]
    LooksAhead(String),
    #[error("the attention `{0}` keeps documents apart already")]
    Already(String),
    #[error("`{0}` is the name of a value already")]
    Name(&'static str),
}

/// The forward graph in which no token sees another document; the positions where each begins are its last input.
///
/// # Errors
/// If there is nothing to keep apart, or it cannot be.
///
/// # Panics
/// If the graph has backward nodes.
pub fn keep_apart(graph: &Graph) -> Result<Graph, DocumentsError> {
    let mut apart = graph.clone();
    if graph.values.values().any(|v| v.name == INPUT) {
        return Err(DocumentsError::Name(INPUT));
    }
    let mut first: Option<ValueId> = None;
    for id in graph.nodes.ids() {
        let node = &graph.nodes[id];
        assert_eq!(node.phase, Phase::Forward, "documents are kept apart before the graph is differentiated");
        let name = || graph.values[node.outputs[0]].name.clone();
        let Some(attention) = attention_of(&mut apart, id) else { continue };
        match attention.mask.documents {
            Documents::Apart => return Err(DocumentsError::Already(name())),
            Documents::Joined if !attention.mask.looks_back() => return Err(DocumentsError::LooksAhead(name())),
            Documents::Joined => attention.mask.documents = Documents::Apart,
        }
        let dims = graph.values[node.inputs[0]].ty.dims[..2].to_vec();
        let input = *first.get_or_insert_with(|| {
            let value = Value { name: INPUT.into(), ty: Type::dense(DType::I32, dims), def: Def::Input };
            let id = apart.values.push(value);
            apart.inputs.push(id);
            id
        });
        apart.nodes[id].inputs.push(input);
    }
    match first {
        None => Err(DocumentsError::NoAttention),
        Some(_) => Ok(rebuild(&apart, &graph.nodes.ids().collect::<Vec<_>>())),
    }
}

/// The input that says where documents begin, if they are kept apart.
pub fn input(graph: &Graph) -> Option<ValueId> {
    graph.forward_nodes().find_map(|(_, node)| match &node.op {
        Op::Attention(a) | Op::AttentionSink(a) if a.mask.documents == Documents::Apart => node.inputs.last().copied(),
        _ => None,
    })
}

/// Where the document of each token of a sequence begins, if documents end with the token `end`.
pub fn first_positions(tokens: &[i32], end: i32) -> Vec<i32> {
    let mut first = 0;
    let positions = tokens.iter().zip(0..).map(|(&token, at)| {
        let of_this = first;
        if token == end {
            first = at + 1;
        }
        of_this
    });
    positions.collect()
}

fn attention_of(graph: &mut Graph, node: NodeId) -> Option<&mut Attention> {
    match &mut graph.nodes[node].op {
        Op::Attention(a) | Op::AttentionSink(a) => Some(a),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::first_positions;

    #[test]
    fn a_document_begins_behind_the_end_of_the_one_before() {
        assert_eq!(first_positions(&[1, 2, 3, 0, 4, 5, 0, 6], 0), [0, 0, 0, 0, 4, 4, 4, 7]);
        assert_eq!(first_positions(&[0, 0, 1], 0), [0, 1, 2]);
        assert_eq!(first_positions(&[1, 2], 0), [0, 0]);
    }
}
