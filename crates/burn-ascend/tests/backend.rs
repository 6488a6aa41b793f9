//! Every method of a burn backend, against Flex: see `support`.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use burn::backend::flex::{Flex, FlexDevice};
use burn::backend::{BoolStore, DType};

use support::cases::{activation, boolean, float, int, module, quantized, transaction};
use support::{gradients, handles, random, suite};

/// Tests that run a group of cases for one element type.
macro_rules! groups {
    ($backend:ty, $device:expr; $($test:ident: $dtype:expr, $($group:path),+;)*) => {$(
        #[test]
        fn $test() {
            $(groups!(@run $backend, $device, $dtype, $group);)+
        }
    )*};
    (@run $backend:ty, $device:expr, $dtype:expr, $group:path) => {
        suite::run::<$backend>(&$device, $dtype, $group, $group)
    };
}

/// The suite for each backend of a list.
macro_rules! backends {
    ($($(#[$attribute:meta])* $name:ident: $backend:ty = $device:expr;)*) => {$(
        $(#[$attribute])*
        mod $name {
            use super::*;

            groups! { $backend, $device;
                float_creation_f32: DType::F32, float::creation;
                float_creation_f16: DType::F16, float::creation;
                float_creation_bf16: DType::BF16, float::creation;
                float_creation_f64: DType::F64, float::creation;
                float_elementwise_f32: DType::F32, float::elementwise;
                float_elementwise_f16: DType::F16, float::elementwise;
                float_elementwise_bf16: DType::BF16, float::elementwise;
                float_elementwise_f64: DType::F64, float::elementwise;
                float_reductions_f32: DType::F32, float::reductions;
                float_reductions_f16: DType::F16, float::reductions;
                float_reductions_bf16: DType::BF16, float::reductions;
                float_products_f32: DType::F32, float::products;
                float_products_f16: DType::F16, float::products;
                float_products_bf16: DType::BF16, float::products;
                float_movement_f32: DType::F32, float::movement;
                float_movement_f16: DType::F16, float::movement;
                float_movement_bf16: DType::BF16, float::movement;
                int_i64: DType::I64, int::every_width;
                int_i32: DType::I32, int::every_width;
                int_i16: DType::I16, int::every_width;
                int_i8: DType::I8, int::every_width;
                int_u64: DType::U64, int::every_width;
                int_u32: DType::U32, int::every_width;
                int_u16: DType::U16, int::every_width;
                int_u8: DType::U8, int::every_width;
                int_elementwise_i64: DType::I64, int::elementwise;
                int_elementwise_i32: DType::I32, int::elementwise;
                int_reductions_i64: DType::I64, int::reductions;
                int_reductions_i32: DType::I32, int::reductions;
                int_movement_i64: DType::I64, int::movement;
                int_movement_i32: DType::I32, int::movement;
                bool_native: DType::Bool(BoolStore::Native), boolean::all;
                bool_u8: DType::Bool(BoolStore::U8), boolean::all;
                activation_f32: DType::F32, activation::all;
                activation_f16: DType::F16, activation::all;
                activation_bf16: DType::BF16, activation::all;
                module_layers_f32: DType::F32, module::layers;
                module_layers_f16: DType::F16, module::layers;
                module_layers_bf16: DType::BF16, module::layers;
                module_sequences_f32: DType::F32, module::sequences;
                module_sequences_f16: DType::F16, module::sequences;
                module_sequences_bf16: DType::BF16, module::sequences;
                module_convolutions_f32: DType::F32, module::convolutions;
                module_convolutions_f16: DType::F16, module::convolutions;
                module_convolutions_bf16: DType::BF16, module::convolutions;
                module_pooling_f32: DType::F32, module::pooling;
                module_pooling_f16: DType::F16, module::pooling;
                module_pooling_bf16: DType::BF16, module::pooling;
                quantized_f32: DType::F32, quantized::all;
                transaction_f32: DType::F32, transaction::all;
            }

            #[test]
            fn the_backend_itself() {
                use burn::backend::Backend;
                type B = $backend;
                let device = $device;
                assert!(!B::name(&device).is_empty());
                assert!(B::device_count(0) > 0);
                assert!(!B::ad_enabled(&device));
                B::seed(&device, 1);
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
            }

            #[test]
            fn shared_handles() {
                handles::programs::<$backend>(&$device);
            }

            #[test]
            fn gradients_f32() {
                gradients::against_flex::<$backend>(&$device, DType::F32);
            }

            #[test]
            fn gradients_f16() {
                gradients::against_flex::<$backend>(&$device, DType::F16);
            }

            #[test]
            fn gradients_bf16() {
                gradients::against_flex::<$backend>(&$device, DType::BF16);
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
    flex: Flex = FlexDevice;
    #[cfg(feature = "ascend-sim")]
    ascend: burn_ascend::Ascend = burn_ascend::AscendDevice::simulated(0);
}
