//! Parameters (or their gradients) into one safetensors file with Hugging Face names, shapes as in the file they came from.
//!
//! The inverse of [`crate::import::weights`]: several parameters may fill one tensor, one parameter may fill several. Parameters are asked for once
//! each, in order; a tensor is written when its last part has come, so that only tensors in parts are in memory.

use std::collections::BTreeMap;
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
pub fn save<T: Element>(path: &Path, graph: &Graph, dtype: DType, mut elements: impl FnMut(ParamId) -> io::Result<Vec<T>>) -> io::Result<()> {
    let mut order: Vec<(String, Vec<u64>)> = Vec::new();
    // Tensor → position in `order`, and how many parts it has.
    let mut parts: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for piece in graph.params.ids().flat_map(|p| pieces(graph, p)) {
        let (_, count) = parts.entry(piece.tensor.clone()).or_insert_with(|| {
            order.push((piece.tensor.clone(), piece.shape.clone()));
            (order.len() - 1, 0)
        });
        *count += 1;
    }
    let (head, begins) = header(dtype, &order);
    whole_file(path, |mut file| {
        file.write_all(&head)?;
        let mut pending: BTreeMap<String, Pending> = BTreeMap::new();
        for param in graph.params.ids() {
            let shape = graph.shape(graph.params[param].value);
            let values = elements(param)?;
            if values.len() as u64 != shape.iter().product::<u64>() {
                let name = &graph.values[graph.params[param].value].name;
                return Err(io::Error::other(format!("`{name}` came as {} elements, not {shape:?}", values.len())));
            }
            for piece in pieces(graph, param) {
                let (index, count) = parts[&piece.tensor];
                let size = (piece.shape.iter().product::<u64>() * dtype.size()) as usize;
                let tensor = pending.entry(piece.tensor.clone()).or_insert_with(|| Pending { bytes: vec![0; size], missing: count });
                for (to, from, len) in spans(&piece, &shape) {
                    for i in 0..len {
                        encode(dtype, values[from + i].into_f64(), &mut tensor.bytes, to + i);
                    }
                }
                tensor.missing -= 1;
                if tensor.missing == 0
                    && let Some(done) = pending.remove(&piece.tensor)
                {
                    file.write_all_at(&done.bytes, begins[index])?;
                }
            }
        }
        Ok(())
    })
}
