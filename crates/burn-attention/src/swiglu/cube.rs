//! CubeCL's runtimes: one launch in each direction.

#![allow(
    unsafe_code,
    reason = "kernels trust the sizes that they are launched with"
)]

use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl;
use burn_cubecl::cubecl::ir::ElemType;
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_fused::cube::{address_type, cubes, empty_beside, types, vector_size};

use super::composed;
use super::op::SwiGluOps;

impl SwiGluOps for CubeBackend {
    fn swiglu_forward(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        let Some(types) = element_types(&gate) else {
            return composed::forward::<Self>(gate, up);
        };
        let elements = gate.meta.num_elements();
        let [gate, up] = [gate, up].map(into_contiguous);
        let out = empty_beside(&gate, gate.meta.shape().clone(), gate.dtype);
        let tensors = [&gate, &up, &out];
        let (n, address) = (vector_size(&tensors, elements), address_type(&tensors));
        let client = gate.client.clone();
        let (count, dim) = cubes(&client, elements / n);
        // SAFETY: all tensors are contiguous and have `elements` elements, in vectors of `n`.
        unsafe {
            forward::launch_unchecked(
                &client,
                count,
                dim,
                address,
                n,
                gate.into_buffer_arg(),
                up.into_buffer_arg(),
                out.clone().into_buffer_arg(),
                elements / n,
                types,
            );
        }
        out
    }

    fn swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let Some(types) = element_types(&gate) else {
            return composed::backward::<Self>(gate, up, gradient);
        };
        let elements = gate.meta.num_elements();
        let [gate, up, gradient] = [gate, up, gradient].map(into_contiguous);
        // Each gradient takes the memory of its tensor if nothing else holds that.
        let of = |x: &CubeTensor, read| {
            if x.can_mut() {
                return (x.clone(), BufferArg::alias(read, elements));
            }
            let out = empty_beside(x, x.meta.shape().clone(), x.dtype);
            (out.clone(), out.into_buffer_arg())
        };
        let ((dgate, dgate_arg), (dup, dup_arg)) = (of(&gate, 0), of(&up, 1));
        let tensors = [&gate, &up, &gradient, &dgate, &dup];
        let (n, address) = (vector_size(&tensors, elements), address_type(&tensors));
        let client = gate.client.clone();
        let (count, dim) = cubes(&client, elements / n);
        // SAFETY: as forward; only memory that nothing else holds is written, each vector by the unit
        // that has read it.
        unsafe {
            backward::launch_unchecked(
                &client,
                count,
                dim,
                address,
                n,
                gate.into_buffer_arg(),
                up.into_buffer_arg(),
                gradient.into_buffer_arg(),
                dgate_arg,
                dup_arg,
                elements / n,
                types,
            );
        }
        (dgate, dup)
    }
}

/// The types of the gate and of the computation, if the device has them and there are elements. Not
/// all runtimes have exponentials in f64.
fn element_types(gate: &CubeTensor) -> Option<[ElemType; 2]> {
    let has_elements = gate.meta.num_elements() > 0 && gate.dtype != DType::F64;
    types(&gate.client, gate.dtype).filter(|_| has_elements)
}

#[cube]
fn sigmoid<A: Float, N: Size>(x: Vector<A, N>) -> Vector<A, N> {
    let one = Vector::<A, N>::new(A::new(1.0));
    one / (one + (Vector::<A, N>::zeroed() - x).exp())
}

/// silu(gate) up
#[cube(launch_unchecked, address_type = "dynamic")]
fn forward<E: Numeric, A: Float, N: Size>(
    gate: &[Vector<E, N>],
    up: &[Vector<E, N>],
    out: &mut [Vector<E, N>],
    units: usize,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let at = ABSOLUTE_POS;
    if at >= units {
        terminate!();
    }
    let gate = Vector::<A, N>::cast_from(gate[at]);
    let silu = gate * sigmoid::<A, N>(gate);
    out[at] = Vector::cast_from(silu * Vector::<A, N>::cast_from(up[at]));
}

/// As the composed backward: the slope comes before up.
#[cube(launch_unchecked, address_type = "dynamic")]
fn backward<E: Numeric, A: Float, N: Size>(
    gate: &[Vector<E, N>],
    up: &[Vector<E, N>],
    gradient: &[Vector<E, N>],
    dgate: &mut [Vector<E, N>],
    dup: &mut [Vector<E, N>],
    units: usize,
    #[define(E, A)] _types: [ElemType; 2],
) {
    let at = ABSOLUTE_POS;
    if at >= units {
        terminate!();
    }
    let gate = Vector::<A, N>::cast_from(gate[at]);
    let up = Vector::<A, N>::cast_from(up[at]);
    let gradient = Vector::<A, N>::cast_from(gradient[at]);
    let one = Vector::<A, N>::new(A::new(1.0));
    let s = sigmoid::<A, N>(gate);
    let silu = gate * s;
    let slope = s + silu * (one - s);
    dgate[at] = Vector::cast_from(gradient * slope * up);
    dup[at] = Vector::cast_from(gradient * silu);
}
