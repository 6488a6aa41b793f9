//! The products composed of ordinary operations.

use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;
use burn_fused::primitive::{cast, widen};

/// Computes the same as [`AdapterOps::adapter_inner`](crate::AdapterOps::adapter_inner).
///
/// # Panics
/// If a tensor has an unsupported element type.
pub fn inner<B: Backend>(factor: FloatTensor<B>, x: FloatTensor<B>) -> FloatTensor<B> {
    let [factor, x] = [factor, x].map(widen::<B>);
    B::float_matmul(factor, B::float_transpose(x))
}

/// Computes the same as [`AdapterOps::adapter_add`](crate::AdapterOps::adapter_add).
///
/// # Panics
/// As [`inner`].
pub fn add<B: Backend>(
    y: FloatTensor<B>,
    h: FloatTensor<B>,
    b: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let dtype = y.dtype().into();
    let h = whole_inner::<B>(h, b.shape()[0]);
    let term = B::float_matmul(B::float_transpose(h.clone()), b);
    let y = B::float_add(widen::<B>(y), term);
    (cast::<B>(y, dtype), cast::<B>(h, dtype))
}

/// Computes the sum of the parts of h: `[rank, rows]`.
pub(super) fn whole_inner<B: Backend>(h: FloatTensor<B>, rank: usize) -> FloatTensor<B> {
    let [parts_rank, rows] = h.shape().dims();
    if parts_rank == rank {
        return h;
    }
    let h = B::float_reshape(h, Shape::new([parts_rank / rank, rank, rows]));
    B::float_reshape(B::float_sum_dim(h, 0), Shape::new([rank, rows]))
}

/// Computes the same as [`AdapterOps::adapter_gradient`](crate::AdapterOps::adapter_gradient).
///
/// # Panics
/// As [`inner`].
pub fn gradient<B: Backend>(h: FloatTensor<B>, x: FloatTensor<B>) -> FloatTensor<B> {
    let [h, x] = [h, x].map(widen::<B>);
    B::float_matmul(h, x)
}
