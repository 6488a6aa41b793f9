//! The kernels of layers on the simulator against plain f64 loops.
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod support;

use half::{bf16, f16};
use rope_ascend::AscendError;
use rope_ascend::rope::{
    DeltaSizes, KernelType, LayerKernels, LowRankTerm, MemoryPart, ShortConvolution,
    ShortConvolutionGradients,
};
use support::Bench;
use support::delta::{self, delta};
use support::layer::{Case, Convolution, convolution, gate, low_rank, square_sums, update};

fn run_all(bench: &Bench, kernels: &LayerKernels, case: Case) {
    low_rank::<bf16>(bench, kernels, case).unwrap();
    low_rank::<f16>(bench, kernels, case).unwrap();
    let rounds_h = false;
    low_rank::<f32>(bench, kernels, Case { rounds_h, ..case }).unwrap();
}

/// Runs on simulated machines of both architectures.
fn on_machines(run: impl Fn(&Bench, &LayerKernels)) {
    for machine in [
        ascend_sim::Machine::default(),
        ascend_sim::Machine::ascend_950(),
    ] {
        let bench = Bench::new(machine);
        let kernels = LayerKernels::new(&bench.stream, bench.kernels.clone());
        run(&bench, &kernels);
        drop(kernels);
        bench.finish();
    }
}

#[test]
fn sizes_ranks_and_parts() {
    const SIZES: [[usize; 2]; 7] = [
        [1, 1],
        [3, 7],
        [16, 64],
        [27, 65],
        [250, 130],
        [700, 300],
        [33, 1030],
    ];
    on_machines(|bench, kernels| {
        let run = |size, (rank, parts, rounds_h)| {
            let case = Case {
                size,
                rank,
                parts,
                rounds_h,
            };
            run_all(bench, kernels, case);
        };
        for size in SIZES {
            for ranks in [(1, 1, true), (2, 2, true), (8, 2, true), (13, 2, false)] {
                run(size, ranks);
            }
        }
        for rank in [64, 256] {
            run([40, 100], (rank, 2, true));
        }
    });
}

#[test]
fn wrong_requests_are_refused_and_empty_ones_do_nothing() {
    let bench = Bench::new(ascend_sim::Machine::default());
    let kernels = LayerKernels::new(&bench.stream, bench.kernels.clone());
    let floats = |count: usize| bench.stream.upload(&vec![0.0_f32; count]).unwrap();
    let (mut y, h, b) = (floats(12), floats(16), floats(6));
    let mut rounded = floats(8);
    let mut add = |size, rank, starts: &[usize], rounds: bool| {
        kernels.add_low_rank(LowRankTerm {
            element: KernelType::F32,
            size,
            rank,
            part_starts: starts,
            y: MemoryPart {
                memory: &mut y,
                offset: 0,
            },
            h: MemoryPart {
                memory: &h,
                offset: 0,
            },
            b: MemoryPart {
                memory: &b,
                offset: 0,
            },
            rounded_h: rounds.then_some(MemoryPart {
                memory: &mut rounded,
                offset: 0,
            }),
        })
    };
    add([4, 3], 2, &[0, 8], false).unwrap();
    add([4, 0], 2, &[0], false).unwrap();
    for (size, rank, starts, rounds, named) in [
        ([5, 3], 2, &[0][..], false, "y"),
        ([4, 3], 2, &[0, 9], false, "h"),
        ([4, 3], 3, &[0], false, "b"),
        ([4, 3], 2, &[1], false, "parts"),
        ([4, 3], 2, &[0, 4, 8], false, "parts"),
        ([usize::MAX, 3], 2, &[0], false, "y"),
        ([4, 3], 2, &[0], true, "the rounded h"),
    ] {
        let error = add(size, rank, starts, rounds).unwrap_err();
        let AscendError::InvalidArgument { argument, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(*argument, named, "{error}");
    }
    drop(kernels);
    drop((y, h, b, rounded));
    bench.finish();
}

#[test]
fn wrong_convolutions_are_refused_and_empty_ones_do_nothing() {
    let bench = Bench::new(ascend_sim::Machine::default());
    let kernels = LayerKernels::new(&bench.stream, bench.kernels.clone());
    let floats = |count: usize| bench.stream.upload(&vec![0.0_f32; count]).unwrap();
    let (x, weight, starts) = (floats(12), floats(6), floats(2));
    let (mut y, mut short, mut dx, mut sums) = (floats(12), floats(11), floats(12), floats(6));
    let (gradient, offset) = (floats(12), 0);
    let request = |size, taps, sequences| ShortConvolution {
        element: KernelType::F32,
        size,
        taps,
        sequences,
        x: MemoryPart { memory: &x, offset },
        weight: MemoryPart {
            memory: &weight,
            offset,
        },
        starts: MemoryPart {
            memory: &starts,
            offset,
        },
    };
    let mut run = |request, is_short| {
        let memory = if is_short { &mut short } else { &mut y };
        kernels.short_convolution(request, MemoryPart { memory, offset })
    };
    run(request([4, 3], 2, 1), false).unwrap();
    run(request([4, 0], 2, 1), false).unwrap();
    run(request([0, 3], 2, 1), false).unwrap();
    for (request, is_short, named) in [
        (request([4, 3], 2, 1), true, "y"),
        (request([2, 5], 2, 1), false, "the weight"),
        (request([4, 3], 2, 3), false, "the starts"),
        (request([4, 3], 0, 1), false, "the taps"),
        (request([4, 3], 2, 0), false, "the sequences"),
        (request([usize::MAX, 3], 2, 1), false, "y"),
    ] {
        let error = run(request, is_short).unwrap_err();
        let AscendError::InvalidArgument { argument, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(*argument, named, "{error}");
    }
    let many = kernels.short_convolution_parts(request([4, 3], 9, 1));
    let is_limit = matches!(many, Err(AscendError::KernelLimit { what: "taps", .. }));
    assert!(is_limit, "{many:?}");
    let mut run_backward = |offset| {
        let gradients = ShortConvolutionGradients {
            gradient: MemoryPart {
                memory: &gradient,
                offset: 0,
            },
            x_gradient: MemoryPart {
                memory: &mut dx,
                offset: 0,
            },
            weight_sums: MemoryPart {
                memory: &mut sums,
                offset,
            },
        };
        kernels.short_convolution_backward(request([4, 3], 2, 1), gradients)
    };
    run_backward(0).unwrap();
    let error = run_backward(1).unwrap_err().to_string();
    assert!(error.contains("the weight's sums"), "{error}");
    bench.stream.synchronize().unwrap();
    drop(kernels);
    drop((x, weight, starts, y, short, dx, sums, gradient));
    bench.finish();
}

#[test]
fn gates_of_all_sizes() {
    on_machines(|bench, kernels| {
        for count in [1, 7, 64, 1000, 40 * 64 + 3, 400_001] {
            gate::<f32>(bench, kernels, count).unwrap();
            gate::<f16>(bench, kernels, count).unwrap();
            gate::<bf16>(bench, kernels, count).unwrap();
        }
    });
}

/// Fewer tokens than taps, sequences of one token, borders at and beside those of tiles, and
/// numbers of channels that fill neither blocks nor tiles.
#[test]
fn convolutions_of_all_sizes() {
    let single = [1; 50];
    let cases: [(&[usize], usize, usize); 14] = [
        (&[1], 1, 4),
        (&[2], 3, 4),
        (&[3], 8, 4),
        (&[5], 40, 1),
        (&[3, 1, 2, 9], 130, 4),
        (&[7, 7], 64, 2),
        (&[1, 1, 1, 40], 17, 3),
        (&single, 20, 4),
        (&[9, 1, 3], 70, 8),
        (&[4, 30], 300, 8),
        (&[128], 3, 4),
        (&[35, 1, 4, 36, 80], 257, 4),
        (&[39, 39, 37, 2, 1, 40], 130, 4),
        (&[1500, 900], 5, 4),
    ];
    on_machines(|bench, kernels| {
        for (sequences, channels, taps) in cases {
            let case = Convolution {
                sequences,
                channels,
                taps,
            };
            convolution::<f32>(bench, kernels, case).unwrap();
            convolution::<f16>(bench, kernels, case).unwrap();
            convolution::<bf16>(bench, kernels, case).unwrap();
        }
    });
}

#[test]
fn updates_of_all_sizes() {
    on_machines(|bench, kernels| {
        for count in [1, 7, 64, 1000, 40 * 64 + 3, 400_001] {
            update::<f32, f32>(bench, kernels, count).unwrap();
            update::<f16, f32>(bench, kernels, count).unwrap();
            update::<f16, f16>(bench, kernels, count).unwrap();
            update::<bf16, f32>(bench, kernels, count).unwrap();
            update::<bf16, bf16>(bench, kernels, count).unwrap();
        }
    });
}

#[test]
fn sums_of_squares_of_all_sizes() {
    on_machines(|bench, kernels| {
        for count in [1, 7, 127, 128, 129, 4096, 40 * 4096 + 3, 400_001] {
            for chunk in [128, 4096] {
                square_sums::<f32>(bench, kernels, [count, chunk]).unwrap();
                square_sums::<f16>(bench, kernels, [count, chunk]).unwrap();
                square_sums::<bf16>(bench, kernels, [count, chunk]).unwrap();
            }
        }
    });
}

const DELTA: DeltaSizes = DeltaSizes {
    batch: 1,
    tokens: 64,
    key_heads: 1,
    heads: 1,
    key_dim: 24,
    value_dim: 16,
};

fn run_delta(bench: &Bench, kernels: &LayerKernels, case: &delta::Case) {
    delta::<bf16>(bench, kernels, case).unwrap();
    delta::<f16>(bench, kernels, case).unwrap();
    delta::<f32>(bench, kernels, case).unwrap();
}

#[test]
fn chunks_of_all_lengths() {
    on_machines(|bench, kernels| {
        for tokens in [1, 63, 64, 65, 200] {
            let case = delta::Case {
                sizes: DeltaSizes { tokens, ..DELTA },
                chunks: 0..tokens.div_ceil(64),
                kind: delta::Kind::Random,
                keeps: tokens == 65,
            };
            run_delta(bench, kernels, &case);
        }
        let case = delta::Case {
            sizes: DeltaSizes {
                key_dim: 128,
                value_dim: 128,
                ..DELTA
            },
            chunks: 0..1,
            kind: delta::Kind::Random,
            keeps: true,
        };
        run_delta(bench, kernels, &case);
    });
}

#[test]
fn heads_samples_channels_and_parts_of_chunks() {
    on_machines(|bench, kernels| {
        for (heads, channels) in [(2, [(8, 24), (136, 16)]), (4, [(40, 72), (16, 264)])] {
            for (key_dim, value_dim) in channels {
                let sizes = DeltaSizes {
                    batch: 2,
                    tokens: 150,
                    key_heads: 2,
                    heads,
                    key_dim,
                    value_dim,
                };
                let case = delta::Case {
                    sizes,
                    chunks: 1..3,
                    kind: delta::Kind::Random,
                    keeps: true,
                };
                run_delta(bench, kernels, &case);
            }
        }
    });
}

#[test]
fn similar_keys_strong_decays_and_borders() {
    on_machines(|bench, kernels| {
        for kind in [
            delta::Kind::Similar,
            delta::Kind::Forgetful,
            delta::Kind::Packed,
        ] {
            let case = delta::Case {
                sizes: DeltaSizes {
                    tokens: 200,
                    key_dim: 32,
                    value_dim: 16,
                    ..DELTA
                },
                chunks: 0..4,
                kind,
                keeps: true,
            };
            run_delta(bench, kernels, &case);
        }
    });
}
