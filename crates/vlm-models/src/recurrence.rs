//! The sequences that the states of a step's layers follow.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_attention::{GatedDelta, Sequences};

use crate::tensors::indices;

/// The sequence structure of a step's tokens, for layers with a state.
#[derive(Clone, Debug)]
pub(crate) struct Recurrence {
    pub(crate) sequences: Sequences,
    pub(crate) rule: GatedDelta,
    /// `[rows, tokens, 1]`: 1 for tokens and 0 for padding, if there is padding.
    attended: Option<Tensor<3>>,
    /// For each row the indices of the last inputs of a convolution among the flat tokens; one past
    /// them stands for zeros.
    window: Tensor<1, Int>,
}

impl Recurrence {
    /// Creates the structure of rows of `tokens` tokens, or of one row of packed sequences, for a
    /// convolution of `taps`.
    pub(crate) fn new(
        sequences: Sequences,
        attended: &[bool],
        taps: usize,
        device: &Device,
    ) -> Self {
        let tokens = sequences.tokens();
        let rows = attended.len() / tokens.max(1);
        let zeros = attended.len();
        let mut window = Vec::with_capacity(rows * (taps - 1));
        for (row, flags) in attended.chunks(tokens.max(1)).enumerate() {
            let end = flags
                .iter()
                .rposition(|flag| *flag)
                .map_or(0, |last| last + 1);
            let back = (1..taps).rev();
            window.extend(back.map(|back| match end.checked_sub(back) {
                Some(token) => row * tokens + token,
                None => zeros,
            }));
        }
        let mask = attended.contains(&false).then(|| {
            let mask: Vec<f32> = attended
                .iter()
                .map(|flag| f32::from(u8::from(*flag)))
                .collect();
            let data = TensorData::new(mask, [rows, tokens, 1]);
            Tensor::from_data(data, (device, DType::F32))
        });
        Self {
            rule: GatedDelta::new(sequences.clone()),
            sequences,
            attended: mask,
            window: indices(window, device),
        }
    }

    /// The structure for a rank that has some of the tokens, by their indices.
    pub(crate) fn of_part(self, own: &[usize]) -> Self {
        let attended = self.attended.map(|attended| {
            let [rows, tokens, _] = attended.dims();
            let own = indices(own.to_vec(), &attended.device());
            let attended = attended.reshape([rows * tokens]).select(0, own);
            let [own] = attended.dims();
            attended.reshape([rows, own / rows.max(1), 1])
        });
        Self { attended, ..self }
    }

    /// Sets padding to zero.
    pub(crate) fn masked(&self, x: Tensor<3>) -> Tensor<3> {
        match &self.attended {
            Some(attended) => {
                let attended = attended.clone().cast(x.dtype());
                x * attended
            }
            None => x,
        }
    }

    /// The last inputs of the convolution in each row, `[rows, 1, taps - 1, channels]`.
    pub(crate) fn last(&self, x: &Tensor<3>) -> Tensor<4> {
        let [rows, tokens, channels] = x.dims();
        let zeros = Tensor::zeros([1, channels], (&x.device(), x.dtype()));
        let flat = x.clone().reshape([rows * tokens, channels]);
        let [inputs] = self.window.dims();
        Tensor::cat(vec![flat, zeros], 0)
            .select(0, self.window.clone())
            .reshape([rows, 1, inputs / rows.max(1), channels])
    }
}
