//! Number formats and vector instructions, compared with independent implementations.

mod support;

use std::sync::LazyLock;

use ascend_sim::{Machine, control};
use half::{bf16, f16};
use support::{Device, compile};

const KERNELS: [&str; 7] = [
    "half_to_float",
    "bf16_to_float",
    "float_to_half",
    "float_to_bf16",
    "float_to_int",
    "int_to_float",
    "instructions",
];
const NONE: u32 = 0;
const RINT: u32 = 1;
const FLOOR: u32 = 2;
const CEIL: u32 = 3;
const ROUND: u32 = 4;
const TRUNC: u32 = 5;

static LIBRARY: LazyLock<Vec<u8>> = LazyLock::new(|| compile("numeric.cpp", &KERNELS));

/// A device that keeps infinities and NaN, as the other implementation does.
fn device() -> Device {
    Device::on(Machine {
        saturate: false,
        ..Machine::default()
    })
}

fn convert<S: Copy, D: Copy + Default>(
    device: &Device,
    kernel: &str,
    input: &[S],
    mode: u32,
) -> Vec<D> {
    assert_eq!(input.len() % 4096, 0, "whole chunks");
    let (from, to) = (
        device.upload(input),
        device.alloc(size_of::<D>() * input.len()),
    );
    device
        .launch(
            &LIBRARY,
            kernel,
            1,
            &[from, to, input.len() as u64, u64::from(mode)],
        )
        .expect("runs");
    let output = device.download(to, input.len());
    device.free(from).expect("free");
    device.free(to).expect("free");
    output
}

/// Floats around every 16-bit value: the values, their midpoints and the floats beside both.
fn interesting(widen: impl Fn(u16) -> f32) -> Vec<f32> {
    let mut floats: Vec<f32> = (0..=u16::MAX)
        .flat_map(|bits| {
            let (value, next) = (widen(bits), widen(bits.wrapping_add(1)));
            let middle = f32::from_bits(
                ((u64::from(value.to_bits()) + u64::from(next.to_bits())) / 2) as u32,
            );
            [
                value,
                middle,
                f32::from_bits(middle.to_bits().wrapping_add(1)),
                f32::from_bits(middle.to_bits().wrapping_sub(1)),
            ]
        })
        .collect();
    floats.resize(floats.len().next_multiple_of(4096), 0.0);
    floats
}

#[test]
fn all_16_bit_values_widen_as_the_half_crate_says() {
    let device = device();
    let bits: Vec<u16> = (0..=u16::MAX).collect();
    let halves: Vec<f32> = convert(&device, "half_to_float", &bits, NONE);
    let brains: Vec<f32> = convert(&device, "bf16_to_float", &bits, NONE);
    for bits in 0..=u16::MAX {
        let (expected, found) = (f16::from_bits(bits).to_f32(), halves[usize::from(bits)]);
        assert!(
            found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()),
            "half {bits:#x}: {found} {expected}"
        );
        let (expected, found) = (bf16::from_bits(bits).to_f32(), brains[usize::from(bits)]);
        assert!(
            found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()),
            "bf16 {bits:#x}: {found} {expected}"
        );
    }
}

#[test]
fn floats_narrow_to_nearest_even_as_the_half_crate_says() {
    let device = device();
    let floats = interesting(|bits| f16::from_bits(bits).to_f32());
    let halves: Vec<u16> = convert(&device, "float_to_half", &floats, RINT);
    for (float, found) in floats.iter().zip(halves) {
        let expected = f16::from_f32(*float);
        assert!(
            found == expected.to_bits() || (expected.is_nan() && f16::from_bits(found).is_nan()),
            "{float:e}: {found:#x} {expected:e}"
        );
    }
    let floats = interesting(|bits| bf16::from_bits(bits).to_f32());
    let brains: Vec<u16> = convert(&device, "float_to_bf16", &floats, RINT);
    for (float, found) in floats.iter().zip(brains) {
        let expected = bf16::from_f32(*float);
        assert!(
            found == expected.to_bits() || (expected.is_nan() && bf16::from_bits(found).is_nan()),
            "{float:e}: {found:#x} {expected:e}"
        );
    }
}

#[test]
fn directed_modes_keep_their_side_and_stay_next_to_the_value() {
    let device = device();
    let floats: Vec<f32> = interesting(|bits| f16::from_bits(bits).to_f32())
        .into_iter()
        .map(|x| {
            if x.is_finite() && x.abs() < 65504.0 {
                x
            } else {
                1.5
            }
        })
        .collect();
    let below: Vec<u16> = convert(&device, "float_to_half", &floats, FLOOR);
    let above: Vec<u16> = convert(&device, "float_to_half", &floats, CEIL);
    let toward: Vec<u16> = convert(&device, "float_to_half", &floats, TRUNC);
    let nearest: Vec<u16> = convert(&device, "float_to_half", &floats, ROUND);
    for (i, float) in floats.iter().enumerate() {
        let [below, above, toward, nearest] =
            [below[i], above[i], toward[i], nearest[i]].map(|bits| f16::from_bits(bits).to_f64());
        let x = f64::from(*float);
        assert!(below <= x && x <= above, "{x:e}: {below:e} {above:e}");
        let exact = f64::from(f16::from_f32(*float)) == x;
        assert!(
            if exact {
                below == x && above == x
            } else {
                below < above
            },
            "{x:e}"
        );
        assert_eq!(toward, if x < 0.0 { above } else { below }, "{x:e}");
        // Ties go away from zero.
        let (down, up) = (x - below, above - x);
        let away = if x < 0.0 { below } else { above };
        let expected = if down == up {
            away
        } else if down < up {
            below
        } else {
            above
        };
        assert_eq!(nearest, if exact { x } else { expected }, "{x:e}");
    }
}

#[test]
fn saturation_keeps_numbers_finite_by_default() {
    let device = Device::new();
    let mut floats = vec![0.0_f32; 4096];
    floats[..4].copy_from_slice(&[f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e30]);
    let halves: Vec<u16> = convert(&device, "float_to_half", &floats, RINT);
    assert_eq!(
        halves[..4],
        [
            f16::MAX.to_bits(),
            f16::MIN.to_bits(),
            0,
            f16::MAX.to_bits()
        ]
    );
}

#[test]
fn integers_round_and_saturate() {
    let device = device();
    let mut floats = vec![0.0_f32; 4096];
    floats[..8].copy_from_slice(&[0.5, 1.5, 2.5, -0.5, -1.5, 3e9, -3e9, f32::NAN]);
    let at = |mode| convert::<f32, i32>(&device, "float_to_int", &floats, mode)[..8].to_vec();
    assert_eq!(at(RINT), [0, 2, 2, 0, -2, i32::MAX, i32::MIN, 0]);
    assert_eq!(at(FLOOR), [0, 1, 2, -1, -2, i32::MAX, i32::MIN, 0]);
    assert_eq!(at(CEIL), [1, 2, 3, 0, -1, i32::MAX, i32::MIN, 0]);
    assert_eq!(at(ROUND), [1, 2, 3, -1, -2, i32::MAX, i32::MIN, 0]);
    assert_eq!(at(TRUNC), [0, 1, 2, 0, -1, i32::MAX, i32::MIN, 0]);
    let mut state = 1_u32;
    let integers: Vec<i32> = (0..4096)
        .map(|i| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state as i32 >> (i % 24)
        })
        .collect();
    let converted: Vec<f32> = convert(&device, "int_to_float", &integers, RINT);
    for (integer, found) in integers.iter().zip(converted) {
        assert_eq!(found, *integer as f32);
    }
}

#[test]
fn vector_instructions_compute_what_they_say() {
    let device = device();
    let a: Vec<f32> = (0..64).map(|i| i as f32 * 1.25 - 30.0).collect();
    let b: Vec<f32> = (0..64).map(|i| 0.5 + (i * i % 17) as f32).collect();
    let (from, to) = (
        device.upload(&[a.clone(), b.clone()].concat()),
        device.alloc(14 * 64 * 4),
    );
    device
        .launch(&LIBRARY, "instructions", 1, &[from, to])
        .expect("runs");
    let rows: Vec<f32> = device.download(to, 14 * 64);
    let row = |index: usize| &rows[index * 64..(index + 1) * 64];
    for i in 0..64 {
        assert_eq!(row(0)[i], a[i] + b[i]);
        assert_eq!(row(1)[i], a[i] * b[i]);
        assert_eq!(row(2)[i], a[i] + a[i] * b[i]);
        assert_eq!(row(3)[i], a[i] * b[i % 8]);
        assert_eq!(
            row(4)[i],
            if i < 32 {
                a[2 * i]
            } else {
                a[2 * (i - 32) + 1]
            }
        );
        assert_eq!(row(5)[i], a[63 - i]);
        assert_eq!(row(6)[i].to_bits(), a[i].to_bits() & 0xffff_0000);
        assert_eq!(row(7)[i].to_bits(), a[i].to_bits() << 16);
        assert_eq!(row(8)[i], a[i / 8]);
        assert_eq!(row(9)[i], if i % 2 == 1 { a[i] + b[i] } else { 0.0 });
        assert_eq!(row(10)[i], 1.0 + 2.0 * a[i]);
        assert_eq!(row(11)[i], a[(i + 32) % 64]);
        assert_eq!(row(12)[i], b[i].sqrt());
    }
    // Every partial sum is exact.
    let sums = [64, 40].map(|n| [&a, &b].map(|x| x[..n].iter().sum::<f32>()));
    assert_eq!(row(13)[..4], [sums[0][0], sums[0][1], sums[1][0], 0.0]);
    assert_eq!(row(13)[5], sums[1][1]);
    assert_eq!(control::violations(), []);
}
