//! The tiny models of the fixtures, and samples as tests/fixtures/generate/finetune.py draws them.

#![allow(dead_code, reason = "each test uses some")]

pub(crate) mod ended;

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::{ModuleMapper, Param};
use burn::tensor::{DType, Device, Tensor};
use vlm_data::text::Sample;
use vlm_data::{Cut, MicroBatch, TrainingSample};
use vlm_models::{LoraConfig, ModelPart, TrainedWeights, Vlm, VlmConfig};
use vlm_train::{Rates, Recipe, Schedule, TrainedParts};

pub(crate) const FAMILIES: [&str; 5] = [
    "qwen2_vl_tiny",
    "qwen2_5_vl_tiny",
    "qwen3_vl_tiny",
    "glm4v_tiny",
    "qwen3_5_tiny",
];
/// The families with experts, whose tests are those of steps.
pub(crate) const WITH_EXPERTS: [&str; 3] =
    ["qwen3_vl_moe_tiny", "qwen3_5_moe_tiny", "glm4v_moe_tiny"];
pub(crate) const ALL: [ModelPart; 3] = [ModelPart::Tower, ModelPart::Merger, ModelPart::Decoder];
pub(crate) const SAMPLES: usize = 8;
const BATCH: usize = 4;

/// A folder of a test, removed at its end.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        // Tests side by side may choose one name.
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("vlm-train-{name}-{}-{number}", std::process::id());
        let folder = Self(std::env::temp_dir().join(name));
        let _none = std::fs::remove_dir_all(&folder.0);
        std::fs::create_dir_all(&folder.0).unwrap();
        folder
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

pub(crate) fn load(family: &str) -> (VlmConfig, Vlm) {
    let folder = fixtures().join("models").join(family);
    let config = VlmConfig::from_folder(&folder).unwrap();
    let model = config.load(&folder, &Device::flex().autodiff()).unwrap();
    (config, model)
}

/// Casts the parameters of a model, as a file of that type is loaded.
pub(crate) struct Halve {
    dtype: DType,
    containers: Vec<String>,
}

impl Halve {
    pub(crate) fn to(dtype: DType) -> Self {
        Self {
            dtype,
            containers: Vec::new(),
        }
    }
}

impl ModuleMapper for Halve {
    fn enter_module(&mut self, _name: &str, container: &str) {
        self.containers.push(container.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.containers.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // GLM-4.5V's router is in f32.
        if self
            .containers
            .iter()
            .any(|of| of == "Struct:SigmoidRouter")
        {
            return param;
        }
        let value = param.val().inner().cast(self.dtype);
        Param::initialized(param.id, Tensor::from_inner(value).require_grad())
    }
}

/// 15 bits of a linear congruential generator.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = (1_103_515_245 * self.0 + 12345) & 0x7fff_ffff;
        self.0 >> 16
    }

    pub(crate) fn text(&mut self, count: usize) -> Vec<i64> {
        (0..count).map(|_| 1 + (self.next() % 250) as i64).collect()
    }
}

pub(crate) fn sample(index: usize, config: &VlmConfig) -> TrainingSample {
    let vision = config.vision.as_ref().expect("a tower");
    let (start, end) = (292, 293);
    let mut draw = Numbers(1000 + index as u64);
    let mut sample = TrainingSample {
        line: index as u64 + 1,
        ..TrainingSample::default()
    };
    let mut input_ids = draw.text(2 + index % 3);
    if index % 4 != 3 {
        let grid = [1, 4, 2 * (1 + index % 3)];
        let patches = grid[1] * grid[2];
        input_ids.push(start);
        input_ids.extend(vec![vision.image_token; patches / 4]);
        input_ids.push(end);
        let pixel = |draw: &mut Numbers| ((draw.next() % 256) as f32 - 128.0) / 64.0;
        let elements = patches * vision.patch_elems();
        sample.image_patches = (0..elements).map(|_| pixel(&mut draw)).collect();
        sample.image_grids.push(grid);
    }
    input_ids.extend(draw.text(3));
    let answer = draw.text(1 + 3 * (index % 4));
    let mut labels = vec![-100; input_ids.len()];
    labels.extend(&answer);
    input_ids.extend(answer);
    sample.text = Sample {
        input_ids,
        labels,
        ..Sample::default()
    };
    sample
}

pub(crate) fn packed(samples: Vec<TrainingSample>) -> MicroBatch {
    MicroBatch::new(samples, Cut::Packed { tokens: 200_000 }).unwrap()
}

pub(crate) fn padded(samples: Vec<TrainingSample>) -> MicroBatch {
    let cut = Cut::Padded { tokens: 200_000 };
    MicroBatch::new(samples, cut).unwrap()
}

/// The samples of a step's batch.
pub(crate) fn samples(step: usize, config: &VlmConfig) -> Vec<TrainingSample> {
    let index = |i: usize| (step * BATCH + i) % SAMPLES;
    (0..BATCH).map(|i| sample(index(i), config)).collect()
}

pub(crate) fn lora() -> TrainedParts {
    TrainedParts::Lora(LoraConfig {
        rank: 4,
        alpha: 8.0,
        ..LoraConfig::default()
    })
}

/// Adapters of the decoder beside word embeddings, head and merger.
pub(crate) fn beside() -> TrainedParts {
    TrainedParts::Lora(LoraConfig {
        rank: 4,
        alpha: 8.0,
        whole: TrainedWeights {
            parts: vec![ModelPart::Merger],
            modules: TrainedWeights::EMBEDDINGS.map(str::to_owned).to_vec(),
        },
        ..LoraConfig::default()
    })
}

/// That of the reference.
pub(crate) fn recipe(trained: TrainedParts) -> Recipe {
    let rate = match trained {
        TrainedParts::Lora(_) => 2e-3,
        TrainedParts::Full(_) => 2e-4,
    };
    Recipe {
        steps: 50,
        trained,
        rates: Rates::all(rate),
        schedule: Schedule::Cosine,
        warmup_steps: 5,
        weight_decay: 0.01,
        seed: 11,
        ..Recipe::default()
    }
}

/// The log of a run without the speed of its steps, which alone differs between equal runs.
#[allow(clippy::disallowed_methods, reason = "a file of the test")]
pub(crate) fn timeless_log(folder: &std::path::Path) -> String {
    let log = std::fs::read_to_string(folder.join("log.jsonl")).unwrap();
    let lines = log.lines().map(|line| {
        let mut line: serde_json::Value = serde_json::from_str(line).unwrap();
        line.as_object_mut().unwrap().remove("tokens_per_second");
        line.to_string()
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// The folder of a family's model.
pub(crate) fn base(family: &str) -> std::path::PathBuf {
    fixtures().join("models").join(family)
}
