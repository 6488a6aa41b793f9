//! Activations on a simulated NPU and on a GPU: with gradients they have the bits that they have
//! without, so that a trainer computes what a generator did.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_ascend::{AscendDevice, AscendHost};
use rope_core::position_ids::{Prompt, Rows};
use vlm_models::{Backward, Inputs, Trace, Vlm, VlmConfig};

/// Rounds all weights.
struct Round(DType);

impl ModuleMapper for Round {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let value = param.val().inner().cast(self.0);
        Param::initialized(param.id, Tensor::from_inner(value).require_grad())
    }
}

/// The activations of a picture between words, by name.
fn activations(model: &Vlm, config: &VlmConfig) -> Trace {
    let vision = config.vision.as_ref().expect("a tower");
    let image = vision.image_token;
    let input_ids = [1, 2, 292, image, image, 293, 4, 5];
    let rows = 8 * vision.patch_elems();
    let value = |index: usize| ((index * 7919) % 2003) as f32 / 1001.0 - 1.0;
    let patches = TensorData::new(
        (0..rows).map(value).collect::<Vec<f32>>(),
        [8, vision.patch_elems()],
    );
    let inputs = Inputs {
        prompt: Prompt {
            input_ids: &input_ids,
            rows: Rows::Batch(1),
            image_grids: &[[1, 2, 4]],
            ..Prompt::default()
        },
        image_patches: Some(Tensor::from_data(patches, &Device::flex())),
        ..Inputs::default()
    };
    let mut trace = Trace::recording();
    let batch = model.batch(&inputs).expect("a batch");
    if model.device().is_autodiff() {
        let how = Backward::default();
        let passed = model.backward_traced(&batch, &input_ids, how, &mut trace, &mut |_, _| ());
        passed.expect("a pass");
    } else {
        model.forward_traced(&batch, &mut trace).expect("a pass");
    }
    trace
}

/// Compares the models in these types, with gradients and without.
fn expect_same(device: &Device, dtypes: &[DType]) {
    let folder = rope_check::fixtures().expect("the test runs in the workspace");
    let mut wrong = Vec::new();
    for family in [
        "qwen2_vl_tiny",
        "qwen2_5_vl_tiny",
        "qwen3_vl_tiny",
        "glm4v_tiny",
        "qwen3_5_tiny",
    ] {
        let folder = folder.join("models").join(family);
        let config = VlmConfig::from_folder(&folder).expect("the configuration reads");
        for dtype in dtypes {
            let model = config.load(&folder, &device.clone().autodiff());
            let model = model.expect("the weights load").map(&mut Round(*dtype));
            let trained = activations(&model, &config);
            let alone = activations(&model.valid(), &config);
            for name in alone.names() {
                let of = |trace: &Trace| trace.get(name).expect("it reads").cloned();
                let (trained, alone) = (of(&trained), of(&alone));
                let Some((trained, alone)) = trained.zip(alone) else {
                    continue;
                };
                if trained.as_bytes() != alone.as_bytes() {
                    wrong.push(format!("{family}, {dtype:?}: {name}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn activations_on_an_npu_have_the_same_bits_with_gradients() {
    let npu = AscendDevice::simulated(0);
    let host = AscendHost::start(&[npu]).expect("the simulated device opens");
    expect_same(&host.devices()[0], &[DType::F32, DType::BF16]);
}

#[cfg(feature = "wgpu")]
#[test]
fn activations_on_a_gpu_have_the_same_bits_with_gradients() {
    let device = Device::wgpu(burn::tensor::DeviceKind::DefaultDevice);
    expect_same(&device, &[DType::F32]);
}
