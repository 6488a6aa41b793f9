//! The operations of a layer on any device, beside a copy and a product on the same device.

use std::error::Error;

use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_attention::{Attention, AttentionMask, MaskRules, rms_norm, swiglu};
use rope_burn::{Rotary, RotaryAngles};
use rope_core::{AxisLayout, HeadNorm, Layout, Pairing, Positions, RotarySpec};
use serde::Serialize;

use crate::sample::{Contest, Plan, Timing, interleaved};

/// Sizes of the layer: those of Qwen3-VL-8B, or fewer tokens and heads on a slower device.
#[derive(Clone, Copy, Debug)]
pub struct LayerSizes {
    /// Tokens of the batch.
    pub tokens: usize,
    /// Query heads of 128 channels; a quarter as many key heads.
    pub heads: usize,
}

/// The time of an operation.
#[derive(Clone, Debug, Serialize)]
pub struct LayerTime {
    /// The operation.
    pub name: &'static str,
    /// Its time.
    pub timing: Timing,
    /// Its time in units of its baseline, and the baseline.
    pub times: f64,
    /// The name of the baseline.
    pub baseline: &'static str,
}

const HEAD_DIM: usize = 128;

/// The tensors of the operations.
struct Layer {
    rotary: Rotary,
    angles: RotaryAngles,
    norm: HeadNorm,
    attention: Attention,
    q: Tensor<4>,
    k: Tensor<4>,
    weights: [Tensor<1>; 2],
    /// `[tokens, channels]` and `[channels, channels]`.
    x: Tensor<2>,
    weight: Tensor<2>,
}

type Result<T> = std::result::Result<T, Box<dyn Error>>;

impl Layer {
    fn new(sizes: LayerSizes, device: &Device, dtype: DType) -> Result<Self> {
        let LayerSizes { tokens, heads } = sizes;
        let axes = AxisLayout::Striped(vec![24, 20, 20]);
        let spec = RotarySpec::builder(HEAD_DIM)
            .pairing(Pairing::Half)
            .axis_layout(axes)
            .build()?;
        let rotary = Rotary::new(spec, Layout::Bsnd);
        let ids: Vec<i64> = (0..3 * tokens as i64)
            .map(|at| at % tokens as i64)
            .collect();
        let rules = MaskRules {
            causal: true,
            ..MaskRules::default()
        };
        let random = |heads: usize| {
            let shape = [1, tokens, heads, HEAD_DIM];
            Tensor::<4>::random(shape, Distribution::Uniform(-1.0, 1.0), (device, dtype))
        };
        let flat = |rows: usize| {
            let shape = [rows, heads * HEAD_DIM];
            Tensor::<2>::random(shape, Distribution::Uniform(-1.0, 1.0), (device, dtype))
        };
        let keys = (heads / 4).max(1);
        Ok(Self {
            angles: rotary.try_angles(&Positions::new(3, &ids)?, device)?,
            rotary,
            norm: HeadNorm::new(1e-6)?,
            attention: Attention::new(AttentionMask::new(&rules, 1, tokens, tokens)?),
            q: random(heads),
            k: random(keys),
            weights: [(); 2].map(|()| Tensor::ones([HEAD_DIM], (device, dtype))),
            x: flat(tokens),
            weight: flat(heads * HEAD_DIM),
        })
    }

    /// q and k with heads before tokens.
    fn by_head(&self) -> [Tensor<4>; 2] {
        [&self.q, &self.k].map(|x| x.clone().swap_dims(1, 2))
    }

    /// A decoder layer with square weights, 6 products, forward and backward with a graph.
    fn step(&self) -> Result<()> {
        let [_, tokens, heads, _] = self.q.dims();
        let keys = self.k.dims()[2];
        let input = Tensor::<2>::from_inner(self.x.clone()).require_grad();
        let weight = Tensor::<2>::from_inner(self.weight.clone()).require_grad();
        let by_heads = |x: Tensor<2>| x.reshape([1, tokens, heads, HEAD_DIM]);
        let weights = self.weights.clone().map(Tensor::<1>::from_inner);
        let scale = Tensor::<1>::from_inner(self.x.clone().narrow(0, 0, 1).reshape([-1]));
        let normed = rms_norm(input.clone(), scale, 1e-6)?;
        let [q, k] = [(); 2].map(|()| by_heads(normed.clone().matmul(weight.clone())));
        let k = k.narrow(2, 0, keys);
        let (q, rotated) =
            self.rotary
                .try_forward_norm(q, k.clone(), weights, self.norm, &self.angles)?;
        let [q, rotated, v] = [q, rotated, k].map(|x| x.swap_dims(1, 2));
        let mixed = self.attention.try_forward(q, rotated, v)?;
        let mixed = mixed.reshape([tokens, heads * HEAD_DIM]);
        let hidden = input + mixed.matmul(weight.clone());
        let [gate, up] = [(); 2].map(|()| hidden.clone().matmul(weight.clone()));
        let out = hidden + swiglu(gate, up)?.matmul(weight);
        drop(out.sum().backward());
        Ok(())
    }

    /// With a graph, as in training.
    fn attend_and_return(&self) -> Result<()> {
        let tracked = |x: &Tensor<4>| Tensor::<4>::from_inner(x.clone()).require_grad();
        let [q, k] = self.by_head().map(|x| tracked(&x));
        let out = self.attention.try_forward(q, k.clone(), k)?;
        let gradients = out.sum().backward();
        drop(gradients);
        Ok(())
    }
}

/// An operation, its baseline, and how it runs. Its result is dropped.
struct Operation {
    name: &'static str,
    /// Index of the baseline among the operations.
    baseline: usize,
    run: fn(&Layer) -> Result<()>,
}

const COPY: usize = 0;
const PRODUCT: usize = 1;

const OPERATIONS: &[Operation] = &[
    Operation {
        name: "copy of q and k",
        baseline: COPY,
        run: |layer| {
            drop((layer.q.clone() * 1.0, layer.k.clone() * 1.0));
            Ok(())
        },
    },
    Operation {
        name: "product with a square weight",
        baseline: PRODUCT,
        run: |layer| {
            drop(layer.x.clone().matmul(layer.weight.clone()));
            Ok(())
        },
    },
    Operation {
        name: "rotation of q and k",
        baseline: COPY,
        run: |layer| {
            let (q, k) = (layer.q.clone(), layer.k.clone());
            drop(layer.rotary.try_forward(q, k, &layer.angles)?);
            Ok(())
        },
    },
    Operation {
        name: "its gradient",
        baseline: COPY,
        run: |layer| {
            let (q, k) = (layer.q.clone(), layer.k.clone());
            drop(layer.rotary.try_adjoint(q, k, &layer.angles)?);
            Ok(())
        },
    },
    Operation {
        name: "norm of the heads with the rotation",
        baseline: COPY,
        run: |layer| {
            let (q, k, weights) = (layer.q.clone(), layer.k.clone(), layer.weights.clone());
            let rotary = &layer.rotary;
            drop(rotary.try_forward_norm(q, k, weights, layer.norm, &layer.angles)?);
            Ok(())
        },
    },
    Operation {
        name: "SwiGLU",
        baseline: COPY,
        run: |layer| {
            drop(swiglu(layer.x.clone(), layer.x.clone())?);
            Ok(())
        },
    },
    Operation {
        name: "causal attention",
        baseline: PRODUCT,
        run: |layer| {
            let [q, k] = layer.by_head();
            drop(layer.attention.try_forward(q, k.clone(), k)?);
            Ok(())
        },
    },
    Operation {
        name: "causal attention and its gradients",
        baseline: PRODUCT,
        run: Layer::attend_and_return,
    },
    Operation {
        name: "a layer of 6 products, forward and backward",
        baseline: PRODUCT,
        run: Layer::step,
    },
];

/// All operations in turns; a run is many launches and one wait.
struct Turns {
    layer: Layer,
    device: Device,
    failed: Option<Box<dyn Error>>,
}

impl Contest for Turns {
    fn contestants(&self) -> usize {
        OPERATIONS.len()
    }

    fn prepare(&mut self, _: usize) {}

    fn run(&mut self, contestant: usize, iterations: usize) {
        for _ in 0..iterations {
            let ran = (OPERATIONS[contestant].run)(&self.layer);
            let flushed = ran.and_then(|()| Ok(self.device.flush()?));
            self.failed = self.failed.take().or(flushed.err());
        }
        let waited = self.device.sync().map_err(Into::into);
        self.failed = self.failed.take().or(waited.err());
    }
}

/// Times the operations of a layer on a device.
///
/// # Errors
/// If the sizes do not fit, or an operation fails on the device.
pub fn time_layer(
    sizes: LayerSizes,
    device: &Device,
    dtype: DType,
    plan: &Plan,
) -> Result<Vec<LayerTime>> {
    let mut turns = Turns {
        layer: Layer::new(sizes, device, dtype)?,
        device: device.clone(),
        failed: None,
    };
    let timings = interleaved(&mut turns, plan);
    if let Some(error) = turns.failed {
        return Err(error);
    }
    let rows = OPERATIONS.iter().zip(&timings).map(|(operation, timing)| {
        let baseline = operation.baseline;
        LayerTime {
            name: operation.name,
            timing: *timing,
            times: timing.median_ns / timings[baseline].median_ns,
            baseline: OPERATIONS[baseline].name,
        }
    });
    Ok(rows.collect())
}
