//! The operations composed of ordinary tensor operations, for every backend.

use burn::backend::tensor::{FloatTensor, IndexingUpdateOp, IntTensor};
use burn::backend::{Backend, Scalar, TensorMetadata, get_or_init_device_settings};
use burn::tensor::{FloatDType, Shape};
use burn_fused::primitive::{cast, widen};

/// The places with those beyond the rows at the last row, one after the other, and a 1 for each
/// place that has a row, `[tokens, per_token]`.
fn within<B: Backend>(
    places: IntTensor<B>,
    rows: usize,
    wide: FloatDType,
) -> (IntTensor<B>, FloatTensor<B>) {
    let [tokens, per_token] = places.shape().dims();
    let bools = get_or_init_device_settings::<B>(&places.device()).bool_dtype;
    let rows = rows as i64;
    let has_row = B::int_lower_elem(places.clone(), Scalar::Int(rows), bools);
    let places = B::int_clamp_max(places, Scalar::Int(rows - 1));
    let places = B::int_reshape(places, Shape::new([tokens * per_token]));
    (places, B::bool_into_float(has_row, wide))
}

/// The rows of places, `[tokens, per_token, channels]`, in the type of the sums' computation.
fn of_places<B: Backend>(
    rows: FloatTensor<B>,
    places: IntTensor<B>,
    [tokens, per_token]: [usize; 2],
) -> FloatTensor<B> {
    let [_, channels] = rows.shape().dims();
    let rows = B::float_select(rows, 0, places);
    widen::<B>(B::float_reshape(
        rows,
        Shape::new([tokens, per_token, channels]),
    ))
}

/// As a matrix for each token, of one column.
fn column<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let [tokens, per_token] = x.shape().dims();
    B::float_reshape(x, Shape::new([tokens, per_token, 1]))
}

/// Computes the same as [`routed_rows_backward`](crate::RoutesOps::routed_rows_backward).
///
/// # Panics
/// If shapes or types disagree.
pub fn rows_backward<B: Backend>(gradient: FloatTensor<B>, places: IntTensor<B>) -> FloatTensor<B> {
    let [rows, _] = gradient.shape().dims();
    let wide = burn_fused::accumulator(gradient.dtype()).unwrap_or_else(|error| panic!("{error}"));
    let (_, ones) = within::<B>(places.clone(), rows, wide);
    sum_forward::<B>(gradient, ones, places)
}

/// Computes the same as [`routed_sum_forward`](crate::RoutesOps::routed_sum_forward).
///
/// # Panics
/// As [`rows_backward`].
pub fn sum_forward<B: Backend>(
    rows: FloatTensor<B>,
    shares: FloatTensor<B>,
    places: IntTensor<B>,
) -> FloatTensor<B> {
    let ([count, channels], narrow) = (rows.shape().dims(), rows.dtype().into());
    let sizes: [usize; 2] = shares.shape().dims();
    let (places, has_row) = within::<B>(places, count, shares.dtype().into());
    let rows = of_places::<B>(rows, places, sizes);
    let products = B::float_mul(rows, column::<B>(B::float_mul(shares, has_row)));
    let sums = cast::<B>(B::float_sum_dim(products, 1), narrow);
    B::float_reshape(sums, Shape::new([sizes[0], channels]))
}

/// Computes the same as [`routed_sum_backward`](crate::RoutesOps::routed_sum_backward).
///
/// # Panics
/// As [`rows_backward`].
pub fn sum_backward<B: Backend>(
    rows: FloatTensor<B>,
    shares: FloatTensor<B>,
    gradient: FloatTensor<B>,
    places: IntTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let ([count, channels], narrow) = (rows.shape().dims(), rows.dtype().into());
    let [tokens, per_token] = shares.shape().dims();
    let (places, has_row) = within::<B>(places, count, shares.dtype().into());
    let gradient = widen::<B>(gradient);
    let gradient = B::float_reshape(gradient, Shape::new([tokens, 1, channels]));

    let zeros = B::float_zeros(Shape::new([count, channels]), &rows.device(), narrow);
    let of_rows = of_places::<B>(rows, places.clone(), [tokens, per_token]);
    let products = B::float_sum_dim(B::float_mul(of_rows, gradient.clone()), 2);
    let dshares = B::float_reshape(products, Shape::new([tokens, per_token]));
    let dshares = B::float_mul(dshares, has_row.clone());

    // A row has one place, and zeros from those that have none.
    let shares = column::<B>(B::float_mul(shares, has_row));
    let drows = cast::<B>(B::float_mul(gradient, shares), narrow);
    let drows = B::float_reshape(drows, Shape::new([tokens * per_token, channels]));
    let drows = B::float_select_assign(zeros, 0, places, drows, IndexingUpdateOp::Add);
    (drows, dshares)
}
