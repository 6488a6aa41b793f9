//! mrope
mod train;
use clap::Parser;
#[derive(Parser)]
struct Cli { #[command(flatten)] run: train::RunConfig }
fn main(){ let c = Cli::parse(); train::quick(&c.run).expect("run"); }
