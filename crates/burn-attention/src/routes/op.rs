//! The operations as backends implement them.

use burn::backend::{Backend, backend_extension, tensor::FloatTensor};

use super::Routes;

/// Rows of tokens and the sums of their outputs, as a backend with kernels implements them.
///
/// # Shapes
/// Those of [`routed_rows`](crate::routed_rows) and [`routed_sum`](crate::routed_sum), without a
/// dimension of 0.
#[backend_extension(Flex: cfg(feature = "flex"), Autodiff)]
pub trait RoutesOps: Backend {
    /// Computes the rows of tokens.
    fn routed_rows_forward(x: FloatTensor<Self>, routes: Routes) -> FloatTensor<Self>;

    /// Computes the gradient of the tokens from that of the rows.
    fn routed_rows_backward(gradient: FloatTensor<Self>, routes: Routes) -> FloatTensor<Self>;

    /// Computes the sums.
    fn routed_sum_forward(
        rows: FloatTensor<Self>,
        shares: FloatTensor<Self>,
        routes: Routes,
    ) -> FloatTensor<Self>;

    /// Computes the gradients of rows and shares from that of the sums.
    fn routed_sum_backward(
        rows: FloatTensor<Self>,
        shares: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        routes: Routes,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}
