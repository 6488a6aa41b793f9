//! The operator library's descriptors: tensors, scalars, lists, executors.
#![allow(non_snake_case, non_camel_case_types, reason = "the vendor's spelling")]

use std::ffi::c_void;
use std::sync::Arc;

use crate::abi::export::export;
use crate::abi::sys::read_host;
use crate::aclnn::Tensor;
use crate::aclnn::descriptor::{Description, Scalar, data_type};
use crate::aclnn::executor::Numbering;
use crate::codes::{ACLNN_NULLPTR, Failure, Outcome};
use crate::registry::{Object, Registry};
use crate::state::{Sim, set_recent_message, sim};

/// An opaque tensor descriptor.
#[repr(C)]
#[derive(Debug)]
pub struct aclTensor([u8; 0]);
/// An opaque list of integers.
#[repr(C)]
#[derive(Debug)]
pub struct aclIntArray([u8; 0]);
/// An opaque scalar.
#[repr(C)]
#[derive(Debug)]
pub struct aclScalar([u8; 0]);
/// An opaque list of tensors.
#[repr(C)]
#[derive(Debug)]
pub struct aclTensorList([u8; 0]);
/// An opaque planned operator.
#[repr(C)]
#[derive(Debug)]
pub struct aclOpExecutor([u8; 0]);

/// The values of a C list; null is accepted where there are none.
///
/// # Safety
/// - `values` is null or valid for `count` elements.
unsafe fn list<T: Copy>(values: *const T, count: u64, name: &str) -> Outcome<Vec<T>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if values.is_null() {
        let message = format!("{name} is null, {count} values are expected");
        return Err(Failure::new(ACLNN_NULLPTR, message));
    }
    // SAFETY: not null, and `count` elements long by the function's own condition.
    Ok(unsafe { std::slice::from_raw_parts(values, count as usize) }.to_vec())
}

/// A created object's address, or null with the reason kept for `aclGetRecentErrMsg`.
fn created<T>(function: &'static str, make: impl FnOnce() -> Outcome<u64>) -> *mut T {
    let injected = sim().faults.next(function);
    let outcome = match injected {
        Some(code) => Err(Failure::new(code, "this failure was injected")),
        None => make(),
    };
    let code = outcome.as_ref().map_or_else(|failure| failure.code, |_| 0);
    sim().log(function, code);
    outcome.map_or_else(
        |failure| {
            set_recent_message(&format!("{function}: {}", failure.message));
            std::ptr::null_mut()
        },
        |handle| handle as *mut T,
    )
}

/// Destroys what a handle stands for; null is accepted.
fn destroy<T: Object>(handle: u64, registry: impl FnOnce(&mut Sim) -> &mut Registry<T>) -> Outcome {
    if handle == 0 {
        return Ok(());
    }
    registry(&mut sim()).remove(handle).map(drop)
}

/// Gives a tensor of an executor, and the tensor itself, another address.
fn set_address(
    executor: *mut aclOpExecutor,
    by: Numbering,
    index: usize,
    tensor: *mut aclTensor,
    address: *mut c_void,
) -> Outcome {
    if executor.is_null() {
        return Err(Failure::new(ACLNN_NULLPTR, "executor is null"));
    }
    let mut state = sim();
    let state = &mut *state;
    let described = state.descriptors.tensors.get_mut(tensor as u64)?;
    let planned = state.descriptors.executors.get_mut(executor as u64)?;
    planned.set_address(by, index, tensor as u64, address as u64)?;
    Arc::make_mut(described).data = address as u64;
    Ok(())
}

export! {
    status {
        fn aclDestroyTensor(tensor: *const aclTensor) {
            destroy(tensor as u64, |state| &mut state.descriptors.tensors)
        }
        fn aclDestroyIntArray(array: *const aclIntArray) {
            destroy(array as u64, |state| &mut state.descriptors.ints)
        }
        fn aclDestroyScalar(scalar: *const aclScalar) {
            destroy(scalar as u64, |state| &mut state.descriptors.scalars)
        }
        fn aclDestroyTensorList(array: *const aclTensorList) {
            if array.is_null() {
                return Ok(());
            }
            let mut state = sim();
            let owned = state.descriptors.lists.remove(array as u64)?;
            let tensors = &mut state.descriptors.tensors;
            owned.into_iter().try_for_each(|tensor| tensors.remove(tensor).map(drop))
        }
        fn aclSetAclOpExecutorRepeatable(executor: *mut aclOpExecutor) {
            sim().descriptors.executors.get_mut(executor as u64)?.make_repeatable()
        }
        fn aclDestroyAclOpExecutor(executor: *mut aclOpExecutor) {
            destroy(executor as u64, |state| &mut state.descriptors.executors)
        }
        fn aclSetInputTensorAddr(
            executor: *mut aclOpExecutor, index: usize, tensor: *mut aclTensor, addr: *mut c_void,
        ) {
            set_address(executor, Numbering::Inputs, index, tensor, addr)
        }
        fn aclSetOutputTensorAddr(
            executor: *mut aclOpExecutor, index: usize, tensor: *mut aclTensor, addr: *mut c_void,
        ) {
            set_address(executor, Numbering::Outputs, index, tensor, addr)
        }
        fn aclSetDynamicInputTensorAddr(
            executor: *mut aclOpExecutor, irIndex: usize, relativeIndex: usize,
            tensors: *mut aclTensorList, addr: *mut c_void,
        ) {
            if executor.is_null() || tensors.is_null() {
                return Err(Failure::new(ACLNN_NULLPTR, "executor or tensors is null"));
            }
            let mut state = sim();
            let state = &mut *state;
            let (list, address) = (tensors as u64, addr as u64);
            let planned = state.descriptors.executors.get_mut(executor as u64)?;
            let member = planned.set_member_address(irIndex, relativeIndex, list, address)?;
            let described = state.descriptors.tensors.get_mut(member)?;
            Arc::make_mut(described).data = address;
            Ok(())
        }
    }
    value {
        fn aclCreateTensor(
            viewDims: *const i64, viewDimsNum: u64, dataType: i32, stride: *const i64, offset: i64,
            format: i32, storageDims: *const i64, storageDimsNum: u64, tensorData: *mut c_void,
        ) -> *mut aclTensor {
            created("aclCreateTensor", || {
                let strided = !stride.is_null();
                // SAFETY: lists of the given lengths by the C declaration; the strides are as many
                // as the dimensions.
                let (dims, strides, storage) = unsafe {
                    (
                        list(viewDims, viewDimsNum, "viewDims")?,
                        strided.then(|| list(stride, viewDimsNum, "stride")).transpose()?,
                        list(storageDims, storageDimsNum, "storageDims")?,
                    )
                };
                let (dtype, data) = (dataType, tensorData as u64);
                let described = Tensor::new(Description {
                    dims, dtype, strides, offset, format, storage, data,
                })?;
                Ok(sim().descriptors.tensors.insert(Arc::new(described)))
            })
        }
        fn aclCreateIntArray(value: *const i64, size: u64) -> *mut aclIntArray {
            created("aclCreateIntArray", || {
                // SAFETY: a list of the given length by the C declaration.
                let values = unsafe { list(value, size, "value") }?;
                Ok(sim().descriptors.ints.insert(values))
            })
        }
        fn aclCreateScalar(value: *mut c_void, dataType: i32) -> *mut aclScalar {
            created("aclCreateScalar", || {
                let dtype = data_type(dataType)?;
                if value.is_null() {
                    return Err(Failure::new(ACLNN_NULLPTR, "value is null"));
                }
                // SAFETY: not null, and one element of the type by the C declaration.
                let bytes = unsafe { read_host(value as usize, dtype.bytes() as usize) };
                Ok(sim().descriptors.scalars.insert(Scalar::new(dtype, &bytes)))
            })
        }
        fn aclCreateTensorList(
            value: *const *const aclTensor, size: u64,
        ) -> *mut aclTensorList {
            created("aclCreateTensorList", || {
                // SAFETY: a list of the given length by the C declaration.
                let tensors = unsafe { list(value, size, "value") }?;
                let tensors: Vec<u64> = tensors.into_iter().map(|tensor| tensor as u64).collect();
                let mut state = sim();
                for tensor in &tensors {
                    state.descriptors.tensors.get(*tensor)?;
                }
                Ok(state.descriptors.lists.insert(tensors))
            })
        }
    }
}
