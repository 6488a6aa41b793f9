//! `mrope bench speed`.

use std::collections::HashSet;
use std::error::Error;
use std::io::{BufWriter, Write};
use std::time::Duration;

use clap::Args;
use rope_bench::burn::{float, speed as burn_speed};
use rope_bench::cases::{DTYPES, Group, Selection, TimedCase, cases, gpu_cases};
use rope_bench::names;
use rope_bench::rows::{SpeedRow, time};
use rope_bench::sample::Plan;
use rope_bench::series::Series;
use rope_check::buffer::DType;

use super::{print, progress};
use crate::arguments::{MAX_TOKENS, count_in, one_of};
use crate::device::{Compute, Device, TokenArgs};
use crate::stdio::{note, stdout};
use crate::table::Table;
use crate::{gpu, memory};

/// Time rotations against a plain copy of the same bytes by the same threads.
///
/// Each case is first compared with the oracle in f64, then timed alternately with its baseline (A
/// B A B ...), so that a disturbance affects both. The baseline is a copy for results in other
/// buffers and for single tokens, and a pass that reads, changes and writes the same bytes for
/// rotations in place. The norm with the rotation is compared with the rotation alone, its backward
/// with a pass that reads two tensors and writes one. The column bytes counts q and k, read once
/// and written once. Cases through burn time the fused and the composed operation and
/// burn::nn::RotaryEncoding with their graphs and allocations.
///
/// Threads are those of the rayon pool (RAYON_NUM_THREADS). On a GPU (--device), a sample is many
/// launches and one wait, and the baseline a copy in the GPU's memory; for a single token it is one
/// launch for one element.
#[derive(Args, Clone, Debug)]
pub(crate) struct SpeedArgs {
    /// Use tiny tensors and one sample, to check that all runs: times mean nothing.
    #[arg(long)]
    quick: bool,
    /// Time only cases whose names contain all of these; --list shows names.
    #[arg(long, value_name = "SUBSTRING")]
    filter: Vec<String>,
    /// Time only these element types.
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    #[arg(value_parser = one_of(&DTYPES, DType::name))]
    dtype: Vec<DType>,
    /// Device: cpu, gpu (the first GPU) or gpu:N.
    #[arg(long, default_value = "cpu")]
    device: Device,
    /// Measure only these parts of the results: large (64 MiB and more, half and adjacent), rare
    /// (quarter, interleave_half, two angles per pair), other (other heads and axes), length (from
    /// 16 to 131,072 tokens), decode (a single token), norm (RMSNorm of the heads with the
    /// rotation), burn (through burn); on a GPU, gpu (alone) and burn.
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    #[arg(value_parser = one_of(&Group::ALL, Group::name))]
    group: Vec<Group>,
    /// Use this number of tokens in all cases.
    #[arg(long, value_name = "NUMBER", value_parser = count_in(1..=MAX_TOKENS))]
    tokens: Option<usize>,
    /// Samples per case and baseline; fewer if they would exceed their share of four seconds.
    #[arg(long, value_name = "NUMBER", default_value_t = 11, value_parser = count_in(1..=10_000))]
    samples: usize,
    /// Repeat all cases this number of times, taking all samples each time: a disturbance of
    /// seconds then affects few samples of a case. Cases through burn are timed once.
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = count_in(1..=10_000))]
    rounds: usize,
    /// Print the names of the cases and stop.
    #[arg(long, conflicts_with = "json")]
    list: bool,
    /// Print one JSON object per row and line, and nothing else, on standard output.
    #[arg(long)]
    json: bool,
}

/// Shortest sample on a GPU, of which the wait at its end takes a small part.
const SHORTEST_ON_GPU: Duration = Duration::from_millis(20);

impl SpeedArgs {
    fn selection(&self) -> Selection {
        match self.quick {
            true => Selection::Quick,
            false => Selection::Default,
        }
    }

    fn plan(&self) -> Plan {
        if self.quick {
            return Plan::ONCE;
        }
        Plan {
            samples: self.samples,
            shortest_sample: match self.device {
                Device::Cpu => Plan::default().shortest_sample,
                _ => SHORTEST_ON_GPU,
            },
            ..Plan::default()
        }
    }

    /// True if the device is a GPU, not the CPU.
    fn is_on_gpu(&self) -> Result<bool, String> {
        match &self.device {
            Device::Cpu => Ok(false),
            Device::Gpu(_) => Ok(true),
            other => Err(format!(
                "expected --device cpu, gpu or gpu:N, found --device {other}"
            )),
        }
    }

    fn takes(&self, case: &TimedCase) -> bool {
        fn among<T: PartialEq>(chosen: &[T], value: T) -> bool {
            chosen.is_empty() || chosen.contains(&value)
        }
        let name = case.name();
        among(&self.dtype, case.dtype)
            && among(&self.group, case.group)
            && self.filter.iter().all(|part| name.contains(part))
    }

    fn cases(&self, is_on_gpu: bool) -> Vec<TimedCase> {
        let mut cases = if is_on_gpu {
            gpu_cases(self.selection())
        } else {
            cases(self.selection())
        };
        cases.extend(burn_speed::cases(self.selection()));
        cases.retain(|case| self.takes(case));
        if let Some(tokens) = self.tokens {
            for case in &mut cases {
                case.shape = case.shape.at(tokens);
            }
            let mut seen = HashSet::new();
            cases.retain(|case| seen.insert((case.name(), case.group == Group::Burn)));
        }
        cases
    }
}

/// Times, and reports what was timed.
///
/// # Errors
/// If no case is left, a result is not the oracle's, or an output cannot be written.
pub(crate) fn run(args: &SpeedArgs) -> Result<(), Box<dyn Error>> {
    let is_on_gpu = args.is_on_gpu()?;
    let mut cases = args.cases(is_on_gpu);
    if cases.is_empty() {
        return Err("no case is left; `mrope bench speed --list` shows their names".into());
    }
    if args.list {
        let mut out = BufWriter::new(stdout());
        for case in &cases {
            writeln!(out, "{}", case.name())?;
        }
        return Ok(out.flush()?);
    }
    let compute = is_on_gpu
        .then(|| Compute::open(&args.device, &TokenArgs::default()))
        .transpose()?;
    let device = compute.as_ref().map(Compute::device);
    if let Some(device) = device {
        gpu::note_software(device, &args.device);
        let mut lacks: Vec<&str> = Vec::new();
        cases.retain(|case| {
            let has = device.supports_dtype(float(case.dtype));
            if !has && !lacks.contains(&case.dtype.name()) {
                lacks.push(case.dtype.name());
            }
            has
        });
        if !lacks.is_empty() {
            note(format_args!(
                "skipped: {} has no {}",
                args.device,
                lacks.join(", ")
            ));
        }
    }
    expect_memory(args, &cases)?;
    if cfg!(debug_assertions) && !args.quick {
        note(
            "this program was built without optimisation: add --release, or --quick if its times \
             do not matter",
        );
    }
    let mut series: Vec<Series<'_>> = cases
        .chunk_by(TimedCase::is_compared_with)
        .map(|cases| Series::new(cases, device))
        .collect();
    let bar = progress(args.rounds * cases.len())?;
    for round in 0..args.rounds {
        for series in &mut series {
            bar.set_message(series.cases()[0].name());
            // A step of the bar can take long: show that time passes.
            bar.enable_steady_tick(Duration::from_millis(500));
            series.sample(round, args.plan())?;
            bar.inc(series.cases().len() as u64);
        }
    }
    let rows: Vec<SpeedRow> = series.into_iter().flat_map(Series::into_rows).collect();
    bar.finish_and_clear();
    print(&rows, args.json, table)
}

/// Refuses cases whose tensors the memory does not hold: q and k, and a copy of them. Those that
/// are timed in turns are there together.
fn expect_memory(args: &SpeedArgs, cases: &[TimedCase]) -> Result<(), String> {
    for together in cases.chunk_by(TimedCase::is_compared_with) {
        let bytes = together.iter().map(|case| case.tensor_bytes() as f64);
        let needed = 2.0 * bytes.sum::<f64>();
        let instead = "choose fewer --tokens, or other cases with --filter";
        memory::expect(&args.device, needed, &together[0].name(), instead)?;
    }
    Ok(())
}

/// Rows by case, a table for each part of the results and shape.
fn table(rows: &[SpeedRow]) -> String {
    let same_table = |a: &SpeedRow, b: &SpeedRow| (a.group, &a.shape) == (b.group, &b.shape);
    let tables = rows.chunk_by(same_table).map(|rows| {
        let numbers = ["tokens", "median", "spread", "baseline", "ratio", "GB/s"];
        let mut table = Table::new(&[&rows[0].shape], &numbers);
        for row in rows {
            let spread = 100.0 * (row.upper_quartile_ns - row.lower_quartile_ns) / row.median_ns;
            table.row([
                what(row),
                row.tokens.to_string(),
                time(row.median_ns),
                format!("{spread:.1}%"),
                time(row.baseline_ns),
                format!("{:.2}", row.copy_ratio),
                format!("{:.2}", row.bytes as f64 / row.median_ns),
            ]);
        }
        format!("{table}\n")
    });
    tables.collect()
}

/// The factors of a row that differ within its table.
fn what(row: &SpeedRow) -> String {
    let (way, dtype) = (row.direction.name(), row.dtype.name());
    if row.group == Group::Burn {
        return format!("{} {way} {dtype}", row.implementation);
    }
    let mut what = format!("{way} {dtype} {} {}", row.layout, row.pairing);
    if row.group == Group::Gpu || row.implementation == names::COMPOSED {
        what = format!("{} {what}", row.implementation);
    }
    if row.axes != "single" {
        what += &format!(" {}", row.axes);
    }
    what + if row.in_place { ", in place" } else { ", into" }
}
