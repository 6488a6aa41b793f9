//! Operations of neural network layers.

use burn::backend::IntDType;
use burn::backend::ops::attention::attention_fallback;
use burn::backend::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward,
    DeformConvOptions, InterpolateOptions, MaxPool2dBackward, MaxPool2dWithIndices, ModuleOps,
};

use super::{conv, index, matmul, norm, operations};
use crate::Ascend;
use crate::tensor::AscendTensor as T;

operations! {
    ModuleOps;
    native {
        fn embedding(weights: T, indices: T) -> T;
            FLOAT_INDEX [embedding] { index::embedding(&weights, &indices) }
        fn embedding_backward(weights: T, output_grad: T, indices: T) -> T;
            FLOAT_INDEX [embedding_backward] {
                index::embedding_backward(&weights, output_grad, indices)
            }
        fn linear(x: T, weight: T, bias: Option<T>) -> T;
            FLOAT [mm, add_mm] { matmul::linear(x, weight, bias) }
        fn conv2d(x: T, weight: T, bias: Option<T>, options: ConvOptions<2>) -> T;
            FLOAT [copy, mm, batch_mm, add] { conv::forward(x, weight, bias, &options) }
        fn conv2d_x_backward(x: T, weight: T, output_grad: T, options: ConvOptions<2>) -> T;
            FLOAT [copy, mm, batch_mm, add] {
                conv::input_backward(&x, weight, &output_grad, &options)
            }
        fn conv2d_weight_backward(x: T, weight: T, output_grad: T, options: ConvOptions<2>) -> T;
            FLOAT [copy, mm, batch_mm] { conv::weight_backward(x, &weight, &output_grad, &options) }
        fn conv3d(x: T, weight: T, bias: Option<T>, options: ConvOptions<3>) -> T;
            FLOAT [copy, mm, batch_mm, add] { conv::forward(x, weight, bias, &options) }
        fn conv3d_x_backward(x: T, weight: T, output_grad: T, options: ConvOptions<3>) -> T;
            FLOAT [copy, mm, batch_mm, add] {
                conv::input_backward(&x, weight, &output_grad, &options)
            }
        fn conv3d_weight_backward(x: T, weight: T, output_grad: T, options: ConvOptions<3>) -> T;
            FLOAT [copy, mm, batch_mm] { conv::weight_backward(x, &weight, &output_grad, &options) }
        fn attention(query: T, key: T, value: T, mask: Option<T>, attn_bias: Option<T>,
            options: AttentionModuleOptions) -> T;
            FLOAT_BOOL [batch_mm, muls, softmax] {
                attention_fallback::<Ascend>(query, key, value, mask, attn_bias, options)
            }
        fn layer_norm(tensor: T, gamma: T, beta: Option<T>, epsilon: f64) -> T;
            FLOAT [layer_norm] { norm::layer_norm(&tensor, &gamma, beta.as_ref(), epsilon) }
    }
    fallback {
        fn deform_conv2d(x: T, offset: T, weight: T, mask: Option<T>, bias: Option<T>,
            options: DeformConvOptions<2>) -> T;
        fn deform_conv2d_backward(x: T, offset: T, weight: T, mask: Option<T>, bias: Option<T>,
            output_grad: T, options: DeformConvOptions<2>) -> DeformConv2dBackward<Ascend>;
        fn conv_transpose2d(x: T, weight: T, bias: Option<T>,
            options: ConvTransposeOptions<2>) -> T;
        fn conv_transpose3d(x: T, weight: T, bias: Option<T>,
            options: ConvTransposeOptions<3>) -> T;
        fn avg_pool2d(x: T, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2],
            count_include_pad: bool, ceil_mode: bool) -> T;
        fn avg_pool2d_backward(x: T, grad: T, kernel_size: [usize; 2], stride: [usize; 2],
            padding: [usize; 2], count_include_pad: bool, ceil_mode: bool) -> T;
        fn adaptive_avg_pool2d(x: T, output_size: [usize; 2]) -> T;
        fn adaptive_avg_pool2d_backward(x: T, grad: T) -> T;
        fn adaptive_avg_pool3d(x: T, output_size: [usize; 3]) -> T;
        fn adaptive_avg_pool3d_backward(x: T, grad: T) -> T;
        fn max_pool2d(x: T, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2],
            dilation: [usize; 2], ceil_mode: bool) -> T;
        fn max_pool2d_with_indices(x: T, kernel_size: [usize; 2], stride: [usize; 2],
            padding: [usize; 2], dilation: [usize; 2], ceil_mode: bool,
            indices_dtype: IntDType) -> MaxPool2dWithIndices<Ascend>;
        fn max_pool2d_with_indices_backward(x: T, kernel_size: [usize; 2], stride: [usize; 2],
            padding: [usize; 2], dilation: [usize; 2], ceil_mode: bool, output_grad: T,
            indices: T) -> MaxPool2dBackward<Ascend>;
        fn interpolate(x: T, output_size: [usize; 2], options: InterpolateOptions) -> T;
        fn interpolate_backward(x: T, grad: T, output_size: [usize; 2],
            options: InterpolateOptions) -> T;
    }
    other {}
}
