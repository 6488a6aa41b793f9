//! Cases of the norm with the rotation, for every device.
#![allow(clippy::disallowed_methods, reason = "test code")]

use burn::tensor::{DType, Device, Tensor, TensorData};
use rope_burn::rope_core::{
    AxisLayout, HeadNorm, Layout, NormOrder, Pairing, Positions, RotarySpec,
};
use rope_burn::{Implementation, RotaryConfig};

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
        let angles = rotary.angles_for(self.dtype, &self.positions, &device);
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
        let [q_shape, k_shape] = self.heads.map(shape);
        let leaves = [tensor(1, q_shape), tensor(2, k_shape)].map(Tensor::require_grad);
        let weights = [weight(3), weight(4)];
        let [q, k] = leaves.clone();
        let (q, k) = rotary.forward_norm(q, k, weights.clone(), self.norm, &angles);
        let (dq, dk) = (tensor(5, q_shape), tensor(6, k_shape));
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

/// The values that a model of transformers computed; see `tests/fixtures/generate/head_norm.py`.
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

/// Models of transformers, fused and composed, in types with the errors that are allowed.
pub(crate) fn results_are_those_of_transformers(device: &Device, types: &[(DType, f64)]) {
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
            .axis_layout(axes)
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

/// Against ordinary operations in f64 on the CPU: each type in every `step`-th case, each case in
/// some type if there are as many types.
pub(crate) fn fused_agrees_with_ordinary_operations(
    device: &Device,
    types: &[(DType, f64)],
    step: usize,
) {
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
                        .axis_layout(axes)
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
                    for &(dtype, allowed) in types.iter().skip(cases % step).step_by(step) {
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
