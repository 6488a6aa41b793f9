//! `mrope bench memory`.

use std::error::Error;
use std::fmt::Write as _;
use std::process::{Command, ExitCode, Stdio};

use burn::tensor::{DType as BurnDType, Device as BurnDevice, FloatDType, Tensor, TensorData};
use clap::{Args, ValueEnum};
use rope_benches::bars::{self, names};
use rope_benches::cases::DType;
use rope_benches::chart;
use rope_benches::rotation::positions;
use rope_benches::rows::{MemoryRow, Source, bytes, read_json_lines};
use rope_benches::shapes::{FLUX, QWEN2_5_VL_7B, QWEN3_5, QWEN3_VL_8B, Shape};
use rope_check::alloc::Usage;
use rope_core::{AxisLayout, Pairing, RotarySpec};

use super::meter::{Meter, Sizes};
use super::output::{OutputArgs, progress};
use super::scheme::Scheme;
use crate::device::Device;

/// Count what a graph keeps for the backward, and what forward and backward hold at their peak.
///
/// q and k, [1, heads, tokens, head_dim], go through so many rotations one after another, forward and backward, so that
/// nothing but rotations is counted. Compared are the fused operation, the same composed from ordinary operations, and
/// burn::nn::RotaryEncoding, which always pairs adjacent channels and rotates whole heads only. On the CPU every allocation of
/// the process is counted, exactly; on an NPU (--device) the bytes of its memory pool, with the tensors on the NPU. Rows called "calculated" are formulas
/// for schemes that are not here; docs/benchmarks.md has them.
///
/// Figures other than the graph's own nodes grow in proportion to the tokens: the defaults are small so that the run is short.
#[derive(Args, Clone, Debug)]
pub(crate) struct MemoryArgs {
    /// Models whose q and k to take; all by default.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAMES")]
    shape: Vec<Model>,
    /// Numbers of rotations one after another; the table shows the largest.
    #[arg(long, value_delimiter = ',', value_name = "NUMBERS", value_parser = positive)]
    layers: Vec<usize>,
    /// Tokens.
    #[arg(long, value_name = "NUMBER", value_parser = positive)]
    tokens: Option<usize>,
    /// Element types of q and k.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAMES", default_values = ["f32", "bf16"])]
    dtype: Vec<DTypeArg>,
    /// With gradient checkpointing, without it, or both.
    #[arg(long, value_enum, default_value = "both", value_name = "WHICH")]
    checkpointing: Checkpointing,
    /// Whose memory: cpu, ascend (the first NPU), ascend:N, or ascend-sim (a simulated NPU).
    #[arg(long, default_value = "cpu")]
    device: Device,
    /// A few tokens and layers, to see that everything runs.
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    output: OutputArgs,
}

pub(super) fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err("a whole number above 0 is expected".to_owned()),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Model {
    #[value(name = "qwen2.5-vl-7b")]
    Qwen25Vl7B,
    #[value(name = "qwen3-vl-8b")]
    Qwen3Vl8B,
    #[value(name = "qwen3.5")]
    Qwen35,
    /// [1, 24, 28800, 128], scaled to the tokens
    Flux,
}

impl Model {
    fn shape(self) -> Shape {
        match self {
            Self::Qwen25Vl7B => QWEN2_5_VL_7B,
            Self::Qwen3Vl8B => QWEN3_VL_8B,
            Self::Qwen35 => QWEN3_5,
            Self::Flux => FLUX,
        }
    }

    fn rotation(self) -> (Pairing, AxisLayout) {
        match self {
            Self::Qwen25Vl7B => (Pairing::Half, AxisLayout::Contiguous(vec![16, 24, 24])),
            Self::Qwen3Vl8B => (Pairing::Half, AxisLayout::Striped(vec![24, 20, 20])),
            Self::Qwen35 => (Pairing::Half, AxisLayout::Striped(vec![11, 11, 10])),
            Self::Flux => (Pairing::Adjacent, AxisLayout::PerAxis(vec![8, 28, 28])),
        }
    }
}

/// Element types by the names that results have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum DTypeArg {
    F32,
    Bf16,
    F16,
}

impl From<DTypeArg> for DType {
    fn from(argument: DTypeArg) -> Self {
        match argument {
            DTypeArg::F32 => Self::F32,
            DTypeArg::Bf16 => Self::Bf16,
            DTypeArg::F16 => Self::F16,
        }
    }
}

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

/// What is used where nothing was asked for: on the CPU, on an NPU (the simulator is slow), and for a quick run.
const DEFAULTS: [(usize, &[usize]); 3] = [(256, &[1, 12, 36]), (32, &[1, 36]), (16, &[1, 3])];

struct Plan {
    models: Vec<Model>,
    tokens: usize,
    layers: Vec<usize>,
    dtypes: Vec<DTypeArg>,
    checkpointing: &'static [bool],
    device: Device,
}

impl Plan {
    fn new(args: &MemoryArgs) -> Self {
        let (tokens, layers) = match (args.quick, &args.device) {
            (true, _) => DEFAULTS[2],
            (false, Device::Cpu) => DEFAULTS[0],
            (false, _) => DEFAULTS[1],
        };
        let mut layers = if args.layers.is_empty() {
            layers.to_vec()
        } else {
            args.layers.clone()
        };
        layers.sort_unstable();
        layers.dedup();
        let all = || Model::value_variants().to_vec();
        Self {
            models: if args.shape.is_empty() {
                all()
            } else {
                args.shape.clone()
            },
            tokens: args.tokens.unwrap_or(tokens),
            layers,
            dtypes: args.dtype.clone(),
            checkpointing: args.checkpointing.values(),
            device: args.device.clone(),
        }
    }

    /// One element type's rows, from a process of its own: burn sets the default type of a device once in a process, and
    /// there is no other way to `RotaryEncoding` in 16 bits.
    fn in_own_process(&self, dtype: DTypeArg) -> Result<Vec<MemoryRow>, Box<dyn Error>> {
        let models: Vec<String> = self.models.iter().map(argument).collect();
        let layers: Vec<String> = self.layers.iter().map(usize::to_string).collect();
        let checkpointing = match self.checkpointing {
            [true] => "with",
            [false] => "without",
            _ => "both",
        };
        let output = Command::new(std::env::current_exe()?)
            .args(["bench", "memory", "--json"])
            .args(["--shape", &models.join(","), "--layers", &layers.join(",")])
            .args(["--tokens", &self.tokens.to_string()])
            .args(["--dtype", &argument(&dtype)])
            .args([
                "--checkpointing",
                checkpointing,
                "--device",
                &self.device.to_string(),
            ])
            .stderr(Stdio::inherit())
            .output()?;
        if !output.status.success() {
            return Err("the measurement stopped, as said above".into());
        }
        Ok(read_json_lines(&String::from_utf8(output.stdout)?)?)
    }

    fn rows(&self, dtype: DType) -> Result<Vec<MemoryRow>, Box<dyn Error>> {
        let meter = Meter::open(&self.device)?;
        meter.device().configure(float(dtype))?;
        let bar = progress(self.models.len() * self.checkpointing.len())?;
        let mut rows = Vec::new();
        for &model in &self.models {
            let subject = Subject::new(model, self.tokens, dtype)?;
            bar.set_message(format!("{} {}", subject.shape.name, dtype.name()));
            for &checkpointing in self.checkpointing {
                let mut counted = subject.count(&meter, checkpointing, &self.layers)?;
                add_ratios(&mut counted);
                rows.append(&mut counted);
                bar.inc(1);
            }
            if self.device == Device::Cpu {
                rows.extend(subject.calculated(model, &self.layers));
            }
        }
        bar.finish_and_clear();
        Ok(rows)
    }
}

/// Counts, and says what it counted.
///
/// # Errors
/// If the NPU that was asked for is not there, or an output cannot be written.
pub(crate) fn run(args: &MemoryArgs) -> Result<ExitCode, Box<dyn Error>> {
    let output = args.output.open()?;
    let plan = Plan::new(args);
    let mut rows = Vec::new();
    if let [dtype] = plan.dtypes[..] {
        rows = plan.rows(dtype.into())?;
    } else {
        for &dtype in &plan.dtypes {
            rows.extend(plan.in_own_process(dtype)?);
        }
    }
    let bars = bars::memory(&rows);
    output.write(&rows, || chart::memory(&rows), || table(&rows), &bars)
}

/// A choice as it is written on the command line.
fn argument(choice: &impl ValueEnum) -> String {
    let value = choice.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}

fn float(dtype: DType) -> FloatDType {
    match dtype {
        DType::F32 => FloatDType::F32,
        DType::Bf16 => FloatDType::BF16,
        DType::F16 => FloatDType::F16,
    }
}

/// q and k of a model, and what is known about them.
struct Subject {
    shape: Shape,
    spec: RotarySpec,
    dtype: DType,
    note: String,
}

impl Subject {
    fn new(model: Model, tokens: usize, dtype: DType) -> Result<Self, Box<dyn Error>> {
        let shape = model.shape();
        let (pairing, axes) = model.rotation();
        let note = match model {
            Model::Flux => format!("scaled from {} to {tokens} tokens", shape.seq),
            _ => String::new(),
        };
        Ok(Self {
            spec: shape.spec(pairing, axes)?,
            shape: shape.at(tokens),
            dtype,
            note,
        })
    }

    fn bytes(&self, heads: usize) -> usize {
        self.shape.seq * heads * self.shape.head_dim * self.dtype.size_bytes()
    }

    /// Allocations from here up may hold a value per token and pair; the graph's own nodes are smaller.
    fn data_bytes(&self) -> usize {
        self.shape.seq * self.shape.rotary_dim / 2 * 2
    }

    fn row(&self, device: &str, implementation: &str, layers: usize, source: Source) -> MemoryRow {
        let Shape {
            heads,
            kv_heads,
            head_dim,
            rotary_dim,
            ..
        } = self.shape;
        MemoryRow {
            shape: self.shape.name.to_owned(),
            tokens: self.shape.seq,
            heads,
            kv_heads,
            head_dim,
            rotary_dim,
            dtype: self.dtype,
            checkpointing: false,
            device: device.to_owned(),
            implementation: implementation.to_owned(),
            layers,
            source,
            gradient_bytes: self.bytes(heads + kv_heads),
            retained_bytes: None,
            retained_data_bytes: None,
            forward_peak_bytes: None,
            backward_peak_bytes: None,
            backward_large_peak_bytes: None,
            step_peak_bytes: None,
            forward_allocations: None,
            forward_large_allocations: None,
            backward_allocations: None,
            backward_large_allocations: None,
            composed_ratio: None,
            rotary_encoding_ratio: None,
            note: self.note.clone(),
        }
    }

    /// `row` with what forward and backward did; a device may not count allocations.
    fn counted(
        row: MemoryRow,
        [forward, backward]: [Usage; 2],
        counts_allocations: bool,
    ) -> MemoryRow {
        let peak = (forward.retained_bytes + backward.peak_bytes.cast_signed()).max(0);
        let allocations = |count: usize| counts_allocations.then_some(count);
        MemoryRow {
            retained_bytes: Some(forward.retained_bytes),
            retained_data_bytes: Some(forward.retained_data_bytes),
            forward_peak_bytes: Some(forward.peak_bytes),
            backward_peak_bytes: Some(backward.peak_bytes),
            backward_large_peak_bytes: allocations(backward.large_peak_bytes),
            step_peak_bytes: Some(forward.peak_bytes.max(peak.cast_unsigned())),
            forward_allocations: allocations(forward.allocations),
            forward_large_allocations: allocations(forward.large_allocations),
            backward_allocations: allocations(backward.allocations),
            backward_large_allocations: allocations(backward.large_allocations),
            ..row
        }
    }

    /// q and k that are not leaves and that nobody else holds, as projections leave them, and the leaves.
    fn inputs(&self, device: &BurnDevice) -> [(Tensor<4>, Tensor<4>); 2] {
        let dtype = match self.dtype {
            DType::F32 => BurnDType::F32,
            DType::Bf16 => BurnDType::BF16,
            DType::F16 => BurnDType::F16,
        };
        let leaf = |heads: usize| {
            let shape = [1, heads, self.shape.seq, self.shape.head_dim];
            let values: Vec<f32> = rope_benches::rotation::values(shape.iter().product());
            let data = TensorData::new(values, shape).convert_dtype(dtype);
            Tensor::<4>::from_data(data, (device, dtype)).require_grad()
        };
        let (q, k) = (leaf(self.shape.heads), leaf(self.shape.kv_heads));
        let start = (q.clone() * 2.0, k.clone() * 2.0);
        [(q, k), start]
    }

    /// Every scheme on a device.
    fn count(
        &self,
        meter: &Meter,
        checkpointing: bool,
        layers: &[usize],
    ) -> Result<Vec<MemoryRow>, Box<dyn Error>> {
        let device = meter.device().autodiff();
        let device = if checkpointing {
            device.gradient_checkpointing()
        } else {
            device
        };
        let positions = positions(self.spec.axes(), self.shape.seq)?;
        let mut rows = Vec::new();
        for (name, scheme) in Scheme::all(&self.spec, &positions, &device)? {
            let row = |layers| MemoryRow {
                checkpointing,
                ..self.row(meter.name(), name, layers, meter.source())
            };
            let Some(scheme) = scheme else {
                rows.extend(layers.iter().map(|&layers| MemoryRow {
                    note: "rotates whole heads only".into(),
                    ..row(layers)
                }));
                continue;
            };
            // Pools, tables and what kernels look up are made on first use.
            self.step(1, &device, &scheme, meter)?;
            for &layers in layers {
                let usage = self.step(layers, &device, &scheme, meter)?;
                rows.push(Self::counted(
                    row(layers),
                    usage,
                    meter.counts_allocations(),
                ));
            }
        }
        Ok(rows)
    }

    /// One forward and one backward through `layers` rotations, counted each.
    fn step(
        &self,
        layers: usize,
        device: &BurnDevice,
        scheme: &Scheme,
        meter: &Meter,
    ) -> Result<[Usage; 2], Box<dyn Error>> {
        let sizes = Sizes {
            data_bytes: self.data_bytes(),
            large_bytes: self.bytes(self.shape.heads.min(self.shape.kv_heads)),
        };
        let [(q, k), start] = self.inputs(device);
        let mut state = Some(start);
        let forward = meter.count(sizes, &mut || {
            for _ in 0..layers {
                state = state.take().map(|(q, k)| scheme.pair(q, k));
            }
        })?;
        let (q_rotated, k_rotated) = state.ok_or("nothing was rotated")?;
        let loss = q_rotated.sum() + k_rotated.sum();
        let mut gradients = None;
        let backward = meter.count(sizes, &mut || gradients = Some(loss.backward()))?;
        let reached = gradients
            .is_some_and(|gradients| q.grad(&gradients).is_some() && k.grad(&gradients).is_some());
        if !reached {
            return Err("the backward did not reach q and k".into());
        }
        Ok([forward, backward])
    }

    /// Schemes that are not here, by the formulas in docs/benchmarks.md.
    fn calculated(&self, model: Model, layers: &[usize]) -> Vec<MemoryRow> {
        let Shape {
            seq,
            heads,
            kv_heads,
            head_dim,
            rotary_dim,
            ..
        } = self.shape;
        let (q, k) = (self.bytes(heads), self.bytes(kv_heads));
        let (q_part, k_part) = (q / head_dim * rotary_dim, k / head_dim * rotary_dim);
        // cos or sin, as wide as the rotated channels.
        let wide = seq * rotary_dim * self.dtype.size_bytes();
        let mut rows = Vec::new();
        for &layers in layers {
            let mut row = |name: &str, retained: usize, temporaries: Option<usize>, note: &str| {
                rows.push(MemoryRow {
                    retained_bytes: Some(retained.cast_signed()),
                    retained_data_bytes: Some(retained.cast_signed()),
                    forward_peak_bytes: temporaries.map(|temporaries| retained + temporaries),
                    note: note.to_owned(),
                    ..self.row("any", name, layers, Source::Calculated)
                });
            };
            row(
                "torch_npu npu_rotary_mul",
                layers * (q_part + k_part),
                None,
                "keeps x of q and of k in every layer",
            );
            if model == Model::Qwen25Vl7B {
                row(
                    "Liger qwen2vl_mrope",
                    6 * wide,
                    Some(0),
                    "keeps cos and sin of three axes, once for all layers",
                );
            }
            // diffusers rotates FLUX otherwise.
            if model != Model::Flux {
                let merged = if model == Model::Qwen25Vl7B {
                    2 * wide
                } else {
                    0
                };
                let joined = if rotary_dim < head_dim {
                    q_part + k_part + q + k
                } else {
                    0
                };
                let temporaries = (3 * q_part).max(q_part + 3 * k_part).max(joined);
                row(
                    "transformers, eager",
                    layers * merged,
                    Some(temporaries),
                    "three temporaries as large as the rotated part",
                );
            }
        }
        rows
    }
}

/// Compares rows of one subject with one another.
fn add_ratios(rows: &mut [MemoryRow]) {
    let peaks: Vec<(String, usize, Option<usize>)> = rows
        .iter()
        .map(|row| (row.implementation.clone(), row.layers, row.step_peak_bytes))
        .collect();
    for row in rows {
        let ratio = |implementation: &str| {
            let of = |peak: &&(String, usize, Option<usize>)| {
                peak.0 == implementation && peak.1 == row.layers
            };
            let theirs = peaks.iter().find(of)?.2?;
            Some(theirs as f64 / row.step_peak_bytes? as f64)
        };
        (row.composed_ratio, row.rotary_encoding_ratio) =
            (ratio(names::COMPOSED), ratio(names::ROTARY_ENCODING));
    }
}

/// Rows of one table: the same tensors on the same device.
fn same_table(a: &MemoryRow, b: &MemoryRow) -> bool {
    (&a.shape, a.dtype, a.tokens) == (&b.shape, b.dtype, b.tokens)
}

/// Tables of the largest number of layers, one for each shape and type. What is saved is the peak of the step, as a multiple.
fn table(rows: &[MemoryRow]) -> String {
    let mut out = String::new();
    for rows in rows.chunk_by(same_table) {
        // Writing to a string does not fail.
        let _ = write_table(&mut out, rows);
    }
    out
}

fn write_table(out: &mut String, rows: &[MemoryRow]) -> std::fmt::Result {
    let Some(first) = rows.first() else {
        return Ok(());
    };
    let most = rows.iter().map(|row| row.layers).max().unwrap_or(1);
    let fewest = rows.iter().map(|row| row.layers).min().unwrap_or(1);
    let turned = if first.rotary_dim < first.head_dim {
        format!(" ({} turned)", first.rotary_dim)
    } else {
        String::new()
    };
    writeln!(
        out,
        "{}, {} + {} heads x {}{turned}, {} tokens, {}: q and k, and their gradients, {}",
        first.shape,
        first.heads,
        first.kv_heads,
        first.head_dim,
        first.tokens,
        first.dtype.name(),
        bytes(first.gradient_bytes as f64),
    )?;
    let layers = format!("{most} layers");
    for heading in [
        [
            "data kept",
            "all kept",
            "kept by",
            "peak of",
            "peak of",
            "of",
            "big",
            "saves",
            "saves",
        ],
        [
            "a layer", "a layer", &layers, "forward", "backward", "grads", "allocs", "comp.",
            "burn's",
        ],
    ] {
        let [
            data,
            all,
            kept,
            forward,
            backward,
            grads,
            big,
            composed,
            encoding,
        ] = heading;
        writeln!(
            out,
            "{:26} {data:>9} {all:>8} {kept:>9} {forward:>8} {backward:>8} {grads:>5} {big:>6} {composed:>5} {encoding:>6}",
            ""
        )?;
    }
    let mut heading = String::new();
    for row in rows.iter().filter(|row| row.layers == most) {
        let found = format!(
            "{}{}",
            match row.source {
                Source::Measured => format!("measured on {}", row.device),
                source => source.label().to_owned(),
            },
            if row.checkpointing {
                ", gradient checkpointing"
            } else {
                ""
            }
        );
        if found != heading {
            writeln!(out, "  {found}")?;
            heading = found;
        }
        let one = rows.iter().find(|other| {
            other.layers == fewest
                && other.layers < most
                && (&other.implementation, other.checkpointing)
                    == (&row.implementation, row.checkpointing)
        });
        let a_layer = |value: &dyn Fn(&MemoryRow) -> Option<f64>| {
            let at_most = value(row)?;
            Some(match one.and_then(value) {
                Some(at_one) => (at_most - at_one) / (most - fewest) as f64,
                None => at_most / most as f64,
            })
        };
        let data = a_layer(&|row| row.retained_data_bytes.map(|bytes| bytes as f64));
        let kept = a_layer(&|row| row.retained_bytes.map(|bytes| bytes as f64));
        let large = |value: &dyn Fn(&MemoryRow) -> Option<usize>| {
            a_layer(&|row| value(row).map(|count| count as f64))
        };
        let (forward, backward) = (
            large(&|row| row.forward_large_allocations),
            large(&|row| row.backward_large_allocations),
        );
        let size = |value: Option<f64>| value.map_or("-".to_owned(), bytes);
        let ratio =
            |value: Option<f64>| value.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
        let times = |value: Option<f64>| {
            let decimals = usize::from(value.is_some_and(|ratio| ratio < 99.95));
            value.map_or("-".to_owned(), |ratio| format!("{ratio:.decimals$}x"))
        };
        if row.retained_bytes.is_none() {
            writeln!(out, "  {:24} {}", row.implementation, row.note)?;
            continue;
        }
        writeln!(
            out,
            "  {:24} {:>9} {:>8} {:>9} {:>8} {:>8} {:>5} {:>6} {:>5} {:>6}",
            row.implementation,
            size(data),
            size(kept),
            size(row.retained_bytes.map(|bytes| bytes as f64)),
            size(row.forward_peak_bytes.map(|bytes| bytes as f64)),
            size(row.backward_peak_bytes.map(|bytes| bytes as f64)),
            ratio(
                row.backward_peak_bytes
                    .map(|peak| peak as f64 / row.gradient_bytes as f64)
            ),
            forward
                .zip(backward)
                .map_or("-".to_owned(), |(f, b)| format!("{f:.0}+{b:.0}")),
            times(row.composed_ratio),
            times(row.rotary_encoding_ratio),
        )?;
    }
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_fit_100_columns() {
        let subject = Subject::new(Model::Qwen25Vl7B, 1 << 17, DType::F32).unwrap();
        let rows = subject.calculated(Model::Qwen25Vl7B, &[1, 36]);
        let text = table(&rows);
        assert!(
            text.lines().all(|line| line.chars().count() <= 100),
            "{text}"
        );
        assert!(text.contains("calculated"));
    }

    #[test]
    fn formulas_at_sizes_counted_by_hand() {
        // 28 + 4 heads x 128 x 10 tokens in bf16: q 71,680 bytes, k 10,240, cos 2,560.
        let subject = Subject::new(Model::Qwen25Vl7B, 10, DType::Bf16).unwrap();
        let kept: Vec<(String, Option<isize>, Option<usize>)> = subject
            .calculated(Model::Qwen25Vl7B, &[2])
            .into_iter()
            .map(|row| {
                (
                    row.implementation,
                    row.retained_bytes,
                    row.forward_peak_bytes,
                )
            })
            .collect();
        let expected = [
            ("torch_npu npu_rotary_mul", 163_840, None),
            ("Liger qwen2vl_mrope", 15_360, Some(15_360)),
            ("transformers, eager", 10_240, Some(10_240 + 215_040)),
        ];
        let expected = expected.map(|(name, kept, peak)| (name.to_owned(), Some(kept), peak));
        assert_eq!(kept, expected);
    }
}
