//! The MODEL argument and the options that complete it.

use crate::import::{self, ImportOptions, Model};
use anyhow::Context;
use dplan_ir::dtype::DType;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// What a model file leaves open.
#[derive(clap::Args, Clone)]
pub struct ModelArgs {
    /// Tokens in a sequence; if absent, what the model's config says, capped.
    #[arg(long, value_name = "S")]
    pub seq: Option<u64>,
    /// Type of parameters and activations [default: f32 on CPU ranks, else the model's own 16-bit type or bf16].
    #[arg(long, value_name = "f32|f64|bf16|f16", value_parser = super::args::precision)]
    pub precision: Option<DType>,
    /// Read a config of an unknown family as this one.
    #[arg(long = "as", value_name = "FAMILY")]
    pub family: Option<String>,
}

/// Reads the model in its final compute type, f32 if none is asked for.
///
/// # Errors
/// Of the importer: file, place, what was wrong and what would be right.
pub fn load(path: &Path, args: &ModelArgs) -> anyhow::Result<Model> {
    load_for(path, args, DType::F32)
}

/// As [`load`], with the default precision of the device that will run it.
///
/// # Errors
/// As [`load`].
pub fn load_for(path: &Path, args: &ModelArgs, default: DType) -> anyhow::Result<Model> {
    let options = ImportOptions { seq: args.seq, compute: args.precision.unwrap_or(default), family: args.family.clone() };
    Ok(import::model(path, &options)?)
}

/// Whether a file is a plan: its first key says so. Anything else is left to the importer.
///
/// # Errors
/// If the file cannot be read.
pub fn is_plan(path: &Path) -> anyhow::Result<bool> {
    if path.is_dir() {
        return Ok(false);
    }
    let mut head = [0u8; 64];
    let mut file = File::open(path).with_context(|| format!("{}: cannot be read", path.display()))?;
    let mut filled = 0;
    while filled < head.len() {
        match file.read(&mut head[filled..]).with_context(|| format!("{}: cannot be read", path.display()))? {
            0 => break,
            n => filled += n,
        }
    }
    Ok(String::from_utf8_lossy(&head[..filled]).contains("\"dplan_plan\""))
}
