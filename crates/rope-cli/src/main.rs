//! `mrope`: train, verify and gradient-check multimodal rotary position embedding.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod gradcheck;

#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Check every gradient against finite differences and against the composed operation.
    Gradcheck(gradcheck::GradcheckArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Gradcheck(args) => gradcheck::run(&args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::from(2)
    })
}
