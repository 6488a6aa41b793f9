//! The native half of the Python package `mrope`: rope-core's operations on memory that PyTorch
//! owns. `python/mrope` is its only caller; what users call is there.

mod cpu;
mod error;
mod pool;
mod spec;
mod tensor;

/// The kernels, on tensors given by address. Use `mrope.torch`.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use super::cpu::{
        angle_gradients, check_apart_for_python, norm_rotate, norm_rotate_backward, rotate,
    };
    #[pymodule_export]
    use super::spec::{spec_checked, spec_from_hf_config, spec_parts, token_angles};

    /// Version of the wheel.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
