//! Every method of a burn backend, against Flex: see `support`.
#![allow(clippy::disallowed_methods, reason = "test code")]

mod support;

use burn::backend::flex::{Flex, FlexDevice};
use burn::backend::{BoolStore, DType};
use support::cases::{activation, boolean, float, int, module, quantized, transaction};
use support::groups::every_group;
use support::{devices, gradients, handles, random, suite};

/// A test for each group of cases.
macro_rules! tests {
    ([$backend:ty, $device:expr, $after:expr] $($test:ident: $dtype:expr, $group:path;)*) => {$(
        #[test]
        fn $test() {
            suite::run::<$backend>(&$device, $dtype, $group, $group);
            $after;
        }
    )*};
}

/// The suite for each backend of a list: its type, a device, and what to check after each test.
macro_rules! backends {
    ($($name:ident: $backend:ty = $device:expr, then $after:expr;)*) => {$(
        mod $name {
            use super::*;

            every_group! { tests, $backend, $device, $after }

            #[test]
            fn the_backend_itself() {
                use burn::backend::{Backend, DeviceOps};
                type B = $backend;
                let device = $device;
                assert!(!B::name(&device).is_empty());
                assert!(B::device_count(device.id().type_id) > 0);
                assert!(!B::ad_enabled(&device));
                B::sync(&device).expect("synchronises");
                B::flush(&device).expect("flushes");
                B::memory_cleanup(&device);
                let types = [
                    DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::I16, DType::I8, DType::U8,
                    DType::Bool(BoolStore::Native), DType::Bool(BoolStore::U8),
                ];
                for dtype in types {
                    assert!(B::supports_dtype(&device, dtype), "{dtype:?}");
                }
            }

            #[test]
            fn random_tensors() {
                random::distributions::<$backend>(&$device);
                $after;
            }

            #[test]
            fn later_draws_do_not_overlap() {
                random::later_draws_do_not_overlap::<$backend>(&$device);
                $after;
            }

            #[test]
            fn the_sign_of_a_divisor_of_0() {
                use burn::backend::{TensorData, ops::FloatTensorOps};
                type B = $backend;
                for zero in [0.0_f32, -0.0] {
                    let x = B::float_from_data(TensorData::from([1.0_f32]), &$device);
                    let y = B::float_into_data(B::float_div_scalar(x, zero.into()));
                    let y = burn::tensor::try_read_sync(y).expect("no waiting").expect("a read");
                    assert_eq!(y.iter::<f32>().collect::<Vec<_>>(), [1.0 / zero]);
                }
                $after;
            }

            #[test]
            fn shared_handles() {
                handles::programs::<$backend>(&$device);
                $after;
            }

            #[test]
            fn gradients_f32() {
                gradients::against_flex::<$backend>(&$device, DType::F32);
                $after;
            }

            #[test]
            fn gradients_f16() {
                gradients::against_flex::<$backend>(&$device, DType::F16);
                $after;
            }

            #[test]
            fn gradients_bf16() {
                gradients::against_flex::<$backend>(&$device, DType::BF16);
                $after;
            }

            #[test]
            fn no_gradient_of_its_own_for_ctc() {
                use burn::backend::ops::ModuleOps;
                assert!(!<$backend>::has_ctc_loss_backward(), "write cases for ctc_loss_backward");
            }
        }
    )*};
}

backends! {
    flex: Flex = FlexDevice, then suite::nothing_further();
    ascend: burn_ascend::Ascend = devices::simulated(0), then devices::no_violations();
}
