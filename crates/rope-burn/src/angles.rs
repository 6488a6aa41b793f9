//! cos and sin as tensors.

use burn::tensor::{DType, Device, Element, Tensor, TensorData};
use rope_core::{Real, TokenAngles};

use crate::backends;

/// cos and sin for the tokens of a step, made once and shared by all layers.
///
/// `[tokens, lanes]` each, in f32 (f64 to rotate f64 tensors), attention scaling included. Lanes are the pairs, or for
/// a per-channel axis layout all first members, then all second members. Cloning shares the tensors.
///
/// From [`Rotary::angles`](crate::Rotary::angles), in f64 from [`Rotary::try_angles_for`](crate::Rotary::try_angles_for), or from tensors of one's own: where those require gradients, the
/// backward makes them, and keeps q and k for it.
#[derive(Clone, Debug)]
pub struct RotaryAngles {
    /// Cosines.
    pub cos: Tensor<2>,
    /// Sines.
    pub sin: Tensor<2>,
}

impl RotaryAngles {
    /// cos and sin of `lanes` columns on a device.
    pub(crate) fn upload<A: Real + Element>(
        angles: &TokenAngles<A>,
        lanes: usize,
        device: &Device,
    ) -> Self {
        let tensor = |values: Vec<A>, columns| {
            let data = TensorData::new(values, [angles.tokens(), columns]);
            // Whatever the device's default type: 16-bit angles would lose the position.
            Tensor::<2>::from_data(data, (device, A::dtype()))
        };
        let (cos, sin) = (angles.cos(), angles.sin());
        if !backends::wants_angles_together(device) || cos.is_empty() {
            let [cos, sin] = [cos, sin].map(|values| tensor(values.to_vec(), lanes));
            return Self { cos, sin };
        }
        let rows = cos.chunks(lanes).zip(sin.chunks(lanes));
        let rows = rows.flat_map(|(cos, sin)| [cos, sin].concat());
        let rows = tensor(rows.collect(), 2 * lanes);
        Self {
            cos: rows.clone().narrow(1, 0, lanes),
            sin: rows.narrow(1, lanes, lanes),
        }
    }

    /// The number of tokens served.
    pub fn tokens(&self) -> usize {
        self.cos.dims()[0]
    }

    /// The type that cos and sin are kept in.
    pub fn dtype(&self) -> DType {
        self.cos.dtype()
    }
}
