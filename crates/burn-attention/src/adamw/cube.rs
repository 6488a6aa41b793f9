//! CubeCL's runtimes: one launch each.

#![allow(
    unsafe_code,
    reason = "kernels trust the sizes that they are launched with"
)]

use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, FloatDType};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl;
use burn_cubecl::cubecl::calculate_cube_count_elemwise;
use burn_cubecl::cubecl::ir::ElemType;
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_fused::cube::{
    address_type, cubes, empty_beside, owned, sum_of_vector, sum_over_cube, types, units_of_row,
    vector_size,
};

use super::op::{AdamWFactors, AdamWOp, AdamWOps, AdamWRounded, rounded};
use super::{SQUARES, composed, shape_of_sums, type_of_sums};

impl AdamWOps for CubeBackend {
    fn adamw(
        value: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        op: AdamWOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let Some(types) = update_types(&value, &gradient, DType::F32) else {
            return composed::update::<Self>(value, gradient, first, second, op);
        };
        let (value, _, first, second) = run([value, gradient, first, second], op, None, types);
        (value, first, second)
    }

    fn adamw_rounded(
        value: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        op: AdamWOp,
        dtype: FloatDType,
    ) -> AdamWRounded<Self> {
        let narrow = dtype.into();
        let types = update_types(&value, &gradient, narrow);
        let Some(types) = types.filter(|_| narrow != value.dtype) else {
            let updated = Self::adamw(value, gradient, first, second, op);
            return rounded::<Self>(updated, dtype);
        };
        let tensors = [value, gradient, first, second];
        let (value, rounded, first, second) = run(tensors, op, Some(narrow), types);
        let rounded = rounded.unwrap_or_else(|| value.clone());
        (value, rounded, first, second)
    }

    fn square_sums(x: FloatTensor<Self>) -> FloatTensor<Self> {
        if types(&x.client, x.dtype).is_none() {
            return composed::square_sums::<Self>(x);
        }
        let sums = empty_beside(&x, shape_of_sums(x.meta.shape()), type_of_sums(x.dtype));
        sum_squares(x, &sums, 0);
        sums
    }

    fn square_sums_into(
        sums: FloatTensor<Self>,
        x: FloatTensor<Self>,
        start: usize,
    ) -> FloatTensor<Self> {
        if types(&x.client, x.dtype).is_none() || type_of_sums(x.dtype) != sums.dtype {
            return composed::square_sums_into::<Self>(sums, x, start);
        }
        let sums = owned(sums);
        sum_squares(x, &sums, start);
        sums
    }
}

/// The types of the gradient and of the rounded values, if the device has them and the values are in
/// f32.
fn update_types(
    value: &CubeTensor,
    gradient: &CubeTensor,
    rounded: DType,
) -> Option<[ElemType; 2]> {
    let of = |dtype| types(&value.client, dtype).map(|[stored, _]| stored);
    let found = [of(gradient.dtype)?, of(rounded)?];
    (value.dtype == DType::F32 && of(DType::F32).is_some()).then_some(found)
}

/// The new values, in another type too, and the new moments.
fn run(
    [value, gradient, first, second]: [CubeTensor; 4],
    op: AdamWOp,
    dtype: Option<DType>,
    types: [ElemType; 2],
) -> (CubeTensor, Option<CubeTensor>, CubeTensor, CubeTensor) {
    let (value, gradient) = (into_contiguous(value), into_contiguous(gradient));
    let (first, second) = (owned(first), owned(second));
    let elements = value.meta.num_elements();
    let empty = |dtype| empty_beside(&value, value.meta.shape().clone(), dtype);
    let rounded = dtype.map(empty);
    if elements == 0 {
        return (value, rounded, first, second);
    }
    // The new values take the memory of what nothing else holds.
    let (out, alias) = if value.can_mut() {
        (value.clone(), Some(0))
    } else if gradient.can_mut() && gradient.dtype == DType::F32 {
        (gradient.clone(), Some(1))
    } else {
        (empty(DType::F32), None)
    };
    let mut tensors = vec![&value, &gradient, &first, &second, &out];
    tensors.extend(&rounded);
    let (n, address) = (vector_size(&tensors, elements), address_type(&tensors));
    let (client, units) = (value.client.clone(), elements / n);
    let (count, dim) = cubes(&client, units);
    let written = match alias {
        Some(read) => BufferArg::alias(read, elements),
        None => out.clone().into_buffer_arg(),
    };
    let [value, gradient] = [value, gradient].map(CubeTensor::into_buffer_arg);
    let moments = [&first, &second].map(|x| x.clone().into_buffer_arg());
    let [first_arg, second_arg] = moments;
    let by = factors(op.factors());
    // SAFETY: all tensors are contiguous and have `elements` elements, in vectors of `n`; only
    // memory that nothing else holds is written, each vector by one unit.
    unsafe {
        match &rounded {
            Some(rounded) => update_rounded::launch_unchecked(
                &client,
                count,
                dim,
                address,
                n,
                value,
                gradient,
                first_arg,
                second_arg,
                written,
                rounded.clone().into_buffer_arg(),
                units,
                by,
                types,
            ),
            None => update::launch_unchecked(
                &client, count, dim, address, n, value, gradient, first_arg, second_arg, written,
                units, by, types[0],
            ),
        }
    }
    (out, rounded, first, second)
}

fn factors(by: AdamWFactors) -> FactorsLaunch {
    FactorsLaunch::new(
        by.scale as f32,
        by.of_gradient as f32,
        by.of_square as f32,
        by.kept as f32,
        by.correction as f32,
        by.epsilon as f32,
        by.stay as f32,
        by.step as f32,
    )
}

/// The factors in f32.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Factors {
    scale: f32,
    of_gradient: f32,
    of_square: f32,
    kept: f32,
    correction: f32,
    epsilon: f32,
    stay: f32,
    step: f32,
}

/// Updates the moments of a vector, and returns its new values.
#[cube]
fn updated<G: Numeric, N: Size>(
    value: &[Vector<f32, N>],
    gradient: &[Vector<G, N>],
    first: &mut [Vector<f32, N>],
    second: &mut [Vector<f32, N>],
    by: Factors,
) -> Vector<f32, N> {
    let at = ABSOLUTE_POS;
    let gradient = Vector::<f32, N>::cast_from(gradient[at]) * Vector::new(by.scale);
    let mean = first[at];
    let mean = mean + (gradient - mean) * Vector::new(by.of_gradient);
    let square = gradient * gradient * Vector::new(by.of_square);
    let square = second[at] * Vector::new(by.kept) + square;
    first[at] = mean;
    second[at] = square;
    let root = square.sqrt() / Vector::new(by.correction) + Vector::new(by.epsilon);
    value[at] * Vector::new(by.stay) - mean / root * Vector::new(by.step)
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn update<G: Numeric, N: Size>(
    value: &[Vector<f32, N>],
    gradient: &[Vector<G, N>],
    first: &mut [Vector<f32, N>],
    second: &mut [Vector<f32, N>],
    out: &mut [Vector<f32, N>],
    units: usize,
    by: Factors,
    #[define(G)] _type: ElemType,
) {
    if ABSOLUTE_POS >= units {
        terminate!();
    }
    out[ABSOLUTE_POS] = updated::<G, N>(value, gradient, first, second, by);
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn update_rounded<G: Numeric, R: Numeric, N: Size>(
    value: &[Vector<f32, N>],
    gradient: &[Vector<G, N>],
    first: &mut [Vector<f32, N>],
    second: &mut [Vector<f32, N>],
    out: &mut [Vector<f32, N>],
    rounded: &mut [Vector<R, N>],
    units: usize,
    by: Factors,
    #[define(G, R)] _types: [ElemType; 2],
) {
    if ABSOLUTE_POS >= units {
        terminate!();
    }
    let value = updated::<G, N>(value, gradient, first, second, by);
    out[ABSOLUTE_POS] = value;
    rounded[ABSOLUTE_POS] = Vector::cast_from(value);
}

/// Writes the sums of x from number `start` of `sums` on; the device has the type of x.
fn sum_squares(x: CubeTensor, sums: &CubeTensor, start: usize) {
    let x = into_contiguous(x);
    let elements = x.meta.num_elements();
    let Some(types) = types(&x.client, x.dtype).filter(|_| elements > 0) else {
        return;
    };
    debug_assert!(start + elements.div_ceil(SQUARES) <= sums.meta.num_elements());
    let client = x.client.clone();
    let n = vector_size(&[&x], elements);
    let cube = units_of_row(&client, SQUARES / n);
    let rows = elements.div_ceil(SQUARES);
    let dim = CubeDim::new_1d(cube as u32);
    let count = calculate_cube_count_elemwise(&client, rows * cube, dim);
    let address = address_type(&[&x, sums]);
    // SAFETY: x is contiguous and has `elements` elements, in vectors of `n`, which divides
    // `SQUARES`. `sums` is contiguous, has a number for each row from `start` on, and nothing else
    // holds it.
    unsafe {
        squares::launch_unchecked(
            &client,
            count,
            dim,
            address,
            n,
            x.into_buffer_arg(),
            sums.clone().into_buffer_arg(),
            elements / n,
            rows,
            start,
            cube,
            types,
        );
    }
}

/// A cube sums the squares of a row.
#[cube(launch_unchecked, address_type = "dynamic")]
fn squares<E: Numeric, A: Float, N: Size>(
    x: &[Vector<E, N>],
    sums: &mut [A],
    vectors: usize,
    rows: usize,
    start: usize,
    #[comptime] cube: usize,
    #[define(E, A)] _types: [ElemType; 2],
) {
    if CUBE_POS >= rows {
        terminate!();
    }
    let mut shared = Shared::<[A]>::new_slice(cube);
    let size = N::value();
    let row = comptime![SQUARES / size];
    let end = min((CUBE_POS + 1) * row, vectors);
    let mut at = CUBE_POS * row + UNIT_POS as usize;
    let mut sum = Vector::<A, N>::zeroed();
    while at < end {
        let x = Vector::<A, N>::cast_from(x[at]);
        sum += x * x;
        at += cube;
    }
    let sum = sum_over_cube::<A>(&mut shared, sum_of_vector::<A, N>(sum), cube);
    if UNIT_POS == 0 {
        sums[start + CUBE_POS] = sum;
    }
}
