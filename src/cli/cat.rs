//! `dplan cat`: any file dplan reads, as text.

use super::model::{self, ModelArgs};
use super::output;
use super::{Outcome, Result};
use crate::planfile::PlanFile;
use clap::ValueEnum;
use dplan_ir::{grad, text};
use std::path::PathBuf;

/// Print a model as graph text, or the levels of a plan.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  dplan cat config.json\n  dplan cat plan.json --level program")]
pub struct Args {
    /// A model (config.json or graph JSON) or a plan.
    file: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
    /// What to print: a model has a graph and its derivative, a plan also programs.
    #[arg(long, default_value = "graph")]
    level: Level,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Level {
    /// The forward pass.
    Graph,
    /// Forward and backward pass.
    Backward,
    /// Every value's sharding, with reshards.
    Sharded,
    /// What every rank does.
    Program,
}

pub fn run(args: Args) -> Result<Outcome> {
    if model::is_plan(&args.file)? {
        let file = PlanFile::read(&args.file)?;
        match args.level {
            Level::Graph => {
                let mut forward = file.graph.clone();
                forward.strip_backward();
                output::put!("{}", text::print_graph(&forward));
            }
            Level::Backward => output::put!("{}", text::print_graph(&file.graph)),
            Level::Sharded => {
                let sharded = dplan_planner::lower::shard(&file.graph, &file.plan)?;
                output::put!("{}", text::print_sharded(&sharded, &file.graph));
            }
            Level::Program => output::put!("{}", text::print_program(&file.program, &file.graph)),
        }
        return Ok(Outcome::Done);
    }
    let model = model::load(&args.file, &args.model)?;
    match args.level {
        Level::Graph => output::put!("{}", text::print_graph(&model.graph)),
        Level::Backward => output::put!("{}", text::print_graph(&grad::differentiate(&model.graph)?)),
        Level::Sharded | Level::Program => {
            return Err(anyhow::anyhow!(
                "{}: a model has no {} yet; compile it first",
                args.file.display(),
                if args.level == Level::Sharded { "shardings" } else { "programs" }
            )
            .into());
        }
    }
    Ok(Outcome::Done)
}
