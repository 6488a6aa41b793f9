//! `mrope`: train, verify and gradient-check multimodal rotary position embedding.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod verify;

#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compare golden vectors and frequency tables with what this crate computes.
    Verify(verify::VerifyArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Verify(args) => verify::run(&args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::from(2)
    })
}
