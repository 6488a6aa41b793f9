//! The counted subjects, and the processes that count them.

use std::error::Error;
use std::process::{Command, Stdio};

use clap::{Args, ValueEnum};
use rope_bench::burn::attention;
use rope_bench::burn::memory::count;
use rope_bench::burn::{Meter as _, float};
use rope_bench::cases::DTYPES;
use rope_bench::memory::{MODELS, Model, add_ratios};
use rope_bench::rows::{MemoryRow, read_json_lines};
use rope_check::buffer::DType;

use super::attention::table as attention_table;
use super::table::table;
use crate::arguments::{MAX_TOKENS, count_in, one_of};
use crate::bench::meter::OpenMeter;
use crate::bench::{print, progress};
use crate::device::Device;
use crate::memory;

/// Count the bytes that a graph keeps for the backward, and the peaks of forward and backward.
///
/// q and k, [1, heads, tokens, head_dim], pass through a chain of rotations, forward and backward,
/// so that only rotations are counted. The command compares the fused operation, the same composed
/// of ordinary operations, and burn::nn::RotaryEncoding, which always pairs adjacent channels and
/// rotates only whole heads. On the CPU it counts every allocation of the process exactly. On an
/// NPU (--device) the tensors are on the NPU, and it counts the bytes of its memory pool. On a GPU
/// the peak is the growth of the pools of burn's runtime, which round up.
///
/// With --norm, the RMSNorm of the heads and the rotation: fused, burn::nn::RmsNorm with the fused
/// rotation, and both composed.
///
/// With --attention, causal attention instead: burn-attention's against ordinary operations on the
/// whole score matrix, at several numbers of tokens.
///
/// All figures except the graph's nodes grow linearly with the tokens: the defaults are small so
/// that the run is short.
#[derive(Args, Clone, Debug)]
pub(crate) struct MemoryArgs {
    /// Models that give the shapes of q and k; all by default.
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    #[arg(value_parser = one_of(&MODELS, |model| model.name))]
    shape: Vec<Model>,
    /// Numbers of rotations in the chain; the table shows the largest.
    #[arg(long, value_delimiter = ',', value_name = "NUMBERS")]
    #[arg(value_parser = count_in(1..=MAX_LAYERS))]
    layers: Vec<usize>,
    /// Number of tokens.
    #[arg(long, value_name = "NUMBER", value_parser = count_in(1..=MAX_TOKENS))]
    tokens: Option<usize>,
    /// Element types of q and k.
    #[arg(long, value_delimiter = ',', value_name = "NAMES", default_values = ["f32", "bf16"])]
    #[arg(value_parser = one_of(&DTYPES, DType::name))]
    dtype: Vec<DType>,
    /// With gradient checkpointing, without it, or both.
    #[arg(long, value_enum, default_value = "both", value_name = "WHICH")]
    checkpointing: Checkpointing,
    /// Device whose memory is counted: cpu, gpu (the first GPU), gpu:N, ascend (the first NPU),
    /// ascend:N, or ascend-sim (a simulated NPU).
    #[arg(long, default_value = "cpu")]
    device: Device,
    /// Measure attention instead of rotations: a key head of Qwen2.5-VL-7B and its query heads.
    #[arg(long, conflicts_with_all = ["shape", "layers", "checkpointing"])]
    attention: bool,
    /// Measure the norm of the heads with the rotation, for models that have it.
    #[arg(long, conflicts_with = "attention")]
    norm: bool,
    /// Use few tokens and layers, to check that everything runs.
    #[arg(long)]
    quick: bool,
    /// Print one JSON object per row and line, and nothing else, on standard output.
    #[arg(long)]
    json: bool,
}

const MAX_LAYERS: usize = 1000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Checkpointing {
    With,
    Without,
    Both,
}

impl Checkpointing {
    fn values(self) -> &'static [bool] {
        match self {
            Self::With => &[true],
            Self::Without => &[false],
            Self::Both => &[false, true],
        }
    }
}

/// Tokens and layers by default: on the CPU and on a GPU, on an NPU (the simulator is slow), and of
/// a quick run.
const DEFAULTS: [(usize, &[usize]); 3] = [(256, &[1, 12, 36]), (32, &[1, 36]), (16, &[1, 3])];

struct Plan {
    models: Vec<Model>,
    tokens: usize,
    layers: Vec<usize>,
    checkpointing: Checkpointing,
    device: Device,
    norm: bool,
}

impl Plan {
    fn new(args: &MemoryArgs) -> Self {
        let (tokens, layers) = match (args.quick, &args.device) {
            (true, _) => DEFAULTS[2],
            (false, Device::Cpu | Device::Gpu(_)) => DEFAULTS[0],
            (false, _) => DEFAULTS[1],
        };
        fn or<T: Clone>(chosen: &[T], default: &[T]) -> Vec<T> {
            if chosen.is_empty() { default } else { chosen }.to_vec()
        }
        let mut layers = or(&args.layers, layers);
        layers.sort_unstable();
        layers.dedup();
        let mut models = or(&args.shape, &MODELS);
        if args.norm {
            models.retain(Model::has_norm);
        }
        Self {
            models,
            norm: args.norm,
            tokens: args.tokens.unwrap_or(tokens),
            layers,
            checkpointing: args.checkpointing,
            device: args.device.clone(),
        }
    }

    /// Refuses tensors that the memory does not hold: q and k, what they are computed from, what is
    /// made of them, and its gradient.
    fn expect_memory(&self, dtypes: &[DType]) -> Result<(), Box<dyn Error>> {
        for model in &self.models {
            for &dtype in dtypes {
                let needed = 4.0 * model.at(self.tokens, dtype)?.tensor_bytes() as f64;
                let what = format!("{} in {}", model.name, dtype.name());
                let instead = "choose fewer --tokens";
                memory::expect(&self.device, needed, &what, instead)?;
            }
        }
        Ok(())
    }

    /// The rows of one element type, from a process of its own: burn sets the default type of a
    /// device once in a process, and `RotaryEncoding` has no other way to 16 bits.
    fn in_own_process(&self, dtype: DType) -> Result<Vec<MemoryRow>, Box<dyn Error>> {
        let models: Vec<&str> = self.models.iter().map(|model| model.name).collect();
        let layers: Vec<String> = self.layers.iter().map(usize::to_string).collect();
        let checkpointing = match self.checkpointing {
            Checkpointing::With => "with",
            Checkpointing::Without => "without",
            Checkpointing::Both => "both",
        };
        let output = Command::new(std::env::current_exe()?)
            .args(["bench", "memory", "--json"])
            .args(["--shape", &models.join(",")])
            .args(["--layers", &layers.join(",")])
            .args(["--tokens", &self.tokens.to_string()])
            .args(["--dtype", dtype.name()])
            .args(["--checkpointing", checkpointing])
            .args(["--device", &self.device.to_string()])
            .args(self.norm.then_some("--norm"))
            .stderr(Stdio::inherit())
            .output()?;
        if !output.status.success() {
            return Err("the measurement stopped, for the reason above".into());
        }
        Ok(read_json_lines(&String::from_utf8(output.stdout)?)?)
    }

    fn rows(&self, dtype: DType) -> Result<Vec<MemoryRow>, Box<dyn Error>> {
        let meter = OpenMeter::open(&self.device)?;
        if !meter.has(dtype) {
            return Ok(Vec::new());
        }
        meter.device().configure(float(dtype))?;
        let checkpointing = self.checkpointing.values();
        let bar = progress(self.models.len() * checkpointing.len())?;
        let mut rows = Vec::new();
        for model in &self.models {
            let subject = model.at(self.tokens, dtype)?;
            bar.set_message(format!("{} {}", subject.shape.name, dtype.name()));
            for &checkpointing in checkpointing {
                let mut counted = count(&subject, self.norm, &meter, checkpointing, &self.layers)?;
                add_ratios(&mut counted);
                rows.append(&mut counted);
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        Ok(rows)
    }
}

/// Counts, and reports what was counted.
///
/// # Errors
/// If the device is not there, or an output cannot be written.
pub(crate) fn run(args: &MemoryArgs) -> Result<(), Box<dyn Error>> {
    if args.attention {
        return count_attention(args);
    }
    let plan = Plan::new(args);
    if plan.models.is_empty() {
        return Err(
            "the models of --shape have no norm of the heads; expected qwen3-vl-8b or qwen3.5"
                .into(),
        );
    }
    plan.expect_memory(&args.dtype)?;
    let mut rows = Vec::new();
    if let [dtype] = args.dtype[..] {
        rows = plan.rows(dtype)?;
    } else {
        for &dtype in &args.dtype {
            rows.extend(plan.in_own_process(dtype)?);
        }
    }
    print(&rows, args.json, table)
}

fn count_attention(args: &MemoryArgs) -> Result<(), Box<dyn Error>> {
    let tokens: &[usize] = match &args.tokens {
        Some(tokens) => std::slice::from_ref(tokens),
        None if args.quick => &attention::QUICK_TOKENS,
        None => &attention::TOKENS,
    };
    for &dtype in &args.dtype {
        let needed = attention::least_bytes(tokens, dtype);
        let what = format!("attention in {}", dtype.name());
        memory::expect(&args.device, needed, &what, "choose fewer --tokens")?;
    }
    let meter = OpenMeter::open(&args.device)?;
    let mut rows = Vec::new();
    for &dtype in args.dtype.iter().filter(|dtype| meter.has(**dtype)) {
        let bar = progress(2 * tokens.len())?;
        rows.extend(attention::count(&meter, tokens, dtype, &mut || bar.inc(1))?);
        bar.finish_and_clear();
    }
    print(&rows, args.json, attention_table)
}
