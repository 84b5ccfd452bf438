//! JSON Schemas (draft 2020-12) of the files that dplan reads and writes, for editors and other tools.
//!
//! The parsers do not use them: their messages are better. That both accept the same files is a test.

/// dplan's own graph, or a Hugging Face config.
pub const MODEL: &str = include_str!("model.json");
/// A cluster file.
pub const CLUSTER: &str = include_str!("cluster.json");
/// `plan.json`.
pub const PLAN: &str = include_str!("plan.json");
