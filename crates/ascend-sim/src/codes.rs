//! Status codes of the runtime, by their documented values.

use std::fmt;

/// A call or a task that failed: the vendor's code and what happened.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) code: i32,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn new(code: i32, message: impl fmt::Display) -> Self {
        Self {
            code,
            message: message.to_string(),
        }
    }
}

pub(crate) type Outcome<T = ()> = std::result::Result<T, Failure>;

/// `ACL_SUCCESS`.
pub(crate) const SUCCESS: i32 = 0;
/// A call came before `aclInit`.
pub(crate) const UNINITIALIZED: i32 = 100001;
/// `aclInit` was called twice.
pub(crate) const REPEAT_INITIALIZE: i32 = 100002;
/// Something inside the simulator broke.
pub(crate) const INTERNAL_ERROR: i32 = 500000;
/// A parameter of a runtime call is invalid.
pub(crate) const RT_PARAM_INVALID: i32 = 107000;
/// The device id does not exist or is not in use.
pub(crate) const RT_INVALID_DEVICE: i32 = 107001;
/// The calling thread has no current device.
pub(crate) const RT_CONTEXT_NULL: i32 = 107002;
/// The stream belongs to another device than the thread's current one.
pub(crate) const RT_STREAM_CONTEXT: i32 = 107003;
/// A handle was destroyed, is of another kind, or never was one.
pub(crate) const RT_INVALID_HANDLE: i32 = 107017;
/// The feature is not supported.
pub(crate) const RT_FEATURE_NOT_SUPPORTED: i32 = 207000;
/// The device has not enough memory.
pub(crate) const RT_MEMORY_ALLOCATION: i32 = 207001;
/// A kernel of that name is not in the binary.
pub(crate) const RT_KERNEL_NOT_FOUND: i32 = 507027;
/// A vector kernel raised an exception: here, any violation found while it ran.
pub(crate) const RT_VECTOR_CORE_EXCEPTION: i32 = 507035;
/// A kernel raised an exception on the device: here, an operator that met a wrong address or index.
pub(crate) const RT_AICORE_EXCEPTION: i32 = 507015;
/// Waiting for a stream took longer than allowed.
pub(crate) const RT_STREAM_SYNC_TIMEOUT: i32 = 507046;
/// A collective waited too long for another rank. The vendor's documents name no code for it.
pub(crate) const RT_COLLECTIVE_TIMEOUT: i32 = 507048;
/// The ranks of a collective differ in what they call. The vendor's documents name no code for it.
pub(crate) const RT_COLLECTIVE_MISMATCH: i32 = 507049;
/// A parameter of a collective call is invalid.
pub(crate) const HCCL_E_PARA: i32 = 1;
/// A pointer of a collective call is null.
pub(crate) const HCCL_E_PTR: i32 = 2;
/// A communicator finds no memory.
pub(crate) const HCCL_E_MEMORY: i32 = 3;
/// Something inside the collective library broke.
pub(crate) const HCCL_E_INTERNAL: i32 = 4;
/// The collective library does not support it here.
pub(crate) const HCCL_E_NOT_SUPPORT: i32 = 5;
/// A rank did not come in time.
pub(crate) const HCCL_E_TIMEOUT: i32 = 9;
/// The root cannot be reached.
pub(crate) const HCCL_E_TCP_CONNECT: i32 = 11;
/// A call of the runtime failed in the collective library.
pub(crate) const HCCL_E_RUNTIME: i32 = 15;
/// The communicator is in use.
pub(crate) const HCCL_E_AGAIN: i32 = 20;
/// An operator got a null pointer.
pub(crate) const ACLNN_NULLPTR: i32 = 161001;
/// An operator got a parameter outside its documented limits.
pub(crate) const ACLNN_PARAM_INVALID: i32 = 161002;
/// An operator's tiling refused its shapes.
pub(crate) const ACLNN_TILING_ERROR: i32 = 561002;
/// An operator broke inside: a step of its work refused what the checks before it had let through.
pub(crate) const ACLNN_INNER_NULLPTR: i32 = 561103;
/// An operator broke inside: here, something that it does not support.
pub(crate) const ACLNN_INNER_ERROR: i32 = 561000;
