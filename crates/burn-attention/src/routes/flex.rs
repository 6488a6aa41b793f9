//! Flex, burn's CPU backend: one pass over the tensors' storage, on all threads of rayon's pool.

use burn::backend::TensorMetadata;
use burn::backend::flex::{Flex, FlexTensor};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{DType, Shape};
use burn_fused::{elements, for_dtype, zeros};
use rayon::prelude::*;

use super::op::RoutesOps;
use crate::attention::flex::number::{Number, Real};

/// Elements of a task.
const TASK: usize = 1 << 15;
/// Sums of a product of two rows that are computed side by side.
const LANES: usize = 16;

impl RoutesOps for Flex {
    fn routed_rows_forward(
        x: FloatTensor<Self>,
        tokens: IntTensor<Self>,
        _places: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let tokens = tokens.to_contiguous();
        for_dtype!(x.dtype(), E => rows::<E>(&x.to_contiguous(), elements(&tokens)))
    }

    fn routed_rows_backward(
        gradient: FloatTensor<Self>,
        places: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let [gradient, places] = [gradient, places].map(|x| x.to_contiguous());
        for_dtype!(gradient.dtype(), E => sum::<E>(&gradient, None, &Places::new(&places)))
    }

    fn routed_sum_forward(
        rows: FloatTensor<Self>,
        shares: FloatTensor<Self>,
        places: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let [rows, shares, places] = [rows, shares, places].map(|x| x.to_contiguous());
        for_dtype!(rows.dtype(), E => sum::<E>(&rows, Some(&shares), &Places::new(&places)))
    }

    fn routed_sum_backward(
        rows: FloatTensor<Self>,
        shares: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        places: IntTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [rows, shares, gradient, places] =
            [rows, shares, gradient, places].map(|x| x.to_contiguous());
        let tensors = [&rows, &shares, &gradient];
        for_dtype!(rows.dtype(), E => sum_backward::<E>(tensors, &Places::new(&places)))
    }
}

/// The rows of a matrix, and the columns.
fn sizes(x: &FlexTensor) -> [usize; 2] {
    x.layout().shape().dims()
}

/// The rows of each token.
struct Places<'a> {
    all: &'a [i32],
    tokens: usize,
    per_token: usize,
}

impl<'a> Places<'a> {
    fn new(places: &'a FlexTensor) -> Self {
        let [tokens, per_token] = sizes(places);
        Self {
            all: elements(places),
            tokens,
            per_token,
        }
    }

    /// The places of a token, and their rows, of a number of rows.
    fn of(&self, token: usize, rows: usize) -> impl Iterator<Item = (usize, usize)> {
        let first = token * self.per_token;
        let places = &self.all[first..first + self.per_token];
        let rows = places
            .iter()
            .map(move |row| Some(*row as usize).filter(|row| *row < rows));
        (first..)
            .zip(rows)
            .filter_map(|(place, row)| Some((place, row?)))
    }

    /// The place of each row.
    fn by_row(&self, rows: usize) -> Vec<usize> {
        let mut places = vec![0; rows];
        for (place, row) in (0..self.tokens).flat_map(|token| self.of(token, rows)) {
            places[row] = place;
        }
        places
    }
}

/// Computes rows of a new tensor: `each` gets a row's index, the row, and numbers of its own task.
fn by_row<E: Number>(
    [rows, columns]: [usize; 2],
    dtype: DType,
    each: impl Fn(usize, &mut [E], &mut [E::Wide]) + Sync,
) -> FlexTensor {
    let mut out = zeros(Shape::new([rows, columns]), dtype);
    let step = (TASK / columns).max(1);
    let tasks = out.storage_mut::<E>().par_chunks_mut(step * columns);
    tasks.enumerate().for_each(|(task, out)| {
        let mut sums = vec![E::Wide::ZERO; columns];
        for (index, out) in out.chunks_exact_mut(columns).enumerate() {
            each(task * step + index, out, &mut sums);
        }
    });
    out
}

fn rows<E: Number>(x: &FlexTensor, tokens: &[i32]) -> FlexTensor {
    let (of_x, [_, columns]) = (elements::<E>(x), sizes(x));
    by_row::<E>([tokens.len(), columns], x.dtype(), |row, out, _| {
        out.copy_from_slice(&of_x[tokens[row] as usize * columns..][..columns]);
    })
}

/// The sums of the rows of tokens, each times its share if there are shares.
fn sum<E: Number>(
    rows: &FlexTensor,
    shares: Option<&FlexTensor>,
    places: &Places<'_>,
) -> FlexTensor {
    let (of_rows, [count, columns]) = (elements::<E>(rows), sizes(rows));
    let shares = shares.map(elements::<E::Wide>);
    by_row::<E>(
        [places.tokens, columns],
        rows.dtype(),
        |token, out, sums| {
            sums.fill(E::Wide::ZERO);
            for (place, row) in places.of(token, count) {
                let row = &of_rows[row * columns..][..columns];
                match shares.map(|shares| shares[place]) {
                    Some(share) => {
                        for (sum, x) in sums.iter_mut().zip(row) {
                            *sum += x.widen() * share;
                        }
                    }
                    None => {
                        for (sum, x) in sums.iter_mut().zip(row) {
                            *sum += x.widen();
                        }
                    }
                }
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = E::round(*sum);
            }
        },
    )
}

/// The product of two rows, in an order of additions that does not depend on the processor.
fn dot<E: Number>(a: &[E], b: &[E]) -> E::Wide {
    let mut lanes = [E::Wide::ZERO; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += a.widen() * b.widen();
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *lane += a.widen() * b.widen();
    }
    lanes
        .into_iter()
        .fold(E::Wide::ZERO, |sum, lane| sum + lane)
}

fn sum_backward<E: Number>(
    [rows, shares, gradient]: [&FlexTensor; 3],
    places: &Places<'_>,
) -> (FlexTensor, FlexTensor) {
    let (of_rows, of_sums) = (elements::<E>(rows), elements::<E>(gradient));
    let (of_shares, [count, columns]) = (elements::<E::Wide>(shares), sizes(rows));
    let per_token = places.per_token;
    let of_token = |token: usize| &of_sums[token * columns..][..columns];
    let by_place = places.by_row(count);
    let drows = by_row::<E>([count, columns], rows.dtype(), |row, out, _| {
        let place = by_place[row];
        for (out, x) in out.iter_mut().zip(of_token(place / per_token)) {
            *out = E::round(x.widen() * of_shares[place]);
        }
    });
    let mut dshares = zeros(shares.shape(), shares.dtype());
    let step = (TASK / columns).max(1);
    let tasks = dshares.storage_mut::<E::Wide>();
    let tasks = tasks.par_chunks_mut(step * per_token).enumerate();
    tasks.for_each(|(task, out)| {
        let first = task * step;
        for token in first..first + out.len() / per_token {
            for (place, row) in places.of(token, count) {
                let row = &of_rows[row * columns..][..columns];
                out[place - first * per_token] = dot(row, of_token(token));
            }
        }
    });
    (drows, dshares)
}
