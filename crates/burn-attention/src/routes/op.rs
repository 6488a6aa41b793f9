//! The operations as backends implement them.

use burn::backend::tensor::{FloatTensor, IntTensor};

use super::composed;

operation! {
    /// Rows of tokens and the sums of their outputs, as a backend implements them.
    ///
    /// All methods have a default body of ordinary operations. The implementation for
    /// [`Autodiff`](burn::backend::Autodiff) adds the backward.
    ///
    /// # Shapes
    /// - x and sums: `[tokens, channels]`; rows: `[rows, channels]`
    /// - shares: `[tokens, per_token]`, in the type of the sums' computation
    /// - tokens: `[rows]`, the token of each row, in i32
    /// - places: `[tokens, per_token]`, the index of the row at each place of a token, in i32; each
    ///   row is at one place, and an index beyond the rows is no row
    ///
    /// No dimension is 0.
    pub trait RoutesOps {
        /// Computes the rows of tokens. Places are for the backward.
        fn routed_rows_forward(
            x: FloatTensor<Self>,
            tokens: IntTensor<Self>,
            _places: IntTensor<Self>,
        ) -> FloatTensor<Self> {
            Self::float_select(x, 0, tokens)
        }

        /// Computes the gradient of the tokens from that of the rows.
        fn routed_rows_backward(
            gradient: FloatTensor<Self>,
            places: IntTensor<Self>,
        ) -> FloatTensor<Self> {
            composed::rows_backward::<Self>(gradient, places)
        }

        /// Computes the sums.
        fn routed_sum_forward(
            rows: FloatTensor<Self>,
            shares: FloatTensor<Self>,
            places: IntTensor<Self>,
        ) -> FloatTensor<Self> {
            composed::sum_forward::<Self>(rows, shares, places)
        }

        /// Computes the gradients of rows and shares from that of the sums.
        fn routed_sum_backward(
            rows: FloatTensor<Self>,
            shares: FloatTensor<Self>,
            gradient: FloatTensor<Self>,
            places: IntTensor<Self>,
        ) -> (FloatTensor<Self>, FloatTensor<Self>) {
            composed::sum_backward::<Self>(rows, shares, gradient, places)
        }
    }
}

/// Ordinary operations.
#[cfg(feature = "cube")]
impl RoutesOps for burn::backend::Cube {}
