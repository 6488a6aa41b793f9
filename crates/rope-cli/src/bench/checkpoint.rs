//! `mrope bench checkpoint`.

use std::error::Error;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn::optim::SgdConfig;
use clap::Args;
use qwen_vl::rope_core::position_ids::Prompt;
use qwen_vl::{Inputs, Pieces, QwenVl, QwenVlConfig};
use rope_bench::rows::{bytes, write_json_lines};
use rope_check::buffer::DType;
use serde::Serialize;
use serde_json::json;

use super::memory::float;
use super::output::progress;
use crate::ALLOCATOR;
use crate::device::{Compute, Device, TokenArgs};
use crate::stdio::stdout;
use crate::table::Table;

const WEIGHTS: &str = "model.safetensors";

/// Load, train and save a checkpoint with tensors larger than a connection's messages, and count
/// the memory.
///
/// The checkpoint is random: one decoder layer of Qwen3-VL-8B's sizes between its embedding and its
/// head, 1.16 GiB each, 2.7 GiB in bf16. It is drawn on the device and written, loaded, written
/// again, which must give the same bytes, and trained for one step. The folder takes twice its size
/// and is removed afterwards.
#[derive(Args, Clone, Debug)]
pub(crate) struct CheckpointArgs {
    /// Where it is loaded to: cpu, gpu, gpu:N, ascend, ascend:N, ascend-sim, or
    /// remote:ws://HOST:PORT (a device that `mrope serve` serves).
    #[arg(long, default_value = "cpu")]
    device: Device,
    #[command(flatten)]
    token: TokenArgs,
    /// The folder to write to; it must not exist.
    #[arg(long, value_name = "FOLDER", default_value = "out/checkpoint")]
    folder: PathBuf,
    /// A tiny checkpoint in pieces of 64 KiB, to see that everything runs.
    #[arg(long)]
    quick: bool,
    /// One JSON object per row and line on standard output, and nothing else there.
    #[arg(long)]
    json: bool,
}

/// What one part of the run took.
#[derive(Serialize)]
struct Row {
    part: &'static str,
    /// Bytes of the checkpoint that it moved.
    moved_bytes: u64,
    /// Most bytes allocated in this process at once beyond those before. A simulated device's
    /// memory is this process's too.
    host_peak_bytes: usize,
    /// Most bytes in the tensors of an NPU of this process at once.
    device_peak_bytes: Option<usize>,
}

/// Sizes of the decoder.
struct Sizes {
    vocabulary: usize,
    hidden: usize,
    intermediate: usize,
    heads: usize,
    kv_heads: usize,
    piece_bytes: Option<usize>,
}

const QWEN3_VL_8B: Sizes = Sizes {
    vocabulary: 151_936,
    hidden: 4096,
    intermediate: 12_288,
    heads: 32,
    kv_heads: 8,
    piece_bytes: None,
};

const TINY: Sizes = Sizes {
    vocabulary: 1000,
    hidden: 256,
    intermediate: 256,
    heads: 2,
    kv_heads: 1,
    piece_bytes: Some(64 << 10),
};

impl Sizes {
    fn config(&self) -> Result<QwenVlConfig, Box<dyn Error>> {
        let config = json!({
            "model_type": "qwen3_vl",
            "image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3,
            "tie_word_embeddings": false,
            "text_config": {
                "model_type": "qwen3_vl_text",
                "vocab_size": self.vocabulary,
                "hidden_size": self.hidden,
                "intermediate_size": self.intermediate,
                "num_hidden_layers": 1,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": 128,
                "max_position_embeddings": 4096,
                "rope_theta": 5e6,
                "rope_scaling": {
                    "rope_type": "default",
                    "mrope_interleaved": true,
                    "mrope_section": [24, 20, 20],
                },
            },
            // Never run: the prompt has no pictures.
            "vision_config": {
                "model_type": "qwen3_vl",
                "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
                "in_channels": 3, "patch_size": 2,
                "temporal_patch_size": 2, "spatial_merge_size": 2,
                "out_hidden_size": self.hidden, "num_position_embeddings": 4,
                "deepstack_visual_indexes": [],
            },
        });
        Ok(QwenVlConfig::from_hf_config(&config.to_string())?)
    }
}

/// Runs all parts and prints a row for each.
///
/// # Errors
/// If the folder exists, a part fails, or the two files differ.
pub(crate) fn run(args: &CheckpointArgs) -> Result<ExitCode, Box<dyn Error>> {
    let folder = &args.folder;
    if folder.exists() {
        return Err(format!(
            "{} exists; it would be removed afterwards, so name another --folder",
            folder.display()
        )
        .into());
    }
    let cannot = |action| move |error| format!("cannot {action} {}: {error}", folder.display());
    fs::create_dir_all(folder).map_err(cannot("create"))?;
    let rows = parts(args, folder);
    fs::remove_dir_all(folder).map_err(cannot("remove"))?;
    let rows = rows?;
    let mut out = stdout();
    if args.json {
        write_json_lines(&rows, &mut out)?;
    } else {
        write!(out, "{}", table(&rows))?;
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

fn parts(args: &CheckpointArgs, folder: &Path) -> Result<Vec<Row>, Box<dyn Error>> {
    let sizes = if args.quick { TINY } else { QWEN3_VL_8B };
    let config = sizes.config()?;
    let compute = Compute::open(&args.device, &args.token)?;
    let mut device = compute.device().clone();
    device.configure(float(DType::Bf16))?;
    let [first, second] = ["first", "second"].map(|name| folder.join(name));
    for folder in [&first, &second] {
        fs::create_dir_all(folder)?;
    }
    let mut run = Run {
        compute: &compute,
        piece_bytes: sizes.piece_bytes,
        rows: Vec::new(),
    };

    run.part("draw and save", |pieces| {
        Ok(config.init(&device)?.save_in(&first, pieces)?)
    })?;
    let loaded = run.part("load", |pieces| {
        Ok(config.load_in(&first, &device.clone().autodiff(), pieces)?)
    })?;
    run.part("save", |pieces| Ok(loaded.save_in(&second, pieces)?))?;
    if !same_files(&first.join(WEIGHTS), &second.join(WEIGHTS))? {
        return Err("the checkpoint that was loaded and saved differs from the first".into());
    }
    let trained = run.part("train one step", |_| step(loaded))?;
    run.part("save", |pieces| Ok(trained.save_in(&second, pieces)?))?;
    if same_files(&first.join(WEIGHTS), &second.join(WEIGHTS))? {
        return Err("the step changed no weight".into());
    }
    Ok(run.rows)
}

/// The parts so far.
struct Run<'a> {
    compute: &'a Compute,
    piece_bytes: Option<usize>,
    rows: Vec<Row>,
}

impl Run<'_> {
    fn part<T>(
        &mut self,
        part: &'static str,
        work: impl FnOnce(Pieces<'_>) -> Result<T, Box<dyn Error>>,
    ) -> Result<T, Box<dyn Error>> {
        let bar = progress(0)?;
        bar.set_message(part);
        let mut moved_bytes = 0;
        let mut pieces = Pieces::default().reporting(|moved| {
            moved_bytes = moved.bytes;
            bar.set_length(moved.total);
            bar.set_position(moved.bytes);
        });
        if let Some(bytes) = self.piece_bytes {
            pieces = pieces.of(bytes);
        }
        self.compute.start_counting()?;
        let (result, host) = ALLOCATOR.measure(usize::MAX, || work(pieces));
        let result = result?;
        let usage = self.compute.usage()?;
        bar.finish_and_clear();
        self.rows.push(Row {
            part,
            moved_bytes,
            host_peak_bytes: host.peak_bytes,
            device_peak_bytes: usage.map(|usage| usage.peak_bytes()),
        });
        Ok(result)
    }
}

/// Trains on a few tokens. The optimizer keeps nothing, so that the weights are what counts.
fn step(model: QwenVl) -> Result<QwenVl, Box<dyn Error>> {
    let ids = [5, 8, 13, 21, 34, 55, 89, 144];
    let prompt = Prompt {
        input_ids: &ids,
        ..Prompt::default()
    };
    let batch = model.batch(&Inputs {
        prompt,
        ..Inputs::default()
    })?;
    let mut optimizer = SgdConfig::new().init();
    let (model, loss) = model.train_step(&mut optimizer, 1.0, &batch, &ids)?;
    if !loss.is_finite() {
        return Err(format!("the loss is {loss}").into());
    }
    Ok(model)
}

fn same_files(left: &Path, right: &Path) -> Result<bool, Box<dyn Error>> {
    let mut left = File::open(left)?;
    let mut right = File::open(right)?;
    let mut parts = [vec![0; 1 << 20], vec![0; 1 << 20]];
    loop {
        let [a, b] = &mut parts;
        let read = left.read(a)?;
        if read == 0 {
            return Ok(right.read(b)? == 0);
        }
        match right.read_exact(&mut b[..read]) {
            Ok(()) if a[..read] == b[..read] => {}
            _ => return Ok(false),
        }
    }
}

fn table(rows: &[Row]) -> String {
    let mut table = Table::new(
        &["part"],
        &["moved", "peak of this process", "peak of the NPU"],
    );
    for row in rows {
        table.row([
            row.part.to_owned(),
            bytes(row.moved_bytes as f64),
            bytes(row.host_peak_bytes as f64),
            row.device_peak_bytes
                .map_or("elsewhere".to_owned(), |peak| bytes(peak as f64)),
        ]);
    }
    table.to_string()
}
