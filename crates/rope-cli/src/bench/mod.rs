//! `mrope bench`: what a rotation costs in bytes and in time, compared with other implementations.

mod burn_speed;
mod checkpoint;
mod gpu_speed;
mod memory;
mod meter;
mod model;
mod norm_scheme;
mod norm_speed;
mod output;
mod scheme;
mod speed;
mod step;

use std::error::Error;
use std::process::ExitCode;

use clap::{Args, Subcommand};

/// Measure memory and time of rotations against a plain copy, composed operations and burn's own
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Clone, Debug, Subcommand)]
enum What {
    Checkpoint(checkpoint::CheckpointArgs),
    Memory(memory::MemoryArgs),
    Model(model::ModelArgs),
    Speed(speed::SpeedArgs),
    Step(step::StepArgs),
}

/// Runs a benchmark; exit code 1 if `--check` finds a bar that the results do not meet.
///
/// # Errors
/// If a result is wrong, in which case it is not timed, or an output cannot be written.
pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode, Box<dyn Error>> {
    match &args.what {
        What::Checkpoint(args) => checkpoint::run(args),
        What::Memory(args) => memory::run(args),
        What::Model(args) => model::run(args),
        What::Speed(args) => speed::run(args),
        What::Step(args) => step::run(args),
    }
}
