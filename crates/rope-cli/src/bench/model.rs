//! `mrope bench model`.

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use rope_bench::model::{self, ModelRow, Pass, TimeModelError};
use rope_bench::rows::write_json_lines;
use serde::Serialize;

use crate::stdio::stdout;
use crate::table::Table;

/// Model the time of the NPU's kernels on Atlas A2: nothing is measured.
///
/// What a core does is counted on the simulated NPU; what each instruction and transfer costs is
/// in tables that the vendor publishes. docs/benchmarks/model.md has the assumptions.
#[derive(Args, Clone, Debug)]
pub(crate) struct ModelArgs {
    /// Also the gradient of cos and sin, which is computed on request only.
    #[arg(long)]
    angles: bool,

    /// One JSON object per row and line on standard output, and nothing else there.
    #[arg(long)]
    json: bool,
}

/// Prints the modelled times.
///
/// # Errors
/// Without the simulator, or if a kernel fails on it.
pub(crate) fn run(args: &ModelArgs) -> Result<ExitCode, Box<dyn Error>> {
    let mut rows = model::rows().map_err(|error| match error {
        TimeModelError::NoSimulator => {
            format!("{error}: cargo run --release --features ascend-sim -- bench model")
        }
        other => other.to_string(),
    })?;
    rows.retain(|row| args.angles || row.direction != Pass::Angles);
    let mut out = stdout();
    if args.json {
        write_json_lines(&rows, &mut out)?;
    } else {
        write!(out, "{}", table(&rows))?;
        writeln!(
            out,
            "\n  Modelled for Atlas A2 with 40 vector cores, not measured. Barrier: the cycles \
             that one may\n  cost until the ratio is 1.15; 20 are assumed."
        )?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

fn table(rows: &[ModelRow]) -> Table {
    let mut table = Table::new(
        &["case", "kernel", "dtype", "direction", "bound by"],
        &[
            "modelled us",
            "memory us",
            "least us",
            "ratio",
            "vector us",
            "start-up us",
            "barrier",
        ],
    );
    for row in rows {
        table.row([
            row.case.clone(),
            row.kernel.clone(),
            word(&row.dtype),
            word(&row.direction),
            word(&row.bound_by),
            format!("{:.1}", row.modelled_us),
            format!("{:.1}", row.memory_us),
            format!("{:.1}", row.least_us),
            format!("{:.3}", row.ratio),
            format!("{:.1}", row.vector_us),
            format!("{:.1}", row.start_up_us),
            format!("{:.0}", row.barrier_cycles_at_bar),
        ]);
    }
    table
}

/// The name that a value has in JSON.
fn word(value: &impl Serialize) -> String {
    let value = serde_json::to_value(value).unwrap_or_default();
    value.as_str().unwrap_or_default().to_owned()
}
