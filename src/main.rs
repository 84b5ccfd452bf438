//! The binary: arguments in, exit status out. Everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    dplan::cli::main()
}
