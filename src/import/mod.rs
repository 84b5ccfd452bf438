//! From files to graphs: a Hugging Face `config.json` or dplan's own graph JSON becomes a forward [`Graph`]; weights come from safetensors.
//!
//! Invariants: an imported graph passes the graph verifier; its parameter count is that of the model the file describes, each tied parameter
//! once; every size in it is so small that the arithmetic of costs and memory cannot overflow ([`limits`]). Nothing here panics on any input.

pub mod graph_json;
pub mod hf;
pub mod json;
pub mod limits;
pub mod weights;

use std::path::Path;

use dplan_ir::dropout::Rates;
use dplan_ir::dtype::DType;
use dplan_ir::graph::Graph;
use dplan_ir::op::Op;
use dplan_ir::verify::graph::verify_graph;

use json::Doc;

/// What is wrong with an input file.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error("{file}: cannot be read: {source}")]
    Read { file: String, source: std::io::Error },
    #[error("{file}:{line}:{column}: not valid JSON: {why}")]
    Syntax { file: String, line: usize, column: usize, why: String },
    #[error("{file}: `{path}` {found}; it should be {right}")]
    Value { file: String, path: String, found: String, right: String },
    #[error("{file}: {found}; supported are {}{}", supported.join(", "), match nearest {
        Some(n) => format!("; the nearest is `{n}` (--as {n} reads the file as that family)"),
        None => "; --as FAMILY reads the file as one of them".into(),
    })]
    Family { file: String, found: String, supported: Vec<String>, nearest: Option<String> },
    #[error("{file}: a sequence of {seq} tokens does not fit the model's {positions} positions; choose --seq from 1 to {positions}")]
    Sequence { file: String, seq: u64, positions: u64 },
    #[error("{file}: {what} is too large: {why}")]
    TooLarge { file: String, what: String, why: String },
    #[error("{file}: {why}")]
    Graph { file: String, why: String },
}

/// Choices that the model file leaves open.
#[derive(Clone, PartialEq, Debug)]
pub struct ImportOptions {
    /// Tokens of one sequence; the model's own length (capped) if absent.
    pub seq: Option<u64>,
    /// Type of parameters and activations.
    pub compute: DType,
    /// Reads a Hugging Face config as this family, whatever its `model_type`.
    pub family: Option<String>,
}

impl Default for ImportOptions {
    fn default() -> ImportOptions {
        ImportOptions { seq: None, compute: DType::F32, family: None }
    }
}

/// The dropout that a Hugging Face config asks for.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Dropout {
    pub rates: Rates,
    /// Of attention probabilities, which no op of ours does.
    pub attention: f64,
    /// The keys that are not 0, and their rates: `resid_pdrop 0.1`.
    pub keys: Vec<String>,
}

/// An imported model.
#[derive(Clone, PartialEq, Debug)]
pub struct Model {
    /// The forward pass; its batch dim has size 1 until [`Graph::set_batch`].
    pub graph: Graph,
    pub name: String,
    /// The Hugging Face family, or `graph` for our own JSON.
    pub family: String,
    /// The longest sequence the model can take, if it has such a bound.
    pub max_positions: Option<u64>,
    /// The element type the file says the weights are in.
    pub default_dtype: DType,
    /// Dropout that the file asks for and the graph does not have: `dropout::insert` puts it there.
    pub dropout: Dropout,
    /// What the importer chose or left out, in sentences for the user.
    pub notes: Vec<String>,
}

/// Imports a model file, or the `config.json` of a model directory.
///
/// # Errors
/// What is wrong with the file, and where.
pub fn model(path: &Path, options: &ImportOptions) -> Result<Model, ImportError> {
    let config = path.join("config.json");
    let path = if path.is_dir() { config.as_path() } else { path };
    from_doc(&Doc::read(path)?, &name_of(path), options)
}

/// Imports the content of a model file; `file` is what messages and the model are called.
///
/// # Errors
/// What is wrong with the content, and where.
pub fn model_from_bytes(file: &str, bytes: &[u8], options: &ImportOptions) -> Result<Model, ImportError> {
    from_doc(&Doc::parse(file, bytes)?, &name_of(Path::new(file)), options)
}

/// How many token ids a model knows: all ids in its data must be below. It is the least of the tables that tokens are looked up in and the logits
/// that targets are compared with.
pub fn vocabulary(graph: &Graph) -> Option<u64> {
    let sizes = graph.forward_nodes().filter_map(|(_, node)| match node.op {
        Op::Embed => graph.shape(node.inputs[0]).first().copied(),
        Op::CeStats => graph.shape(node.inputs[0]).last().copied(),
        _ => None,
    });
    sizes.min()
}

/// The candidate that is fewest edits away from `word`, if it is near at all.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word: String = word.chars().take(64).collect::<String>().to_lowercase();
    candidates.into_iter().map(|c| (edits(&word, c), c)).filter(|(d, _)| *d <= (word.len() / 2).max(2)).min().map(|(_, c)| c)
}

fn from_doc(doc: &Doc, name: &str, options: &ImportOptions) -> Result<Model, ImportError> {
    let root = doc.root();
    let graph = options.family.is_none() && graph_json::recognises(&root);
    let model = if graph { graph_json::model(&root, name, options)? } else { hf::model(&root, name, options)? };
    let faults = verify_graph(&model.graph);
    match faults.first() {
        None => Ok(model),
        Some(first) => {
            let others = if faults.len() > 1 { format!(" (and {} more faults)", faults.len() - 1) } else { String::new() };
            Err(ImportError::Graph { file: root.file().into(), why: format!("{first}{others}") })
        }
    }
}

/// `gpt2.json` is `gpt2`; `llama-1m/config.json` is `llama-1m`.
fn name_of(path: &Path) -> String {
    let text = |s: Option<&std::ffi::OsStr>| s.map(|s| s.to_string_lossy().into_owned()).filter(|s| !s.is_empty());
    let stem = text(path.file_stem()).filter(|s| s != "config");
    stem.or_else(|| text(path.parent().and_then(Path::file_name))).unwrap_or_else(|| "model".into())
}

/// Levenshtein distance.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &cb) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(ca != cb);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
