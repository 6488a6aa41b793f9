//! The operations as custom operations, without numbers: the last tensor is the rows' tokens, or the
//! tokens' rows.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Remote, TensorMetadata};
use burn::tensor::{DType, Shape};
use burn_fused::{NoNumbers, like, send};

use super::op::RoutesOps;
use crate::error::AttentionError;

/// The custom operations.
const ROWS: &str = "routes.rows";
const ROWS_BACKWARD: &str = "routes.rows_backward";
const SUM: &str = "routes.sum";
const SUM_BACKWARD: &str = "routes.sum_backward";

type Plain = NoNumbers<AttentionError>;

/// A matrix with the columns of another, and the rows that this tensor has in its first dimension.
fn matrix(columns: &FloatTensor<Remote>, rows: &IntTensor<Remote>) -> (Shape, DType) {
    let shape = Shape::new([rows.shape()[0], columns.shape()[1]]);
    (shape, columns.dtype())
}

impl RoutesOps for Remote {
    fn routed_rows_forward(
        x: FloatTensor<Self>,
        tokens: IntTensor<Self>,
        _places: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let output = matrix(&x, &tokens);
        let [out] = send(ROWS, &Plain::default(), vec![x, tokens], [output]);
        out
    }

    fn routed_rows_backward(
        gradient: FloatTensor<Self>,
        places: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let output = matrix(&gradient, &places);
        let inputs = vec![gradient, places];
        let [out] = send(ROWS_BACKWARD, &Plain::default(), inputs, [output]);
        out
    }

    fn routed_sum_forward(
        rows: FloatTensor<Self>,
        shares: FloatTensor<Self>,
        places: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let output = matrix(&rows, &places);
        let inputs = vec![rows, shares, places];
        let [out] = send(SUM, &Plain::default(), inputs, [output]);
        out
    }

    fn routed_sum_backward(
        rows: FloatTensor<Self>,
        shares: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        places: IntTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = [like(&rows), like(&shares)];
        let inputs = vec![rows, shares, gradient, places];
        send(SUM_BACKWARD, &Plain::default(), inputs, outputs).into()
    }
}

#[cfg(feature = "remote-server")]
mod server {
    use burn::backend::ir::BackendIr;
    use burn_fused::{accumulator, expect_rank, expect_shape, handle_with_indices};
    use burn_remote::server::CustomOpRegistry;

    use super::*;
    use crate::error::Result;
    use crate::routes::check_sum;

    /// Lets a server compute the operations by its backend.
    pub(crate) fn register<B: BackendIr + RoutesOps>(operations: &mut CustomOpRegistry<B>) {
        handle_with_indices(
            operations,
            ROWS,
            |_: &Plain, [x]: &[_; 1], tokens| {
                expect_rank("x", x, 2)?;
                expect_rank("the tokens", tokens, 1)?;
                accumulator(x.dtype())?;
                Ok(())
            },
            |_, [x], tokens| [B::float_select(x, 0, tokens)],
        );
        handle_with_indices(
            operations,
            ROWS_BACKWARD,
            |_: &Plain, [gradient]: &[_; 1], places| {
                expect_rank("the gradient", gradient, 2)?;
                expect_rank("the places", places, 2)?;
                accumulator(gradient.dtype())?;
                Ok(())
            },
            |_, [gradient], places| [B::routed_rows_backward(gradient, places)],
        );
        handle_with_indices(
            operations,
            SUM,
            |_: &Plain, [rows, shares]: &[_; 2], places| check(rows, shares, places),
            |_, [rows, shares], places| [B::routed_sum_forward(rows, shares, places)],
        );
        handle_with_indices(
            operations,
            SUM_BACKWARD,
            |_: &Plain, [rows, shares, gradient]: &[_; 3], places| {
                check(rows, shares, places)?;
                let shape = [shares.shape()[0], rows.shape()[1]];
                let shape = (&shape[..], rows.dtype());
                Ok(expect_shape("the gradient", gradient, shape, rows)?)
            },
            |_, [rows, shares, gradient], places| {
                <[_; 2]>::from(B::routed_sum_backward(rows, shares, gradient, places))
            },
        );
    }

    fn check<T: TensorMetadata>(rows: &T, shares: &T, places: &impl TensorMetadata) -> Result<()> {
        expect_rank("the rows", rows, 2)?;
        expect_rank("the shares", shares, 2)?;
        expect_rank("the places", places, 2)?;
        check_sum(rows, shares, places)
    }
}

#[cfg(feature = "remote-server")]
pub(crate) use server::register;
