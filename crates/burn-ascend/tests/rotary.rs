//! The rotation on the simulated device against the host's kernels: values, gradients of the
//! angles, and the operations of the device.

use std::sync::{Mutex, MutexGuard};

use ascend_sim::control;
use burn::backend::flex::{Flex, FlexDevice};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Shape, Slice, TensorData};
use burn::tensor::{Device, FloatDType};
use burn_ascend::{Ascend, AscendDevice, AscendTensor, fallbacks, reset_fallbacks};
use rope_burn::rope_core::{AxisLayout, Direction, Geometry, Layout, Pairing};
use rope_burn::rope_core::{Positions, RotarySpec};
use rope_burn::{Rotary, RotaryOp, RotaryOps};

const BATCH: usize = 2;
const SEQ: usize = 5;
const HEADS: [usize; 2] = [4, 2];

/// The simulator, for one test at a time: launches and memory are counted. A test fails if there
/// are violations when it ends.
struct Held(#[expect(dead_code, reason = "held, not read")] MutexGuard<'static, ()>);

impl Drop for Held {
    fn drop(&mut self) {
        let violations = control::take_violations();
        if !std::thread::panicking() {
            assert!(violations.is_empty(), "{violations:#?}");
        }
    }
}

/// The device with its kernels, which need the host's C++17 compiler.
fn device() -> (Held, AscendDevice) {
    static ONE: Mutex<()> = Mutex::new(());
    let held = ONE.lock().unwrap_or_else(|broken| broken.into_inner());
    let device = AscendDevice::simulated(0);
    let npu = rope_ascend::rope::Npu::simulated().expect("the simulator starts");
    npu.kernels().unwrap_or_else(|error| panic!("{error}"));
    (Held(held), device)
}

fn wave(shape: &[usize], phase: f32) -> TensorData {
    let count = shape.iter().product::<usize>();
    let values: Vec<f32> = (0..count).map(|i| (0.7 * i as f32 + phase).sin()).collect();
    TensorData::new(values, shape.to_vec())
}

fn dims(layout: Layout, heads: usize, head_dim: usize) -> Vec<usize> {
    match layout {
        Layout::Bsnd => vec![BATCH, SEQ, heads, head_dim],
        Layout::Bnsd => vec![BATCH, heads, SEQ, head_dim],
        Layout::Sbnd => vec![SEQ, BATCH, heads, head_dim],
        Layout::Tnd => vec![SEQ, heads, head_dim],
    }
}

/// A case that any backend can run.
struct Case {
    op: RotaryOp,
    dtype: FloatDType,
    /// Rows of angles: of one sample, or of all.
    rows: usize,
    /// True if the rows of angles are a view, with other columns between them.
    view: bool,
}

impl Case {
    fn tensors<B: RotaryOps>(&self, device: &B::Device) -> [FloatTensor<B>; 3] {
        let head_dim = self.op.geometry.head_dim();
        let place = |data| B::float_from_data(data, device);
        let [q, k] = HEADS.map(|heads| {
            let x = place(wave(&dims(self.op.layout, heads, head_dim), heads as f32));
            B::float_cast(x, self.dtype)
        });
        let width = 2 * self.op.geometry.lane_count();
        let angles = if self.view {
            let wide = place(wave(&[self.rows, width + 3], 0.2));
            let slices = [Slice::from(0..self.rows), Slice::from(3..width + 3)];
            B::float_slice(wide, &slices)
        } else {
            place(wave(&[self.rows, width], 0.2))
        };
        [q, k, angles]
    }

    fn run<B: RotaryOps>(&self, device: &B::Device) -> Vec<Vec<f32>> {
        let [q, k, angles] = self.tensors::<B>(device);
        let gradients = B::rotary_angle_gradients(q.clone(), q.clone(), angles.clone(), self.op);
        let single = B::rotary_single(q.clone(), angles.clone(), self.op);
        let (q, k) = B::rotary_pair(q, k, angles, self.op);
        [q, k, single, gradients].map(read::<B>).to_vec()
    }
}

fn read<B: RotaryOps>(x: FloatTensor<B>) -> Vec<f32> {
    let data = burn::tensor::try_read_sync(B::float_into_data(x)).expect("no waiting");
    data.expect("it was computed").iter::<f32>().collect()
}

fn assert_close(found: &[Vec<f32>], expected: &[Vec<f32>], dtype: FloatDType, case: &str) {
    // Products and sums round once on either side; sums of the angle gradients run over heads in
    // another order.
    let tolerance = match dtype {
        FloatDType::BF16 => 2e-2,
        FloatDType::F16 => 2e-3,
        _ => 2e-5,
    };
    for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(found.len(), expected.len(), "{case}: result {place}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(
                (found - expected).abs() <= tolerance * expected.abs().max(1.0),
                "{case}: result {place}: {found}, expected {expected}"
            );
        }
    }
}

fn geometry(pairing: Pairing, per_channel: bool) -> Geometry {
    Geometry::new(32, 16, 8, pairing, per_channel).expect("a valid geometry")
}

#[test]
fn every_rotation_is_that_of_the_host() {
    let (_held, device) = device();
    for pairing in Pairing::ALL {
        for layout in [Layout::Bsnd, Layout::Bnsd, Layout::Sbnd, Layout::Tnd] {
            for direction in [Direction::Forward, Direction::Adjoint] {
                for dtype in [FloatDType::F32, FloatDType::F16, FloatDType::BF16] {
                    let batch = if layout == Layout::Tnd { 1 } else { BATCH };
                    // The other axes of the list take turns, so that each value meets each of the
                    // above.
                    let turn = pairing as usize + layout as usize + dtype as usize;
                    let case = Case {
                        op: RotaryOp {
                            geometry: geometry(pairing, turn.is_multiple_of(2)),
                            layout,
                            direction,
                        },
                        dtype,
                        rows: if turn.is_multiple_of(3) {
                            SEQ
                        } else {
                            batch * SEQ
                        },
                        view: turn.is_multiple_of(2),
                    };
                    let (found, expected) =
                        (case.run::<Ascend>(&device), case.run::<Flex>(&FlexDevice));
                    let name = format!("{:?} {dtype:?} {} rows", case.op, case.rows);
                    assert_close(&found, &expected, dtype, &name);
                }
            }
        }
    }
}

fn plain(layout: Layout) -> Case {
    Case {
        op: RotaryOp {
            geometry: geometry(Pairing::Half, false),
            layout,
            direction: Direction::Forward,
        },
        dtype: FloatDType::F32,
        rows: SEQ,
        view: false,
    }
}

#[test]
fn one_launch_rotates_both_where_they_lie() {
    let (_held, device) = device();
    let case = plain(Layout::Bsnd);
    // Lane maps are made once.
    case.run::<Ascend>(&device);
    let [q, k, angles] = case.tensors::<Ascend>(&device);
    let address = |x: &AscendTensor| x.address().expect("it was computed");
    let (q_address, k_address) = (address(&q), address(&k));
    let before = device.memory().expect("open").live_bytes;
    reset_fallbacks();
    control::clear_launches();
    control::clear_calls();
    let (q, k) = Ascend::rotary_pair(q, k, angles, case.op);
    assert_eq!((address(&q), address(&k)), (q_address, k_address));
    let calls = control::calls();
    let waited = calls
        .iter()
        .filter(|call| call.function.contains("Synchronize"));
    assert_eq!(waited.count(), 0, "{calls:?}");
    // The angles were let go, and nothing came in their place.
    assert!(device.memory().expect("open").live_bytes < before);
    assert_eq!(fallbacks(), []);
    read::<Ascend>(q);
    assert_eq!(control::launches().len(), 1);
}

#[test]
fn a_tensor_that_is_still_held_stays_as_it_was() {
    let (_held, device) = device();
    let case = plain(Layout::Bnsd);
    let [q, k, angles] = case.tensors::<Ascend>(&device);
    let before = read::<Ascend>(q.clone());
    let held = q.clone();
    let (rotated, _) = Ascend::rotary_pair(q, k, angles, case.op);
    assert_eq!(read::<Ascend>(held), before);
    assert_ne!(read::<Ascend>(rotated), before);
}

#[test]
fn views_are_followed_and_repeated_elements_are_not_written() {
    let (_held, device) = device();
    // As attention makes them: split from [batch, seq, heads, dim], then exchanged.
    fn run<B: RotaryOps>(case: &Case, device: &B::Device) -> Vec<Vec<f32>> {
        let [q, _, angles] = case.tensors::<B>(device);
        let wide = B::float_from_data(wave(&[BATCH, SEQ, 7, 32], 0.0), device);
        let part = |from: usize, to: usize| {
            let all = |size| Slice::from(0..size);
            let slices = [all(BATCH), all(SEQ), Slice::from(from..to), all(32)];
            B::float_swap_dims(B::float_slice(wide.clone(), &slices), 1, 2)
        };
        let (q_out, k_out) = B::rotary_pair(part(1, 5), part(5, 7), angles.clone(), case.op);
        // As the gradient of a sum.
        let one = B::float_from_data(wave(&[1, 1, 1, 1], 1.0), device);
        let shape = Shape::from(dims(case.op.layout, HEADS[0], 32));
        let spread = B::float_expand(one, shape);
        let spread = B::rotary_single(spread, angles, case.op);
        [q_out, k_out, spread, q, wide].map(read::<B>).to_vec()
    }
    let case = plain(Layout::Bnsd);
    let (found, expected) = (
        run::<Ascend>(&case, &device),
        run::<Flex>(&case, &FlexDevice),
    );
    assert_close(&found, &expected, FloatDType::F32, "views");
}

#[test]
fn what_the_kernels_do_not_take_is_composed() {
    let (_held, device) = device();
    let case = Case {
        dtype: FloatDType::F64,
        ..plain(Layout::Bsnd)
    };
    fn run<B: RotaryOps>(case: &Case, device: &B::Device) -> Vec<Vec<f32>> {
        let [q, k, angles] = case.tensors::<B>(device);
        let angles = B::float_cast(angles, FloatDType::F64);
        let (q, k) = B::rotary_pair(q, k, angles, case.op);
        [q, k].map(read::<B>).to_vec()
    }
    let (found, expected) = (
        run::<Ascend>(&case, &device),
        run::<Flex>(&case, &FlexDevice),
    );
    assert_close(&found, &expected, FloatDType::F32, "f64");
    let empty = Ascend::float_zeros(Shape::from([0, SEQ, 2, 32]), &device, FloatDType::F32);
    let [_, _, angles] = plain(Layout::Bsnd).tensors::<Ascend>(&device);
    let empty = Ascend::rotary_single(empty, angles, plain(Layout::Bsnd).op);
    assert_eq!(empty.dims(), [0, SEQ, 2, 32]);
}

#[test]
fn a_wrong_type_or_a_failed_launch_is_the_error_of_what_is_read() {
    let (_held, device) = device();
    let case = plain(Layout::Bsnd);
    let error = |x: AscendTensor| format!("{:?}", x.read().expect_err("it failed"));
    let [q, k, angles] = case.tensors::<Ascend>(&device);
    let half = Ascend::float_cast(k, FloatDType::F16);
    let (mixed, _) = Ascend::rotary_pair(q, half, angles, case.op);
    assert_eq!(mixed.dims(), [BATCH, SEQ, HEADS[0], 32]);
    assert!(error(mixed).contains("k is F16, expected F32; cast it"));

    let [q, k, angles] = case.tensors::<Ascend>(&device);
    control::inject_fault("aclrtLaunchKernelWithArgsArray", 1, 507_000);
    let (q, k) = Ascend::rotary_pair(q, k, angles, case.op);
    for x in [q, k] {
        let error = error(x);
        assert!(error.contains("507000"), "{error}");
    }
    let [q, k, angles] = case.tensors::<Ascend>(&device);
    read::<Ascend>(Ascend::rotary_pair(q, k, angles, case.op).0);
}

#[test]
fn a_device_gathers_the_angles_itself_once_it_has_received_as_many_rows() {
    let (_held, npu) = device();
    let served = npu.device().expect("the simulator starts");
    let gathers = || {
        let runs = control::operator_runs();
        runs.get("aclnnIndexSelect").copied().unwrap_or(0)
    };
    reset_fallbacks();
    for layout in [
        AxisLayout::Contiguous(vec![4, 6, 6]),
        AxisLayout::PerAxis(vec![4, 6, 6]),
        AxisLayout::PerChannel(vec![4, 4, 8]),
    ] {
        let spec = RotarySpec::builder(32).axis_layout(layout.clone()).build();
        let rotary = Rotary::new(spec.expect("valid"), Layout::Bsnd);
        let ids: Vec<i64> = (0..3 * 60).map(|i| i * 37 % 59).collect();
        let positions = Positions::new(3, &ids).expect("in range");
        let expected = rotary
            .angles(&positions, &Device::flex())
            .rows()
            .into_data();
        for (step, device) in [&served, &served.clone().autodiff(), &served]
            .into_iter()
            .enumerate()
        {
            let before = gathers();
            let angles = rotary.angles(&positions, device);
            assert_eq!(angles.rows().is_autodiff(), device.is_autodiff());
            assert_eq!(
                angles.rows().into_data(),
                expected,
                "{layout:?}, step {step}"
            );
            // One for each axis, from the second step on.
            assert_eq!(gathers() - before, if step == 0 { 0 } else { 3 });
        }
    }
    assert_eq!(fallbacks(), []);
    npu.close().expect("nothing failed");
}
