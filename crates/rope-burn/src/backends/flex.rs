//! Flex, burn's CPU backend: rope-core's kernels on the tensors' own storage.
//!
//! A tensor that nothing else holds is rotated in place, whatever its strides. Any other is read by
//! its strides and written to a new tensor: one pass in both cases.

use burn::backend::flex::{Flex, FlexTensor};
use burn::backend::{Element as BurnElement, tensor::FloatTensor};
use burn::tensor::{DType, Shape};
use half::{bf16, f16};
use rope_core::{Angles, Direction, Element, HeadsLayout, HeadsMut, HeadsRef, Operand, Rotator};

use crate::error::{Result, RotaryError};
use crate::ops::{RotaryOp, RotaryOps};

/// Evaluates an expression with `$e` as the element type that a dtype names.
macro_rules! for_dtype {
    ($dtype:expr, $e:ident => $body:expr) => {{
        macro_rules! with {
            ($type:ty) => {{
                type $e = $type;
                $body
            }};
        }
        match $dtype {
            DType::F32 => with!(f32),
            DType::F16 => with!(f16),
            DType::BF16 => with!(bf16),
            DType::F64 => with!(f64),
            found => Err(RotaryError::UnsupportedDType { found }),
        }
    }};
}

mod norm;

/// An element that both sides know.
trait Shared: Element<Acc: BurnElement + bytemuck::Pod> + BurnElement + bytemuck::Pod {}
impl<E: Element<Acc: BurnElement + bytemuck::Pod> + BurnElement + bytemuck::Pod> Shared for E {}

impl RotaryOps for Flex {
    fn rotary_pair(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: RotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        or_panic(for_dtype!(q.dtype(), E => rotate::<E, 2>([q, k], &angles, op))).into()
    }

    fn rotary_single(
        x: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: RotaryOp,
    ) -> FloatTensor<Self> {
        let [x] = or_panic(for_dtype!(x.dtype(), E => rotate::<E, 1>([x], &angles, op)));
        x
    }

    fn rotary_angle_gradients(
        x: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: RotaryOp,
    ) -> FloatTensor<Self> {
        or_panic(op.check_gradient(&x, &gradient, &angles));
        // The adjoint's angles are the forward's: <dy, R' g> = <R dy, g>, so x and gradient swap.
        let [x, gradient] = match op.direction {
            Direction::Forward => [x, gradient],
            Direction::Adjoint => [gradient, x],
        };
        let gradients = zeros(angles.layout().shape().clone(), angles.dtype());
        or_panic(for_dtype!(x.dtype(), E => angle_gradients::<E>(&x, &gradient, gradients, op)))
    }
}

/// An operation of a burn backend cannot return an error; [`crate::Rotary`] checks before it calls.
fn or_panic<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

/// A new tensor, in pages that nothing has written yet.
///
/// `FlexTensor::empty` makes it of bytes, and then copies all of them to memory that is aligned for
/// any type: a pass over the tensor, and twice its memory.
fn zeros(shape: Shape, dtype: DType) -> FlexTensor {
    match dtype.size() {
        2 => FlexTensor::filled_typed(shape, dtype, 0u16),
        4 => FlexTensor::filled_typed(shape, dtype, 0u32),
        8 => FlexTensor::filled_typed(shape, dtype, 0u64),
        _ => FlexTensor::empty(shape, dtype),
    }
}

/// A tensor as the kernels take it: its strides, and the tensor to write unless it is the same.
struct Placed {
    source: FlexTensor,
    layout: HeadsLayout,
    target: Option<FlexTensor>,
}

impl Placed {
    fn new(x: FlexTensor, op: &RotaryOp) -> Self {
        let (source, layout) = match strides(&x, op) {
            Some(layout) => (x, layout),
            None => {
                let layout = or_panic(op.heads("x", x.layout().shape()));
                (x.to_contiguous(), layout)
            }
        };
        let in_place = source.is_unique() && layout.is_injective();
        let target = (!in_place).then(|| zeros(source.layout().shape().clone(), source.dtype()));
        Self {
            source,
            layout,
            target,
        }
    }

    fn operand<E: Shared>(&mut self, op: &RotaryOp) -> Result<Operand<'_, E>> {
        let start = self.source.layout().start_offset();
        match &mut self.target {
            None => {
                let data = self.source.storage_mut::<E>();
                Ok(HeadsMut::new(&mut data[start..], self.layout)?.into())
            }
            Some(target) => {
                let layout = op.heads("x", target.layout().shape())?;
                let from = HeadsRef::new(&self.source.storage::<E>()[start..], self.layout)?;
                Ok((from, HeadsMut::new(target.storage_mut::<E>(), layout)?).into())
            }
        }
    }

    fn into_output(self) -> FlexTensor {
        self.target.unwrap_or(self.source)
    }
}

/// The strides that the kernels can follow: positive ones, with the channels of a head contiguous.
fn strides(x: &FlexTensor, op: &RotaryOp) -> Option<HeadsLayout> {
    let strides = x.layout().strides().iter();
    let strides: Option<Vec<usize>> = strides.map(|s| usize::try_from(*s).ok()).collect();
    HeadsLayout::strided(op.layout, x.layout().shape().as_slice(), &strides?).ok()
}

fn rotate<E: Shared, const N: usize>(
    x: [FlexTensor; N],
    angles: &FlexTensor,
    op: RotaryOp,
) -> Result<[FlexTensor; N]> {
    let angles = angles.to_contiguous();
    let rotator = Rotator::new(op.geometry, Angles::Tokens(values::<E::Acc>(&angles)))?;
    let mut placed = x.map(|x| Placed::new(x, &op));
    let mut operands = placed.iter_mut().map(|x| x.operand::<E>(&op));
    if let Some(first) = operands.next() {
        rotator.apply(op.direction, first?, operands.next().transpose()?)?;
    }
    drop(operands);
    Ok(placed.map(Placed::into_output))
}

/// Writes the gradients of the angles, whose sizes alone matter: they are linear in x and in its
/// gradient.
fn angle_gradients<E: Shared>(
    x: &FlexTensor,
    gradient: &FlexTensor,
    mut gradients: FlexTensor,
    op: RotaryOp,
) -> Result<FlexTensor> {
    let (x, gradient) = (x.to_contiguous(), gradient.to_contiguous());
    let layout = op.heads("x", x.layout().shape())?;
    Rotator::new(op.geometry, Angles::Tokens(&[]))?.angle_gradients(
        (
            HeadsRef::new(values::<E>(&x), layout)?,
            HeadsRef::new(values::<E>(&gradient), layout)?,
        ),
        None,
        gradients.storage_mut::<E::Acc>(),
    )?;
    Ok(gradients)
}

/// The elements of a contiguous tensor.
fn values<E: BurnElement + bytemuck::Pod>(x: &FlexTensor) -> &[E] {
    let start = x.layout().start_offset();
    &x.storage::<E>()[start..start + x.layout().num_elements()]
}
