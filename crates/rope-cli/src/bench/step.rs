//! `mrope bench step`.

use std::error::Error;
use std::process::ExitCode;

use burn::tensor::{Device, Distribution, Tensor};
use clap::{Args, Parser};
use qwen_vl::rope_core::position_ids::Prompt;
use qwen_vl::{Inputs, QwenVl, QwenVlConfig};
use rope_bench::bars::{self, TRAIN_STEP, names};
use rope_bench::chart;
use rope_bench::rows::{StepRow, time};
use rope_bench::sample::{Contest, Plan, Timing, interleaved};
use rope_bench::shapes::QWEN3_VL_8B;
use rope_burn::{Implementation, Rotary, RotaryAngles};
use rope_core::{AxisLayout, Layout, Pairing, Positions, RotarySpec};
use serde_json::json;

use super::output::{OutputArgs, progress};
use crate::table::Table;
use crate::train::{ModelConfig, RotaryChoice, RunConfig, Trainer};

/// Measure which share of a training step rotation takes: of mrope train, and of a Qwen-VL layer.
///
/// The rotations of a step are timed by themselves, in turns with whole steps: as many as the step
/// has, on tensors of its shapes, through burn and its graph, forward and backward. Their backward
/// starts from ones, which it first has to make and a step does not, so the share is too large
/// rather than too small. A Qwen-VL layer has the sizes of Qwen3-VL-2B, and its time is that of a
/// model with two layers less that of a model with one.
#[derive(Args, Clone, Debug)]
pub(crate) struct StepArgs {
    /// Tiny models and one sample, to see that everything runs: its times mean nothing.
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    output: OutputArgs,
}

/// The rotations of a step by themselves.
struct Rotations {
    rotary: Rotary,
    angles: RotaryAngles,
    device: Device,
    layers: usize,
    q: [usize; 4],
    k: [usize; 4],
    ready: Vec<(Tensor<4>, Tensor<4>)>,
}

impl Rotations {
    fn new(
        spec: RotarySpec,
        positions: &Positions,
        implementation: Implementation,
        layers: usize,
        [batch, seq, heads, kv_heads]: [usize; 4],
    ) -> Result<Self, Box<dyn Error>> {
        let device = Device::flex().autodiff();
        let head_dim = spec.head_dim();
        let rotary = Rotary::new(spec, Layout::Bsnd).with_implementation(implementation);
        Ok(Self {
            angles: rotary.try_angles(positions, &device)?,
            rotary,
            device,
            layers,
            q: [batch, seq, heads, head_dim],
            k: [batch, seq, kv_heads, head_dim],
            ready: Vec::new(),
        })
    }

    /// q and k of every layer, held by nobody else.
    fn prepare(&mut self) {
        let random = |shape: [usize; 4]| {
            Tensor::<4>::random(shape, Distribution::Default, &self.device).require_grad()
        };
        self.ready = (0..self.layers)
            .map(|_| (random(self.q), random(self.k)))
            .collect();
    }

    fn run(&mut self) {
        for (q, k) in self.ready.drain(..) {
            let (q, k) = self.rotary.forward(q, k, &self.angles);
            drop((q.backward(), k.backward()));
        }
    }
}

/// A step of training.
type Step<'a> = Box<dyn FnMut() -> Result<(), Box<dyn Error>> + 'a>;

/// Steps, and as the last contestant the rotations of one.
struct Contestants<'a> {
    steps: Vec<Step<'a>>,
    rotations: Rotations,
    failure: Option<Box<dyn Error>>,
}

impl Contestants<'_> {
    /// The timings of the steps, then that of the rotations.
    fn timed(mut self, plan: &Plan) -> Result<Vec<Timing>, Box<dyn Error>> {
        let timings = interleaved(&mut self, plan);
        self.failure.map_or(Ok(timings), Err)
    }
}

impl Contest for Contestants<'_> {
    fn contestants(&self) -> usize {
        self.steps.len() + 1
    }

    fn prepare(&mut self, contestant: usize) {
        if contestant == self.steps.len() {
            self.rotations.prepare();
        }
    }

    fn run(&mut self, contestant: usize, _: usize) {
        let Some(step) = self.steps.get_mut(contestant) else {
            return self.rotations.run();
        };
        if let Err(error) = step() {
            self.failure.get_or_insert(error);
        }
    }

    fn repeats(&self) -> bool {
        false
    }
}

/// The options of `mrope train`, for their defaults.
#[derive(Parser)]
struct Defaults {
    #[command(flatten)]
    run: RunConfig,
}

fn train_step(implementation: Implementation, plan: &Plan) -> Result<StepRow, Box<dyn Error>> {
    let Defaults { mut run } = Defaults::try_parse_from(["train"])?;
    run.rotary = match implementation {
        Implementation::Fused => RotaryChoice::Fused,
        Implementation::Composed => RotaryChoice::Composed,
    };
    let clip = run.clip();
    let sizes = ModelConfig::new(clip.vocabulary());
    let spec = run.spec(sizes.head_dim)?;
    let positions = Positions::new(spec.axis_count(), &clip.position_ids(run.axes))?;
    let shape = [run.batch, clip.tokens(), sizes.heads, sizes.kv_heads];
    let mut trainer = Trainer::new(run, &Device::flex())?;
    let contestants = Contestants {
        steps: vec![Box::new(move || Ok(trainer.step()?))],
        rotations: Rotations::new(spec, &positions, implementation, sizes.layers, shape)?,
        failure: None,
    };
    let timings = contestants.timed(plan)?;
    let step_ns = timings[0].median_ns;
    Ok(row(
        TRAIN_STEP,
        implementation,
        sizes.layers,
        step_ns,
        timings[1],
    ))
}

/// The sizes that a decoder layer is timed at.
#[derive(Clone, Copy)]
struct LayerSizes {
    name: &'static str,
    tokens: usize,
    hidden: usize,
    intermediate: usize,
    heads: usize,
    kv_heads: usize,
}

/// Qwen3-VL-2B's.
const QWEN3_VL_2B: LayerSizes = LayerSizes {
    name: "a layer of Qwen3-VL-2B, 512 tokens",
    tokens: 512,
    hidden: 2048,
    intermediate: 6144,
    heads: 16,
    kv_heads: 8,
};

const TINY: LayerSizes = LayerSizes {
    name: "a tiny layer",
    tokens: 8,
    hidden: 64,
    intermediate: 64,
    heads: 2,
    kv_heads: 1,
};

impl LayerSizes {
    /// A model of this number of layers, with as little around them as possible.
    fn model(
        &self,
        layers: usize,
        implementation: Implementation,
    ) -> Result<QwenVl, Box<dyn Error>> {
        let config = json!({
            "model_type": "qwen3_vl",
            "image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3,
            "tie_word_embeddings": true,
            "text_config": {
                "model_type": "qwen3_vl_text",
                "vocab_size": 32,
                "hidden_size": self.hidden,
                "intermediate_size": self.intermediate,
                "num_hidden_layers": layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": QWEN3_VL_8B.head_dim,
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
        let config = QwenVlConfig::from_hf_config(&config.to_string())?;
        let device = Device::flex().autodiff();
        Ok(config.with_implementation(implementation).init(&device)?)
    }
}

fn layer_step(
    sizes: LayerSizes,
    implementation: Implementation,
    plan: &Plan,
) -> Result<StepRow, Box<dyn Error>> {
    let ids: Vec<i64> = (0..sizes.tokens as i64)
        .map(|token| 4 + token % 28)
        .collect();
    let mut steps: Vec<Step<'_>> = Vec::new();
    for layers in [1, 2] {
        let model = sizes.model(layers, implementation)?;
        let prompt = Prompt {
            input_ids: &ids,
            ..Prompt::default()
        };
        let batch = model.batch(&Inputs {
            prompt,
            ..Inputs::default()
        })?;
        let ids = &ids;
        steps.push(Box::new(move || {
            drop(model.loss(&batch, ids)?.backward());
            Ok(())
        }));
    }
    // All sizes of Qwen3-VL have the same heads.
    let spec = QWEN3_VL_8B.spec(Pairing::Half, AxisLayout::Striped(vec![24, 20, 20]))?;
    let positions = Positions::text(spec.axis_count(), 0, sizes.tokens)?;
    let shape = [1, sizes.tokens, sizes.heads, sizes.kv_heads];
    let contestants = Contestants {
        steps,
        rotations: Rotations::new(spec, &positions, implementation, 1, shape)?,
        failure: None,
    };
    let timings = contestants.timed(plan)?;
    let layer_ns = timings[1].median_ns - timings[0].median_ns;
    Ok(row(sizes.name, implementation, 1, layer_ns, timings[2]))
}

fn row(
    step: &str,
    implementation: Implementation,
    layers: usize,
    step_ns: f64,
    rotation: Timing,
) -> StepRow {
    StepRow {
        step: step.to_owned(),
        implementation: match implementation {
            Implementation::Fused => names::FUSED,
            Implementation::Composed => names::COMPOSED,
        }
        .to_owned(),
        layers,
        step_ns,
        rotation_ns: rotation.median_ns,
        share: rotation.median_ns / step_ns,
        samples: rotation.samples,
    }
}

/// Times, and reports what was timed.
///
/// # Errors
/// If a step fails, or an output cannot be written.
pub(crate) fn run(args: &StepArgs) -> Result<ExitCode, Box<dyn Error>> {
    let output = args.output.open()?;
    let (plan, sizes) = if args.quick {
        (Plan::ONCE, TINY)
    } else {
        let plan = Plan {
            samples: 41,
            ..Plan::default()
        };
        (plan, QWEN3_VL_2B)
    };
    let bar = progress(4)?;
    let mut rows = Vec::new();
    for implementation in [Implementation::Fused, Implementation::Composed] {
        bar.set_message(TRAIN_STEP);
        rows.push(train_step(implementation, &plan)?);
        bar.inc(1);
        bar.set_message(sizes.name);
        rows.push(layer_step(sizes, implementation, &plan)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let bars = if args.quick {
        Vec::new()
    } else {
        bars::step(&rows)
    };
    output.write(&rows, || chart::step(&rows), || table(&rows), &bars)
}

fn table(rows: &[StepRow]) -> String {
    let numbers = ["rotations", "step takes", "they take", "share"];
    let mut table = Table::new(&["step", "rotation"], &numbers);
    for row in rows {
        table.row([
            row.step.clone(),
            row.implementation.clone(),
            row.layers.to_string(),
            time(row.step_ns),
            time(row.rotation_ns),
            format!("{:.2}%", 100.0 * row.share),
        ]);
    }
    table.to_string()
}
