//! Operator descriptors and the stock operators, written from their documentation as plain loops.
//!
//! An operator call has two phases. The first checks the documented limits and makes an executor;
//! the second puts it on a stream with its workspace. On the stream an operator reads its tensors
//! into dense lists of f32, f64 or i64, computes, and writes the result, rounded once.

pub(crate) mod attention;
pub(crate) mod cache;
pub(crate) mod call;
pub(crate) mod data;
pub(crate) mod descriptor;
pub(crate) mod dtype;
pub(crate) mod element;
pub(crate) mod executor;
pub(crate) mod fill;
pub(crate) mod index;
pub(crate) mod matrix;
pub(crate) mod movement;
pub(crate) mod normalize;
pub(crate) mod pointwise;
pub(crate) mod random;
pub(crate) mod reduce;
pub(crate) mod rotary;

use crate::codes::{
    ACLNN_INNER_NULLPTR, ACLNN_PARAM_INVALID, ACLNN_TILING_ERROR, Failure, Outcome,
};

pub(crate) use call::{Call, Kernel, Operand, kernel};
pub(crate) use descriptor::{Descriptors, Tensor};
pub(crate) use dtype::DataType;

/// Refuses a parameter that breaks a limit of the documentation.
pub(crate) fn refuse<T>(message: impl std::fmt::Display) -> Outcome<T> {
    Err(Failure::new(ACLNN_PARAM_INVALID, message))
}

/// Turns a refusal into the error inside of an operator that the vendor finds it by: what it does
/// not check breaks where it builds the operator's work.
pub(crate) fn inner<T>(outcome: Outcome<T>) -> Outcome<T> {
    outcome.map_err(|failure| Failure::new(ACLNN_INNER_NULLPTR, failure.message))
}

/// Turns a shape error into one of the tiling, as operators with generated wrappers report it.
pub(crate) fn tiling<T>(outcome: Outcome<T>) -> Outcome<T> {
    outcome.map_err(|failure| Failure::new(ACLNN_TILING_ERROR, failure.message))
}

/// The shape that all of these broadcast to.
pub(crate) fn broadcast(tensors: &[&Operand]) -> Outcome<Vec<usize>> {
    let rank = tensors.iter().map(|t| t.rank()).max().unwrap_or(0);
    let mut dims = vec![1; rank];
    for tensor in tensors {
        let lead = rank - tensor.rank();
        for (target, dim) in dims[lead..].iter_mut().zip(&tensor.dims) {
            if *target == 1 {
                *target = *dim;
            } else if *dim != 1 && *dim != *target {
                let shapes: Vec<_> = tensors.iter().map(|t| (t.name, &t.dims)).collect();
                return refuse(format!("the shapes {shapes:?} do not broadcast"));
            }
        }
    }
    Ok(dims)
}
