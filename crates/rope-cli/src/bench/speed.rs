//! `mrope bench speed`.

use std::error::Error;
use std::fmt::Write as _;
use std::io::{BufWriter, Write as _, stdout};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use rope_benches::bars::{self, names};
use rope_benches::cases::{Case, DType, Group, Selection, Way, cases, layout_name, pairing_name};
use rope_benches::chart;
use rope_benches::rotation::{BASELINE, ROTATION, Together};
use rope_benches::rows::{SpeedRow, time};
use rope_benches::sample::{Plan, Timing, samples};
use rope_core::{Layout, Pairing};

use super::burn_speed;
use super::memory::{DTypeArg, positive};
use super::output::{OutputArgs, progress};

/// Time rotations against a plain copy of the same bytes by the same threads.
///
/// Each case is first compared with the oracle in f64, then timed in turns with its baseline (A B A B ...), so that a disturbance
/// hits both; lengths whose cost per token is compared are timed in turns with each other too. The baseline of a rotation into other buffers, and of a single token, is a copy; that of a rotation in place reads,
/// changes and writes the same bytes in place. bytes are those read and written: q and k twice a pass. Through burn, the fused
/// operation, the composed one and burn::nn::RotaryEncoding are timed with their graphs and allocations.
///
/// Threads are those of the rayon pool (RAYON_NUM_THREADS).
#[derive(Args, Clone, Debug)]
pub(crate) struct SpeedArgs {
    /// Every combination, for a quarter of an hour; without it those that are held to a bar, for three minutes.
    #[arg(long, conflicts_with = "quick")]
    full: bool,
    /// Tiny tensors and one sample, to see that everything runs: its times mean nothing.
    #[arg(long)]
    quick: bool,
    /// Only cases whose name contains each of these; --list shows names.
    #[arg(long, value_name = "SUBSTRING")]
    filter: Vec<String>,
    /// Only these element types.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAMES")]
    dtype: Vec<DTypeArg>,
    /// Only these pairings: half, adjacent, quarter, interleave_half.
    #[arg(long, value_delimiter = ',', value_name = "NAMES", value_parser = pairing)]
    pairing: Vec<Pairing>,
    /// Only these orders of dimensions: bsnd, bnsd, sbnd, tnd.
    #[arg(long, value_delimiter = ',', value_name = "NAMES", value_parser = layout)]
    layout: Vec<Layout>,
    /// Only these ways: forward, backward, both.
    #[arg(long, value_delimiter = ',', value_name = "NAMES", value_parser = way)]
    direction: Vec<Way>,
    /// Only these parts of the results.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAMES")]
    group: Vec<GroupArg>,
    /// Take the cases at this number of tokens instead of their own.
    #[arg(long, value_name = "NUMBER", value_parser = positive)]
    tokens: Option<usize>,
    /// Samples of each case and of its baseline; fewer where they would take more than their share of four seconds.
    #[arg(long, value_name = "NUMBER", default_value_t = 11, value_parser = positive)]
    samples: usize,
    /// Go through all cases so often, and take as many samples each time: a disturbance of seconds then hits few samples of a
    /// case. Not those through burn.
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = positive)]
    rounds: usize,
    /// Print the names of the cases and stop.
    #[arg(long)]
    list: bool,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum GroupArg {
    /// 64 MiB and more, half and adjacent
    Large,
    /// Quarter, interleave_half, two angles for a pair
    Rare,
    /// Other heads, and angles from a table
    Other,
    /// From 16 to 131,072 tokens
    Length,
    /// A single token
    Decode,
    /// Through burn
    Burn,
}

impl From<GroupArg> for Group {
    fn from(argument: GroupArg) -> Self {
        match argument {
            GroupArg::Large => Self::Large,
            GroupArg::Rare => Self::Rare,
            GroupArg::Other => Self::Other,
            GroupArg::Length => Self::Length,
            GroupArg::Decode => Self::Decode,
            GroupArg::Burn => Self::Burn,
        }
    }
}

/// Parses one of `all` by its name.
fn named<T: Copy>(text: &str, all: &[T], name: impl Fn(T) -> &'static str) -> Result<T, String> {
    let found = all.iter().copied().find(|value| name(*value) == text);
    found.ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|value| name(*value)).collect();
        format!("expected one of {}", names.join(", "))
    })
}

fn pairing(text: &str) -> Result<Pairing, String> {
    named(text, &Pairing::ALL, pairing_name)
}

fn layout(text: &str) -> Result<Layout, String> {
    named(text, &Layout::ALL, layout_name)
}

fn way(text: &str) -> Result<Way, String> {
    named(text, &Way::ALL, Way::name)
}

/// Tokens that are compared with the oracle.
const CHECKED_TOKENS: usize = 8;
/// What a sample of each length takes at least where their costs per token are compared: the longest runs for so long, and
/// a short one by itself would be over before threads, processor and memory are at their pace.
const SUSTAINED: Duration = Duration::from_millis(100);

impl SpeedArgs {
    fn selection(&self) -> Selection {
        match (self.quick, self.full) {
            (true, _) => Selection::Quick,
            (_, true) => Selection::Full,
            _ => Selection::Default,
        }
    }

    fn plan(&self) -> Plan {
        if self.quick {
            return Plan::ONCE;
        }
        Plan {
            samples: self.samples,
            ..Plan::default()
        }
    }

    fn takes(&self, case: &Case) -> bool {
        fn among<T, U: PartialEq>(chosen: &[T], value: U) -> bool
        where
            T: Copy + Into<U>,
        {
            chosen.is_empty() || chosen.iter().any(|choice| (*choice).into() == value)
        }
        let name = case.name();
        among::<DTypeArg, DType>(&self.dtype, case.dtype)
            && among(&self.pairing, case.pairing)
            && among(&self.layout, case.layout)
            && among(&self.direction, case.way)
            && among::<GroupArg, Group>(&self.group, case.group)
            && self.filter.iter().all(|part| name.contains(part))
    }

    fn cases(&self) -> Vec<Case> {
        let mut cases = cases(self.selection());
        cases.extend(burn_speed::cases(self.selection()));
        cases.retain(|case| self.takes(case));
        if let Some(tokens) = self.tokens {
            for case in &mut cases {
                case.shape = case.shape.at(tokens);
            }
            let mut seen = std::collections::HashSet::new();
            cases.retain(|case| seen.insert((case.name(), case.group == Group::Burn)));
        }
        cases
    }
}

/// Times, and says what it timed.
///
/// # Errors
/// If no case is left, a result is not the oracle's, or an output cannot be written.
pub(crate) fn run(args: &SpeedArgs) -> Result<ExitCode, Box<dyn Error>> {
    let cases = args.cases();
    if cases.is_empty() {
        return Err("no case is left; `mrope bench speed --full --list` shows all names".into());
    }
    if args.list {
        let mut out = BufWriter::new(stdout().lock());
        for case in &cases {
            writeln!(out, "{}", case.name())?;
        }
        out.flush()?;
        return Ok(ExitCode::SUCCESS);
    }
    let output = args.output.open()?;
    if cfg!(debug_assertions) && !args.quick {
        eprintln!(
            "this program was built without optimisation: add --release, or --quick if its times do not matter"
        );
    }
    let mut series: Vec<Series<'_>> = cases
        .chunk_by(Case::is_compared_with)
        .map(Series::new)
        .collect();
    let bar = progress(args.rounds * cases.len())?;
    for round in 0..args.rounds {
        for series in &mut series {
            bar.set_message(series.cases[0].name());
            // A step of the bar may take long; let the time be seen passing.
            bar.enable_steady_tick(Duration::from_millis(500));
            series.sample(round, args.plan())?;
            bar.inc(series.cases.len() as u64);
        }
    }
    let rows: Vec<SpeedRow> = series.into_iter().flat_map(Series::into_rows).collect();
    bar.finish_and_clear();
    let bars = if args.quick {
        Vec::new()
    } else {
        bars::speed(&rows)
    };
    output.write(&rows, || chart::speed(&rows), || table(&rows), &bars)
}

/// Cases that are timed in turns, and what was found.
struct Series<'a> {
    cases: &'a [Case],
    /// Of each case, what it is compared with, and the samples of both.
    taken: Vec<(&'static str, [Vec<f64>; 2])>,
    through_burn: Vec<SpeedRow>,
}

impl<'a> Series<'a> {
    fn new(cases: &'a [Case]) -> Self {
        Self {
            cases,
            taken: Vec::new(),
            through_burn: Vec::new(),
        }
    }

    fn sample(&mut self, round: usize, mut plan: Plan) -> Result<(), Box<dyn Error>> {
        if self.cases[0].group == Group::Burn {
            if round == 0 {
                self.through_burn = burn_speed::time(&self.cases[0], &plan)?;
            }
            return Ok(());
        }
        plan.budget = plan.budget.saturating_mul(self.cases.len() as u32);
        if self.cases.len() > 1 {
            plan.shortest_sample = SUSTAINED;
        }
        let mut together = Together::checked(self.cases, CHECKED_TOKENS)?;
        let baseline = |case| (together.baseline(case), Default::default());
        if round == 0 {
            self.taken = (0..self.cases.len()).map(baseline).collect();
        }
        let mut samples = samples(&mut together, &plan).into_iter();
        for (_, taken) in &mut self.taken {
            for (taken, samples) in taken.iter_mut().zip(samples.by_ref()) {
                taken.extend(samples);
            }
        }
        Ok(())
    }

    fn into_rows(self) -> Vec<SpeedRow> {
        let cases = self.cases.iter().zip(self.taken);
        let kernels = cases.map(|(case, (baseline, samples))| {
            let timings = samples.map(Timing::of);
            let baseline = (baseline, timings[BASELINE]);
            SpeedRow::new(case, names::KERNELS, baseline, timings[ROTATION])
        });
        kernels.chain(self.through_burn).collect()
    }
}

/// Rows by case; the part that all rows of a run share is in the heading.
fn table(rows: &[SpeedRow]) -> String {
    let mut out = String::new();
    for rows in rows.chunk_by(|a, b| (a.group, &a.shape) == (b.group, &b.shape)) {
        // Writing to a string does not fail.
        let _ = write_table(&mut out, rows);
    }
    out
}

fn write_table(out: &mut String, rows: &[SpeedRow]) -> std::fmt::Result {
    let Some(first) = rows.first() else {
        return Ok(());
    };
    writeln!(
        out,
        "{:47} {:>8} {:>8} {:>7} {:>9} {:>5} {:>7}",
        first.shape, "tokens", "median", "spread", "baseline", "ratio", "GB/s"
    )?;
    for row in rows {
        let how = if row.in_place { "in place" } else { "into" };
        let axes = if row.axes == "single" {
            String::new()
        } else {
            format!(" {}", row.axes)
        };
        let table = if row.case.ends_with("/table") {
            " table"
        } else {
            ""
        };
        let what = match row.group {
            Group::Burn | Group::Peers => {
                format!(
                    "{} {} {}",
                    row.implementation,
                    row.direction.name(),
                    row.dtype.name()
                )
            }
            _ => format!(
                "{} {} {} {}{axes}{table}, {how}",
                row.direction.name(),
                row.dtype.name(),
                row.layout,
                row.pairing
            ),
        };
        let spread = 100.0 * (row.upper_quartile_ns - row.lower_quartile_ns) / row.median_ns;
        writeln!(
            out,
            "  {what:45} {:>8} {:>8} {:>6.1}% {:>9} {:>5.2} {:>7.2}",
            row.tokens,
            time(row.median_ns),
            spread,
            time(row.baseline_ns),
            row.copy_ratio,
            row.bytes as f64 / row.median_ns,
        )?;
    }
    writeln!(out)
}
