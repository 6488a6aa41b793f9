//! `mrope`: trains a multimodal model with rotary position embedding, and checks rotations.
//!
//! It is a library so that tests of the workspace can enable its features.
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "test code"))]
#![deny(clippy::print_stderr, clippy::print_stdout)]

mod accept;
mod arguments;
mod bench;
mod compare;
mod data;
mod device;
#[cfg(doctest)]
mod docs;
mod doctor;
mod finetune;
mod generate;
mod gpu;
mod gradcheck;
mod memory;
mod merge;
mod model;
mod positions;
mod score;
#[cfg(feature = "ascend")]
mod serve;
mod stdio;
mod svg;
mod table;
mod train;
mod verify;

use std::error::Error;
use std::ffi::OsString;
use std::io;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use rope_ascend::rope::violations;
use rope_check::alloc::CountingAllocator;

use self::arguments::complaint;
use self::stdio::note;

/// Counts for `mrope bench memory`. For everything else it costs one load and one branch per
/// allocation.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// Rotary position embedding for multimodal training: train with it, check it, measure it.
#[derive(Debug, Parser)]
#[command(
    name = "mrope",
    version,
    after_help = "`mrope COMMAND --help` has examples. Without a command, `mrope` runs `mrope train`."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a small vision-language model on clips of handwritten digits
    #[command(long_about = TRAIN_ABOUT, after_help = TRAIN_EXAMPLES)]
    Train(Box<train::TrainArgs>),
    Data(data::DataArgs),
    /// Fine-tune a vision-language model on a file of conversations
    #[command(long_about = FINETUNE_ABOUT, after_help = FINETUNE_EXAMPLES)]
    Finetune(Box<finetune::FinetuneArgs>),
    /// Compare two recorded steps, layer by layer
    #[command(long_about = COMPARE_ABOUT)]
    Compare(compare::CompareArgs),
    /// Generate answers with a model
    #[command(long_about = GENERATE_ABOUT, after_help = GENERATE_EXAMPLES)]
    Generate(Box<generate::GenerateArgs>),
    /// Compute the log-probabilities of a file's answers
    #[command(long_about = SCORE_ABOUT, after_help = SCORE_EXAMPLES)]
    Score(Box<score::ScoreArgs>),
    /// Merge adapters into the weights of their base model
    #[command(long_about = MERGE_ABOUT)]
    Merge(merge::MergeArgs),
    Verify(verify::VerifyArgs),
    Positions(positions::PositionsArgs),
    /// Check every gradient against finite differences and against the composed operation
    #[command(long_about = GRADCHECK_ABOUT)]
    Gradcheck(gradcheck::GradcheckArgs),
    #[cfg(feature = "ascend")]
    Serve(serve::ServeArgs),
    /// Serve this machine's device to programs on other machines (--features ascend)
    #[cfg(not(feature = "ascend"))]
    #[command(after_help = SERVE_ELSEWHERE)]
    Serve(UnusedArgs),
    Doctor(doctor::DoctorArgs),
    Accept(accept::AcceptArgs),
    Bench(bench::BenchArgs),
}

#[cfg(not(feature = "ascend"))]
const SERVE_ELSEWHERE: &str = "\
This program was built without it. Its options are --device, --bind and
--token-file:
  cargo install --path crates/rope-cli --features ascend
  mrope serve --help";

/// The arguments of a command that this program was built without.
#[cfg(not(feature = "ascend"))]
#[derive(Debug, clap::Args)]
struct UnusedArgs {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    _arguments: Vec<OsString>,
}

const TRAIN_ABOUT: &str = "\
Train a small vision-language model on clips of handwritten digits.

A clip is a few frames, each a grid of scanned digits. The model reads one token
per digit and a question such as \"frame 1 row 0 column 1 ?\", and answers with
the digit in that cell. The rotary embedding is its only source of positions, so
it needs time, height and width to find the cell. Accuracy is measured on digits
that training never shows.";

const FINETUNE_ABOUT: &str = "\
Fine-tune a vision-language model on a file of conversations.

The model is a Hugging Face folder of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5,
GLM-4.1V or GLM-4.5V. The command trains low-rank adapters beside the decoder's
linear layers, or the weights with --full. The loss of a step is the sum over
all labelled tokens of its batch divided by their number: --micro-tokens and
--batching change the memory of a step, not its loss.";

const FINETUNE_EXAMPLES: &str = "\
Examples:
  mrope finetune Qwen2.5-VL-3B-Instruct --data train.jsonl --out run
  mrope finetune FOLDER --data train.jsonl --val test.jsonl --precision bf16 --out run
  mrope finetune FOLDER --data train.jsonl --out run --full --parts merger,decoder
  mrope finetune FOLDER --data train.jsonl --out run --resume
  mrope finetune FOLDER --data train.jsonl --out run --prove-cut
  mrope finetune FOLDER --data train.jsonl --out run --loss grpo --reward exact

The output folder receives log.jsonl, a checkpoint, and at the end adapter/ with
PEFT's files or model/ with a whole model. Ctrl+C finishes the step, saves a
checkpoint and stops.";

const COMPARE_ABOUT: &str = "\
Compare two recorded steps, layer by layer.

`mrope finetune --record-step N` writes a record, on any device, in any precision
and batching; examples/record_transformers.py records a transformers model. Of a run
on several devices, each rank writes one; name one of them, and keep them together.
Inputs, weights, activations, gradients and updates are compared in causal order. The
first tensor that differs by more than rounding is named, with the suspected
fault. The exit code is 1 if a tensor differs.";

const GENERATE_ABOUT: &str = "\
Generate answers to a prompt with pictures, or to the questions of a data file.

Text and pictures go through the folder's chat template, tokenizer and
preprocessor. Decoding is greedy, or samples with --temperature. An answer ends
with a stop token of generation_config.json. Answers do not depend on the batch.";

const GENERATE_EXAMPLES: &str = "\
Examples:
  mrope generate FOLDER --image cat.jpg --prompt \"What is this?\"
  mrope generate FOLDER --adapter run/adapter --data test.jsonl --batch 8
  mrope generate FOLDER --prompt \"Write a line.\" --temperature 0.7 --top-p 0.9 --seed 1";

const SCORE_ABOUT: &str = "\
Compute the log-probabilities of a file's answers, without training.

Each trained token of a conversation has the natural logarithm of its
probability after those before it: the negative of its loss in training. The
mean over all tokens and the perplexity are printed at the end.";

const SCORE_EXAMPLES: &str = "\
Examples:
  mrope score FOLDER --data test.jsonl
  mrope score FOLDER --adapter run/adapter --data test.jsonl --json";

const MERGE_ABOUT: &str = "\
Merge adapters into the weights of their base model.

Each weight becomes W + (alpha / r) B A, summed in f32 and rounded once to its
own type. Memory holds one layer at a time. The folder's other files, its shard
index and the order of tensors are kept. The output folder gets its name once
its logits match the base with the adapters.";

const GRADCHECK_ABOUT: &str = "\
Check every gradient against finite differences and against the composed operation.

On the CPU, the rotation's adjoint and the gradients of cos and sin are compared
with central differences of the forward in f64, and burn's autodiff in f32, bf16
and f16 with exact gradients and with the composed operation. The cases combine
every pairing, axis layout, dimension order, partial rotation and stride, in
place or not, and the rotations of published models. The exit code is 1 if a
gradient is wrong.

An NPU (--device) has no f64: its forward and adjoint are compared with a matrix
in f64 and with each other, by <R x, y> = <x, R' y>.

A dump of another program's rotation is checked by <gq, q_out> = <dq, q>, which
holds for each head of a token if the rotation is linear in q and dq is its
gradient. All values have to be finite.";

const TRAIN_EXAMPLES: &str = "\
Examples:
  mrope train                              the default run, half a minute on two cores
  mrope train --rotary none                no positions: the model guesses among the digits
  mrope train --rotary composed            the same losses from ordinary tensor operations
  mrope train --axes 1d                    one index instead of time, height and width
  mrope train --frames 3 --rows 3 --columns 3 --batch 64 --steps 2500
  mrope train --device ascend              on an Ascend NPU; ascend-sim simulates one
  mrope train --resume                     continue a run that was stopped
  mrope train --json > result.json         one JSON object; progress stays on standard error

The output folder receives model.safetensors, curves.svg, attention.svg (the
model's attention) and a checkpoint. A new run in the same folder replaces them,
the checkpoint with its first one. Checkpoints of other programs stay.";

/// Runs the command that the process's arguments name.
pub fn main() -> ExitCode {
    let mut args: Vec<OsString> = std::env::args_os().collect();
    if args.len() < 2 {
        args.push("train".into());
    }
    let mut command = command();
    let args = match finetune::file::with_file(&command, args) {
        Ok(args) => args,
        Err(error) => {
            note(format_args!("error: {}", complaint(&error)));
            return ExitCode::FAILURE;
        }
    };
    let matches = command.try_get_matches_from_mut(args);
    let mut matches = matches.unwrap_or_else(|error| error.exit());
    let options = matches.subcommand_matches("finetune");
    let written = options.map(|options| finetune::file::written(&command, options));
    let mut cli = arguments::expect_existing(&mut command, &matches)
        .and_then(|()| Cli::from_arg_matches_mut(&mut matches))
        .unwrap_or_else(|error| error.exit());
    if let (Command::Finetune(args), Some(written)) = (&mut cli.command, written) {
        args.written = written;
    }
    let code = match run(cli.command) {
        Ok(code) => code,
        Err(error) if is_of_closed_pipe(&*error) => ExitCode::from(CLOSED_PIPE),
        Err(error) => {
            note(format_args!("error: {}", complaint(&error)));
            ExitCode::FAILURE
        }
    };
    let violations = violations();
    if violations.is_empty() {
        return code;
    }
    note(format_args!(
        "error: the simulated NPU found {} violations; results that look right may be wrong on a \
         device:",
        violations.len()
    ));
    let listed = violations.iter().take(VIOLATIONS_LISTED);
    listed.for_each(|violation| note(format_args!("  {violation}")));
    ExitCode::FAILURE
}

/// The program's command line.
pub fn command() -> clap::Command {
    parser(Cli::command())
}

/// Configures a command and its subcommands. They read -3 as a number, not as an unknown option,
/// so the message states the expected numbers. `--help` is compact: the whole description, then
/// each option in a line or two.
fn parser(command: clap::Command) -> clap::Command {
    let takes_value = |arg: &clap::Arg| !arg.is_positional() && arg.get_action().takes_values();
    let about = command.get_long_about().or(command.get_about()).cloned();
    command
        .mut_args(|arg| {
            let takes_value = takes_value(&arg);
            arg.allow_negative_numbers(takes_value)
        })
        .disable_help_flag(true)
        .next_help_heading(None::<&str>)
        .arg(clap::arg!(help: -h --help "Print help").action(clap::ArgAction::HelpShort))
        .before_help(about.unwrap_or_default())
        .help_template("{before-help}{usage-heading} {usage}\n\n{all-args}{after-help}")
        .mut_subcommands(parser)
}

/// Violations that the last message lists.
const VIOLATIONS_LISTED: usize = 8;

/// The exit code that a shell reports for a program that SIGPIPE ended; Rust ignores the signal. It
/// is not 0, which would say that a check passed that was cut short.
const CLOSED_PIPE: u8 = 128 + 13;

/// True if the reader of standard output closed it, as `head` does when it has seen enough.
fn is_of_closed_pipe(error: &(dyn Error + 'static)) -> bool {
    std::iter::successors(Some(error), |&error| error.source()).any(|error| {
        let kind = match error.downcast_ref::<io::Error>() {
            Some(error) => Some(error.kind()),
            None => error
                .downcast_ref::<serde_json::Error>()
                .and_then(serde_json::Error::io_error_kind),
        };
        kind == Some(io::ErrorKind::BrokenPipe)
    })
}

fn run(command: Command) -> Result<ExitCode, Box<dyn Error>> {
    match command {
        Command::Train(args) => train::run(&args)?,
        Command::Data(args) => return data::run(&args),
        Command::Finetune(args) => return finetune::run(&args),
        Command::Compare(args) => return compare::run(&args),
        Command::Generate(args) => generate::run(&args)?,
        Command::Score(args) => score::run(&args)?,
        Command::Merge(args) => merge::run(&args)?,
        Command::Verify(args) => return verify::run(&args),
        Command::Positions(args) => positions::run(&args)?,
        Command::Gradcheck(args) => return gradcheck::run(&args),
        #[cfg(feature = "ascend")]
        Command::Serve(args) => serve::run(&args)?,
        #[cfg(not(feature = "ascend"))]
        Command::Serve(_) => return Err(device::built_without("`mrope serve`", "ascend").into()),
        Command::Doctor(args) => doctor::run(&args)?,
        Command::Accept(args) => return accept::run(&args),
        Command::Bench(args) => return bench::run(&args),
    }
    Ok(ExitCode::SUCCESS)
}
