//! The end of a program.

use std::process::ExitCode;

/// Prints what a program found, or why it failed.
pub(crate) fn print(outcome: Result<String, String>) -> ExitCode {
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
