//! Flex, burn's CPU backend: rope-core's kernels on the tensors' storage.
//!
//! A tensor that nothing else holds is rotated in place, whatever its strides. Any other is read by
//! its strides and written to a new tensor: one pass in both cases.

use burn::backend::flex::{Flex, FlexTensor};
use burn::backend::{Element as BurnElement, tensor::FloatTensor};
use burn_fused::{for_dtype, zeros};
use rope_core::{
    Angles, Direction, Element, HeadsLayout, HeadsMut, HeadsRef, Layout, Operand, Rotator,
};

use super::{RotaryOp, RotaryOps};
use crate::error::Result;
use crate::prepared::{HeadsTensor, PreparedTensor};

/// An element that both sides know.
pub(crate) trait Shared:
    Element<Acc: BurnElement + bytemuck::Pod> + BurnElement + bytemuck::Pod
{
}
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
pub(crate) fn or_panic<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

impl HeadsTensor for FlexTensor {
    /// The kernels can follow positive strides, with the channels of a head contiguous.
    fn heads_layout(&self, layout: Layout) -> Option<HeadsLayout> {
        let strides = self.layout().strides().iter();
        let strides: Option<Vec<usize>> = strides.map(|s| usize::try_from(*s).ok()).collect();
        HeadsLayout::strided(layout, self.layout().shape().as_slice(), &strides?).ok()
    }

    fn into_contiguous(self) -> Self {
        self.to_contiguous()
    }

    fn is_unique(&self) -> bool {
        self.is_unique()
    }

    fn empty_like(&self) -> Self {
        zeros(self.layout().shape().clone(), self.dtype())
    }
}

impl PreparedTensor<FlexTensor> {
    pub(crate) fn read<E: Shared>(&self) -> Result<HeadsRef<'_, E>> {
        let start = self.source.layout().start_offset();
        Ok(HeadsRef::new(
            &self.source.storage::<E>()[start..],
            self.from,
        )?)
    }

    pub(crate) fn operand<E: Shared>(&mut self) -> Result<Operand<'_, E>> {
        let start = self.source.layout().start_offset();
        match &mut self.target {
            None => {
                let data = self.source.storage_mut::<E>();
                Ok(HeadsMut::new(&mut data[start..], self.from)?.into())
            }
            Some((target, to)) => {
                let from = HeadsRef::new(&self.source.storage::<E>()[start..], self.from)?;
                Ok((from, HeadsMut::new(target.storage_mut::<E>(), *to)?).into())
            }
        }
    }
}

fn rotate<E: Shared, const N: usize>(
    x: [FlexTensor; N],
    angles: &FlexTensor,
    op: RotaryOp,
) -> Result<[FlexTensor; N]> {
    let angles = angles.to_contiguous();
    let rotator = Rotator::new(op.geometry, Angles::Tokens(values::<E::Acc>(&angles)))?;
    let mut prepared = x.map(|x| PreparedTensor::new(x, &op));
    let mut operands = prepared.iter_mut().map(|x| x.operand::<E>());
    if let Some(first) = operands.next() {
        rotator.apply(op.direction, first?, operands.next().transpose()?)?;
    }
    drop(operands);
    Ok(prepared.map(PreparedTensor::into_output))
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
pub(crate) fn values<E: BurnElement + bytemuck::Pod>(x: &FlexTensor) -> &[E] {
    let start = x.layout().start_offset();
    &x.storage::<E>()[start..start + x.layout().num_elements()]
}
