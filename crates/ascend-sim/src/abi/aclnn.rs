//! The operator library's functions: descriptors and stock operators.
#![allow(non_snake_case, non_camel_case_types, reason = "the vendor's spelling")]

use std::ffi::{c_char, c_void};

use crate::abi::export::export;
use crate::abi::runtime::{get_text, put};
use crate::abi::sys::read_host;
use crate::aclnn::apply::{plan_apply, plan_interleave};
use crate::aclnn::cache::{Parameters, plan_cached};
use crate::aclnn::rotary::{GradTensors, plan_forward, plan_gradient};
use crate::aclnn::{DataType, Tensor, WORKSPACE_BYTES, execute, optional_tensor, tensor};
use crate::codes::{ACLNN_NULLPTR, ACLNN_PARAM_INVALID, Failure, Outcome};
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
/// An opaque planned operator.
#[repr(C)]
#[derive(Debug)]
pub struct aclOpExecutor([u8; 0]);

const FORMAT_ND: i32 = 2;

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
fn created<T>(function: &'static str, outcome: Outcome<u64>) -> *mut T {
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

/// The injected failure of a creating function, if one was planned.
fn injected(function: &'static str) -> Outcome {
    sim().faults.next(function).map_or(Ok(()), |code| {
        Err(Failure::new(code, "this failure was injected"))
    })
}

/// Hands out the result of a first phase.
///
/// # Safety
/// - Both pointers are null or valid for writing.
unsafe fn give(
    workspace_bytes: *mut u64,
    executor: *mut *mut aclOpExecutor,
    plan: impl FnOnce() -> Outcome<u64>,
) -> Outcome {
    if workspace_bytes.is_null() || executor.is_null() {
        return Err(Failure::new(
            ACLNN_NULLPTR,
            "workspaceSize or executor is null",
        ));
    }
    let planned = plan()?;
    // SAFETY: not null, and valid for writing by the function's own condition.
    unsafe {
        put(workspace_bytes, WORKSPACE_BYTES, "workspaceSize")?;
        put(executor, planned as *mut aclOpExecutor, "executor")
    }
}

fn get(pointer: *const aclTensor, name: &str) -> Outcome<Tensor> {
    tensor(pointer as u64, name)
}

fn int_array(pointer: *const aclIntArray) -> Outcome<Vec<i64>> {
    if pointer.is_null() {
        return Ok(Vec::new());
    }
    let values = sim().descriptors.arrays.get(pointer as u64)?.clone();
    // Zeros stand for no sections.
    Ok(if values.iter().all(|value| *value == 0) {
        Vec::new()
    } else {
        values
    })
}

/// A tensor descriptor from its parameters.
fn describe(
    dims: Vec<i64>,
    dtype: i32,
    strides: Vec<i64>,
    offset: i64,
    format: i32,
    storage: Vec<i64>,
    data: u64,
) -> Outcome<Tensor> {
    let invalid = |message: String| Failure::new(ACLNN_PARAM_INVALID, message);
    let dtype = DataType::from_code(dtype)
        .ok_or_else(|| invalid(format!("data type {dtype} does not exist")))?;
    if format != FORMAT_ND {
        return Err(invalid(format!(
            "format {format}: only ND ({FORMAT_ND}) is modelled; offset comes before format in the parameters"
        )));
    }
    let dims = dims
        .into_iter()
        .map(|dim| {
            usize::try_from(dim).map_err(|_| invalid(format!("dimension {dim} is negative")))
        })
        .collect::<Outcome<Vec<_>>>()?;
    let elements: i64 = storage.iter().product();
    let given = !strides.is_empty();
    let view = Tensor {
        dims,
        strides,
        offset,
        dtype,
        data,
    };
    let view = if given { view } else { view.ignoring_strides() };
    let last = view
        .dims
        .iter()
        .zip(&view.strides)
        .map(|(dim, stride)| (*dim as i64 - 1).max(0) * stride.max(&0))
        .sum::<i64>()
        + offset;
    if view.elements() != 0 && (offset < 0 || last >= elements) {
        return Err(invalid(format!(
            "the view reaches element {last} (offset {offset}) of a storage of {elements}"
        )));
    }
    Ok(view)
}

export! {
    status {
        fn aclDestroyTensor(tensor: *const aclTensor) {
            sim().descriptors.tensors.remove(tensor as u64).map(drop)
        }
        fn aclDestroyIntArray(array: *const aclIntArray) {
            sim().descriptors.arrays.remove(array as u64).map(drop)
        }
        fn aclDestroyAclOpExecutor(executor: *mut aclOpExecutor) {
            sim().descriptors.executors.remove(executor as u64).map(drop)
        }
        fn aclDestroyScalar(scalar: *const aclScalar) {
            sim().descriptors.scalars.remove(scalar as u64).map(drop)
        }
        fn aclDestroyTensorList(array: *const aclTensorList) {
            let mut state = sim();
            let tensors = state.descriptors.lists.remove(array as u64)?;
            // The list owns its tensors.
            tensors.into_iter().try_for_each(|tensor| state.descriptors.tensors.remove(tensor).map(drop))
        }
        fn aclnnRotaryPositionEmbeddingGetWorkspaceSize(x: *const aclTensor, cos: *const aclTensor, sin: *const aclTensor, mode: i64, out: *mut aclTensor, workspaceSize: *mut u64, executor: *mut *mut aclOpExecutor) {
            // SAFETY: out parameters, null or valid by the C declaration.
            unsafe { give(workspaceSize, executor, || plan_forward(get(x, "x")?, get(cos, "cos")?, get(sin, "sin")?, mode, get(out, "out")?)) }
        }
        fn aclnnRotaryPositionEmbedding(workspace: *mut c_void, workspaceSize: u64, executor: *mut aclOpExecutor, stream: *mut c_void) {
            execute("aclnnRotaryPositionEmbedding", workspace as u64, workspaceSize, executor as u64, stream as u64)
        }
        fn aclnnRotaryPositionEmbeddingGradGetWorkspaceSize(dy: *const aclTensor, cos: *const aclTensor, sin: *const aclTensor, xOptional: *const aclTensor, mode: i64, dxOut: *mut aclTensor, dcosOut: *mut aclTensor, dsinOut: *mut aclTensor, workspaceSize: *mut u64, executor: *mut *mut aclOpExecutor) {
            // SAFETY: out parameters, null or valid by the C declaration.
            unsafe {
                give(workspaceSize, executor, || {
                    let x = optional_tensor(xOptional as u64, "xOptional")?;
                    let angles = match &x {
                        Some(_) => Some((get(dcosOut, "dcosOut")?, get(dsinOut, "dsinOut")?)),
                        None => None,
                    };
                    plan_gradient(GradTensors { dy: get(dy, "dy")?, cos: get(cos, "cos")?, sin: get(sin, "sin")?, x, dx: get(dxOut, "dxOut")?, angles }, mode)
                })
            }
        }
        fn aclnnRotaryPositionEmbeddingGrad(workspace: *mut c_void, workspaceSize: u64, executor: *mut aclOpExecutor, stream: *mut c_void) {
            execute("aclnnRotaryPositionEmbeddingGrad", workspace as u64, workspaceSize, executor as u64, stream as u64)
        }
        fn aclnnRopeWithSinCosCacheGetWorkspaceSize(positions: *const aclTensor, queryIn: *const aclTensor, keyIn: *const aclTensor, cosSinCache: *const aclTensor, mropeSection: *const aclIntArray, headSize: i64, isNeoxStyle: bool, queryOut: *mut aclTensor, keyOut: *mut aclTensor, workspaceSize: *mut u64, executor: *mut *mut aclOpExecutor) {
            // SAFETY: out parameters, null or valid by the C declaration.
            unsafe {
                give(workspaceSize, executor, || plan_cached(Parameters {
                    operator: "aclnnRopeWithSinCosCache",
                    positions: get(positions, "positions")?, query: get(queryIn, "queryIn")?, key: get(keyIn, "keyIn")?,
                    cos_sin: get(cosSinCache, "cosSinCache")?, sections: int_array(mropeSection)?, head_size: headSize, neox: isNeoxStyle,
                    cache_mode: None, query_out: get(queryOut, "queryOut")?, key_out: get(keyOut, "keyOut")?,
                }))
            }
        }
        fn aclnnRopeWithSinCosCache(workspace: *mut c_void, workspaceSize: u64, executor: *mut aclOpExecutor, stream: *mut c_void) {
            execute("aclnnRopeWithSinCosCache", workspace as u64, workspaceSize, executor as u64, stream as u64)
        }
        fn aclnnRopeWithSinCosCacheV2GetWorkspaceSize(positions: *const aclTensor, queryIn: *const aclTensor, keyIn: *const aclTensor, cosSinCache: *const aclTensor, mropeSection: *const aclIntArray, headSize: i64, isNeoxStyle: bool, cacheMode: i64, queryOut: *mut aclTensor, keyOut: *mut aclTensor, workspaceSize: *mut u64, executor: *mut *mut aclOpExecutor) {
            // SAFETY: out parameters, null or valid by the C declaration.
            unsafe {
                give(workspaceSize, executor, || plan_cached(Parameters {
                    operator: "aclnnRopeWithSinCosCacheV2",
                    positions: get(positions, "positions")?, query: get(queryIn, "queryIn")?, key: get(keyIn, "keyIn")?,
                    cos_sin: get(cosSinCache, "cosSinCache")?, sections: int_array(mropeSection)?, head_size: headSize, neox: isNeoxStyle,
                    cache_mode: Some(cacheMode), query_out: get(queryOut, "queryOut")?, key_out: get(keyOut, "keyOut")?,
                }))
            }
        }
        fn aclnnRopeWithSinCosCacheV2(workspace: *mut c_void, workspaceSize: u64, executor: *mut aclOpExecutor, stream: *mut c_void) {
            execute("aclnnRopeWithSinCosCacheV2", workspace as u64, workspaceSize, executor as u64, stream as u64)
        }
        fn aclnnApplyRotaryPosEmbGetWorkspaceSize(queryRef: *mut aclTensor, keyRef: *mut aclTensor, cos: *const aclTensor, sin: *const aclTensor, layout: i64, workspaceSize: *mut u64, executor: *mut *mut aclOpExecutor) {
            // SAFETY: out parameters, null or valid by the C declaration.
            unsafe { give(workspaceSize, executor, || plan_apply("aclnnApplyRotaryPosEmb", get(queryRef, "queryRef")?, get(keyRef, "keyRef")?, get(cos, "cos")?, get(sin, "sin")?, layout, "half")) }
        }
        fn aclnnApplyRotaryPosEmb(workspace: *mut c_void, workspaceSize: u64, executor: *mut aclOpExecutor, stream: *mut c_void) {
            execute("aclnnApplyRotaryPosEmb", workspace as u64, workspaceSize, executor as u64, stream as u64)
        }
        fn aclnnApplyRotaryPosEmbV2GetWorkspaceSize(queryRef: *mut aclTensor, keyRef: *mut aclTensor, cos: *const aclTensor, sin: *const aclTensor, layout: i64, rotaryMode: *mut c_char, workspaceSize: *mut u64, executor: *mut *mut aclOpExecutor) {
            // SAFETY: null or a C string by the C declaration.
            let mode = unsafe { get_text(rotaryMode, "rotaryMode") }.map_err(|failure| Failure::new(ACLNN_NULLPTR, failure.message))?;
            // SAFETY: out parameters, null or valid by the C declaration.
            unsafe { give(workspaceSize, executor, || plan_apply("aclnnApplyRotaryPosEmbV2", get(queryRef, "queryRef")?, get(keyRef, "keyRef")?, get(cos, "cos")?, get(sin, "sin")?, layout, &mode)) }
        }
        fn aclnnApplyRotaryPosEmbV2(workspace: *mut c_void, workspaceSize: u64, executor: *mut aclOpExecutor, stream: *mut c_void) {
            execute("aclnnApplyRotaryPosEmbV2", workspace as u64, workspaceSize, executor as u64, stream as u64)
        }
        fn aclnnInterleaveRopeGetWorkspaceSize(x: *const aclTensor, cos: *const aclTensor, sin: *const aclTensor, out: *mut aclTensor, workspaceSize: *mut u64, executor: *mut *mut aclOpExecutor) {
            // SAFETY: out parameters, null or valid by the C declaration.
            unsafe { give(workspaceSize, executor, || plan_interleave(get(x, "x")?, get(cos, "cos")?, get(sin, "sin")?, get(out, "out")?)) }
        }
        fn aclnnInterleaveRope(workspace: *mut c_void, workspaceSize: u64, executor: *mut aclOpExecutor, stream: *mut c_void) {
            execute("aclnnInterleaveRope", workspace as u64, workspaceSize, executor as u64, stream as u64)
        }
    }
    value {
        fn aclCreateTensor(viewDims: *const i64, viewDimsNum: u64, dataType: i32, stride: *const i64, offset: i64, format: i32, storageDims: *const i64, storageDimsNum: u64, tensorData: *mut c_void) -> *mut aclTensor {
            created("aclCreateTensor", injected("aclCreateTensor").and_then(|()| {
                // SAFETY: lists of the given lengths by the C declaration; the strides are as many as the dimensions.
                let (dims, strides, storage) = unsafe {
                    (list(viewDims, viewDimsNum, "viewDims")?, list(stride, if stride.is_null() { 0 } else { viewDimsNum }, "stride")?, list(storageDims, storageDimsNum, "storageDims")?)
                };
                let described = describe(dims, dataType, strides, offset, format, storage, tensorData as u64)?;
                Ok(sim().descriptors.tensors.insert(described))
            }))
        }
        fn aclCreateIntArray(value: *const i64, size: u64) -> *mut aclIntArray {
            created("aclCreateIntArray", injected("aclCreateIntArray").and_then(|()| {
                // SAFETY: a list of the given length by the C declaration.
                let values = unsafe { list(value, size, "value") }?;
                Ok(sim().descriptors.arrays.insert(values))
            }))
        }
        fn aclCreateScalar(value: *mut c_void, dataType: i32) -> *mut aclScalar {
            created("aclCreateScalar", injected("aclCreateScalar").and_then(|()| {
                let dtype = DataType::from_code(dataType).ok_or_else(|| Failure::new(ACLNN_PARAM_INVALID, format!("data type {dataType} does not exist")))?;
                if value.is_null() {
                    return Err(Failure::new(ACLNN_NULLPTR, "value is null"));
                }
                // SAFETY: not null, and one element of the type by the C declaration.
                let bytes = unsafe { read_host(value as usize, dtype.bytes() as usize) };
                Ok(sim().descriptors.scalars.insert(bytes))
            }))
        }
        fn aclCreateTensorList(value: *const *const aclTensor, size: u64) -> *mut aclTensorList {
            created("aclCreateTensorList", injected("aclCreateTensorList").and_then(|()| {
                // SAFETY: a list of the given length by the C declaration.
                let tensors: Vec<u64> = unsafe { list(value, size, "value") }?.into_iter().map(|pointer| pointer as u64).collect();
                let mut state = sim();
                for tensor in &tensors {
                    state.descriptors.tensors.get(*tensor)?;
                }
                Ok(state.descriptors.lists.insert(tensors))
            }))
        }
    }
}
