//! Parameters (or their gradients) into one safetensors file with Hugging Face names, shapes as in the file they came from.
//!
//! The inverse of [`crate::import::weights`]: several parameters may fill one tensor, one parameter may fill several. Parameters are asked for once
//! each, in order; a tensor is written when its last part has come, so that only tensors in parts are in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use dplan_ir::dtype::DType;
use dplan_ir::entity::ParamId;
use dplan_ir::graph::Graph;

use super::whole_file;
use crate::import::weights::{Element, pieces, spans};
use crate::safetensors::{encode, header};

/// A tensor that waits for parts.
struct Pending {
    bytes: Vec<u8>,
    missing: usize,
}

/// Writes every parameter of `graph`; `elements` gives the logical elements of one, row-major.
///
/// # Errors
/// What the file system says, what `elements` says, or that it gave the wrong number of elements.
pub fn save<T: Element>(path: &Path, graph: &Graph, dtype: DType, elements: impl FnMut(ParamId) -> io::Result<Vec<T>>) -> io::Result<()> {
    save_tensors(path, graph, dtype, |_| true, elements)
}

/// The tensors that the parameters fill: name, type, shape.
pub fn tensors(graph: &Graph, dtype: DType) -> Vec<(String, DType, Vec<u64>)> {
    let mut all: Vec<(String, DType, Vec<u64>)> = Vec::new();
    let mut seen = BTreeSet::new();
    for piece in graph.params.ids().flat_map(|p| pieces(graph, p)) {
        if seen.insert(piece.tensor.clone()) {
            all.push((piece.tensor, dtype, piece.shape));
        }
    }
    all
}

/// Writes those of the [`tensors`] that are `wanted`, and asks for no parameter that has no part in them.
///
/// # Errors
/// As [`save`].
pub fn save_tensors<T: Element>(
    path: &Path,
    graph: &Graph,
    dtype: DType,
    wanted: impl Fn(&str) -> bool,
    mut elements: impl FnMut(ParamId) -> io::Result<Vec<T>>,
) -> io::Result<()> {
    let order: Vec<_> = tensors(graph, dtype).into_iter().filter(|(name, ..)| wanted(name)).collect();
    let (head, begins) = header(&order);
    let begins: BTreeMap<&str, u64> = order.iter().map(|(name, ..)| name.as_str()).zip(begins).collect();
    let mut parts: BTreeMap<String, usize> = BTreeMap::new();
    for piece in graph.params.ids().flat_map(|p| pieces(graph, p)) {
        *parts.entry(piece.tensor).or_default() += 1;
    }
    whole_file(path, |mut file| {
        file.write_all(&head)?;
        let mut pending: BTreeMap<String, Pending> = BTreeMap::new();
        for param in graph.params.ids() {
            let pieces: Vec<_> = pieces(graph, param).into_iter().filter(|p| wanted(&p.tensor)).collect();
            if pieces.is_empty() {
                continue;
            }
            let shape = graph.shape(graph.params[param].value);
            let values = elements(param)?;
            if values.len() as u64 != shape.iter().product::<u64>() {
                let name = &graph.values[graph.params[param].value].name;
                return Err(io::Error::other(format!("`{name}` came as {} elements, not {shape:?}", values.len())));
            }
            for piece in pieces {
                let size = (piece.shape.iter().product::<u64>() * dtype.size()) as usize;
                let missing = parts[&piece.tensor];
                let tensor = pending.entry(piece.tensor.clone()).or_insert_with(|| Pending { bytes: vec![0; size], missing });
                for (to, from, len) in spans(&piece, &shape) {
                    for i in 0..len {
                        encode(dtype, values[from + i].into_f64(), &mut tensor.bytes, to + i);
                    }
                }
                tensor.missing -= 1;
                if tensor.missing == 0
                    && let Some(done) = pending.remove(&piece.tensor)
                {
                    file.write_all_at(&done.bytes, begins[piece.tensor.as_str()])?;
                }
            }
        }
        Ok(())
    })
}
