//! The norm with the rotation: checked against the oracle, then run beside what it is compared
//! with.

use std::hint::black_box;

use rayon::prelude::*;
use rope_check::tolerance::{Operation, allowed};
use rope_core::reference::{HeadMatrix, HeadRmsNorm};
use rope_core::{HeadNorm, HeadsRef, NormGradient, NormInput, RopeError, Rotator};

use crate::cases::{TimedCase, Way};
use crate::rotation::{BASELINE, CaseError, Tensor, Timed, TimedElement, TimedRotation, is_within};
use crate::sample::Contest;

/// The epsilon that models add to the mean of the squares.
pub const EPS: f64 = 1e-6;

/// The weight of a channel: about 1 / rstd of the values, so that gradients that go through the
/// backward again and again keep their size.
pub fn weight(channel: usize) -> f32 {
    0.28 + 0.01 * (channel % 5) as f32
}

/// A case of the norm with its tensors. Of its contestants, 0 is the baseline and 1 the norm with
/// the rotation.
///
/// The baseline of the forward is the rotation alone, of the same buffers. That of the backward
/// reads x and the gradient and writes a tensor, over the gradient if the case is in place.
pub struct TimedNorm<E> {
    rotation: TimedRotation<E>,
    norm: HeadNorm,
    weight: Vec<f32>,
    /// The gradients of the results; none for the forward.
    gradients: Vec<Tensor<E>>,
    weight_gradients: [Vec<f32>; 2],
}

impl<E: TimedElement> TimedNorm<E> {
    /// Makes the tensors and the angles of `case`, forward or backward, whose element type is `E`.
    ///
    /// # Errors
    /// [`CaseError::Rope`]; none are expected of [`crate::cases::cases`].
    pub fn new(case: &TimedCase) -> Result<Self, CaseError> {
        let rotation = TimedRotation::new(case)?;
        let head_dim = case.shape.head_dim;
        let layouts = rotation.tensors.iter().map(|tensor| tensor.layout);
        let gradients = match case.way {
            Way::Backward => layouts.map(Tensor::new).collect(),
            _ => Vec::new(),
        };
        Ok(Self {
            gradients,
            rotation,
            norm: HeadNorm::new(EPS)?,
            weight: (0..head_dim).map(weight).collect(),
            weight_gradients: [vec![0.0; head_dim], vec![0.0; head_dim]],
        })
    }

    /// Normalises and rotates, or goes back.
    fn apply(&mut self) -> Result<(), CaseError> {
        let TimedRotation {
            case,
            spec,
            angles,
            parallelism,
            tensors,
            ..
        } = &mut self.rotation;
        let rotator =
            Rotator::new(spec.geometry(), angles.angles())?.with_parallelism(*parallelism);
        let weight = Some(&self.weight[..]);
        if case.way == Way::Forward {
            let mut inputs = tensors.iter_mut().map(|tensor| -> Result<_, RopeError> {
                let x = tensor.operand(case.in_place)?;
                Ok(NormInput { x, weight })
            });
            if let Some(q) = inputs.next() {
                rotator.norm_rotate(&self.norm, q?, inputs.next().transpose()?)?;
            }
            return Ok(());
        }
        let tensors = tensors.iter().zip(&mut self.gradients);
        let mut gradients = tensors.zip(&mut self.weight_gradients).map(
            |((x, gradient), sums)| -> Result<_, RopeError> {
                Ok(NormGradient {
                    x: HeadsRef::new(x.source.get(), x.layout)?,
                    weight,
                    gradient: gradient.operand(case.in_place)?,
                    weight_gradient: Some(sums),
                })
            },
        );
        if let Some(q) = gradients.next() {
            rotator.norm_rotate_backward(&self.norm, q?, gradients.next().transpose()?)?;
        }
        Ok(())
    }

    /// Compares what became of a head with the oracle.
    fn check_head(
        &self,
        tensor: usize,
        [token, head]: [usize; 2],
        matrix: &HeadMatrix,
    ) -> Result<(), CaseError> {
        let case = &self.rotation.case;
        let x = &self.rotation.tensors[tensor];
        let weight: Vec<f64> = self.weight.iter().map(|w| f64::from(*w)).collect();
        let norm = HeadRmsNorm {
            weight: &weight,
            eps: EPS,
        };
        let x_row = x.head(x.source.get(), token, head);
        let (found, exact) = match self.gradients.get(tensor) {
            None => {
                let exact = matrix.apply(&norm.apply(&x_row));
                (x.head(x.target.get(), token, head), exact)
            }
            Some(gradient) => {
                let dy = gradient.head(gradient.source.get(), token, head);
                let (dx, _) = norm.apply_adjoint(&x_row, &matrix.apply_adjoint(&dy));
                (gradient.head(gradient.target.get(), token, head), dx)
            }
        };
        for (channel, (&found, expected)) in found.iter().zip(exact).enumerate() {
            if !is_within(
                found,
                expected,
                allowed(Operation::Passes(1), case.dtype, expected),
            ) {
                return Err(CaseError::Wrong {
                    case: case.name(),
                    token,
                    channel: head * weight.len() + channel,
                    found,
                    expected,
                });
            }
        }
        Ok(())
    }

    /// Reads x and the gradient and writes a tensor, in a chunk for each thread.
    fn read_two_write_one(&mut self) {
        let (tasks, mask) = (self.rotation.tasks(), black_box(1));
        for (x, gradient) in self.rotation.tensors.iter().zip(&mut self.gradients) {
            let Tensor { source, target, .. } = gradient;
            let (x, to) = (x.source.get(), target.get_mut());
            let chunk = x.len().div_ceil(tasks).max(1);
            if self.rotation.case.in_place {
                x.par_chunks(chunk)
                    .zip(to.par_chunks_mut(chunk))
                    .for_each(|(x, to)| {
                        x.iter()
                            .zip(to)
                            .for_each(|(x, to)| *to = to.mixed(*x, mask));
                    });
            } else {
                let gradient = source.get();
                x.par_chunks(chunk)
                    .zip(gradient.par_chunks(chunk))
                    .zip(to.par_chunks_mut(chunk))
                    .for_each(|((x, gradient), to)| {
                        let both = x.iter().zip(gradient).zip(to);
                        both.for_each(|((x, gradient), to)| *to = gradient.mixed(*x, mask));
                    });
            }
        }
        black_box(&mut self.gradients);
    }
}

impl<E: TimedElement> Contest for TimedNorm<E> {
    fn contestants(&self) -> usize {
        2
    }

    fn prepare(&mut self, contestant: usize) {
        let tasks = self.rotation.tasks();
        for gradient in &mut self.gradients {
            gradient.restore(tasks);
        }
        self.rotation.prepare(contestant);
    }

    fn run(&mut self, contestant: usize, iterations: usize) {
        for _ in 0..iterations {
            // `check` has run the same calls.
            let done = match (contestant == BASELINE, self.rotation.case.way) {
                (true, Way::Forward) => self.rotation.rotate(1),
                (true, _) => {
                    self.read_two_write_one();
                    Ok(())
                }
                (false, _) => self.apply(),
            };
            done.unwrap_or_else(|error| panic!("{error}"));
        }
    }
}

impl<E: TimedElement> Timed for TimedNorm<E> {
    fn check(&mut self, tokens: usize) -> Result<(), CaseError> {
        if self.rotation.case.way == Way::Forward {
            self.rotation.check(tokens)?;
        }
        self.prepare(BASELINE);
        self.apply()?;
        for token in self.rotation.checked_tokens(tokens) {
            let rotation = &self.rotation;
            let matrix = HeadMatrix::new(&rotation.spec, &rotation.positions, token, None)?;
            for (tensor, x) in rotation.tensors.iter().enumerate() {
                for head in 0..x.layout.heads {
                    self.check_head(tensor, [token, head], &matrix)?;
                }
            }
        }
        Ok(())
    }

    fn baseline(&self) -> &'static str {
        match self.rotation.case.way {
            Way::Forward => "rotation",
            _ => "read_two_write_one",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::{Group, Selection, cases};

    fn small(way: Way) -> TimedCase {
        let mut cases = cases(Selection::Quick).into_iter();
        let is_small = |case: &TimedCase| case.group == Group::Norm && case.way == way;
        cases.find(is_small).expect("a case")
    }

    #[test]
    fn a_wrong_result_is_not_timed() {
        for way in [Way::Forward, Way::Backward] {
            let mut timed = TimedNorm::<f32>::new(&small(way)).unwrap();
            timed.check(4).unwrap();
            // Another norm than the oracle's.
            timed.norm = timed.norm.with_unit_offset(true);
            assert!(matches!(timed.check(4), Err(CaseError::Wrong { .. })));
        }
    }

    #[test]
    fn the_baseline_reads_two_tensors_and_writes_one() {
        for in_place in [false, true] {
            let case = TimedCase {
                in_place,
                ..small(Way::Backward)
            };
            let mut timed = TimedNorm::<f32>::new(&case).unwrap();
            timed.prepare(BASELINE);
            timed.read_two_write_one();
            for (x, gradient) in timed.rotation.tensors.iter().zip(&timed.gradients) {
                let read = x.source.get().iter().zip(gradient.source.get());
                for ((x, gradient), found) in read.zip(gradient.target.get()) {
                    let lowest = x.to_bits() & 1;
                    assert_eq!(found.to_bits(), gradient.to_bits() ^ lowest);
                }
            }
        }
    }
}
