//! A core's share of a rotation, run on the simulator.

use std::error::Error;
use std::sync::Once;

use ascend_sim::{Counted, Machine, Session, control};
use half::{bf16, f16};
use rope_ascend::rope::{
    AngleGradient, AngleRows, Heads, KernelType, Npu, Operand, Rotation, Rotator, Unit,
};
use rope_ascend::safe::{Element, Stream};
use rope_check::buffer::DType;
use rope_core::{Direction, Geometry, HeadsLayout, Layout, Pairing};

use super::price::{ATLAS_A2, Chip};
use super::time::CoreTime;
use super::{ModelRow, Pass, TimeModelError};
use crate::rows::Source;
use crate::shapes::{FLUX, QWEN3_VL_8B, Shape};

/// Vector cores of a cube core.
pub(super) const VECTORS_OF_CUBE: usize = 2;

/// What a modelled time is held to, as a multiple of the memory's.
pub const BAR: f64 = 1.15;

/// One row of the model.
#[derive(Clone, Copy, Debug)]
struct Modelled {
    shape: Shape,
    name: &'static str,
    pairing: Pairing,
    layout: Layout,
    dtype: DType,
    direction: Pass,
    unit: Unit,
}

/// The rows of `[1, 24, 28800, 128]` that the vendor publishes times of, and Qwen3-VL-8B.
fn cases() -> Vec<Modelled> {
    use Pass::{Angles, Forward, Gradient};
    let mut cases = Vec::new();
    // 2-D: each half of the head is paired by halves. 3-D: neighbours, as Flux and Wan pair them;
    // the sections of the axes are in the angles, which are gathered once a step.
    let published = [
        ("half", Pairing::Half),
        ("interleave", Pairing::Adjacent),
        ("2-D", Pairing::Quarter),
        ("3-D", Pairing::Adjacent),
    ];
    for (name, pairing) in published {
        for unit in [Unit::Vector, Unit::Cube] {
            for direction in [Forward, Gradient] {
                cases.push(Modelled {
                    shape: Shape {
                        name: "[1, 24, 28800, 128]",
                        kv_heads: 0,
                        ..FLUX
                    },
                    name,
                    pairing,
                    layout: Layout::Bnsd,
                    dtype: DType::Bf16,
                    direction,
                    unit,
                });
            }
        }
    }
    let pairings = [
        ("half", Pairing::Half),
        ("adjacent", Pairing::Adjacent),
        ("interleave-half", Pairing::InterleaveHalf),
    ];
    for (name, pairing) in pairings {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            for direction in [Forward, Gradient, Angles] {
                cases.push(Modelled {
                    shape: QWEN3_VL_8B,
                    name,
                    pairing,
                    layout: Layout::Bsnd,
                    dtype,
                    direction,
                    unit: Unit::Vector,
                });
            }
        }
    }
    cases
}

/// The rows of the model.
pub(super) fn rows() -> Result<Vec<ModelRow>, TimeModelError> {
    cases().iter().map(row).collect()
}

fn row(case: &Modelled) -> Result<ModelRow, TimeModelError> {
    let chip = ATLAS_A2;
    let cores = match case.unit {
        Unit::Vector => 1,
        Unit::Cube => VECTORS_OF_CUBE,
    };
    let tokens = cores * case.shape.seq.div_ceil(chip.cores as usize);
    let counted = match case.dtype {
        DType::F32 => count::<f32>(case, KernelType::F32, tokens),
        DType::F16 => count::<f16>(case, KernelType::F16, tokens),
        DType::Bf16 => count::<bf16>(case, KernelType::Bf16, tokens),
        DType::F64 => Err("the kernels have no f64".into()),
    };
    let counted = counted.map_err(TimeModelError::Run)?;
    model(case, &counted, tokens / cores, chip)
}

fn model(
    case: &Modelled,
    counted: &[Counted],
    tokens: usize,
    chip: Chip,
) -> Result<ModelRow, TimeModelError> {
    let stores = match case.direction {
        Pass::Angles => 1,
        _ if case.shape.kv_heads == 0 => 1,
        _ => 2,
    };
    let core = CoreTime::of(counted, chip, stores)?;
    let bytes = core.bytes as f64 * case.shape.seq as f64 / tokens as f64;
    let memory = bytes / chip.memory_bytes_per_second;
    let shape = &case.shape;
    let element_bytes = if case.dtype == DType::F32 { 4 } else { 2 };
    let row = 2 * (shape.heads + shape.kv_heads) * shape.head_dim * element_bytes;
    let least = shape.seq * (row + shape.rotary_dim * size_of::<f32>());
    let least = least as f64 / chip.memory_bytes_per_second;
    let us = |seconds: f64| (seconds * 1e9).round() / 1e3;
    Ok(ModelRow {
        case: format!("{} {}", case.shape.name, case.name),
        kernel: match case.unit {
            Unit::Vector => "vector".to_owned(),
            Unit::Cube => "matrix".to_owned(),
        },
        dtype: case.dtype,
        direction: case.direction,
        bound_by: core.bound_by(),
        modelled_us: us(core.total()),
        memory_us: us(memory),
        least_us: us(least),
        ratio: (core.total() / memory * 1e4).round() / 1e4,
        vector_us: us(core.vector),
        start_up_us: us(core.start_up),
        load_us: us(core.load),
        store_us: us(core.store),
        scalar_us: us(core.scalar),
        cube_us: us(core.cube),
        barrier_cycles_at_bar: core.barrier_cycles(BAR * memory).round(),
        source: Source::Modelled,
    })
}

/// What the core with the most tokens does: a launch of those tokens on a machine with one core;
/// with a cube core, those of two vector cores.
fn count<T: Element>(
    case: &Modelled,
    element: KernelType,
    tokens: usize,
) -> Result<Vec<Counted>, Box<dyn Error + Send + Sync>> {
    let npu = one_core()?;
    let stream = npu.stream()?;
    let shape = case.shape.at(tokens);
    let geometry = Geometry::new(shape.head_dim, shape.rotary_dim, 0, case.pairing, false)?;
    let rotator = npu.rotator(&stream, geometry)?.by(case.unit);
    let heads: Vec<usize> = [shape.heads, shape.kv_heads]
        .into_iter()
        .filter(|heads| *heads > 0)
        .collect();
    let layouts: Vec<_> = heads
        .iter()
        .map(|heads| HeadsLayout::contiguous(case.layout, 1, tokens, *heads, shape.head_dim))
        .collect();
    let angle_elems = tokens * 2 * geometry.lane_count();
    let request = Request {
        rotator: &rotator,
        stream: &stream,
        element,
        layouts: &layouts,
        tokens,
        angle_elems,
    };
    match case.direction {
        Pass::Forward => request.rotate::<T>(Direction::Forward)?,
        Pass::Gradient => request.rotate::<T>(Direction::Adjoint)?,
        Pass::Angles => request.angles::<T>()?,
    }
    let violations = control::violations();
    if let Some(first) = violations.first() {
        return Err(format!("the simulator found {}: {first}", violations.len()).into());
    }
    let launch = control::launches().pop().ok_or("nothing was launched")?;
    Ok(launch.first_block)
}

/// The simulator's device, of a machine with one vector core, or two where a cube core needs them.
/// The machine stays for the process: the device is kept, too.
fn one_core() -> Result<Npu, rope_ascend::AscendError> {
    static MACHINE: Once = Once::new();
    MACHINE.call_once(|| {
        let machine = Machine {
            vector_cores: 1,
            ..Machine::ascend_910b()
        };
        std::mem::forget(Session::with_machine(machine));
    });
    Npu::simulated()
}

fn elems(layout: &HeadsLayout) -> usize {
    layout.seq * layout.heads * layout.head_dim
}

struct Request<'a> {
    rotator: &'a Rotator,
    stream: &'a Stream,
    element: KernelType,
    layouts: &'a [HeadsLayout],
    tokens: usize,
    angle_elems: usize,
}

impl Request<'_> {
    fn rotate<T: Element>(&self, direction: Direction) -> Result<(), rope_ascend::AscendError> {
        let rows = self.stream.zeros::<f32>(self.angle_elems)?;
        let mut tensors = Vec::new();
        for layout in self.layouts {
            tensors.push(self.stream.zeros::<T>(elems(layout))?);
        }
        let mut operands = tensors
            .iter_mut()
            .zip(self.layouts)
            .map(|(memory, layout)| {
                Operand::InPlace(Heads {
                    memory,
                    offset: 0,
                    layout: *layout,
                })
            });
        let (Some(q), k) = (operands.next(), operands.next()) else {
            return Ok(());
        };
        self.rotator.rotate(Rotation {
            element: self.element,
            direction,
            q,
            k,
            angles: AngleRows {
                memory: &rows,
                offset_bytes: 0,
                rows: self.tokens,
            },
        })?;
        self.stream.synchronize()
    }

    fn angles<T: Element>(&self) -> Result<(), rope_ascend::AscendError> {
        let mut out = self.stream.zeros::<f32>(self.angle_elems)?;
        let mut tensors = Vec::new();
        for layout in self.layouts {
            let zeros = || self.stream.zeros::<T>(elems(layout));
            tensors.push([zeros()?, zeros()?]);
        }
        let mut pairs = tensors.iter().zip(self.layouts).map(|(pair, layout)| {
            pair.each_ref().map(|memory| Heads {
                memory: &**memory,
                offset: 0,
                layout: *layout,
            })
        });
        let (Some(q), k) = (pairs.next(), pairs.next()) else {
            return Ok(());
        };
        self.rotator.angle_gradient(AngleGradient {
            element: self.element,
            q,
            k,
            out: &mut out,
        })?;
        self.stream.synchronize()
    }
}
