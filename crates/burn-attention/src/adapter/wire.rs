//! The products as custom operations. None has numbers: the shapes of its tensors say everything.

use burn::backend::{Remote, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use burn_fused::{NoNumbers, OpError, accumulator, like, send};

use super::op::AdapterOps;

/// The custom operations.
const INNER: &str = "adapter.inner";
const ADD: &str = "adapter.add";
const GRADIENT: &str = "adapter.gradient";
const PRODUCT_ADD: &str = "adapter.product_add";

type Plain = NoNumbers<OpError>;

fn wide<T: TensorMetadata>(x: &T) -> DType {
    accumulator(x.dtype()).map_or(DType::F32, DType::from)
}

fn size<T: TensorMetadata>(x: &T, dim: usize) -> usize {
    x.shape()[dim]
}

impl AdapterOps for Remote {
    fn adapter_inner(factor: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        let h = (Shape::new([size(&factor, 0), size(&x, 0)]), wide(&x));
        let [h] = send(INNER, &Plain::default(), vec![factor, x], [h]);
        h
    }

    fn adapter_add(
        y: FloatTensor<Self>,
        h: FloatTensor<Self>,
        b: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let rounded = (Shape::new([size(&b, 0), size(&y, 0)]), y.dtype());
        let outputs = [like(&y), rounded];
        send(ADD, &Plain::default(), vec![y, h, b], outputs).into()
    }

    fn adapter_gradient(h: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        let gradient = (Shape::new([size(&h, 0), size(&x, 1)]), wide(&x));
        let [gradient] = send(GRADIENT, &Plain::default(), vec![h, x], [gradient]);
        gradient
    }

    fn product_add(
        y: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let sum = like(&y);
        let [sum] = send(PRODUCT_ADD, &Plain::default(), vec![y, x, weight], [sum]);
        sum
    }
}

#[cfg(feature = "remote-server")]
mod server {
    use burn::backend::ir::BackendIr;
    use burn_fused::{expect_shape, handle};
    use burn_remote::server::CustomOpRegistry;

    use super::*;

    fn expect_matrix<T: TensorMetadata>(what: &'static str, x: &T) -> Result<(), OpError> {
        let shape = x.shape();
        if shape.num_dims() == 2 && !shape.contains(&0) {
            return Ok(());
        }
        Err(OpError::Wire {
            what,
            expected: "a matrix with elements".to_owned(),
            found: format!("a tensor of shape {:?}", &shape[..]),
        })
    }

    /// Lets a server compute the products by its backend.
    pub(crate) fn register<B: BackendIr + AdapterOps>(operations: &mut CustomOpRegistry<B>) {
        handle(
            operations,
            INNER,
            |_: &Plain, [factor, x]: &[_; 2]| {
                expect_matrix("the factor", factor)?;
                expect_matrix("x", x)?;
                let shape = [size(factor, 0), size(x, 1)];
                expect_shape("the factor", factor, (&shape, x.dtype()), x)
            },
            |_, [factor, x]| [B::adapter_inner(factor, x)],
        );
        handle(
            operations,
            ADD,
            |_: &Plain, [y, h, b]: &[_; 3]| {
                expect_matrix("y", y)?;
                expect_matrix("h", h)?;
                expect_matrix("b", b)?;
                let (rank, [rows, columns]) = (size(b, 0), [0, 1].map(|dim| size(y, dim)));
                let parts = if size(h, 0) == rank { 1 } else { 2 };
                expect_shape("h", h, (&[parts * rank, rows], wide(y)), y)?;
                expect_shape("b", b, (&[rank, columns], wide(y)), y)
            },
            |_, [y, h, b]| <[_; 2]>::from(B::adapter_add(y, h, b)),
        );
        handle(
            operations,
            GRADIENT,
            |_: &Plain, [h, x]: &[_; 2]| {
                expect_matrix("h", h)?;
                expect_matrix("x", x)?;
                let shape = [size(h, 0), size(x, 0)];
                expect_shape("h", h, (&shape, x.dtype()), x)
            },
            |_, [h, x]| [B::adapter_gradient(h, x)],
        );
        handle(
            operations,
            PRODUCT_ADD,
            |_: &Plain, [y, x, weight]: &[_; 3]| {
                expect_matrix("x", x)?;
                expect_matrix("the weight", weight)?;
                let (inputs, outputs) = (size(x, 1), size(weight, 1));
                expect_shape("the weight", weight, (&[inputs, outputs], x.dtype()), x)?;
                expect_shape("y", y, (&[size(x, 0), outputs], x.dtype()), x)
            },
            |_, [y, x, weight]| [B::product_add(y, x, weight)],
        );
    }
}

#[cfg(feature = "remote-server")]
pub(crate) use server::register;
