//! What the kernels move and claim, counted by the simulator for the shapes of Qwen3-VL-8B.
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod support;

use half::bf16;
use rope_ascend::rope::{Heads, KernelType, Operand, Rotation, Rotator};
use rope_core::{Direction, Geometry, HeadsLayout, Layout, Pairing};
use support::{Bench, angles};

const HEADS: [usize; 2] = [32, 8];
const HEAD_DIM: usize = 128;
const LANES: usize = HEAD_DIM / 2;
const TOKENS: usize = 8192;
const PIPE_ALL: usize = 6;
/// Bytes of unified buffer that a kernel may use on dav-2201.
const UB_BYTES: f64 = 188_160.0;

struct Traffic {
    bytes: u64,
    transfers: u64,
    ub_share: f64,
    pipe_all: u64,
}

fn measure(layout: Layout, batch: usize) -> Traffic {
    let bench = Bench::new(ascend_sim::Machine::default());
    let stream = &bench.stream;
    let geometry = Geometry::new(HEAD_DIM, HEAD_DIM, 0, Pairing::Half, false).unwrap();
    let rotator = Rotator::new(stream, bench.kernels.clone(), geometry).unwrap();
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
    let launches = ascend_sim::control::launches();
    let counters = &launches.last().unwrap().counters;
    let traffic = Traffic {
        bytes: counters.gm_bytes_read + counters.gm_bytes_written,
        transfers: counters.gm_transfers_in + counters.gm_transfers_out,
        ub_share: counters.ub_high_water_bytes as f64 / UB_BYTES,
        pipe_all: counters.barriers[PIPE_ALL],
    };
    drop((rotator, buffers, rows));
    bench.finish();
    traffic
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
        let traffic = measure(layout, batch);
        let share = traffic.bytes as f64 / least;
        println!(
            "{name:5}: {share:.4} of the least bytes, {} transfers, {:.1} % of UB, {} PIPE_ALL",
            traffic.transfers,
            traffic.ub_share * 100.0,
            traffic.pipe_all
        );
        assert!(share <= 1.0001, "{name}: {share} of the least bytes");
        assert_eq!(traffic.transfers, transfers, "{name}");
        assert!(traffic.ub_share >= 0.7, "{name}: {}", traffic.ub_share);
        assert_eq!(traffic.pipe_all, 0, "{name}");
    }
}
