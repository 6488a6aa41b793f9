//! Collectives between devices: `libhccl.so`, in newer releases also `libhcomm.so`.
//!
//! # Source
//! `hccl/hccl.h` of hicann/hccl at 09300b70, `hccl/hccl_comm.h` and `hccl/hccl_types.h` of
//! hicann/hcomm at 2b912e7d.

use std::ffi::{c_char, c_void};

use super::types::{
    HcclComm, HcclCommConfig, HcclConfig, HcclConfigValue, HcclDataType, HcclReduceOp, HcclResult,
    HcclRootInfo, aclrtStream,
};

super::functions! {
    /// Functions of the collective library. Those that older installations lack are optional.
    #[allow(missing_docs, reason = "the vendor's documentation describes its functions")]
    Hccl {
        required {
            fn HcclGetRootInfo(root: *mut HcclRootInfo) -> HcclResult;
            fn HcclCommInitRootInfo(
                ranks: u32, root: *const HcclRootInfo, rank: u32, comm: *mut HcclComm
            ) -> HcclResult;
            fn HcclCommDestroy(comm: HcclComm) -> HcclResult;
            fn HcclGetErrorString(code: HcclResult) -> *const c_char;
            fn HcclAllReduce(
                send: *mut c_void, receive: *mut c_void, count: u64, dtype: HcclDataType,
                op: HcclReduceOp, comm: HcclComm, stream: aclrtStream
            ) -> HcclResult;
            fn HcclReduceScatter(
                send: *mut c_void, receive: *mut c_void, receive_count: u64, dtype: HcclDataType,
                op: HcclReduceOp, comm: HcclComm, stream: aclrtStream
            ) -> HcclResult;
            fn HcclAllGather(
                send: *mut c_void, receive: *mut c_void, send_count: u64, dtype: HcclDataType,
                comm: HcclComm, stream: aclrtStream
            ) -> HcclResult;
            fn HcclAlltoAllV(
                send: *const c_void, send_counts: *const c_void, send_displs: *const c_void,
                send_dtype: HcclDataType, receive: *const c_void, receive_counts: *const c_void,
                receive_displs: *const c_void, receive_dtype: HcclDataType, comm: HcclComm,
                stream: aclrtStream
            ) -> HcclResult;
        }
        optional {
            fn HcclCommInitRootInfoConfig(
                ranks: u32, root: *const HcclRootInfo, rank: u32, config: *const HcclCommConfig,
                comm: *mut HcclComm
            ) -> HcclResult;
            fn HcclGetCommConfigCapability() -> u32;
            fn HcclSetConfig(config: HcclConfig, value: HcclConfigValue) -> HcclResult;
        }
    }
}
