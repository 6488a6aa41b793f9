//! The norm fused with the rotation, through burn: against ordinary operations and their backwards,
//! and the tensors that the graph keeps.
//!
//! One test: the allocator counts the whole process, other tests' threads included.

mod norm_cases;

use burn::config::Config;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor, TensorData};
use norm_cases::{fused_agrees_with_ordinary_operations, results_are_those_of_transformers};
use rope_burn::rope_core::{HeadNorm, Layout, Positions, RopeError, RotarySpec};
use rope_burn::{Implementation, NormRotaryConfig, NormRotaryOp, OpError, Rotary, RotaryConfig};
use rope_check::alloc::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// Without a leaf, q and k come from a projection: after the call only the graph holds them.
fn the_graph_keeps_q_and_k_alone() {
    let (seq, heads, head_dim, layers) = (256, 8, 64, 8);
    let q_bytes = isize::try_from(seq * heads * head_dim * 4).expect("small");
    let spec = RotarySpec::builder(head_dim).build().expect("valid");
    let device = Device::flex().autodiff();
    let norm = HeadNorm::new(1e-6).expect("valid");
    let kept = |implementation| {
        let rotary = Rotary::new(spec.clone(), Layout::Bsnd).with_implementation(implementation);
        let positions = Positions::text(1, 0, seq).expect("in range");
        let angles = rotary.angles(&positions, &device);
        let weight = |_| Tensor::<1>::ones([head_dim], &device).require_grad();
        let weights: Vec<_> = (0..layers).map(|_| [0, 1].map(weight)).collect();
        let random = || {
            let shape = [1, seq, heads, head_dim];
            Tensor::<4>::random(shape, Distribution::Default, &device).require_grad() * 2.0
        };
        let (q, k) = (random(), random());
        let (outputs, usage) = ALLOCATOR.measure(q_bytes.unsigned_abs(), || {
            weights.into_iter().fold((q, k), |(q, k), weights| {
                rotary.forward_norm(q, k, weights, norm, &angles)
            })
        });
        drop(outputs);
        usage.retained_data_bytes / layers
    };
    kept(Implementation::Fused);
    let (fused, composed) = (kept(Implementation::Fused), kept(Implementation::Composed));
    // A layer's outputs are the next one's q and k.
    assert_eq!(fused, 2 * q_bytes);
    assert!(composed >= 2 * fused, "{composed} composed, {fused} fused");
}

/// Angles that want a gradient get one: the norm is composed then, around the fused rotation.
fn learned_angles_get_their_gradient() {
    let spec = RotarySpec::builder(16).build().expect("valid");
    let device = Device::flex().autodiff();
    let positions = Positions::text(1, 2, 3).expect("in range");
    let norm = HeadNorm::new(1e-3).expect("valid");
    let gradient = |implementation| {
        let rotary = Rotary::new(spec.clone(), Layout::Bsnd).with_implementation(implementation);
        let angles = rotary.angles(&positions, &device).require_grad();
        let values = (0..3 * 2 * 16)
            .map(|i| (i % 7) as f32 - 2.0)
            .collect::<Vec<_>>();
        let x = Tensor::<4>::from_data(TensorData::new(values, [1, 3, 2, 16]), &device);
        let weight = || Tensor::<1>::ones([16], &device);
        let weights = [weight(), weight()];
        let (q, _) = rotary.forward_norm(x.clone(), x.clone(), weights, norm, &angles);
        let gradients = (q * x).sum().backward();
        let found = angles.rows().grad(&gradients).expect("tracked").into_data();
        found.iter::<f64>().collect::<Vec<f64>>()
    };
    let (fused, composed) = (
        gradient(Implementation::Fused),
        gradient(Implementation::Composed),
    );
    assert!(fused.iter().any(|value| value.abs() > 1.0));
    for (fused, composed) in fused.iter().zip(&composed) {
        assert!((fused - composed).abs() < 1e-4, "{fused} {composed}");
    }
}

#[derive(Default)]
struct Names(Vec<String>, Vec<String>);

impl ModuleVisitor for Names {
    fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
        self.1.push(self.0.join("."));
    }
    fn enter_module(&mut self, name: &str, _: &str) {
        self.0.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.0.pop();
    }
}

fn the_module_has_the_parameters_of_the_models() {
    let spec = RotarySpec::builder(16).build().expect("valid");
    let device = Device::flex();
    let norm = HeadNorm::new(0.0).expect("valid");
    let config = NormRotaryConfig::new(RotaryConfig::new(spec), norm);
    let module = config.init(&device);
    let mut names = Names::default();
    module.visit(&mut names);
    assert_eq!(names.1, ["q_norm.weight", "k_norm.weight"]);
    // With eps 0, a constant head becomes ones; and zeros as weights are ones less 1.
    let positions = Positions::text(1, 0, 1).expect("in range");
    let offset = NormRotaryConfig::new(config.rotary.clone(), norm.with_unit_offset(true));
    for module in [module, offset.init(&device)] {
        let angles = module.rotary().angles(&positions, &device);
        let x = Tensor::<4>::full([1, 1, 2, 16], 3.0, &device);
        let (q, _) = module.forward(x.clone(), x, &angles);
        assert_eq!(q.into_data().iter::<f32>().collect::<Vec<_>>(), [1.0; 32]);
    }
    // A norm read from a file is checked as the constructor checks it.
    let saved = offset.to_string();
    let read = NormRotaryConfig::load_binary(saved.as_bytes()).expect("as it was saved");
    assert_eq!(read.norm, offset.norm);
    let negative = saved.replace("\"eps\": 0.0", "\"eps\": -1.0");
    let refused = NormRotaryConfig::load_binary(negative.as_bytes()).map(drop);
    let expected = RopeError::NormEps { found: -1.0 }.to_string();
    let refused = refused.expect_err("negative").to_string();
    assert!(refused.contains(&expected), "{refused}");
}

fn wrong_weights_are_named() {
    let spec = RotarySpec::builder(16).build().expect("valid");
    let (rotary, device) = (Rotary::new(spec, Layout::Bsnd), Device::flex());
    let positions = Positions::text(1, 0, 1).expect("in range");
    let angles = rotary.angles(&positions, &device);
    let x = Tensor::<4>::ones([1, 1, 2, 16], &device);
    let weights = [16, 8].map(|channels| Tensor::<1>::ones([channels], &device));
    let norm = HeadNorm::new(1e-6).expect("valid");
    let refused = rotary.try_forward_norm(x.clone(), x.clone(), weights, norm, &angles);
    let expected = RopeError::NormWeight {
        what: "the weight of k's norm",
        found: 8,
        expected: 16,
    };
    assert_eq!(refused.err(), Some(expected.into()));
    let op = NormRotaryOp {
        geometry: rotary.spec().geometry(),
        layout: Layout::Bsnd,
        norm,
        skips_weight: false,
    };
    let weight = Tensor::<1>::ones([16], &device).cast(FloatDType::BF16);
    let refused = op.check_weight(
        "the weight",
        &weight.into_dispatch(),
        &x.clone().into_dispatch(),
    );
    let expected = OpError::MixedDTypes {
        what: "the weight",
        found: DType::BF16,
        expected: DType::F32,
    };
    assert_eq!(refused.err(), Some(expected.into()));
    // A weight in the model's type is widened: no error.
    let weight = || Tensor::<1>::ones([16], &device).cast(FloatDType::BF16);
    let found = rotary.try_forward_norm(x.clone(), x, [weight(), weight()], norm, &angles);
    assert!(found.is_ok());
}

/// Zeros, infinities, NaN and numbers whose squares are zero or infinite: as ordinary operations
/// compute them, forward and backward.
fn extreme_rows_agree_with_ordinary_operations() {
    let spec = RotarySpec::builder(16)
        .rotary_dim(8)
        .build()
        .expect("valid");
    let device = Device::flex().autodiff();
    let positions = Positions::text(1, 3, 1).expect("in range");
    let norm = HeadNorm::new(1e-6).expect("valid");
    // A head each; 1e-40 is zero in f16, 1e30 infinite.
    let special = [1.0, 0.0, f32::INFINITY, f32::NAN, 1e-7, 1e-40, 1e30];
    let value = |i: usize| match (i / 16, i % 16) {
        (1 | 4..=6, channel) => special[i / 16] * (1.0 + channel as f32 / 16.0),
        (head, 5) => special[head],
        (_, channel) => channel as f32 / 8.0 - 1.0,
    };
    let shape = [1, 1, special.len(), 16];
    let values: Vec<f32> = (0..special.len() * 16).map(value).collect();
    let given = Tensor::<4>::from_data(TensorData::new(values, shape), &device);
    for dtype in [FloatDType::F32, FloatDType::BF16, FloatDType::F16] {
        let run = |implementation| {
            let rotary = Rotary::new(spec.clone(), Layout::Bsnd);
            let rotary = rotary.with_implementation(implementation);
            let angles = rotary.angles(&positions, &device);
            let x = given.clone().cast(dtype).detach().require_grad();
            let weights = [(); 2].map(|()| Tensor::<1>::ones([16], &device) * 1.5);
            let k = x.clone().detach();
            let (y, _) = rotary.forward_norm(x.clone(), k, weights, norm, &angles);
            let gradients = (y.clone() * 0.75).sum().backward();
            let dx = x.grad(&gradients).expect("tracked");
            [y.into_data(), dx.into_data()].map(|data| data.iter::<f32>().collect::<Vec<f32>>())
        };
        let (fused, composed) = (run(Implementation::Fused), run(Implementation::Composed));
        for (found, expected) in fused.concat().iter().zip(composed.concat()) {
            let both_nan = found.is_nan() && expected.is_nan();
            let close = (found - expected).abs() <= 0.01 * expected.abs() + 1e-3;
            let same = *found == expected || both_nan || close;
            assert!(same, "{dtype:?}: {found} instead of {expected}");
        }
        let nan = fused[0].iter().filter(|y| y.is_nan()).count();
        assert!(nan >= 16 + 2, "{dtype:?}: {nan}");
    }
}

/// Through the server of a simulated NPU: by its kernels, with nothing on its host.
fn on_the_simulated_npu() {
    let device = burn_ascend::AscendDevice::simulated(0)
        .device()
        .expect("the simulator starts");
    burn_ascend::reset_fallbacks();
    ascend_sim::control::clear_launches();
    results_are_those_of_transformers(&device, &[(DType::F32, 5e-6)]);
    fused_agrees_with_ordinary_operations(&device, &[(DType::F32, 2e-5), (DType::BF16, 0.5)], 1);
    assert_eq!(burn_ascend::fallbacks(), []);
    let launches = ascend_sim::control::launches();
    let count = |start: &str| {
        let of = |name: &&str| name.starts_with(start);
        launches
            .iter()
            .map(|l| l.kernel.as_str())
            .filter(of)
            .count()
    };
    // In each of 5 models and of 48 cases in two types, once forward for q and k; their gradients
    // arrive one after the other.
    let backward = count("rope_norm_grad_");
    let cases = 5 + 2 * 48;
    assert_eq!(
        [count("rope_norm_") - backward, backward],
        [cases, 2 * cases]
    );
    assert_eq!(ascend_sim::control::violations(), []);
}

#[test]
fn head_norm() {
    let flex = Device::flex();
    results_are_those_of_transformers(&flex, &[(DType::F64, 2e-9), (DType::F32, 5e-6)]);
    fused_agrees_with_ordinary_operations(
        &flex,
        &[(DType::F64, 1e-12), (DType::F32, 2e-5), (DType::BF16, 0.5)],
        1,
    );
    the_graph_keeps_q_and_k_alone();
    the_module_has_the_parameters_of_the_models();
    wrong_weights_are_named();
    learned_angles_get_their_gradient();
    extreme_rows_agree_with_ordinary_operations();
    on_the_simulated_npu();
}
