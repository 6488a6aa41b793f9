//! A device that fails during a backward. Alone in its process, since it makes calls of the simulator fail.

use ascend_sim::control;
use burn::tensor::{Device, Distribution, Tensor};
use rope_ascend::AscendError;
use rope_ascend::rope::Npu;
use rope_burn::ascend::AscendRotary;
use rope_burn::{Rotary, RotaryError};
use rope_core::{Layout, Positions, RotarySpec};

#[test]
fn the_gradients_are_nan_and_the_error_comes_out_once() {
    let npu = Npu::simulated().expect("the simulator starts");
    if let Err(AscendError::NoKernels { reason, .. }) = npu.kernels() {
        assert!(reason.contains("no C++17 compiler"), "{reason}");
        eprintln!("skipped: {reason}");
        return;
    }
    let spec = RotarySpec::builder(32)
        .build()
        .expect("a valid specification");
    let rotary = AscendRotary::try_new(Rotary::new(spec, Layout::Bsnd), &npu).expect("ready");
    let positions = Positions::text(1, 0, 3).expect("valid positions");
    let angles = rotary.try_angles(&positions).expect("angles are uploaded");
    let device = Device::flex().autodiff();
    let x = Tensor::<4>::random([1, 3, 2, 32], Distribution::Default, &device).require_grad();

    let forward = || rotary.try_forward_single(x.clone(), &angles);
    control::inject_fault("aclrtLaunchKernelWithHostArgs", 1, 507_000);
    let refused = forward();
    assert!(
        matches!(
            refused,
            Err(RotaryError::Ascend(AscendError::Launch { .. }))
        ),
        "{refused:?}"
    );

    let y = forward().expect("the next one runs");
    control::inject_fault("aclrtLaunchKernelWithHostArgs", 1, 507_000);
    let gradients = y.sum().backward();
    let dx: Vec<f32> = x
        .grad(&gradients)
        .expect("a gradient")
        .into_data()
        .iter()
        .collect();
    assert!(dx.len() == 3 * 2 * 32 && dx.iter().all(|dx| dx.is_nan()));
    // Out of whichever comes first; then it is told.
    let told = forward();
    assert!(
        matches!(told, Err(RotaryError::Ascend(AscendError::Launch { .. }))),
        "{told:?}"
    );
    rotary.backward_result().expect("told once");
    forward().expect("the device goes on");
}
