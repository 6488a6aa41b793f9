//! The products of a layer with an adapter: the vendor's with results in f32, and a kernel that adds
//! the adapter's term.

use burn::backend::ops::{FloatTensorOps, ModuleOps};
use burn::backend::tensor::FloatTensor;
use burn::backend::{DType, Shape, TensorMetadata};
use burn_attention::AdapterOps;
use burn_attention::composed::adapter as composed;
use burn_fused::like;
use rope_ascend::aclnn::Number;
use rope_ascend::rope::LowRankTerm;
use rope_ascend::sys::CubeMath;

use super::{Outcome, Outputs, Refusal, kernel_type, layer_kernels, read, write};
use crate::Ascend;
use crate::ops::launch::{self, Out, Types};
use crate::ops::movement::copy;
use crate::ops::views;
use crate::tensor::AscendTensor;

impl AdapterOps for Ascend {
    fn adapter_inner(factor: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        if !Types::FLOAT.contains(x.dtype()) {
            return composed::inner::<Self>(factor, x);
        }
        wide_product(&factor, &views::swap(&x, 0, 1))
    }

    fn adapter_add(
        y: FloatTensor<Self>,
        h: FloatTensor<Self>,
        b: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let rounded = Shape::from([b.dims()[0], y.dims()[0]]);
        let outputs = Outputs::new(&y, [like(&y), (rounded, y.dtype())]);
        let outcome = add(y, &h, &b);
        let composed = |[y]: [AscendTensor; 1]| composed::add::<Self>(y, h, b).into();
        outputs.or_composed(outcome, composed).into()
    }

    fn product_add(
        y: FloatTensor<Self>,
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let outputs = Outputs::new(&y, [like(&y)]);
        let outcome = product_onto(&y, &x, &weight).map_err(|refusal| (refusal, ()));
        let [sum] = outputs.or_composed(outcome, |()| {
            [Self::float_add(y, Self::linear(x, weight, None))]
        });
        sum
    }

    fn adapter_gradient(h: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        if !Types::FLOAT.contains(x.dtype()) {
            return composed::gradient::<Self>(h, x);
        }
        wide_product(&h, &x)
    }
}

/// x · y in f32. The operator of batches gives such results of 16-bit matrices.
fn wide_product(x: &AscendTensor, y: &AscendTensor) -> AscendTensor {
    let [rows, columns] = [x.dims()[0], y.dims()[1]];
    let [x, y] = [x, y].map(|x| {
        let (mut dims, mut strides) = (vec![1], vec![1]);
        dims.extend(x.dims());
        strides.extend(x.strides());
        x.view(Shape::from(dims), strides, x.offset())
    });
    let out = Out::New(Shape::from([1, rows, columns]), DType::F32);
    let product = launch::compute([&x, &y], out, |ops, [x, y], out| {
        ops.batch_mm(x, y, out, CubeMath::KEEP_DTYPE)
    });
    views::reshape(product, &Shape::from([rows, columns]))
}

/// y + x · weight. Versions of the operator library that cannot add in f32 within the product round
/// it before.
fn product_onto(
    y: &AscendTensor,
    x: &AscendTensor,
    weight: &AscendTensor,
) -> Result<[AscendTensor; 1], Refusal> {
    if !Types::FLOAT.contains(x.dtype()) {
        return Err(Refusal::Limit);
    }
    let context = x.context()?;
    let sum = AscendTensor::empty_in(context, y.shape(), y.dtype());
    let maths = match x.dtype() {
        DType::F32 => &[CubeMath::KEEP_DTYPE][..],
        _ => &[CubeMath::USE_FP32_ADD, CubeMath::KEEP_DTYPE],
    };
    let one = Number::Float(1.0);
    let mut done = Err(Refusal::Limit);
    for math in maths {
        let [y, x, weight, out] = launch::views([y, x, weight, &sum])?;
        let operators = context.operators();
        done = operators
            .add_mm(y, x, weight, one, one, out, *math)
            .map_err(Refusal::operator);
        if !matches!(done, Err(Refusal::Limit)) {
            break;
        }
    }
    done.map(|()| [sum])
}

/// Adds the term to y, or to a copy if something else holds it.
#[expect(
    clippy::result_large_err,
    reason = "a refusal gives the input back to be composed"
)]
fn add(y: AscendTensor, h: &AscendTensor, b: &AscendTensor) -> Outcome<[AscendTensor; 1], 2> {
    let mut y = if launch::is_free(&y) { y } else { copy(&y) };
    match run(&mut y, h, b) {
        Ok(rounded) => Ok([y, rounded]),
        Err(refusal) => Err((refusal, [y])),
    }
}

fn run(y: &mut AscendTensor, h: &AscendTensor, b: &AscendTensor) -> Result<AscendTensor, Refusal> {
    let element = kernel_type(y.dtype())?;
    let context = y.context()?.clone();
    let kernels = layer_kernels(&context)?;
    let [rows, columns] = [y.dims()[0], y.dims()[1]];
    let rank = b.dims()[0];
    let (h, b) = (h.clone().contiguous(), b.clone().contiguous());
    let is_wide = y.dtype() == DType::F32;
    if is_wide && h.dims()[0] != rank {
        return Err(Refusal::Limit);
    }
    let mut rounded = if is_wide {
        h.clone()
    } else {
        AscendTensor::empty_in(&context, Shape::from([rank, rows]), y.dtype())
    };
    let starts = [0, rank * rows];
    let parts = h.dims()[0] / rank;
    let into = if is_wide {
        None
    } else {
        Some(write(&mut rounded)?)
    };
    kernels.add_low_rank(LowRankTerm {
        element,
        size: [rows, columns],
        rank,
        part_starts: &starts[..parts],
        y: write(y)?,
        h: read(&h)?,
        b: read(&b)?,
        rounded_h: into,
    })?;
    Ok(rounded)
}
