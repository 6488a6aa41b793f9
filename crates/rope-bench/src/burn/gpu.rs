//! On a GPU, the rotation by itself: many launches for each wait, beside a copy on the same GPU; and
//! the bytes of its memory pools.

use std::error::Error;

use crate::cases::{TimedCase, Way};
use crate::names;
use crate::rotation::{check_head, positions, values};
use crate::rows::SpeedRow;
use crate::sample::{Contest, Plan, Timing, interleaved};
use burn::backend::ExecutionError;
use burn::tensor::{DType as BurnDType, Device, Tensor, TensorData};
use rope_burn::{Implementation, Rotary, RotaryAngles, RotaryError};
use rope_check::alloc::Usage;
use rope_core::reference::HeadMatrix;
use rope_core::{Direction, HeadsLayout, Layout, Positions, RotarySpec};

use super::{Sizes, float};

/// The baselines of rotations: for one token a launch that does nothing else, otherwise a copy.
const LAUNCH: &str = "launch";
const COPY: &str = "copy";

/// Contestants: the baseline, then the implementations.
struct Launches<const D: usize> {
    case: TimedCase,
    spec: RotarySpec,
    positions: Positions,
    device: Device,
    rotaries: [(&'static str, Rotary); 2],
    angles: RotaryAngles,
    /// q and k, never written.
    source: [Tensor<D>; 2],
    /// The tensors that are rotated in place.
    state: Option<[Tensor<D>; 2]>,
    /// One element.
    one: Tensor<1>,
    /// The first failure.
    failed: Option<Box<dyn Error>>,
}

/// A new tensor of the same values: one read and one write of each.
fn copied<const D: usize>(x: &Tensor<D>) -> Tensor<D> {
    x.clone() * 1.0
}

impl<const D: usize> Launches<D> {
    fn new(case: &TimedCase, device: &Device) -> Result<Self, Box<dyn Error>> {
        let shape = case.shape;
        let spec = shape.spec(case.pairing, case.axes.clone())?;
        let positions = positions(spec.axis_count(), shape.seq)?;
        let rotary = Rotary::new(spec.clone(), case.layout);
        let angles = rotary.try_angles(&positions, device)?;
        let dtype = BurnDType::from(float(case.dtype));
        let tensor = |layout: HeadsLayout| {
            let dims = dims(case.layout, &layout);
            let data = TensorData::new(values::<f32>(layout.elems()), dims).convert_dtype(dtype);
            Tensor::<D>::from_data(data, (device, dtype))
        };
        Ok(Self {
            source: [tensor(shape.q(case.layout)), tensor(shape.k(case.layout))],
            case: case.clone(),
            spec,
            positions,
            device: device.clone(),
            rotaries: [
                (names::FUSED, Implementation::Fused),
                (names::COMPOSED, Implementation::Composed),
            ]
            .map(|(name, by)| (name, rotary.clone().with_implementation(by))),
            angles,
            state: None,
            one: Tensor::ones([1], device),
            failed: None,
        })
    }

    fn baseline(&self) -> &'static str {
        if self.case.shape.seq == 1 {
            LAUNCH
        } else {
            COPY
        }
    }

    /// q and k after the case's passes.
    fn rotate(
        &self,
        rotary: &Rotary,
        [mut q, mut k]: [Tensor<D>; 2],
    ) -> Result<[Tensor<D>; 2], RotaryError> {
        let directions: &[Direction] = match self.case.way {
            Way::Forward => &[Direction::Forward],
            Way::Backward => &[Direction::Adjoint],
            Way::Both => &[Direction::Forward, Direction::Adjoint],
        };
        for direction in directions {
            (q, k) = match direction {
                Direction::Forward => rotary.try_forward(q, k, &self.angles)?,
                Direction::Adjoint => rotary.try_adjoint(q, k, &self.angles)?,
            };
        }
        Ok([q, k])
    }

    fn iterate(&mut self, contestant: usize) -> Result<(), Box<dyn Error>> {
        match contestant.checked_sub(1) {
            None => {
                for _ in 0..self.case.way.passes() {
                    if self.baseline() == LAUNCH {
                        self.finish(copied(&self.one))?;
                    } else {
                        self.finish(self.source.each_ref().map(copied))?;
                    }
                }
            }
            Some(implementation) => {
                let rotary = &self.rotaries[implementation].1;
                if self.case.in_place {
                    let state = self.state.take().ok_or("nothing to rotate")?;
                    self.state = Some(self.rotate(rotary, state)?);
                    self.device.flush()?;
                } else {
                    self.finish(self.rotate(rotary, self.source.clone())?)?;
                }
            }
        }
        Ok(())
    }

    /// Launches what makes a result. Otherwise burn's fusion could make several of them at once, or
    /// leave out what has been dropped.
    fn finish<R>(&self, result: R) -> Result<(), ExecutionError> {
        self.device.flush()?;
        drop(result);
        Ok(())
    }

    /// Compares some tokens, the first and the last among them, with the oracle.
    fn check(&self) -> Result<(), Box<dyn Error>> {
        let shape = self.case.shape;
        for (_, rotary) in &self.rotaries {
            let rotated = self.rotate(rotary, self.source.clone())?;
            let tokens = CHECKED_TOKENS.min(shape.seq);
            for token in (0..tokens).map(|i| i * (shape.seq - 1) / (tokens - 1).max(1)) {
                let matrix = HeadMatrix::new(&self.spec, &self.positions, token, None)?;
                for (x, found) in self.source.iter().zip(&rotated) {
                    let [x, found] = [x, found].map(|x| token_channels(self.case.layout, x, token));
                    let heads = x.chunks(shape.head_dim).zip(found.chunks(shape.head_dim));
                    for (head, (x, found)) in heads.enumerate() {
                        check_head(&self.case, [token, head], &matrix, x, found)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn time(mut self, plan: &Plan) -> Result<Vec<SpeedRow>, Box<dyn Error>> {
        self.check()?;
        let timings: Vec<Timing> = interleaved(&mut self, plan);
        if let Some(error) = self.failed {
            return Err(error);
        }
        let baseline = (self.baseline(), timings[0]);
        let rows = self.rotaries.iter().zip(&timings[1..]);
        let row = |(name, timing)| SpeedRow::new(&self.case, name, baseline, timing);
        Ok(rows
            .map(|((name, _), timing)| row((*name, *timing)))
            .collect())
    }
}

/// Tokens that are compared with the oracle.
const CHECKED_TOKENS: usize = 4;

fn dims(layout: Layout, heads: &HeadsLayout) -> Vec<usize> {
    let HeadsLayout {
        seq,
        heads,
        head_dim,
        ..
    } = *heads;
    match layout {
        Layout::Bsnd => vec![1, seq, heads, head_dim],
        Layout::Bnsd => vec![1, heads, seq, head_dim],
        Layout::Sbnd => vec![seq, 1, heads, head_dim],
        Layout::Tnd => vec![seq, heads, head_dim],
    }
}

/// The channels of a token, head by head.
fn token_channels<const D: usize>(layout: Layout, x: &Tensor<D>, token: usize) -> Vec<f64> {
    let dimension = match layout {
        Layout::Bsnd => 1,
        Layout::Bnsd => 2,
        Layout::Sbnd | Layout::Tnd => 0,
    };
    let row = x.clone().narrow(dimension, token, 1);
    row.into_data().iter::<f64>().collect()
}

impl<const D: usize> Contest for Launches<D> {
    fn contestants(&self) -> usize {
        1 + self.rotaries.len()
    }

    fn prepare(&mut self, contestant: usize) {
        self.state = None;
        if contestant > 0 && self.case.in_place {
            self.state = Some(self.source.each_ref().map(copied));
        }
        self.wait();
    }

    fn run(&mut self, contestant: usize, iterations: usize) {
        for _ in 0..iterations {
            if let Err(error) = self.iterate(contestant) {
                self.failed.get_or_insert(error);
                return;
            }
        }
        self.wait();
    }

    fn repeats(&self) -> bool {
        self.failed.is_none()
    }
}

impl<const D: usize> Launches<D> {
    fn wait(&mut self) {
        if let Err(error) = self.device.sync() {
            self.failed.get_or_insert(error.into());
        }
    }
}

/// Times a case on a device without autodiff, after comparing each implementation with the oracle.
///
/// # Errors
/// If a result is not the oracle's, or the device fails.
pub fn time(
    case: &TimedCase,
    device: &Device,
    plan: &Plan,
) -> Result<Vec<SpeedRow>, Box<dyn Error>> {
    if case.layout == Layout::Tnd {
        Launches::<3>::new(case, device)?.time(plan)
    } else {
        Launches::<4>::new(case, device)?.time(plan)
    }
}

/// Counts the bytes of a GPU's pools while `work` runs. The peak is what they grew by, after they
/// have given back what was free.
///
/// # Errors
/// If the device fails, or does not report its memory.
pub fn count(
    device: &Device,
    sizes: Sizes,
    work: &mut dyn FnMut(),
) -> Result<Usage, Box<dyn Error>> {
    device.sync()?;
    device.memory_cleanup();
    let before = pools(device)?;
    work();
    device.sync()?;
    let after = pools(device)?;
    let [retained, grown] = [0, 1].map(|i| after[i] - before[i]);
    // Less than an allocation of data is none of data.
    let holds_data = retained.max(0).cast_unsigned() >= sizes.data_bytes;
    Ok(Usage {
        peak_bytes: grown.max(retained).max(0).cast_unsigned(),
        retained_bytes: retained,
        retained_data_bytes: if holds_data { retained } else { 0 },
        ..Usage::default()
    })
}

/// Bytes that a GPU's tensors use, and bytes that the pools hold for them.
fn pools(device: &Device) -> Result<[isize; 2], String> {
    let usage = device.memory_pool_usage();
    let usage = usage.ok_or("the GPU's runtime does not report its memory")?;
    Ok([usage.bytes_in_use, usage.bytes_reserved].map(|bytes| bytes as isize))
}

#[cfg(test)]
mod tests {
    use crate::cases::{Selection, gpu_cases};

    use super::*;

    #[test]
    fn every_case_is_the_oracles_and_is_timed() {
        for mut case in gpu_cases(Selection::Quick) {
            case.shape = case.shape.at(case.shape.seq.min(3));
            let rows = time(&case, &Device::flex(), &Plan::ONCE).unwrap();
            let found: Vec<&str> = rows.iter().map(|row| &*row.implementation).collect();
            assert_eq!(found, [names::FUSED, names::COMPOSED]);
            let expected = if case.shape.seq == 1 { LAUNCH } else { COPY };
            assert!(rows.iter().all(|row| row.baseline == expected));
        }
    }
}
