//! The launches of a diagnosis on the simulated device. Its runtime belongs to the process.
#![cfg(feature = "ascend-sim")]
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

use ascend_sim::control;
use rope_ascend::diagnosis::{Diagnosis, Finding};
use rope_ascend::rope::Npu;

#[test]
fn a_kernel_of_each_family_is_launched_and_right() {
    let found = Diagnosis::of(&Npu::simulated().unwrap());
    let launches: Vec<(&str, &str)> = found
        .launches
        .iter()
        .map(|launch| match &launch.found {
            Finding::Ready(how) => (launch.family, how.as_str()),
            missing @ Finding::Missing { .. } => panic!("{}: {missing:?}", launch.family),
        })
        .collect();
    let array = |kernel: &str| {
        format!("{kernel} by aclrtLaunchKernelWithArgsArray, as on the CPU, guards intact")
    };
    let list = "rope_matrix_bf16 by aclrtLaunchKernelWithConfig, as on the CPU, guards intact";
    assert_eq!(
        launches,
        [
            ("rotation", &*array("rope_rotate_split_f32")),
            ("its adjoint", &array("rope_rotate_split_f32")),
            (
                "gradient of the angles",
                &array("rope_angle_grad_split_f32")
            ),
            ("norm with the rotation", &array("rope_norm_split_f32")),
            ("its backward", &array("rope_norm_grad_split_f32")),
            ("rotation by a matrix, on the cube cores", list),
        ]
    );
    assert!(found.is_complete(), "{found:#?}");
    let kernels: Vec<String> = control::launches()
        .into_iter()
        .map(|launch| launch.kernel)
        .collect();
    assert_eq!(
        kernels,
        [
            "rope_rotate_split_f32",
            "rope_rotate_split_f32",
            "rope_angle_grad_split_f32",
            "rope_norm_split_f32",
            "rope_norm_grad_split_f32",
            "rope_matrix_bf16",
        ]
    );
    assert_eq!(control::violations(), []);
}
