//! The stock operators: rotation by complex numbers, gradients by inner products, limits.
#![allow(unsafe_code, reason = "the tests call the C ABI, as programs do")]

mod support;

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use ascend_sim::abi::aclnn::*;
use ascend_sim::abi::operators::*;
use ascend_sim::abi::runtime::*;
use ascend_sim::{Machine, control};
use support::{Device, recent_message};

const FLOAT: i32 = 0;
const INT64: i32 = 9;
const BF16: i32 = 27;
const PARAM_INVALID: i32 = 161002;
const NULL_POINTER: i32 = 161001;

fn tensor(
    dims: &[i64],
    strides: Option<&[i64]>,
    dtype: i32,
    storage: i64,
    data: u64,
) -> *mut aclTensor {
    // SAFETY: the lists are as long as the counts say.
    let created = unsafe {
        aclCreateTensor(
            dims.as_ptr(),
            dims.len() as u64,
            dtype,
            strides.map_or(null(), <[i64]>::as_ptr),
            0,
            2,
            &raw const storage,
            1,
            data as *mut c_void,
        )
    };
    assert!(!created.is_null(), "{}", recent_message());
    created
}

fn floats(device: &Device, dims: &[i64], values: &[f32]) -> (*mut aclTensor, u64) {
    let data = device.upload(values);
    (tensor(dims, None, FLOAT, values.len() as i64, data), data)
}

/// Numbers that look random and are the same every time.
fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

type First<'a> = Box<dyn Fn(*mut u64, *mut *mut aclOpExecutor) -> i32 + 'a>;
type Second = unsafe extern "C" fn(*mut c_void, u64, *mut aclOpExecutor, *mut c_void) -> i32;

/// Both phases with the workspace that was asked for.
fn run(device: &Device, first: First<'_>, second: Second) -> Result<(), (i32, String)> {
    let (mut bytes, mut executor) = (0, null_mut());
    let code = first(&raw mut bytes, &raw mut executor);
    if code != 0 {
        return Err((code, recent_message()));
    }
    let workspace = device.alloc(bytes as usize);
    // SAFETY: the executor of the first phase, and a workspace of the size it asked for.
    let code = unsafe { second(workspace as *mut c_void, bytes, executor, device.stream) };
    assert_eq!(code, 0, "{}", recent_message());
    device.synchronize()?;
    device.free(workspace)
}

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

#[test]
fn rotation_multiplies_pairs_by_a_unit_complex_number() {
    let device = Device::on(Machine::ascend_950());
    let (batch, seq, heads, width) = (2, 3, 5, 8);
    for mode in 0..4 {
        let x = numbers(batch * seq * heads * width, 1);
        let angles: Vec<f64> = (0..seq * width / 2).map(|i| i as f64 * 0.37).collect();
        let full = |f: fn(f64) -> f64| {
            let mut table = vec![0.0_f32; seq * width];
            for s in 0..seq {
                for j in 0..width / 2 {
                    for channel in pair(mode, j, width).1 {
                        table[s * width + channel] = f(angles[s * width / 2 + j]) as f32;
                    }
                }
            }
            table
        };
        let dims = [batch as i64, seq as i64, heads as i64, width as i64];
        let angle_dims = [1, seq as i64, 1, width as i64];
        let (input, _) = floats(&device, &dims, &x);
        let (cos, _) = floats(&device, &angle_dims, &full(f64::cos));
        let (sin, _) = floats(&device, &angle_dims, &full(f64::sin));
        let (out, data) = floats(&device, &dims, &vec![0.0; x.len()]);
        // SAFETY: live descriptors and valid out parameters.
        let first: First<'_> = Box::new(|bytes, executor| unsafe {
            aclnnRotaryPositionEmbeddingGetWorkspaceSize(
                input, cos, sin, mode, out, bytes, executor,
            )
        });
        run(&device, first, aclnnRotaryPositionEmbedding).expect("runs");
        let y: Vec<f32> = device.download(data, x.len());
        for row in 0..batch * seq * heads {
            let s = row / heads % seq;
            for j in 0..width / 2 {
                let ([i1, i2], [o1, o2]) = pair(mode, j, width);
                let (sin, cos) = angles[s * width / 2 + j].sin_cos();
                let (re, im) = (
                    f64::from(x[row * width + i1]),
                    f64::from(x[row * width + i2]),
                );
                let (expected_re, expected_im) = (re * cos - im * sin, re * sin + im * cos);
                assert!(
                    (f64::from(y[row * width + o1]) - expected_re).abs() < 1e-6,
                    "mode {mode} row {row} pair {j}"
                );
                assert!(
                    (f64::from(y[row * width + o2]) - expected_im).abs() < 1e-6,
                    "mode {mode} row {row} pair {j}"
                );
            }
        }
    }
    assert_eq!(control::violations(), []);
}

#[test]
fn the_gradient_is_the_adjoint_and_sums_over_broadcast_axes() {
    let device = Device::on(Machine::ascend_950());
    let (seq, heads, width) = (4, 3, 8);
    let dims = [1, seq as i64, heads as i64, width as i64];
    let angle_dims = [1, seq as i64, 1, width as i64];
    for mode in 0..4 {
        // cos and sin need no relation for the operator to be linear in x, and in them.
        let (x, g) = (
            numbers(seq * heads * width, 3),
            numbers(seq * heads * width, 4),
        );
        let (c, s) = (numbers(seq * width, 5), numbers(seq * width, 6));
        let forward = |x: &[f32], c: &[f32], s: &[f32]| -> Vec<f32> {
            let ((input, _), (cos, _), (sin, _)) = (
                floats(&device, &dims, x),
                floats(&device, &angle_dims, c),
                floats(&device, &angle_dims, s),
            );
            let (out, data) = floats(&device, &dims, &vec![0.0; x.len()]);
            // SAFETY: live descriptors and valid out parameters.
            let first: First<'_> = Box::new(|bytes, executor| unsafe {
                aclnnRotaryPositionEmbeddingGetWorkspaceSize(
                    input, cos, sin, mode, out, bytes, executor,
                )
            });
            run(&device, first, aclnnRotaryPositionEmbedding).expect("runs");
            device.download(data, x.len())
        };
        let dot = |a: &[f32], b: &[f32]| -> f64 {
            a.iter()
                .zip(b)
                .map(|(a, b)| f64::from(*a) * f64::from(*b))
                .sum()
        };
        let ((dy, _), (cos, _), (sin, _), (input, _)) = (
            floats(&device, &dims, &g),
            floats(&device, &angle_dims, &c),
            floats(&device, &angle_dims, &s),
            floats(&device, &dims, &x),
        );
        let (dx, dx_data) = floats(&device, &dims, &vec![0.0; x.len()]);
        let (dcos, dcos_data) = floats(&device, &angle_dims, &vec![0.0; c.len()]);
        let (dsin, dsin_data) = floats(&device, &angle_dims, &vec![0.0; s.len()]);
        // SAFETY: live descriptors and valid out parameters.
        let first: First<'_> = Box::new(|bytes, executor| unsafe {
            aclnnRotaryPositionEmbeddingGradGetWorkspaceSize(
                dy, cos, sin, input, mode, dx, dcos, dsin, bytes, executor,
            )
        });
        run(&device, first, aclnnRotaryPositionEmbeddingGrad).expect("runs");
        let value = dot(&forward(&x, &c, &s), &g);
        let by_x = dot(&device.download(dx_data, x.len()), &x);
        let by_angles = dot(&device.download(dcos_data, c.len()), &c)
            + dot(&device.download(dsin_data, s.len()), &s);
        // The result is linear in x, and linear in (cos, sin): both inner products give it back.
        assert!(
            (value - by_x).abs() < 1e-5 && (value - by_angles).abs() < 1e-5,
            "mode {mode}: {value} {by_x} {by_angles}"
        );
    }
}

#[test]
fn the_gradient_without_x_wants_outputs_for_the_angles_and_leaves_them() {
    let device = Device::new();
    let (dims, angle_dims) = ([2, 3, 2, 64], [1, 3, 1, 64]);
    let (dy, _) = floats(&device, &dims, &[1.0; 768]);
    let (angles, _) = floats(&device, &angle_dims, &[0.5; 192]);
    let (dx, dx_data) = floats(&device, &dims, &[0.0; 768]);
    let (dcos, dcos_data) = floats(&device, &angle_dims, &[7.0; 192]);
    let (dsin, dsin_data) = floats(&device, &angle_dims, &[7.0; 192]);
    let gradient = |dcos: *mut aclTensor, dsin: *mut aclTensor| {
        // SAFETY: live descriptors and valid out parameters.
        let first: First<'_> = Box::new(move |bytes, executor| unsafe {
            aclnnRotaryPositionEmbeddingGradGetWorkspaceSize(
                dy,
                angles,
                angles,
                null(),
                0,
                dx,
                dcos,
                dsin,
                bytes,
                executor,
            )
        });
        run(&device, first, aclnnRotaryPositionEmbeddingGrad)
    };
    for (name, outcome) in [
        ("dcosOut", gradient(null_mut(), dsin)),
        ("dsinOut", gradient(dcos, null_mut())),
    ] {
        let (code, message) = outcome.expect_err("null");
        assert_eq!(code, NULL_POINTER);
        assert!(message.contains(&format!("{name} is null")), "{message}");
    }
    gradient(dcos, dsin).expect("runs");
    assert_eq!(device.download::<f32>(dx_data, 768)[0], 1.0);
    for data in [dcos_data, dsin_data] {
        assert_eq!(device.download::<f32>(data, 192), [7.0; 192]);
    }
}

#[test]
fn layouts_of_later_releases_are_refused() {
    let refused = |device: &Device, dims: &[i64], angle_dims: &[i64], layout: i64, says: &str| {
        let count = |dims: &[i64]| dims.iter().product::<i64>() as usize;
        let (x, _) = floats(device, dims, &vec![0.0; count(dims)]);
        let (angles, _) = floats(device, angle_dims, &vec![0.0; count(angle_dims)]);
        // SAFETY: live descriptors and valid out parameters.
        let first: First<'_> = Box::new(|bytes, executor| unsafe {
            aclnnApplyRotaryPosEmbGetWorkspaceSize(x, x, angles, angles, layout, bytes, executor)
        });
        let (code, message) = run(device, first, aclnnApplyRotaryPosEmb).expect_err("refused");
        assert_eq!(code, PARAM_INVALID);
        assert!(message.contains(says), "{message}");
    };
    let device = Device::new();
    let (bnsd, bnsd_angles) = ([1, 2, 3, 64], [1, 1, 3, 64]);
    refused(
        &device,
        &[3, 2, 64],
        &[3, 1, 64],
        4,
        "layout 4 does not exist",
    );
    refused(&device, &[3, 2, 64], &[3, 1, 64], 1, "layout 1 has 4 axes");
    refused(&device, &bnsd, &bnsd_angles, 3, "needs an Ascend 950");
}

/// Runs npu_mrope's operator on f32 data with an identity-like table.
fn mrope(
    device: &Device,
    sections: &[i64],
    cache_mode: i64,
    positions: &[i64],
    strided: bool,
) -> Result<Vec<f32>, (i32, String)> {
    let lanes: usize = 64;
    let (width, tokens, rows) = (2 * lanes, 2_usize, 64_usize);
    // Row p of the table turns lane j by p radians: cos p and sin p.
    let table: Vec<f32> = (0..rows)
        .flat_map(|p| {
            (0..width).map(move |i| {
                if i < lanes {
                    (p as f32).cos()
                } else {
                    (p as f32).sin()
                }
            })
        })
        .collect();
    let x: Vec<f32> = (0..tokens * width)
        .map(|i| if i % width < lanes { 1.0 } else { 0.0 })
        .collect();
    let data = device.upload(positions);
    let dims = [sections.len() as i64, tokens as i64];
    let strides = if strided {
        Some([1, sections.len() as i64])
    } else {
        None
    };
    let positions = tensor(
        &dims,
        strides.as_ref().map(<[i64; 2]>::as_slice),
        INT64,
        positions.len() as i64,
        data,
    );
    let flat = [tokens as i64, width as i64];
    let ((query, _), (key, _)) = (floats(device, &flat, &x), floats(device, &flat, &x));
    let ((query_out, out), (key_out, _)) = (floats(device, &flat, &x), floats(device, &flat, &x));
    let (cache, _) = floats(device, &[rows as i64, width as i64], &table);
    // SAFETY: a list of the given length.
    let sections = unsafe { aclCreateIntArray(sections.as_ptr(), sections.len() as u64) };
    // SAFETY: live descriptors and valid out parameters.
    let first: First<'_> = Box::new(|bytes, executor| unsafe {
        aclnnRopeWithSinCosCacheV2GetWorkspaceSize(
            positions,
            query,
            key,
            cache,
            sections,
            width as i64,
            true,
            cache_mode,
            query_out,
            key_out,
            bytes,
            executor,
        )
    });
    run(device, first, aclnnRopeWithSinCosCacheV2)?;
    Ok(device.download(out, tokens * width))
}

#[test]
fn the_cached_operator_takes_each_lane_from_its_axis() {
    let device = Device::new();
    // Positions 10, 20, 30 on the axes of the first token.
    let positions = [10, 0, 20, 0, 30, 0];
    let axis_of = |y: &[f32], lane: usize| {
        [10.0_f32, 20.0, 30.0]
            .iter()
            .position(|p| (y[lane] - p.cos()).abs() < 1e-6 && (y[64 + lane] - p.sin()).abs() < 1e-6)
    };
    let contiguous = mrope(&device, &[16, 24, 24], 0, &positions, false).expect("runs");
    let striped = mrope(&device, &[24, 20, 20], 1, &positions, false).expect("runs");
    for lane in 0..64 {
        assert_eq!(
            axis_of(&contiguous, lane),
            Some(if lane < 16 {
                0
            } else if lane < 40 {
                1
            } else {
                2
            })
        );
        // Qwen3-VL: every third lane is height or width, until their 20 are used up.
        let expected = if lane < 60 { lane % 3 } else { 0 };
        assert_eq!(axis_of(&striped, lane), Some(expected), "lane {lane}");
    }
}

#[test]
fn what_the_cached_operator_gets_wrong_is_reported() {
    let device = Device::new();
    // The same positions laid out token by token, with strides that say so.
    let wrong = mrope(&device, &[16, 24, 24], 0, &[10, 20, 30, 0, 0, 0], true).expect("runs");
    assert!(
        (wrong[0] - 10.0_f32.cos()).abs() < 1e-6 && (wrong[16] - 30.0_f32.cos()).abs() < 1e-6,
        "strides are ignored"
    );
    let found = control::take_violations();
    assert_eq!(found.len(), 1);
    assert!(found[0].message.contains("not contiguous"));

    let (code, message) = mrope(&device, &[16, 24, 24], 0, &[10, 64, 20, 0, 30, 0], false)
        .expect_err("outside the table");
    assert_eq!(code, 507035);
    assert!(message.contains("position 64 is outside the cosSinCache of 64 rows"));
}

#[test]
fn documented_limits_are_enforced() {
    let device = Device::new();
    let refusal = |sections: &[i64], mode| {
        let (code, message) = mrope(
            &device,
            sections,
            mode,
            &[0; 8][..2 * sections.len()],
            false,
        )
        .expect_err("refused");
        assert_eq!(code, PARAM_INVALID);
        message
    };
    assert!(refusal(&[11, 11, 10], 0).contains("[11, 11, 10] is not supported"));
    assert!(refusal(&[16, 16, 16, 16], 1).contains("cacheMode 0"));
    assert!(refusal(&[8, 12, 12], 0).contains("sum to rotaryDim/2"));

    let forward = |dims: &[i64], angle_dims: &[i64], mode: i64| {
        let count = |dims: &[i64]| dims.iter().product::<i64>();
        let data = device.alloc(4 * count(dims) as usize);
        let (x, out) = (
            tensor(dims, None, BF16, count(dims), data),
            tensor(dims, None, BF16, count(dims), data),
        );
        let angles = tensor(angle_dims, None, BF16, count(angle_dims), data);
        let (mut bytes, mut executor) = (0, null_mut());
        // SAFETY: live descriptors and valid out parameters.
        let code = unsafe {
            aclnnRotaryPositionEmbeddingGetWorkspaceSize(
                x,
                angles,
                angles,
                mode,
                out,
                &raw mut bytes,
                &raw mut executor,
            )
        };
        (code, recent_message())
    };
    let refused = |dims: &[i64], angle_dims: &[i64], mode: i64, says: &str| {
        let (code, message) = forward(dims, angle_dims, mode);
        assert!(
            code == PARAM_INVALID && message.contains(says),
            "{code} {message}"
        );
    };
    assert_eq!(
        forward(&[2, 4, 8, 64], &[2, 1, 8, 64], 0).0,
        0,
        "half takes B1SD"
    );
    refused(&[2, 4, 8, 64], &[2, 1, 8, 64], 1, "do not fit");
    refused(&[1, 4, 8, 896], &[1, 1, 8, 896], 0, "below 896");
    refused(&[1, 4, 8, 63], &[1, 1, 8, 63], 0, "multiple of 2");
    refused(&[1, 4, 8, 64], &[1, 1, 8, 64], 3, "needs an Ascend 950");
    refused(&[1, 4, 8, 64], &[1, 1, 8, 64], 4, "mode 4 does not exist");
    refused(&[1, 4, 8, 64], &[1, 1, 8, 32], 0, "cos has width 32");
    refused(&[1, 1000, 1, 64], &[1, 1, 1, 64], 1, "below 1000");
    refused(&[3, 2, 64], &[3, 1, 64], 0, "3 dimensions, 4 are expected");

    let backward = |dims: &[i64], angle_dims: &[i64]| {
        let count = |dims: &[i64]| dims.iter().product::<i64>();
        let data = device.alloc(4 * count(dims) as usize);
        let x = tensor(dims, None, BF16, count(dims), data);
        let angles = tensor(angle_dims, None, BF16, count(angle_dims), data);
        let (mut bytes, mut executor) = (0, null_mut());
        // SAFETY: live descriptors and valid out parameters.
        let code = unsafe {
            aclnnRotaryPositionEmbeddingGradGetWorkspaceSize(
                x,
                angles,
                angles,
                null(),
                0,
                x,
                angles,
                angles,
                &raw mut bytes,
                &raw mut executor,
            )
        };
        (code, recent_message())
    };
    assert_eq!(backward(&[2, 4, 3, 64], &[2, 1, 3, 64]).0, 0);
    let (code, message) = backward(&[3, 4, 3, 64], &[3, 1, 3, 64]);
    assert!(
        code == PARAM_INVALID && message.contains("batch 3 must be below the sequence 3"),
        "{code} {message}"
    );
}

#[test]
fn both_phases_check_what_they_get() {
    let device = Device::new();
    let (x, data) = floats(&device, &[1, 1, 1, 64], &[0.0; 64]);
    let (mut bytes, mut executor) = (0, null_mut());
    // SAFETY: live descriptors and valid out parameters; wrong ones are errors.
    unsafe {
        assert_eq!(
            aclnnInterleaveRopeGetWorkspaceSize(x, null(), x, x, &raw mut bytes, &raw mut executor),
            NULL_POINTER
        );
        assert!(recent_message().contains("cos is null"));
        // The second phase uses the executor up, also when it refuses.
        let mut plan = || {
            let code =
                aclnnInterleaveRopeGetWorkspaceSize(x, x, x, x, &raw mut bytes, &raw mut executor);
            assert_eq!(code, 0);
            (bytes, executor)
        };
        let (bytes, planned) = plan();
        assert_eq!(
            aclnnInterleaveRope(null_mut(), bytes, planned, device.stream),
            NULL_POINTER
        );
        assert_eq!(
            aclnnInterleaveRope(data as *mut c_void, bytes, planned, device.stream),
            107017
        );
        let (bytes, planned) = plan();
        assert_eq!(
            aclnnInterleaveRope(data as *mut c_void, bytes - 1, planned, device.stream),
            PARAM_INVALID
        );
        let (bytes, planned) = plan();
        assert_eq!(
            aclnnRotaryPositionEmbedding(data as *mut c_void, bytes, planned, device.stream),
            PARAM_INVALID
        );
        assert!(recent_message().contains("planned by aclnnInterleaveRope"));
        assert_eq!(aclDestroyAclOpExecutor(planned), 0);
        assert_eq!(aclDestroyTensor(x), 0);
        assert_eq!(aclDestroyTensor(x), 107017);
        assert!(
            aclCreateTensor(
                [4_i64, 4].as_ptr(),
                2,
                FLOAT,
                [4_i64, 1].as_ptr(),
                2,
                0,
                [16_i64].as_ptr(),
                1,
                data as *mut c_void
            )
            .is_null()
        );
        assert!(recent_message().contains("offset comes before format"));
        assert!(
            aclCreateTensor(
                [4_i64, 4].as_ptr(),
                2,
                FLOAT,
                [4_i64, 1].as_ptr(),
                1,
                2,
                [16_i64].as_ptr(),
                1,
                data as *mut c_void
            )
            .is_null()
        );
        assert!(recent_message().contains("reaches element 16"));
        let _ = aclrtSynchronizeStream(device.stream);
    }
}

#[test]
fn the_inference_operators_rotate_as_the_general_one() {
    // Ascend 950: only there ApplyRotaryPosEmb takes BNSD.
    let device = Device::on(Machine::ascend_950());
    let (batch, seq, heads, width) = (2, 3, 4, 64);
    let (x, c, s) = (
        numbers(batch * heads * seq * width, 7),
        numbers(batch * seq * width, 8),
        numbers(batch * seq * width, 9),
    );
    let dims = [batch as i64, heads as i64, seq as i64, width as i64];
    let angle_dims = [batch as i64, 1, seq as i64, width as i64];
    let ((query, query_data), (key, key_data)) =
        (floats(&device, &dims, &x), floats(&device, &dims, &x));
    let ((input, _), (out, out_data)) = (floats(&device, &dims, &x), floats(&device, &dims, &x));
    let ((cos, _), (sin, _)) = (
        floats(&device, &angle_dims, &c),
        floats(&device, &angle_dims, &s),
    );
    // SAFETY: live descriptors and valid out parameters.
    unsafe {
        run(
            &device,
            Box::new(|b, e| {
                aclnnRotaryPositionEmbeddingGetWorkspaceSize(input, cos, sin, 0, out, b, e)
            }),
            aclnnRotaryPositionEmbedding,
        )
        .expect("runs");
        run(
            &device,
            Box::new(|b, e| aclnnApplyRotaryPosEmbGetWorkspaceSize(query, key, cos, sin, 3, b, e)),
            aclnnApplyRotaryPosEmb,
        )
        .expect("runs");
    }
    let expected: Vec<f32> = device.download(out_data, x.len());
    assert_eq!(device.download::<f32>(query_data, x.len()), expected);
    assert_eq!(device.download::<f32>(key_data, x.len()), expected);
    // InterleaveRope: the same rotation of the de-interleaved channels.
    let parted: Vec<f32> = x
        .chunks(width)
        .flat_map(|row| row.iter().step_by(2).chain(row.iter().skip(1).step_by(2)))
        .copied()
        .collect();
    let ((parted, _), (left, left_data), (right, right_data)) = (
        floats(&device, &dims, &parted),
        floats(&device, &dims, &x),
        floats(&device, &dims, &x),
    );
    // SAFETY: live descriptors and valid out parameters.
    unsafe {
        run(
            &device,
            Box::new(|b, e| {
                aclnnRotaryPositionEmbeddingGetWorkspaceSize(parted, cos, sin, 0, left, b, e)
            }),
            aclnnRotaryPositionEmbedding,
        )
        .expect("runs");
        run(
            &device,
            Box::new(|b, e| aclnnInterleaveRopeGetWorkspaceSize(input, cos, sin, right, b, e)),
            aclnnInterleaveRope,
        )
        .expect("runs");
    }
    assert_eq!(
        device.download::<f32>(left_data, x.len()),
        device.download::<f32>(right_data, x.len())
    );
}
