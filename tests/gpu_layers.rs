//! burn-attention's kernels for CubeCL against those of the CPU.

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_attention::{
    AdamWOp, Adapter, SQUARES, adamw, adapted_linear_source, adapted_linears, backward_from,
    rms_norm, scaled_parts, square_sums, swiglu,
};
use rope_check::buffer::DType as Stored;

use crate::device::device;
use crate::{dtypes, fused};

/// The types that the device has.
fn types() -> Vec<DType> {
    let has = dtypes(&*fused(&device()));
    let all = [
        (Stored::F64, DType::F64),
        (Stored::F32, DType::F32),
        (Stored::F16, DType::F16),
        (Stored::Bf16, DType::BF16),
    ];
    let all = all.into_iter().filter(|(stored, _)| has.contains(stored));
    all.map(|(_, dtype)| dtype).collect()
}

/// Numbers between -2 and 2 that are the same in every run.
fn numbers(seed: usize, count: usize) -> Vec<f64> {
    let value = |index: usize| ((index * 7919 + seed * 104_729) % 2003) as f64 / 500.5 - 2.0;
    (0..count).map(value).collect()
}

fn tensor<const D: usize>(
    seed: usize,
    shape: [usize; D],
    (device, dtype): (&Device, DType),
) -> Tensor<D> {
    let numbers = numbers(seed, shape.iter().product());
    Tensor::from_data(TensorData::new(numbers, shape), (device, dtype))
}

/// The data of a tensor. CubeCL copies on first access, when later operations may have written in
/// place.
fn read<const D: usize>(x: Tensor<D>) -> TensorData {
    let data = x.into_data();
    let _ = data.as_bytes();
    data
}

/// The error of a rounding to a type, relative to the largest number.
fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 4e-6,
        DType::F16 => 2f64.powi(-10),
        _ => 2f64.powi(-7),
    }
}

/// Compares what a function computes on the GPU with what it computes on the CPU.
fn equals_the_cpu(what: &str, compute: impl Fn(&Device) -> Vec<TensorData>) {
    let [expected, found] = [Device::flex(), device()].map(|device| compute(&device));
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert_eq!(found.dtype(), expected.dtype(), "{what}: {index}");
        let allowed = rounding(found.dtype());
        let [found, expected] = [found, expected].map(|x| x.iter::<f64>().collect::<Vec<_>>());
        assert_eq!(found.len(), expected.len(), "{what}: {index}");
        let largest = expected.iter().fold(1e-3, |max: f64, x| max.max(x.abs()));
        for (element, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let is_nan = found.is_nan() && expected.is_nan();
            assert!(
                is_nan || (found - expected).abs() <= allowed * largest,
                "{what}: {index}[{element}] is {found}, expected {expected}"
            );
        }
    }
}

/// Rows and channels: vectors of all widths, and more vectors than units.
const SIZES: [[usize; 2]; 7] = [
    [1, 1],
    [3, 5],
    [7, 64],
    [70, 190],
    [300, 33],
    [2, 4096],
    [3, 8196],
];

#[test]
fn norms_are_those_of_the_cpu() {
    for dtype in types() {
        let weights = [dtype, DType::F32];
        let weights = if dtype.size() < 4 {
            &weights[..]
        } else {
            &weights[..1]
        };
        for (size, of_weight) in SIZES
            .iter()
            .flat_map(|size| weights.iter().map(move |w| (*size, *w)))
        {
            for trains in [false, true] {
                equals_the_cpu(&format!("{dtype:?} {of_weight:?} {size:?}"), |device| {
                    let device = &device.clone().autodiff();
                    let [rows, channels] = size;
                    // Part of a tensor, whose rows do not start where the memory does.
                    let x = tensor(1, [rows + 1, channels], (device, dtype));
                    let x = x.narrow(0, 1, rows).require_grad();
                    let weight = tensor(2, [channels], (device, of_weight));
                    let weight = if trains {
                        weight.require_grad()
                    } else {
                        weight
                    };
                    let dy = tensor(3, [rows, channels], (device, dtype));
                    let y = rms_norm(x.clone(), weight.clone(), 1e-5).expect("it fits");
                    let gradients = (y.clone() * dy).sum().backward();
                    let dx = x.grad(&gradients).expect("tracked");
                    let mut all = vec![read(y.inner()), read(dx)];
                    all.extend(weight.grad(&gradients).map(read));
                    assert_eq!(all.len(), if trains { 3 } else { 2 });
                    all
                });
            }
        }
    }
}

/// Rows whose squares leave f32, and with an epsilon of 0 those that lose their digits.
#[test]
fn rows_outside_the_type_are_nan() {
    for (epsilon, factor) in [(1e-6, 1e25), (0.0, 1e-25), (1e-6, 1e-25)] {
        equals_the_cpu(&format!("{epsilon} {factor}"), |device| {
            let x = tensor(1, [2, 8], (device, DType::F32)) * factor;
            let weight = tensor(2, [8], (device, DType::F32));
            vec![read(rms_norm(x, weight, epsilon).expect("it fits"))]
        });
    }
}

#[test]
fn gates_are_those_of_the_cpu() {
    // Vulkan has no exponentials in f64.
    for dtype in types().into_iter().filter(|dtype| *dtype != DType::F64) {
        for size in SIZES {
            equals_the_cpu(&format!("{dtype:?} {size:?}"), |device| {
                let device = &device.clone().autodiff();
                let [rows, channels] = size;
                let both = tensor(1, [rows, 2 * channels], (device, dtype)) * 8.0;
                // Its rows lie apart.
                let gate = both.narrow(1, 0, channels).detach().require_grad();
                let up = tensor(2, size, (device, dtype)).require_grad();
                let dy = tensor(3, size, (device, dtype));
                let y = swiglu(gate.clone(), up.clone()).expect("it fits");
                let gradients = (y.clone() * dy).sum().backward();
                let slopes = [&gate, &up].map(|x| x.grad(&gradients).expect("tracked"));
                let [dgate, dup] = slopes.map(read);
                // Both are held, and stay as they were.
                let [gate, up] = [gate, up].map(|x| read(x.inner()));
                vec![read(y.inner()), dgate, dup, gate, up]
            });
        }
    }
    equals_the_cpu("extremes", |device| {
        let gate = Tensor::from_floats([-200.0, -90.0, 0.0, 90.0, 200.0], device);
        let y: Tensor<1> = swiglu(gate, Tensor::ones([5], device)).expect("it fits");
        vec![read(y)]
    });
}

fn op(steps: u64) -> AdamWOp {
    AdamWOp {
        rate: 1e-2,
        decay: 0.1,
        betas: [0.9, 0.99],
        epsilon: 1e-3,
        steps,
        scale: 0.7,
    }
}

#[test]
fn updates_are_those_of_the_cpu() {
    let types = types();
    let narrow = |dtype: &&DType| dtype.size() < 4;
    let narrow: Vec<DType> = types.iter().filter(narrow).copied().collect();
    let mut cases = vec![[DType::F32; 3]];
    cases.extend(narrow.iter().flat_map(|narrow| {
        let (narrow, wide) = (*narrow, DType::F32);
        [
            [wide, wide, narrow],
            [wide, narrow, narrow],
            [wide, narrow, wide],
        ]
    }));
    if types.contains(&DType::F64) {
        cases.push([DType::F64; 3]);
    }
    for [dtype, of_gradient, rounded] in cases {
        for (count, held) in [(0, 0), (1, 0), (7, 0), (64, 15), (1000, 0), (40_001, 5)]
            .into_iter()
            .chain((0..16).map(|held| (36, held)))
        {
            let what = format!("{dtype:?} {of_gradient:?} {rounded:?} {count} {held:b}");
            equals_the_cpu(&what, |device| {
                let of = |seed, dtype| tensor(seed, [count], (device, dtype));
                let second = of(4, dtype);
                let state = [
                    of(1, dtype),
                    of(2, of_gradient),
                    of(3, dtype),
                    second.clone() * second,
                ];
                // By the bits of a number, each set of held tensors, which stay as they were.
                let is_held = |(index, _): &(usize, &Tensor<1>)| held >> index & 1 == 1;
                let kept: Vec<_> = state
                    .iter()
                    .enumerate()
                    .filter(is_held)
                    .map(|(_, x)| x.clone())
                    .collect();
                let [value, gradient, first, second] = state;
                let updated = adamw(
                    value,
                    gradient,
                    [first, second],
                    op(2),
                    FloatDType::from(rounded),
                );
                let updated = updated.expect("they fit");
                let [first, second] = updated.moments;
                let mut all = vec![updated.value, updated.rounded, first, second];
                all.extend(kept);
                all.into_iter().map(read).collect()
            });
        }
    }
}

#[test]
fn sums_of_squares_are_those_of_the_cpu() {
    for dtype in types() {
        for counts in [
            &[1][..],
            &[SQUARES],
            &[SQUARES + 1, 0, 3],
            &[5 * SQUARES + 2, 64, 2 * SQUARES],
        ] {
            equals_the_cpu(&format!("{dtype:?} {counts:?}"), |device| {
                let tensors = counts.iter().enumerate();
                let tensors = tensors.map(|(seed, count)| tensor(seed, [*count], (device, dtype)));
                let sums = square_sums(tensors.collect()).expect("of some tensors");
                vec![read(sums)]
            });
            // Beside f32.
            equals_the_cpu(&format!("{dtype:?} {counts:?} and f32"), |device| {
                let tensors = counts.iter().enumerate();
                let tensors = tensors.map(|(seed, count)| {
                    let dtype = if seed == 0 { dtype } else { DType::F32 };
                    tensor(seed, [*count], (device, dtype))
                });
                let sums = square_sums(tensors.collect()).expect("of some tensors");
                vec![read(sums)]
            });
        }
    }
    assert!(square_sums(Vec::new()).is_none());
}

/// Rows, inputs, outputs of one layer or more with an input, and the rank.
const LAYERS: [(usize, usize, &[usize], usize); 5] = [
    (1, 2, &[1], 1),
    (5, 24, &[16, 40, 16], 3),
    (66, 64, &[96, 96], 8),
    (130, 33, &[7], 5),
    (70, 128, &[260], 70),
];

/// Layers of `N` outputs, and with the gradients of all.
fn adapted<const N: usize>(
    device: &Device,
    dtype: DType,
    (rows, inputs, outputs, rank): (usize, usize, &[usize], usize),
    from_source: bool,
) -> Vec<TensorData> {
    let plain = device.clone();
    let device = &device.clone().autodiff();
    let wide = if dtype == DType::F64 {
        dtype
    } else {
        DType::F32
    };
    let x = (tensor(1, [rows, inputs], (device, dtype)) * 0.25).require_grad();
    let mut tracked = Vec::new();
    let mut layers = outputs.iter().enumerate().map(|(seed, outputs)| {
        let seed = 10 * seed;
        let weight = (tensor(seed + 2, [inputs, *outputs], (device, dtype)) * 0.25).require_grad();
        let bias = tensor::<1>(seed + 3, [*outputs], (device, dtype)).require_grad();
        let a = (tensor(seed + 4, [rank, inputs], (device, wide)) * 0.25).require_grad();
        let b = (tensor(seed + 5, [rank, *outputs], (device, wide)) * 0.25).require_grad();
        let factors = [&a, &b].map(|x| scaled_parts(x.clone().detach(), 0.5, dtype));
        tracked.extend([weight.clone(), a.clone(), b.clone()]);
        let adapter = Adapter { a, b, factors };
        (weight, Some(bias), adapter)
    });
    let layers: [_; N] = std::array::from_fn(|_| layers.next().expect("N layers"));
    let dy = |index: usize, device: &Device| {
        tensor::<2>(70 + index, [rows, outputs[index]], (device, dtype)) * 0.25
    };
    let mut all = Vec::new();
    let gradients = if from_source {
        let sources = layers.into_iter().enumerate().map(|(index, layer)| {
            adapted_linear_source(x.clone(), layer, dy(index, &plain)).expect("they fit")
        });
        backward_from(sources)
    } else {
        let ys = adapted_linears(x.clone(), layers).expect("they fit");
        let mut sum = Tensor::<1>::zeros([1], (device, dtype));
        for (index, y) in ys.iter().enumerate() {
            sum = sum + (y.clone() * dy(index, device)).sum();
        }
        all.extend(ys.map(|y| read(y.inner())));
        sum.backward()
    };
    all.push(read(x.grad(&gradients).expect("tracked")));
    all.extend(
        tracked
            .iter()
            .map(|x| read(x.grad(&gradients).expect("tracked"))),
    );
    all
}

#[test]
fn layers_with_adapters_are_those_of_the_cpu() {
    for dtype in types() {
        for case in LAYERS {
            for from_source in [false, true] {
                let what = format!("{dtype:?} {case:?} {from_source}");
                equals_the_cpu(&what, |device| match case.2.len() {
                    1 => adapted::<1>(device, dtype, case, from_source),
                    2 => adapted::<2>(device, dtype, case, from_source),
                    _ => adapted::<3>(device, dtype, case, from_source),
                });
            }
        }
    }
}
