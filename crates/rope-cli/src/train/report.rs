//! The result of a run.

use std::fmt;
use std::path::{Path, PathBuf};

use burn::module::Module;
use mrope_digits::{History, Test, Trainer};
use serde::{Serialize, Serializer};

use super::options::RunConfig;
use crate::device::Usage;

/// The files of a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Files {
    #[serde(serialize_with = "text")]
    pub(crate) model: PathBuf,
    #[serde(serialize_with = "text")]
    pub(crate) curves: PathBuf,
    #[serde(serialize_with = "text")]
    pub(crate) attention: PathBuf,
}

/// A path as it is printed: JSON has no other bytes than those of text.
fn text<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

/// The result of a run: the table, and the object of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Share of right answers about unseen digits.
    accuracy: f32,
    /// Training loss of the last step.
    loss: f32,
    /// Mean cross entropy of the answers about unseen digits.
    test_loss: f32,
    /// The best accuracy that is possible without positions.
    accuracy_without_position: f64,
    steps: usize,
    seconds: f64,
    tokens_per_second: f64,
    parameters: usize,
    device: String,
    /// Peak memory of the steps and what ran elsewhere than on the AI Core, on an NPU of this
    /// process.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    options: RunConfig,
    losses: Vec<f32>,
    accuracies: Vec<f32>,
    tests: Vec<Test>,
    files: Files,
}

impl Report {
    pub(crate) fn new(
        trainer: &Trainer,
        options: RunConfig,
        device: String,
        usage: Option<Usage>,
        test: Test,
        accuracy_without_position: f64,
        files: Files,
    ) -> Self {
        let History {
            losses,
            accuracies,
            tests,
            seconds,
        } = trainer.history().clone();
        Self {
            accuracy: test.accuracy,
            loss: losses.last().copied().unwrap_or(f32::NAN),
            test_loss: test.loss,
            accuracy_without_position,
            steps: losses.len(),
            seconds,
            tokens_per_second: trainer.tokens_per_second(),
            parameters: trainer.model().num_params(),
            device,
            usage,
            options,
            losses,
            accuracies,
            tests,
            files,
        }
    }

    /// One JSON object on one line.
    pub(crate) fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        let mut rows = vec![
            ("accuracy on unseen digits", percent(self.accuracy.into())),
            (
                "best without positions",
                percent(self.accuracy_without_position),
            ),
            ("loss on unseen digits", format!("{:.4}", self.test_loss)),
            ("loss of the last step", format!("{:.4}", self.loss)),
            ("steps", self.steps.to_string()),
            ("seconds", format!("{:.1}", self.seconds)),
            (
                "tokens per second",
                format!("{:.0}", self.tokens_per_second),
            ),
            ("parameters", self.parameters.to_string()),
            ("model", self.files.model.display().to_string()),
            ("loss and accuracy", self.files.curves.display().to_string()),
            ("attention", self.files.attention.display().to_string()),
        ];
        rows.push(("device", self.device.clone()));
        let usage = self.usage.as_ref().map(Usage::rows).unwrap_or_default();
        rows.extend(usage.iter().map(|(name, value)| (&**name, value.clone())));
        writeln!(f)?;
        for (index, (name, value)) in rows.iter().enumerate() {
            let end = if index + 1 < rows.len() { "\n" } else { "" };
            write!(f, "  {name:<26} {value}{end}")?;
        }
        Ok(())
    }
}
