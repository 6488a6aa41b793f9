//! One small launch of each family of kernels, in memory between guard zones, compared with the
//! CPU.

use std::sync::Arc;

use half::bf16;
use rope_core::{
    Angles, Direction, Geometry, HeadNorm, HeadsLayout, HeadsMut, HeadsRef, Layout, NormGradient,
    NormInput, Operand as CpuOperand, Pairing, Rotator as CpuRotator,
};

use super::{Finding, refused};
use crate::error::{AscendError, Result};
use crate::rope::{
    AngleGradient, AngleRows, ChannelWeights, Heads, KernelType, Kernels, NormBackward,
    NormBackwardTensor, NormRotation, NormTensor, Npu, Operand, Rotation, Rotator, Unit,
};
use crate::safe::{DeviceBuffer, DeviceMemory, Element, Stream};

/// A family of kernels, with the result of launching one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchFinding {
    /// The operation of its kernels.
    pub family: &'static str,
    /// The launch method; or the fault, with the remedy.
    pub found: Finding,
}

const TOKENS: usize = 5;
const HEADS: usize = 3;
const HEAD_DIM: usize = 64;
const LANES: usize = HEAD_DIM / 2;
/// Elements of the guard before and of the one after: more than a core's share of this work.
const GUARD: usize = 2048;
/// The products and sums of the numbers below are exact in f32 and their results in bf16, except
/// for the norm's root.
const TOLERANCE: f64 = 1e-5;

const WRONG: &str = "do not train on this device; run mrope verify on it and report both outputs";

/// The fault in the results of a launch.
type Wrong = String;
/// The stream and the kernels of a launch.
struct Bench<'a> {
    stream: &'a Stream,
    kernels: &'a Arc<Kernels>,
}

/// Launches a kernel of each family.
pub(super) fn launches(npu: &Npu, kernels: &Arc<Kernels>) -> Vec<LaunchFinding> {
    type Launch = fn(&Bench<'_>) -> Result<Result<(), Wrong>>;
    let families: [(&'static str, &str, Launch); 6] = [
        ("rotation", "rope_rotate_split_f32", |bench| {
            rotation::<f32>(bench, KernelType::F32, Unit::Vector, Direction::Forward)
        }),
        ("its adjoint", "rope_rotate_split_f32", |bench| {
            rotation::<f32>(bench, KernelType::F32, Unit::Vector, Direction::Adjoint)
        }),
        (
            "gradient of the angles",
            "rope_angle_grad_split_f32",
            angle_gradient,
        ),
        ("norm with the rotation", "rope_norm_split_f32", norm),
        ("its backward", "rope_norm_grad_split_f32", norm_backward),
        (
            "rotation by a matrix, on the cube cores",
            "rope_matrix_bf16",
            |bench| {
                let (element, unit) = (KernelType::Bf16, Unit::Cube);
                rotation::<bf16>(bench, element, unit, Direction::Forward)
            },
        ),
    ];
    let find = |(family, kernel, launch): (&'static str, &str, Launch)| {
        // A failed stream is unusable, so each launch has a separate one.
        let outcome = npu.stream().and_then(|stream| {
            launch(&Bench {
                stream: &stream,
                kernels,
            })
        });
        let found = match outcome {
            Ok(Ok(())) => {
                let way = kernels.launch_way(kernel);
                let function = way.map_or("nothing", |way| way.function());
                Finding::Ready(format!(
                    "{kernel} by {function}, as on the CPU, guards intact"
                ))
            }
            Ok(Err(wrong)) => Finding::missing(format!("{kernel}: {wrong}"), WRONG),
            // Not a fault of the installation: the device does not support such kernels.
            Err(error @ AscendError::CubeLimit { .. }) => Finding::Ready(format!("none: {error}")),
            Err(error @ AscendError::NoLaunch { .. }) => Finding::missing(
                error.to_string(),
                "install CANN 8.5 or later: its runtime launches all of our kernels",
            ),
            Err(error) => refused(&error),
        };
        LaunchFinding { family, found }
    };
    families.into_iter().map(find).collect()
}

/// An element type whose guards, 128 and more, differ from all data, which are below 100.
trait Number: Element + rope_core::Element<Acc = f32> + PartialEq {
    /// The `i`th number of a guard.
    fn guard(i: usize) -> Self {
        Self::narrow((128 + i % 127) as f32)
    }
}
impl Number for f32 {}
impl Number for bf16 {}

/// Numbers between two guards in one buffer of device memory.
struct Guarded<T: Number> {
    memory: DeviceBuffer<T>,
    what: &'static str,
    len: usize,
}

impl<T: Number> Guarded<T> {
    fn new(stream: &Stream, what: &'static str, values: &[T]) -> Result<Self> {
        let whole = around(values);
        Ok(Self {
            memory: stream.upload(&whole)?,
            what,
            len: values.len(),
        })
    }

    fn heads(&self) -> Heads<&DeviceMemory> {
        Heads {
            memory: &self.memory,
            offset: GUARD,
            layout: layout(),
        }
    }

    fn heads_mut(&mut self) -> Heads<&mut DeviceMemory> {
        Heads {
            memory: &mut self.memory,
            offset: GUARD,
            layout: layout(),
        }
    }

    fn offset_bytes() -> usize {
        GUARD * size_of::<T>()
    }

    /// Waits, and compares the guards, and the numbers with those expected.
    fn check(&self, stream: &Stream, expected: &[T]) -> Result<Result<(), Wrong>> {
        let read = self.read(stream)?;
        Ok(read.and_then(|found| compare(self.what, &found, expected)))
    }

    /// Waits, and returns the numbers if the guards are unchanged.
    fn read(&self, stream: &Stream) -> Result<Result<Vec<T>, Wrong>> {
        let whole = stream.download(&self.memory)?;
        Ok(between(self.what, &whole, self.len))
    }
}

/// The values between a guard before them and one after.
fn around<T: Number>(values: &[T]) -> Vec<T> {
    let guard = |from: usize| (from..from + GUARD).map(T::guard);
    let values = values.iter().copied();
    guard(0).chain(values).chain(guard(GUARD)).collect()
}

/// The `len` numbers between the guards of `whole`.
fn between<T: Number>(what: &str, whole: &[T], len: usize) -> Result<Vec<T>, Wrong> {
    let intact = around(&whole[GUARD..GUARD + len]);
    let changed = whole.iter().zip(&intact).filter(|(a, b)| a != b).count();
    let first = whole.iter().zip(&intact).position(|(a, b)| a != b);
    match first {
        None => Ok(whole[GUARD..GUARD + len].to_vec()),
        Some(at) => {
            let place = if at < GUARD {
                format!("{} elements before {what}", GUARD - at)
            } else {
                format!("{} elements after {what}", at - GUARD - len)
            };
            Err(format!(
                "wrote outside of its memory: {changed} elements around {what}, the first {place}"
            ))
        }
    }
}

fn compare<T: Number>(what: &str, found: &[T], expected: &[T]) -> Result<(), Wrong> {
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let (found, expected) = (f64::from(found.widen()), f64::from(expected.widen()));
        let error = (found - expected).abs();
        if error > TOLERANCE * expected.abs().max(1.0) || error.is_nan() {
            return Err(format!("{what}[{i}] is {found}, on the CPU {expected}"));
        }
    }
    Ok(())
}

fn layout() -> HeadsLayout {
    HeadsLayout::contiguous(Layout::Tnd, 1, TOKENS, HEADS, HEAD_DIM)
}

fn geometry() -> Result<Geometry> {
    Ok(Geometry::new(HEAD_DIM, HEAD_DIM, 0, Pairing::Half, false)?)
}

/// Small numbers without a pattern of the kernels' lengths, multiples of `step`.
fn numbers<T: Number>(len: usize, seed: usize, step: f32) -> Vec<T> {
    let number = |i: usize| ((i * 7 + i / 5 + seed) % 13) as f32 - 6.0;
    (0..len).map(|i| T::narrow(number(i) * step)).collect()
}

fn tensor<T: Number>(seed: usize) -> Vec<T> {
    numbers(TOKENS * HEADS * HEAD_DIM, seed, 1.0)
}

/// Rows of cosines and sines: any numbers, as the kernels take them.
fn rows() -> Vec<f32> {
    numbers(TOKENS * 2 * LANES, 3, 0.25)
}

impl Bench<'_> {
    fn rotator(&self) -> Result<Rotator> {
        Rotator::new(self.stream, Arc::clone(self.kernels), geometry()?)
    }
}

fn angles(rows: &Guarded<f32>) -> AngleRows<'_> {
    AngleRows {
        memory: &rows.memory,
        offset_bytes: Guarded::<f32>::offset_bytes(),
        rows: TOKENS,
    }
}

fn weights(weight: &Guarded<f32>) -> ChannelWeights<'_> {
    ChannelWeights {
        memory: &weight.memory,
        offset_bytes: Guarded::<f32>::offset_bytes(),
        channels: HEAD_DIM,
    }
}

/// The first fault.
fn all<const N: usize>(checks: [Result<Result<(), Wrong>>; N]) -> Result<Result<(), Wrong>> {
    for check in checks {
        if let Err(wrong) = check? {
            return Ok(Err(wrong));
        }
    }
    Ok(Ok(()))
}

fn rotation<T: Number>(
    bench: &Bench<'_>,
    element: KernelType,
    unit: Unit,
    direction: Direction,
) -> Result<Result<(), Wrong>> {
    let stream = bench.stream;
    let (x, rows) = (tensor::<T>(0), rows());
    let mut expected = vec![T::narrow(0.0); x.len()];
    let from = HeadsRef::new(&x, layout())?;
    let to = HeadsMut::new(&mut expected, layout())?;
    CpuRotator::new(geometry()?, Angles::Tokens(&rows))?.apply(direction, (from, to), None)?;

    let on_device = Guarded::new(stream, "the angles", &rows)?;
    let q = Guarded::new(stream, "q", &x)?;
    let mut y = Guarded::new(stream, "the result", &tensor::<T>(5))?;
    bench.rotator()?.by(unit).rotate(Rotation {
        element,
        direction,
        q: Operand::Into {
            from: q.heads(),
            to: y.heads_mut(),
        },
        k: None,
        angles: angles(&on_device),
    })?;
    all([
        y.check(stream, &expected),
        q.check(stream, &x),
        on_device.check(stream, &rows),
    ])
}

fn angle_gradient(bench: &Bench<'_>) -> Result<Result<(), Wrong>> {
    let stream = bench.stream;
    let (x, g) = (tensor::<f32>(0), tensor::<f32>(4));
    let mut expected = vec![0.0_f32; TOKENS * 2 * LANES];
    let views = (HeadsRef::new(&x, layout())?, HeadsRef::new(&g, layout())?);
    CpuRotator::new(geometry()?, Angles::Tokens(&[]))?.angle_gradients(
        views,
        None,
        &mut expected,
    )?;

    let (q, dy) = (
        Guarded::new(stream, "q", &x)?,
        Guarded::new(stream, "the gradient", &g)?,
    );
    let mut out = Guarded::new(stream, "the result", &rows())?;
    let request = AngleGradient {
        element: KernelType::F32,
        q: [q.heads(), dy.heads()],
        k: None,
        out: &mut out.memory,
    };
    bench
        .rotator()?
        .angle_gradient_at(request, Guarded::<f32>::offset_bytes())?;
    all([
        out.check(stream, &expected),
        q.check(stream, &x),
        dy.check(stream, &g),
    ])
}

/// Heads whose mean square is 4, and weights that keep products exact.
fn norm_input() -> Result<(Vec<f32>, Vec<f32>, HeadNorm)> {
    let x = tensor::<f32>(0).into_iter();
    let x = x.map(|x| if x < 0.0 { -2.0 } else { 2.0 }).collect();
    Ok((x, numbers(HEAD_DIM, 2, 0.5), HeadNorm::new(0.0)?))
}

fn norm(bench: &Bench<'_>) -> Result<Result<(), Wrong>> {
    let stream = bench.stream;
    let (x, weight, norm) = norm_input()?;
    let rows = rows();
    let mut expected = vec![0.0_f32; x.len()];
    let from = HeadsRef::new(&x, layout())?;
    let to = HeadsMut::new(&mut expected, layout())?;
    let input = NormInput {
        x: CpuOperand::Into(from, to),
        weight: Some(&weight),
    };
    CpuRotator::new(geometry()?, Angles::Tokens(&rows))?.norm_rotate(&norm, input, None)?;

    let on_device = Guarded::new(stream, "the angles", &rows)?;
    let weight_on_device = Guarded::new(stream, "the weight", &weight)?;
    let q = Guarded::new(stream, "q", &x)?;
    let mut y = Guarded::new(stream, "the result", &tensor::<f32>(5))?;
    bench.rotator()?.norm_rotate(NormRotation {
        element: KernelType::F32,
        norm,
        q: NormTensor {
            x: Operand::Into {
                from: q.heads(),
                to: y.heads_mut(),
            },
            weight: weights(&weight_on_device),
        },
        k: None,
        angles: angles(&on_device),
    })?;
    all([
        y.check(stream, &expected),
        q.check(stream, &x),
        on_device.check(stream, &rows),
        weight_on_device.check(stream, &weight),
    ])
}

fn norm_backward(bench: &Bench<'_>) -> Result<Result<(), Wrong>> {
    let stream = bench.stream;
    let (x, weight, norm) = norm_input()?;
    let (g, rows) = (tensor::<f32>(4), rows());
    let mut expected = vec![0.0_f32; x.len()];
    let mut weight_gradient = vec![0.0_f32; HEAD_DIM];
    let gradient = NormGradient {
        x: HeadsRef::new(&x, layout())?,
        weight: Some(&weight),
        gradient: CpuOperand::Into(
            HeadsRef::new(&g, layout())?,
            HeadsMut::new(&mut expected, layout())?,
        ),
        weight_gradient: Some(&mut weight_gradient),
    };
    let cpu = CpuRotator::new(geometry()?, Angles::Tokens(&rows))?;
    cpu.norm_rotate_backward(&norm, gradient, None)?;

    let rotator = bench.rotator()?;
    let on_device = Guarded::new(stream, "the angles", &rows)?;
    let weight_on_device = Guarded::new(stream, "the weight", &weight)?;
    let (q, dy) = (
        Guarded::new(stream, "q", &x)?,
        Guarded::new(stream, "the gradient", &g)?,
    );
    let mut dx = Guarded::new(stream, "the result", &tensor::<f32>(5))?;
    let sums_len = rotator.most_weight_sums() * HEAD_DIM;
    let mut sums = Guarded::new(stream, "the sums", &numbers::<f32>(sums_len, 1, 1.0))?;
    let request = NormBackward {
        element: KernelType::F32,
        norm,
        q: NormBackwardTensor {
            x: q.heads(),
            gradient: Operand::Into {
                from: dy.heads(),
                to: dx.heads_mut(),
            },
            weight: weights(&weight_on_device),
        },
        k: None,
        angles: angles(&on_device),
        weight_sums: &mut sums.memory,
    };
    let written = rotator.norm_rotate_backward_at(request, Guarded::<f32>::offset_bytes())?;
    let total = sums.read(stream)?.and_then(|sums| {
        let mut total = vec![0.0_f32; HEAD_DIM];
        for row in sums.chunks_exact(HEAD_DIM).take(written) {
            total
                .iter_mut()
                .zip(row)
                .for_each(|(total, part)| *total += part);
        }
        compare("the gradient of the weight", &total, &weight_gradient)
    });
    all([
        Ok(total),
        dx.check(stream, &expected),
        q.check(stream, &x),
        dy.check(stream, &g),
        on_device.check(stream, &rows),
        weight_on_device.check(stream, &weight),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_guard_is_placed() {
        let values = numbers::<f32>(10, 0, 1.0);
        let whole = around(&values);
        assert_eq!(whole.len(), 2 * GUARD + 10);
        assert_eq!(between("y", &whole, 10), Ok(values.clone()));
        for (at, place) in [
            (0, "2048 elements before y"),
            (GUARD - 1, "1 elements before y"),
            (GUARD + 10, "0 elements after y"),
            (2 * GUARD + 9, "2047 elements after y"),
        ] {
            let mut changed = whole.clone();
            changed[at] += 1.0;
            let wrong = between("y", &changed, 10).unwrap_err();
            assert!(wrong.contains("1 elements around y"), "{wrong}");
            assert!(wrong.ends_with(place), "{wrong}");
        }
        // The numbers between them may change.
        let mut changed = whole;
        changed[GUARD] = 40.0;
        assert_eq!(between("y", &changed, 10).map(|found| found[0]), Ok(40.0));
    }

    #[test]
    fn guards_differ_from_data_and_from_each_other() {
        let guards = around::<bf16>(&[]);
        assert!(guards.iter().all(|x| x.to_f32() >= 128.0));
        assert_ne!(guards[..GUARD], guards[GUARD..]);
        let data = [tensor::<f32>(0), rows()].concat();
        assert!(data.iter().all(|x| x.abs() < 128.0));
    }

    #[test]
    fn numbers_that_differ_are_named() {
        assert_eq!(compare("y", &[1.0_f32, 1e-7], &[1.0, 0.0]), Ok(()));
        let wrong = compare("y", &[1.0_f32, 2.0], &[1.0, 2.5]).unwrap_err();
        assert_eq!(wrong, "y[1] is 2, on the CPU 2.5");
        assert!(compare("y", &[f32::NAN], &[0.0]).is_err());
    }
}
