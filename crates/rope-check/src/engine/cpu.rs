//! rope-core's kernels.

use half::{bf16, f16};
use rope_core::{
    Direction, Element, HeadsLayout, HeadsMut, HeadsRef, InstructionSet, Operand, Parallelism,
    Real, RopeError, Rotator,
};

use super::{Case, Engine, EngineError};
use crate::buffer::{Buffer, DType};

/// rope-core's kernels.
#[derive(Clone, Copy, Debug)]
pub struct Cpu {
    /// The instruction set.
    pub instructions: InstructionSet,
    /// Over how many threads.
    pub parallelism: Parallelism,
}

impl Engine for Cpu {
    fn name(&self) -> String {
        let threads = if self.parallelism == Parallelism::SERIAL {
            ""
        } else {
            "/threads"
        };
        format!("cpu/{}{threads}", self.instructions)
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
        let angles = case.angles::<E::Acc>()?;
        let rotator = Rotator::new(case.spec.geometry(), angles.angles())?
            .with_instructions(self.instructions)
            .with_parallelism(self.parallelism);
        let mut placed_q = Placed::new(case, case.heads, q);
        let mut placed_k = k.map(|k| Placed::new(case, case.kv_heads, k));
        let k_operand = placed_k.as_mut().map(Placed::operand).transpose()?;
        rotator.apply(direction, placed_q.operand()?, k_operand)?;
        Ok((wrap(placed_q.result()), placed_k.map(|k| wrap(k.result()))))
    }
}

/// A tensor laid out as a case asks: with gaps between its rows or without, with a
/// destination or without.
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
            // Rows one and a half times as long, so that a kernel that ignores strides lands in a
            // gap.
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

    pub(crate) fn operand(&mut self) -> Result<Operand<'_, E>, RopeError> {
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
