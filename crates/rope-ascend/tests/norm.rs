//! The norm of the heads with their rotation, and its backward, on the simulator against plain f64
//! loops.
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod support;

use half::{bf16, f16};
use rope_ascend::AscendError;
use rope_ascend::rope::{
    AngleRows, ChannelWeights, NormBackward, NormBackwardTensor, NormRotation, NormTensor, Operand,
    Rotator,
};
use rope_core::{Geometry, HeadNorm, HeadsLayout, Layout, NormOrder, Pairing, RopeError};
use support::norm::{Case, heads, weights};
use support::{Bench, Number, angles, on_each_pairing};

/// Compares forward and backward with f64 loops.
fn run<T: Number>(bench: &Bench, case: &Case) {
    if let Err(error) = support::norm::run::<T>(bench, case) {
        let found = ascend_sim::control::take_violations();
        let found: Vec<String> = found.iter().take(5).map(ToString::to_string).collect();
        panic!("{case:?}: {error}\n{}", found.join("\n"));
    }
}

fn run_all(bench: &Bench, case: &Case) {
    for order in [NormOrder::BeforeRotation, NormOrder::AfterRotation] {
        let case = Case {
            norm: case.norm.with_order(order),
            ..case.clone()
        };
        run::<f32>(bench, &case);
        run::<f16>(bench, &case);
        run::<bf16>(bench, &case);
    }
}

const PAIRINGS: [Pairing; 4] = Pairing::ALL;

#[test]
fn every_pairing_with_shared_and_separate_angles() {
    let bench = Bench::new(ascend_sim::Machine::default());
    for pairing in PAIRINGS {
        for per_channel in [false, true] {
            let plain = Case::plain(pairing);
            let norm = plain.norm.with_unit_offset(per_channel);
            run_all(
                &bench,
                &Case {
                    per_channel,
                    norm,
                    ..plain
                },
            );
        }
    }
    bench.finish();
}

#[test]
fn every_layout_in_and_out_of_place() {
    let bench = Bench::new(ascend_sim::Machine::default());
    for pairing in PAIRINGS {
        for (in_place, shared) in [(true, false), (false, true)] {
            for (layout, strided) in [
                (Layout::Bsnd, false),
                (Layout::Bnsd, false),
                (Layout::Sbnd, false),
                (Layout::Bsnd, true),
            ] {
                run_all(
                    &bench,
                    &Case {
                        layout,
                        strided,
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
            (256, 0..64),
            (192, 128..192),
            (100, 4..60),
            (20, 0..12),
        ] {
            for (in_place, layout) in [(true, Layout::Bnsd), (false, Layout::Bsnd)] {
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
    }
    bench.finish();
}

#[test]
fn sizes() {
    let bench = Bench::new(ascend_sim::Machine::default());
    for pairing in [Pairing::Half, Pairing::Adjacent] {
        for layout in [Layout::Tnd, Layout::Bnsd] {
            for (seq, heads, head_dim) in [
                (1, [1, 0], 32),
                (1, [128, 8], 128),
                (41, [28, 4], 64),
                (130, [2, 2], 32),
                (2, [40, 8], 512),
                (300, [1, 1], 64),
                (45, [2, 1], 1024),
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
                run::<bf16>(&bench, &case);
                run::<f32>(&bench, &case);
            }
        }
    }
    bench.finish();
}

#[test]
fn on_dav_3510() {
    on_each_pairing(ascend_sim::Machine::ascend_950(), |bench, pairing| {
        let case = Case {
            head_dim: 72,
            channels: 0..72,
            in_place: false,
            ..Case::plain(pairing)
        };
        run_all(bench, &case);
    });
}

/// Two cores, each with tiles of more rows than one instruction adds up.
#[test]
fn few_cores() {
    let case = Case {
        batch: 1,
        seq: 300,
        heads: [4, 2],
        head_dim: 16,
        channels: 0..16,
        layout: Layout::Tnd,
        ..Case::plain(Pairing::Half)
    };
    for vector_cores in [2, 3] {
        let bench = Bench::new(ascend_sim::Machine {
            vector_cores,
            ..ascend_sim::Machine::ascend_910b()
        });
        run::<bf16>(&bench, &case);
        bench.finish();
    }
}

/// Normalises one head at position 0, which is not turned, and returns its result.
fn one_head(bench: &Bench, eps: f64, x: [f32; 64]) -> Vec<f32> {
    let stream = &bench.stream;
    let geometry = Geometry::new(64, 64, 0, Pairing::Half, false).unwrap();
    let rotator = Rotator::new(stream, bench.kernels.clone(), geometry).unwrap();
    let turn = [[1.0_f32; 32], [0.0; 32]].concat();
    let (turn, weight) = (stream.upload(&turn), stream.upload(&[2.0_f32; 64]));
    let (turn, weight) = (turn.unwrap(), weight.unwrap());
    let mut memory = stream.upload(&x).unwrap();
    let layout = HeadsLayout::contiguous(Layout::Bsnd, 1, 1, 1, 64);
    rotator
        .norm_rotate(NormRotation {
            element: f32::TYPE,
            norm: HeadNorm::new(eps).unwrap(),
            q: NormTensor {
                x: Operand::InPlace(heads(&mut memory, (0, layout))),
                weight: weights(&weight),
            },
            k: None,
            angles: angles(&turn, 1),
        })
        .unwrap();
    stream.download(&memory).unwrap()
}

#[test]
fn weights_and_angles_behind_others_in_their_memory() {
    const OTHERS: usize = 24;
    let bench = Bench::new(ascend_sim::Machine::default());
    let stream = &bench.stream;
    let geometry = Geometry::new(64, 64, 0, Pairing::Half, false).unwrap();
    let rotator = Rotator::new(stream, bench.kernels.clone(), geometry).unwrap();
    let others = vec![7.0_f32; OTHERS];
    let turn = [&others[..], &[1.0; 32], &[0.0; 32]].concat();
    let weight: Vec<f32> = (0..64).map(|channel| channel as f32).collect();
    let weight = stream.upload(&[others, weight].concat()).unwrap();
    let turn = stream.upload(&turn).unwrap();
    let mut memory = stream.upload(&[2.0_f32; 64]).unwrap();
    let layout = HeadsLayout::contiguous(Layout::Bsnd, 1, 1, 1, 64);
    rotator
        .norm_rotate(NormRotation {
            element: f32::TYPE,
            norm: HeadNorm::new(0.0).unwrap(),
            q: NormTensor {
                x: Operand::InPlace(heads(&mut memory, (0, layout))),
                weight: ChannelWeights {
                    memory: &weight,
                    offset_bytes: OTHERS * size_of::<f32>(),
                    channels: 64,
                },
            },
            k: None,
            angles: AngleRows {
                memory: &turn,
                offset_bytes: OTHERS * size_of::<f32>(),
                rows: 1,
            },
        })
        .unwrap();
    // Each channel is divided by the root of the mean square, which is 2.
    let expected: Vec<f32> = (0..64).map(|channel| channel as f32).collect();
    assert_eq!(stream.download(&memory).unwrap(), expected);
    drop((turn, weight, memory, rotator));
    bench.finish();
}

#[test]
fn zeros_infinities_and_small_numbers_give_what_the_formula_gives() {
    let bench = Bench::new(ascend_sim::Machine::default());
    let zero = one_head(&bench, 1e-6, [0.0; 64]);
    assert!(zero.iter().all(|y| *y == 0.0), "zeros stay zeros: {zero:?}");
    let without_eps = one_head(&bench, 0.0, [0.0; 64]);
    assert!(without_eps.iter().all(|y| y.is_nan()), "0 / 0");
    // The root is infinite: the infinite channel becomes NaN, as its pair, and the others zero.
    let mut x = [1.0; 64];
    x[3] = f32::INFINITY;
    for (channel, y) in one_head(&bench, 1e-6, x).into_iter().enumerate() {
        if channel % 32 == 3 {
            assert!(y.is_nan(), "channel {channel} is {y}");
        } else {
            assert_eq!(y, 0.0, "channel {channel}");
        }
    }
    // Squares beyond the range of f32, and squares below it, where only eps is left.
    assert!(one_head(&bench, 1e-6, [1e30; 64]).iter().all(|y| *y == 0.0));
    let small = one_head(&bench, 1e-6, [1e-40; 64]);
    let truth = 2.0 * f64::from(1e-40_f32) / 1e-6_f64.sqrt();
    assert!(
        small
            .iter()
            .all(|y| (f64::from(*y) - truth).abs() < 1e-6 * truth),
        "{small:?}"
    );
    bench.finish();
}

#[test]
fn wrong_weights_and_sums_are_refused_with_nothing_queued() {
    let bench = Bench::new(ascend_sim::Machine::default());
    let stream = &bench.stream;
    let geometry = Geometry::new(64, 64, 0, Pairing::Half, false).unwrap();
    let rotator = Rotator::new(stream, bench.kernels.clone(), geometry).unwrap();
    let turn = stream.zeros::<f32>(64).unwrap();
    let short = stream.zeros::<f32>(63).unwrap();
    let weight = stream.zeros::<f32>(64).unwrap();
    let layout = HeadsLayout::contiguous(Layout::Bsnd, 1, 1, 1, 64);
    let norm = HeadNorm::new(1e-6).unwrap();
    let x = stream.zeros::<f32>(64).unwrap();
    let mut y = stream.zeros::<f32>(64).unwrap();
    let mut forward = |weight| {
        rotator.norm_rotate(NormRotation {
            element: f32::TYPE,
            norm,
            q: NormTensor {
                x: Operand::InPlace(heads(&mut y, (0, layout))),
                weight,
            },
            k: None,
            angles: angles(&turn, 1),
        })
    };
    let error = forward(weights(&short)).unwrap_err();
    let expected = RopeError::NormWeight {
        what: "the weight of q's norm",
        found: 63,
        expected: 64,
    };
    assert_eq!(error, AscendError::Rope(expected));
    let beyond = ChannelWeights {
        offset_bytes: 4,
        ..weights(&weight)
    };
    let error = forward(beyond).unwrap_err().to_string();
    assert!(
        error.contains("the weight of q's norm must be within its memory of 256 bytes"),
        "{error}"
    );
    let mut sums = stream.zeros::<f32>(63).unwrap();
    let request = NormBackward {
        element: f32::TYPE,
        norm,
        q: NormBackwardTensor {
            x: heads(&x, (0, layout)),
            gradient: Operand::InPlace(heads(&mut y, (0, layout))),
            weight: weights(&weight),
        },
        k: None,
        angles: angles(&turn, 1),
        weight_sums: &mut sums,
    };
    let error = rotator.norm_rotate_backward(request).unwrap_err();
    assert!(
        error.to_string().contains("at least 1 rows of 256 bytes"),
        "{error}"
    );
    drop((turn, short, weight, x, y, sums, rotator));
    assert_eq!(ascend_sim::control::launches().len(), 0);
    bench.finish();
}
