//! The groups of cases, and for which element types each runs.

/// Hands every group to the macro `then`, after its context in brackets.
macro_rules! every_group {
    ($then:ident, $($context:tt)*) => {
        $then! {
            [$($context)*]
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
    };
}
pub(crate) use every_group;
