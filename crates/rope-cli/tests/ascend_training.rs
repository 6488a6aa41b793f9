//! Training on the simulated NPU: losses as on the CPU, less memory fused than composed, no growth,
//! and nothing left at the end.

use std::path::Path;

use crate::common::{HANG, Served, fresh, host, mrope, npus, says, text, within};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::activation::softmax;
use burn_ascend::{AscendDevice, fallbacks, reset_fallbacks};
use rope_burn::rope_core::{Layout, Positions, RotarySpec};
use rope_burn::{Implementation, Rotary, RotaryAngles};
use rope_check::golden::Row;
use rope_check::model::{Models, is_model_folder};
use serde_json::{Value, json};
use vlm_models::rope_core::position_ids::Prompt;
use vlm_models::{Inputs, Transfer, VlmConfig};

/// The report of `mrope train`.
fn trained(arguments: &[&str], name: &str) -> Value {
    let out = fresh(name).display().to_string();
    let mut all = vec!["train", "--json", "--test-questions", "8", "--out", &out];
    all.extend(arguments);
    let output = mrope(&all);
    let errors = text(&output.stderr);
    assert!(output.status.success(), "{errors}");
    serde_json::from_str(&text(&output.stdout)).expect("an object")
}

fn losses(report: &Value) -> Vec<f64> {
    let losses = report["losses"].as_array().expect("a list");
    losses
        .iter()
        .map(|loss| loss.as_f64().expect("a number"))
        .collect()
}

#[test]
fn the_losses_are_those_of_the_cpu_and_no_step_leaves_the_device() {
    let _held = npus();
    let run = |device, rotary, steps: usize| {
        let steps = steps.to_string();
        let arguments = ["--steps", &steps, "--seed", "3", "--batch", "8"];
        let choice = ["--device", device, "--rotary", rotary];
        let name = format!("train-{device}-{rotary}");
        trained(&[&arguments[..], &choice].concat(), &name)
    };
    for (rotary, steps) in [("fused", 50), ("composed", 5)] {
        let (npu, cpu) = (run("ascend-sim", rotary, steps), run("cpu", rotary, steps));
        let (found, expected) = (losses(&npu), losses(&cpu));
        assert_eq!(found.len(), steps);
        for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!(
                (found - expected).abs() < 1e-3,
                "{rotary}, step {step}: {found}, on the CPU {expected}"
            );
        }
        assert_eq!(npu["usage"]["fallbacks"], Value::Array(Vec::new()));
        let peak = npu["usage"]["peak_bytes"].as_u64();
        eprintln!("{rotary}: peak of training {peak:?} bytes");
        assert!(peak > Some(1 << 20), "{peak:?}");
        assert_eq!(cpu["usage"], Value::Null);
    }
}

#[test]
fn a_served_device_trains_as_the_device_itself() {
    let served = Served::start("cpu", "training");
    let arguments = ["--steps", "3", "--batch", "4"];
    let token_file = served.token_file.display().to_string();
    let remote = served.remote();
    let remote = ["--device", &remote, "--token-file", &token_file];
    let found = trained(&[&arguments[..], &remote].concat(), "train-remote");
    assert_eq!(losses(&found), losses(&trained(&arguments, "train-local")));
    assert_eq!(found["device"], served.remote());
}

#[test]
fn no_step_of_the_models_of_transformers_leaves_the_ai_core() {
    let (_held, [npu, _]) = npus();
    let (_host, device) = host(npu);
    let fixtures = rope_check::fixtures().expect("the test runs in the workspace");
    let folders = std::fs::read_dir(fixtures.join("models")).expect("fixtures");
    let folders = folders.map(|entry| entry.expect("the folder reads").path());
    let folders: Vec<_> = folders.filter(|path| is_model_folder(path)).collect();
    assert!(folders.len() >= 12);
    for folder in folders {
        // The composed rotation is the same operations in each.
        let is_composed = folder.ends_with("qwen3_vl_tiny") || folder.ends_with("qwen3_5_tiny");
        let implementations = [Implementation::Fused, Implementation::Composed];
        for implementation in &implementations[..1 + usize::from(is_composed)] {
            let models = Models::new(device.clone(), Some("npu".into()), *implementation);
            reset_fallbacks();
            let report = models.compare(&folder).expect("the model runs");
            device.sync().expect("the device is well");
            let failed: Vec<&Row> = report.rows.iter().filter(|row| !row.pass).collect();
            assert!(failed.is_empty(), "{}: {failed:?}", folder.display());
            let count = |part| {
                let rows = report.rows.iter();
                rows.filter(|row| row.tensor.starts_with(part)).count()
            };
            assert_eq!([count("logits"), count("train.loss")], [1, 1]);
            assert!(count("grad.") > 20, "{}", folder.display());
            assert_eq!(fallbacks(), [], "{}", folder.display());
        }
    }
}

/// Attention, in layers.
#[derive(Module, Debug)]
struct Layers {
    layers: Vec<Layer>,
}

#[derive(Module, Debug)]
struct Layer {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    rotary: Rotary,
}

/// Shape of a [`Layers`] and of its input.
#[derive(Clone, Copy)]
struct Sizes {
    layers: usize,
    batch: usize,
    seq: usize,
    heads: usize,
    head_dim: usize,
}

impl Sizes {
    fn width(self) -> usize {
        self.heads * self.head_dim
    }

    fn init(self, implementation: Implementation, device: &Device) -> Layers {
        let spec = RotarySpec::builder(self.head_dim).build().expect("valid");
        let rotary = Rotary::new(spec, Layout::Bsnd).with_implementation(implementation);
        let linear = || {
            let linear = LinearConfig::new(self.width(), self.width()).with_bias(false);
            linear.init(&Device::flex().autodiff())
        };
        let layer = |_| Layer {
            query: linear(),
            key: linear(),
            value: linear(),
            output: linear(),
            rotary: rotary.clone(),
        };
        let layers = (0..self.layers).map(layer).collect();
        Layers { layers }.fork(device)
    }

    fn input(self, device: &Device) -> Tensor<3> {
        let shape = [self.batch, self.seq, self.width()];
        let values: Vec<f32> = (0..shape.iter().product())
            .map(|i| (i as f32).sin())
            .collect();
        Tensor::from_data(TensorData::new(values, shape), device)
    }
}

impl Layers {
    fn forward(&self, mut x: Tensor<3>, sizes: Sizes, angles: &RotaryAngles) -> Tensor<3> {
        let [batch, seq, width] = x.dims();
        for layer in &self.layers {
            let split = |x: Tensor<3>| x.reshape([batch, seq, sizes.heads, sizes.head_dim]);
            let (q, k, v) = (
                split(layer.query.forward(x.clone())),
                split(layer.key.forward(x.clone())),
                split(layer.value.forward(x.clone())),
            );
            let (q, k) = layer.rotary.forward(q, k, angles);
            let scores = q.swap_dims(1, 2).matmul(k.swap_dims(1, 2).swap_dims(2, 3));
            let mixed = softmax(scores, 3).matmul(v.swap_dims(1, 2)).swap_dims(1, 2);
            x = x + layer.output.forward(mixed.reshape([batch, seq, width]));
        }
        x
    }
}

/// A model in training on one device.
struct Run {
    sizes: Sizes,
    model: Layers,
    optimizer: ModuleOptimizer,
    input: Tensor<3>,
    angles: RotaryAngles,
}

impl Run {
    fn new(sizes: Sizes, implementation: Implementation, device: &Device) -> Self {
        let device = device.clone().autodiff();
        let model = sizes.init(implementation, &device);
        let positions = Positions::text(1, 0, sizes.seq).expect("valid");
        Self {
            angles: model.layers[0].rotary.angles(&positions, &device),
            input: sizes.input(&device),
            model,
            optimizer: AdamWConfig::new().init(),
            sizes,
        }
    }

    fn step(&mut self) -> Tensor<1> {
        let output = self
            .model
            .forward(self.input.clone(), self.sizes, &self.angles);
        let loss = output.powf_scalar(2.0).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &self.model);
        self.model = self.optimizer.step(1e-3, self.model.clone(), gradients);
        loss.inner()
    }
}

fn number(loss: Tensor<1>) -> f32 {
    loss.try_into_scalar().expect("the step was computed")
}

/// Peak of the device's tensors in one step, beyond those kept between steps.
fn peak_of<T>(npu: AscendDevice, device: &Device, step: impl FnOnce() -> T) -> usize {
    device.sync().expect("nothing failed");
    npu.reset_peak_memory().expect("open");
    let before = npu.memory().expect("open").live_bytes;
    // Held, so that a tensor that is read late is not freed early.
    let _result = step();
    device.sync().expect("nothing failed");
    npu.memory().expect("open").peak_bytes - before
}

#[test]
fn the_fused_rotation_needs_less_memory() {
    let (_held, [npu, _]) = npus();
    let (_host, device) = host(npu);
    // In a model the peak lies where the graph is largest, in the attention or at the loss:
    // composed adds nothing there, as autodiff keeps no factor of a product with a constant.
    let sizes = Sizes {
        layers: 2,
        batch: 8,
        seq: 16,
        heads: 2,
        head_dim: 32,
    };
    let model = |implementation| {
        let mut run = Run::new(sizes, implementation, &device);
        // The optimizer's state comes with the first step.
        number(run.step());
        peak_of(npu, &device, || run.step())
    };
    let (fused, composed) = (
        model(Implementation::Fused),
        model(Implementation::Composed),
    );
    eprintln!("peak of a model's step: fused {fused} bytes, composed {composed}");
    assert!(fused <= composed, "{fused} > {composed}");

    // Where rotating q and k is the step, forward and backward.
    let rotation = |implementation| {
        let device = device.clone().autodiff();
        let spec = RotarySpec::builder(64).build().expect("valid");
        let rotary = Rotary::new(spec, Layout::Bsnd).with_implementation(implementation);
        let angles = rotary.angles(&Positions::text(1, 0, 32).expect("valid"), &device);
        let scale = |value| Tensor::<4>::full([1, 1, 1, 1], value, &device).require_grad();
        let (a, b) = (scale(0.5), scale(2.0));
        let x = Tensor::<4>::ones([4, 32, 4, 64], &device);
        let q_bytes = x.shape().num_elements() * size_of::<f32>();
        let peak = peak_of(npu, &device, || {
            let (q, k) = rotary.forward(x.clone() * a, x.clone() * b, &angles);
            (q + k).sum().backward()
        });
        peak as f64 / q_bytes as f64
    };
    let (fused, composed) = (
        rotation(Implementation::Fused),
        rotation(Implementation::Composed),
    );
    eprintln!("peak of a rotation's step, in sizes of q: fused {fused:.2}, composed {composed:.2}");
    assert!(fused + 1.0 <= composed, "{fused} {composed}");
}

#[test]
fn memory_does_not_grow_and_nothing_is_left() {
    let (_held, [npu, _]) = npus();
    let before = ascend_sim::control::live();
    let sizes = Sizes {
        layers: 1,
        batch: 1,
        seq: 2,
        heads: 1,
        head_dim: 4,
    };
    let (host, device) = host(npu);
    let mut run = Run::new(sizes, Implementation::Fused, &device);
    let measured = |run: &mut Run, steps: usize| {
        for _ in 1..steps {
            run.step();
        }
        // Read, so that the device has done all of it.
        let loss = number(run.step());
        assert!(loss.is_finite());
        device.sync().expect("nothing failed");
        let live = ascend_sim::control::live();
        (
            npu.memory().expect("open"),
            live.allocations,
            live.descriptors,
        )
    };
    let (early, early_blocks, _) = measured(&mut run, 20);
    // By now, a step plans no operator anew.
    ascend_sim::control::clear_calls();
    assert!(number(run.step()).is_finite());
    let calls = ascend_sim::control::calls();
    let planned = calls
        .iter()
        .filter(|call| call.function.ends_with("GetWorkspaceSize"));
    let planned: Vec<&str> = planned.map(|call| call.function).collect();
    assert!(planned.is_empty(), "{planned:?}");
    let (late, late_blocks, late_descriptors) = measured(&mut run, 980);
    assert_eq!(late.live_bytes, early.live_bytes);
    assert_eq!(late.reserved_bytes, early.reserved_bytes);
    assert_eq!(late_blocks, early_blocks);
    // Operators are kept for the next call alike, up to a number of them.
    assert!(late_descriptors < 8 * 1024, "{late_descriptors}");

    drop(host);
    let after = ascend_sim::control::live();
    assert_eq!(
        (
            after.allocations,
            after.streams,
            after.events,
            after.host_blocks,
            after.descriptors
        ),
        (
            before.allocations,
            before.streams,
            before.events,
            before.host_blocks,
            before.descriptors
        )
    );
    // The tensors that are still held are lost, not their process.
    let lost = run.step();
    within(HANG, move || lost.try_into_data().map(drop)).expect_err("there is no device");
}

#[test]
fn several_devices_compute_side_by_side() {
    let (_held, npus) = npus();
    let host = burn_ascend::AscendHost::start(&npus).expect("both open");
    let [a, b] = [0, 1].map(|index: usize| host.devices()[index].clone());
    assert_ne!(a, b);
    let x = Tensor::<1>::from_data([1.0, 2.0, 3.0], &a);
    let y = x.clone().to_device(&b) * 2.0;
    let sum = (x + y.to_device(&a)).into_data();
    assert_eq!(sum.iter::<f32>().collect::<Vec<_>>(), [3.0, 6.0, 9.0]);
    let taken = burn_ascend::AscendHost::start(&npus[..1]).expect_err("it is in use");
    says(&taken, "open in this process already");
}

#[test]
fn a_checkpoint_larger_than_its_pieces_loads_trains_and_is_saved_in_the_memory_that_it_takes() {
    let (_held, [npu, _]) = npus();
    let (_host, device) = host(npu);
    let hidden = 256;
    let config = json!({
        "model_type": "qwen3_vl",
        "image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3,
        "tie_word_embeddings": false,
        "text_config": {
            "model_type": "qwen3_vl_text", "vocab_size": 2000, "hidden_size": hidden,
            "intermediate_size": hidden, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 128, "max_position_embeddings": 4096,
            "rope_theta": 5e6,
            "rope_scaling": {
                "rope_type": "default", "mrope_interleaved": true, "mrope_section": [24, 20, 20],
            },
        },
        // Never run: the prompt has no pictures.
        "vision_config": {
            "model_type": "qwen3_vl", "depth": 1, "hidden_size": 32, "intermediate_size": 32,
            "num_heads": 2, "in_channels": 3, "patch_size": 2, "temporal_patch_size": 2,
            "spatial_merge_size": 2, "out_hidden_size": hidden, "num_position_embeddings": 4,
            "deepstack_visual_indexes": [],
        },
    });
    let config = VlmConfig::from_hf_config(&config.to_string()).expect("valid");
    let [first, second] = ["checkpoint", "checkpoint_again"].map(fresh);
    for folder in [&first, &second] {
        std::fs::create_dir_all(folder).expect("a folder");
    }
    let transfer = || Transfer::default().piece_bytes(64 << 10);
    let weights = |folder: &Path| std::fs::read(folder.join("model.safetensors")).expect("weights");

    let drawn = config.init(&device).expect("a model");
    drawn.save_with(&first, transfer()).expect("saves");
    drop(drawn);
    let total = weights(&first).len();
    assert!(total > 1 << 20, "{total}");
    // Tensors are written in place: beyond the model there is a piece, and a copy of its part of a
    // matrix that is stored transposed.
    let mut loaded = None;
    let peak = peak_of(npu, &device, || {
        let model = config.load_with(&first, &device.clone().autodiff(), transfer());
        loaded = Some(model.expect("loads"));
    });
    assert!(peak < total * 9 / 8, "{peak} for {total}");
    let loaded = loaded.expect("a model");
    let peak = peak_of(npu, &device, || {
        loaded.save_with(&second, transfer()).expect("saves")
    });
    assert!(peak < total / 8, "{peak} for {total}");
    assert!(weights(&first) == weights(&second));

    let ids = [5, 8, 13, 21, 34, 55, 89, 144];
    let prompt = Prompt {
        input_ids: &ids,
        ..Prompt::default()
    };
    let inputs = Inputs {
        prompt,
        ..Inputs::default()
    };
    let mut trained = None;
    let peak = peak_of(npu, &device, || {
        let batch = loaded.batch(&inputs).expect("fits");
        let step = loaded.train_step(&mut SgdConfig::new().init(), 1.0, &batch, &ids);
        trained = Some(step.expect("steps"));
    });
    assert!(peak > total / 2, "{peak}");
    let (trained, loss) = trained.expect("a step");
    assert!(loss.is_finite());
    trained.save_with(&second, transfer()).expect("saves");
    assert!(
        weights(&first) != weights(&second),
        "the step changed no weight"
    );
}
