//! The manifest: what a checkpoint holds, sealed by a hash.
//!
//! The file is `{"dplan_checkpoint": 1, "hash": H, "body": B}`, where H is the hash of the text of B, so that a manifest which was cut short or changed is
//! known to be.

use std::path::Path;

use dplan_ir::dtype::DType;
use dplan_ir::program::Role;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use xxhash_rust::xxh3::xxh3_64;

use super::CheckpointError;
use crate::runtime::LossScale;

/// Changes when a reader of older checkpoints would misread newer ones.
pub const VERSION: u32 = 1;

/// Its name in a checkpoint's folder.
pub const FILE: &str = "manifest.json";

/// Where a run stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Position {
    /// Steps done.
    pub step: u64,
    /// Updates of the parameters: steps less those that were skipped. Adam's bias correction counts these.
    pub updates: u64,
    /// Sequences taken from the data, over all steps and ranks.
    pub sequences: u64,
    /// Of initial weights, of random numbers keyed by the step, of the order of shuffled data.
    pub seed: u64,
    /// Of plans that scale their loss; others hand it on.
    #[serde(default)]
    pub loss_scale: LossScale,
}

/// Which data the position is a position in.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataMark {
    /// For people; a file may move.
    pub file: String,
    pub tokens: u64,
    /// Tokens of a sequence.
    pub seq: u64,
    pub order: String,
    /// Hash of the first tokens.
    pub hash: String,
    /// The token that ends a document, where these are kept apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub document_end: Option<i32>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    pub serial: u64,
    pub position: Position,
    /// Of the model.
    pub model: String,
    pub optimizer: String,
    /// Hash of the plan that wrote it, and its ranks: for people, since any plan can read it.
    pub plan: String,
    pub ranks: u64,
    /// `None`: random data.
    pub data: Option<DataMark>,
    pub tensors: Vec<TensorMark>,
    pub shards: Vec<Shard>,
}

/// A logical tensor.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorMark {
    pub role: String,
    pub name: String,
    pub shape: Vec<u64>,
    pub dtype: String,
    pub fingerprint: String,
}

/// A file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    pub file: String,
    pub bytes: u64,
    pub hash: String,
    pub parts: Vec<PartMark>,
}

/// Elements `from .. from + count` of a block of a tensor, in the file under the tensor's [`key`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartMark {
    /// Position in [`Manifest::tensors`].
    pub tensor: usize,
    /// First index of the block in each dim of the tensor.
    pub start: Vec<u64>,
    pub shape: Vec<u64>,
    pub from: u64,
    pub count: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    dplan_checkpoint: u32,
    hash: String,
    body: Box<RawValue>,
}

impl TensorMark {
    pub fn key(&self) -> String {
        key(&self.role, &self.name)
    }
    pub fn element_type(&self) -> Option<DType> {
        DType::from_name(&self.dtype)
    }
    pub fn role(&self) -> Option<Role> {
        Role::from_name(&self.role)
    }
    /// `None` if it has more elements than can be counted.
    pub fn elems(&self) -> Option<u64> {
        self.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d))
    }
}

/// What a tensor is called in the files.
pub fn key(role: &str, name: &str) -> String {
    format!("{role}:{name}")
}

/// How hashes are written.
pub fn hex(hash: u64) -> String {
    format!("{hash:016x}")
}

impl Manifest {
    pub fn seal(&self) -> String {
        let body = serde_json::to_string(self).unwrap_or_default();
        // The two fields beside the body need no escapes.
        format!("{{\"dplan_checkpoint\":{VERSION},\"hash\":\"{}\",\"body\":{body}}}\n", hex(xxh3_64(body.as_bytes())))
    }

    /// Reads the manifest of a checkpoint's folder.
    ///
    /// # Errors
    /// If it cannot be read, is of another version, or is not as it was written.
    pub fn read(folder: &Path) -> Result<Manifest, CheckpointError> {
        let path = folder.join(FILE);
        let damaged = |why: String| CheckpointError::Manifest { path: path.display().to_string(), why };
        let text = std::fs::read(&path).map_err(CheckpointError::io(&path))?;
        let sealed: Sealed = serde_json::from_slice(&text).map_err(|e| damaged(e.to_string()))?;
        if sealed.dplan_checkpoint != VERSION {
            return Err(damaged(format!("version {}, this dplan reads version {VERSION}", sealed.dplan_checkpoint)));
        }
        let hash = hex(xxh3_64(sealed.body.get().as_bytes()));
        if hash != sealed.hash {
            return Err(damaged(format!("its hash is {hash}, not {}", sealed.hash)));
        }
        serde_json::from_str(sealed.body.get()).map_err(|e| damaged(e.to_string()))
    }
}
