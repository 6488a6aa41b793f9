//! CubeCL's runtimes: a launch forward, and one backward; the weight's gradient is two more, sums of
//! parts of the rows, and their sum.

#![allow(
    unsafe_code,
    reason = "kernels trust the sizes that they are launched with"
)]

use burn::backend::tensor::FloatTensor;
use burn::tensor::Shape;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl;
use burn_cubecl::cubecl::calculate_cube_count_elemwise;
use burn_cubecl::cubecl::ir::ElemType;
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_fused::cube::{
    ENOUGH_UNITS, add, address_type, cubes, empty_beside, sum_of_vector, sum_over_cube, types,
    units_of_row, vector_size,
};
use burn_fused::least;

use super::op::RmsNormOps;
use super::{composed, rows};

/// Rows of a part of the weight's sums, at least.
const FEWEST_ROWS: usize = 16;

impl RmsNormOps for CubeBackend {
    fn rms_norm_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        match element_types(&x, &weight) {
            Some(types) => forward(x, weight, epsilon, types),
            None => composed::forward::<Self>(x, weight, epsilon),
        }
    }

    fn rms_norm_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        rstd: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let Some(types) = element_types(&x, &weight) else {
            return composed::backward::<Self>(x, weight, rstd, gradient);
        };
        let [x, weight, rstd, gradient] = [x, weight, rstd, gradient].map(into_contiguous);
        let dweight = weight_gradient(&x, &rstd, &gradient, types);
        let dx = input_gradient([x, weight, rstd, gradient], types);
        (dx, dweight)
    }

    fn rms_norm_input_gradient(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        rstd: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let Some(types) = element_types(&x, &weight) else {
            return composed::backward::<Self>(x, weight, rstd, gradient).0;
        };
        input_gradient([x, weight, rstd, gradient].map(into_contiguous), types)
    }
}

/// The types of x, of the weight and of the computation, if the device has them and x has elements.
fn element_types(x: &CubeTensor, weight: &CubeTensor) -> Option<[ElemType; 3]> {
    let ([of_x, computed], [of_weight, _]) =
        (types(&x.client, x.dtype)?, types(&x.client, weight.dtype)?);
    (x.meta.num_elements() > 0).then_some([of_x, of_weight, computed])
}

/// How cubes take the rows of tensors: one each.
struct Grid {
    client: Client,
    channels: usize,
    rows: usize,
    n: usize,
    cube: usize,
    count: CubeCount,
    dim: CubeDim,
    address: AddressType,
}

impl Grid {
    fn new(tensors: &[&CubeTensor], x: &CubeTensor) -> Self {
        let client = x.client.clone();
        let channels = x.meta.shape().last().copied().unwrap_or(1);
        let rows = x.meta.num_elements() / channels;
        let n = vector_size(tensors, channels);
        let cube = units_of_row(&client, channels / n);
        let dim = CubeDim::new_1d(cube as u32);
        Self {
            count: calculate_cube_count_elemwise(&client, rows * cube, dim),
            client,
            channels,
            rows,
            n,
            cube,
            dim,
            address: address_type(tensors),
        }
    }
}

fn forward(
    x: CubeTensor,
    weight: CubeTensor,
    epsilon: f64,
    types: [ElemType; 3],
) -> (CubeTensor, CubeTensor) {
    let (x, weight) = (into_contiguous(x), into_contiguous(weight));
    let out = empty_beside(&x, x.meta.shape().clone(), x.dtype);
    let (shape, dtype) = rows(x.meta.shape(), x.dtype);
    let rstd = empty_beside(&x, shape, dtype);
    let grid = Grid::new(&[&x, &weight, &out], &x);
    let scalar = |number: f64| InputScalar::new(number, types[2]);
    // Without an epsilon, squares below the least number have lost digits.
    let most = if epsilon == 0.0 {
        1.0 / least(dtype.into()).sqrt()
    } else {
        f64::INFINITY
    };
    // SAFETY: all tensors are contiguous; x and the output have `rows` rows of `channels` channels,
    // in vectors of `n`, the weight has one of them, and rstd a number for each row.
    unsafe {
        normalise::launch_unchecked(
            &grid.client,
            grid.count,
            grid.dim,
            grid.address,
            grid.n,
            x.into_buffer_arg(),
            weight.into_buffer_arg(),
            out.clone().into_buffer_arg(),
            rstd.clone().into_buffer_arg(),
            grid.rows,
            grid.channels / grid.n,
            NumbersLaunch::new(
                scalar(grid.channels as f64),
                scalar(epsilon),
                scalar(most),
                scalar(f64::NAN),
            ),
            grid.cube,
            types,
        );
    }
    (out, rstd)
}

/// The tensors are contiguous.
fn input_gradient(
    [x, weight, rstd, gradient]: [CubeTensor; 4],
    types: [ElemType; 3],
) -> CubeTensor {
    // A unit reads what it writes, first.
    let is_free = gradient.can_mut();
    let dx = if is_free {
        gradient.clone()
    } else {
        empty_beside(&x, x.meta.shape().clone(), x.dtype)
    };
    let grid = Grid::new(&[&x, &weight, &gradient, &dx], &x);
    let written = if is_free {
        BufferArg::alias(3, x.meta.num_elements())
    } else {
        dx.clone().into_buffer_arg()
    };
    let channels = InputScalar::new(grid.channels as f64, types[2]);
    // SAFETY: as forward; the gradient has the shape of x. Its memory is written only if nothing else
    // holds it, each vector by the unit that has read it.
    unsafe {
        gradient_of_rows::launch_unchecked(
            &grid.client,
            grid.count,
            grid.dim,
            grid.address,
            grid.n,
            x.into_buffer_arg(),
            weight.into_buffer_arg(),
            rstd.into_buffer_arg(),
            gradient.into_buffer_arg(),
            written,
            grid.rows,
            grid.channels / grid.n,
            channels,
            grid.cube,
            types,
        );
    }
    dx
}

/// The tensors are contiguous.
fn weight_gradient(
    x: &CubeTensor,
    rstd: &CubeTensor,
    gradient: &CubeTensor,
    types: [ElemType; 3],
) -> CubeTensor {
    let grid = Grid::new(&[x, gradient], x);
    let vectors = grid.channels / grid.n;
    let most = grid.rows.div_ceil(FEWEST_ROWS);
    // By the channels, not by the vectors: the sum's order is the same for all sizes of them.
    let parts = ENOUGH_UNITS.div_ceil(grid.channels).clamp(1, most);
    let part = grid.rows.div_ceil(parts);
    let parts = grid.rows.div_ceil(part);
    let sums = empty_beside(x, Shape::new([parts * grid.channels]), rstd.dtype);
    let (count, dim) = cubes(&grid.client, parts * vectors);
    // SAFETY: as `input_gradient`; `sums` has a row of channels for each part of the rows.
    unsafe {
        sums_of_columns::launch_unchecked(
            &grid.client,
            count,
            dim,
            grid.address,
            grid.n,
            x.clone().into_buffer_arg(),
            rstd.clone().into_buffer_arg(),
            gradient.clone().into_buffer_arg(),
            sums.clone().into_buffer_arg(),
            grid.rows,
            vectors,
            part,
            parts,
            [types[0], types[2]],
        );
    }
    if parts == 1 {
        return sums;
    }
    let added = empty_beside(x, Shape::new([grid.channels]), rstd.dtype);
    add(sums, &added, types[2]);
    added
}

/// The numbers of a norm.
#[derive(CubeType, CubeLaunch)]
struct Numbers {
    channels: InputScalar,
    epsilon: InputScalar,
    /// rstd beyond this has lost digits.
    most: InputScalar,
    nan: InputScalar,
}

/// A cube normalises a row.
#[cube(launch_unchecked, address_type = "dynamic")]
fn normalise<E: Numeric, W: Numeric, A: Float, N: Size>(
    x: &[Vector<E, N>],
    weight: &[Vector<W, N>],
    out: &mut [Vector<E, N>],
    rstd: &mut [A],
    rows: usize,
    vectors: usize,
    numbers: Numbers,
    #[comptime] cube: usize,
    #[define(E, W, A)] _types: [ElemType; 3],
) {
    let row = CUBE_POS;
    if row >= rows {
        terminate!();
    }
    let mut shared = Shared::<[A]>::new_slice(cube);
    let start = row * vectors;
    let mut squares = Vector::<A, N>::zeroed();
    let mut at = UNIT_POS as usize;
    while at < vectors {
        let x = Vector::<A, N>::cast_from(x[start + at]);
        squares += x * x;
        at += cube;
    }
    let sum = sum_over_cube::<A>(&mut shared, sum_of_vector::<A, N>(squares), cube);
    let mean = sum / numbers.channels.get::<A>();
    let root = A::new(1.0) / (mean + numbers.epsilon.get::<A>()).sqrt();
    // A row whose squares leave the type would silently be 0, or has lost digits.
    let is_outside = root == A::new(0.0) || root > numbers.most.get::<A>();
    let root = select(is_outside, numbers.nan.get::<A>(), root);
    if UNIT_POS == 0 {
        rstd[row] = root;
    }
    let mut at = UNIT_POS as usize;
    while at < vectors {
        let x = Vector::<A, N>::cast_from(x[start + at]) * Vector::new(root);
        out[start + at] = Vector::cast_from(x * Vector::<A, N>::cast_from(weight[at]));
        at += cube;
    }
}

/// A cube computes the gradient of a row: with n = x rstd and h = gradient weight,
/// (h - n mean(h n)) rstd.
#[cube(launch_unchecked, address_type = "dynamic")]
fn gradient_of_rows<E: Numeric, W: Numeric, A: Float, N: Size>(
    x: &[Vector<E, N>],
    weight: &[Vector<W, N>],
    rstd: &[A],
    gradient: &[Vector<E, N>],
    dx: &mut [Vector<E, N>],
    rows: usize,
    vectors: usize,
    channels: InputScalar,
    #[comptime] cube: usize,
    #[define(E, W, A)] _types: [ElemType; 3],
) {
    let row = CUBE_POS;
    if row >= rows {
        terminate!();
    }
    let mut shared = Shared::<[A]>::new_slice(cube);
    let start = row * vectors;
    let root = Vector::<A, N>::new(rstd[row]);
    let mut products = Vector::<A, N>::zeroed();
    let mut at = UNIT_POS as usize;
    while at < vectors {
        let n = Vector::<A, N>::cast_from(x[start + at]) * root;
        let gradient = Vector::<A, N>::cast_from(gradient[start + at]);
        products += gradient * n * Vector::cast_from(weight[at]);
        at += cube;
    }
    let sum = sum_over_cube::<A>(&mut shared, sum_of_vector::<A, N>(products), cube);
    let mean = Vector::<A, N>::new(sum / channels.get::<A>());
    let mut at = UNIT_POS as usize;
    while at < vectors {
        let n = Vector::<A, N>::cast_from(x[start + at]) * root;
        let gradient = Vector::<A, N>::cast_from(gradient[start + at]);
        let h = gradient * Vector::<A, N>::cast_from(weight[at]);
        dx[start + at] = Vector::cast_from((h - n * mean) * root);
        at += cube;
    }
}

/// A unit sums gradient x rstd of a vector of channels over a part of the rows.
#[cube(launch_unchecked, address_type = "dynamic")]
fn sums_of_columns<E: Numeric, A: Float, N: Size>(
    x: &[Vector<E, N>],
    rstd: &[A],
    gradient: &[Vector<E, N>],
    sums: &mut [Vector<A, N>],
    rows: usize,
    vectors: usize,
    part: usize,
    parts: usize,
    #[define(E, A)] _types: [ElemType; 2],
) {
    if ABSOLUTE_POS >= parts * vectors {
        terminate!();
    }
    let (of_part, column) = (ABSOLUTE_POS / vectors, ABSOLUTE_POS % vectors);
    let end = min((of_part + 1) * part, rows);
    let mut row = of_part * part;
    let mut sum = Vector::<A, N>::zeroed();
    while row < end {
        let at = row * vectors + column;
        let n = Vector::<A, N>::cast_from(x[at]) * Vector::new(rstd[row]);
        sum += Vector::<A, N>::cast_from(gradient[at]) * n;
        row += 1;
    }
    sums[ABSOLUTE_POS] = sum;
}
