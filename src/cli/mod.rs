//! The command line: one file per command, each with its own arguments and a `run`.
//!
//! Exit status: 0 done; 1 the answer is no (infeasible, violated, differs); 2 bad input; 3 a fault while running. A command returns
//! [`Outcome`] or an [`Failure`] that carries its status; `main` prints it and exits. Nothing is written before a command knows it will succeed.

mod args;
mod calibrate;
mod cat;
mod compare;
mod compile;
mod dropout;
mod explain;
mod fuzz;
mod inspect;
mod kernels;
mod model;
mod notes;
mod output;
mod profile;
mod progress;
mod replay;
mod report;
mod run;
mod schema;
mod sensitivity;
mod trace;
mod verify;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// A compiler for distributed training: proves the fastest parallel plan, lowers it to per-rank programs, verifies and runs them.
#[derive(Parser)]
#[command(name = "dplan", version, about, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Compile(compile::Args),
    Explain(explain::Args),
    Verify(verify::Args),
    Run(run::Args),
    Trace(trace::Args),
    Inspect(inspect::Args),
    Calibrate(calibrate::Args),
    Replay(replay::Args),
    Compare(compare::Args),
    Profile(profile::Args),
    Cat(cat::Args),
    Kernels(kernels::Args),
    Fuzz(fuzz::Args),
    Schema(schema::Args),
}

/// What a command that did its work says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    Done,
    /// The question was understood and the answer is no; it has been printed.
    No,
}

/// Why a command did not do its work.
#[derive(Debug)]
pub struct Failure {
    pub status: Status,
    pub error: anyhow::Error,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    BadInput,
    Fault,
}

/// Input errors are the default: `?` on any error of an importer or parser.
impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure { status: Status::BadInput, error: error.into() }
    }
}

impl Failure {
    pub fn fault(error: impl Into<anyhow::Error>) -> Failure {
        Failure { status: Status::Fault, error: error.into() }
    }
}

pub type Result<T> = std::result::Result<T, Failure>;

/// Parses the arguments, runs the command, prints its error if it has one.
pub fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Compile(args) => compile::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Run(args) => run::run(args),
        Command::Trace(args) => trace::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Calibrate(args) => calibrate::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Compare(args) => compare::run(args),
        Command::Profile(args) => profile::run(args),
        Command::Cat(args) => cat::run(args),
        Command::Kernels(args) => kernels::run(args),
        Command::Fuzz(args) => fuzz::run(args),
        Command::Schema(args) => schema::run(args),
    };
    match outcome {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::No) => ExitCode::from(1),
        Err(failure) => {
            eprintln!("error: {:#}", failure.error);
            ExitCode::from(match failure.status {
                Status::BadInput => 2,
                Status::Fault => 3,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_shows_an_example() {
        for command in Cli::command().get_subcommands() {
            let help = command.clone().render_long_help().to_string();
            assert!(help.contains("dplan "), "`dplan {} --help` has no example", command.get_name());
        }
    }
}
