//! Operations of neural network layers.

use super::{conv, index, norm, operations};
use crate::Ascend;
use crate::tensor::AscendTensor;
use burn::backend::IntDType;
use burn::backend::ops::attention::attention_fallback;
use burn::backend::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConv2dBackward,
    DeformConvOptions, InterpolateOptions, MaxPool2dBackward, MaxPool2dWithIndices, ModuleOps,
};

operations! {
    ModuleOps;
    native {
        fn embedding(weights: AscendTensor, indices: AscendTensor) -> AscendTensor; FLOAT_INDEX [embedding] {
            index::embedding(&weights, &indices)
        }
        fn embedding_backward(weights: AscendTensor, output_grad: AscendTensor, indices: AscendTensor) -> AscendTensor; FLOAT_INDEX [embedding_backward] {
            index::embedding_backward(&weights, output_grad, indices)
        }
        fn conv2d(x: AscendTensor, weight: AscendTensor, bias: Option<AscendTensor>, options: ConvOptions<2>) -> AscendTensor; FLOAT [copy, mm, batch_mm, add] {
            conv::forward(x, weight, bias, &options)
        }
        fn conv2d_x_backward(x: AscendTensor, weight: AscendTensor, output_grad: AscendTensor, options: ConvOptions<2>) -> AscendTensor; FLOAT [copy, mm, batch_mm, add] {
            conv::input_backward(&x, weight, &output_grad, &options)
        }
        fn conv2d_weight_backward(x: AscendTensor, weight: AscendTensor, output_grad: AscendTensor, options: ConvOptions<2>) -> AscendTensor; FLOAT [copy, mm, batch_mm] {
            conv::weight_backward(x, &weight, &output_grad, &options)
        }
        fn conv3d(x: AscendTensor, weight: AscendTensor, bias: Option<AscendTensor>, options: ConvOptions<3>) -> AscendTensor; FLOAT [copy, mm, batch_mm, add] {
            conv::forward(x, weight, bias, &options)
        }
        fn conv3d_x_backward(x: AscendTensor, weight: AscendTensor, output_grad: AscendTensor, options: ConvOptions<3>) -> AscendTensor; FLOAT [copy, mm, batch_mm, add] {
            conv::input_backward(&x, weight, &output_grad, &options)
        }
        fn conv3d_weight_backward(x: AscendTensor, weight: AscendTensor, output_grad: AscendTensor, options: ConvOptions<3>) -> AscendTensor; FLOAT [copy, mm, batch_mm] {
            conv::weight_backward(x, &weight, &output_grad, &options)
        }
        fn attention(query: AscendTensor, key: AscendTensor, value: AscendTensor, mask: Option<AscendTensor>, attn_bias: Option<AscendTensor>, options: AttentionModuleOptions) -> AscendTensor; FLOAT_BOOL [batch_mm, muls, softmax] {
            attention_fallback::<Ascend>(query, key, value, mask, attn_bias, options)
        }
        fn layer_norm(tensor: AscendTensor, gamma: AscendTensor, beta: Option<AscendTensor>, epsilon: f64) -> AscendTensor; FLOAT [layer_norm] {
            norm::layer_norm(&tensor, &gamma, beta.as_ref(), epsilon)
        }
    }
    fallback {
        fn deform_conv2d(x: AscendTensor, offset: AscendTensor, weight: AscendTensor, mask: Option<AscendTensor>, bias: Option<AscendTensor>, options: DeformConvOptions<2>) -> AscendTensor;
        fn deform_conv2d_backward(x: AscendTensor, offset: AscendTensor, weight: AscendTensor, mask: Option<AscendTensor>, bias: Option<AscendTensor>, output_grad: AscendTensor, options: DeformConvOptions<2>) -> DeformConv2dBackward<Ascend>;
        fn conv_transpose2d(x: AscendTensor, weight: AscendTensor, bias: Option<AscendTensor>, options: ConvTransposeOptions<2>) -> AscendTensor;
        fn conv_transpose3d(x: AscendTensor, weight: AscendTensor, bias: Option<AscendTensor>, options: ConvTransposeOptions<3>) -> AscendTensor;
        fn avg_pool2d(x: AscendTensor, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], count_include_pad: bool, ceil_mode: bool) -> AscendTensor;
        fn avg_pool2d_backward(x: AscendTensor, grad: AscendTensor, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], count_include_pad: bool, ceil_mode: bool) -> AscendTensor;
        fn adaptive_avg_pool2d(x: AscendTensor, output_size: [usize; 2]) -> AscendTensor;
        fn adaptive_avg_pool2d_backward(x: AscendTensor, grad: AscendTensor) -> AscendTensor;
        fn adaptive_avg_pool3d(x: AscendTensor, output_size: [usize; 3]) -> AscendTensor;
        fn adaptive_avg_pool3d_backward(x: AscendTensor, grad: AscendTensor) -> AscendTensor;
        fn max_pool2d(x: AscendTensor, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], ceil_mode: bool) -> AscendTensor;
        fn max_pool2d_with_indices(x: AscendTensor, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], ceil_mode: bool, indices_dtype: IntDType) -> MaxPool2dWithIndices<Ascend>;
        fn max_pool2d_with_indices_backward(x: AscendTensor, kernel_size: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], ceil_mode: bool, output_grad: AscendTensor, indices: AscendTensor) -> MaxPool2dBackward<Ascend>;
        fn interpolate(x: AscendTensor, output_size: [usize; 2], options: InterpolateOptions) -> AscendTensor;
        fn interpolate_backward(x: AscendTensor, grad: AscendTensor, output_size: [usize; 2], options: InterpolateOptions) -> AscendTensor;
    }
    other {

    }
}
