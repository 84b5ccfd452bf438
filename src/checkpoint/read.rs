//! A checkpoint, checked byte by byte, and out of it logical tensors into a session of any plan.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use dplan_ir::graph::Graph;
use dplan_ir::program::Role;
use xxhash_rust::xxh3::Xxh3;

use super::manifest::{DataMark, Manifest, PartMark, Position, Shard, TensorMark, hex};
use super::{CheckpointError, STATE};
use crate::fingerprint::digest;
use crate::runtime::Session;
use crate::safetensors::{TensorFile, decode};

/// Bytes read at once.
const CHUNK: usize = 1 << 20;

/// A checkpoint whose files are those that were written.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
    files: Vec<TensorFile>,
    /// Role and name → position in the manifest.
    index: BTreeMap<(String, String), usize>,
}

/// What the run that resumes needs to agree with.
#[derive(Clone, Copy, Debug)]
pub struct Expected<'a> {
    pub optimizer: &'a str,
    pub seed: Option<u64>,
    pub data: Option<&'a DataMark>,
}

impl Checkpoint {
    /// Opens a checkpoint's folder and reads all of it once.
    ///
    /// # Errors
    /// What is missing or not as it was written.
    pub fn open(folder: &Path) -> Result<Checkpoint, CheckpointError> {
        let manifest = Manifest::read(folder)?;
        let mut files = Vec::new();
        for shard in &manifest.shards {
            files.push(open_shard(folder, shard, &manifest.tensors)?);
        }
        let index = manifest.tensors.iter().enumerate().map(|(i, t)| ((t.role.clone(), t.name.clone()), i)).collect();
        Ok(Checkpoint { folder: folder.to_path_buf(), manifest, files, index })
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }
    pub fn position(&self) -> Position {
        self.manifest.position
    }

    /// Sets a session's parameters and moments, whatever its plan.
    ///
    /// # Errors
    /// If a tensor of the model is missing or has another shape, one of the checkpoint is not used, or the session has ended. The session is then of no use.
    pub fn load(&self, session: &mut Session) -> Result<(), CheckpointError> {
        let graph = session.graph().clone();
        let moments = session.program().optimizer.map_or(0, |o| o.moments());
        let roles = &STATE[..=moments];
        self.check(&graph, roles)?;
        for &role in roles {
            for param in graph.params.ids() {
                let values = self.tensor(role, &graph.values[graph.params[param].value].name)?;
                session.load_one(role, param, &values)?;
            }
        }
        Ok(())
    }

    /// Whether a run may continue from here.
    ///
    /// # Errors
    /// What is another: the optimizer, the seed, the data.
    pub fn agrees(&self, expected: Expected<'_>) -> Result<(), CheckpointError> {
        let differs = |what, found: String, expected: String, hint| {
            let path = self.folder.display().to_string();
            Err(CheckpointError::Differs { path, what, found, expected, hint })
        };
        let m = &self.manifest;
        if m.optimizer != expected.optimizer {
            return differs("the optimizer", m.optimizer.clone(), expected.optimizer.into(), "");
        }
        if let Some(seed) = expected.seed.filter(|&s| s != m.position.seed) {
            return differs("the seed", m.position.seed.to_string(), seed.to_string(), "; leave --seed out to continue with the checkpoint's");
        }
        let said = |data: Option<&DataMark>| {
            data.map_or_else(
                || "random tokens".into(),
                |d| format!("{} tokens of {} in sequences of {} ({}, hash {})", d.tokens, d.file, d.seq, d.order, d.hash),
            )
        };
        let same =
            |a: &DataMark, b: &DataMark| (a.tokens, a.seq, &a.order, &a.hash, a.document_end) == (b.tokens, b.seq, &b.order, &b.hash, b.document_end);
        match (&m.data, expected.data) {
            (None, None) => Ok(()),
            (Some(a), Some(b)) if same(a, b) => Ok(()),
            (found, expected) => {
                let hint = ": a position in one means nothing in the other; --restart-data begins the new data at its first sequence";
                differs("the data", said(found.as_ref()), said(expected), hint)
            }
        }
    }

    /// A logical tensor, row-major.
    ///
    /// # Errors
    /// If it is missing, or its parts are not the whole tensor.
    pub fn tensor(&self, role: Role, name: &str) -> Result<Vec<f64>, CheckpointError> {
        let wrong = |why: String| self.wrong(role, name, why);
        let &at = self.index.get(&(role.name().to_string(), name.to_string())).ok_or_else(|| wrong("is missing".into()))?;
        let mark = &self.manifest.tensors[at];
        let dtype = mark.element_type().ok_or_else(|| wrong(format!("`{}` is not an element type", mark.dtype)))?;
        let elems = mark.elems().and_then(|n| usize::try_from(n).ok()).ok_or_else(|| wrong("is too large".into()))?;
        let size = dtype.size() as usize;
        let mut whole = vec![0u8; elems * size];
        let mut filled = 0;
        for (shard, file) in self.manifest.shards.iter().zip(&self.files) {
            for part in shard.parts.iter().filter(|p| p.tensor == at) {
                let entry = file.tensors.get(&mark.key()).ok_or_else(|| wrong(format!("is not in {}", file.name)))?;
                let bytes = file.bytes(entry).map_err(|e| wrong(e.to_string()))?;
                let mut from = 0;
                each_run(part, &mark.shape, |to, len| {
                    whole[to * size..(to + len) * size].copy_from_slice(&bytes[from..from + len * size]);
                    from += len * size;
                });
                filled += part.count;
            }
        }
        let sum = hex(digest(dtype, 0, &whole).sum);
        if filled != elems as u64 || sum != mark.fingerprint {
            return Err(wrong(format!(
                "its parts have {filled} of {elems} elements, and together the fingerprint {sum}; when saved it was {}",
                mark.fingerprint
            )));
        }
        Ok((0..elems).map(|i| decode(dtype, &whole, i)).collect())
    }

    fn check(&self, graph: &Graph, roles: &[Role]) -> Result<(), CheckpointError> {
        let mut used = BTreeSet::new();
        for &role in roles {
            for param in graph.params.values() {
                let name = &graph.values[param.value].name;
                let &at = self
                    .index
                    .get(&(role.name().to_string(), name.clone()))
                    .ok_or_else(|| self.wrong(role, name, "is in the model, but not in the checkpoint".into()))?;
                let (found, expected) = (&self.manifest.tensors[at].shape, graph.shape(param.value));
                if *found != expected {
                    return Err(self.wrong(role, name, format!("has shape {found:?}; the model has {expected:?}")));
                }
                used.insert(at);
            }
        }
        let mut extra = self.manifest.tensors.iter().enumerate().filter(|(i, _)| !used.contains(i)).map(|(_, t)| t);
        match extra.next() {
            None => Ok(()),
            Some(t) => Err(CheckpointError::Extra {
                path: self.folder.display().to_string(),
                role: t.role.clone(),
                name: t.name.clone(),
                others: extra.count(),
            }),
        }
    }

    fn wrong(&self, role: Role, name: &str, why: String) -> CheckpointError {
        CheckpointError::Tensor { path: self.folder.display().to_string(), role: role.name(), name: name.into(), why }
    }
}

/// Opens a file of a checkpoint: its bytes have the hash, its tensors are the parts that the manifest lists.
fn open_shard(folder: &Path, shard: &Shard, tensors: &[TensorMark]) -> Result<TensorFile, CheckpointError> {
    let path = folder.join(&shard.file);
    let name = path.display().to_string();
    let parts = |why: String| CheckpointError::Parts { path: name.clone(), why };
    if shard.file.contains(['/', '\\']) || shard.file.starts_with('.') {
        return Err(parts("the manifest names a file outside its folder".into()));
    }
    let mut file = match File::open(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Err(CheckpointError::Shard { path: name }),
        opened => opened.map_err(CheckpointError::io(&path))?,
    };
    let found = file.metadata().map_err(CheckpointError::io(&path))?.len();
    if found != shard.bytes {
        return Err(CheckpointError::Size { path: name, found, expected: shard.bytes });
    }
    let (mut hash, mut chunk) = (Xxh3::new(), vec![0; CHUNK]);
    loop {
        match file.read(&mut chunk).map_err(CheckpointError::io(&path))? {
            0 => break,
            n => hash.update(&chunk[..n]),
        }
    }
    let found = hex(hash.digest());
    if found != shard.hash {
        return Err(CheckpointError::Hash { path: name, found, expected: shard.hash.clone() });
    }
    let file = TensorFile::open(&path).map_err(|e| parts(e.to_string()))?;
    let mut expected = BTreeSet::new();
    for part in &shard.parts {
        let tensor = tensors.get(part.tensor).ok_or_else(|| parts(format!("there is no tensor {}", part.tensor)))?;
        let key = tensor.key();
        let entry = file.tensors.get(&key).ok_or_else(|| parts(format!("`{key}` is missing")))?;
        let elems = entry.shape.iter().product::<u64>();
        if !fits(part, &tensor.shape) || elems != part.count || entry.dtype != tensor.element_type() {
            return Err(parts(format!("`{key}` is {} {:?}, expected {} elements of {}", entry.type_name, entry.shape, part.count, tensor.dtype)));
        }
        expected.insert(key);
    }
    match file.tensors.keys().find(|k| !expected.contains(*k)) {
        Some(extra) => Err(parts(format!("`{extra}` is not in the manifest"))),
        None => Ok(file),
    }
}

/// Whether a part lies inside its tensor.
fn fits(part: &PartMark, shape: &[u64]) -> bool {
    let inside = |((start, len), size): ((&u64, &u64), &u64)| start.checked_add(*len).is_some_and(|end| end <= *size);
    let elems = part.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
    part.start.len() == shape.len()
        && part.shape.len() == shape.len()
        && part.start.iter().zip(&part.shape).zip(shape).all(inside)
        && part.from.checked_add(part.count).is_some_and(|end| elems.is_some_and(|n| end <= n))
}

/// Visits the runs of a part's elements: first index in the tensor, length.
fn each_run(part: &PartMark, shape: &[u64], mut visit: impl FnMut(usize, usize)) {
    let Some((&row, outer)) = part.shape.split_last() else { return visit(0, part.count as usize) };
    let (mut at, end) = (part.from, part.from + part.count);
    while at < end {
        let column = at % row;
        let len = (row - column).min(end - at);
        // The row's coordinates in the block, innermost first, give its place in the tensor.
        let (mut rest, mut index, mut stride) = (at / row, part.start[outer.len()] + column, shape[outer.len()]);
        for dim in (0..outer.len()).rev() {
            index += (part.start[dim] + rest % outer[dim]) * stride;
            rest /= outer[dim];
            stride *= shape[dim];
        }
        visit(index as usize, len as usize);
        at += len;
    }
}
