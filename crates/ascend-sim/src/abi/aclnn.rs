//! The operator library's descriptors: tensors, scalars, lists, executors.
#![allow(non_snake_case, non_camel_case_types, reason = "the vendor's spelling")]

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use crate::abi::export::export;
use crate::abi::runtime::put;
use crate::abi::sys::read_host;
use crate::aclnn::call::Numbering;
use crate::aclnn::descriptor::{Description, Scalar, data_type};
use crate::aclnn::{Tensor, refuse};
use crate::codes::{ACLNN_NULLPTR, Failure, Outcome};
use crate::registry::Registry;
use crate::state::{set_recent_message, sim};

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
/// An opaque list of floats.
#[repr(C)]
#[derive(Debug)]
pub struct aclFloatArray([u8; 0]);
/// An opaque list of truth values.
#[repr(C)]
#[derive(Debug)]
pub struct aclBoolArray([u8; 0]);
/// An opaque list of scalars.
#[repr(C)]
#[derive(Debug)]
pub struct aclScalarList([u8; 0]);
/// An opaque planned operator.
#[repr(C)]
#[derive(Debug)]
pub struct aclOpExecutor([u8; 0]);

/// Numbers behind a pointer, which may be null when there are none.
///
/// # Safety
/// - `values` is null or valid for `count` elements.
unsafe fn list<T: Copy>(values: *const T, count: u64, name: &str) -> Outcome<Vec<T>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if values.is_null() {
        return Err(Failure::new(
            ACLNN_NULLPTR,
            format!("{name} is null, {count} values are expected"),
        ));
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
fn destroy<T>(
    pointer: u64,
    registry: impl FnOnce(&mut crate::state::Sim) -> &mut Registry<T>,
) -> Outcome {
    if pointer == 0 {
        return Ok(());
    }
    registry(&mut sim()).remove(pointer).map(drop)
}

/// What `aclCreateTensor` and `aclInitTensor` are given, as it is.
///
/// # Safety
/// - The lists are null or of the given lengths; the strides are as many as the dimensions.
#[allow(clippy::too_many_arguments, reason = "the C function has as many")]
unsafe fn described(
    dims: *const i64,
    rank: u64,
    dtype: i32,
    strides: *const i64,
    offset: i64,
    format: i32,
    storage: *const i64,
    storage_rank: u64,
    data: u64,
) -> Outcome<Tensor> {
    // SAFETY: by the function's own condition.
    let (dims, strides, storage) = unsafe {
        (
            list(dims, rank, "viewDims")?,
            (!strides.is_null())
                .then(|| list(strides, rank, "stride"))
                .transpose()?,
            list(storage, storage_rank, "storageDims")?,
        )
    };
    Tensor::new(Description {
        dims,
        dtype,
        strides,
        offset,
        format,
        storage,
        data,
    })
}

/// Counts what is behind a handle and gives the count out.
///
/// # Safety
/// - `size` is null or valid for writing.
unsafe fn give_size<T>(
    handle: u64,
    size: *mut u64,
    registry: impl FnOnce(&crate::state::Sim) -> &Registry<Vec<T>>,
) -> Outcome {
    let count = registry(&sim()).get(handle)?.len();
    // SAFETY: by the function's own condition.
    unsafe { put(size, count as u64, "size") }
}

/// Gives a tensor of an executor, and the tensor itself, another address.
fn set_address(
    executor: *mut aclOpExecutor,
    by: Numbering,
    index: usize,
    member: Option<usize>,
    tensor: u64,
    address: *mut c_void,
) -> Outcome {
    if executor.is_null() {
        return Err(Failure::new(ACLNN_NULLPTR, "executor is null"));
    }
    let mut state = sim();
    let state = &mut *state;
    let described = state.descriptors.tensors.get_mut(tensor)?;
    let planned = state.descriptors.executors.get_mut(executor as u64)?;
    planned.set_address(by, index, member, tensor, address as u64)?;
    Arc::make_mut(described).data = address as u64;
    Ok(())
}

/// The same for a member of a list.
fn set_member_address(
    executor: *mut aclOpExecutor,
    by: Numbering,
    index: usize,
    member: usize,
    list: *mut aclTensorList,
    address: *mut c_void,
) -> Outcome {
    let found = sim()
        .descriptors
        .lists
        .get(list as u64)?
        .get(member)
        .copied();
    match found {
        Some(tensor) => set_address(executor, by, index, Some(member), tensor, address),
        None => refuse(format!("the list has no member {member}")),
    }
}

export! {
    status {
        fn aclnnInit(configPath: *const c_char) {
            let _ = configPath;
            Ok(())
        }
        fn aclnnFinalize() {
            Ok(())
        }
        fn aclInitTensor(tensor: *mut aclTensor, viewDims: *const i64, viewDimsNum: u64, dataType: i32, stride: *const i64, offset: i64, format: i32, storageDims: *const i64, storageDimsNum: u64, tensorData: *mut c_void) {
            // SAFETY: lists of the given lengths by the C declaration; the strides are as many as the dimensions.
            let described = unsafe { described(viewDims, viewDimsNum, dataType, stride, offset, format, storageDims, storageDimsNum, tensorData as u64) }?;
            *sim().descriptors.tensors.get_mut(tensor as u64)? = Arc::new(described);
            Ok(())
        }
        fn aclDestroyTensor(tensor: *const aclTensor) {
            destroy(tensor as u64, |state| &mut state.descriptors.tensors)
        }
        fn aclDestroyIntArray(array: *const aclIntArray) {
            destroy(array as u64, |state| &mut state.descriptors.ints)
        }
        fn aclDestroyFloatArray(array: *const aclFloatArray) {
            destroy(array as u64, |state| &mut state.descriptors.floats)
        }
        fn aclDestroyBoolArray(array: *const aclBoolArray) {
            destroy(array as u64, |state| &mut state.descriptors.bools)
        }
        fn aclDestroyScalar(scalar: *const aclScalar) {
            destroy(scalar as u64, |state| &mut state.descriptors.scalars)
        }
        fn aclDestroyTensorList(array: *const aclTensorList) {
            if array.is_null() {
                return Ok(());
            }
            let mut state = sim();
            let tensors = state.descriptors.lists.remove(array as u64)?;
            // The list owns its tensors.
            tensors.into_iter().try_for_each(|tensor| state.descriptors.tensors.remove(tensor).map(drop))
        }
        fn aclDestroyScalarList(array: *const aclScalarList) {
            if array.is_null() {
                return Ok(());
            }
            let mut state = sim();
            let scalars = state.descriptors.scalar_lists.remove(array as u64)?;
            scalars.into_iter().try_for_each(|scalar| state.descriptors.scalars.remove(scalar).map(drop))
        }
        fn aclSetAclOpExecutorRepeatable(executor: *mut aclOpExecutor) {
            sim().descriptors.executors.get_mut(executor as u64)?.make_repeatable()
        }
        fn aclDestroyAclOpExecutor(executor: *mut aclOpExecutor) {
            destroy(executor as u64, |state| &mut state.descriptors.executors)
        }
        fn aclSetInputTensorAddr(executor: *mut aclOpExecutor, index: usize, tensor: *mut aclTensor, addr: *mut c_void) {
            set_address(executor, Numbering::Inputs, index, None, tensor as u64, addr)
        }
        fn aclSetOutputTensorAddr(executor: *mut aclOpExecutor, index: usize, tensor: *mut aclTensor, addr: *mut c_void) {
            set_address(executor, Numbering::Outputs, index, None, tensor as u64, addr)
        }
        fn aclSetTensorAddr(executor: *mut aclOpExecutor, index: usize, tensor: *mut aclTensor, addr: *mut c_void) {
            set_address(executor, Numbering::Parameters, index, None, tensor as u64, addr)
        }
        fn aclSetDynamicInputTensorAddr(executor: *mut aclOpExecutor, irIndex: usize, relativeIndex: usize, tensors: *mut aclTensorList, addr: *mut c_void) {
            set_member_address(executor, Numbering::Inputs, irIndex, relativeIndex, tensors, addr)
        }
        fn aclSetDynamicOutputTensorAddr(executor: *mut aclOpExecutor, irIndex: usize, relativeIndex: usize, tensors: *mut aclTensorList, addr: *mut c_void) {
            set_member_address(executor, Numbering::Outputs, irIndex, relativeIndex, tensors, addr)
        }
        fn aclSetDynamicTensorAddr(executor: *mut aclOpExecutor, irIndex: usize, relativeIndex: usize, tensors: *mut aclTensorList, addr: *mut c_void) {
            set_member_address(executor, Numbering::Parameters, irIndex, relativeIndex, tensors, addr)
        }
        fn aclSetRawTensorAddr(tensor: *mut aclTensor, addr: *mut c_void) {
            Arc::make_mut(sim().descriptors.tensors.get_mut(tensor as u64)?).data = addr as u64;
            Ok(())
        }
        fn aclGetRawTensorAddr(tensor: *const aclTensor, addr: *mut *mut c_void) {
            let data = sim().descriptors.tensors.get(tensor as u64)?.data;
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { put(addr, data as *mut c_void, "addr") }
        }
        fn aclGetDataType(tensor: *const aclTensor, dataType: *mut i32) {
            let dtype = sim().descriptors.tensors.get(tensor as u64)?.dtype;
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { put(dataType, dtype as i32, "dataType") }
        }
        fn aclGetFormat(tensor: *const aclTensor, format: *mut i32) {
            let found = sim().descriptors.tensors.get(tensor as u64)?.format;
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { put(format, found, "format") }
        }
        fn aclGetViewOffset(tensor: *const aclTensor, offset: *mut i64) {
            let found = sim().descriptors.tensors.get(tensor as u64)?.offset;
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { put(offset, found, "offset") }
        }
        fn aclGetIntArraySize(array: *const aclIntArray, size: *mut u64) {
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { give_size(array as u64, size, |state| &state.descriptors.ints) }
        }
        fn aclGetFloatArraySize(array: *const aclFloatArray, size: *mut u64) {
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { give_size(array as u64, size, |state| &state.descriptors.floats) }
        }
        fn aclGetBoolArraySize(array: *const aclBoolArray, size: *mut u64) {
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { give_size(array as u64, size, |state| &state.descriptors.bools) }
        }
        fn aclGetTensorListSize(array: *const aclTensorList, size: *mut u64) {
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { give_size(array as u64, size, |state| &state.descriptors.lists) }
        }
        fn aclGetScalarListSize(array: *const aclScalarList, size: *mut u64) {
            // SAFETY: an out parameter, null or valid by the C declaration.
            unsafe { give_size(array as u64, size, |state| &state.descriptors.scalar_lists) }
        }
    }
    value {
        fn aclCreateTensor(viewDims: *const i64, viewDimsNum: u64, dataType: i32, stride: *const i64, offset: i64, format: i32, storageDims: *const i64, storageDimsNum: u64, tensorData: *mut c_void) -> *mut aclTensor {
            created("aclCreateTensor", || {
                // SAFETY: lists of the given lengths by the C declaration; the strides are as many as the dimensions.
                let described = unsafe { described(viewDims, viewDimsNum, dataType, stride, offset, format, storageDims, storageDimsNum, tensorData as u64) }?;
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
        fn aclCreateFloatArray(value: *const f32, size: u64) -> *mut aclFloatArray {
            created("aclCreateFloatArray", || {
                // SAFETY: a list of the given length by the C declaration.
                let values = unsafe { list(value, size, "value") }?;
                Ok(sim().descriptors.floats.insert(values))
            })
        }
        fn aclCreateBoolArray(value: *const bool, size: u64) -> *mut aclBoolArray {
            created("aclCreateBoolArray", || {
                // SAFETY: a list of the given length by the C declaration, read as bytes.
                let values = unsafe { list(value.cast::<u8>(), size, "value") }?;
                Ok(sim().descriptors.bools.insert(values.into_iter().map(|byte| byte != 0).collect()))
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
        fn aclCreateTensorList(value: *const *const aclTensor, size: u64) -> *mut aclTensorList {
            created("aclCreateTensorList", || {
                // SAFETY: a list of the given length by the C declaration.
                let tensors: Vec<u64> = unsafe { list(value, size, "value") }?.into_iter().map(|pointer| pointer as u64).collect();
                let mut state = sim();
                for tensor in &tensors {
                    state.descriptors.tensors.get(*tensor)?;
                }
                Ok(state.descriptors.lists.insert(tensors))
            })
        }
        fn aclCreateScalarList(value: *const *const aclScalar, size: u64) -> *mut aclScalarList {
            created("aclCreateScalarList", || {
                // SAFETY: a list of the given length by the C declaration.
                let scalars: Vec<u64> = unsafe { list(value, size, "value") }?.into_iter().map(|pointer| pointer as u64).collect();
                let mut state = sim();
                for scalar in &scalars {
                    state.descriptors.scalars.get(*scalar)?;
                }
                Ok(state.descriptors.scalar_lists.insert(scalars))
            })
        }
    }
}
