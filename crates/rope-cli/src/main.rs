//! `mrope`: see the library of this package.

use std::process::ExitCode;

fn main() -> ExitCode {
    rope_cli::main()
}
