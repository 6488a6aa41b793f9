//! The native half of the Python package `mrope`: operations of rope-core and rope-ascend on memory
//! that PyTorch owns. Its only caller is `python/mrope`, which has the functions for users.

mod cpu;
mod error;
mod npu;
mod pool;
mod spec;
mod tensor;

/// The kernels, on tensors given by address. Use `mrope.torch`.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use super::cpu::instruction_set;
    #[pymodule_export]
    use super::cpu::{
        angle_gradients, check_apart_for_python, norm_rotate, norm_rotate_backward, rotate,
    };
    #[pymodule_export]
    use super::npu::{
        diagnosis, npu_angle_gradients, npu_norm_rotate, npu_norm_rotate_backward, npu_rotate,
        npu_weight_sums,
    };
    #[cfg(feature = "ascend-sim")]
    #[pymodule_export]
    use super::npu::{simulator_calls, simulator_symbol, simulator_violations};
    #[pymodule_export]
    use super::spec::{
        spec_checked, spec_from_hf_config, spec_from_rope_parameters, spec_parts, token_angles,
    };

    /// Version of the wheel.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
