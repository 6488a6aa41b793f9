//! Operator descriptors (`libnnopbase.so`).

use std::ffi::c_void;

use super::types::{
    aclDataType, aclFormat, aclIntArray, aclOpExecutor, aclScalar, aclTensor, aclTensorList,
    aclnnStatus,
};

super::functions! {
    /// Constructors and destructors of operator descriptors.
    #[allow(missing_docs, reason = "the vendor's documentation describes its functions")]
    AclMeta {
        required {
            fn aclCreateTensor(
                view_dims: *const i64, view_rank: u64, dtype: aclDataType, strides: *const i64,
                offset: i64, format: aclFormat, storage_dims: *const i64, storage_rank: u64,
                data: *mut c_void
            ) -> *mut aclTensor;
            fn aclDestroyTensor(tensor: *const aclTensor) -> aclnnStatus;
            fn aclCreateIntArray(values: *const i64, count: u64) -> *mut aclIntArray;
            fn aclDestroyIntArray(array: *const aclIntArray) -> aclnnStatus;
        }
        optional {
            fn aclDestroyAclOpExecutor(executor: *mut aclOpExecutor) -> aclnnStatus;
            fn aclCreateScalar(value: *mut c_void, dtype: aclDataType) -> *mut aclScalar;
            fn aclDestroyScalar(scalar: *const aclScalar) -> aclnnStatus;
            fn aclCreateTensorList(
                tensors: *const *const aclTensor, count: u64
            ) -> *mut aclTensorList;
            fn aclDestroyTensorList(list: *const aclTensorList) -> aclnnStatus;
            fn aclSetAclOpExecutorRepeatable(executor: *mut aclOpExecutor) -> aclnnStatus;
            fn aclSetInputTensorAddr(
                executor: *mut aclOpExecutor, index: usize, tensor: *mut aclTensor,
                address: *mut c_void
            ) -> aclnnStatus;
            fn aclSetDynamicInputTensorAddr(
                executor: *mut aclOpExecutor, index: usize, member: usize,
                tensors: *mut aclTensorList, address: *mut c_void
            ) -> aclnnStatus;
            fn aclSetOutputTensorAddr(
                executor: *mut aclOpExecutor, index: usize, tensor: *mut aclTensor,
                address: *mut c_void
            ) -> aclnnStatus;
        }
    }
}
