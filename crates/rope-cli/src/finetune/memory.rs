//! The memory of a step: planned before, counted while the run goes.

use std::error::Error;
use std::io::Write;

use rope_bench::rows::bytes;
use vlm_data::GlobalBatch;
use vlm_train::job::Finetune;
use vlm_train::{MemoryPlan, MicroShape, StepMemory};

use super::options::FinetuneArgs;
use crate::ALLOCATOR;
use crate::device::Device;
use crate::stdio::{note, stdout};
use crate::table::Table;

/// Prints what a step takes, and the most tokens that fit.
pub(super) fn print(args: &FinetuneArgs, run: &Finetune) -> Result<(), Box<dyn Error>> {
    let options = run.options();
    let (plan, (all, longest)) = (run.plan()?, run.measure()?);
    let batch = &options.batch;
    let batch_tokens = batch
        .batch_tokens
        .unwrap_or_else(|| batch.batch.saturating_mul(longest));
    let shape = all.with_tokens(batch.micro_tokens.min(batch_tokens));
    let plan = plan.with_pictures(all.patches > 0);
    let mut step = plan.step(shape);
    let record = options
        .output
        .record_step
        .map_or(0, |_| plan.record(shape.patches, batch.batch));
    let others = [
        ("HCCL's buffers", args.hccl_bytes()),
        ("the record", record),
    ];
    let besides: usize = others.iter().map(|(_, bytes)| bytes).sum();
    step.held
        .extend(others.iter().filter(|(_, bytes)| *bytes > 0));
    let ahead = options.loader_options().ahead_bytes;
    let mut beside = vec![("at most, beside it", "prefetched samples", ahead)];
    if options.validates() {
        let validation = plan.validation(shape).peak();
        beside.push(("instead of a step", "a validation", validation));
    }
    let mut out = stdout();
    writeln!(
        out,
        "a step over micro-batches of {} tokens, {} of them labelled, with {} patches:\n{}",
        shape.tokens,
        shape.labelled,
        shape.patches,
        table(&step, &beside)
    )?;
    let is_ours = matches!(args.device[0], Device::Cpu | Device::AscendSim(_));
    let room = args.memory.map(|gib| gib * f64::from(1 << 30));
    match room.or_else(|| vlm_train::available_memory().filter(|_| is_ours)) {
        Some(room) => {
            let most = plan.most_tokens(all, (room as usize).saturating_sub(besides));
            let most = most.map_or("no step fits".to_owned(), |most| {
                format!("micro-batches of at most {most} tokens fit (--micro-tokens)")
            });
            writeln!(out, "in {}: {most}", bytes(room))?;
            let room = (room as usize).saturating_sub(besides);
            let least = plan.least_sharding(shape, room);
            // Divided experts do not go with shards.
            let is_other = |least: &_| *least != args.shard && args.expert_parallel == 1;
            if let Some(least) = least.filter(is_other) {
                let least = format!("{least:?}").to_lowercase();
                writeln!(out, "this step fits with --shard {least}")?;
            }
        }
        None => writeln!(
            out,
            "for the largest micro-batch, state the device's memory with --memory"
        )?,
    }
    Ok(())
}

fn table(step: &StepMemory, besides: &[(&str, &str, usize)]) -> Table {
    let mut table = Table::new(&["", ""], &["bytes"]);
    let mut row = |when: &str, name: &str, count: usize| {
        table.row([when.to_owned(), name.to_owned(), bytes(count as f64)]);
    };
    for (name, count) in &step.held {
        row("during the step", name, *count);
    }
    for (name, count) in &step.moments {
        row("at one moment", name, *count);
    }
    row("", "peak", step.peak());
    for (when, name, count) in besides {
        row(when, name, *count);
    }
    table
}

/// Plans each step, and on one CPU counts it. Samples prefetched by other threads are not counted.
pub(super) struct StepMeter {
    plan: MemoryPlan,
    counts: bool,
    /// True once a batch had pictures or videos.
    sees: bool,
    planned: usize,
    held: isize,
    counted: usize,
}

impl StepMeter {
    /// With `counts`, counts from now on what is held.
    pub(super) fn start(plan: MemoryPlan, counts: bool) -> Self {
        if counts {
            ALLOCATOR.start_thread();
        }
        Self {
            plan,
            counts,
            sees: false,
            planned: 0,
            held: 0,
            counted: 0,
        }
    }

    /// The model is loaded.
    pub(super) fn model_is_held(&mut self) {
        if self.counts {
            self.held = ALLOCATOR.stop().retained_bytes;
        }
    }

    /// A step over a batch begins.
    pub(super) fn begin(&mut self, batch: &GlobalBatch) {
        let shapes: Vec<_> = batch.micro_batches.iter().map(MicroShape::of).collect();
        self.sees |= shapes.iter().any(|shape| shape.patches > 0);
        let plan = self.plan.clone().with_pictures(self.sees);
        self.planned = self.planned.max(plan.peak(&shapes));
        if self.counts {
            ALLOCATOR.start_thread();
        }
    }

    /// A step is done.
    pub(super) fn end(&mut self) {
        if self.counts {
            let usage = ALLOCATOR.stop();
            let peak = self.held + usage.peak_bytes.cast_signed();
            self.counted = self.counted.max(peak.max(0).cast_unsigned());
            self.held += usage.retained_bytes;
        }
    }

    /// Prints the planned and the counted peak. `in_use`: the device's own count of its peak, with
    /// the loading of the model.
    pub(super) fn report(&self, in_use: Option<u64>) {
        if self.planned == 0 {
            return;
        }
        let counted = match (self.counts, in_use) {
            (true, _) => format!("{} counted, ", bytes(self.counted as f64)),
            (false, Some(peak)) => format!("{} counted since the start, ", bytes(peak as f64)),
            (false, None) => String::new(),
        };
        let planned = bytes(self.planned as f64);
        note(format_args!(
            "peak memory of a step: {counted}{planned} planned"
        ));
    }
}
