//! Every operation and its gradients against plain loops. One program: each would link all of burn.

mod adamw;
mod attention;
mod cross_entropy;
mod errors;
mod gated_delta;
mod grouped_linear;
mod linear;
mod norms;
mod routes;
mod rows;
mod short_convolution;
mod swiglu;

use burn::tensor::{DType, TensorData};

/// Numbers between -1 and 1 that look random and are the same in every run, rounded to a type.
fn numbers(seed: u64, count: usize, dtype: DType) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    let values: Vec<f64> = std::iter::repeat_with(next).take(count).collect();
    let data = TensorData::new(values, [count]).convert_dtype(dtype);
    data.iter::<f64>().collect()
}
