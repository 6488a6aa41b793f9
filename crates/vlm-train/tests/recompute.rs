//! Running layers again in the backward pass: the same bits, less memory.

use std::collections::HashMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, Tensor, TensorData};
use vlm_data::SampleRows;
use vlm_models::rope_core::position_ids::{Prompt, Rows};
use vlm_models::{
    Backward, Block, Inputs, LoraConfig, ModelPart, TrainedWeights, Visit, Vlm, VlmConfig, Walk,
    Weights,
};

use crate::common::{self, ALL, FAMILIES, WITH_EXPERTS, load, packed, samples};
use crate::{ALLOCATOR, ALONE};

type Gradients = HashMap<ParamId, TensorData>;

fn gradients(model: &Vlm, config: &VlmConfig, recompute: bool) -> (f64, Gradients) {
    let mut found = HashMap::new();
    let loss = walked(model, config, recompute, &mut |id, gradient: Tensor<1>| {
        let twice = found.insert(id, gradient.into_data());
        assert!(twice.is_none(), "a gradient came in two parts");
    });
    (loss, found)
}

fn walked(model: &Vlm, config: &VlmConfig, recompute: bool, walk: &mut dyn Walk) -> f64 {
    let micro = packed(samples(0, config));
    let SampleRows::Packed { cu_seqlens } = &micro.rows else {
        panic!("{:?}", micro.rows);
    };
    let device = model.device();
    let elements = config.vision.as_ref().expect("a tower").patch_elems();
    let shape = [micro.image_patches.len() / elements, elements];
    let patches = TensorData::new(micro.image_patches.clone(), shape);
    let inputs = Inputs {
        prompt: Prompt {
            input_ids: &micro.input_ids,
            rows: Rows::Packed(cu_seqlens),
            image_grids: &micro.image_grids,
            ..Prompt::default()
        },
        image_patches: Some(Tensor::from_data(patches, &device)),
        video_patches: None,
        shown: None,
    };
    let seeds: Vec<u64> = (0..cu_seqlens.len() as u64 - 1).collect();
    let how = Backward {
        recompute,
        weight: 0.3,
        seeds: Some(&seeds),
        ..Backward::default()
    };
    let batch = model.batch(&inputs).unwrap();
    model.backward(&batch, &micro.labels, how, walk).unwrap()
}

/// Gives a model of stand-ins the trained weights of a block when a pass enters it.
#[derive(Default)]
struct Lender {
    blocks: HashMap<ParamId, Block>,
    values: Weights,
    visits: Vec<Visit>,
    found: Gradients,
}

impl Lender {
    fn of(model: &Vlm) -> Self {
        let parameters = model.parameters().into_iter();
        let mut lender = Self {
            blocks: parameters.map(|p| (p.id, p.block)).collect(),
            ..Self::default()
        };
        model.visit(&mut lender);
        lender
    }
}

impl ModuleVisitor for Lender {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.blocks.contains_key(&param.id) {
            self.values
                .insert(param.id, param.val().inner().flatten(0, D - 1));
        }
    }
}

impl Walk for Lender {
    fn add(&mut self, id: ParamId, gradient: Tensor<1>) {
        let complete = Visit::Complete(self.blocks[&id]);
        assert!(
            !self.visits.contains(&complete),
            "{complete:?} before it was"
        );
        self.found.insert(id, gradient.into_data());
    }

    fn complete(&mut self, block: Block) -> vlm_models::Result<()> {
        self.visits.push(Visit::Complete(block));
        Ok(())
    }

    fn provides(&self) -> bool {
        true
    }

    fn enter(&mut self, block: Block) -> vlm_models::Result<Weights> {
        self.visits.push(Visit::Enter(block));
        let own = self.values.iter();
        let own = own.filter(|(id, _)| self.blocks[id] == block);
        Ok(own.map(|(id, value)| (*id, value.clone())).collect())
    }
}

/// A pass that forgets a block computes with stand-ins, which are no numbers.
#[test]
fn a_model_that_borrows_its_weights_block_by_block_has_the_same_gradients() {
    let _alone = ALONE.lock();
    for family in ["qwen2_5_vl_tiny", "qwen3_vl_tiny"] {
        for (name, config, model) in variants(family) {
            let (loss, expected) = gradients(&model, &config, true);
            let mut lender = Lender::of(&model);
            let empty = model
                .clone()
                .with_stand_ins(|id| lender.blocks.contains_key(&id));
            let found = walked(&empty, &config, true, &mut lender);
            assert_eq!(loss.to_bits(), found.to_bits(), "{name}");
            assert!(expected == lender.found, "{name}");
            assert_eq!(lender.visits, empty.visits(true), "{name}");
        }
    }
}

/// Models with all of their parts trained, some, or adapters with dropout.
fn variants(family: &str) -> Vec<(String, VlmConfig, Vlm)> {
    let parts: [&[ModelPart]; 4] = [
        &ALL,
        &[ModelPart::Decoder],
        &[ModelPart::Merger],
        &[ModelPart::Tower, ModelPart::Decoder],
    ];
    let mut variants: Vec<_> = parts
        .into_iter()
        .map(|parts| {
            let (config, model) = load(family);
            (
                format!("{family} {parts:?}"),
                config,
                model.train_weights(&parts.to_vec().into()).unwrap(),
            )
        })
        .collect();
    let embeddings = TrainedWeights::EMBEDDINGS.map(str::to_owned).to_vec();
    let layer = TrainedWeights::decoder_layers([1]);
    for modules in [
        embeddings.clone(),
        layer.clone(),
        [embeddings.clone(), layer].concat(),
    ] {
        let (config, model) = load(family);
        let name = format!("{family} {modules:?}");
        let parts = Vec::new();
        let weights = TrainedWeights { parts, modules };
        variants.push((name, config, model.train_weights(&weights).unwrap()));
    }
    let none = TrainedWeights::default();
    let beside = |parts: &[ModelPart], modules| TrainedWeights {
        parts: parts.to_vec(),
        modules,
    };
    let [tower, merger, decoder] = ALL;
    for (parts, layers, whole) in [
        (vec![decoder], vec![], none.clone()),
        (ALL.to_vec(), vec![], none.clone()),
        (vec![decoder], vec![1], none),
        (vec![decoder], vec![0], beside(&[tower, merger], embeddings)),
        (vec![decoder], vec![1], beside(&[merger], Vec::new())),
        (vec![tower], vec![], beside(&[decoder], Vec::new())),
    ] {
        let (config, model) = load(family);
        let lora = LoraConfig {
            dropout: 0.3,
            parts,
            layers,
            whole,
            ..LoraConfig::default()
        };
        let name = format!("{family} {lora:?}");
        variants.push((name, config, model.with_lora(&lora, 1).unwrap()));
    }
    variants
}

#[test]
fn gradients_are_the_same_to_the_bit() {
    let _alone = ALONE.lock();
    for family in FAMILIES.into_iter().chain(WITH_EXPERTS) {
        for (name, config, model) in variants(family) {
            let (loss, whole) = gradients(&model, &config, false);
            let (again, layered) = gradients(&model, &config, true);
            assert_eq!(loss.to_bits(), again.to_bits(), "{name}");
            let trained = model.parameters();
            assert!(!trained.is_empty());
            for parameter in trained {
                let (whole, layered) = (&whole[&parameter.id], &layered[&parameter.id]);
                assert_eq!(whole, layered, "{name}: {}", parameter.name);
            }
            assert_eq!(whole.len(), layered.len(), "{name}");
        }
    }
}

#[test]
fn the_peak_of_a_deep_model_is_that_of_one_layer() {
    let _alone = ALONE.lock();
    let folder = common::fixtures().join("models/qwen2_vl_tiny");
    let mut config = VlmConfig::from_folder(folder).unwrap();
    config.text.layers = 12;
    let model = config.init(&Device::flex().autodiff()).unwrap();
    let model = model.with_lora(&LoraConfig::default(), 0).unwrap();
    let input_ids: Vec<i64> = (0..128).map(|token| 1 + token % 250).collect();
    let inputs = Inputs {
        prompt: Prompt {
            input_ids: &input_ids,
            ..Prompt::default()
        },
        image_patches: None,
        video_patches: None,
        shown: None,
    };
    let peak = |recompute| {
        let batch = model.batch(&inputs).unwrap();
        let how = Backward {
            recompute,
            ..Backward::default()
        };
        let run = || model.backward(&batch, &input_ids, how, &mut |_, gradient| drop(gradient));
        run().unwrap();
        let (loss, usage) = ALLOCATOR.measure(1, run);
        loss.unwrap();
        usage.peak_bytes
    };
    let (kept, again) = (peak(false), peak(true));
    println!("12 layers, 128 tokens: {kept} bytes kept, {again} bytes with recompute");
    assert!(again * 2 < kept, "{again} of {kept}");
}
