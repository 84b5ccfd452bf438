//! Parameters out of safetensors files with Hugging Face names.
//!
//! A parameter is put together from its [`Piece`]s: each is a tensor of the file, viewed, narrowed, and copied in row-major order into the
//! parameter or into one slice of its first dim. One tensor is in memory at a time.
//!
//! A file matches a graph if every tensor that a piece names is there with the shape the piece says, and no other, except: buffers that old
//! checkpoints store beside the weights; a copy of a tied head, which must equal the embedding; names without the `model.` or `transformer.` prefix.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use dplan_ir::dtype::DType;
use dplan_ir::entity::ParamId;
use dplan_ir::graph::{Graph, Piece};

use super::ImportError;
use super::json::Doc;
use crate::safetensors::{Entry, TensorFile, decode};

/// Buffers, not weights, in checkpoints of the supported families.
const BUFFERS: [&str; 5] = [".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"];

/// Prefixes of names that a checkpoint of the bare model leaves out.
const PREFIXES: [&str; 5] = ["model.", "transformer.", "gpt_neox.", "bert.", "vit."];

/// The head of a model.
const HEAD: &str = "lm_head.weight";

/// How weights and a graph disagree.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error(transparent)]
    File(#[from] ImportError),
    #[error("{file}: tensor `{tensor}` is missing{}", and_more(*others))]
    Missing { file: String, tensor: String, others: usize },
    #[error("{file}: tensor `{tensor}` is not in the model{}", and_more(*others))]
    Extra { file: String, tensor: String, others: usize },
    #[error("{file}: tensor `{tensor}` has shape {found:?}; the model has {expected:?}")]
    Shape { file: String, tensor: String, found: Vec<u64>, expected: Vec<u64> },
    #[error("{file}: tensor `{tensor}` has elements of type {found}; dplan reads F64, F32, BF16, F16")]
    Type { file: String, tensor: String, found: String },
    #[error("{file}: the model's head is its embedding `{embedding}`, but tensor `{tensor}` is different")]
    Tied { file: String, tensor: String, embedding: String },
}

/// An element type that weights are read into.
pub trait Element: Copy + Default {
    fn from_f64(x: f64) -> Self;
    fn into_f64(self) -> f64;
}

impl Element for f64 {
    fn from_f64(x: f64) -> f64 {
        x
    }
    fn into_f64(self) -> f64 {
        self
    }
}

impl Element for f32 {
    fn from_f64(x: f64) -> f32 {
        x as f32
    }
    fn into_f64(self) -> f64 {
        self.into()
    }
}

/// The weights of a model: one file, or several that an index names.
#[derive(Debug)]
pub struct Weights {
    name: String,
    files: Vec<TensorFile>,
    /// Tensor → which file.
    home: BTreeMap<String, usize>,
}

impl Weights {
    /// Opens a `.safetensors` file, a `.safetensors.index.json`, or a folder that holds either.
    ///
    /// # Errors
    /// If a file cannot be read or is malformed.
    pub fn open(path: &Path) -> Result<Weights, WeightsError> {
        let path = if path.is_dir() { in_folder(path) } else { path.to_path_buf() };
        let name = path.display().to_string();
        let paths = if path.extension().is_some_and(|e| e == "json") { indexed(&path)? } else { vec![path] };
        let files = paths.iter().map(|p| TensorFile::open(p)).collect::<Result<Vec<_>, _>>()?;
        let home = files.iter().enumerate().flat_map(|(i, f)| f.tensors.keys().map(move |t| (t.clone(), i))).collect();
        Ok(Weights { name, files, home })
    }

    pub fn files(&self) -> &[TensorFile] {
        &self.files
    }
    /// The index that named the files.
    pub fn index(&self) -> Option<PathBuf> {
        Some(PathBuf::from(&self.name)).filter(|p| p.extension().is_some_and(|e| e == "json"))
    }
    /// The model's configuration, where one lies beside the weights.
    pub fn config(&self) -> Option<PathBuf> {
        Some(Path::new(&self.name).with_file_name("config.json")).filter(|p| p.is_file())
    }
    /// Where the tensor called `name` is: which file, and where in it.
    pub fn place(&self, name: &str) -> Option<(usize, &Entry)> {
        let (tensor, _, entry) = self.find(name)?;
        Some((*self.home.get(tensor)?, entry))
    }
    /// The tensor that is a copy of the embedding, where the model's head is tied to it and the files hold both.
    pub fn tied_head(&self, graph: &Graph) -> Option<&'static str> {
        Some(HEAD).filter(|head| self.home.contains_key(*head) && !wanted(graph).contains_key(*head))
    }

    /// Whether these are the weights of `graph`, by names, shapes and types; tied heads also by content.
    ///
    /// # Errors
    /// The first disagreement.
    pub fn check(&self, graph: &Graph) -> Result<(), WeightsError> {
        let (mut used, mut missing) = (BTreeSet::new(), Vec::new());
        let wanted = wanted(graph);
        for piece in wanted.values() {
            match self.find(&piece.tensor) {
                None => missing.push(&piece.tensor),
                Some((tensor, file, entry)) => {
                    self.fits(piece, file, entry)?;
                    used.insert(tensor);
                }
            }
        }
        if let Some(first) = missing.first() {
            return Err(WeightsError::Missing { file: self.name.clone(), tensor: first.to_string(), others: missing.len() - 1 });
        }
        let mut extra = Vec::new();
        for tensor in self.home.keys().map(String::as_str).filter(|t| !used.contains(t)) {
            let buffer = BUFFERS.iter().any(|b| tensor.ends_with(b));
            if !buffer && !self.is_tied_head(tensor, &used)? {
                extra.push(tensor);
            }
        }
        match extra.first() {
            Some(first) => Err(WeightsError::Extra { file: self.name.clone(), tensor: first.to_string(), others: extra.len() - 1 }),
            None => Ok(()),
        }
    }

    /// The logical elements of a parameter, row-major.
    ///
    /// # Errors
    /// If a tensor of it is missing, misshapen, or cannot be read.
    pub fn param<T: Element>(&self, graph: &Graph, param: ParamId) -> Result<Vec<T>, WeightsError> {
        let shape = graph.shape(graph.params[param].value);
        let mut elements = vec![T::default(); shape.iter().product::<u64>() as usize];
        for piece in pieces(graph, param) {
            let Some((_, file, entry)) = self.find(&piece.tensor) else {
                return Err(WeightsError::Missing { file: self.name.clone(), tensor: piece.tensor, others: 0 });
            };
            let dtype = self.fits(&piece, file, entry)?;
            let bytes = file.bytes(entry)?;
            for (from, to, len) in spans(&piece, &shape) {
                for i in 0..len {
                    elements[to + i] = T::from_f64(decode(dtype, &bytes, from + i));
                }
            }
        }
        Ok(elements)
    }

    /// The tensor called `name`, or called so without its prefix.
    fn find(&self, name: &str) -> Option<(&str, &TensorFile, &Entry)> {
        let short = PREFIXES.iter().find_map(|p| name.strip_prefix(p));
        let (tensor, &file) = self.home.get_key_value(name).or_else(|| self.home.get_key_value(short?))?;
        let file = &self.files[file];
        Some((tensor, file, &file.tensors[tensor]))
    }

    fn fits(&self, piece: &Piece, file: &TensorFile, entry: &Entry) -> Result<DType, WeightsError> {
        let (file, tensor) = (file.name.clone(), piece.tensor.clone());
        if entry.shape != piece.shape {
            return Err(WeightsError::Shape { file, tensor, found: entry.shape.clone(), expected: piece.shape.clone() });
        }
        entry.dtype.ok_or_else(|| WeightsError::Type { file, tensor, found: entry.type_name.clone() })
    }

    /// Whether an unused tensor is a copy of the embedding, stored as the head of a model whose head is tied.
    fn is_tied_head(&self, tensor: &str, used: &BTreeSet<&str>) -> Result<bool, WeightsError> {
        let embedding = used.iter().find(|t| is_embedding(t));
        let (true, Some(embedding)) = (tensor == HEAD, embedding) else { return Ok(false) };
        let content = |tensor: &str| -> Result<(&Entry, Vec<u8>), ImportError> {
            let file = &self.files[self.home[tensor]];
            Ok((&file.tensors[tensor], file.bytes(&file.tensors[tensor])?))
        };
        let ((head, head_bytes), (table, table_bytes)) = (content(tensor)?, content(embedding)?);
        if (&head.shape, head.dtype, head_bytes) == (&table.shape, table.dtype, table_bytes) {
            return Ok(true);
        }
        Err(WeightsError::Tied { file: self.name.clone(), tensor: tensor.into(), embedding: embedding.to_string() })
    }
}

/// Where the elements of a parameter are in files: its pieces, or the tensor of its own name.
pub fn pieces(graph: &Graph, param: ParamId) -> Vec<Piece> {
    let p = &graph.params[param];
    if !p.pieces.is_empty() {
        return p.pieces.clone();
    }
    let shape = graph.shape(p.value);
    vec![Piece { tensor: graph.values[p.value].name.clone(), view: shape.clone(), shape, narrow: None, at: None }]
}

/// The runs of elements of a piece: first element in the tensor, first element in the parameter of shape `shape`, length.
pub fn spans(piece: &Piece, shape: &[u64]) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
    let product = |dims: &[u64]| dims.iter().product::<u64>() as usize;
    let at = piece.at.map_or(0, |i| i as usize * product(&shape[1..]));
    let (runs, stride, start, len) = match piece.narrow {
        None => (1, 0, 0, product(&piece.view)),
        Some(n) => {
            let dim = n.dim as usize;
            let inner = product(&piece.view[dim + 1..]);
            (product(&piece.view[..dim]), piece.view[dim] as usize * inner, n.start as usize * inner, n.len as usize * inner)
        }
    };
    (0..runs).map(move |run| (run * stride + start, at + run * len, len))
}

/// Whether a tensor is a table that a head may be tied to.
pub fn is_embedding(tensor: &str) -> bool {
    tensor.ends_with("embed_tokens.weight") || tensor.ends_with("wte.weight")
}

/// One piece of every tensor that the graph wants.
fn wanted(graph: &Graph) -> BTreeMap<String, Piece> {
    graph.params.ids().flat_map(|p| pieces(graph, p)).map(|piece| (piece.tensor.clone(), piece)).collect()
}

fn in_folder(folder: &Path) -> PathBuf {
    let index = folder.join("model.safetensors.index.json");
    if index.is_file() { index } else { folder.join("model.safetensors") }
}

/// The files an index names, each once, in order of name.
fn indexed(index: &Path) -> Result<Vec<PathBuf>, WeightsError> {
    let doc = Doc::read(index)?;
    let mut names = BTreeSet::new();
    for (_, at) in doc.root().need("weight_map", "an object from tensor to file")?.object()? {
        let name = at.string()?;
        if name.is_empty() || name == ".." || name.contains(['/', '\\']) {
            return Err(at.wrong(&at.found(), "the name of a file beside the index").into());
        }
        names.insert(name);
    }
    let folder = index.parent().unwrap_or(Path::new(""));
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

fn and_more(n: usize) -> String {
    if n == 0 { String::new() } else { format!(", and {n} more") }
}
