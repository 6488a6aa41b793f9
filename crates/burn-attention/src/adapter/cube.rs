//! CubeCL's runtimes: products with results in f32, whose 16-bit factors stay as they are, and one
//! launch for the adapter's term.

#![allow(
    unsafe_code,
    reason = "kernels trust the sizes that they are launched with"
)]

use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl;
use burn_cubecl::cubecl::ir::ElemType;
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul};
use burn_cubecl::tensor::CubeTensor;
use burn_fused::accumulator;
use burn_fused::cube::{address_type, cubes, empty_beside, types, vector_size};
use burn_fused::primitive::cast;

use super::composed;
use super::op::AdapterOps;

/// Rows that a unit adds to: it reads b once for them.
const ROWS: usize = 4;

impl AdapterOps for CubeBackend {
    fn adapter_inner(factor: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        match wide_product(&factor, &Self::float_transpose(x.clone())) {
            Some(inner) => inner,
            None => composed::inner::<Self>(factor, x),
        }
    }

    fn adapter_add(
        y: FloatTensor<Self>,
        h: FloatTensor<Self>,
        b: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let Some(types) = types(&y.client, y.dtype).filter(|_| y.meta.num_elements() > 0) else {
            return composed::add::<Self>(y, h, b);
        };
        let dtype = y.dtype.into();
        let y = add(y, h.clone(), b.clone(), types);
        let h = composed::whole_inner::<Self>(h, b.meta.shape()[0]);
        (y, cast::<Self>(h, dtype))
    }

    fn adapter_gradient(h: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        match wide_product(&h, &x) {
            Some(gradient) => gradient,
            None => composed::gradient::<Self>(h, x),
        }
    }
}

/// The product in the type that it is computed in, if there is a kernel for it.
fn wide_product(left: &CubeTensor, right: &CubeTensor) -> Option<CubeTensor> {
    let wide = accumulator(left.dtype).ok()?;
    types(&left.client, left.dtype)?;
    let strategy = MatmulStrategy::default();
    matmul(left.clone(), right.clone(), None, strategy, wide.into()).ok()
}

/// y + h^T b with h summed over its parts, in the memory of y if nothing else holds it.
fn add(y: CubeTensor, h: CubeTensor, b: CubeTensor, types: [ElemType; 2]) -> CubeTensor {
    let [y, h, b] = [y, h, b].map(into_contiguous);
    let ([rows, columns], [rank, _]) = (y.shape().dims(), b.shape().dims());
    let parts = h.meta.shape()[0] / rank;
    let is_free = y.can_mut();
    let out = if is_free {
        y.clone()
    } else {
        empty_beside(&y, y.shape(), y.dtype)
    };
    let tensors = [&y, &b, &out];
    let n = vector_size(&tensors, columns);
    let address = address_type(&[&y, &b, &out, &h]);
    let written = if is_free {
        BufferArg::alias(0, rows * columns)
    } else {
        out.clone().into_buffer_arg()
    };
    let client = y.client.clone();
    let (count, dim) = cubes(&client, columns / n * rows.div_ceil(ROWS));
    // SAFETY: all tensors are contiguous: y and the output have `rows` rows of `columns` channels, b
    // `rank` of them, all in vectors of `n`, and h has `parts * rank` rows of `rows` numbers. The
    // memory of y is written only if nothing else holds it, each vector by the unit that has read it.
    unsafe {
        add_low_rank::launch_unchecked(
            &client,
            count,
            dim,
            address,
            n,
            y.into_buffer_arg(),
            h.into_buffer_arg(),
            b.into_buffer_arg(),
            written,
            rows,
            columns / n,
            rank,
            parts,
            types,
        );
    }
    out
}

/// A unit adds to a vector of channels of [`ROWS`] rows, in the order of the ranks.
#[cube(launch_unchecked, address_type = "dynamic")]
fn add_low_rank<E: Numeric, A: Float, N: Size>(
    y: &[Vector<E, N>],
    h: &[A],
    b: &[Vector<A, N>],
    out: &mut [Vector<E, N>],
    rows: usize,
    vectors: usize,
    rank: usize,
    parts: usize,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let column = ABSOLUTE_POS % vectors;
    let first = ABSOLUTE_POS / vectors * ROWS;
    if first >= rows {
        terminate!();
    }
    let mut sums = Array::<Vector<A, N>>::new(ROWS);
    #[unroll]
    for i in 0..ROWS {
        sums[i] = Vector::zeroed();
    }
    for k in 0..rank {
        let factor = b[k * vectors + column];
        #[unroll]
        for i in 0..ROWS {
            let row = min(first + i, rows - 1);
            let mut inner = h[k * rows + row];
            for part in 1..parts {
                inner += h[(part * rank + k) * rows + row];
            }
            sums[i] += factor * Vector::new(inner);
        }
    }
    #[unroll]
    for i in 0..ROWS {
        if first + i < rows {
            let at = (first + i) * vectors + column;
            out[at] = Vector::cast_from(Vector::<A, N>::cast_from(y[at]) + sums[i]);
        }
    }
}
