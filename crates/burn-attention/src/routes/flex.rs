//! Flex, burn's CPU backend: one pass over the tensors' storage, on all threads of rayon's pool.

use burn::backend::flex::{Flex, FlexTensor};
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Shape};
use burn_fused::{for_dtype, zeros};
use rayon::prelude::*;

use super::Routes;
use super::op::RoutesOps;
use crate::attention::flex::number::{Number, Real};

/// Elements of a task.
const TASK: usize = 1 << 15;
/// Sums of a product of two rows that are computed side by side.
const LANES: usize = 16;

impl RoutesOps for Flex {
    fn routed_rows_forward(x: FloatTensor<Self>, routes: Routes) -> FloatTensor<Self> {
        for_dtype!(x.dtype(), E => rows::<E>(&x.to_contiguous(), &routes))
    }

    fn routed_rows_backward(gradient: FloatTensor<Self>, routes: Routes) -> FloatTensor<Self> {
        for_dtype!(gradient.dtype(), E => rows_backward::<E>(&gradient.to_contiguous(), &routes))
    }

    fn routed_sum_forward(
        rows: FloatTensor<Self>,
        shares: FloatTensor<Self>,
        routes: Routes,
    ) -> FloatTensor<Self> {
        let [rows, shares] = [rows, shares].map(|x| x.to_contiguous());
        for_dtype!(rows.dtype(), E => sum::<E>(&rows, &shares, &routes))
    }

    fn routed_sum_backward(
        rows: FloatTensor<Self>,
        shares: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        routes: Routes,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [rows, shares, gradient] = [rows, shares, gradient].map(|x| x.to_contiguous());
        for_dtype!(rows.dtype(), E => sum_backward::<E>(&rows, &shares, &gradient, &routes))
    }
}

/// The elements of a contiguous tensor, and those of its last dimension.
fn elements<E: burn::backend::Element + bytemuck::Pod>(x: &FlexTensor) -> (&[E], usize) {
    let start = x.layout().start_offset();
    let elements = &x.storage::<E>()[start..start + x.layout().num_elements()];
    let [_, columns] = x.layout().shape().dims();
    (elements, columns)
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

fn rows<E: Number>(x: &FlexTensor, routes: &Routes) -> FlexTensor {
    let (of_x, columns) = elements::<E>(x);
    by_row::<E>([routes.tokens.len(), columns], x.dtype(), |row, out, _| {
        out.copy_from_slice(&of_x[routes.tokens[row] * columns..][..columns]);
    })
}

impl Routes {
    /// The rows of a token.
    fn of(&self, token: usize) -> &[usize] {
        &self.places[token * self.per_token..][..self.per_token]
    }
}

fn rows_backward<E: Number>(gradient: &FlexTensor, routes: &Routes) -> FlexTensor {
    let (of_rows, columns) = elements::<E>(gradient);
    let sizes = [routes.count(), columns];
    by_row::<E>(sizes, gradient.dtype(), |token, out, sums| {
        sums.fill(E::Wide::ZERO);
        for row in routes.of(token) {
            if routes.tokens[*row] == token {
                let row = &of_rows[row * columns..][..columns];
                for (sum, x) in sums.iter_mut().zip(row) {
                    *sum += x.widen();
                }
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = E::round(*sum);
        }
    })
}

fn sum<E: Number>(rows: &FlexTensor, shares: &FlexTensor, routes: &Routes) -> FlexTensor {
    let (of_rows, columns) = elements::<E>(rows);
    let (shares, _) = elements::<E::Wide>(shares);
    let sizes = [routes.count(), columns];
    by_row::<E>(sizes, rows.dtype(), |token, out, sums| {
        sums.fill(E::Wide::ZERO);
        let shares = &shares[token * routes.per_token..];
        for (row, share) in routes.of(token).iter().zip(shares) {
            let row = &of_rows[row * columns..][..columns];
            for (sum, x) in sums.iter_mut().zip(row) {
                *sum += x.widen() * *share;
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = E::round(*sum);
        }
    })
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
    rows: &FlexTensor,
    shares: &FlexTensor,
    gradient: &FlexTensor,
    routes: &Routes,
) -> (FlexTensor, FlexTensor) {
    let (of_rows, columns) = elements::<E>(rows);
    let (of_shares, per_token) = elements::<E::Wide>(shares);
    let (of_sums, _) = elements::<E>(gradient);
    let of_token = |token: usize| &of_sums[token * columns..][..columns];
    let sizes = [routes.tokens.len(), columns];
    let drows = by_row::<E>(sizes, rows.dtype(), |row, out, _| {
        let token = routes.tokens[row];
        let shares = routes.of(token).iter().zip(&of_shares[token * per_token..]);
        let mut shares = shares.filter(|(place, _)| **place == row);
        let share = shares.next().map_or(E::Wide::ZERO, |(_, share)| *share);
        for (out, x) in out.iter_mut().zip(of_token(token)) {
            *out = E::round(x.widen() * share);
        }
    });
    let mut dshares = zeros(Shape::new([routes.count(), per_token]), shares.dtype());
    let step = (TASK / columns).max(1);
    let tasks = dshares.storage_mut::<E::Wide>();
    let tasks = tasks.par_chunks_mut(step * per_token).enumerate();
    tasks.for_each(|(task, out)| {
        for (index, out) in out.chunks_exact_mut(per_token).enumerate() {
            let token = task * step + index;
            for (out, row) in out.iter_mut().zip(routes.of(token)) {
                if routes.tokens[*row] == token {
                    *out = dot(&of_rows[row * columns..][..columns], of_token(token));
                }
            }
        }
    });
    (drows, dshares)
}
