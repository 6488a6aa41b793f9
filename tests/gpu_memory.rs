//! The GPU memory that forward and backward of the rotation keep and take, measured by the pools of
//! the runtime: fused, and composed to show that the measurement could fail. A refused rotation
//! launches nothing.
//!
//! The checks run one after another in a separate program: the runtime counts the whole process.

mod device;

use std::pin::pin;
use std::sync::Mutex;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use burn::tensor::{Device, Distribution, ProfileOptions, Tensor, TimingMethod};
use device::device;
use rope_burn::rope_core::{Layout, Positions, RotarySpec};
use rope_burn::{Implementation, Rotary, RotaryAngles};

/// Held by the test that runs.
static ALONE: Mutex<()> = Mutex::new(());

const SEQ: usize = 4096;
const HEADS: usize = 8;
const HEAD_DIM: usize = 64;
/// Bytes of q; k is as large.
const Q_BYTES: i64 = (SEQ * HEADS * HEAD_DIM * 4) as i64;
const LAYERS: usize = 9;

/// Bytes in use and bytes that the pools hold.
fn pools(device: &Device) -> [i64; 2] {
    device.sync().expect("the device works");
    let usage = device.memory_pool_usage().expect("CubeCL counts its pools");
    [usage.bytes_in_use, usage.bytes_reserved].map(|bytes| bytes as i64)
}

/// The bytes kept after the forward of all layers, and the growth of the pools in forward and in
/// backward.
fn run(rotary: &Rotary, angles: &RotaryAngles, device: &Device) -> [i64; 3] {
    let random = || {
        let dims = [1, SEQ, HEADS, HEAD_DIM];
        Tensor::<4>::random(dims, Distribution::Default, device).require_grad()
    };
    let (q, k) = (random(), random());
    // A product in front, so that the first rotation's input is uniquely held and not a leaf.
    let (mut q_out, mut k_out) = (q.clone() * 2.0, k.clone() * 2.0);
    device.sync().expect("the device works");
    device.memory_cleanup();
    let before = pools(device);
    for _ in 0..LAYERS {
        (q_out, k_out) = rotary.forward(q_out, k_out, angles);
    }
    let forward = pools(device);
    let gradients = (q_out + k_out).backward();
    let backward = pools(device);
    assert!(q.grad(&gradients).is_some() && k.grad(&gradients).is_some());
    [
        forward[0] - before[0],
        forward[1] - before[1],
        backward[1] - forward[1],
    ]
}

#[test]
fn a_layer_keeps_no_tensor_and_makes_no_temporary() {
    let _alone = ALONE.lock().expect("the other test has passed");
    let device = device().autodiff();
    let spec = RotarySpec::builder(HEAD_DIM).build().expect("valid");
    let fused = Rotary::new(spec, Layout::Bsnd);
    let composed = fused.clone().with_implementation(Implementation::Composed);
    let positions = Positions::text(1, 0, SEQ).expect("small positions");
    let angles = fused.angles(&positions, &device);
    run(&fused, &angles, &device); // buffers of kernels are made on first use
    let [kept, forward, backward] = run(&fused, &angles, &device);
    println!("fused: {kept} bytes kept, the pools grow by {forward} and {backward}");
    // The nodes' own buffers, which the pools round up.
    assert!(kept < 1 << 12, "the fused graph keeps {kept} bytes");
    assert!(
        forward < Q_BYTES / 8 && backward < Q_BYTES / 8,
        "temporaries: the pools grow by {forward} bytes forward and {backward} backward"
    );

    // The same measurement must see the tensors of others, or it could not fail.
    let [_, forward, backward] = run(&composed, &angles, &device);
    println!("composed: the pools grow by {forward} and {backward}");
    // The backward takes the memory that is left free after the forward.
    assert!(forward >= Q_BYTES && forward + backward >= 3 * Q_BYTES);
    let [kept, ..] = run(&fused, &angles.require_grad(), &device);
    println!("learned angles: {kept} bytes kept");
    assert!(kept >= LAYERS as i64 * Q_BYTES);
}

/// The result of `work`, and the time that the GPU was busy with it; zero if nothing was launched.
fn timed<R: Send + 'static>(device: &Device, work: impl FnOnce() -> R + Send) -> (R, Duration) {
    device.sync().expect("the device works");
    let flushed = ProfileOptions::default().flush();
    let (result, profile) = device.profile_with(flushed, work).expect("it can be timed");
    assert_eq!(
        profile.timing_method(),
        TimingMethod::Device,
        "the host's clock never stands still"
    );
    let mut resolved = pin!(profile.resolve());
    loop {
        let polled = resolved
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()));
        if let Poll::Ready(ticks) = polled {
            return (
                result,
                ticks.map_or(Duration::ZERO, |ticks| ticks.duration()),
            );
        }
        std::thread::yield_now();
    }
}

#[test]
fn a_refused_rotation_launches_nothing() {
    let _alone = ALONE.lock().expect("the other test has passed");
    let device = device();
    let spec = RotarySpec::builder(HEAD_DIM).build().expect("valid");
    let rotary = Rotary::new(spec, Layout::Bsnd);
    let angles = |tokens| {
        let positions = Positions::text(1, 0, tokens).expect("small positions");
        rotary.angles(&positions, &device)
    };
    let (fitting, short) = (angles(SEQ), angles(SEQ - 1));
    let ones = |head_dim| Tensor::<4>::ones([1, SEQ, HEADS, head_dim], &device);
    let (x, wide) = (ones(HEAD_DIM), ones(2 * HEAD_DIM));
    for (q, k, angles) in [
        (&x, &x, &short),
        (&wide, &x, &fitting),
        (&x, &wide, &fitting),
    ] {
        let (q, k) = (q.clone(), k.clone());
        let (result, busy) = timed(&device, || rotary.try_forward(q, k, angles));
        assert!(result.is_err());
        assert_eq!(busy, Duration::ZERO, "{:?}", result.err());
    }
    // The same measurement must see a launch, or it could not fail.
    let (result, busy) = timed(&device, || rotary.try_forward(x.clone(), x, &fitting));
    assert!(result.is_ok() && busy > Duration::ZERO, "{busy:?}");
}
