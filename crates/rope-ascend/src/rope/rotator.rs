//! Running rotations.
#![allow(unsafe_code, reason = "launches the kernels with checked arguments")]

use super::args::{AngleGradArgs, RotateArgs, TensorLayout};
use super::kernels::Kernels;
use super::rotary::{Direction, Rotary};
use super::tiling::{AngleSource, Plan, Problem, plan_angle_gradient, plan_rotation};
use super::view::View;
use crate::error::{AscendError, Result};
use crate::safe::{DeviceBuffer, Element, Stream};
use half::{bf16, f16};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Element types that the kernels take, named at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelType {
    /// 32 bits.
    F32,
    /// IEEE 754 half precision.
    F16,
    /// The upper half of 32 bits.
    Bf16,
}

impl KernelType {
    /// Name in the kernels' entry points.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Bytes of an element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// Element types that the kernels take.
pub trait KernelElement: Element {
    /// The type.
    const TYPE: KernelType;
    /// Name in the kernels' entry points.
    const NAME: &'static str = Self::TYPE.name();
}

macro_rules! kernel_elements {
    ($($element:ty: $type:ident),*) => { $(
        impl KernelElement for $element {
            const TYPE: KernelType = KernelType::$type;
        }
    )* };
}

kernel_elements!(f32: F32, f16: F16, bf16: Bf16);

/// Cosines and sines for every position: `[rows, 2, width]`, f32.
#[derive(Debug)]
pub struct Table {
    values: DeviceBuffer<f32>,
    rows: u64,
    width: u32,
}

impl Table {
    /// Uploads `cos` and `sin`, each `[rows, width]`.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] if their lengths differ or are no multiple of `width`;
    /// else the runtime's.
    pub fn new(stream: &Stream, cos: &[f32], sin: &[f32], width: u32) -> Result<Self> {
        Ok(Self {
            values: stream.upload(&rows_of(cos, sin, width)?)?,
            rows: cos.len() as u64 / u64::from(width),
            width,
        })
    }

    /// Number of positions.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The values on the device, `[rows, 2, width]`.
    #[must_use]
    pub fn values(&self) -> &DeviceBuffer<f32> {
        &self.values
    }
}

/// Joins cosines and sines to rows of both.
fn rows_of(cos: &[f32], sin: &[f32], width: u32) -> Result<Vec<f32>> {
    let wide = width as usize;
    if wide == 0 || cos.is_empty() || !cos.len().is_multiple_of(wide) || cos.len() != sin.len() {
        let expected = format!("cos and sin of equal length, whole rows of {width}");
        return Err(AscendError::argument(
            "angles",
            "cos, sin",
            expected,
            format!("{} and {}", cos.len(), sin.len()),
        ));
    }
    Ok(cos
        .chunks(wide)
        .zip(sin.chunks(wide))
        .flat_map(|(cos, sin)| [cos, sin])
        .flatten()
        .copied()
        .collect())
}

/// Position ids `[axes, rows]`, checked when they were uploaded.
#[derive(Debug)]
pub struct Positions {
    ids: DeviceBuffer<i32>,
    axes: u32,
    rows: u64,
    largest: i32,
}

impl Positions {
    /// Uploads `ids`, `axes` rows one after the other.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] for a negative id or an incomplete row; else the
    /// runtime's.
    pub fn new(stream: &Stream, ids: &[i32], axes: u32) -> Result<Self> {
        const OP: &str = "positions";
        if axes == 0 || ids.is_empty() || !ids.len().is_multiple_of(axes as usize) {
            return Err(AscendError::argument(
                OP,
                "ids",
                format!("{axes} equal rows"),
                ids.len(),
            ));
        }
        if let Some(negative) = ids.iter().find(|&&id| id < 0) {
            return Err(AscendError::argument(OP, "id", "at least 0", negative));
        }
        let largest = ids.iter().copied().max().unwrap_or(0);
        Ok(Self {
            ids: stream.upload(ids)?,
            axes,
            rows: ids.len() as u64 / u64::from(axes),
            largest,
        })
    }
}

/// Where cosines and sines come from.
#[derive(Clone, Copy, Debug)]
pub enum Angles<'a> {
    /// `[tokens, 2, angle_width]`: each token's cosines, then its sines. Tokens in the order
    /// batch, place; with as many rows as one batch has tokens, all batches share them.
    PerToken(&'a DeviceBuffer<f32>),
    /// As [`PerToken`](Self::PerToken), somewhere in a buffer of bytes.
    Rows {
        /// Where they lie.
        buffer: &'a DeviceBuffer<u8>,
        /// Bytes before the first row.
        offset_bytes: u64,
        /// Tokens.
        rows: u64,
    },
    /// Gathered in the kernel: each token's positions select rows of the table, the rotary's lane
    /// map picks from them. Positions may be shared by all batches, too.
    Table(&'a Table, &'a Positions),
}

/// q or k.
#[derive(Debug)]
pub enum Operand<'a, T: Element> {
    /// Rotated where it lies.
    InPlace(&'a mut DeviceBuffer<T>, View),
    /// Read from one buffer, written to another; channels that are not rotated are copied.
    Into {
        /// What is rotated.
        from: &'a DeviceBuffer<T>,
        /// Its layout.
        from_view: View,
        /// Where it goes.
        to: &'a mut DeviceBuffer<T>,
        /// Its layout.
        to_view: View,
    },
}

impl<T: Element> Operand<'_, T> {
    fn source(&self) -> (&DeviceBuffer<T>, View) {
        match self {
            Self::InPlace(buffer, view) => (buffer, *view),
            Self::Into {
                from, from_view, ..
            } => (from, *from_view),
        }
    }

    fn target(&self) -> (&DeviceBuffer<T>, View) {
        match self {
            Self::InPlace(buffer, view) => (buffer, *view),
            Self::Into { to, to_view, .. } => (to, *to_view),
        }
    }

    fn in_place(&self) -> bool {
        matches!(self, Self::InPlace(..))
    }
}

/// One rotation of q and k.
#[derive(Debug)]
pub struct Rotation<'a, T: Element> {
    /// Forward or adjoint.
    pub direction: Direction,
    /// Batches.
    pub batch: u32,
    /// Tokens of a batch.
    pub seq: u32,
    /// q.
    pub q: Operand<'a, T>,
    /// k, if there is one.
    pub k: Option<Operand<'a, T>>,
    /// Cosines and sines.
    pub angles: Angles<'a>,
}

/// A request for the gradient of the angles.
#[derive(Debug)]
pub struct AngleGradient<'a, T: Element> {
    /// Batches.
    pub batch: u32,
    /// Tokens of a batch.
    pub seq: u32,
    /// q before the rotation, and its layout.
    pub q: (&'a DeviceBuffer<T>, View),
    /// k before the rotation.
    pub k: Option<(&'a DeviceBuffer<T>, View)>,
    /// Gradient of the rotated q.
    pub q_grad: (&'a DeviceBuffer<T>, View),
    /// Gradient of the rotated k.
    pub k_grad: Option<(&'a DeviceBuffer<T>, View)>,
}

/// Runs rotations of one kind on one stream.
///
/// Work is queued and runs later; its errors come out of the stream's next synchronisation.
#[derive(Debug)]
pub struct Rotator {
    rotary: Rotary,
    stream: Stream,
    kernels: Arc<Kernels>,
    // Lane maps stay on the device for the next launch; there are a few for each layout.
    maps: Mutex<HashMap<Vec<u32>, DeviceBuffer<u32>>>,
}

impl Rotator {
    /// A rotator of `rotary` on `stream`.
    #[must_use]
    pub fn new(stream: &Stream, kernels: Arc<Kernels>, rotary: Rotary) -> Self {
        Self {
            rotary,
            stream: stream.clone(),
            kernels,
            maps: Mutex::default(),
        }
    }

    /// What is rotated.
    #[must_use]
    pub fn rotary(&self) -> &Rotary {
        &self.rotary
    }

    /// The stream that the work is queued on.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Uploads angles for [`Angles::PerToken`] from `cos` and `sin`, each `[rows, angle_width]`.
    ///
    /// # Errors
    /// As [`Table::new`].
    pub fn upload_angles(&self, cos: &[f32], sin: &[f32]) -> Result<DeviceBuffer<f32>> {
        self.stream
            .upload(&rows_of(cos, sin, self.rotary.angle_width())?)
    }

    /// Queues a rotation of q and k: one launch for both.
    ///
    /// Products and sum are rounded in f32, the result once to the element type.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] for shapes that do not fit, with nothing queued; else the
    /// runtime's.
    pub fn rotate<T: KernelElement>(&self, rotation: &mut Rotation<'_, T>) -> Result<()> {
        self.rotate_as(T::TYPE, rotation)
    }

    /// As [`Self::rotate`], for q and k that lie in buffers of bytes; their views count elements of type `element`.
    ///
    /// # Errors
    /// As [`Self::rotate`].
    pub fn rotate_bytes(&self, element: KernelType, rotation: &mut Rotation<'_, u8>) -> Result<()> {
        self.rotate_as(element, rotation)
    }

    fn rotate_as<T: Element>(
        &self,
        element: KernelType,
        rotation: &mut Rotation<'_, T>,
    ) -> Result<()> {
        let plan = self.plan_as(element, rotation)?;
        let rotation = &*rotation;
        let (mut args, map) = (
            RotateArgs {
                tiling: plan.tiling,
                ..RotateArgs::default()
            },
            self.map(&plan)?,
        );
        args.map = map;
        (args.q, args.q_out) = addresses(element, &rotation.q);
        if let Some(k) = &rotation.k {
            (args.k, args.k_out) = addresses(element, k);
        }
        match rotation.angles {
            Angles::PerToken(angles) => args.angles = angles.pointer() as u64,
            Angles::Rows {
                buffer,
                offset_bytes,
                ..
            } => args.angles = buffer.pointer() as u64 + offset_bytes,
            Angles::Table(table, positions) => {
                args.angles = table.values.pointer() as u64;
                args.positions = positions.ids.pointer() as u64;
            }
        }
        self.launch(&plan, args)
    }

    /// The tiling of a rotation, without running it.
    ///
    /// # Errors
    /// As [`Self::rotate`].
    pub fn plan<T: KernelElement>(&self, rotation: &Rotation<'_, T>) -> Result<Plan> {
        self.plan_as(T::TYPE, rotation)
    }

    fn plan_as<T: Element>(&self, element: KernelType, rotation: &Rotation<'_, T>) -> Result<Plan> {
        const OP: &str = "rotate";
        let operands = [Some(&rotation.q), rotation.k.as_ref()];
        let in_place = rotation.q.in_place();
        if rotation
            .k
            .as_ref()
            .is_some_and(|k| k.in_place() != in_place)
        {
            return Err(AscendError::argument(
                OP,
                "k",
                "rotated in place exactly if q is",
                "the other",
            ));
        }
        let (mut heads, mut input, mut output) = (
            [0; 2],
            [TensorLayout::default(); 2],
            [TensorLayout::default(); 2],
        );
        for (i, operand) in operands.into_iter().enumerate() {
            let Some(operand) = operand else { continue };
            let (from, to) = (operand.source(), operand.target());
            heads[i] = from.1.heads;
            if to.1.heads != from.1.heads {
                return Err(AscendError::argument(
                    OP,
                    "output heads",
                    from.1.heads.to_string(),
                    to.1.heads,
                ));
            }
            let tokens = (rotation.batch, rotation.seq);
            input[i] = self.layout(OP, NAMES[i], element, tokens, from)?;
            output[i] = self.layout(OP, NAMES[i], element, tokens, to)?;
        }
        let tokens = u64::from(rotation.batch) * u64::from(rotation.seq);
        let (rows, angles) = match rotation.angles {
            Angles::PerToken(angles) => {
                self.stream.owns(OP, angles)?;
                let row = 2 * self.rotary.angle_width() as usize;
                if !angles.len().is_multiple_of(row) {
                    return Err(AscendError::argument(
                        OP,
                        "angles",
                        format!("rows of {row}"),
                        angles.len(),
                    ));
                }
                ((angles.len() / row) as u64, AngleSource::PerToken)
            }
            Angles::Rows {
                buffer,
                offset_bytes,
                rows,
            } => {
                self.stream.owns(OP, buffer)?;
                let row_bytes = 2 * u64::from(self.rotary.angle_width()) * size_of::<f32>() as u64;
                let end = rows.checked_mul(row_bytes);
                let end = end.and_then(|bytes| bytes.checked_add(offset_bytes));
                if end.is_none_or(|end| end > buffer.bytes() as u64) {
                    return Err(AscendError::argument(
                        OP,
                        "angles",
                        format!("within their buffer of {} bytes", buffer.bytes()),
                        format!("{rows} rows of {row_bytes} from {offset_bytes}"),
                    ));
                }
                (rows, AngleSource::PerToken)
            }
            Angles::Table(table, positions) => {
                self.stream.owns(OP, &table.values)?;
                self.stream.owns(OP, &positions.ids)?;
                self.check_table(table, positions)?;
                (positions.rows, AngleSource::Table { rows: table.rows })
            }
        };
        let shared_over_batch = rotation.batch > 1 && rows == u64::from(rotation.seq);
        if rows != tokens && !shared_over_batch {
            let expected = format!(
                "{tokens} rows, one for each token, or {} shared by all batches",
                rotation.seq
            );
            return Err(AscendError::argument(
                OP,
                "angles or positions",
                expected,
                rows,
            ));
        }
        let problem = Problem {
            rotary: &self.rotary,
            direction: rotation.direction,
            element_bytes: element.bytes() as u32,
            batch: rotation.batch,
            seq: rotation.seq,
            heads,
            input,
            output,
            in_place,
            angles,
            shared_over_batch,
        };
        plan_rotation(&problem, self.kernels.machine(), element.name())
    }

    /// Queues the gradient of the angles, `[tokens, 2, angle_width]` as [`Angles::PerToken`] wants
    /// them, summed over the heads of q and k. The sums have a fixed order.
    ///
    /// # Errors
    /// As [`Self::rotate`].
    pub fn angle_gradient<T: KernelElement>(
        &self,
        request: &AngleGradient<'_, T>,
    ) -> Result<DeviceBuffer<f32>> {
        let plan = self.plan_angle_gradient(T::TYPE, request)?;
        let rows = request.batch as usize * request.seq as usize;
        let out = self
            .stream
            .alloc(rows * 2 * self.rotary.angle_width() as usize)?;
        self.launch_angle_gradient(T::TYPE, request, &plan, &out)?;
        Ok(out)
    }

    /// As [`Self::angle_gradient`], for tensors that lie in buffers of bytes; their views count elements of type `element`.
    /// The f32 of the result are bytes, too.
    ///
    /// # Errors
    /// As [`Self::rotate`].
    pub fn angle_gradient_bytes(
        &self,
        element: KernelType,
        request: &AngleGradient<'_, u8>,
    ) -> Result<DeviceBuffer<u8>> {
        let plan = self.plan_angle_gradient(element, request)?;
        let rows = request.batch as usize * request.seq as usize;
        let values = rows * 2 * self.rotary.angle_width() as usize;
        let out = self.stream.alloc(values * size_of::<f32>())?;
        self.launch_angle_gradient(element, request, &plan, &out)?;
        Ok(out)
    }

    fn plan_angle_gradient<T: Element>(
        &self,
        element: KernelType,
        request: &AngleGradient<'_, T>,
    ) -> Result<Plan> {
        const OP: &str = "angle gradient";
        let (batch, seq) = (request.batch, request.seq);
        if request.k.is_some() != request.k_grad.is_some() {
            return Err(AscendError::argument(
                OP,
                "k_grad",
                "given exactly if k is",
                "one of them",
            ));
        }
        let mut problem = Problem {
            rotary: &self.rotary,
            direction: Direction::Forward,
            element_bytes: element.bytes() as u32,
            batch,
            seq,
            heads: [0; 2],
            input: [TensorLayout::default(); 2],
            output: [TensorLayout::default(); 2],
            in_place: false,
            angles: AngleSource::PerToken,
            shared_over_batch: false,
        };
        let pairs = [
            Some((request.q, request.q_grad)),
            request.k.zip(request.k_grad),
        ];
        for (i, pair) in pairs.into_iter().enumerate() {
            let Some((x, grad)) = pair else { continue };
            if x.1.heads != grad.1.heads {
                return Err(AscendError::argument(
                    OP,
                    "heads of the gradient",
                    x.1.heads.to_string(),
                    grad.1.heads,
                ));
            }
            problem.heads[i] = x.1.heads;
            problem.input[i] = self.layout(OP, NAMES[i], element, (batch, seq), x)?;
            problem.output[i] = self.layout(OP, NAMES[i], element, (batch, seq), grad)?;
        }
        if batch == 0 || seq == 0 {
            return Err(AscendError::argument(OP, "tokens", "at least one", 0));
        }
        plan_angle_gradient(&problem, self.kernels.machine(), element.name())
    }

    fn launch_angle_gradient<T: Element, O: Element>(
        &self,
        element: KernelType,
        request: &AngleGradient<'_, T>,
        plan: &Plan,
        out: &DeviceBuffer<O>,
    ) -> Result<()> {
        let address = |(buffer, view): (&DeviceBuffer<T>, View)| address(element, buffer, view);
        let args = AngleGradArgs {
            q: address(request.q),
            k: request.k.map_or(0, address),
            q_grad: address(request.q_grad),
            k_grad: request.k_grad.map_or(0, address),
            angle_grad: out.pointer() as u64,
            map: self.map(plan)?,
            tiling: plan.tiling,
        };
        self.launch(plan, args)
    }

    fn layout<T: Element>(
        &self,
        operation: &'static str,
        argument: &'static str,
        element: KernelType,
        (batch, seq): (u32, u32),
        (buffer, view): (&DeviceBuffer<T>, View),
    ) -> Result<TensorLayout> {
        if batch == 0 || seq == 0 {
            return Err(AscendError::argument(
                operation,
                "tokens",
                "at least one",
                0,
            ));
        }
        self.stream.owns(operation, buffer)?;
        let elements = buffer.bytes() / element.bytes();
        view.check(argument, batch, seq, self.rotary.head_dim(), elements)
    }

    fn check_table(&self, table: &Table, positions: &Positions) -> Result<()> {
        const OP: &str = "rotate";
        let Some(lanes) = self.rotary.lanes() else {
            return Err(AscendError::argument(
                OP,
                "lane map",
                "given with the rotary, as angles come from a table",
                "none",
            ));
        };
        if lanes.width() != table.width {
            return Err(AscendError::argument(
                OP,
                "table",
                format!("{} columns", lanes.width()),
                table.width,
            ));
        }
        if lanes.axes() != positions.axes {
            return Err(AscendError::argument(
                OP,
                "positions",
                format!("{} axes", lanes.axes()),
                positions.axes,
            ));
        }
        if positions.largest as u64 >= table.rows {
            return Err(AscendError::argument(
                OP,
                "position",
                format!("below the table's {} rows", table.rows),
                positions.largest,
            ));
        }
        Ok(())
    }

    /// Device address of the plan's lane map.
    fn map(&self, plan: &Plan) -> Result<u64> {
        if plan.map.is_empty() {
            return Ok(0);
        }
        let mut maps = self.maps.lock().unwrap_or_else(PoisonError::into_inner);
        if !maps.contains_key(&plan.map) {
            maps.insert(plan.map.clone(), self.stream.upload(&plan.map)?);
        }
        Ok(maps
            .get(&plan.map)
            .map_or(0, |buffer| buffer.pointer() as u64))
    }

    fn launch<A: ArgumentBlock>(&self, plan: &Plan, mut args: A) -> Result<()> {
        let kernel = self.kernels.get(&plan.kernel)?;
        // SAFETY: `ArgumentBlock` has no padding, so all its bytes are initialised.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut((&raw mut args).cast::<u8>(), size_of::<A>()) };
        // SAFETY: `A` mirrors the kernel's parameters (asserted in args.rs and rope_tiling.h). The
        // addresses are those of buffers of this stream, checked to hold their views; dropped
        // buffers return to this stream's cache, so none is reused before the kernel is done. The
        // module lives until `Drop` has synchronised the stream.
        unsafe { kernel.launch(&self.stream, plan.blocks, bytes) }
    }
}

impl Drop for Rotator {
    fn drop(&mut self) {
        // The kernels may be unloaded next; queued launches must be done with them.
        self.stream.finish_quietly();
    }
}

const NAMES: [&str; 2] = ["q", "k"];

fn address<T: Element>(element: KernelType, buffer: &DeviceBuffer<T>, view: View) -> u64 {
    buffer.pointer() as u64 + view.offset * element.bytes() as u64
}

fn addresses<T: Element>(element: KernelType, operand: &Operand<'_, T>) -> (u64, u64) {
    let (from, to) = (operand.source(), operand.target());
    (
        address(element, from.0, from.1),
        address(element, to.0, to.1),
    )
}

/// An argument block of a kernel.
///
/// # Safety
/// - `repr(C)` without padding bytes, mirroring the kernel's parameters.
unsafe trait ArgumentBlock: Copy {}

// SAFETY: eight-byte addresses followed by a tiling of 424 bytes without gaps (asserted).
unsafe impl ArgumentBlock for RotateArgs {}
// SAFETY: as above.
unsafe impl ArgumentBlock for AngleGradArgs {}
