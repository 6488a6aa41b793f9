//! Fine-tunes a model's folder on a file of conversations:
//!
//! ```sh
//! cargo run --release -p vlm-train --example finetune -- MODEL DATA OUT
//! ```

use std::error::Error;
use std::path::PathBuf;

use burn::tensor::Device;
use vlm_train::Event;
use vlm_train::job::{Finetune, FinetuneConfig, JobEnd, Watch};

/// Prints the loss of each step.
struct Losses;

impl Watch for Losses {
    fn event(&mut self, event: Event<'_>) {
        if let Event::Step(report) = event {
            println!("step {} loss {:.4}", report.step, report.loss);
        }
    }
}

/// Returns the folder of the adapter.
pub(crate) fn finetune(model: &str, data: &str, out: &str) -> Result<PathBuf, Box<dyn Error>> {
    let mut config = FinetuneConfig::new(model, data, out)?;
    config.optimizer.learning_rate = Some(2e-4);
    config.trained.rank = Some(16);
    let job = Finetune::open(config)?.prepare(&|_| {}, Default::default())?;
    match job
        .map(|job| job.train(&Device::flex(), &mut Losses))
        .transpose()?
    {
        Some(JobEnd::Saved(folder)) => Ok(folder),
        ended => Err(format!("the run ended early: {ended:?}").into()),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, data, out] = &arguments[..] else {
        return Err("expected MODEL DATA OUT".into());
    };
    println!("{}", finetune(model, data, out)?.display());
    Ok(())
}
