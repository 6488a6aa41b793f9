//! The rotary operators: rotation by complex numbers, gradients by inner products, limits.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use ascend_sim::abi::aclnn::*;
use ascend_sim::abi::operators::*;
use ascend_sim::{Machine, control};

use crate::harness::*;
use crate::support::{Device, recent_message};

const VECTOR_EXCEPTION: i32 = 507035;
const INVALID_HANDLE: i32 = 107017;

/// The two channels of pair `j` of a width, by mode: inputs, then outputs.
fn pair(mode: i64, j: usize, width: usize) -> ([usize; 2], [usize; 2]) {
    let quarter = width / 4;
    match mode {
        0 => ([j, j + width / 2], [j, j + width / 2]),
        1 => ([2 * j, 2 * j + 1], [2 * j, 2 * j + 1]),
        2 if j < quarter => ([j, j + quarter], [j, j + quarter]),
        2 => (
            [j + quarter, j + 2 * quarter],
            [j + quarter, j + 2 * quarter],
        ),
        _ => ([2 * j, 2 * j + 1], [j, j + width / 2]),
    }
}

/// Numbers between -1 and 1, exact in every float type.
fn units(count: usize, seed: u32) -> Vec<f64> {
    numbers(count, seed).iter().map(|x| x / 4.0).collect()
}

#[test]
fn rotation_multiplies_pairs_by_a_unit_complex_number() {
    let device = Device::on(Machine::ascend_950());
    let (batch, seq, heads, width) = (2, 3, 5, 8);
    let lanes = width / 2;
    let dims = [batch, seq, heads, width].map(|dim| dim as i64);
    let angle_dims = [1, dims[1], 1, dims[3]];
    let x = units(batch * seq * heads * width, 1);
    let angles: Vec<f64> = (0..seq * lanes).map(|i| i as f64 * 0.37).collect();
    for mode in 0..4 {
        let table = |f: fn(f64) -> f64| {
            let mut table = vec![0.0; seq * width];
            for (i, angle) in angles.iter().enumerate() {
                for channel in pair(mode, i % lanes, width).1 {
                    table[i / lanes * width + channel] = f(*angle);
                }
            }
            device.tensor(F32, &angle_dims, &table)
        };
        let (cos, sin) = (table(f64::cos), table(f64::sin));
        let mut expected = vec![0.0; x.len()];
        for row in 0..batch * seq * heads {
            for j in 0..lanes {
                let ([i1, i2], [o1, o2]) = pair(mode, j, width);
                let (sin, cos) = angles[row / heads % seq * lanes + j].sin_cos();
                let (re, im) = (x[row * width + i1], x[row * width + i2]);
                expected[row * width + o1] = re * cos - im * sin;
                expected[row * width + o2] = re * sin + im * cos;
            }
        }
        let (input, out) = (device.tensor(F32, &dims, &x), device.out(F32, &dims));
        check! { device;
            aclnnRotaryPositionEmbedding(input.raw, cos.raw, sin.raw, mode, out.raw)
                => out near expected, 1e-6;
        }
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn the_gradient_is_the_adjoint_and_sums_over_broadcast_axes() {
    let device = Device::on(Machine::ascend_950());
    let (dims, angle_dims) = ([1, 4, 3, 8], [1, 4, 1, 8]);
    // cos and sin need no relation for the operator to be linear in x, and in them.
    let (x, g) = (units(96, 3), units(96, 4));
    let (c, s) = (units(32, 5), units(32, 6));
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for mode in 0..4 {
        let (input, dy) = (device.tensor(F32, &dims, &x), device.tensor(F32, &dims, &g));
        let cos = device.tensor(F32, &angle_dims, &c);
        let sin = device.tensor(F32, &angle_dims, &s);
        let (y, dx) = (device.out(F32, &dims), device.out(F32, &dims));
        let (dcos, dsin) = (device.out(F32, &angle_dims), device.out(F32, &angle_dims));
        check! { device;
            aclnnRotaryPositionEmbedding(input.raw, cos.raw, sin.raw, mode, y.raw);
            aclnnRotaryPositionEmbeddingGrad(
                dy.raw, cos.raw, sin.raw, input.raw, mode, dx.raw, dcos.raw, dsin.raw,
            );
        }
        // The result is linear in x, and linear in (cos, sin): both inner products equal it.
        let value = dot(&y.values(), &g);
        let by_x = dot(&dx.values(), &x);
        let by_angles = dot(&dcos.values(), &c) + dot(&dsin.values(), &s);
        assert_close(
            &[by_x, by_angles],
            &[value, value],
            1e-6,
            &format!("mode {mode}"),
        );
    }
}

#[test]
fn the_gradient_without_x_wants_outputs_for_the_angles_and_leaves_them() {
    let device = Device::new();
    let (dims, angle_dims) = ([2, 3, 2, 64], [1, 3, 1, 64]);
    let dy = device.tensor(F32, &dims, &[1.0; 768]).raw;
    let angles = device.tensor(F32, &angle_dims, &[0.5; 192]).raw;
    let dx = device.out(F32, &dims);
    let (dcos, dsin) = (device.out(F32, &angle_dims), device.out(F32, &angle_dims));
    check! { device;
        aclnnRotaryPositionEmbeddingGrad(
            dy, angles, angles, null(), 0, dx.raw, null_mut(), dsin.raw,
        ) refuses NULL_POINTER, "dcosOut is null";
        aclnnRotaryPositionEmbeddingGrad(
            dy, angles, angles, null(), 0, dx.raw, dcos.raw, null_mut(),
        ) refuses NULL_POINTER, "dsinOut is null";
        aclnnRotaryPositionEmbeddingGrad(
            dy, angles, angles, null(), 0, dx.raw, dcos.raw, dsin.raw,
        );
    }
    assert_eq!(dx.values()[0], 1.0);
    let untouched = device.out(F32, &angle_dims).values();
    assert_eq!(
        (dcos.values(), dsin.values()),
        (untouched.clone(), untouched)
    );
}

/// By halves, over each layout and broadcast: dq = (c1 g1 + s2 g2, c2 g2 - s1 g1), and the
/// gradients of cos and sin are sums over the heads of q and k, and over the batch.
#[test]
fn gradients_of_q_and_k_in_one_call() {
    let device = Device::on(Machine::ascend_950());
    let (seq, width, half) = (3_usize, 8_usize, 4_usize);
    // Number, batches of the tensors and of the angles.
    for (layout, batch, angle_batch) in [(1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2), (4, 1, 1)] {
        let dims = |batch: usize, heads: usize| match layout {
            1 => vec![batch as i64, seq as i64, heads as i64, width as i64],
            2 => vec![seq as i64, batch as i64, heads as i64, width as i64],
            _ => vec![seq as i64, heads as i64, width as i64],
        };
        // The row of a token in a tensor of some batches.
        let row = |b: usize, s: usize, batches: usize| match layout {
            1 => b % batches * seq + s,
            _ => s * batches + b % batches,
        };
        let angle_len = angle_batch * seq * width;
        let (c, s) = (units(angle_len, 5), units(angle_len, 6));
        let (mut dcos, mut dsin) = (vec![0.0; angle_len], vec![0.0; angle_len]);
        let mut tensors = Vec::new();
        for heads in [3, 2] {
            let len = batch * seq * heads * width;
            let (x, g) = (units(len, 7 + heads as u32), units(len, 9 + heads as u32));
            let mut dx = vec![0.0; len];
            for (b, token, head) in
                (0..batch * seq * heads).map(|i| (i / heads / seq, i / heads % seq, i % heads))
            {
                let at = (row(b, token, batch) * heads + head) * width;
                let angle = row(b, token, angle_batch) * width;
                for i in 0..half {
                    let (first, second) = (at + i, at + i + half);
                    let (one, two) = (angle + i, angle + i + half);
                    dx[first] = c[one] * g[first] + s[two] * g[second];
                    dx[second] = c[two] * g[second] - s[one] * g[first];
                    dcos[one] += g[first] * x[first];
                    dcos[two] += g[second] * x[second];
                    dsin[one] -= g[first] * x[second];
                    dsin[two] += g[second] * x[first];
                }
            }
            let dims = dims(batch, heads);
            let input = |values: &[f64]| device.tensor(F32, &dims, values);
            tensors.push((input(&g), input(&x), device.out(F32, &dims), dx));
        }
        let angle_dims = dims(angle_batch, 1);
        let [cos, sin] = [&c, &s].map(|values| device.tensor(F32, &angle_dims, values));
        let [to_cos, to_sin] = [0, 1].map(|_| device.out(F32, &angle_dims));
        let [(dq, q, dq_out, expected_q), (dk, k, dk_out, expected_k)] = &tensors[..] else {
            unreachable!("q and k");
        };
        let mode = c"half".as_ptr();
        check! { device;
            aclnnApplyRotaryPosEmbGrad(
                dq.raw, dk.raw, cos.raw, sin.raw, q.raw, k.raw, mode, layout, dq_out.raw,
                dk_out.raw, to_cos.raw, to_sin.raw,
            ) => dq_out near *expected_q, 1e-6;
        }
        assert_close(
            &dk_out.values(),
            expected_k,
            1e-6,
            &format!("k in {layout}"),
        );
        assert_close(&to_cos.values(), &dcos, 1e-6, &format!("cos in {layout}"));
        assert_close(&to_sin.values(), &dsin, 1e-6, &format!("sin in {layout}"));
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn gradients_of_q_and_k_in_one_call_have_limits() {
    let machines = [
        (Machine::ascend_950(), "only \"half\"", c"interleave", 1, 8),
        (Machine::ascend_950(), "layout is 3", c"half", 3, 8),
        (Machine::ascend_950(), "takes 3 axes", c"half", 4, 8),
        (Machine::ascend_950(), "does not fit", c"half", 2, 8),
        (Machine::ascend_950(), "D is 1026", c"half", 1, 1026),
        (Machine::ascend_950(), "both be given", c"half", 1, 8),
        (Machine::default(), "needs an Ascend 950", c"half", 1, 8),
    ];
    for (machine, text, mode, layout, width) in machines {
        let device = Device::on(machine);
        let tensor = |dims: &[i64]| {
            let len = dims.iter().product::<i64>() as usize;
            (
                device.tensor(F32, dims, &vec![0.5; len]).raw,
                device.out(F32, dims).raw,
            )
        };
        let (dy, dx) = tensor(&[2, 3, 2, width]);
        let (angles, dangles) = tensor(&[1, 3, 1, width]);
        let (_, dsin) = tensor(&[1, 3, 1, width]);
        let (_, dk) = tensor(&[2, 3, 2, width]);
        let q = if text == "both be given" { dy } else { null() };
        check! { device;
            aclnnApplyRotaryPosEmbGrad(
                dy, dy, angles, angles, q, null(), mode.as_ptr(), layout, dx, dk, dangles, dsin,
            ) refuses PARAM_INVALID, text;
        }
    }
}

/// Runs npu_mrope's operator on f32 rows of ones and zeros, so that the result shows the angles.
fn mrope(
    device: &Device,
    sections: &[i64],
    cache_mode: i64,
    positions: &[f64],
    strided: bool,
) -> Result<Vec<f64>, Failed> {
    let (lanes, tokens, rows) = (64, 2, 64);
    // Row p of the table rotates lane j by p radians: cos p and sin p.
    let entry = |p: usize, i: usize| {
        if i < lanes {
            (p as f64).cos()
        } else {
            (p as f64).sin()
        }
    };
    let table: Vec<f64> = (0..rows)
        .flat_map(|p| (0..2 * lanes).map(move |i| entry(p, i)))
        .collect();
    let half = |one: f64| vec![one; lanes];
    let x = [half(1.0), half(0.0)].concat().repeat(tokens);
    let (axes, width) = (sections.len() as i64, 2 * lanes as i64);
    let strides = [1, axes];
    let strides = strided.then_some(&strides[..]);
    let positions = device.view(I64, positions, &[axes, tokens as i64], strides, 0);
    let dims = [tokens as i64, width];
    let (query, key) = (device.tensor(F32, &dims, &x), device.tensor(F32, &dims, &x));
    let (query_out, key_out) = (device.out(F32, &dims), device.out(F32, &dims));
    let cache = device.tensor(F32, &[rows as i64, width], &table);
    let sections = ints(sections);
    run!(
        device,
        aclnnRopeWithSinCosCacheV2(
            positions.raw,
            query.raw,
            key.raw,
            cache.raw,
            sections,
            width,
            true,
            cache_mode,
            query_out.raw,
            key_out.raw,
        )
    )?;
    assert_eq!(query_out.values(), key_out.values());
    Ok(query_out.values())
}

#[test]
fn the_cached_operator_takes_each_lane_from_its_axis() {
    let device = Device::new();
    // Positions 10, 20, 30 on the axes of the first token.
    let positions = [10.0, 0.0, 20.0, 0.0, 30.0, 0.0];
    let axis_of = |y: &[f64], lane: usize| {
        let near = |x: f64, y: f64| (x - y).abs() < 1e-6;
        let angle = |p: &f64| near(y[lane], p.cos()) && near(y[64 + lane], p.sin());
        [10.0, 20.0, 30.0].iter().position(angle)
    };
    let contiguous = mrope(&device, &[16, 24, 24], 0, &positions, false).expect("runs");
    let striped = mrope(&device, &[24, 20, 20], 1, &positions, false).expect("runs");
    for lane in 0..64 {
        let section = usize::from(lane >= 16) + usize::from(lane >= 40);
        assert_eq!(axis_of(&contiguous, lane), Some(section));
        // Qwen3-VL: every third lane is height or width, until their 20 are used up.
        let stripe = if lane < 60 { lane % 3 } else { 0 };
        assert_eq!(axis_of(&striped, lane), Some(stripe), "lane {lane}");
    }
}

#[test]
fn what_the_cached_operator_gets_wrong_is_reported() {
    let device = Device::new();
    // The same positions laid out token by token, with strides that state it.
    let by_token = [10.0, 20.0, 30.0, 0.0, 0.0, 0.0];
    let wrong = mrope(&device, &[16, 24, 24], 0, &by_token, true).expect("runs");
    let expected = [10.0_f64.cos(), 30.0_f64.cos()];
    assert_close(
        &[wrong[0], wrong[16]],
        &expected,
        1e-6,
        "strides are ignored",
    );
    let found = control::take_violations();
    assert_eq!(found.len(), 1);
    assert!(found[0].message.contains("not contiguous"));

    let outside = [10.0, 64.0, 20.0, 0.0, 30.0, 0.0];
    let says = "position 64 is outside the cosSinCache of 64 rows";
    let outcome = mrope(&device, &[16, 24, 24], 0, &outside, false);
    assert_refused(outcome, VECTOR_EXCEPTION, says);
}

#[test]
fn documented_limits_are_enforced() {
    let device = Device::new();
    for (sections, mode, says) in [
        (&[11, 11, 10][..], 0, "[11, 11, 10] is not supported"),
        (&[16, 16, 16, 16], 1, "cacheMode 0"),
        (&[8, 12, 12], 0, "sum to rotaryDim/2"),
    ] {
        let positions = vec![0.0; 2 * sections.len()];
        let outcome = mrope(&device, sections, mode, &positions, false);
        assert_refused(outcome, PARAM_INVALID, says);
    }

    let forward = |dims: &[i64], angle_dims: &[i64], mode: i64| {
        let (x, out) = (device.out(Bf16, dims).raw, device.out(Bf16, dims).raw);
        let angles = device.out(Bf16, angle_dims).raw;
        plan!(aclnnRotaryPositionEmbedding(x, angles, angles, mode, out))
    };
    forward(&[2, 4, 8, 64], &[2, 1, 8, 64], 0).expect("half takes B1SD");
    for (dims, angle_dims, mode, says) in [
        (&[2, 4, 8, 64][..], &[2, 1, 8, 64][..], 1, "do not fit"),
        (&[1, 4, 8, 896], &[1, 1, 8, 896], 0, "below 896"),
        (&[1, 4, 8, 63], &[1, 1, 8, 63], 0, "multiple of 2"),
        (&[1, 4, 8, 64], &[1, 1, 8, 64], 3, "needs an Ascend 950"),
        (&[1, 4, 8, 64], &[1, 1, 8, 64], 4, "mode 4 does not exist"),
        (&[1, 4, 8, 64], &[1, 1, 8, 32], 0, "cos has width 32"),
        (&[1, 1000, 1, 64], &[1, 1, 1, 64], 1, "below 1000"),
        (&[3, 2, 64], &[3, 1, 64], 0, "3 dimensions, 4 are expected"),
    ] {
        assert_refused(forward(dims, angle_dims, mode), PARAM_INVALID, says);
    }

    let backward = |dims: &[i64], angle_dims: &[i64]| {
        let (x, out) = (device.out(Bf16, dims).raw, device.out(Bf16, dims).raw);
        let a = device.out(Bf16, angle_dims).raw;
        plan!(aclnnRotaryPositionEmbeddingGrad(
            x,
            a,
            a,
            null(),
            0,
            out,
            a,
            a
        ))
    };
    backward(&[2, 4, 3, 64], &[2, 1, 3, 64]).expect("plans");
    let outcome = backward(&[3, 4, 3, 64], &[3, 1, 3, 64]);
    assert_refused(
        outcome,
        PARAM_INVALID,
        "batch 3 must be below the sequence 3",
    );
}

#[test]
fn both_phases_check_what_they_get() {
    let device = Device::new();
    let tensor = device.tensor(F32, &[1, 1, 1, 64], &[0.0; 64]);
    let (x, memory) = (tensor.raw, tensor.address as *mut c_void);
    let stream = device.stream;
    check! { device;
        aclnnRotaryPositionEmbedding(x, null(), x, 0, x) refuses NULL_POINTER, "cos is null";
    }
    let plan = || plan!(aclnnRotaryPositionEmbedding(x, x, x, 0, x)).expect("plans");
    // SAFETY: live executors, and handles and device addresses of which wrong ones are errors.
    unsafe {
        // The second phase uses the executor up, also when it refuses.
        let (bytes, planned) = plan();
        assert_eq!(
            aclnnRotaryPositionEmbedding::run(null_mut(), bytes, planned, stream),
            NULL_POINTER
        );
        assert_eq!(
            aclnnRotaryPositionEmbedding::run(memory, bytes, planned, stream),
            INVALID_HANDLE
        );
        let (bytes, planned) = plan();
        assert_eq!(
            aclnnRotaryPositionEmbedding::run(memory, bytes - 1, planned, stream),
            PARAM_INVALID
        );
        let (bytes, planned) = plan();
        let code = aclnnRotaryPositionEmbeddingGrad::run(memory, bytes, planned, stream);
        assert_eq!(code, PARAM_INVALID);
        assert!(recent_message().contains("planned by aclnnRotaryPositionEmbedding"));
        assert_eq!(aclDestroyAclOpExecutor(planned), 0);
        assert_eq!(aclDestroyTensor(x), 0);
        assert_eq!(aclDestroyTensor(x), INVALID_HANDLE);
    }
    // Offset and format exchanged: a view without offset in a format that is not modelled.
    let (dims, strides, storage) = ([4_i64, 4], [4_i64, 1], [16_i64]);
    // SAFETY: the lists have the given lengths.
    let exchanged = unsafe {
        aclCreateTensor(
            dims.as_ptr(),
            2,
            0,
            strides.as_ptr(),
            2,
            0,
            storage.as_ptr(),
            1,
            memory,
        )
    };
    assert!(exchanged.is_null() && recent_message().contains("offset comes before format"));
    assert!(describe(&dims, Some(&strides), 1, F32, 16, tensor.address).is_null());
    assert!(recent_message().contains("reaches element 16"));
}

#[test]
fn mode_3_rotates_as_mode_0_does_the_parted_channels() {
    let device = Device::on(Machine::ascend_950());
    let (dims, width) = ([2, 4, 3, 64], 64);
    let x = numbers(2 * 4 * 3 * width, 7);
    let input = device.tensor(F32, &dims, &x);
    // Mode 3: the same rotation of the de-interleaved channels, by angles that the batches share.
    let shared = |seed| device.tensor(F32, &[1, 1, 3, 64], &numbers(3 * width, seed));
    let (cos, sin) = (shared(8), shared(9));
    let part = |row: &[f64]| {
        let (even, odd) = (row.iter().step_by(2), row.iter().skip(1).step_by(2));
        even.chain(odd).copied().collect::<Vec<_>>()
    };
    let parted: Vec<f64> = x.chunks(width).flat_map(part).collect();
    let parted = device.tensor(F32, &dims, &parted);
    let (left, right) = (device.out(F32, &dims), device.out(F32, &dims));
    check! { device;
        aclnnRotaryPositionEmbedding(parted.raw, cos.raw, sin.raw, 0, left.raw);
        aclnnRotaryPositionEmbedding(input.raw, cos.raw, sin.raw, 3, right.raw)
            => right is left.values();
    }
}

#[test]
fn outputs_are_contiguous() {
    let device = Device::new();
    let dims = [1, 2, 3, 64];
    let all = |count: usize| vec![1.0; count];
    let (x, angle) = (
        device.tensor(F32, &dims, &all(384)),
        device.tensor(F32, &[1, 1, 3, 64], &all(192)),
    );
    let wide = device.view(F32, &all(768), &dims, Some(&[768, 384, 128, 1]), 0);
    assert_refused(
        run!(
            device,
            aclnnRotaryPositionEmbedding(x.raw, angle.raw, angle.raw, 0, wide.raw)
        ),
        PARAM_INVALID,
        "a contiguous tensor is expected",
    );
    run!(
        device,
        aclnnRotaryPositionEmbedding(wide.raw, angle.raw, angle.raw, 0, x.raw)
    )
    .expect("inputs may be views");
}
