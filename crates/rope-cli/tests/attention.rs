//! Attention, norms and models with them on the simulated NPU: by the vendor's operators within
//! their limits, by ordinary operations beyond, and always on the device.

use crate::common::{host, npus};
use ascend_sim::control;
use burn::optim::AdamWConfig;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_ascend::{AscendDevice, AttentionRuns, attention_runs, reset_attention_runs};
use burn_ascend::{fallbacks, reset_fallbacks};
use burn_attention::{Attention, AttentionMask, MaskRules, Window, rms_norm};
use vlm_models::rope_core::position_ids::Prompt;
use vlm_models::{Implementation, Inputs, VlmConfig};

/// Two devices that compute the same in f32, on values of order 1.
const SAME: f32 = 2e-5;

/// Two devices that round to 16 bits, relative to the largest value.
const ALIKE: [(DType, f32); 2] = [(DType::BF16, 1.0 / 128.0), (DType::F16, 1.0 / 1024.0)];

/// Numbers between -1 and 1 that are the same in every run.
fn values<const D: usize>(seed: usize, shape: [usize; D]) -> TensorData {
    let value = |index: usize| ((index * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0;
    let count: usize = shape.iter().product();
    TensorData::new((0..count).map(value).collect::<Vec<f32>>(), shape)
}

/// The output of an attention, and the gradients of q, k, v and the bias.
fn attended(
    attention: &Attention,
    biased: bool,
    (device, dtype): (&Device, DType),
) -> Result<Vec<f32>, burn_attention::AttentionError> {
    let input = |seed, heads, tokens| {
        let x = Tensor::<4>::from_data(values(seed, [2, heads, tokens, 8]), device);
        x.cast(dtype).require_grad()
    };
    let (q, k, v) = (input(1, 4, 11), input(2, 2, 11), input(3, 2, 11));
    let bias = Tensor::<4>::from_data(values(4, [1, 4, 1, 11]), device).require_grad();
    let attention = attention.clone().with_bias(biased.then(|| bias.clone()));
    let out = attention.try_forward(q.clone(), k.clone(), v.clone())?;
    let dy = Tensor::<4>::from_data(values(5, [2, 4, 11, 8]), device).cast(dtype);
    let gradients = (out.clone() * dy).sum().backward();
    let mut found = vec![out.inner()];
    found.extend([q, k, v, bias].iter().filter_map(|x| x.grad(&gradients)));
    assert_eq!(found.len(), if biased { 5 } else { 4 });
    Ok(found.into_iter().flat_map(floats).collect())
}

fn floats<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().iter::<f32>().collect()
}

fn assert_same(found: &[f32], expected: &[f32], bound: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs();
        assert!(
            error < bound,
            "{what}: [{index}] is {found}, expected {expected}"
        );
    }
}

#[test]
fn attention_runs_on_the_npu_forward_and_backward() {
    let (_held, [npu, _]) = npus();
    let (_host, device) = host(npu);
    let (npu, cpu) = (device.autodiff(), Device::flex().autodiff());
    let mut attended_to = [true; 22];
    attended_to[..3].fill(false);
    let all = MaskRules::default();
    let causal = MaskRules {
        causal: true,
        ..all
    };
    // Of the same shape.
    let mut attended_elsewhere = [true; 22];
    attended_elsewhere[17..].fill(false);
    let window = Some(Window {
        before: 3,
        after: 1,
    });
    let last_four = Some(Window {
        before: 3,
        after: 0,
    });
    let cu_seqlens: Option<&[usize]> = Some(&[0, 4, 8, 11]);
    // With the options that the operators' limits do not touch: all but a bias.
    let cases = [
        ("all keys", all, false),
        ("causal", causal, false),
        ("causal, a bias", causal, true),
        (
            "causal, padding: three rows of it see no key",
            MaskRules {
                attended: Some(&attended_to),
                ..causal
            },
            false,
        ),
        (
            "causal, padding elsewhere",
            MaskRules {
                attended: Some(&attended_elsewhere),
                ..causal
            },
            false,
        ),
        ("a window", MaskRules { window, ..all }, false),
        (
            "the last four keys",
            MaskRules {
                window: last_four,
                ..all
            },
            false,
        ),
        (
            "windows of one length and another",
            MaskRules { cu_seqlens, ..all },
            false,
        ),
        (
            "packed, causal",
            MaskRules {
                cu_seqlens,
                ..causal
            },
            false,
        ),
        (
            "packed, a window",
            MaskRules {
                cu_seqlens,
                window,
                ..all
            },
            false,
        ),
    ];
    reset_fallbacks();
    for (name, rules, biased) in cases {
        let mask = AttentionMask::new(&rules, 2, 11, 11).expect(name);
        let attention = Attention::new(mask).with_scale(0.9);
        let expected = attended(&attention, biased, (&cpu, DType::F32)).expect(name);
        for scores in [None, Some(1)] {
            reset_attention_runs();
            let attention = attention.clone().with_blocks(scores);
            let found = attended(&attention, biased, (&npu, DType::F32)).expect(name);
            assert_same(&found, &expected, SAME, name);
            // Forward and backward.
            let [fused, blocks] = match (scores, biased) {
                (None, false) => [2, 0],
                _ => [0, 2],
            };
            assert_eq!(attention_runs(), AttentionRuns { fused, blocks }, "{name}");
        }
    }
    assert!(fallbacks().is_empty(), "{:?}", fallbacks());
}

/// As the kernels of the CPU, which round to 16 bits where the operators do.
#[test]
fn sixteen_bits_attend_on_the_npu() {
    let (_held, [npu, _]) = npus();
    let (_host, device) = host(npu);
    let (npu, cpu) = (device.autodiff(), Device::flex().autodiff());
    let causal = MaskRules {
        causal: true,
        ..MaskRules::default()
    };
    let packed = MaskRules {
        cu_seqlens: Some(&[0, 4, 8, 11]),
        ..causal
    };
    reset_fallbacks();
    for rules in [causal, packed] {
        let attention = Attention::new(AttentionMask::new(&rules, 2, 11, 11).expect("valid"));
        for (dtype, bound) in ALIKE {
            let expected = attended(&attention, false, (&cpu, dtype)).expect("it fits");
            reset_attention_runs();
            let found = attended(&attention, false, (&npu, dtype)).expect("it fits");
            let largest = expected.iter().fold(1.0, |max: f32, x| max.max(x.abs()));
            assert_same(&found, &expected, largest * bound, &format!("{dtype:?}"));
            let runs = AttentionRuns {
                fused: 2,
                blocks: 0,
            };
            assert_eq!(attention_runs(), runs, "{dtype:?}");
        }
    }
    assert!(fallbacks().is_empty(), "{:?}", fallbacks());
}

/// The output of a norm, and the gradients of x and the weight.
fn normalised(device: &Device, dtype: DType, tokens: usize) -> Vec<f32> {
    let x = Tensor::<3>::from_data(values(7, [2, tokens, 16]), device);
    let x = x.cast(dtype).require_grad();
    let weight = Tensor::<1>::from_data(values(8, [16]), device);
    let weight = weight.cast(dtype).require_grad();
    let dy = Tensor::<3>::from_data(values(9, [2, tokens, 16]), device).cast(dtype);
    // A view with other strides than x in memory, as slices of a product are.
    let read = x.clone().swap_dims(0, 1);
    let y = rms_norm(read, weight.clone(), 1e-3).expect("it fits");
    let gradients = (y.clone() * dy.swap_dims(0, 1)).sum().backward();
    let dx = x.grad(&gradients).expect("tracked");
    let dweight = weight.grad(&gradients).expect("tracked");
    [floats(y.inner()), floats(dx), floats(dweight)].concat()
}

#[test]
fn norms_run_on_the_npu_forward_and_backward() {
    let (_held, [npu, _]) = npus();
    let (_host, device) = host(npu);
    let (npu, cpu) = (device.autodiff(), Device::flex().autodiff());
    reset_fallbacks();
    let all = [(DType::F32, SAME)].into_iter().chain(ALIKE);
    for (dtype, bound) in all {
        let expected = normalised(&cpu, dtype, 3);
        let bound = bound * expected.iter().fold(1.0, |max: f32, x| max.max(x.abs()));
        control::clear_operator_runs();
        assert_same(
            &normalised(&npu, dtype, 3),
            &expected,
            bound,
            "by operators",
        );
        let runs = control::operator_runs();
        let norm_runs = ["aclnnRmsNorm", "aclnnRmsNormGrad"].map(|name| runs.get(name).copied());
        assert_eq!(norm_runs, [Some(1); 2], "{dtype:?}");
    }
    // Operators that the installation refuses are composed from ordinary operations. The sizes are
    // new, since plans are kept for the earlier ones.
    for (tokens, refused) in [(4, "aclnnRmsNorm"), (5, "aclnnRmsNormGrad")] {
        let expected = normalised(&cpu, DType::F32, tokens);
        control::inject_fault(&format!("{refused}GetWorkspaceSize"), 1, 561_002);
        control::clear_operator_runs();
        let found = normalised(&npu, DType::F32, tokens);
        assert_same(&found, &expected, 4.0 * SAME, refused);
        assert!(!control::operator_runs().contains_key(refused), "{refused}");
    }
    assert!(fallbacks().is_empty(), "{:?}", fallbacks());
}

/// A training step of each family with a picture: the losses of two steps are those on the CPU.
#[test]
fn the_models_train_on_the_npu() {
    let (_held, [npu, _]) = npus();
    let (_host, device) = host(npu);
    let models = rope_check::fixtures().expect("the test runs in the workspace");
    for name in [
        "qwen2_vl_tiny",
        "qwen2_5_vl_tiny",
        "qwen3_vl_tiny",
        "glm4v_tiny",
        "qwen3_5_tiny",
    ] {
        let folder = models.join("models").join(name);
        let config = VlmConfig::from_folder(&folder).expect(name);
        let losses = |device: &Device| -> Vec<f32> {
            let mut model = config.load(&folder, device).expect(name);
            let vision = config.vision.as_ref().expect("a tower");
            let side = vision.patch[2] * vision.spatial_merge;
            let picture = Tensor::from_data(values(6, [1, 3, 2 * side, 3 * side]), device);
            let (patches, grid) = vision.patches(picture).expect(name);
            let image = [vision.image_token; 2 * 3];
            let input_ids = [&image[..], &[11, 12, 13, 21, 22]].concat();
            let labels = [&[-100; 6 + 3][..], &[21, 22]].concat();
            let inputs = Inputs {
                prompt: Prompt {
                    input_ids: &input_ids,
                    image_grids: &[grid],
                    ..Prompt::default()
                },
                image_patches: Some(patches),
                video_patches: None,
                shown: None,
            };
            let batch = model.batch(&inputs).expect(name);
            let mut optimizer = AdamWConfig::new().with_epsilon(1e-8).init();
            (0..2)
                .map(|_| {
                    let step = model
                        .clone()
                        .train_step(&mut optimizer, 3e-3, &batch, &labels);
                    let loss;
                    (model, loss) = step.expect(name);
                    loss
                })
                .collect()
        };
        let expected = losses(&Device::flex().autodiff());
        reset_fallbacks();
        reset_attention_runs();
        control::clear_operator_runs();
        let found = losses(&device.clone().autodiff());
        assert!(fallbacks().is_empty(), "{name}: {:?}", fallbacks());
        // Each layer of both towers, forward and backward, twice.
        let attending = config.text.delta.as_ref();
        let attending = attending.map_or(config.text.layers, |x| x.full_attention_layers.len());
        let depth = config.vision.as_ref().expect("a tower").depth;
        let fused = 2 * 2 * (attending + depth) as u64;
        assert_eq!(
            attention_runs(),
            AttentionRuns { fused, blocks: 0 },
            "{name}"
        );
        // The norms before attention and feed-forward network, and the last one; Qwen2.5-VL's
        // tower has them too, and in front of its merger. GLM-4.1V has norms after both, and one
        // more before its tower's blocks; Qwen3.5 has one more in each layer with a state.
        let (layer_norms, tower_norms) = match name {
            "qwen2_5_vl_tiny" => (2, 2 * depth + 1),
            "glm4v_tiny" => (4, 2 * depth + 2),
            _ => (2, 0),
        };
        let decoder_norms = layer_norms * config.text.layers + config.text.layers - attending + 1;
        let norms = 2 * (decoder_norms + tower_norms) as u64;
        let runs = control::operator_runs();
        for operator in ["aclnnRmsNorm", "aclnnRmsNormGrad"] {
            assert_eq!(runs.get(operator), Some(&norms), "{name}: {operator}");
        }
        for (found, expected) in found.iter().zip(&expected) {
            assert!(
                (found - expected).abs() < 1e-3,
                "{name}: {found}, expected {expected}"
            );
        }
        assert!(found[1] < found[0], "{name}: {found:?}");
    }
}

/// The most bytes on the device in a training step of a decoder of four layers, at 1,024 tokens.
fn peak_of_a_step(npu: AscendDevice, device: &Device, implementation: Implementation) -> usize {
    let config = serde_json::json!({
        "model_type": "qwen3_vl",
        "image_token_id": 1, "video_token_id": 2, "vision_start_token_id": 3,
        "tie_word_embeddings": true,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "vocab_size": 32, "hidden_size": 128, "intermediate_size": 128,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 64, "max_position_embeddings": 4096, "rope_theta": 5e6,
            "rope_scaling": {
                "rope_type": "default", "mrope_interleaved": true, "mrope_section": [12, 10, 10],
            },
        },
        // Never run: the prompt has no pictures.
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
            "in_channels": 3, "patch_size": 2, "temporal_patch_size": 2, "spatial_merge_size": 2,
            "out_hidden_size": 128, "num_position_embeddings": 4, "deepstack_visual_indexes": [],
        },
    });
    let config = VlmConfig::from_hf_config(&config.to_string()).expect("valid");
    let config = config.with_implementation(implementation);
    let model = config.init(device).expect("builds");
    let ids: Vec<i64> = (0..1024).map(|token| 4 + token % 28).collect();
    let prompt = Prompt {
        input_ids: &ids,
        ..Prompt::default()
    };
    let inputs = Inputs {
        prompt,
        ..Inputs::default()
    };
    let batch = model.batch(&inputs).expect("fits");
    // Weights are drawn when they are first used.
    model.loss(&batch, &ids).expect("runs").into_scalar::<f32>();
    device.sync().expect("ran");
    npu.reset_peak_memory().expect("the device answers");
    let before = npu.memory().expect("the device answers").live_bytes;
    let gradients = model.loss(&batch, &ids).expect("runs").backward();
    device.sync().expect("ran");
    drop(gradients);
    npu.memory().expect("the device answers").peak_bytes - before
}

#[test]
fn what_the_fused_rotation_saves_is_seen_in_the_peak_of_a_whole_model() {
    let (_held, [npu, _]) = npus();
    let (_host, device) = host(npu);
    let device = device.autodiff();
    reset_attention_runs();
    let peaks = [Implementation::Fused, Implementation::Composed]
        .map(|implementation| peak_of_a_step(npu, &device, implementation));
    assert_eq!(attention_runs().blocks, 0);
    let [fused, composed] = peaks;
    eprintln!("peak of a step: {fused} bytes fused, {composed} composed");
    // q and k of the four layers, of 6 heads of 64 channels in f32.
    let rotated = 4 * 1024 * 6 * 64 * 4;
    assert!(fused + rotated <= composed, "{fused}, {composed} composed");
}
