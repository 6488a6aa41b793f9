//! Launches the norm of the heads with their rotation, and its backward.
#![allow(unsafe_code, reason = "launches the kernels with checked arguments")]

use rope_core::{HeadNorm, RopeError};

use super::args::KernelType;
use super::args::{NormArgs, NormTiling, TensorLayout};
use super::norm_tiling::plan_norm;
use super::rotator::{AngleRows, Heads, Operand, Rotator, Tensors};
use super::tiling::{Plan, Problem};
use crate::error::{AscendError, Result};
use crate::safe::DeviceMemory;

/// The weight of a norm: one f32 per channel of a head.
#[derive(Clone, Copy, Debug)]
pub struct ChannelWeights<'a> {
    /// The memory.
    pub memory: &'a DeviceMemory,
    /// Byte offset of the first weight.
    pub offset_bytes: usize,
    /// Number of weights.
    pub channels: usize,
}

/// q or k to normalise and rotate.
#[derive(Debug)]
pub struct NormTensor<'a> {
    /// The tensor.
    pub x: Operand<'a>,
    /// Its weight.
    pub weight: ChannelWeights<'a>,
}

/// RMSNorm of each head of q and k, with their rotation.
#[derive(Debug)]
pub struct NormRotation<'a> {
    /// Type of the elements of q and k.
    pub element: KernelType,
    /// The norm, with its order relative to the rotation.
    pub norm: HeadNorm,
    /// q.
    pub q: NormTensor<'a>,
    /// k, if any.
    pub k: Option<NormTensor<'a>>,
    /// Cosines and sines.
    pub angles: AngleRows<'a>,
}

/// The tensors that the backward of q or k reads and writes.
#[derive(Debug)]
pub struct NormBackwardTensor<'a> {
    /// The tensor before norm and rotation.
    pub x: Heads<&'a DeviceMemory>,
    /// The gradient of the result, replaced by that of x.
    pub gradient: Operand<'a>,
    /// The weight of the forward.
    pub weight: ChannelWeights<'a>,
}

impl NormBackwardTensor<'_> {
    /// x, the gradient of x, and that of the result.
    fn sides(&self) -> [Heads<&DeviceMemory>; 3] {
        let [gradient, result] = self.gradient.input_and_output();
        [self.x, result, gradient]
    }
}

/// A request for the backward of a [`NormRotation`].
#[derive(Debug)]
pub struct NormBackward<'a> {
    /// Type of the elements of q, k and their gradients.
    pub element: KernelType,
    /// The norm of the forward.
    pub norm: HeadNorm,
    /// q.
    pub q: NormBackwardTensor<'a>,
    /// k, if any.
    pub k: Option<NormBackwardTensor<'a>>,
    /// Cosines and sines.
    pub angles: AngleRows<'a>,
    /// Partial sums of the weights' gradients, f32 `[rows, tensors, head_dim]`, from the start of
    /// the memory. There must be room for [`Rotator::most_weight_sums`] rows.
    pub weight_sums: &'a mut DeviceMemory,
}

/// The type of an element of weights, sums and angles.
const F32_BYTES: usize = size_of::<f32>();

impl Rotator {
    /// Queues the norm and rotation of each head of q and k, each with a separate weight, in one
    /// launch.
    ///
    /// y = R (x * rstd * w) with rstd = 1 / sqrt(mean(x^2) + eps) over the whole head, or
    /// y = R x * rstd * w with the mean of (R x)^2; see [`NormOrder`](rope_core::NormOrder).
    ///
    /// # Numerics
    /// Computed in f32, with each operation rounded separately, and rounded once to the element
    /// type.
    ///
    /// # Errors
    /// Those of [`rotate`](Self::rotate); [`RopeError::NormWeight`] if a weight is not
    /// `[head_dim]`.
    pub fn norm_rotate(&self, request: NormRotation<'_>) -> Result<()> {
        const OP: &str = "norm and rotate";
        let NormRotation { q, k, angles, .. } = &request;
        let k_sides = k.as_ref().map(|k| k.x.input_and_output());
        let tensors = self.tensors(OP, request.element, q.x.input_and_output(), k_sides)?;
        let weights = [Some(&q.weight), k.as_ref().map(|k| &k.weight)];
        let weights = self.weights(OP, weights)?;
        let problem = self.problem(OP, &tensors, angles)?;
        let plan = plan_norm(&problem, None, &request.norm, self.kernels.machine())?;
        let [input, output] = tensors.addresses;
        self.launch_norm(
            &plan,
            NormArgs {
                input,
                output,
                gradient: [0; 2],
                weights,
                angles: angles.address(),
                map: 0,
                weight_sums: 0,
                tiling: plan.tiling,
            },
        )
    }

    /// The largest number of rows of sums written by
    /// [`norm_rotate_backward`](Self::norm_rotate_backward): one per vector core.
    pub fn most_weight_sums(&self) -> usize {
        self.kernels.machine().vector_cores as usize
    }

    /// Queues the backward of [`norm_rotate`](Self::norm_rotate): maps the gradients of the results
    /// to those of q and k in one pass over both. Returns the number of rows of sums written; their
    /// total is the gradients of the weights.
    ///
    /// # Numerics
    /// Computed in f32; the root of the mean is recomputed from x. The order of the sums depends on
    /// the shapes and the number of cores.
    ///
    /// # Errors
    /// As [`norm_rotate`](Self::norm_rotate); [`AscendError::InvalidArgument`] if the memory of the
    /// sums is too small.
    pub fn norm_rotate_backward(&self, request: NormBackward<'_>) -> Result<usize> {
        self.norm_rotate_backward_at(request, 0)
    }

    /// As [`norm_rotate_backward`](Self::norm_rotate_backward), with the sums at `offset_bytes` in
    /// their memory.
    pub(crate) fn norm_rotate_backward_at(
        &self,
        request: NormBackward<'_>,
        offset_bytes: usize,
    ) -> Result<usize> {
        const OP: &str = "backward of norm and rotation";
        let NormBackward { q, k, angles, .. } = &request;
        let (q_sides, k_sides) = (q.sides(), k.as_ref().map(NormBackwardTensor::sides));
        let tensors = self.tensors(OP, request.element, q_sides, k_sides)?;
        let weights = [Some(&q.weight), k.as_ref().map(|k| &k.weight)];
        let weights = self.weights(OP, weights)?;
        let problem = self.problem(OP, &tensors, angles)?;
        let [input, output, gradient] = tensors.addresses;
        let layouts: [TensorLayout; 2] = tensors.layouts[2];
        let machine = self.kernels.machine();
        let plan = plan_norm(&problem, Some(layouts), &request.norm, machine)?;
        let rows = plan.blocks as usize;
        let row_bytes = (1 + usize::from(k.is_some())) * self.geometry.head_dim() * F32_BYTES;
        let sums: &DeviceMemory = request.weight_sums;
        self.stream.owns(OP, sums)?;
        let held = sums.bytes().saturating_sub(offset_bytes);
        if rows * row_bytes > held {
            return Err(AscendError::argument(
                OP,
                "the sums of the weights' gradients",
                format!("at least {rows} rows of {row_bytes} bytes"),
                format!("{held} bytes"),
            ));
        }
        self.launch_norm(
            &plan,
            NormArgs {
                input,
                output,
                gradient,
                weights,
                angles: angles.address(),
                map: 0,
                weight_sums: sums.pointer() as u64 + offset_bytes as u64,
                tiling: plan.tiling,
            },
        )?;
        Ok(rows)
    }

    fn problem<const N: usize>(
        &self,
        operation: &'static str,
        tensors: &Tensors<N>,
        angles: &AngleRows<'_>,
    ) -> Result<Problem> {
        Ok(Problem {
            shared_over_batch: self.shared_over_batch(operation, tensors, angles)?,
            ..tensors.problem(self.channels)
        })
    }

    /// Addresses of the weights of q and k, checked.
    fn weights(
        &self,
        operation: &'static str,
        weights: [Option<&ChannelWeights<'_>>; 2],
    ) -> Result<[u64; 2]> {
        const NAMES: [&str; 2] = ["the weight of q's norm", "the weight of k's norm"];
        let expected = self.geometry.head_dim();
        let mut addresses = [0; 2];
        for ((weight, what), address) in weights.into_iter().zip(NAMES).zip(&mut addresses) {
            let Some(weight) = weight else { continue };
            self.stream.owns(operation, weight.memory)?;
            let found = weight.channels;
            if found != expected {
                return Err(RopeError::NormWeight {
                    what,
                    found,
                    expected,
                }
                .into());
            }
            let held = weight.memory.bytes();
            if held.saturating_sub(weight.offset_bytes) < expected * F32_BYTES {
                return Err(AscendError::argument(
                    operation,
                    what,
                    format!("within its memory of {held} bytes"),
                    format!("{expected} numbers of f32 from {}", weight.offset_bytes),
                ));
            }
            *address = weight.memory.pointer() as u64 + weight.offset_bytes as u64;
        }
        Ok(addresses)
    }

    fn launch_norm(&self, plan: &Plan<NormTiling>, args: NormArgs) -> Result<()> {
        let map = self.kept(&plan.map)?;
        // SAFETY: `NormArgs` is `repr(C)`: eleven eight-byte addresses and a tiling of 648 bytes
        // whose fields leave no gap, and mirrors the kernel's parameters (asserted in args.rs and
        // rope_tiling.h). The addresses are those of memory of this stream, checked to hold their
        // tensors, weights, angles and sums.
        unsafe { self.queue(&plan.kernel, plan.blocks, NormArgs { map, ..args }) }
    }
}
