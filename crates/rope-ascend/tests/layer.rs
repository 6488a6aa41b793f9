//! The kernels of layers on the simulator against plain f64 loops.
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod support;

use half::{bf16, f16};
use rope_ascend::AscendError;
use rope_ascend::rope::{Gate, GateBackward, KernelType, LayerKernels, LowRankTerm, Part};
use rope_ascend::safe::{DeviceBuffer, DeviceMemory};
use support::{Bench, Number, Numbers};

#[derive(Clone, Copy, Debug)]
struct Case {
    size: [usize; 2],
    rank: usize,
    parts: usize,
    rounds_h: bool,
}

fn numbers(seed: u64, count: usize) -> Vec<f64> {
    let mut numbers = Numbers(seed);
    (0..count).map(|_| numbers.unit()).collect()
}

/// Elements before and after each tensor, which must stay.
const MARGIN: usize = 24;

fn run<T: Number>(bench: &Bench, kernels: &LayerKernels, case: Case) {
    let Case {
        size: [rows, columns],
        rank,
        parts,
        rounds_h,
    } = case;
    let stream = &bench.stream;
    let narrow = |x: &f64| T::of(*x);
    let wide = |x: &f64| *x as f32;
    let y_before: Vec<T> = numbers(1, 2 * MARGIN + rows * columns)
        .iter()
        .map(narrow)
        .collect();
    let gap = 7;
    let part_stride = if parts == 2 { rank * rows + gap } else { 0 };
    let h: Vec<f32> = numbers(2, MARGIN + part_stride + rank * rows)
        .iter()
        .map(wide)
        .collect();
    let b: Vec<f32> = numbers(3, MARGIN + rank * columns)
        .iter()
        .map(wide)
        .collect();
    let mut y = stream.upload(&y_before).unwrap();
    let (h_memory, b_memory) = (stream.upload(&h).unwrap(), stream.upload(&b).unwrap());
    let marks = vec![T::of(0.5); 2 * MARGIN + rank * rows];
    let mut rounded = stream.upload(&marks).unwrap();
    let starts = [0, part_stride];

    kernels
        .add_low_rank(LowRankTerm {
            element: T::TYPE,
            size: case.size,
            rank,
            part_starts: &starts[..parts],
            y: Part {
                memory: &mut y,
                offset: MARGIN,
            },
            h: Part {
                memory: &h_memory,
                offset: MARGIN,
            },
            b: Part {
                memory: &b_memory,
                offset: MARGIN,
            },
            rounded_h: rounds_h.then_some(Part {
                memory: &mut rounded,
                offset: MARGIN,
            }),
        })
        .unwrap();
    stream.synchronize().unwrap();
    let found = stream.download(&y).unwrap();
    let whole_h = |r: usize, t: usize| -> f64 {
        let part = |part: usize| h[MARGIN + part * part_stride + r * rows + t];
        f64::from((1..parts).fold(part(0), |sum, next| sum + part(next)))
    };
    for (index, (found, before)) in found.iter().zip(&y_before).enumerate() {
        let inside = index
            .checked_sub(MARGIN)
            .filter(|index| *index < rows * columns);
        let Some(index) = inside else {
            assert_eq!(
                found.wide().to_bits(),
                before.wide().to_bits(),
                "{case:?}: outside"
            );
            continue;
        };
        let (t, c) = (index / columns, index % columns);
        let terms = (0..rank).map(|r| whole_h(r, t) * f64::from(b[MARGIN + r * columns + c]));
        let expected = before.wide() + terms.sum::<f64>();
        let bound = 1e-6 * (1.0 + rank as f64) + T::half_ulp(expected) * 1.01;
        let apart = (found.wide() - expected).abs();
        assert!(
            apart <= bound,
            "{case:?}: [{t}, {c}] is {found:?}, expected {expected}"
        );
    }
    let found = stream.download(&rounded).unwrap();
    for (index, found) in found.iter().enumerate() {
        let inside = index
            .checked_sub(MARGIN)
            .filter(|index| *index < rank * rows && rounds_h);
        let expected = inside.map_or(0.5, |index| whole_h(index / rows, index % rows));
        let expected = T::rounded(expected as f32).wide();
        assert_eq!(found.wide(), expected, "{case:?}: rounded h at {index}");
    }
}

fn run_all(bench: &Bench, kernels: &LayerKernels, case: Case) {
    run::<bf16>(bench, kernels, case);
    run::<f16>(bench, kernels, case);
    let rounds_h = false;
    run::<f32>(bench, kernels, Case { rounds_h, ..case });
}

#[test]
fn sizes_ranks_and_parts() {
    for machine in [
        ascend_sim::Machine::default(),
        ascend_sim::Machine::ascend_950(),
    ] {
        let bench = Bench::new(machine);
        let kernels = LayerKernels::new(&bench.stream, bench.kernels.clone());
        for size in [
            [1, 1],
            [3, 7],
            [16, 64],
            [27, 65],
            [250, 130],
            [700, 300],
            [33, 1030],
        ] {
            for (rank, parts, rounds_h) in
                [(1, 1, true), (2, 2, true), (8, 2, true), (13, 2, false)]
            {
                run_all(
                    &bench,
                    &kernels,
                    Case {
                        size,
                        rank,
                        parts,
                        rounds_h,
                    },
                );
            }
        }
        for rank in [64, 256] {
            let size = [40, 100];
            run_all(
                &bench,
                &kernels,
                Case {
                    size,
                    rank,
                    parts: 2,
                    rounds_h: true,
                },
            );
        }
        drop(kernels);
        bench.finish();
    }
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
            y: Part {
                memory: &mut y,
                offset: 0,
            },
            h: Part {
                memory: &h,
                offset: 0,
            },
            b: Part {
                memory: &b,
                offset: 0,
            },
            rounded_h: rounds.then_some(Part {
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

/// Compares the gate and its backward with f64.
fn run_gate<T: Number>(bench: &Bench, kernels: &LayerKernels, count: usize) {
    let stream = &bench.stream;
    let tensor = |seed, scale: f64| -> Vec<T> {
        let numbers = numbers(seed, MARGIN + count + MARGIN);
        numbers.iter().map(|x| T::of(x * scale)).collect()
    };
    // Gates from where the sigmoid is 0 to where it is 1.
    let [gate, up, dy] = [tensor(4, 60.0), tensor(5, 2.0), tensor(6, 2.0)];
    let upload = |x: &[T]| stream.upload(x).unwrap();
    let [gates, ups, dys] = [&gate, &up, &dy].map(|x| upload(x));
    fn part<T: Number>(memory: &DeviceBuffer<T>) -> Part<&DeviceMemory> {
        let offset = MARGIN;
        Part { memory, offset }
    }
    let mut y = upload(&gate);
    kernels
        .gate(Gate {
            element: T::TYPE,
            elements: count,
            gate: part(&gates),
            up: part(&ups),
            y: Part {
                memory: &mut y,
                offset: MARGIN,
            },
        })
        .unwrap();
    let (mut gate_gradient, mut up_gradient) = (upload(&gate), upload(&up));
    kernels
        .gate_backward(GateBackward {
            element: T::TYPE,
            elements: count,
            gate: part(&gates),
            up: part(&ups),
            gradient: part(&dys),
            gate_gradient: Part {
                memory: &mut gate_gradient,
                offset: MARGIN,
            },
            up_gradient: Part {
                memory: &mut up_gradient,
                offset: MARGIN,
            },
        })
        .unwrap();
    stream.synchronize().unwrap();
    let found = [&y, &gate_gradient, &up_gradient].map(|x| stream.download(x).unwrap());
    for index in 0..gate.len() {
        let inside = (MARGIN..MARGIN + count).contains(&index);
        let [g, u, d] = [&gate, &up, &dy].map(|x| x[index].wide());
        let s = 1.0 / (1.0 + (-g).exp());
        // The slope is a difference of terms.
        let terms = (1.0 + d.abs()) * s * (1.0 + g.abs()) * (1.0 + u.abs());
        let expected = if inside {
            [g * s * u, d * (s + g * s * (1.0 - s)) * u, d * g * s]
        } else {
            [g, g, u]
        };
        for (found, expected) in found.iter().zip(expected) {
            let bound = 1e-6 * (terms + 1e-4) + T::half_ulp(expected) * 1.01;
            let apart = (found[index].wide() - expected).abs();
            assert!(
                apart <= bound,
                "{count}: {:?} at {index}, expected {expected}",
                found[index]
            );
        }
    }
}

#[test]
fn gates_of_all_sizes() {
    for machine in [
        ascend_sim::Machine::default(),
        ascend_sim::Machine::ascend_950(),
    ] {
        let bench = Bench::new(machine);
        let kernels = LayerKernels::new(&bench.stream, bench.kernels.clone());
        for count in [1, 7, 64, 1000, 40 * 64 + 3, 400_001] {
            run_gate::<f32>(&bench, &kernels, count);
            run_gate::<f16>(&bench, &kernels, count);
            run_gate::<bf16>(&bench, &kernels, count);
        }
        drop(kernels);
        bench.finish();
    }
}
