//! Checks of the workspace: `cargo xtask abi [--headers FOLDER]`.

mod abi;

use std::process::ExitCode;

const USAGE: &str = "usage: cargo xtask abi [--headers FOLDER]

abi   checks the declarations of rope-ascend and of the simulator against the vendor's headers.
      FOLDER holds `acl/acl.h`; without it the headers are taken from the PyPI wheel
      torch-npu 2.14.0, downloaded with pip into the target folder.";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["abi"] => abi::run(None),
        ["abi", "--headers", folder] => abi::run(Some(folder.as_ref())),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(summary) => {
            println!("{summary}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
