//! `dplan schema`: the JSON Schemas of the files dplan reads and writes.

use super::output;
use super::{Outcome, Result};
use clap::ValueEnum;

/// Print the JSON Schema of a file format.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  dplan schema model > model.schema.json")]
pub struct Args {
    which: Which,
}

#[derive(Clone, Copy, ValueEnum)]
enum Which {
    /// A model graph in dplan's own JSON.
    Model,
    /// A cluster description.
    Cluster,
    /// A plan as `compile` writes it.
    Plan,
}

pub fn run(args: Args) -> Result<Outcome> {
    output::put!(
        "{}",
        match args.which {
            Which::Model => crate::schema::MODEL,
            Which::Cluster => crate::schema::CLUSTER,
            Which::Plan => crate::schema::PLAN,
        }
    );
    Ok(Outcome::Done)
}
