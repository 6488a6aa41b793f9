//! What the kernels move and claim, counted by the simulator for the shapes of Qwen3-VL-8B.
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod support;

use ascend_sim::LaunchReport;
use half::bf16;
use rope_ascend::rope::{Heads, KernelType, Operand, Rotation, Rotator, Unit};
use rope_core::{Direction, Geometry, HeadsLayout, Layout, Pairing};
use support::{Bench, angles};

const HEADS: [usize; 2] = [32, 8];
const HEAD_DIM: usize = 128;
const LANES: usize = HEAD_DIM / 2;
const TOKENS: usize = 8192;
const PIPE_ALL: usize = 6;
/// Bytes of unified buffer that a kernel may use on dav-2201.
const UB_BYTES: f64 = 188_160.0;

/// One rotation in place of 8192 tokens in bf16, and what the simulator counted of it.
fn measure(layout: Layout, batch: usize, pairing: Pairing, unit: Unit) -> LaunchReport {
    let bench = Bench::new(ascend_sim::Machine::default());
    let stream = &bench.stream;
    let geometry = Geometry::new(HEAD_DIM, HEAD_DIM, 0, pairing, false).unwrap();
    let rotator = Rotator::new(stream, bench.kernels.clone(), geometry).unwrap();
    let rotator = rotator.by(unit);
    let rows = stream.upload(&vec![1.0_f32; TOKENS * 2 * LANES]).unwrap();
    let zeros = |heads| stream.zeros::<bf16>(TOKENS * heads * HEAD_DIM).unwrap();
    let mut buffers = HEADS.map(zeros);
    let [q, k] = &mut buffers;
    let layout = |heads| HeadsLayout::contiguous(layout, batch, TOKENS / batch, heads, HEAD_DIM);
    rotator
        .rotate(Rotation {
            element: KernelType::Bf16,
            direction: Direction::Forward,
            q: Operand::InPlace(Heads {
                memory: q,
                offset: 0,
                layout: layout(HEADS[0]),
            }),
            k: Some(Operand::InPlace(Heads {
                memory: k,
                offset: 0,
                layout: layout(HEADS[1]),
            })),
            angles: angles(&rows, TOKENS),
        })
        .unwrap();
    stream.synchronize().unwrap();
    let report = ascend_sim::control::launches().pop().unwrap();
    drop((rotator, buffers, rows));
    bench.finish();
    report
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

/// By the cube cores x is read twice, and the product written and read: on dav-2201 the units share no
/// buffer. All else moves once, the matrix once for each cube core.
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
