//! Stand-in for rope-burn until it lands: the same calls, composed from ordinary operations, pairing by halves only.

use burn::prelude::*;
use rope_core::RotarySpec;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    Bsnd,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Implementation {
    Fused,
    Composed,
}
pub(crate) struct Positions {
    axes: usize,
    ids: Vec<i64>,
}
impl Positions {
    pub(crate) fn new(axes: usize, ids: Vec<i64>) -> rope_core::Result<Self> {
        Ok(Self { axes, ids })
    }
}
#[derive(Clone, Debug)]
pub(crate) struct Rotary {
    spec: RotarySpec,
}
#[derive(Clone, Debug)]
pub(crate) struct RotaryAngles {
    cos: Tensor<4>,
    sin: Tensor<4>,
}
impl Rotary {
    pub(crate) fn new(spec: RotarySpec, _: Layout) -> Self {
        Self { spec }
    }
    pub(crate) fn with_implementation(self, _: Implementation) -> Self {
        self
    }
    pub(crate) fn angles(&self, positions: &Positions, device: &Device) -> RotaryAngles {
        let tokens = positions.ids.len() / positions.axes;
        let inv = self.spec.inv_freq(None).expect("frequencies");
        let lanes = self.spec.lane_map().lanes();
        let mut cos = Vec::new();
        let mut sin = Vec::new();
        for t in 0..tokens {
            for l in lanes {
                let a = positions.ids[l.axis as usize * tokens + t] as f64 * inv[l.frequency as usize];
                cos.push(a.cos() as f32);
                sin.push(a.sin() as f32);
            }
        }
        let make = |v: Vec<f32>| {
            Tensor::<1>::from_data(TensorData::new(v, [tokens * lanes.len()]), device)
                .reshape([1, tokens, 1, lanes.len()])
        };
        RotaryAngles { cos: make(cos), sin: make(sin) }
    }
    pub(crate) fn forward(&self, q: Tensor<4>, k: Tensor<4>, angles: &RotaryAngles) -> (Tensor<4>, Tensor<4>) {
        let one = |x: Tensor<4>| {
            let d = x.dims()[3];
            let a = x.clone().narrow(3, 0, d / 2);
            let b = x.narrow(3, d / 2, d / 2);
            let (c, s) = (angles.cos.clone(), angles.sin.clone());
            Tensor::cat(
                vec![
                    a.clone() * c.clone() - b.clone() * s.clone(),
                    a * s + b * c,
                ],
                3,
            )
        };
        (one(q), one(k))
    }
}
