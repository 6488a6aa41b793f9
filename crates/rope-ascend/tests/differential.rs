//! The kernels on the simulator against plain f64 loops.
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod support;

use half::{bf16, f16};
use rope_ascend::rope::{AngleGradient, AngleRows, Heads, Operand, Rotation, Unit};
use rope_ascend::safe::{DeviceBuffer, DeviceMemory};
use rope_core::{Direction, Geometry, HeadsLayout, Layout, Pairing, Strides};
use support::{
    At, Bench, FEW_CORES, Number, Numbers, angles, index, on_each_pairing, pair_channels,
    rotate_plainly, tolerance,
};

#[derive(Clone, Debug)]
struct Case {
    batch: usize,
    seq: usize,
    heads: [usize; 2],
    head_dim: usize,
    channels: std::ops::Range<usize>,
    pairing: Pairing,
    per_channel: bool,
    layout: Layout,
    /// Rows cut out of a wider tensor.
    strided: bool,
    in_place: bool,
    shared: bool,
    /// The rows of angles lie behind others in their memory.
    offset_angles: bool,
}

impl Case {
    fn plain(pairing: Pairing) -> Self {
        Self {
            batch: 2,
            seq: 5,
            heads: [4, 2],
            head_dim: 64,
            channels: 0..64,
            pairing,
            per_channel: false,
            layout: Layout::Bsnd,
            strided: false,
            in_place: true,
            shared: false,
            offset_angles: false,
        }
    }

    fn geometry(&self) -> Geometry {
        let channels = &self.channels;
        let (pairing, per_channel) = (self.pairing, self.per_channel);
        Geometry::new(
            self.head_dim,
            channels.len(),
            channels.start,
            pairing,
            per_channel,
        )
        .unwrap()
    }

    /// Where a tensor lies in its buffer, and the buffer's length.
    fn place(&self, heads: usize) -> (At, usize) {
        let (batch, seq, head_dim) = (self.batch, self.seq, self.head_dim);
        let contiguous = HeadsLayout::contiguous(self.layout, batch, seq, heads, head_dim);
        if self.strided {
            // A slice of a tensor that has three more heads, and three more channels in each.
            let head = head_dim + 3;
            let token = (heads + 3) * head;
            let strides = Strides {
                batch: seq * token + 5,
                seq: token,
                head,
            };
            let offset = 2 * head + 1;
            let len = batch * strides.batch + offset;
            let layout = HeadsLayout {
                strides,
                ..contiguous
            };
            return ((offset, layout), len);
        }
        ((0, contiguous), batch * seq * heads * head_dim)
    }
}

fn values<T: Number>(numbers: &mut Numbers, len: usize) -> Vec<T> {
    (0..len).map(|_| T::of(numbers.unit())).collect()
}

fn compare<T: Number>(case: &Case, direction: Direction, name: &str, got: &[T], truth: &[f64]) {
    for (i, (got, truth)) in got.iter().zip(truth).enumerate() {
        let error = (got.wide() - truth).abs();
        assert!(
            error <= tolerance::<T>(*truth),
            "{:?} {case:?} {direction:?}: {name}[{i}] is {} instead of {truth}, off by {error:e}",
            T::TYPE,
            got.wide()
        );
    }
}

fn run<T: Number>(bench: &Bench, case: &Case, direction: Direction) {
    run_by::<T>(bench, case, direction, Unit::Vector);
}

fn run_by<T: Number>(bench: &Bench, case: &Case, direction: Direction, unit: Unit) {
    let stream = &bench.stream;
    let mut numbers = Numbers(0x9e37_79b9 + case.head_dim as u64 * 31 + case.seq as u64);
    let geometry = case.geometry();
    let lanes = geometry.lane_count();
    let rows = if case.shared {
        case.seq
    } else {
        case.batch * case.seq
    };
    let rotator = bench.rotator(geometry, unit);
    let drawn: Vec<f32> = values(&mut numbers, rows * 2 * lanes);
    // Rows of other angles before those of the case.
    let before = if case.offset_angles { 3 * 2 * lanes } else { 0 };
    let on_device = [vec![7.0_f32; before], drawn.clone()].concat();
    let on_device = stream.upload(&on_device).unwrap();
    let angle = |token: usize, lane: usize| {
        let cos = token % rows * 2 * lanes + lane;
        (f64::from(drawn[cos]), f64::from(drawn[cos + lanes]))
    };

    let mut hosts = Vec::new();
    let mut devices = Vec::new();
    let mut targets = Vec::new();
    for heads in case.heads {
        let (at, len) = case.place(heads.max(1));
        let x: Vec<T> = values(&mut numbers, len);
        let device = stream.upload(&x).unwrap();
        // The output is laid out the other way round, to tell input strides from output strides.
        let other = if case.layout == Layout::Bnsd {
            Layout::Bsnd
        } else {
            Layout::Bnsd
        };
        let (batch, seq, head_dim) = (case.batch, case.seq, case.head_dim);
        let out = HeadsLayout::contiguous(other, batch, seq, heads.max(1), head_dim);
        let filled = vec![T::of(9.0); batch * seq * heads.max(1) * head_dim];
        targets.push((stream.upload(&filled).unwrap(), (0, out), filled.len()));
        hosts.push((x, at));
        devices.push(device);
    }
    let (q_dev, k_dev) = devices.split_at_mut(1);
    let (q_to, k_to) = targets.split_at_mut(1);
    let q = make(case.in_place, &mut q_dev[0], hosts[0].1, &mut q_to[0]);
    let k =
        (case.heads[1] > 0).then(|| make(case.in_place, &mut k_dev[0], hosts[1].1, &mut k_to[0]));
    rotator
        .rotate(Rotation {
            element: T::TYPE,
            direction,
            q,
            k,
            angles: AngleRows {
                offset_bytes: before * size_of::<f32>(),
                ..angles(&on_device, rows)
            },
        })
        .unwrap_or_else(|error| panic!("{case:?}: {error}"));
    if let Err(error) = stream.synchronize() {
        let found = ascend_sim::control::take_violations();
        panic!(
            "{case:?} {direction:?} {unit:?}: {error}\n{}",
            found
                .iter()
                .take(5)
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join("\n")
        );
    }

    for (i, name) in ["q", "k"].into_iter().enumerate() {
        if case.heads[i] == 0 {
            continue;
        }
        let (x, at) = &hosts[i];
        let wide: Vec<f64> = x.iter().map(|v| v.wide()).collect();
        let (mut truth, out_at) = if case.in_place {
            (wide.clone(), *at)
        } else {
            (vec![9.0; targets[i].2], targets[i].1)
        };
        let output = (&mut truth[..], out_at);
        rotate_plainly((&wide, *at), output, geometry, direction, &angle);
        let got = stream
            .download(if case.in_place {
                &devices[i]
            } else {
                &targets[i].0
            })
            .unwrap();
        compare(case, direction, name, &got, &truth);
    }
}

fn heads<M>(memory: M, (offset, layout): At) -> Heads<M> {
    Heads {
        memory,
        offset,
        layout,
    }
}

fn make<'a, T: Number>(
    in_place: bool,
    device: &'a mut DeviceBuffer<T>,
    at: At,
    target: &'a mut (DeviceBuffer<T>, At, usize),
) -> Operand<'a> {
    if in_place {
        Operand::InPlace(heads(device, at))
    } else {
        Operand::Into {
            from: heads(device, at),
            to: heads(&mut target.0, target.1),
        }
    }
}

fn run_all(bench: &Bench, case: &Case) {
    for direction in [Direction::Forward, Direction::Adjoint] {
        run::<f32>(bench, case, direction);
        run::<f16>(bench, case, direction);
        run::<bf16>(bench, case, direction);
    }
}

/// By the cube unit, which takes 16-bit types.
fn run_by_cube(bench: &Bench, case: &Case) {
    for direction in [Direction::Forward, Direction::Adjoint] {
        run_by::<f16>(bench, case, direction, Unit::Cube);
        run_by::<bf16>(bench, case, direction, Unit::Cube);
    }
}

const PAIRINGS: [Pairing; 4] = Pairing::ALL;

fn shared_and_separate_angles() -> impl Iterator<Item = Case> {
    PAIRINGS.into_iter().flat_map(|pairing| {
        [false, true].map(|per_channel| Case {
            per_channel,
            ..Case::plain(pairing)
        })
    })
}

#[test]
fn every_pairing_with_shared_and_separate_angles() {
    let bench = Bench::new(ascend_sim::Machine::default());
    shared_and_separate_angles().for_each(|case| run_all(&bench, &case));
    bench.finish();
}

#[test]
fn every_pairing_with_shared_and_separate_angles_by_cube() {
    let bench = Bench::new(ascend_sim::Machine::ascend_910b());
    shared_and_separate_angles().for_each(|case| run_by_cube(&bench, &case));
    bench.finish();
}

fn layouts() -> Vec<Case> {
    let mut cases = Vec::new();
    for pairing in PAIRINGS {
        for in_place in [true, false] {
            for shared in [false, true] {
                let case = Case {
                    in_place,
                    shared,
                    ..Case::plain(pairing)
                };
                for layout in [Layout::Bsnd, Layout::Bnsd, Layout::Sbnd] {
                    cases.push(Case {
                        layout,
                        ..case.clone()
                    });
                }
                cases.push(Case {
                    strided: true,
                    ..case
                });
            }
        }
    }
    cases
}

#[test]
fn every_layout_in_and_out_of_place() {
    let bench = Bench::new(ascend_sim::Machine::default());
    layouts().iter().for_each(|case| run_all(&bench, case));
    bench.finish();
}

#[test]
fn every_layout_in_and_out_of_place_by_cube() {
    let bench = Bench::new(ascend_sim::Machine::ascend_910b());
    layouts().iter().for_each(|case| run_by_cube(&bench, case));
    bench.finish();
}

fn partial_heads() -> Vec<Case> {
    let mut cases = Vec::new();
    for pairing in PAIRINGS {
        for (head_dim, channels) in [
            (72, 0..72),
            (80, 0..80),
            (256, 0..64),
            (192, 128..192),
            (100, 4..60),
            (20, 0..12),
        ] {
            for in_place in [true, false] {
                for layout in [Layout::Bsnd, Layout::Bnsd] {
                    cases.push(Case {
                        head_dim,
                        channels: channels.clone(),
                        in_place,
                        layout,
                        ..Case::plain(pairing)
                    });
                }
            }
        }
    }
    cases
}

#[test]
fn partial_and_unaligned_heads() {
    let bench = Bench::new(ascend_sim::Machine::default());
    partial_heads()
        .iter()
        .for_each(|case| run_all(&bench, case));
    bench.finish();
}

#[test]
fn partial_and_unaligned_heads_by_cube() {
    let bench = Bench::new(ascend_sim::Machine::ascend_910b());
    partial_heads()
        .iter()
        .for_each(|case| run_by_cube(&bench, case));
    bench.finish();
}

fn cases_of_sizes() -> Vec<Case> {
    let mut cases = Vec::new();
    for pairing in PAIRINGS {
        for layout in [Layout::Tnd, Layout::Bnsd] {
            for (seq, heads, head_dim) in [
                (1, [1, 0], 32),
                (1, [128, 8], 128),
                // More rows fit a tile of the vector cores than the cube core's two products.
                (1, [90, 10], 72),
                (39, [3, 1], 128),
                (41, [28, 4], 64),
                (130, [2, 2], 32),
                (2, [128, 128], 512),
                (700, [1, 1], 64),
                // Several tokens a tile, whose coefficients lie further apart than one instruction
                // can step.
                (130, [2, 1], 1024),
            ] {
                cases.push(Case {
                    batch: 1,
                    seq,
                    heads,
                    head_dim,
                    channels: 0..head_dim,
                    layout,
                    ..Case::plain(pairing)
                });
            }
        }
    }
    cases
}

#[test]
fn sizes() {
    let bench = Bench::new(ascend_sim::Machine::default());
    for case in cases_of_sizes() {
        run::<bf16>(&bench, &case, Direction::Forward);
        run::<f32>(&bench, &case, Direction::Adjoint);
    }
    bench.finish();
}

#[test]
fn sizes_by_cube() {
    /// Channels of which the matrix, or two of them, fit the cube core's buffer.
    const MOST: usize = 128;
    let bench = Bench::new(ascend_sim::Machine::ascend_910b());
    let cases = cases_of_sizes();
    for case in cases.iter().filter(|case| case.head_dim <= MOST) {
        run_by_cube(&bench, case);
    }
    bench.finish();
}

#[test]
fn on_dav_3510() {
    on_each_pairing(ascend_sim::Machine::ascend_950(), |bench, pairing| {
        let wide = Case {
            head_dim: 72,
            channels: 0..72,
            ..Case::plain(pairing)
        };
        run_all(bench, &wide);
        let apart = Case {
            in_place: false,
            ..Case::plain(pairing)
        };
        run_all(bench, &apart);
    });
}

/// Few cores, so that each has whole batches, full tiles and several tokens: with 40 cores the
/// small cases give a core one token or less.
fn on_few_cores(machine: ascend_sim::Machine, vector_cores: u32) {
    let bench = Bench::new(ascend_sim::Machine {
        vector_cores,
        ..machine
    });
    for pairing in [Pairing::Half, Pairing::Adjacent] {
        for (layout, in_place) in [
            (Layout::Bnsd, true),
            (Layout::Bsnd, false),
            (Layout::Bnsd, false),
        ] {
            for (head_dim, rotary_dim, heads, seq, batch) in FEW_CORES {
                let case = Case {
                    batch,
                    seq,
                    heads,
                    head_dim,
                    channels: 0..rotary_dim,
                    layout,
                    in_place,
                    ..Case::plain(pairing)
                };
                run::<bf16>(&bench, &case, Direction::Forward);
                run::<f32>(&bench, &case, Direction::Adjoint);
                angle_gradient::<f32>(&bench, &case);
            }
        }
    }
    bench.finish();
}

#[test]
fn few_cores() {
    on_few_cores(ascend_sim::Machine::ascend_910b(), 2);
}

#[test]
fn an_odd_number_of_cores() {
    on_few_cores(ascend_sim::Machine::ascend_910b(), 3);
}

#[test]
fn few_cores_on_dav_3510() {
    on_few_cores(ascend_sim::Machine::ascend_950(), 2);
}

#[test]
fn angles_behind_others_in_their_memory() {
    let bench = Bench::new(ascend_sim::Machine::ascend_910b());
    run::<f32>(&bench, &angles_behind_others(), Direction::Forward);
    bench.finish();
}

#[test]
fn angles_behind_others_by_cube() {
    let bench = Bench::new(ascend_sim::Machine::ascend_910b());
    let case = angles_behind_others();
    run_by::<bf16>(&bench, &case, Direction::Forward, Unit::Cube);
    bench.finish();
}

fn angles_behind_others() -> Case {
    Case {
        offset_angles: true,
        ..Case::plain(Pairing::Half)
    }
}

/// Heads that lie further apart than the 16 bits of the cube core's strides reach.
#[test]
fn far_heads_for_the_cube() {
    let bench = Bench::new(ascend_sim::Machine::ascend_910b());
    let case = Case {
        batch: 1,
        seq: 1100,
        heads: [3, 2],
        layout: Layout::Bnsd,
        ..Case::plain(Pairing::Half)
    };
    for in_place in [true, false] {
        let case = Case {
            in_place,
            ..case.clone()
        };
        run_by::<bf16>(&bench, &case, Direction::Forward, Unit::Cube);
    }
    bench.finish();
}

fn hundred_thousand(pairing: Pairing) {
    let bench = Bench::new(ascend_sim::Machine::default());
    let case = Case {
        batch: 1,
        seq: 100_000,
        heads: [2, 1],
        head_dim: 32,
        channels: 0..32,
        ..Case::plain(pairing)
    };
    run::<bf16>(&bench, &case, Direction::Forward);
    bench.finish();
}

#[test]
fn hundred_thousand_tokens() {
    hundred_thousand(Pairing::Half);
}

#[test]
#[ignore = "a quarter of a minute; one pairing runs by default"]
fn hundred_thousand_tokens_of_every_pairing() {
    PAIRINGS.into_iter().for_each(hundred_thousand);
}

fn angle_gradient<T: Number>(bench: &Bench, case: &Case) {
    let stream = &bench.stream;
    let mut numbers = Numbers(7 + case.head_dim as u64);
    let geometry = case.geometry();
    let width = geometry.lane_count();
    let rotator = bench.rotator(geometry, Unit::Vector);
    let tokens = case.batch * case.seq;
    let mut truth = vec![0.0_f64; tokens * 2 * width];
    let mut scale = vec![0.0_f64; tokens * 2 * width];
    let mut buffers = Vec::new();
    for heads in case.heads {
        let (at, len) = case.place(heads.max(1));
        // The gradient is laid out the other way round.
        let other = if case.layout == Layout::Bnsd {
            Layout::Bsnd
        } else {
            Layout::Bnsd
        };
        let turned = Case {
            layout: other,
            ..case.clone()
        };
        let (g_at, g_len) = turned.place(heads.max(1));
        let x: Vec<T> = values(&mut numbers, len);
        let g: Vec<T> = values(&mut numbers, g_len);
        if heads > 0 {
            for token in 0..tokens {
                let (b, s) = (token / case.seq, token % case.seq);
                for h in 0..heads {
                    let base = index(&at, b, s, h, geometry.rotary_offset());
                    let g_base = index(&g_at, b, s, h, geometry.rotary_offset());
                    for j in 0..geometry.pairs() {
                        let (read, write) = pair_channels(case.pairing, geometry.rotary_dim(), j);
                        let (x1, x2) = (x[base + read[0]].wide(), x[base + read[1]].wide());
                        let (g1, g2) = (g[g_base + write[0]].wide(), g[g_base + write[1]].wide());
                        let row = token * 2 * width;
                        let second = if case.per_channel {
                            geometry.pairs() + j
                        } else {
                            j
                        };
                        for (lane, dcos, dsin) in
                            [(j, g1 * x1, -g1 * x2), (second, g2 * x2, g2 * x1)]
                        {
                            truth[row + lane] += dcos;
                            truth[row + width + lane] += dsin;
                            scale[row + lane] += dcos.abs();
                            scale[row + width + lane] += dsin.abs();
                        }
                    }
                }
            }
        }
        buffers.push((
            (stream.upload(&x).unwrap(), at),
            (stream.upload(&g).unwrap(), g_at),
        ));
    }
    let pair = |i: usize| -> [Heads<&DeviceMemory>; 2] {
        let ((x, at), (g, g_at)) = &buffers[i];
        [heads(x, *at), heads(g, *g_at)]
    };
    let gradient = || {
        let mut out = stream.alloc::<f32>(tokens * 2 * width).unwrap();
        let request = AngleGradient {
            element: T::TYPE,
            q: pair(0),
            k: (case.heads[1] > 0).then(|| pair(1)),
            out: &mut out,
        };
        rotator.angle_gradient(request).unwrap();
        stream.download(&out).unwrap()
    };
    let (got, again) = (gradient(), gradient());
    assert!(
        got.iter()
            .zip(&again)
            .all(|(a, b)| a.to_bits() == b.to_bits()),
        "two runs differ"
    );
    for (i, got) in got.iter().enumerate() {
        let error = (f64::from(*got) - truth[i]).abs();
        // One rounding for each product and for each of the sums of 2 * heads terms at most.
        let terms = (2 * (case.heads[0] + case.heads[1])) as f64;
        assert!(
            error <= scale[i] * terms * 2_f64.powi(-24),
            "{case:?}: [{i}] is {got} instead of {}",
            truth[i]
        );
    }
}

#[test]
fn angle_gradients() {
    let bench = Bench::new(ascend_sim::Machine::default());
    for pairing in PAIRINGS {
        for per_channel in [false, true] {
            for (head_dim, channels, heads) in [
                (64, 0..64, [4, 2]),
                (72, 0..72, [5, 0]),
                (192, 128..192, [32, 8]),
                (128, 0..128, [100, 60]),
            ] {
                let layout = if head_dim == 72 {
                    Layout::Bnsd
                } else {
                    Layout::Bsnd
                };
                let case = Case {
                    per_channel,
                    head_dim,
                    channels,
                    heads,
                    layout,
                    ..Case::plain(pairing)
                };
                angle_gradient::<f32>(&bench, &case);
                angle_gradient::<f16>(&bench, &case);
                angle_gradient::<bf16>(&bench, &case);
            }
        }
    }
    bench.finish();
}
