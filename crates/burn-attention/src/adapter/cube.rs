//! CubeCL's runtimes: products with results in f32, whose 16-bit factors stay as they are, and one
//! launch for the adapter's term.

#![allow(
    unsafe_code,
    reason = "kernels trust the sizes that they are launched with"
)]

use burn::backend::TensorMetadata;
use burn::backend::ops::{FloatTensorOps, ModuleOps};
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
        add(y, None, h, b, types)
    }

    fn adapter_add_biased(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        h: FloatTensor<Self>,
        b: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let elements = x.meta.shape()[0] * weight.meta.shape()[1];
        match types(&x.client, x.dtype).filter(|_| elements > 0) {
            Some(types) => add(Self::float_matmul(x, weight), Some(bias), h, b, types),
            None => composed::add::<Self>(Self::linear(x, weight, Some(bias)), h, b),
        }
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

/// y + bias + h^T b with h summed over its parts, in the memory of y if nothing else holds it; and
/// that sum in the type of y.
fn add(
    y: CubeTensor,
    bias: Option<CubeTensor>,
    h: CubeTensor,
    b: CubeTensor,
    types: [ElemType; 2],
) -> (CubeTensor, CubeTensor) {
    let [y, h, b] = [y, h, b].map(into_contiguous);
    let bias = bias.map(into_contiguous);
    let ([rows, columns], [rank, _]) = (y.shape().dims(), b.shape().dims());
    let parts = h.meta.shape()[0] / rank;
    let inner = composed::whole_inner::<CubeBackend>(h.clone(), rank);
    let inner = cast::<CubeBackend>(inner, y.dtype.into());
    let is_free = y.can_mut();
    let out = if is_free {
        y.clone()
    } else {
        empty_beside(&y, y.shape(), y.dtype)
    };
    let mut tensors = vec![&y, &b, &out];
    tensors.extend(&bias);
    let n = vector_size(&tensors, columns);
    tensors.push(&h);
    let address = address_type(&tensors);
    let written = if is_free {
        BufferArg::alias(0, rows * columns)
    } else {
        out.clone().into_buffer_arg()
    };
    let client = y.client.clone();
    let (count, dim) = cubes(&client, columns / n * rows.div_ceil(ROWS));
    let [y, h, b] = [y, h, b].map(CubeTensor::into_buffer_arg);
    let size = LayerSizeLaunch::new(rows, columns / n, rank, parts);
    // SAFETY: all tensors are contiguous: y and the output have `rows` rows of `columns` channels, b
    // `rank` of them and the bias one, all in vectors of `n`, and h has `parts * rank` rows of `rows`
    // numbers. The memory of y is written only if nothing else holds it, each vector by the unit that
    // has read it.
    unsafe {
        match bias {
            Some(bias) => add_low_rank_and_bias::launch_unchecked(
                &client,
                count,
                dim,
                address,
                n,
                y,
                h,
                b,
                bias.into_buffer_arg(),
                written,
                size,
                types,
            ),
            None => add_low_rank::launch_unchecked(
                &client, count, dim, address, n, y, h, b, written, size, types,
            ),
        }
    }
    (out, inner)
}

/// The size of a layer's output and of its adapter.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct LayerSize {
    rows: usize,
    /// Of the channels of a row.
    vectors: usize,
    rank: usize,
    parts: usize,
}

/// The adapter's term for a vector of channels of [`ROWS`] rows, in the order of the ranks.
#[cube]
fn low_rank<A: Float, N: Size>(
    h: &[A],
    b: &[Vector<A, N>],
    sums: &mut Array<Vector<A, N>>,
    first: usize,
    column: usize,
    size: LayerSize,
) {
    #[unroll]
    for i in 0..ROWS {
        sums[i] = Vector::zeroed();
    }
    for k in 0..size.rank {
        let factor = b[k * size.vectors + column];
        #[unroll]
        for i in 0..ROWS {
            let row = min(first + i, size.rows - 1);
            let mut inner = h[k * size.rows + row];
            for part in 1..size.parts {
                inner += h[(part * size.rank + k) * size.rows + row];
            }
            sums[i] += factor * Vector::new(inner);
        }
    }
}

/// A unit adds to a vector of channels of [`ROWS`] rows.
#[cube(launch_unchecked, address_type = "dynamic")]
fn add_low_rank<E: Numeric, A: Float, N: Size>(
    y: &[Vector<E, N>],
    h: &[A],
    b: &[Vector<A, N>],
    out: &mut [Vector<E, N>],
    size: LayerSize,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let column = ABSOLUTE_POS % size.vectors;
    let first = ABSOLUTE_POS / size.vectors * ROWS;
    if first >= size.rows {
        terminate!();
    }
    let mut sums = Array::<Vector<A, N>>::new(ROWS);
    low_rank::<A, N>(h, b, &mut sums, first, column, size);
    #[unroll]
    for i in 0..ROWS {
        if first + i < size.rows {
            let at = (first + i) * size.vectors + column;
            out[at] = Vector::cast_from(Vector::<A, N>::cast_from(y[at]) + sums[i]);
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn add_low_rank_and_bias<E: Numeric, A: Float, N: Size>(
    y: &[Vector<E, N>],
    h: &[A],
    b: &[Vector<A, N>],
    bias: &[Vector<E, N>],
    out: &mut [Vector<E, N>],
    size: LayerSize,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let column = ABSOLUTE_POS % size.vectors;
    let first = ABSOLUTE_POS / size.vectors * ROWS;
    if first >= size.rows {
        terminate!();
    }
    let mut sums = Array::<Vector<A, N>>::new(ROWS);
    low_rank::<A, N>(h, b, &mut sums, first, column, size);
    let bias = Vector::<A, N>::cast_from(bias[column]);
    #[unroll]
    for i in 0..ROWS {
        if first + i < size.rows {
            let at = (first + i) * size.vectors + column;
            out[at] = Vector::cast_from(Vector::<A, N>::cast_from(y[at]) + bias + sums[i]);
        }
    }
}
