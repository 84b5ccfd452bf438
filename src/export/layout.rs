//! Weights in the layout in which checkpoints are published: safetensors files in a folder, and an index of which tensor is in which.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use dplan_ir::dtype::DType;
use dplan_ir::entity::ParamId;
use dplan_ir::graph::Graph;
use serde_json::json;

use super::weights::{save_tensors, tensors};
use super::{temporary_beside, whole_file};
use crate::import::weights::{Element, Weights, is_embedding, pieces, spans};
use crate::safetensors::{decode, encode};

/// The name of an index.
pub const INDEX: &str = "model.safetensors.index.json";

/// Writes the parameters into copies of the files that they were read from: same files, tensors, types and order, so that what training did not change is
/// the same bytes; tensors that are no parameters stay as they are.
///
/// # Errors
/// What the file system says, or that `elements` says. No file of `folder` has then been touched.
pub fn save_like(source: &Weights, folder: &Path, graph: &Graph, mut elements: impl FnMut(ParamId) -> io::Result<Vec<f64>>) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut copies = Copies(Vec::new());
    for file in source.files() {
        let from = Path::new(&file.name);
        let name = from.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "a file without a name"))?;
        let target = folder.join(name);
        let temporary = temporary_beside(&target)?;
        fs::copy(from, &temporary)?;
        copies.0.push((File::options().read(true).write(true).open(&temporary)?, temporary, target));
    }
    let head = source.tied_head(graph);
    for param in graph.params.ids() {
        let shape = graph.shape(graph.params[param].value);
        let values = elements(param)?;
        for piece in pieces(graph, param) {
            let head = head.filter(|_| is_embedding(&piece.tensor));
            for tensor in [Some(piece.tensor.as_str()), head].into_iter().flatten() {
                let (at, entry) = source.place(tensor).ok_or_else(|| io::Error::other(format!("`{tensor}` is missing")))?;
                let dtype = entry.dtype.ok_or_else(|| io::Error::other(format!("`{tensor}` has a type that is not written")))?;
                let offset = source.files()[at].offset(entry);
                let mut bytes = vec![0; (piece.shape.iter().product::<u64>() * dtype.size()) as usize];
                copies.0[at].0.read_exact_at(&mut bytes, offset)?;
                for (to, from, len) in spans(&piece, &shape) {
                    for i in 0..len {
                        // A value that is what it was keeps its bits, whatever they are.
                        if decode(dtype, &bytes, to + i) != values[from + i] {
                            encode(dtype, values[from + i], &mut bytes, to + i);
                        }
                    }
                }
                copies.0[at].0.write_all_at(&bytes, offset)?;
            }
        }
    }
    copies.0.iter().try_for_each(|(file, ..)| file.sync_all())?;
    for (_, temporary, target) in copies.0.drain(..) {
        fs::rename(temporary, target)?;
    }
    for beside in [source.index(), source.config()].into_iter().flatten() {
        if let Some(name) = beside.file_name() {
            let bytes = fs::read(&beside)?;
            whole_file(&folder.join(name), |mut file| file.write_all(&bytes))?;
        }
    }
    File::open(folder)?.sync_all()
}

/// Writes the parameters into files of at most `limit` bytes of tensors (or one tensor), and an index.
///
/// # Errors
/// What the file system says, or that `elements` says.
pub fn save_sharded<T: Element>(
    folder: &Path,
    graph: &Graph,
    dtype: DType,
    limit: u64,
    mut elements: impl FnMut(ParamId) -> io::Result<Vec<T>>,
) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut files: Vec<(u64, Vec<String>)> = Vec::new();
    for (name, dtype, shape) in tensors(graph, dtype) {
        let bytes = shape.iter().product::<u64>() * dtype.size();
        match files.last_mut().filter(|f| f.0 + bytes <= limit) {
            Some(file) => {
                file.0 += bytes;
                file.1.push(name);
            }
            None => files.push((bytes, vec![name])),
        }
    }
    let mut map = BTreeMap::new();
    for (i, (_, names)) in files.iter().enumerate() {
        let file = format!("model-{:05}-of-{:05}.safetensors", i + 1, files.len());
        save_tensors(&folder.join(&file), graph, dtype, |name| names.iter().any(|n| n == name), &mut elements)?;
        map.extend(names.iter().map(|n| (n.clone(), file.clone())));
    }
    let total: u64 = files.iter().map(|f| f.0).sum();
    let index = serde_json::to_string_pretty(&json!({ "metadata": { "total_size": total }, "weight_map": map })).unwrap_or_default();
    whole_file(&folder.join(INDEX), |mut file| file.write_all(index.as_bytes()))?;
    File::open(folder)?.sync_all()
}

/// Copies that are not yet what they will be; removed unless they were renamed.
struct Copies(Vec<(File, PathBuf, PathBuf)>);

impl Drop for Copies {
    fn drop(&mut self) {
        for (_, temporary, _) in &self.0 {
            let _ = fs::remove_file(temporary);
        }
    }
}
