//! The operations on tensors in host memory.
#![allow(
    unsafe_code,
    reason = "views of memory that PyTorch owns; each states what makes it sound"
)]

use half::{bf16, f16};
use pyo3::prelude::*;
use rope_core::{
    Angles, Direction, Element, Geometry, HeadNorm, InstructionSet, Layout, NormGradient,
    NormInput, NormOrder, Rotator,
};

use crate::error::{Error, Result};
use crate::pool::{parallelism, with_threads};
use crate::spec;
use crate::tensor::{self, Computed, Tensor, check_apart};

/// The part of a call that does not depend on its tensors.
struct Call {
    geometry: Geometry,
    layout: Layout,
    threads: usize,
}

impl Call {
    fn new(geometry: &str, layout: &str, threads: usize) -> Result<Self> {
        Ok(Self {
            geometry: spec::geometry(geometry)?,
            layout: tensor::layout(layout)?,
            threads,
        })
    }

    fn rotator<'a, A: Computed>(&self, angles: Angles<'a, A>) -> Result<Rotator<'a, A>> {
        let rotator = Rotator::new(self.geometry, angles)?;
        Ok(rotator.with_parallelism(parallelism(self.threads)))
    }
}

/// The instructions that the kernels use here.
#[pyfunction]
pub(crate) fn instruction_set() -> &'static str {
    InstructionSet::best().name()
}

/// Calls a function for the element type of a tensor.
macro_rules! for_element {
    ($dtype:expr, $function:ident ( $($argument:expr),* )) => {
        match $dtype {
            "f32" => $function::<f32>($($argument),*),
            "f64" => $function::<f64>($($argument),*),
            "f16" => $function::<f16>($($argument),*),
            "bf16" => $function::<bf16>($($argument),*),
            found => Err(Error::Dtype {
                what: "q",
                found: found.to_owned(),
                expected: "f32, f64, f16 or bf16",
            }),
        }
    };
}

/// The rows of angles, `[tokens, 2 * lanes]` or `[tokens, heads, 2 * lanes]`.
///
/// # Safety
/// As [`Tensor`]; not written for 'a.
unsafe fn angles<'a, A: Computed>(tensor: &Tensor) -> Result<Angles<'a, A>> {
    const WHAT: &str = "the angles";
    // SAFETY: the caller's.
    let rows = unsafe { tensor.values::<A>(WHAT) }?;
    match tensor.shape[..] {
        [_, _] => Ok(Angles::Tokens(rows)),
        [_, heads, _] => Ok(Angles::Heads { rows, heads }),
        _ => Err(Error::Shape {
            what: WHAT,
            shape: tensor.shape.clone(),
            expected: "[tokens, 2 * lanes], or [tokens, heads, 2 * lanes]",
        }),
    }
}

/// Input and result; one tensor twice in place.
pub(crate) type Pair = (Tensor, Tensor);

/// Rotates q, and k with it.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "an operator's")]
pub(crate) fn rotate(
    py: Python<'_>,
    q: Pair,
    k: Option<Pair>,
    angles: Tensor,
    geometry: &str,
    layout: &str,
    adjoint: bool,
    threads: usize,
) -> PyResult<()> {
    let call = Call::new(geometry, layout, threads)?;
    py.detach(|| {
        let dtype = q.0.dtype.clone();
        for_element!(
            &dtype[..],
            rotate_as(&call, &q, k.as_ref(), &angles, adjoint)
        )
    })?;
    Ok(())
}

fn rotate_as<E: Element<Acc: Computed>>(
    call: &Call,
    q: &Pair,
    k: Option<&Pair>,
    angles: &Tensor,
    adjoint: bool,
) -> Result<()> {
    if let Some((k, to)) = k
        && k.address == to.address
    {
        check_apart_as::<E>(&q.0, k, call.layout)?;
    }
    let direction = if adjoint {
        Direction::Adjoint
    } else {
        Direction::Forward
    };
    // SAFETY: tensors of the caller (`Tensor`). Results are made for this call, or replace their
    // inputs, which do not meet (`check_apart`).
    let (angles, q, k) = unsafe {
        let k = k.map(|(from, to)| from.operand::<E>(to, "k", call.layout));
        (
            self::angles(angles)?,
            q.0.operand::<E>(&q.1, "q", call.layout)?,
            k.transpose()?,
        )
    };
    let rotator = call.rotator(angles)?;
    with_threads(|| rotator.apply(direction, q, k))?;
    Ok(())
}

/// Refuses q and k that may share elements.
#[pyfunction]
#[pyo3(name = "check_apart")]
pub(crate) fn check_apart_for_python(q: Tensor, k: Tensor, layout: &str) -> PyResult<()> {
    let layout = tensor::layout(layout)?;
    for_element!(&q.dtype[..], check_apart_as(&q, &k, layout))?;
    Ok(())
}

fn check_apart_as<E: Element>(q: &Tensor, k: &Tensor, layout: Layout) -> Result<()> {
    k.expect_dtype("k", E::NAME)?;
    check_apart(q, k, layout, size_of::<E>())
}

/// Writes the gradient of the angles to `out`, of their shape. `q` and `k` are the tensor before
/// the rotation and the gradient of its result.
#[pyfunction]
pub(crate) fn angle_gradients(
    py: Python<'_>,
    q: Pair,
    k: Option<Pair>,
    out: Tensor,
    geometry: &str,
    layout: &str,
    threads: usize,
) -> PyResult<()> {
    let call = Call::new(geometry, layout, threads)?;
    py.detach(|| {
        let dtype = q.0.dtype.clone();
        for_element!(&dtype[..], angle_gradients_as(&call, &q, k.as_ref(), &out))
    })?;
    Ok(())
}

fn angle_gradients_as<E: Element<Acc: Computed>>(
    call: &Call,
    q: &Pair,
    k: Option<&Pair>,
    out: &Tensor,
) -> Result<()> {
    // SAFETY: tensors of the caller (`Tensor`); `out` is made for this call.
    let read = |(x, gradient): &Pair, what| unsafe {
        let x = x.read::<E>(what, call.layout)?;
        Ok::<_, Error>((x, gradient.read::<E>("its gradient", call.layout)?))
    };
    let (q, k) = (read(q, "q")?, k.map(|k| read(k, "k")).transpose()?);
    // SAFETY: as above.
    let to = unsafe { out.values_mut::<E::Acc>("the gradient of the angles") }?;
    let heads = match out.shape[..] {
        [_, heads, _] => Some(heads),
        _ => None,
    };
    // Their rows are not read.
    let angles = heads.map_or(Angles::Tokens(&[]), |heads| Angles::Heads {
        rows: &[],
        heads,
    });
    let rotator = call.rotator(angles)?;
    with_threads(|| rotator.angle_gradients(q, k, to))?;
    Ok(())
}

/// `(eps, unit_offset, after)`: see [`HeadNorm`]; `after` says that it follows the rotation.
pub(crate) type Norm = (f64, bool, bool);

pub(crate) fn head_norm((eps, unit_offset, after): Norm) -> Result<HeadNorm> {
    let order = if after {
        NormOrder::AfterRotation
    } else {
        NormOrder::BeforeRotation
    };
    let norm = HeadNorm::new(eps)?.with_unit_offset(unit_offset);
    Ok(norm.with_order(order))
}

macro_rules! norm_operators {
    ($($(#[$about:meta])* $name:ident($operand:ty): $typed:ident;)*) => {$(
        $(#[$about])*
        #[pyfunction]
        #[expect(clippy::too_many_arguments, reason = "an operator's")]
        pub(crate) fn $name(
            py: Python<'_>,
            q: $operand,
            k: Option<$operand>,
            angles: Tensor,
            norm: Norm,
            geometry: &str,
            layout: &str,
            threads: usize,
        ) -> PyResult<()> {
            let (call, norm) = (Call::new(geometry, layout, threads)?, head_norm(norm)?);
            py.detach(|| {
                let dtype = q.0.dtype.clone();
                for_element!(&dtype[..], $typed(&call, &norm, &q, k.as_ref(), &angles))
            })?;
            Ok(())
        }
    )*};
}

norm_operators! {
    /// Normalises each head of q, and of k, and rotates it.
    norm_rotate(NormPair): norm_rotate_as;
    /// The backward of [`norm_rotate`].
    norm_rotate_backward(NormGradients): norm_rotate_backward_as;
}

/// Input, result and weight.
pub(crate) type NormPair = (Tensor, Tensor, Option<Tensor>);

fn norm_rotate_as<E: Element<Acc: Computed>>(
    call: &Call,
    norm: &HeadNorm,
    q: &NormPair,
    k: Option<&NormPair>,
    angles: &Tensor,
) -> Result<()> {
    // SAFETY: tensors of the caller (`Tensor`); results are made for this call.
    let input = |(x, y, weight): &NormPair, what| unsafe {
        let weight = weight.as_ref().map(|weight| weight.values("the weight"));
        Ok::<_, Error>(NormInput::<E> {
            x: x.operand(y, what, call.layout)?,
            weight: weight.transpose()?,
        })
    };
    let (q, k) = (input(q, "q")?, k.map(|k| input(k, "k")).transpose()?);
    // SAFETY: as above.
    let rotator = call.rotator(unsafe { self::angles(angles) }?)?;
    with_threads(|| rotator.norm_rotate(norm, q, k))?;
    Ok(())
}

/// Input, gradient of the result, gradient of the input, weight and the gradient of the weight.
pub(crate) type NormGradients = (Tensor, Tensor, Tensor, Option<Tensor>, Option<Tensor>);

fn norm_rotate_backward_as<E: Element<Acc: Computed>>(
    call: &Call,
    norm: &HeadNorm,
    q: &NormGradients,
    k: Option<&NormGradients>,
    angles: &Tensor,
) -> Result<()> {
    // SAFETY: tensors of the caller (`Tensor`); gradients of x and weight are made for this call.
    let gradient = |(x, dy, dx, weight, dweight): &NormGradients, what| unsafe {
        let weight = weight.as_ref().map(|weight| weight.values("the weight"));
        let to = dweight.as_ref();
        let to = to.map(|to| to.values_mut("the gradient of the weight"));
        Ok::<_, Error>(NormGradient::<E> {
            x: x.read(what, call.layout)?,
            weight: weight.transpose()?,
            gradient: dy.operand(dx, what, call.layout)?,
            weight_gradient: to.transpose()?,
        })
    };
    let (q, k) = (gradient(q, "q")?, k.map(|k| gradient(k, "k")).transpose()?);
    // SAFETY: as above.
    let rotator = call.rotator(unsafe { self::angles(angles) }?)?;
    with_threads(|| rotator.norm_rotate_backward(norm, q, k))?;
    Ok(())
}
