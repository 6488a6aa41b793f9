//! A case with its tensors: checked against the oracle, then run beside its baseline.

use std::hint::black_box;
use std::ops::Range;
use std::sync::OnceLock;

use half::{bf16, f16};
use rayon::prelude::*;
use rope_check::buffer::DType;
use rope_check::tolerance::{Operation, allowed};
use rope_core::reference::HeadMatrix;
use rope_core::{
    Direction, Element, HeadsLayout, HeadsMut, HeadsRef, Operand, Parallelism, Positions, Real,
    RopeError, RotarySpec, Rotator, TokenAngles,
};

use crate::cases::{TimedCase, Way};
use crate::sample::Contest;

/// An error of a case.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CaseError {
    /// The rotation was refused.
    #[error(transparent)]
    Rope(#[from] RopeError),
    /// f64 has no vector kernel to time.
    #[error("{case}: expected an element type of f32, bf16 or f16")]
    NotTimed {
        /// The case.
        case: String,
    },
    /// The result is not the oracle's; nothing was timed.
    #[error(
        "{case}: token {token}, channel {channel} is {found}, the oracle has {expected}; nothing was \
         timed"
    )]
    Wrong {
        /// The case.
        case: String,
        /// The token.
        token: usize,
        /// The channel of the token, over all heads.
        channel: usize,
        /// The result.
        found: f64,
        /// The oracle's.
        expected: f64,
    },
}

/// An element type that is timed.
pub trait TimedElement: Element<Acc = f32> {
    /// Its name in cases.
    const DTYPE: DType;
    /// Flips the bits of `mask`.
    fn flip(&mut self, mask: u16);
    /// With those bits of `mask` flipped that are set in `other`.
    fn mixed(self, other: Self, mask: u16) -> Self;
}

macro_rules! number {
    ($type:ty as $bits:ty, $dtype:ident) => {
        impl TimedElement for $type {
            const DTYPE: DType = DType::$dtype;
            #[inline(always)]
            fn flip(&mut self, mask: u16) {
                *self = Self::from_bits(self.to_bits() ^ mask as $bits);
            }
            #[inline(always)]
            fn mixed(self, other: Self, mask: u16) -> Self {
                Self::from_bits(self.to_bits() ^ (other.to_bits() & mask as $bits))
            }
        }
    };
}
number!(f32 as u32, F32);
number!(bf16 as u16, Bf16);
number!(f16 as u16, F16);

/// True if `found` is within `allowed` of `exact`; a NaN is not.
pub fn is_within(found: f64, exact: f64, allowed: f64) -> bool {
    (found - exact).abs() <= allowed
}

/// `elems` values in [-0.5, 0.5), the same each time.
pub fn values<E: TimedElement>(elems: usize) -> Vec<E> {
    // A Weyl sequence by the golden ratio: well spread, and cheap for gigabytes.
    (0..elems)
        .into_par_iter()
        .map(|i| {
            let turn = (i as u32).wrapping_mul(0x9e37_79b9);
            E::narrow(turn as f32 / 4_294_967_296.0 - 0.5)
        })
        .collect()
}

/// Position ids as a prompt with pictures has them: frames of 32 x 32 patches on the axes time,
/// height and width; text on the others.
///
/// # Errors
/// Those of [`Positions::new`]; none are expected.
pub fn positions(axes: usize, tokens: usize) -> Result<Positions, RopeError> {
    let id = |axis: usize, token: usize| match (axes, axis) {
        (1, _) | (_, 3) => token,
        (_, 0) => token / 1024,
        (_, 1) => token / 32 % 32,
        (_, _) => token % 32,
    };
    let ids: Vec<i64> = (0..axes)
        .flat_map(|axis| (0..tokens).map(move |token| id(axis, token) as i64))
        .collect();
    Positions::new(axes, &ids)
}

/// More than caches hold, on the machines that were thought of.
const SWEPT_BYTES: usize = 64 << 20;

/// Reads so much other memory that caches hold nothing modified: what one sample has written, the
/// next one would otherwise have to write back.
fn sweep_caches() {
    static OTHER: OnceLock<Vec<u64>> = OnceLock::new();
    let other = OTHER.get_or_init(|| vec![1; SWEPT_BYTES / size_of::<u64>()]);
    black_box(
        other
            .par_chunks(1 << 16)
            .map(|chunk| chunk.iter().sum::<u64>())
            .sum::<u64>(),
    );
}

/// Bytes of q and k below which a copy, as a rotation, is left to one thread.
const BYTES_PER_THREAD: usize = 256 << 10;

/// A chunk for each thread that the rotation has work for. In more chunks neither baseline is
/// faster: only memory holds them up, not a thread that is slower than the others.
fn tasks(parallelism: Parallelism, bytes: usize) -> usize {
    if parallelism == Parallelism::SERIAL {
        return 1;
    }
    rayon::current_num_threads()
        .min(bytes / BYTES_PER_THREAD)
        .max(1)
}

/// Copies, in `tasks` chunks over the threads.
pub fn copy<E: Copy + Send + Sync>(from: &[E], to: &mut [E], tasks: usize) {
    if tasks <= 1 {
        return to.copy_from_slice(from);
    }
    let chunk = from.len().div_ceil(tasks).max(1);
    from.par_chunks(chunk)
        .zip(to.par_chunks_mut(chunk))
        .for_each(|(from, to)| to.copy_from_slice(from));
}

/// Reads, changes and writes every element, in `tasks` chunks over the threads: flips bits that the
/// optimiser cannot know, the lowest of the mantissa, so that no value becomes subnormal.
fn read_modify_write<E: TimedElement>(values: &mut [E], tasks: usize) {
    let mask = black_box(1);
    let flip = |values: &mut [E]| values.iter_mut().for_each(|value| value.flip(mask));
    if tasks <= 1 {
        return flip(values);
    }
    let chunk = values.len().div_ceil(tasks).max(1);
    values.par_chunks_mut(chunk).for_each(flip);
}

/// Bytes between addresses that a processor may take for one another while a load passes a store.
const PAGE_BYTES: usize = 4096;

/// Elements from a chosen offset in a page on. Where a small buffer starts in its page decides how
/// fast it is copied; left to the allocator, that would be luck.
pub(crate) struct Buffer<E> {
    storage: Vec<E>,
    elems: Range<usize>,
}

impl<E: TimedElement> Buffer<E> {
    fn new(values: &[E], offset_bytes: usize) -> Self {
        let size = size_of::<E>();
        let mut storage = vec![E::narrow(0.0); values.len() + PAGE_BYTES / size];
        let address = storage.as_ptr().addr();
        let start = (PAGE_BYTES + offset_bytes - address % PAGE_BYTES) % PAGE_BYTES / size;
        let elems = start..start + values.len();
        storage[elems.clone()].copy_from_slice(values);
        Self { storage, elems }
    }

    pub(crate) fn get(&self) -> &[E] {
        &self.storage[self.elems.clone()]
    }

    pub(crate) fn get_mut(&mut self) -> &mut [E] {
        &mut self.storage[self.elems.clone()]
    }
}

/// q or k: what is rotated, and where to.
pub(crate) struct Tensor<E> {
    pub(crate) layout: HeadsLayout,
    /// Never written.
    pub(crate) source: Buffer<E>,
    /// The result; in place, also the input.
    pub(crate) target: Buffer<E>,
}

impl<E: TimedElement> Tensor<E> {
    pub(crate) fn new(layout: HeadsLayout) -> Self {
        let values = values(layout.elems());
        Self {
            layout,
            source: Buffer::new(&values, 0),
            target: Buffer::new(&values, PAGE_BYTES / 2),
        }
    }

    /// The tensor as an operation takes it.
    pub(crate) fn operand(&mut self, in_place: bool) -> Result<Operand<'_, E>, RopeError> {
        let target = HeadsMut::new(self.target.get_mut(), self.layout)?;
        if in_place {
            return Ok(target.into());
        }
        Ok((HeadsRef::new(self.source.get(), self.layout)?, target).into())
    }

    /// Makes the target equal to the source again.
    pub(crate) fn restore(&mut self, tasks: usize) {
        copy(self.source.get(), self.target.get_mut(), tasks);
    }

    /// A head of a token, from the source or the target.
    pub(crate) fn head(&self, values: &[E], token: usize, head: usize) -> Vec<f64> {
        let strides = self.layout.strides;
        let start = token * strides.seq + head * strides.head;
        let row = &values[start..start + self.layout.head_dim];
        row.iter().map(|value| value.widen().to_f64()).collect()
    }
}

/// A case with its tensors. Of its contestants, 0 is the baseline and 1 the rotation.
///
/// The baseline moves the same bytes of the same buffers by as many threads: a copy; for a rotation
/// in place a read-modify-write in place, except for a single token, whose bar is a copy.
pub struct TimedRotation<E> {
    pub(crate) case: TimedCase,
    pub(crate) spec: RotarySpec,
    pub(crate) positions: Positions,
    pub(crate) angles: TokenAngles,
    pub(crate) parallelism: Parallelism,
    pub(crate) tensors: Vec<Tensor<E>>,
}

/// The contestant that is compared with.
pub const BASELINE: usize = 0;
/// The contestant that is measured.
pub const ROTATION: usize = 1;

impl<E: TimedElement> TimedRotation<E> {
    /// Makes the tensors and the angles of `case`, whose element type is `E`.
    ///
    /// # Errors
    /// [`CaseError::Rope`]; none are expected of [`crate::cases::cases`].
    pub fn new(case: &TimedCase) -> Result<Self, CaseError> {
        let spec = case.shape.spec(case.pairing, case.axes.clone())?;
        let positions = positions(spec.axis_count(), case.shape.seq)?;
        let layouts = [case.shape.q(case.layout), case.shape.k(case.layout)];
        let parallelism = if case.shape.seq == 1 {
            Parallelism::SERIAL
        } else {
            Parallelism::default()
        };
        Ok(Self {
            angles: TokenAngles::new(&spec, &positions, None)?,
            tensors: layouts
                .into_iter()
                .filter(|layout| layout.heads > 0)
                .map(Tensor::new)
                .collect(),
            case: case.clone(),
            spec,
            positions,
            parallelism,
        })
    }

    /// The name of the rotation's baseline.
    pub fn baseline(&self) -> &'static str {
        if self.copies() {
            "copy"
        } else {
            "read_modify_write"
        }
    }

    fn copies(&self) -> bool {
        !self.case.in_place || self.case.shape.seq == 1
    }

    pub(crate) fn tasks(&self) -> usize {
        tasks(self.parallelism, self.case.tensor_bytes())
    }

    fn restore(&mut self) {
        let tasks = self.tasks();
        for tensor in &mut self.tensors {
            tensor.restore(tasks);
        }
    }

    /// Rotates `iterations` times.
    ///
    /// # Errors
    /// [`CaseError::Rope`] if the rotation is refused.
    pub fn rotate(&mut self, iterations: usize) -> Result<(), CaseError> {
        let rotator = Rotator::new(self.spec.geometry(), self.angles.angles())?
            .with_parallelism(self.parallelism);
        let directions: &[Direction] = match self.case.way {
            Way::Forward => &[Direction::Forward],
            Way::Backward => &[Direction::Adjoint],
            Way::Both => &[Direction::Forward, Direction::Adjoint],
        };
        for _ in 0..iterations {
            for (pass, &direction) in directions.iter().enumerate() {
                // The second pass has its input where the first one left it.
                let in_place = self.case.in_place || pass > 0;
                let tensors = self.tensors.iter_mut();
                let mut operands = tensors.map(|tensor| tensor.operand(in_place));
                let Some(q) = operands.next() else { break };
                let k = operands.next().transpose();
                rotator.apply::<E>(direction, q?, k?)?;
            }
            black_box(&mut self.tensors);
        }
        Ok(())
    }

    fn run_baseline(&mut self, iterations: usize) {
        let (tasks, copies) = (self.tasks(), self.copies());
        for _ in 0..iterations * self.case.way.passes() {
            for Tensor { source, target, .. } in &mut self.tensors {
                if copies {
                    copy(black_box(source.get()), target.get_mut(), tasks);
                } else {
                    read_modify_write(target.get_mut(), tasks);
                }
            }
            black_box(&mut self.tensors);
        }
    }

    /// Rotates once and compares some tokens, the first and the last among them, with the oracle.
    ///
    /// # Errors
    /// [`CaseError::Wrong`]; [`CaseError::Rope`].
    pub fn check(&mut self, tokens: usize) -> Result<(), CaseError> {
        self.restore();
        self.rotate(1)?;
        for token in self.checked_tokens(tokens) {
            let matrix = HeadMatrix::new(&self.spec, &self.positions, token, None)?;
            for tensor in &self.tensors {
                self.check_token(tensor, token, &matrix)?;
            }
        }
        Ok(())
    }

    /// Some tokens, the first and the last among them.
    pub(crate) fn checked_tokens(&self, tokens: usize) -> impl Iterator<Item = usize> + use<E> {
        let seq = self.case.shape.seq;
        let tokens = tokens.clamp(1, seq);
        (0..tokens).map(move |i| i * (seq - 1) / (tokens - 1).max(1))
    }

    fn check_token(
        &self,
        tensor: &Tensor<E>,
        token: usize,
        matrix: &HeadMatrix,
    ) -> Result<(), CaseError> {
        for head in 0..tensor.layout.heads {
            let [x, found] = [&tensor.source, &tensor.target]
                .map(|buffer| tensor.head(buffer.get(), token, head));
            check_head(&self.case, [token, head], matrix, &x, &found)?;
        }
        Ok(())
    }
}

/// Compares what a case made of a head's channels `x` with the oracle's.
///
/// # Errors
/// [`CaseError::Wrong`].
pub fn check_head(
    case: &TimedCase,
    [token, head]: [usize; 2],
    matrix: &HeadMatrix,
    x: &[f64],
    found: &[f64],
) -> Result<(), CaseError> {
    let exact = match case.way {
        Way::Forward => matrix.apply(x),
        Way::Backward => matrix.apply_adjoint(x),
        Way::Both => matrix.apply_adjoint(&matrix.apply(x)),
    };
    let operation = Operation::Passes(case.way.passes());
    for (channel, (&found, expected)) in found.iter().zip(exact).enumerate() {
        if !is_within(found, expected, allowed(operation, case.dtype, expected)) {
            return Err(CaseError::Wrong {
                case: case.name(),
                token,
                channel: head * x.len() + channel,
                found,
                expected,
            });
        }
    }
    Ok(())
}

impl<E: TimedElement> Contest for TimedRotation<E> {
    fn contestants(&self) -> usize {
        2
    }

    fn prepare(&mut self, _: usize) {
        // Rotated again and again, values would drift; where a pair has two angles they would grow.
        if self.case.in_place {
            self.restore();
        }
        if self.case.tensor_bytes() >= SWEPT_BYTES / 2 {
            sweep_caches();
        }
    }

    fn run(&mut self, contestant: usize, iterations: usize) {
        if contestant == BASELINE {
            self.run_baseline(iterations);
        } else {
            // `check` has run the same call.
            self.rotate(iterations)
                .unwrap_or_else(|error| panic!("{error}"));
        }
    }
}

/// A case to check and to time, whatever its element type.
pub trait Timed: Contest {
    /// As [`TimedRotation::check`].
    ///
    /// # Errors
    /// As [`TimedRotation::check`].
    fn check(&mut self, tokens: usize) -> Result<(), CaseError>;
    /// As [`TimedRotation::baseline`].
    fn baseline(&self) -> &'static str;
}

impl<E: TimedElement> Timed for TimedRotation<E> {
    fn check(&mut self, tokens: usize) -> Result<(), CaseError> {
        TimedRotation::check(self, tokens)
    }
    fn baseline(&self) -> &'static str {
        TimedRotation::baseline(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::{Selection, cases};

    #[test]
    fn a_wrong_result_is_not_timed() {
        let case = cases(Selection::Quick).swap_remove(0);
        let mut rotation = TimedRotation::<f32>::new(&case).unwrap();
        // Other positions than the oracle's.
        let wrong = Positions::text(1, 3, case.shape.seq).unwrap();
        rotation.angles = TokenAngles::new(&rotation.spec, &wrong, None).unwrap();
        assert!(matches!(rotation.check(4), Err(CaseError::Wrong { .. })));
    }

    #[test]
    fn the_baselines_move_every_byte() {
        let from = values::<f32>(1000);
        let mut to = vec![0.0; 1000];
        copy(&from, &mut to, 3);
        assert_eq!(from, to);
        read_modify_write(&mut to, 3);
        assert!(
            from.iter()
                .zip(&to)
                .all(|(a, b)| a.to_bits() ^ b.to_bits() == 1)
        );
    }
}
