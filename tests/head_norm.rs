//! The norm fused with the rotation, through burn: against ordinary operations and their backwards,
//! and what the graph keeps.
//!
//! One test: the allocator counts the whole process, other tests' threads included.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor, TensorData};
use rope_burn::rope_core::{
    AxisLayout, HeadNorm, Layout, NormOrder, Pairing, Positions, RopeError, RotarySpec,
};
use rope_burn::{
    Implementation, NormRotaryConfig, NormRotaryOp, Rotary, RotaryConfig, RotaryError,
};
use rope_check::alloc::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// y of q and k, then the gradients of q, of k and of their weights.
type Results = [Vec<f64>; 6];

struct Case {
    rotary: RotaryConfig,
    norm: HeadNorm,
    dtype: DType,
    batch: usize,
    /// Of q and of k.
    heads: [usize; 2],
    positions: Positions,
}

impl Case {
    fn run(&self, implementation: Implementation, device: &Device) -> Results {
        let device = device.clone().autodiff();
        let rotary = self
            .rotary
            .clone()
            .with_implementation(implementation)
            .init();
        let (head_dim, tokens) = (rotary.spec().head_dim(), self.positions.tokens());
        let angles = rotary
            .try_angles_for(self.dtype, &self.positions, &device)
            .expect("valid");
        let shape = |heads| match rotary.layout() {
            Layout::Bnsd => [self.batch, heads, tokens, head_dim],
            Layout::Sbnd => [tokens, self.batch, heads, head_dim],
            _ => [self.batch, tokens, heads, head_dim],
        };
        let tensor = |seed: usize, shape: [usize; 4]| {
            let count: usize = shape.iter().product();
            let value = |i: usize| ((i * 37 + seed * 11) % 101) as f64 / 50.0 - 1.0;
            let data = TensorData::new((0..count).map(value).collect::<Vec<f64>>(), shape);
            Tensor::<4>::from_data(data, (&device, self.dtype))
        };
        let weight = |seed| {
            let row = tensor(seed, [1, 1, 1, head_dim]);
            row.reshape([head_dim]).require_grad()
        };
        let [of_q, of_k] = self.heads.map(shape);
        let leaves = [tensor(1, of_q), tensor(2, of_k)].map(Tensor::require_grad);
        let weights = [weight(3), weight(4)];
        let [q, k] = leaves.clone();
        let (q, k) = rotary
            .try_forward_norm(q, k, weights.clone(), self.norm, &angles)
            .expect("shapes and types agree");
        let (dq, dk) = (tensor(5, of_q), tensor(6, of_k));
        let loss = (q.clone() * dq).sum() + (k.clone() * dk).sum();
        let gradients = loss.backward();
        let values = |x: TensorData| x.iter::<f64>().collect::<Vec<f64>>();
        let [gq, gk] = leaves.map(|x| x.grad(&gradients).expect("tracked").into_data());
        let [wq, wk] = weights.map(|x| x.grad(&gradients).expect("tracked").into_data());
        [q.into_data(), k.into_data(), gq, gk, wq, wk].map(values)
    }
}

fn assert_close(found: &Results, exact: &Results, allowed: f64, what: &str) {
    for (part, (found, exact)) in found.iter().zip(exact).enumerate() {
        assert_eq!(found.len(), exact.len(), "{part} {what}");
        for (i, (found, exact)) in found.iter().zip(exact).enumerate() {
            let error = (found - exact).abs();
            assert!(
                error <= allowed,
                "{part} {i}: {found} instead of {exact}, {what}"
            );
        }
    }
}

/// What a model of transformers computed; see `tests/fixtures/generate/head_norm.py`.
#[derive(serde::Deserialize)]
struct Model {
    model_type: String,
    head_dim: usize,
    eps: f64,
    unit_offset: bool,
    after_rotation: bool,
    rope_parameters: RopeParameters,
    position_ids: Vec<Vec<i64>>,
    q_out: Vec<f64>,
    k_out: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dq_weight: Vec<f64>,
    dk_weight: Vec<f64>,
}

#[derive(serde::Deserialize)]
struct RopeParameters {
    rope_theta: f64,
    #[serde(default)]
    mrope_section: Vec<usize>,
    partial_rotary_factor: Option<f64>,
}

fn results_are_those_of_transformers(device: &Device, types: &[(DType, f64)]) {
    let path = rope_check::fixtures()
        .expect("the fixtures")
        .join("head_norm_5.23.0.json");
    let text = std::fs::read_to_string(path).expect("a fixture");
    let models: Vec<Model> = serde_json::from_str(&text).expect("as the script writes it");
    assert_eq!(models.len(), 5);
    for model in models {
        let parameters = &model.rope_parameters;
        let share = parameters.partial_rotary_factor.unwrap_or(1.0);
        let axes = match parameters.mrope_section.as_slice() {
            [] => AxisLayout::Single,
            sections => AxisLayout::Striped(sections.to_vec()),
        };
        let spec = RotarySpec::builder(model.head_dim)
            .rotary_dim((model.head_dim as f64 * share) as usize)
            .axes(axes)
            .theta(parameters.rope_theta)
            .build()
            .expect("valid");
        let order = if model.after_rotation {
            NormOrder::AfterRotation
        } else {
            NormOrder::BeforeRotation
        };
        let norm = HeadNorm::new(model.eps).expect("valid");
        let ids = model.position_ids.concat();
        let case = |dtype| Case {
            rotary: RotaryConfig::new(spec.clone()).with_layout(Layout::Bnsd),
            norm: norm.with_unit_offset(model.unit_offset).with_order(order),
            dtype,
            batch: 1,
            heads: [2, 1],
            positions: Positions::new(model.position_ids.len(), &ids).expect("in range"),
        };
        let exact = [
            model.q_out,
            model.k_out,
            model.dq,
            model.dk,
            model.dq_weight,
            model.dk_weight,
        ];
        for &(dtype, allowed) in types {
            for implementation in [Implementation::Fused, Implementation::Composed] {
                let found = case(dtype).run(implementation, device);
                let what = format!("{} {dtype:?} {implementation:?}", model.model_type);
                assert_close(&found, &exact, allowed, &what);
            }
        }
    }
}

fn fused_agrees_with_ordinary_operations(device: &Device, types: &[(DType, f64)]) {
    let mut cases = 0;
    for pairing in Pairing::ALL {
        for order in [NormOrder::BeforeRotation, NormOrder::AfterRotation] {
            for layout in [Layout::Bsnd, Layout::Bnsd, Layout::Sbnd] {
                for per_channel in [false, true] {
                    let axes = if per_channel {
                        AxisLayout::PerChannel(vec![2, 6])
                    } else {
                        AxisLayout::Single
                    };
                    let spec = RotarySpec::builder(24)
                        .rotary_dim(16)
                        .rotary_offset(4)
                        .pairing(pairing)
                        .axes(axes)
                        .build()
                        .expect("valid");
                    let norm = HeadNorm::new(1e-3).expect("valid");
                    let case = |dtype| Case {
                        rotary: RotaryConfig::new(spec.clone()).with_layout(layout),
                        norm: norm.with_order(order).with_unit_offset(per_channel),
                        dtype,
                        batch: 2,
                        heads: [3, 2],
                        positions: Positions::text(1 + usize::from(per_channel), 3, 5)
                            .expect("in range"),
                    };
                    let exact = case(DType::F64).run(Implementation::Composed, &Device::flex());
                    for &(dtype, allowed) in types {
                        let fused = case(dtype).run(Implementation::Fused, device);
                        let what = format!("{dtype:?} {pairing:?} {order:?} {layout:?}");
                        assert_close(&fused, &exact, allowed, &what);
                    }
                    cases += 1;
                }
            }
        }
    }
    assert_eq!(cases, 48);
}

/// Without a leaf, q and k are what a projection made: after the call the graph alone holds them.
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
                rotary
                    .try_forward_norm(q, k, weights, norm, &angles)
                    .expect("shapes and types agree")
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
        let mut angles = rotary.angles(&positions, &device);
        angles.rows = angles.rows.require_grad();
        let values = (0..3 * 2 * 16)
            .map(|i| (i % 7) as f32 - 2.0)
            .collect::<Vec<_>>();
        let x = Tensor::<4>::from_data(TensorData::new(values, [1, 3, 2, 16]), &device);
        let weight = || Tensor::<1>::ones([16], &device);
        let (q, _) = rotary
            .try_forward_norm(x.clone(), x.clone(), [weight(), weight()], norm, &angles)
            .expect("shapes and types agree");
        let gradients = (q * x).sum().backward();
        let found = angles.rows.grad(&gradients).expect("tracked").into_data();
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
    let config = NormRotaryConfig::new(RotaryConfig::new(spec), 0.0);
    let module = config.try_init(&device).expect("valid");
    let mut names = Names::default();
    module.visit(&mut names);
    assert_eq!(names.1, ["q_norm.weight", "k_norm.weight"]);
    // With eps 0, a constant head becomes ones; and zeros as weights are ones less 1.
    let positions = Positions::text(1, 0, 1).expect("in range");
    let offset = config.clone().with_unit_offset(true).try_init(&device);
    for module in [module, offset.expect("valid")] {
        let angles = module.rotary().angles(&positions, &device);
        let x = Tensor::<4>::full([1, 1, 2, 16], 3.0, &device);
        let (q, _) = module.forward(x.clone(), x, &angles);
        assert_eq!(q.into_data().iter::<f32>().collect::<Vec<_>>(), [1.0; 32]);
    }
    let refused = NormRotaryConfig::new(config.rotary.clone(), -1.0).try_init(&device);
    let expected = RotaryError::Rope(RopeError::NormEps { found: -1.0 });
    assert_eq!(refused.err(), Some(expected));
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
    };
    let weight = Tensor::<1>::ones([16], &device).cast(FloatDType::BF16);
    let refused = op.check_weight(
        "the weight",
        &weight.into_dispatch(),
        &x.clone().into_dispatch(),
    );
    let expected = RotaryError::NormWeightDType {
        what: "the weight",
        found: DType::BF16,
        expected: DType::F32,
    };
    assert_eq!(refused.err(), Some(expected));
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
            let y = rotary.try_forward_norm(x.clone(), k, weights, norm, &angles);
            let (y, _) = y.expect("shapes and types agree");
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
    let device = burn_ascend::device_simulated(0).expect("the simulator starts");
    burn_ascend::reset_fallbacks();
    ascend_sim::control::clear_launches();
    results_are_those_of_transformers(&device, &[(DType::F32, 5e-6)]);
    fused_agrees_with_ordinary_operations(&device, &[(DType::F32, 2e-5), (DType::BF16, 0.5)]);
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
    // Of q and of k, in each of 5 models and of 48 cases in two types.
    let backward = count("rope_norm_grad_");
    assert_eq!(
        [count("rope_norm_") - backward, backward],
        [2 * (5 + 2 * 48); 2]
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
    );
    the_graph_keeps_q_and_k_alone();
    the_module_has_the_parameters_of_the_models();
    wrong_weights_are_named();
    learned_angles_get_their_gradient();
    extreme_rows_agree_with_ordinary_operations();
    on_the_simulated_npu();
}
