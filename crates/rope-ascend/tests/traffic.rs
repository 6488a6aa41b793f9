//! What the kernels move and claim, counted by the simulator for the shapes of Qwen3-VL-8B.
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod support;

use half::bf16;
use rope_ascend::rope::{
    Angles, Direction, Lane, LaneMap, Layout, Operand, Pairing, Positions, Rotary, Rotation,
    Rotator, Table, View,
};
use support::Bench;

const HEADS: [u32; 2] = [32, 8];
const HEAD_DIM: u32 = 128;
const PAIRS: u32 = HEAD_DIM / 2;
const TOKENS: u32 = 8192;
const PIPE_ALL: usize = 6;

/// Striped sections [24, 20, 20], packed so that each axis has its own columns.
fn qwen3_lanes() -> LaneMap {
    let lanes = (0..PAIRS)
        .map(|i| {
            let axis = match i % 3 {
                1 if i < 60 => 1,
                2 if i < 60 => 2,
                _ => 0,
            };
            Lane { axis, column: i }
        })
        .collect();
    LaneMap::new(lanes, 3, PAIRS).unwrap().packed().0
}

struct Traffic {
    bytes: u64,
    transfers: u64,
    ub_share: f64,
    pipe_all: u64,
    tiles: u64,
}

fn measure(layout: Layout, batch: u32, from_table: bool) -> Traffic {
    let bench = Bench::new(ascend_sim::Machine::default());
    let stream = &bench.stream;
    let seq = TOKENS / batch;
    let lanes = qwen3_lanes();
    let rotary = Rotary::new(HEAD_DIM, Pairing::Half).unwrap();
    let rotary = if from_table {
        rotary.with_lanes(lanes).unwrap()
    } else {
        rotary
    };
    let rotator = Rotator::new(stream, bench.kernels.clone(), rotary);
    let mut buffers = HEADS.map(|heads| {
        stream
            .zeros::<bf16>((TOKENS * heads * HEAD_DIM) as usize)
            .unwrap()
    });
    let [q, k] = &mut buffers;
    let view = |heads| View::contiguous(layout, batch, seq, heads, HEAD_DIM);
    let ones = |rows: u32| vec![1.0_f32; (rows * PAIRS) as usize];
    let per_token = rotator.upload_angles(&ones(TOKENS), &ones(TOKENS)).unwrap();
    let table = Table::new(stream, &ones(1024), &ones(1024), PAIRS).unwrap();
    let ids: Vec<i32> = (0..3 * TOKENS as i32).map(|i| i % 1024).collect();
    let positions = Positions::new(stream, &ids, 3).unwrap();
    let angles = if from_table {
        Angles::Table(&table, &positions)
    } else {
        Angles::PerToken(&per_token)
    };
    let mut rotation = Rotation {
        direction: Direction::Forward,
        batch,
        seq,
        q: Operand::InPlace(q, view(HEADS[0])),
        k: Some(Operand::InPlace(k, view(HEADS[1]))),
        angles,
    };
    let plan = rotator.plan(&rotation).unwrap();
    rotator.rotate(&mut rotation).unwrap();
    stream.synchronize().unwrap();
    let launches = ascend_sim::control::launches();
    let launch = launches.last().unwrap();
    let counters = &launch.counters;
    let t = &plan.tiling;
    let per_core = u64::from(TOKENS).div_ceil(u64::from(plan.blocks));
    let tiles = u64::from(plan.blocks)
        * per_core.div_ceil(u64::from(t.tokens_per_tile))
        * u64::from((HEADS[0] + HEADS[1]).div_ceil(t.heads_per_tile));
    let traffic = Traffic {
        bytes: counters.gm_bytes_read + counters.gm_bytes_written,
        transfers: counters.gm_transfers_in + counters.gm_transfers_out,
        ub_share: counters.ub_high_water_bytes as f64 / f64::from(bench.kernels.machine().ub_bytes),
        pipe_all: counters.barriers[PIPE_ALL],
        tiles,
    };
    drop(rotator);
    drop((buffers, per_token, table, positions));
    bench.finish();
    traffic
}

/// q and k in and out once, the angles once.
fn least_bytes(from_table: bool) -> u64 {
    let tensors = 2 * 2 * TOKENS * (HEADS[0] + HEADS[1]) * HEAD_DIM;
    let angles = TOKENS * 2 * PAIRS * 4;
    let positions = if from_table { 3 * 4 * TOKENS } else { 0 };
    u64::from(tensors + angles + positions)
}

#[test]
fn qwen3_vl_8b() {
    // BSND folds to the tokens of TND; the table is counted once, the layouts with angles.
    let layouts = [
        ("TND", Layout::Tnd, 1, true),
        ("BSND", Layout::Bsnd, 4, false),
        ("BNSD", Layout::Bnsd, 1, false),
    ];
    for (name, layout, batch, with_table) in layouts {
        for from_table in [false, true] {
            if from_table && !with_table {
                continue;
            }
            let traffic = measure(layout, batch, from_table);
            let least = least_bytes(from_table);
            let share = traffic.bytes as f64 / least as f64;
            println!(
                "{name:5} {}: {:.4} of the least bytes, {} transfers in {} tiles, {:.1} % of UB, {} PIPE_ALL",
                if from_table { "table " } else { "angles" },
                share,
                traffic.transfers,
                traffic.tiles,
                traffic.ub_share * 100.0,
                traffic.pipe_all
            );
            assert!(share <= 1.03, "{name}: {share} of the least bytes");
            // q and k in and out; angles once a tile, or by token and axis, and positions.
            let angle_transfers = if from_table {
                u64::from(3 * TOKENS) + 40 * 2
            } else {
                traffic.tiles
            };
            let most = 4 * traffic.tiles + angle_transfers + 40;
            assert!(
                traffic.transfers <= most,
                "{name}: {} transfers, at most {most}",
                traffic.transfers
            );
            assert!(
                traffic.ub_share >= 0.75,
                "{name}: {} of the unified buffer",
                traffic.ub_share
            );
            assert_eq!(traffic.pipe_all, 0, "{name}");
        }
    }
}
