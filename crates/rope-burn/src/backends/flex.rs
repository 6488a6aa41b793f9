//! Flex, burn's CPU backend: rope-core's kernels on the tensors' own storage.
//!
//! A tensor that nobody else holds is rotated where it lies, whatever its strides. Anything else is read as it lies
//! and written to a new tensor: one pass either way.

use burn::backend::flex::{Flex, FlexTensor};
use burn::backend::{Element as BurnElement, tensor::FloatTensor};
use burn::tensor::DType;
use half::{bf16, f16};
use rope_core::{Angles, Element, HeadsLayout, HeadsMut, HeadsRef, Operand, Rotator};

use crate::error::{Result, RotaryError};
use crate::ops::{RotaryOp, RotaryOps};

/// Calls a function generic over the element type with the type that a dtype names.
macro_rules! for_dtype {
    ($dtype:expr, $function:ident($($argument:expr),*)) => {
        match $dtype {
            DType::F32 => $function::<f32>($($argument),*),
            DType::F16 => $function::<f16>($($argument),*),
            DType::BF16 => $function::<bf16>($($argument),*),
            DType::F64 => $function::<f64>($($argument),*),
            found => Err(RotaryError::UnsupportedDType { found }),
        }
    };
}

/// An element that both sides know.
trait Shared: Element<Acc: BurnElement + bytemuck::Pod> + BurnElement + bytemuck::Pod {}
impl<E: Element<Acc: BurnElement + bytemuck::Pod> + BurnElement + bytemuck::Pod> Shared for E {}

impl RotaryOps for Flex {
    fn rotary_pair(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        op: RotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let mut x = [Some(q), Some(k)];
        run(&mut x, cos, sin, op);
        let [q, k] = x.map(|x| x.expect("`run` leaves the tensors that it was given"));
        (q, k)
    }

    fn rotary_single(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        op: RotaryOp,
    ) -> FloatTensor<Self> {
        let mut x = [Some(x), None];
        run(&mut x, cos, sin, op);
        let [x, _] = x;
        x.expect("`run` leaves the tensors that it was given")
    }

    fn rotary_angle_gradients(
        x: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        op: RotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        // The adjoint's cos and sin are the forward's: <dy, R' g> = <R dy, g>, so x and gradient change places.
        let (x, gradient) = match op.direction {
            rope_core::Direction::Forward => (x, gradient),
            rope_core::Direction::Adjoint => (gradient, x),
        };
        or_panic(for_dtype!(x.dtype(), angle_gradients(x, gradient, cos, op)))
    }
}

/// burn's operations have no error path of their own; [`crate::Rotary`]'s `try_` twins check before they call.
fn or_panic<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

fn run(x: &mut [Option<FlexTensor>; 2], cos: FlexTensor, sin: FlexTensor, op: RotaryOp) {
    let (q, k) = (x[0].as_ref(), x[1].as_ref());
    let describe = |x: &FlexTensor| (x.layout().shape().clone(), x.dtype());
    let (q, k) = (
        describe(q.expect("the first tensor is always there")),
        k.map(describe),
    );
    let (cos_shape, sin_shape) = (describe(&cos), describe(&sin));
    or_panic(op.check(
        (&q.0, q.1),
        k.as_ref().map(|k| (&k.0, k.1)),
        (&cos_shape.0, cos_shape.1),
        (&sin_shape.0, sin_shape.1),
    ));
    or_panic(for_dtype!(q.1, rotate(x, cos, sin, op)));
}

/// A tensor as the kernels take it: how it lies, and the buffer to write if that is another.
struct Placed {
    source: FlexTensor,
    layout: HeadsLayout,
    target: Option<FlexTensor>,
}

impl Placed {
    fn new(x: FlexTensor, op: &RotaryOp) -> Result<Self> {
        let x = if strides(&x, op).is_some() {
            x
        } else {
            x.to_contiguous()
        };
        let contiguous = op.heads("x", x.layout().shape())?;
        let layout = strides(&x, op).unwrap_or(contiguous);
        let in_place = x.is_unique() && layout.is_injective();
        let target = (!in_place).then(|| FlexTensor::empty(x.layout().shape().clone(), x.dtype()));
        Ok(Self {
            source: x,
            layout,
            target,
        })
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

/// The strides of a view that the kernels can read as it lies: forward, with contiguous channels.
fn strides(x: &FlexTensor, op: &RotaryOp) -> Option<HeadsLayout> {
    let strides: Option<Vec<usize>> = x
        .layout()
        .strides()
        .iter()
        .map(|stride| usize::try_from(*stride).ok())
        .collect();
    HeadsLayout::strided(op.layout, x.layout().shape().as_slice(), &strides?).ok()
}

fn rotate<E: Shared>(
    x: &mut [Option<FlexTensor>; 2],
    cos: FlexTensor,
    sin: FlexTensor,
    op: RotaryOp,
) -> Result<()> {
    let (cos, sin) = (cos.to_contiguous(), sin.to_contiguous());
    let angles = Angles::Tokens {
        cos: values::<E::Acc>(&cos),
        sin: values::<E::Acc>(&sin),
    };
    let rotator = Rotator::new(op.geometry, angles)?;
    let mut placed = Vec::with_capacity(2);
    for x in x.iter_mut().filter_map(Option::take) {
        placed.push(Placed::new(x, &op)?);
    }
    let mut operands = placed.iter_mut().map(|x| x.operand::<E>(&op));
    if let Some(first) = operands.next() {
        rotator.apply(op.direction, first?, operands.next().transpose()?)?;
    }
    for (x, placed) in x.iter_mut().zip(placed) {
        *x = Some(placed.into_output());
    }
    Ok(())
}

fn angle_gradients<E: Shared>(
    x: FlexTensor,
    gradient: FlexTensor,
    cos: FlexTensor,
    op: RotaryOp,
) -> Result<(FlexTensor, FlexTensor)> {
    let (x, gradient, cos) = (
        x.to_contiguous(),
        gradient.to_contiguous(),
        cos.to_contiguous(),
    );
    let layout = op.heads("x", x.layout().shape())?;
    let [mut dcos, mut dsin] =
        [(); 2].map(|()| FlexTensor::empty(cos.layout().shape().clone(), cos.dtype()));
    // Only the sizes of the angles matter: the gradients are linear in x and in g.
    let angles = Angles::Tokens {
        cos: values::<E::Acc>(&cos),
        sin: values::<E::Acc>(&cos),
    };
    Rotator::new(op.geometry, angles)?.angle_gradients(
        (
            HeadsRef::new(values::<E>(&x), layout)?,
            HeadsRef::new(values::<E>(&gradient), layout)?,
        ),
        None,
        dcos.storage_mut::<E::Acc>(),
        dsin.storage_mut::<E::Acc>(),
    )?;
    Ok((dcos, dsin))
}

/// The elements of a contiguous tensor.
fn values<E: BurnElement + bytemuck::Pod>(x: &FlexTensor) -> &[E] {
    let start = x.layout().start_offset();
    &x.storage::<E>()[start..start + x.layout().num_elements()]
}
