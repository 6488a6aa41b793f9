//! The implementations under test.

use burn::tensor::{Device, Tensor, TensorData};
use half::{bf16, f16};
use rope_burn::{Implementation, RotaryAngles, RotaryConfig};
use rope_core::{
    CosSinTable, Direction, Element, HeadsLayout, HeadsMut, HeadsRef, InstructionSet, Layout,
    Operand, Parallelism, Positions, Real, RopeError, RotarySpec, Rotator, TokenAngles,
};

use crate::buffer::{Buffer, DType};

/// One rotation to perform.
#[derive(Clone, Debug)]
pub struct Case {
    /// What to do.
    pub spec: RotarySpec,
    /// For which tokens; `batch * seq` of them, or `seq`.
    pub positions: Positions,
    /// The length that the frequencies are made for, where they depend on it.
    pub seq_len: Option<u64>,
    /// The order of the dimensions.
    pub layout: Layout,
    /// Samples.
    pub batch: usize,
    /// Tokens of a sample.
    pub seq: usize,
    /// Heads of q.
    pub heads: usize,
    /// Heads of k; 0 for no k.
    pub kv_heads: usize,
    /// Whether q and k lie in buffers with gaps between their rows.
    pub strided: bool,
    /// Whether q and k are overwritten.
    pub in_place: bool,
}

impl Case {
    /// A contiguous, out-of-place case in which q has two heads and k one.
    pub fn new(
        spec: RotarySpec,
        positions: Positions,
        layout: Layout,
        batch: usize,
        seq: usize,
    ) -> Self {
        let seq_len = None;
        Self {
            spec,
            positions,
            seq_len,
            layout,
            batch,
            seq,
            heads: 2,
            kv_heads: 1,
            strided: false,
            in_place: false,
        }
    }

    /// How q (or k, by its heads) lies in a contiguous buffer.
    pub fn contiguous(&self, heads: usize) -> HeadsLayout {
        HeadsLayout::contiguous(
            self.layout,
            self.batch,
            self.seq,
            heads,
            self.spec.head_dim(),
        )
    }

    /// Dimensions of a tensor with `heads` heads, in the layout's order.
    pub fn dims(&self, heads: usize) -> Vec<usize> {
        let (b, s, n, d) = (self.batch, self.seq, heads, self.spec.head_dim());
        match self.layout {
            Layout::Bsnd => vec![b, s, n, d],
            Layout::Bnsd => vec![b, n, s, d],
            Layout::Sbnd => vec![s, b, n, d],
            Layout::Tnd => vec![b * s, n, d],
        }
    }

    /// Where each head of each token starts in a contiguous buffer: `(token of the positions, first element)`.
    pub fn rows(&self, heads: usize) -> Vec<(usize, usize)> {
        let strides = self.contiguous(heads).strides;
        let mut rows = Vec::with_capacity(self.batch * self.seq * heads);
        for b in 0..self.batch {
            for s in 0..self.seq {
                let token = (b * self.seq + s) % self.positions.tokens().max(1);
                rows.extend((0..heads).map(|n| {
                    (
                        token,
                        b * strides.batch + s * strides.seq + n * strides.head,
                    )
                }));
            }
        }
        rows
    }
}

/// Why an engine did not run a case.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The engine has no path for this element type.
    #[error("{engine} has no {dtype:?}")]
    Unsupported {
        /// The engine's name.
        engine: String,
        /// The element type.
        dtype: DType,
    },
    /// The rotation was refused.
    #[error(transparent)]
    Rope(#[from] RopeError),
    /// burn refused, or lost, a tensor.
    #[error("burn: {0}")]
    Burn(String),
    /// The Ascend runtime, its operators or the kernels refused or failed.
    #[cfg(feature = "ascend")]
    #[error(transparent)]
    Ascend(#[from] rope_ascend::AscendError),
}

impl EngineError {
    /// The limit that kept the engine from running, where it is one that the engine is known to have: such a case is
    /// skipped, not failed.
    pub fn limit(&self) -> Option<String> {
        match self {
            Self::Unsupported { .. } => Some(self.to_string()),
            #[cfg(feature = "ascend")]
            Self::Ascend(rope_ascend::AscendError::OperatorLimit {
                operator,
                limit,
                found,
            }) => Some(format!("{operator} takes {limit}, found {found}")),
            _ => None,
        }
    }
}

/// Something that rotates host tensors. q and k are contiguous in the case's layout, whatever the engine makes of them.
pub trait Engine {
    /// The name in tables.
    fn name(&self) -> String;

    /// Whether there is a path for an element type.
    fn supports(&self, dtype: DType) -> bool;

    /// The type that cos and sin are rounded to for tensors of type `dtype`.
    fn angle_dtype(&self, dtype: DType) -> DType {
        if dtype == DType::F64 {
            DType::F64
        } else {
            DType::F32
        }
    }

    /// Rotates q and k (or applies the adjoint); k is absent where the case has no kv_heads.
    ///
    /// # Errors
    /// [`EngineError`].
    fn apply(
        &self,
        case: &Case,
        direction: Direction,
        q: &Buffer,
        k: Option<&Buffer>,
    ) -> Result<(Buffer, Option<Buffer>), EngineError>;
}

/// Every engine on this machine that needs no device.
pub fn host_engines() -> Vec<Box<dyn Engine>> {
    let mut engines: Vec<Box<dyn Engine>> = Vec::new();
    for instructions in InstructionSet::available() {
        for angles in [AngleSource::Tokens, AngleSource::Table] {
            engines.push(Box::new(Cpu {
                instructions,
                parallelism: Parallelism::SERIAL,
                angles,
            }));
        }
    }
    let parallelism = Parallelism::new(1, usize::MAX);
    let instructions = InstructionSet::best();
    engines.push(Box::new(Cpu {
        instructions,
        parallelism,
        angles: AngleSource::Tokens,
    }));
    engines.extend(burn_engines(&Device::flex()));
    engines
}

/// rope-burn on a device: fused, and composed.
pub fn burn_engines(device: &Device) -> impl Iterator<Item = Box<dyn Engine>> {
    [Implementation::Fused, Implementation::Composed]
        .into_iter()
        .map(|implementation| {
            let device = device.clone();
            Box::new(Burn {
                implementation,
                device,
            }) as Box<dyn Engine>
        })
}

/// Where the CPU kernels take their angles from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AngleSource {
    /// Rows per token.
    Tokens,
    /// A table, by position id. Positions beyond its budget go by rows.
    Table,
}

/// rope-core's kernels.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    /// Which instructions.
    pub instructions: InstructionSet,
    /// Over how many threads.
    pub parallelism: Parallelism,
    /// From which angles.
    pub angles: AngleSource,
}

impl Engine for Cpu {
    fn name(&self) -> String {
        let angles = if self.angles == AngleSource::Table {
            "/table"
        } else {
            ""
        };
        let threads = if self.parallelism == Parallelism::SERIAL {
            ""
        } else {
            "/threads"
        };
        format!("cpu/{}{angles}{threads}", self.instructions)
    }

    fn supports(&self, dtype: DType) -> bool {
        // f64 has one kernel, the portable one.
        dtype != DType::F64 || self.instructions == InstructionSet::PORTABLE
    }

    fn apply(
        &self,
        case: &Case,
        direction: Direction,
        q: &Buffer,
        k: Option<&Buffer>,
    ) -> Result<(Buffer, Option<Buffer>), EngineError> {
        match (q, k) {
            (Buffer::F64(q), k) => self.run(case, direction, q, as_f64(k), Buffer::F64),
            (Buffer::F32(q), k) => self.run(case, direction, q, as_f32(k), Buffer::F32),
            (Buffer::F16(q), k) => self.run(case, direction, q, as_f16(k), Buffer::F16),
            (Buffer::Bf16(q), k) => self.run(case, direction, q, as_bf16(k), Buffer::Bf16),
        }
    }
}

macro_rules! as_type {
    ($name:ident, $variant:ident, $type:ty) => {
        fn $name(buffer: Option<&Buffer>) -> Option<&[$type]> {
            match buffer {
                Some(Buffer::$variant(values)) => Some(values),
                _ => None,
            }
        }
    };
}
as_type!(as_f64, F64, f64);
as_type!(as_f32, F32, f32);
as_type!(as_f16, F16, f16);
as_type!(as_bf16, Bf16, bf16);

impl Cpu {
    fn run<E: Element>(
        &self,
        case: &Case,
        direction: Direction,
        q: &[E],
        k: Option<&[E]>,
        wrap: fn(Vec<E>) -> Buffer,
    ) -> Result<(Buffer, Option<Buffer>), EngineError> {
        let tokens;
        let mut table;
        let angles = match self.angles {
            AngleSource::Table if case.positions.highest() < 1 << 18 => {
                table = CosSinTable::<E::Acc>::new(&case.spec, case.seq_len)?;
                table.grow_to(case.positions.highest())?;
                rope_core::Angles::Table {
                    table: &table,
                    positions: &case.positions,
                }
            }
            _ => {
                tokens = TokenAngles::<E::Acc>::new(&case.spec, &case.positions, case.seq_len)?;
                tokens.angles()
            }
        };
        let rotator = Rotator::new(case.spec.geometry(), angles)?
            .with_instructions(self.instructions)
            .with_parallelism(self.parallelism);
        let mut placed_q = Placed::new(case, case.heads, q);
        let mut placed_k = k.map(|k| Placed::new(case, case.kv_heads, k));
        let k_operand = placed_k.as_mut().map(Placed::operand).transpose()?;
        rotator.apply(direction, placed_q.operand()?, k_operand)?;
        Ok((wrap(placed_q.result()), placed_k.map(|k| wrap(k.result()))))
    }
}

/// A tensor in the place that a case asks for: with gaps between its rows or without, with a destination or without.
pub(crate) struct Placed<E> {
    pub(crate) contiguous: HeadsLayout,
    pub(crate) layout: HeadsLayout,
    pub(crate) source: Vec<E>,
    pub(crate) target: Option<Vec<E>>,
}

impl<E: Element> Placed<E> {
    pub(crate) fn new(case: &Case, heads: usize, values: &[E]) -> Self {
        let contiguous = case.contiguous(heads);
        let mut layout = contiguous;
        if case.strided {
            // Rows one and a half times as long, so that a kernel that ignores strides lands in a gap.
            let stretch =
                |stride: usize| stride / case.spec.head_dim() * (case.spec.head_dim() * 3 / 2 + 1);
            layout.strides.batch = stretch(layout.strides.batch);
            layout.strides.seq = stretch(layout.strides.seq);
            layout.strides.head = stretch(layout.strides.head);
        }
        let filler = E::narrow(<E::Acc as Real>::from_f64(f64::NAN));
        let mut source = vec![filler; 2 * values.len() + case.spec.head_dim() * 2];
        for (from, to) in row_starts(&contiguous).into_iter().zip(row_starts(&layout)) {
            source[to..to + layout.head_dim].copy_from_slice(&values[from..from + layout.head_dim]);
        }
        let target = (!case.in_place).then(|| vec![filler; values.len()]);
        Self {
            contiguous,
            layout,
            source,
            target,
        }
    }

    fn operand(&mut self) -> Result<Operand<'_, E>, RopeError> {
        Ok(match &mut self.target {
            None => HeadsMut::new(&mut self.source, self.layout)?.into(),
            Some(target) => {
                let from = HeadsRef::new(&self.source, self.layout)?;
                (from, HeadsMut::new(target, self.contiguous)?).into()
            }
        })
    }

    pub(crate) fn result(self) -> Vec<E> {
        self.target.unwrap_or_else(|| {
            let mut values = Vec::with_capacity(self.contiguous.elems());
            let mut rows: Vec<_> = row_starts(&self.contiguous)
                .into_iter()
                .zip(row_starts(&self.layout))
                .collect();
            rows.sort_unstable();
            for (_, from) in rows {
                values.extend_from_slice(&self.source[from..from + self.layout.head_dim]);
            }
            values
        })
    }
}

fn row_starts(layout: &HeadsLayout) -> Vec<usize> {
    let strides = layout.strides;
    let mut starts = Vec::with_capacity(layout.batch * layout.seq * layout.heads);
    for b in 0..layout.batch {
        for s in 0..layout.seq {
            starts.extend(
                (0..layout.heads).map(|n| b * strides.batch + s * strides.seq + n * strides.head),
            );
        }
    }
    starts
}

/// rope-burn, through burn's tensors. The adjoint is what autodiff makes of the forward.
#[derive(Clone, Debug)]
pub struct Burn {
    /// Fused or composed.
    pub implementation: Implementation,
    /// Where, without autodiff.
    pub device: Device,
}

impl Engine for Burn {
    fn name(&self) -> String {
        match self.implementation {
            Implementation::Fused => "burn/fused".into(),
            Implementation::Composed => "burn/composed".into(),
        }
    }

    fn supports(&self, _: DType) -> bool {
        true
    }

    fn apply(
        &self,
        case: &Case,
        direction: Direction,
        q: &Buffer,
        k: Option<&Buffer>,
    ) -> Result<(Buffer, Option<Buffer>), EngineError> {
        if case.layout == Layout::Tnd {
            self.run::<3>(case, direction, q, k)
        } else {
            self.run::<4>(case, direction, q, k)
        }
    }
}

impl Burn {
    fn run<const D: usize>(
        &self,
        case: &Case,
        direction: Direction,
        q: &Buffer,
        k: Option<&Buffer>,
    ) -> Result<(Buffer, Option<Buffer>), EngineError> {
        let device = self.device.clone().autodiff();
        let rotary = RotaryConfig::new(case.spec.clone())
            .with_layout(case.layout)
            .with_implementation(self.implementation)
            .try_init()
            .map_err(burn_error)?;
        let angles = match q {
            Buffer::F64(_) => angle_tensors::<f64>(case, &device, burn::tensor::DType::F64)?,
            _ => angle_tensors::<f32>(case, &device, burn::tensor::DType::F32)?,
        };
        let rotate = |q: Tensor<D>, k: Option<Tensor<D>>| match k {
            Some(k) => rotary
                .try_forward(q, k, &angles)
                .map(|(q, k)| (q, Some(k)))
                .map_err(burn_error),
            None => rotary
                .try_forward_single(q, &angles)
                .map(|q| (q, None))
                .map_err(burn_error),
        };
        let place = |x: &Buffer, heads: usize| place::<D>(case, x, heads, &device);
        let (q, k) = (place(q, case.heads), k.map(|k| place(k, case.kv_heads)));
        let (q, k) = match direction {
            // Held twice, a tensor cannot be overwritten.
            Direction::Forward if case.in_place => rotate(q, k)?,
            Direction::Forward => rotate(q.clone(), k.clone())?,
            Direction::Adjoint => {
                // <R x, g> has the gradient R' g, whatever x.
                let leaf = |g: &Tensor<D>| g.zeros_like().require_grad();
                let (x, xk) = (leaf(&q), k.as_ref().map(leaf));
                let (y, yk) = rotate(x.clone(), xk.clone())?;
                let mut loss = (y * q).sum();
                if let (Some(yk), Some(k)) = (yk, k) {
                    loss = loss + (yk * k).sum();
                }
                let gradients = loss.backward();
                let gradient = |x: Tensor<D>| {
                    let missing = || EngineError::Burn("the backward gave no gradient".into());
                    x.grad(&gradients).ok_or_else(missing)
                };
                (gradient(x)?, xk.map(gradient).transpose()?)
            }
        };
        Ok((read(q)?, k.map(read).transpose()?))
    }
}

pub(crate) fn burn_error(error: rope_burn::RotaryError) -> EngineError {
    EngineError::Burn(error.to_string())
}

pub(crate) fn angle_tensors<A: Real + burn::tensor::Element>(
    case: &Case,
    device: &Device,
    dtype: burn::tensor::DType,
) -> Result<RotaryAngles, EngineError> {
    let angles = TokenAngles::<A>::new(&case.spec, &case.positions, case.seq_len)?;
    let shape = [angles.tokens(), case.spec.geometry().lanes()];
    let tensor =
        |values: &[A]| Tensor::from_data(TensorData::new(values.to_vec(), shape), (device, dtype));
    Ok(RotaryAngles {
        cos: tensor(angles.cos()),
        sin: tensor(angles.sin()),
    })
}

/// A burn tensor; strided ones are views of a tensor with its first two dimensions exchanged.
pub(crate) fn place<const D: usize>(
    case: &Case,
    x: &Buffer,
    heads: usize,
    device: &Device,
) -> Tensor<D> {
    let dims = case.dims(heads);
    let (data, dtype) = match x {
        Buffer::F64(values) => (
            TensorData::new(values.clone(), dims),
            burn::tensor::DType::F64,
        ),
        Buffer::F32(values) => (
            TensorData::new(values.clone(), dims),
            burn::tensor::DType::F32,
        ),
        Buffer::F16(values) => (
            TensorData::new(values.clone(), dims),
            burn::tensor::DType::F16,
        ),
        Buffer::Bf16(values) => (
            TensorData::new(values.clone(), dims),
            burn::tensor::DType::BF16,
        ),
    };
    let x = Tensor::<D>::from_data(data, (device, dtype));
    if case.strided {
        // By way of the host, not of arithmetic: NaN payloads stay.
        let exchanged = x.swap_dims(0, 1).into_data();
        Tensor::<D>::from_data(exchanged, (device, dtype)).swap_dims(0, 1)
    } else {
        x
    }
}

pub(crate) fn read<const D: usize>(x: Tensor<D>) -> Result<Buffer, EngineError> {
    let data = x.into_data();
    let failed =
        |error: &dyn core::fmt::Debug| EngineError::Burn(format!("reading the result: {error:?}"));
    match data.dtype() {
        burn::tensor::DType::F64 => data.try_into_vec().map(Buffer::F64).map_err(|e| failed(&e)),
        burn::tensor::DType::F32 => data.try_into_vec().map(Buffer::F32).map_err(|e| failed(&e)),
        burn::tensor::DType::F16 => data
            .try_into_vec::<f16>()
            .map(Buffer::F16)
            .map_err(|e| failed(&e)),
        burn::tensor::DType::BF16 => data
            .try_into_vec::<bf16>()
            .map(Buffer::Bf16)
            .map_err(|e| failed(&e)),
        other => Err(EngineError::Burn(format!(
            "the result came back as {other:?}"
        ))),
    }
}
