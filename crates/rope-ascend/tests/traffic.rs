//! The traffic and the buffer of the kernels, counted by the simulator for shapes of Qwen3-VL-8B.
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod support;

use ascend_sim::LaunchReport;
use half::bf16;
use rope_ascend::rope::{
    AngleRows, KernelType, NormBackward, NormBackwardTensor, NormRotation, NormTensor, Operand,
    Rotation, Rotator, Unit,
};
use rope_ascend::safe::DeviceBuffer;
use rope_core::{Direction, Geometry, HeadNorm, HeadsLayout, Layout, Pairing};
use support::norm::{heads, weights};
use support::{Bench, angles};

const HEADS: [usize; 2] = [32, 8];
const HEAD_DIM: usize = 128;
const LANES: usize = HEAD_DIM / 2;
const TOKENS: usize = 8192;
const PIPE_ALL: usize = 6;
/// Bytes of unified buffer that a kernel may use on dav-2201.
const UB_BYTES: f64 = 188_160.0;

/// Q and k as the kernels take them, in one layout.
struct Tensors {
    bench: Bench,
    rotator: Rotator,
    layouts: [HeadsLayout; 2],
}

impl Tensors {
    fn new(layout: Layout, batch: usize, pairing: Pairing) -> Self {
        let bench = Bench::new(ascend_sim::Machine::default());
        let geometry = Geometry::new(HEAD_DIM, HEAD_DIM, 0, pairing, false).unwrap();
        let rotator = Rotator::new(&bench.stream, bench.kernels.clone(), geometry).unwrap();
        let layouts = HEADS
            .map(|heads| HeadsLayout::contiguous(layout, batch, TOKENS / batch, heads, HEAD_DIM));
        Self {
            bench,
            rotator,
            layouts,
        }
    }

    /// The simulator's counts of the launch that `run` queues, given the rows of angles and the
    /// memory of four tensors: q, k, and the same again.
    fn measure(
        self,
        run: impl FnOnce(&Self, AngleRows<'_>, &mut [DeviceBuffer<bf16>; 4]),
    ) -> LaunchReport {
        let stream = &self.bench.stream;
        let rows = stream.upload(&vec![1.0_f32; TOKENS * 2 * LANES]).unwrap();
        let zeros = |i: usize| stream.zeros::<bf16>(self.layouts[i % 2].elems()).unwrap();
        let mut buffers = [0, 1, 2, 3].map(zeros);
        run(&self, angles(&rows, TOKENS), &mut buffers);
        stream.synchronize().unwrap();
        let report = ascend_sim::control::launches().pop().unwrap();
        drop((self.rotator, buffers, rows));
        self.bench.finish();
        report
    }
}

/// One rotation in place of 8192 tokens in bf16, and the simulator's counts.
fn measure(layout: Layout, batch: usize, pairing: Pairing, unit: Unit) -> LaunchReport {
    let mut tensors = Tensors::new(layout, batch, pairing);
    tensors.rotator = tensors.rotator.by(unit);
    tensors.measure(|tensors, angles, [q, k, ..]| {
        let request = Rotation {
            element: KernelType::Bf16,
            direction: Direction::Forward,
            q: Operand::InPlace(heads(q, (0, tensors.layouts[0]))),
            k: Some(Operand::InPlace(heads(k, (0, tensors.layouts[1])))),
            angles,
        };
        tensors.rotator.rotate(request).unwrap();
    })
}

fn measure_norm(layout: Layout, batch: usize) -> LaunchReport {
    Tensors::new(layout, batch, Pairing::Half).measure(|tensors, angles, [q, k, ..]| {
        let weight = tensors.bench.stream.zeros::<f32>(HEAD_DIM).unwrap();
        let mut operands = [q, k]
            .into_iter()
            .zip(tensors.layouts)
            .map(|(x, layout)| NormTensor {
                x: Operand::InPlace(heads(x, (0, layout))),
                weight: weights(&weight),
            });
        let request = NormRotation {
            element: KernelType::Bf16,
            norm: HeadNorm::new(1e-6).unwrap(),
            q: operands.next().unwrap(),
            k: operands.next(),
            angles,
        };
        tensors.rotator.norm_rotate(request).unwrap();
    })
}

fn measure_norm_backward(layout: Layout, batch: usize) -> LaunchReport {
    Tensors::new(layout, batch, Pairing::Half).measure(|tensors, angles, [q, k, dq, dk]| {
        let stream = &tensors.bench.stream;
        let weight = stream.zeros::<f32>(HEAD_DIM).unwrap();
        let most = tensors.rotator.most_weight_sums();
        let mut sums = stream.zeros::<f32>(most * 2 * HEAD_DIM).unwrap();
        let mut operands =
            [(q, dq), (k, dk)]
                .into_iter()
                .zip(tensors.layouts)
                .map(|((x, gradient), layout)| NormBackwardTensor {
                    x: heads(&**x, (0, layout)),
                    gradient: Operand::InPlace(heads(gradient, (0, layout))),
                    weight: weights(&weight),
                });
        let request = NormBackward {
            element: KernelType::Bf16,
            norm: HeadNorm::new(1e-6).unwrap(),
            q: operands.next().unwrap(),
            k: operands.next(),
            angles,
            weight_sums: &mut sums,
        };
        tensors.rotator.norm_rotate_backward(request).unwrap();
    })
}

#[test]
fn qwen3_vl_8b() {
    // q and k in and out once, the angles once.
    let tensors = 2 * 2 * TOKENS * (HEADS[0] + HEADS[1]) * HEAD_DIM;
    let least = (tensors + TOKENS * 2 * LANES * 4) as f64;
    // A core has 204 or 205 tokens: 103 tiles of at most 2, or tiles of BNSD's longer runs. Each
    // has one transfer for the angles, and one in and one out for q and for k.
    let layouts = [
        ("TND", Layout::Tnd, 1, 20_560),
        ("BSND", Layout::Bsnd, 4, 20_560),
        ("BNSD", Layout::Bnsd, 1, 11_480),
    ];
    for (name, layout, batch, transfers) in layouts {
        let counters = measure(layout, batch, Pairing::Half, Unit::Vector).counters;
        let share = (counters.gm_bytes_read + counters.gm_bytes_written) as f64 / least;
        let counted = counters.gm_transfers_in + counters.gm_transfers_out;
        let ub_share = counters.ub_high_water_bytes as f64 / UB_BYTES;
        let pipe_all = counters.barriers[PIPE_ALL];
        println!(
            "{name:5}: {share:.4} of the least bytes, {} transfers, {:.1} % of UB, {} PIPE_ALL",
            counted,
            ub_share * 100.0,
            pipe_all
        );
        assert!(share <= 1.0001, "{name}: {share} of the least bytes");
        assert_eq!(counted, transfers, "{name}");
        assert!(ub_share >= 0.7, "{name}: {ub_share}");
        assert_eq!(pipe_all, 0, "{name}");
    }
}

/// By the cube cores x is read twice, and the product written and read: on dav-2201 the units share
/// no buffer. All else moves once, the matrix once for each cube core.
#[test]
fn qwen3_vl_8b_by_the_cube_unit() {
    let x = (2 * TOKENS * (HEADS[0] + HEADS[1]) * HEAD_DIM) as u64;
    let angles = (TOKENS * 2 * LANES * 4) as u64;
    let matrix = (HEAD_DIM * HEAD_DIM * 2) as u64;
    let map = (2 * HEAD_DIM * 4) as u64;
    for (name, layout, batch) in [
        ("TND", Layout::Tnd, 1),
        ("BSND", Layout::Bsnd, 4),
        ("BNSD", Layout::Bnsd, 1),
    ] {
        for pairing in Pairing::ALL {
            let report = measure(layout, batch, pairing, Unit::Cube);
            let c = &report.counters;
            let cubes = u64::from(report.blocks);
            // Where x is permuted too, two products cross instead of x and one.
            let products = if pairing == Pairing::InterleaveHalf {
                2
            } else {
                1
            };
            assert_eq!(c.cube_gm_bytes_read, x + cubes * products * matrix);
            assert_eq!(c.cube_gm_bytes_written, products * x);
            let own = c.gm_bytes_read - c.cube_gm_bytes_read;
            assert_eq!(own, 2 * x + angles + 2 * cubes * map, "{name} {pairing:?}");
            assert_eq!(c.gm_bytes_written - c.cube_gm_bytes_written, x);
            // Between the units: the product out and in, and x once more or its product.
            let exchanged = (products + 2) * x;
            let all = c.gm_bytes_read + c.gm_bytes_written;
            let least = (2 * x + angles) as f64;
            let share = (all - exchanged) as f64 / least;
            println!(
                "{name:5} {pairing:?}: {share:.4} of the least bytes, {:.4} with what the units \
                 exchange, {} multiply-adds, {} flags, {:.1} % of UB",
                all as f64 / least,
                c.cube_multiply_adds,
                c.cross_core_flags,
                c.ub_high_water_bytes as f64 / UB_BYTES * 100.0
            );
            assert!(
                share <= 1.05,
                "{name} {pairing:?}: {share} of the least bytes"
            );
            assert_eq!(c.cube_multiply_adds, x / 2 * HEAD_DIM as u64 * products);
            assert_eq!(c.barriers[PIPE_ALL], 0);
        }
    }
}

/// The norm with the rotation and its backward: of the bytes, the rest are the weights, the map and
/// the sums, which each core has for itself.
#[test]
fn qwen3_vl_8b_with_the_norm_of_its_heads() {
    let tensor = (2 * TOKENS * (HEADS[0] + HEADS[1]) * HEAD_DIM) as f64;
    let angles = (TOKENS * 2 * LANES * 4) as f64;
    for (name, layout, batch) in [
        ("TND", Layout::Tnd, 1),
        ("BSND", Layout::Bsnd, 4),
        ("BNSD", Layout::Bnsd, 1),
    ] {
        let found = [
            // In and out once; the backward reads x as well.
            ("forward", measure_norm(layout, batch), 2.0 * tensor),
            (
                "backward",
                measure_norm_backward(layout, batch),
                3.0 * tensor,
            ),
        ];
        for (direction, report, tensors) in found {
            let c = &report.counters;
            let bytes = c.gm_bytes_read + c.gm_bytes_written;
            let share = bytes as f64 / (tensors + angles);
            let ub_share = c.ub_high_water_bytes as f64 / UB_BYTES;
            println!(
                "{name:5} {direction}: {share:.4} of the least bytes, {} transfers, {:.1} % of UB, \
                 {} PIPE_ALL",
                c.gm_transfers_in + c.gm_transfers_out,
                ub_share * 100.0,
                c.barriers[PIPE_ALL]
            );
            assert!(share <= 1.001, "{name}: {share} of the least bytes");
            assert!(ub_share >= 0.7, "{name}: {ub_share}");
            assert_eq!(c.barriers[PIPE_ALL], 0, "{name}");
        }
    }
}
