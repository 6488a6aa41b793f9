//! The kernels on the simulator against plain f64 loops.
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod support;

use half::{bf16, f16};
use rope_ascend::rope::{
    AngleGradient, Angles, Direction, Layout, Operand, Pairing, Positions, Rotary, Rotation,
    Rotator, Table, View,
};
use support::{Bench, Number, Numbers, pair_channels, rotate_plainly, striped, tolerance};

#[derive(Clone, Debug)]
struct Case {
    batch: u32,
    seq: u32,
    heads: [u32; 2],
    head_dim: u32,
    channels: std::ops::Range<u32>,
    pairing: Pairing,
    per_channel: bool,
    axes: u32, // 0: angles per token
    layout: Layout,
    /// Rows cut out of a wider tensor.
    strided: bool,
    in_place: bool,
    shared: bool,
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
            axes: 0,
            layout: Layout::Bsnd,
            strided: false,
            in_place: true,
            shared: false,
        }
    }

    fn rotary(&self) -> Rotary {
        let rotary = Rotary::partial(self.head_dim, self.channels.clone(), self.pairing).unwrap();
        let rotary = if self.per_channel {
            rotary.per_channel()
        } else {
            rotary
        };
        if self.axes == 0 {
            rotary
        } else {
            let w = rotary.angle_width();
            rotary.with_lanes(striped(w, self.axes)).unwrap()
        }
    }

    fn view(&self, heads: u32) -> (View, usize) {
        if self.strided {
            // A slice of a tensor that has three more heads, and three more channels in each.
            let dim = u64::from(self.head_dim) + 3;
            let token = u64::from(heads + 3) * dim;
            let view = View {
                offset: 2 * dim + 1,
                heads,
                batch_stride: u64::from(self.seq) * token + 5,
                token_stride: token,
                head_stride: dim,
            };
            let len = u64::from(self.batch) * view.batch_stride + 2 * dim + 1;
            return (view, len as usize);
        }
        let view = View::contiguous(self.layout, self.batch, self.seq, heads, self.head_dim);
        (
            view,
            (self.batch * self.seq * heads * self.head_dim) as usize,
        )
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
            "{} {case:?} {direction:?}: {name}[{i}] is {} instead of {truth}, off by {error:e}",
            T::NAME,
            got.wide()
        );
    }
}

fn run<T: Number>(bench: &Bench, case: &Case, direction: Direction) {
    let stream = &bench.stream;
    let mut numbers = Numbers(0x9e37_79b9 + u64::from(case.head_dim) * 31 + u64::from(case.seq));
    let rotary = case.rotary();
    let width = rotary.angle_width() as usize;
    let rows = (if case.shared {
        case.seq
    } else {
        case.batch * case.seq
    }) as usize;
    let rotator = Rotator::new(stream, bench.kernels.clone(), rotary.clone());

    let positions_wanted = 50;
    let table_rows = if case.axes > 0 {
        positions_wanted
    } else {
        rows
    };
    let cos: Vec<f32> = (0..table_rows * width)
        .map(|_| numbers.unit() as f32)
        .collect();
    let sin: Vec<f32> = (0..table_rows * width)
        .map(|_| numbers.unit() as f32)
        .collect();
    let ids: Vec<i32> = (0..case.axes as usize * rows)
        .map(|_| numbers.below(positions_wanted as u64) as i32)
        .collect();
    let per_token = (case.axes == 0).then(|| rotator.upload_angles(&cos, &sin).unwrap());
    let table = (case.axes > 0).then(|| {
        (
            Table::new(stream, &cos, &sin, width as u32).unwrap(),
            Positions::new(stream, &ids, case.axes).unwrap(),
        )
    });
    let angles = match (&per_token, &table) {
        (Some(angles), _) => Angles::PerToken(angles),
        (_, Some((table, positions))) => Angles::Table(table, positions),
        _ => unreachable!(),
    };
    let angle = |token: usize, lane: usize| {
        let row = if case.shared {
            token % case.seq as usize
        } else {
            token
        };
        let row = if case.axes > 0 {
            ids[(lane % case.axes as usize) * rows + row] as usize
        } else {
            row
        };
        (
            f64::from(cos[row * width + lane]),
            f64::from(sin[row * width + lane]),
        )
    };

    let mut hosts = Vec::new();
    let mut devices = Vec::new();
    let mut targets = Vec::new();
    for heads in case.heads {
        let (view, len) = case.view(heads.max(1));
        let x: Vec<T> = values(&mut numbers, len);
        let device = stream.upload(&x).unwrap();
        // The output is laid out the other way round, to tell input strides from output strides.
        let other = if case.layout == Layout::Bnsd {
            Layout::Bsnd
        } else {
            Layout::Bnsd
        };
        let out_view = View::contiguous(other, case.batch, case.seq, heads.max(1), case.head_dim);
        let out_len = (case.batch * case.seq * heads.max(1) * case.head_dim) as usize;
        let filled = vec![T::of(9.0); out_len];
        targets.push((stream.upload(&filled).unwrap(), out_view, out_len));
        hosts.push((x, view));
        devices.push(device);
    }
    let (q_dev, k_dev) = devices.split_at_mut(1);
    let (q_to, k_to) = targets.split_at_mut(1);
    let q = make(case.in_place, &mut q_dev[0], hosts[0].1, &mut q_to[0]);
    let k =
        (case.heads[1] > 0).then(|| make(case.in_place, &mut k_dev[0], hosts[1].1, &mut k_to[0]));
    let mut rotation = Rotation {
        direction,
        batch: case.batch,
        seq: case.seq,
        q,
        k,
        angles,
    };
    rotator
        .rotate(&mut rotation)
        .unwrap_or_else(|error| panic!("{case:?}: {error}"));
    if let Err(error) = stream.synchronize() {
        let found = ascend_sim::control::take_violations();
        panic!(
            "{case:?} {direction:?}: {error}\n{}",
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
        let (x, view) = &hosts[i];
        let wide: Vec<f64> = x.iter().map(|v| v.wide()).collect();
        let (mut truth, out_view) = if case.in_place {
            (wide.clone(), *view)
        } else {
            (vec![9.0; targets[i].2], targets[i].1)
        };
        rotate_plainly(
            &wide,
            *view,
            &mut truth,
            out_view,
            case.batch as usize,
            case.seq as usize,
            &rotary,
            direction,
            &angle,
        );
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

fn make<'a, T: Number>(
    in_place: bool,
    device: &'a mut rope_ascend::safe::DeviceBuffer<T>,
    view: View,
    target: &'a mut (rope_ascend::safe::DeviceBuffer<T>, View, usize),
) -> Operand<'a, T> {
    if in_place {
        Operand::InPlace(device, view)
    } else {
        Operand::Into {
            from: device,
            from_view: view,
            to: &mut target.0,
            to_view: target.1,
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

const PAIRINGS: [Pairing; 4] = [
    Pairing::Half,
    Pairing::Adjacent,
    Pairing::Quarter,
    Pairing::InterleaveHalf,
];

#[test]
fn every_pairing_and_angle_source() {
    let bench = Bench::new(ascend_sim::Machine::default());
    for pairing in PAIRINGS {
        for per_channel in [false, true] {
            for axes in [0, 1, 3, 4] {
                run_all(
                    &bench,
                    &Case {
                        per_channel,
                        axes,
                        ..Case::plain(pairing)
                    },
                );
            }
        }
    }
    bench.finish();
}

#[test]
fn every_layout_in_and_out_of_place() {
    let bench = Bench::new(ascend_sim::Machine::default());
    for pairing in PAIRINGS {
        for in_place in [true, false] {
            for shared in [false, true] {
                for layout in [Layout::Bsnd, Layout::Bnsd, Layout::Sbnd] {
                    run_all(
                        &bench,
                        &Case {
                            layout,
                            in_place,
                            shared,
                            ..Case::plain(pairing)
                        },
                    );
                }
                run_all(
                    &bench,
                    &Case {
                        strided: true,
                        in_place,
                        shared,
                        ..Case::plain(pairing)
                    },
                );
            }
        }
    }
    bench.finish();
}

#[test]
fn partial_and_unaligned_heads() {
    let bench = Bench::new(ascend_sim::Machine::default());
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
                    run_all(
                        &bench,
                        &Case {
                            head_dim,
                            channels: channels.clone(),
                            in_place,
                            layout,
                            ..Case::plain(pairing)
                        },
                    );
                }
            }
            run_all(
                &bench,
                &Case {
                    head_dim,
                    channels: channels.clone(),
                    axes: 3,
                    ..Case::plain(pairing)
                },
            );
        }
    }
    bench.finish();
}

#[test]
fn sizes() {
    let bench = Bench::new(ascend_sim::Machine::default());
    for pairing in PAIRINGS {
        for layout in [Layout::Tnd, Layout::Bnsd] {
            for (seq, heads, head_dim) in [
                (1, [1, 0], 32),
                (1, [128, 8], 128),
                (39, [3, 1], 128),
                (41, [28, 4], 64),
                (130, [2, 2], 32),
                (2, [128, 128], 512),
                (700, [1, 1], 64),
                // Several tokens a tile, whose coefficients lie further apart than one instruction can step.
                (130, [2, 1], 1024),
            ] {
                let case = Case {
                    batch: 1,
                    seq,
                    heads,
                    head_dim,
                    channels: 0..head_dim,
                    layout,
                    ..Case::plain(pairing)
                };
                run::<bf16>(&bench, &case, Direction::Forward);
                run::<f32>(&bench, &case, Direction::Adjoint);
            }
        }
    }
    bench.finish();
}

#[test]
fn on_dav_3510() {
    let bench = Bench::new(ascend_sim::Machine::ascend_950());
    for pairing in PAIRINGS {
        run_all(
            &bench,
            &Case {
                head_dim: 72,
                channels: 0..72,
                axes: 3,
                ..Case::plain(pairing)
            },
        );
        run_all(
            &bench,
            &Case {
                in_place: false,
                ..Case::plain(pairing)
            },
        );
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
        axes: 3,
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
    let mut numbers = Numbers(7 + u64::from(case.head_dim));
    let rotary = case.rotary();
    let width = rotary.angle_width() as usize;
    let rotator = Rotator::new(stream, bench.kernels.clone(), rotary.clone());
    let tokens = (case.batch * case.seq) as usize;
    let mut truth = vec![0.0_f64; tokens * 2 * width];
    let mut scale = vec![0.0_f64; tokens * 2 * width];
    let mut buffers = Vec::new();
    for heads in case.heads {
        let (view, len) = case.view(heads.max(1));
        let x: Vec<T> = values(&mut numbers, len);
        let g: Vec<T> = values(&mut numbers, len);
        if heads > 0 {
            for token in 0..tokens {
                let (b, s) = (token / case.seq as usize, token % case.seq as usize);
                for h in 0..heads as usize {
                    let base = view.offset as usize
                        + b * view.batch_stride as usize
                        + s * view.token_stride as usize
                        + h * view.head_stride as usize
                        + rotary.rotary_offset() as usize;
                    for j in 0..rotary.pairs() as usize {
                        let (read, write) =
                            pair_channels(case.pairing, rotary.rotary_dim() as usize, j);
                        let (x1, x2) = (x[base + read[0]].wide(), x[base + read[1]].wide());
                        let (g1, g2) = (g[base + write[0]].wide(), g[base + write[1]].wide());
                        let row = token * 2 * width;
                        let second = if case.per_channel {
                            rotary.pairs() as usize + j
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
        buffers.push((stream.upload(&x).unwrap(), stream.upload(&g).unwrap(), view));
    }
    let k = case.heads[1] > 0;
    let request = AngleGradient {
        batch: case.batch,
        seq: case.seq,
        q: (&buffers[0].0, buffers[0].2),
        k: k.then_some((&buffers[1].0, buffers[1].2)),
        q_grad: (&buffers[0].1, buffers[0].2),
        k_grad: k.then_some((&buffers[1].1, buffers[1].2)),
    };
    let first = rotator.angle_gradient(&request).unwrap();
    let second = rotator.angle_gradient(&request).unwrap();
    let got = stream.download(&first).unwrap();
    let again = stream.download(&second).unwrap();
    assert!(
        got.iter()
            .zip(&again)
            .all(|(a, b)| a.to_bits() == b.to_bits()),
        "two runs differ"
    );
    for (i, got) in got.iter().enumerate() {
        let error = (f64::from(*got) - truth[i]).abs();
        // One rounding for each product and for each of the sums of 2 * heads terms at most.
        let terms = f64::from(2 * (case.heads[0] + case.heads[1]));
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
