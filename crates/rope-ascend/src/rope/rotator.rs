//! Runs rotations.
#![allow(unsafe_code, reason = "launches the kernels with checked arguments")]

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use rope_core::{Direction, Geometry, HeadsLayout, RopeError};

use super::args::{Args, ArgumentBlock, KernelType, MatrixArgs, TensorLayout};
use super::coefficients::Channels;
use super::kernels::Kernels;
use super::tiling::{MatrixPlan, Plan, Problem, plan_angle_gradient, plan_matrix, plan_rotation};
use crate::error::{AscendError, Result};
use crate::safe::{DeviceBuffer, DeviceMemory, Stream};

/// The cores that combine the members of pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Unit {
    /// The vector cores only.
    #[default]
    Vector,
    /// The cube cores, with a product with a signed permutation. Supported in f16 and bf16 on
    /// dav-2201; a non-finite channel makes its whole head NaN.
    Cube,
}

/// q, k or a gradient of one in device memory: `&DeviceMemory` to read, `&mut DeviceMemory` to
/// write.
#[derive(Clone, Copy, Debug)]
pub struct Heads<M> {
    /// The memory.
    pub memory: M,
    /// Element offset of the first element.
    pub offset: usize,
    /// Shape and strides.
    pub layout: HeadsLayout,
}

impl<M: Deref<Target = DeviceMemory>> Heads<M> {
    pub(super) fn to_read(&self) -> Heads<&DeviceMemory> {
        Heads {
            memory: &self.memory,
            offset: self.offset,
            layout: self.layout,
        }
    }
}

/// q or k of a rotation.
#[derive(Debug)]
pub enum Operand<'a> {
    /// Rotated in place.
    InPlace(Heads<&'a mut DeviceMemory>),
    /// Read from one tensor, written to another; channels that are not rotated are copied.
    Into {
        /// The tensor to rotate.
        from: Heads<&'a DeviceMemory>,
        /// The destination.
        to: Heads<&'a mut DeviceMemory>,
    },
}

impl Operand<'_> {
    fn is_in_place(&self) -> bool {
        matches!(self, Self::InPlace(_))
    }

    pub(super) fn input_and_output(&self) -> [Heads<&DeviceMemory>; 2] {
        match self {
            Self::InPlace(x) => [x.to_read(); 2],
            Self::Into { from, to } => [*from, to.to_read()],
        }
    }
}

/// Cosines and sines in f32, `[rows, 2, lanes]`: one row per token, in the order batch, token. If
/// the number of rows is the number of tokens of one batch, all batches share them.
#[derive(Clone, Copy, Debug)]
pub struct AngleRows<'a> {
    /// The memory.
    pub memory: &'a DeviceMemory,
    /// Byte offset of the first row.
    pub offset_bytes: usize,
    /// Number of rows.
    pub rows: usize,
}

impl AngleRows<'_> {
    pub(super) fn address(&self) -> u64 {
        self.memory.pointer() as u64 + self.offset_bytes as u64
    }
}

/// One rotation of q and k.
#[derive(Debug)]
pub struct Rotation<'a> {
    /// Type of the elements of q and k.
    pub element: KernelType,
    /// Forward or adjoint.
    pub direction: Direction,
    /// q.
    pub q: Operand<'a>,
    /// k, if there is one.
    pub k: Option<Operand<'a>>,
    /// Cosines and sines.
    pub angles: AngleRows<'a>,
}

/// A request for the gradient of the angles. Arrays of two are a tensor before the rotation, and
/// the gradient of the rotated tensor.
#[derive(Debug)]
pub struct AngleGradient<'a> {
    /// Type of the elements of q, k and their gradients.
    pub element: KernelType,
    /// q.
    pub q: [Heads<&'a DeviceMemory>; 2],
    /// k, if there is one.
    pub k: Option<[Heads<&'a DeviceMemory>; 2]>,
    /// The result in f32, `[batch * seq, 2, lanes]` as [`AngleRows`], from the start of the memory.
    pub out: &'a mut DeviceMemory,
}

/// Runs rotations of one geometry on one stream.
///
/// Work is queued and runs later; the stream's next synchronisation returns its errors.
#[derive(Debug)]
pub struct Rotator {
    pub(super) geometry: Geometry,
    pub(super) channels: Channels,
    pub(super) stream: Stream,
    pub(super) kernels: Arc<Kernels>,
    unit: Unit,
    // The kernels' maps and matrices stay on the device for the next launch; there are a few for
    // each layout.
    maps: Mutex<HashMap<Vec<u32>, DeviceBuffer<u32>>>,
}

impl Rotator {
    /// Creates a rotator of `geometry` on `stream`.
    ///
    /// # Errors
    /// [`AscendError::KernelLimit`] for heads of more than 1024 channels.
    pub fn new(stream: &Stream, kernels: Arc<Kernels>, geometry: Geometry) -> Result<Self> {
        Ok(Self {
            geometry,
            channels: Channels::new(geometry)?,
            stream: stream.clone(),
            kernels,
            unit: Unit::default(),
            maps: Mutex::default(),
        })
    }

    /// Sets the unit of the rotation. The gradient of the angles always runs on the vector cores.
    #[must_use]
    pub fn by(mut self, unit: Unit) -> Self {
        self.unit = unit;
        self
    }

    /// Queues a rotation of q and k in one launch.
    ///
    /// Products and sum are rounded in f32, the result once to the element type.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] and [`AscendError::Rope`] for inconsistent shapes;
    /// [`AscendError::KernelLimit`], [`AscendError::TileTooLarge`] and [`AscendError::CubeLimit`]
    /// beyond the limits of the kernels. In these cases, nothing is queued. Otherwise those of the
    /// runtime.
    pub fn rotate(&self, rotation: Rotation<'_>) -> Result<()> {
        const OP: &str = "rotate";
        let Rotation { q, k, angles, .. } = &rotation;
        let in_place = q.is_in_place();
        if k.as_ref().is_some_and(|k| k.is_in_place() != in_place) {
            return Err(AscendError::argument(
                OP,
                "k",
                "rotated in place exactly if q is",
                "the other",
            ));
        }
        let k = k.as_ref().map(Operand::input_and_output);
        let tensors = self.tensors(OP, rotation.element, q.input_and_output(), k)?;
        let problem = Problem {
            direction: rotation.direction,
            in_place,
            shared_over_batch: self.shared_over_batch(OP, &tensors, angles)?,
            ..tensors.problem(self.channels)
        };
        let (address, machine) = (angles.address(), self.kernels.machine());
        match self.unit {
            Unit::Vector => self.launch(&plan_rotation(&problem, machine)?, &tensors, address),
            Unit::Cube => self.launch_matrix(&plan_matrix(&problem, machine)?, &tensors, address),
        }
    }

    /// Queues the gradient of the angles, summed over the heads of q and k. The sums have a fixed
    /// order.
    ///
    /// # Errors
    /// As [`Self::rotate`].
    pub fn angle_gradient(&self, request: AngleGradient<'_>) -> Result<()> {
        self.angle_gradient_at(request, 0)
    }

    /// As [`angle_gradient`](Self::angle_gradient), with the result at `offset_bytes` in its
    /// memory.
    pub(crate) fn angle_gradient_at(
        &self,
        request: AngleGradient<'_>,
        offset_bytes: usize,
    ) -> Result<()> {
        const OP: &str = "angle gradient";
        let tensors = self.tensors(OP, request.element, request.q, request.k)?;
        let rows = tensors.batch as usize * tensors.seq as usize;
        let out = AngleRows {
            memory: request.out,
            offset_bytes,
            rows,
        };
        self.check_angles(OP, &out)?;
        let problem = tensors.problem(self.channels);
        let plan = plan_angle_gradient(&problem, self.kernels.machine())?;
        self.launch(&plan, &tensors, out.address())
    }

    /// True if all batches share the angles of the first; checks their number and their memory.
    pub(super) fn shared_over_batch<const N: usize>(
        &self,
        operation: &'static str,
        tensors: &Tensors<N>,
        angles: &AngleRows<'_>,
    ) -> Result<bool> {
        let (batch, seq) = (tensors.batch as usize, tensors.seq as usize);
        let shared = batch > 1 && angles.rows == seq;
        if angles.rows != batch * seq && !shared {
            let expected = format!(
                "{} rows, one for each token, or {seq} shared by all batches",
                batch * seq
            );
            return Err(AscendError::argument(
                operation,
                "angles",
                expected,
                angles.rows,
            ));
        }
        self.check_angles(operation, angles)?;
        Ok(shared)
    }

    /// Checks every tensor of a launch: this stream's, within its memory, each element once, with
    /// the geometry's channels and one batch and seq. Counts become 32 bits here.
    pub(super) fn tensors<const N: usize>(
        &self,
        operation: &'static str,
        element: KernelType,
        q: [Heads<&DeviceMemory>; N],
        k: Option<[Heads<&DeviceMemory>; N]>,
    ) -> Result<Tensors<N>> {
        let narrow = |what, n: usize| {
            u32::try_from(n).map_err(|_| AscendError::KernelLimit {
                what,
                limit: u32::MAX as usize,
                found: n,
            })
        };
        let mut tensors = Tensors {
            element,
            batch: narrow("batches", q[0].layout.batch)?,
            seq: narrow("tokens of a batch", q[0].layout.seq)?,
            heads: [0; 2],
            layouts: [[TensorLayout::default(); 2]; N],
            addresses: [[0; 2]; N],
        };
        for (i, (name, sides)) in [("q", Some(q)), ("k", k)].into_iter().enumerate() {
            let Some(sides) = sides else { continue };
            let x = sides[0].layout;
            x.check_same(&q[0].layout, name, "q", false)?;
            tensors.heads[i] = narrow("heads", x.heads)?;
            for (side, other) in sides.into_iter().enumerate() {
                x.check_same(&other.layout, name, "its output or gradient", true)?;
                let x = other;
                self.stream.owns(operation, x.memory)?;
                self.check(name, element, &x)?;
                tensors.layouts[side][i] = tensor_layout(&x.layout);
                let start = x.offset * element.bytes();
                tensors.addresses[side][i] = x.memory.pointer() as u64 + start as u64;
            }
        }
        let [q_heads, _] = tensors.heads;
        if [tensors.batch, tensors.seq, q_heads].contains(&0)
            || k.is_some_and(|k| k[0].layout.heads == 0)
        {
            let expected = "at least one batch, token and head";
            let found = format!("{:?}", q[0].layout);
            return Err(AscendError::argument(operation, "q and k", expected, found));
        }
        Ok(tensors)
    }

    fn check(
        &self,
        what: &'static str,
        element: KernelType,
        x: &Heads<&DeviceMemory>,
    ) -> Result<()> {
        let head_dim = self.geometry.head_dim();
        if x.layout.head_dim != head_dim {
            return Err(RopeError::ShapeMismatch {
                left: "the geometry",
                right: what,
                dimension: "head_dim",
                left_size: head_dim,
                right_size: x.layout.head_dim,
            }
            .into());
        }
        let held = x.memory.bytes() / element.bytes();
        x.layout.check_fits(what, held.saturating_sub(x.offset))?;
        if !x.layout.is_injective() {
            return Err(RopeError::Overlap { what }.into());
        }
        Ok(())
    }

    /// Checks that rows of angles lie within their memory.
    fn check_angles(&self, operation: &'static str, angles: &AngleRows<'_>) -> Result<()> {
        self.stream.owns(operation, angles.memory)?;
        let row_bytes = 2 * self.geometry.lane_count() * size_of::<f32>();
        let end = angles
            .rows
            .checked_mul(row_bytes)
            .and_then(|bytes| bytes.checked_add(angles.offset_bytes));
        let held = angles.memory.bytes();
        if end.is_none_or(|end| end > held) {
            return Err(AscendError::argument(
                operation,
                "angles",
                format!("within their memory of {held} bytes"),
                format!(
                    "{} rows of {row_bytes} from {}",
                    angles.rows, angles.offset_bytes
                ),
            ));
        }
        Ok(())
    }

    /// Device address of a map or matrix, which stays on the device; 0 of an empty one.
    pub(super) fn kept(&self, words: &[u32]) -> Result<u64> {
        if words.is_empty() {
            return Ok(0);
        }
        let mut maps = self.maps.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(map) = maps.get(words) {
            return Ok(map.pointer() as u64);
        }
        let map = self.stream.upload(words)?;
        let address = map.pointer() as u64;
        maps.insert(words.to_vec(), map);
        Ok(address)
    }

    fn launch_matrix(&self, plan: &MatrixPlan, tensors: &Tensors<2>, angles: u64) -> Result<()> {
        let [input, output] = tensors.addresses;
        // Back in the stream's pool when this returns, for work that comes after this launch.
        let workspace = self.stream.alloc::<u32>(plan.workspace_words)?;
        let args = MatrixArgs {
            input,
            output,
            angles,
            map: self.kept(&plan.plan.map)?,
            matrix: self.kept(&plan.matrix)?,
            workspace: workspace.pointer() as u64,
            tiling: plan.plan.tiling,
        };
        // SAFETY: `MatrixArgs` is `repr(C)`: eight eight-byte addresses and a tiling of 376 bytes
        // whose fields leave no gap, and mirrors the kernel's parameters (asserted in args.rs and
        // rope_tiling.h). The addresses are as in `launch`; the workspace holds what the plan asks
        // for.
        unsafe { self.queue(&plan.plan.kernel, plan.plan.blocks, args) }
    }

    fn launch(&self, plan: &Plan, tensors: &Tensors<2>, angles: u64) -> Result<()> {
        let [input, output] = tensors.addresses;
        let args = Args {
            input,
            output,
            angles,
            map: self.kept(&plan.map)?,
            tiling: plan.tiling,
        };
        // SAFETY: `Args` is `repr(C)`: six eight-byte addresses and a tiling of 376 bytes whose
        // fields leave no gap, and mirrors the kernel's parameters (asserted in args.rs and
        // rope_tiling.h). The addresses are those of memory of this stream, checked to hold their
        // tensors.
        unsafe { self.queue(&plan.kernel, plan.blocks, args) }
    }

    /// # Safety
    /// Those of [`Kernels::launch`].
    pub(super) unsafe fn queue<A: ArgumentBlock>(
        &self,
        kernel: &str,
        blocks: u32,
        args: A,
    ) -> Result<()> {
        // SAFETY: the caller guarantees the parameters. The module lives until `Drop` has
        // synchronised the stream.
        unsafe { self.kernels.launch(&self.stream, kernel, blocks, args) }
    }
}

impl Drop for Rotator {
    fn drop(&mut self) {
        // The kernels may be unloaded next; queued launches must be done with them.
        self.stream.finish_quietly();
    }
}

/// The checked tensors of a launch. The outer arrays are input, output and further tensors; the
/// inner arrays are q and k.
pub(super) struct Tensors<const N: usize> {
    element: KernelType,
    batch: u32,
    seq: u32,
    heads: [u32; 2],
    pub(super) layouts: [[TensorLayout; 2]; N],
    pub(super) addresses: [[u64; 2]; N],
}

impl<const N: usize> Tensors<N> {
    /// The problem of a forward launch out of place, each token with a row of angles.
    pub(super) fn problem(&self, channels: Channels) -> Problem {
        let [input, output] = [self.layouts[0], self.layouts[1]];
        Problem {
            channels,
            direction: Direction::Forward,
            element: self.element,
            batch: self.batch,
            seq: self.seq,
            heads: self.heads,
            input,
            output,
            in_place: false,
            shared_over_batch: false,
        }
    }
}

/// Strides and extent as the kernels take them: those of a tensor in memory fit 64 bits.
pub(super) fn tensor_layout(layout: &HeadsLayout) -> TensorLayout {
    TensorLayout {
        extent: layout.extent() as u64,
        batch_stride: layout.strides.batch as u64,
        token_stride: layout.strides.seq as u64,
        head_stride: layout.strides.head as u64,
    }
}
