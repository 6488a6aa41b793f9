//! Operator descriptors (`libnnopbase.so`) and the rotary operators (`libopapi*.so`).

use super::types::{
    aclDataType, aclFormat, aclIntArray, aclOpExecutor, aclScalar, aclTensor, aclTensorList,
    aclnnStatus, aclrtStream,
};
use std::ffi::{c_char, c_void};

super::functions! {
    /// Constructors and destructors of operator descriptors.
    #[allow(missing_docs, reason = "the vendor's documentation describes its functions")]
    AclMeta {
        required {
            fn aclCreateTensor(view_dims: *const i64, view_rank: u64, dtype: aclDataType, strides: *const i64, offset: i64, format: aclFormat, storage_dims: *const i64, storage_rank: u64, data: *mut c_void) -> *mut aclTensor;
            fn aclDestroyTensor(tensor: *const aclTensor) -> aclnnStatus;
            fn aclCreateIntArray(values: *const i64, count: u64) -> *mut aclIntArray;
            fn aclDestroyIntArray(array: *const aclIntArray) -> aclnnStatus;
        }
        optional {
            fn aclDestroyAclOpExecutor(executor: *mut aclOpExecutor) -> aclnnStatus;
            fn aclCreateScalar(value: *mut c_void, dtype: aclDataType) -> *mut aclScalar;
            fn aclDestroyScalar(scalar: *const aclScalar) -> aclnnStatus;
            fn aclCreateTensorList(tensors: *const *const aclTensor, count: u64) -> *mut aclTensorList;
            fn aclDestroyTensorList(list: *const aclTensorList) -> aclnnStatus;
            fn aclSetAclOpExecutorRepeatable(executor: *mut aclOpExecutor) -> aclnnStatus;
            fn aclSetInputTensorAddr(executor: *mut aclOpExecutor, index: usize, tensor: *mut aclTensor, address: *mut c_void) -> aclnnStatus;
            fn aclSetOutputTensorAddr(executor: *mut aclOpExecutor, index: usize, tensor: *mut aclTensor, address: *mut c_void) -> aclnnStatus;
        }
    }
}

super::functions! {
    /// The stock rotary operators. Each has two phases: plan, then run. An installation may lack
    /// any of them.
    #[allow(missing_docs, reason = "the vendor's documentation describes its functions")]
    AclOps {
        required {}
        optional {
            fn aclnnRotaryPositionEmbeddingGetWorkspaceSize(x: *const aclTensor, cos: *const aclTensor, sin: *const aclTensor, mode: i64, out: *mut aclTensor, workspace_bytes: *mut u64, executor: *mut *mut aclOpExecutor) -> aclnnStatus;
            fn aclnnRotaryPositionEmbedding(workspace: *mut c_void, workspace_bytes: u64, executor: *mut aclOpExecutor, stream: aclrtStream) -> aclnnStatus;
            fn aclnnRotaryPositionEmbeddingGradGetWorkspaceSize(dy: *const aclTensor, cos: *const aclTensor, sin: *const aclTensor, x: *const aclTensor, mode: i64, dx: *mut aclTensor, dcos: *mut aclTensor, dsin: *mut aclTensor, workspace_bytes: *mut u64, executor: *mut *mut aclOpExecutor) -> aclnnStatus;
            fn aclnnRotaryPositionEmbeddingGrad(workspace: *mut c_void, workspace_bytes: u64, executor: *mut aclOpExecutor, stream: aclrtStream) -> aclnnStatus;
            fn aclnnRopeWithSinCosCacheGetWorkspaceSize(positions: *const aclTensor, query: *const aclTensor, key: *const aclTensor, cos_sin_cache: *const aclTensor, sections: *const aclIntArray, head_size: i64, is_neox_style: bool, query_out: *mut aclTensor, key_out: *mut aclTensor, workspace_bytes: *mut u64, executor: *mut *mut aclOpExecutor) -> aclnnStatus;
            fn aclnnRopeWithSinCosCache(workspace: *mut c_void, workspace_bytes: u64, executor: *mut aclOpExecutor, stream: aclrtStream) -> aclnnStatus;
            fn aclnnRopeWithSinCosCacheV2GetWorkspaceSize(positions: *const aclTensor, query: *const aclTensor, key: *const aclTensor, cos_sin_cache: *const aclTensor, sections: *const aclIntArray, head_size: i64, is_neox_style: bool, cache_mode: i64, query_out: *mut aclTensor, key_out: *mut aclTensor, workspace_bytes: *mut u64, executor: *mut *mut aclOpExecutor) -> aclnnStatus;
            fn aclnnRopeWithSinCosCacheV2(workspace: *mut c_void, workspace_bytes: u64, executor: *mut aclOpExecutor, stream: aclrtStream) -> aclnnStatus;
            fn aclnnApplyRotaryPosEmbGetWorkspaceSize(query: *mut aclTensor, key: *mut aclTensor, cos: *const aclTensor, sin: *const aclTensor, layout: i64, workspace_bytes: *mut u64, executor: *mut *mut aclOpExecutor) -> aclnnStatus;
            fn aclnnApplyRotaryPosEmb(workspace: *mut c_void, workspace_bytes: u64, executor: *mut aclOpExecutor, stream: aclrtStream) -> aclnnStatus;
            fn aclnnApplyRotaryPosEmbV2GetWorkspaceSize(query: *mut aclTensor, key: *mut aclTensor, cos: *const aclTensor, sin: *const aclTensor, layout: i64, rotary_mode: *mut c_char, workspace_bytes: *mut u64, executor: *mut *mut aclOpExecutor) -> aclnnStatus;
            fn aclnnApplyRotaryPosEmbV2(workspace: *mut c_void, workspace_bytes: u64, executor: *mut aclOpExecutor, stream: aclrtStream) -> aclnnStatus;
            fn aclnnInterleaveRopeGetWorkspaceSize(x: *const aclTensor, cos: *const aclTensor, sin: *const aclTensor, out: *mut aclTensor, workspace_bytes: *mut u64, executor: *mut *mut aclOpExecutor) -> aclnnStatus;
            fn aclnnInterleaveRope(workspace: *mut c_void, workspace_bytes: u64, executor: *mut aclOpExecutor, stream: aclrtStream) -> aclnnStatus;
        }
    }
}
