//! Checkpoints that any plan can resume.
//!
//! **Model.** A checkpoint is the *logical state* of a run at a step: for each parameter its value as the optimizer updates it (the master copy where
//! there is one) and its moments, as whole tensors of the model; and the [`Position`]: steps done, updates made, sequences consumed, seed. Nothing in it depends on
//! the plan that wrote it, but for how it is cut into files: rank `r` writes what it has of each tensor into `rank-r.safetensors`, replicas once.
//!
//! ```text
//! DIR/latest                      the name of the checkpoint written last
//! DIR/step-00000020/manifest.json tensors with shapes and fingerprints, files with hashes, parts; sealed by a hash of its own
//! DIR/step-00000020/rank-00000.safetensors …
//! ```
//!
//! **Invariants.**
//! 1. *Whole or absent.* Files are written and synced in a hidden folder, which is synced and renamed; then its parent is synced; only then `latest` moves, by a
//!    rename of its own; only then older checkpoints are removed, each renamed to a hidden name first. A hidden folder is never read and the next run removes it.
//! 2. *Written last is latest.* Manifests are numbered by a serial that grows with every checkpoint of a folder, whatever its step: a run that goes back to an
//!    older checkpoint writes newer ones. `latest` is a pointer for people; the serial decides, and a disagreement is said aloud.
//! 3. *Nothing damaged is loaded.* Every byte of every file is under a hash, and every tensor under its [fingerprint](crate::fingerprint). A damaged checkpoint is named, with
//!    what is wrong, and the one before is used.
//! 4. *Nothing is forgotten.* Every tensor of the model must be in the checkpoint, whole, each element once; every tensor of the checkpoint must be used.
//! 5. *Nothing is late.* A snapshot is copied between two steps into memory of its own; the thread that writes it sees nothing else.
//! 6. *Nothing poisoned is kept.* A state with a value that is not finite is not written.
//! 7. *Data has one position*: the number of sequences consumed. It does not know of batches, data-parallel ranks or epochs, so it continues exactly when they change.

pub mod manifest;
pub mod read;
pub mod snapshot;
pub mod store;
pub mod writer;

pub use manifest::{DataMark, Position};
pub use read::Checkpoint;
pub use snapshot::{Layout, Snapshot};
pub use store::{Found, Store, find, has_any};
pub use writer::Writer;

use std::io;
use std::path::Path;

use dplan_ir::program::Role;

use crate::runtime::RuntimeError;

/// The roles of a parameter that are logical state; `Param` stands for the value that the optimizer updates.
pub const STATE: [Role; 3] = [Role::Param, Role::Moment1, Role::Moment2];

#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("{path}: {source}")]
    Io { path: String, source: io::Error },
    #[error("{path}: another run writes checkpoints here")]
    Locked { path: String },
    #[error("{path}: the manifest is damaged: {why}")]
    Manifest { path: String, why: String },
    #[error("{path}: is missing")]
    Shard { path: String },
    #[error("{path}: has {found} bytes, the manifest says {expected}")]
    Size { path: String, found: u64, expected: u64 },
    #[error("{path}: its content has changed since it was written (hash {found}, the manifest says {expected})")]
    Hash { path: String, found: String, expected: String },
    #[error("{path}: its tensors are not those of the manifest: {why}")]
    Parts { path: String, why: String },
    #[error("{path}: {role} of `{name}`: {why}")]
    Tensor { path: String, role: &'static str, name: String, why: String },
    #[error("{path}: {role} of `{name}` is in the checkpoint, but not in the model{}", and_more(*others))]
    Extra { path: String, role: String, name: String, others: usize },
    #[error("{path}: {what} is {found}, this run has {expected}{hint}")]
    Differs { path: String, what: &'static str, found: String, expected: String, hint: &'static str },
    #[error("{path}: has no checkpoint")]
    Empty { path: String },
    #[error("{path}: no checkpoint is whole: {}", why.join("; "))]
    NoneWhole { path: String, why: Vec<String> },
    #[error("the state after step {step} is not finite ({values} values, the first in {role} of `{name}`); it is not kept")]
    NotFinite { step: u64, values: u64, role: &'static str, name: String },
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
    #[error("the thread that writes checkpoints has ended")]
    WriterEnded,
}

impl CheckpointError {
    fn io(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError + use<> {
        let path = path.display().to_string();
        move |source| CheckpointError::Io { path, source }
    }
}

fn and_more(n: usize) -> String {
    if n == 0 { String::new() } else { format!(" (and {n} more)") }
}
