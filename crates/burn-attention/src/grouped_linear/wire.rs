//! The groups' linear layers as custom operations. The numbers are the groups, and the rows of each.

use burn::backend::{Remote, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;
use burn_fused::{OpError, Reader, WireOp, Writer, send};

use super::op::{GroupedLinearOp, GroupedLinearOps};
use crate::error::{AttentionError, Result};

/// The most groups that are read: a gradient of the weight has their number in no input.
const MOST_GROUPS: usize = 1 << 16;

/// The custom operations.
const FORWARD: &str = "grouped_linear.forward";
const X_GRADIENT: &str = "grouped_linear.x_gradient";
const WEIGHT_GRADIENT: &str = "grouped_linear.weight_gradient";

impl WireOp for GroupedLinearOp {
    const VERSION: u64 = 1;
    type Error = AttentionError;

    fn write(&self, numbers: &mut Writer) {
        numbers.size(self.rows.len());
        self.rows.iter().for_each(|rows| numbers.size(*rows));
    }

    fn read(numbers: &mut Reader<'_>) -> Result<Self> {
        let first = numbers.shapes().first();
        let most = first.and_then(|shape| shape.first().copied()).unwrap_or(0);
        let groups = numbers.size("the groups", MOST_GROUPS)?;
        let rows = (0..groups).map(|_| numbers.size("the rows of a group", most));
        Ok(Self {
            rows: rows.collect::<Result<_, OpError>>()?,
        })
    }
}

fn size<T: TensorMetadata>(x: &T, dim: usize) -> usize {
    x.shape()[dim]
}

impl GroupedLinearOps for Remote {
    fn grouped_linear_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        op: GroupedLinearOp,
    ) -> FloatTensor<Self> {
        let out = (Shape::new([size(&x, 0), size(&weight, 1)]), x.dtype());
        let [out] = send(FORWARD, &op, vec![x, weight], [out]);
        out
    }

    fn grouped_linear_x_gradient(
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        op: GroupedLinearOp,
    ) -> FloatTensor<Self> {
        let dx = Shape::new([size(&gradient, 0), size(&weight, 2)]);
        let dx = (dx, gradient.dtype());
        let [dx] = send(X_GRADIENT, &op, vec![gradient, weight], [dx]);
        dx
    }

    fn grouped_linear_weight_gradient(
        x: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        op: GroupedLinearOp,
    ) -> FloatTensor<Self> {
        let dweight = Shape::new([op.rows.len(), size(&gradient, 1), size(&x, 1)]);
        let dweight = (dweight, x.dtype());
        let [dweight] = send(WEIGHT_GRADIENT, &op, vec![x, gradient], [dweight]);
        dweight
    }
}

#[cfg(feature = "remote-server")]
mod server {
    use burn::backend::ir::BackendIr;
    use burn_fused::{expect_rank, expect_shape, handle};
    use burn_remote::server::CustomOpRegistry;

    use super::*;
    use crate::error::equal;

    /// Lets a server compute the layers by its backend.
    pub(crate) fn register<B: BackendIr + GroupedLinearOps>(operations: &mut CustomOpRegistry<B>) {
        handle(
            operations,
            FORWARD,
            |op: &GroupedLinearOp, [x, weight]: &[_; 2]| {
                expect_rank("x", x, 2)?;
                expect_rank("the weight", weight, 3)?;
                op.check(x, weight)
            },
            |op, [x, weight]| [B::grouped_linear_forward(x, weight, op)],
        );
        handle(
            operations,
            X_GRADIENT,
            |op: &GroupedLinearOp, [gradient, weight]: &[_; 2]| {
                expect_rank("the gradient", gradient, 2)?;
                expect_rank("the weight", weight, 3)?;
                op.check_rows(gradient)?;
                equal(["rows", "weight"], "groups", op.rows.len(), size(weight, 0))?;
                let shape = [size(gradient, 0), size(weight, 1)];
                let shape = (&shape[..], weight.dtype());
                Ok(expect_shape("the gradient", gradient, shape, weight)?)
            },
            |op, [gradient, weight]| [B::grouped_linear_x_gradient(weight, gradient, op)],
        );
        handle(
            operations,
            WEIGHT_GRADIENT,
            |op: &GroupedLinearOp, [x, gradient]: &[_; 2]| {
                expect_rank("x", x, 2)?;
                expect_rank("the gradient", gradient, 2)?;
                op.check_rows(x)?;
                let shape = [size(x, 0), size(gradient, 1)];
                Ok(expect_shape(
                    "the gradient",
                    gradient,
                    (&shape, x.dtype()),
                    x,
                )?)
            },
            |op, [x, gradient]| [B::grouped_linear_weight_gradient(x, gradient, op)],
        );
    }
}

#[cfg(feature = "remote-server")]
pub(crate) use server::register;
