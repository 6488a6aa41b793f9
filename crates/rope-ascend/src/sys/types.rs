//! Handles, values and structures.

use std::ffi::{c_char, c_void};

use super::describe::{Field, Record, spell};

/// Result code of a runtime call: 0 is success.
pub type aclError = i32;
/// Result code of an operator call: 0 is success.
pub type aclnnStatus = i32;
/// A stream: a queue of work on one device.
pub type aclrtStream = *mut c_void;
/// A point of a stream that others can wait for.
pub type aclrtEvent = *mut c_void;
/// A loaded kernel binary.
pub type aclrtBinHandle = *mut c_void;
/// A kernel in a loaded binary.
pub type aclrtFuncHandle = *mut c_void;
/// The argument list of a launch, one per thread.
pub type aclrtArgsHandle = *mut c_void;
/// An argument in such a list.
pub type aclrtParamHandle = *mut c_void;
/// A program of the run-time compiler.
pub type aclrtcProg = *mut c_void;
/// One rank's handle on a group of communicating devices.
pub type HcclComm = *mut c_void;

macro_rules! opaque {
    ($($(#[$meta:meta])* $name:ident),* $(,)?) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[derive(Debug)]
            pub struct $name {
                _private: [u8; 0],
            }
            spell! { $name => stringify!($name) }
        )*
    };
}

opaque! {
    /// A tensor descriptor of the operator library.
    aclTensor,
    /// A list of integers of the operator library.
    aclIntArray,
    /// A number of the operator library.
    aclScalar,
    /// A list of tensor descriptors of the operator library; it owns them.
    aclTensorList,
    /// A planned operator call.
    aclOpExecutor,
    /// The attributes of a launch; this crate passes none.
    aclrtLaunchKernelCfg,
}

/// Declares C enumerations as transparent integers, with the vendor's name of each value.
macro_rules! enumerations {
    ($(
        $(#[$meta:meta])*
        $name:ident { $( $(#[$vm:meta])* $value:ident = $number:literal as $vendor:literal, )* }
    )*) => {
        $(
            $(#[$meta])*
            #[repr(transparent)]
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
            pub struct $name(pub i32);

            impl $name {
                $( $(#[$vm])* pub const $value: Self = Self($number); )*
            }

            spell! { $name => stringify!($name) }
        )*

        /// Name and value of every enumeration constant.
        pub(super) fn enumeration_constants() -> Vec<(&'static str, i64)> {
            vec![ $( $( ($vendor, $number), )* )* ]
        }
    };
}

enumerations! {
    /// Page size of device memory.
    aclrtMemMallocPolicy {
        /// Huge pages; ordinary pages if none are left.
        HUGE_FIRST = 0 as "ACL_MEM_MALLOC_HUGE_FIRST",
    }
    /// Direction of a copy.
    aclrtMemcpyKind {
        /// Host to device.
        HOST_TO_DEVICE = 1 as "ACL_MEMCPY_HOST_TO_DEVICE",
        /// Device to host.
        DEVICE_TO_HOST = 2 as "ACL_MEMCPY_DEVICE_TO_HOST",
        /// Device to device.
        DEVICE_TO_DEVICE = 3 as "ACL_MEMCPY_DEVICE_TO_DEVICE",
    }
    /// A property of a device.
    aclrtDevAttr {
        /// Number of vector cores.
        VECTOR_CORES = 201 as "ACL_DEV_ATTR_VECTOR_CORE_NUM",
        /// Bytes of unified buffer of one vector core.
        UB_BYTES = 204 as "ACL_DEV_ATTR_UBUF_PER_VECTOR_CORE",
        /// Architecture number, for example 2201.
        NPU_ARCH = 601 as "ACL_DEV_ATTR_NPU_ARCH",
    }
    /// A kind of memory.
    aclrtMemAttr {
        /// High-bandwidth memory of the device.
        HBM = 1 as "ACL_HBM_MEM",
    }
    /// Element type of a tensor descriptor.
    aclDataType {
        /// 32-bit float.
        FLOAT = 0 as "ACL_FLOAT",
        /// 16-bit IEEE float.
        FLOAT16 = 1 as "ACL_FLOAT16",
        /// 8-bit signed integer.
        INT8 = 2 as "ACL_INT8",
        /// 32-bit signed integer.
        INT32 = 3 as "ACL_INT32",
        /// 8-bit unsigned integer.
        UINT8 = 4 as "ACL_UINT8",
        /// 16-bit signed integer.
        INT16 = 6 as "ACL_INT16",
        /// 16-bit unsigned integer.
        UINT16 = 7 as "ACL_UINT16",
        /// 32-bit unsigned integer.
        UINT32 = 8 as "ACL_UINT32",
        /// 64-bit signed integer.
        INT64 = 9 as "ACL_INT64",
        /// 64-bit unsigned integer.
        UINT64 = 10 as "ACL_UINT64",
        /// 64-bit float.
        DOUBLE = 11 as "ACL_DOUBLE",
        /// Boolean of one byte.
        BOOL = 12 as "ACL_BOOL",
        /// bfloat16.
        BF16 = 27 as "ACL_BF16",
    }
    /// Memory format of a tensor descriptor.
    aclFormat {
        /// Plain, last axis fastest.
        ND = 2 as "ACL_FORMAT_ND",
    }
    /// Result code of a collective call. Its text is the library's own.
    HcclResult {
        /// Success.
        SUCCESS = 0 as "HCCL_SUCCESS",
    }
    /// Element type of a collective; numbered otherwise than [`aclDataType`].
    HcclDataType {
        /// 16-bit IEEE float.
        FP16 = 3 as "HCCL_DATA_TYPE_FP16",
        /// 32-bit float.
        FP32 = 4 as "HCCL_DATA_TYPE_FP32",
        /// bfloat16.
        BF16 = 11 as "HCCL_DATA_TYPE_BFP16",
    }
    /// The reduction of the ranks' elements.
    HcclReduceOp {
        /// By their sum.
        SUM = 0 as "HCCL_REDUCE_SUM",
    }
    /// A setting of the process.
    HcclConfig {
        /// True if sums are taken in a fixed order.
        DETERMINISTIC = 0 as "HCCL_DETERMINISTIC",
    }
    /// A part of [`HcclCommConfig`] that a release may not know yet.
    HcclCommConfigCapability {
        /// True if sums are taken in a fixed order.
        DETERMINISTIC = 1 as "HCCL_COMM_CONFIG_DETERMINISTIC",
        /// Seconds that an operation waits for other ranks.
        EXEC_TIMEOUT = 8 as "HCCL_COMM_CONFIG_EXEC_TIMEOUT",
    }
    /// Kind of an option of a binary load.
    aclrtBinaryLoadOptionType {
        /// The kind of core that the binary is for.
        MAGIC = 2 as "ACL_RT_BINARY_LOAD_OPT_MAGIC",
    }
}

impl aclDataType {
    /// Bytes of one element. A type not listed here counts as the widest (`ACL_COMPLEX128`), so
    /// that no operator receives less memory than it reads.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::DOUBLE | Self::INT64 | Self::UINT64 => 8,
            Self::FLOAT | Self::INT32 | Self::UINT32 => 4,
            Self::FLOAT16 | Self::BF16 | Self::INT16 | Self::UINT16 => 2,
            Self::INT8 | Self::UINT8 | Self::BOOL => 1,
            _ => 16,
        }
    }
}

/// The precision of matrix products of 32-bit floats. Not in the runtime's headers.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CubeMath(pub i8);

impl CubeMath {
    /// Computes in the type of the operands.
    pub const KEEP_DTYPE: Self = Self(0);
    /// Adds to products of 16 bits in f32, in one kernel.
    pub const USE_FP32_ADD: Self = Self(4);
}

spell! { CubeMath => "int8_t" }

/// Result codes that the crate acts on or explains.
pub mod code {
    macro_rules! codes {
        ($(
            $name:ident = $number:literal as $vendor:literal: $meaning:literal,
        )*) => {
            $( #[doc = $meaning] pub const $name: i32 = $number; )*

            /// The meaning of `code`, if known here.
            pub fn meaning(code: i32) -> &'static str {
                match code {
                    $( $number => $meaning, )*
                    161_001 => "an operator argument is a null pointer",
                    161_002 => "an operator argument is outside what the operator accepts",
                    176_000..=176_007 => "the run-time compiler refused the program",
                    361_001 => "a runtime call inside the operator failed",
                    561_002 => "the operator could not plan its tiling",
                    561_003 => "the operator's kernel was not found",
                    561_103 => "the operator does not support the specification",
                    _ => "no description known",
                }
            }

            /// The vendor's name and our value of every code.
            pub(in crate::sys) fn all() -> Vec<(&'static str, i64)> {
                vec![ $( ($vendor, $number), )* ]
            }
        };
    }

    /// An invalid operator argument. Not in the runtime's headers.
    pub const OPERATOR_PARAM_INVALID: i32 = 161_002;

    codes! {
        SUCCESS = 0 as "ACL_SUCCESS": "success",
        INVALID_PARAM = 100_000 as "ACL_ERROR_INVALID_PARAM": "a parameter is invalid",
        UNINITIALIZED = 100_001 as "ACL_ERROR_UNINITIALIZE": "the runtime is not initialised",
        REPEAT_INITIALIZE = 100_002 as "ACL_ERROR_REPEAT_INITIALIZE":
            "the runtime is already initialised",
        API_NOT_SUPPORT = 200_001 as "ACL_ERROR_API_NOT_SUPPORT": "the call is not supported",
        INTERNAL = 500_000 as "ACL_ERROR_INTERNAL_ERROR": "internal error of the runtime",
        RT_PARAM_INVALID = 107_000 as "ACL_ERROR_RT_PARAM_INVALID": "a parameter is invalid",
        RT_INVALID_DEVICE = 107_001 as "ACL_ERROR_RT_INVALID_DEVICEID":
            "there is no device of this number",
        RT_CONTEXT_NULL = 107_002 as "ACL_ERROR_RT_CONTEXT_NULL":
            "the calling thread has no current device",
        RT_INVALID_HANDLE = 107_017 as "ACL_ERROR_RT_INVALID_HANDLE":
            "the handle is stale or of another kind",
        RT_FEATURE_NOT_SUPPORT = 207_000 as "ACL_ERROR_RT_FEATURE_NOT_SUPPORT":
            "the device lacks the feature",
        RT_MEMORY_ALLOCATION = 207_001 as "ACL_ERROR_RT_MEMORY_ALLOCATION": "out of memory",
        RT_NO_DEVICE = 207_004 as "ACL_ERROR_RT_NO_DEVICE": "no device is attached",
        RT_AICORE_TIMEOUT = 507_014 as "ACL_ERROR_RT_AICORE_TIMEOUT":
            "an AI core did not finish in time",
        RT_AICORE_EXCEPTION = 507_015 as "ACL_ERROR_RT_AICORE_EXCEPTION":
            "an AI core raised an exception",
        RT_KERNEL_LOOKUP = 507_027 as "ACL_ERROR_RT_KERNEL_LOOKUP":
            "the binary has no kernel of this name",
        RT_VECTOR_CORE_TIMEOUT = 507_034 as "ACL_ERROR_RT_VECTOR_CORE_TIMEOUT":
            "a vector core did not finish in time",
        RT_VECTOR_CORE_EXCEPTION = 507_035 as "ACL_ERROR_RT_VECTOR_CORE_EXCEPTION":
            "a vector core raised an exception",
        RT_STREAM_SYNC_TIMEOUT = 507_046 as "ACL_ERROR_RT_STREAM_SYNC_TIMEOUT":
            "the stream did not finish in time",
    }
}

/// Declares structures together with their description.
macro_rules! structures {
    ($(
        $(#[$meta:meta])*
        $name:ident {
            $( $(#[$fm:meta])* $field:ident: $ty:ty as $vendor:literal, )*
        } size $size:literal align $align:literal
    )*) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[derive(Clone, Copy, Debug)]
            pub struct $name {
                $( $(#[$fm])* pub $field: $ty, )*
            }
            const _: () = assert!(size_of::<$name>() == $size && align_of::<$name>() == $align);
            spell! { $name => stringify!($name) }
        )*

        pub(super) fn all_records() -> Vec<Record> {
            vec![ $( Record {
                name: stringify!($name),
                size_bytes: size_of::<$name>(),
                align_bytes: align_of::<$name>(),
                fields: vec![ $( Field {
                    name: $vendor,
                    offset_bytes: std::mem::offset_of!($name, $field),
                }, )* ],
            }, )* ]
        }
    };
}

structures! {
    /// One option of a binary load; the value is a union of 16 bytes whose first word is used.
    aclrtBinaryLoadOption {
        /// The option.
        kind: aclrtBinaryLoadOptionType as "type",
        /// Its value, in the first word.
        value: [u32; 4] as "value",
    } size 20 align 4
    /// The options of a binary load.
    aclrtBinaryLoadOptions {
        /// First option.
        options: *mut aclrtBinaryLoadOption as "options",
        /// Number of options.
        count: usize as "numOpt",
    } size 16 align 8
    /// The rendezvous data of a communicator's ranks.
    HcclRootInfo {
        /// Bytes that only the library reads.
        internal: [c_char; HCCL_ROOT_INFO_BYTES] as "internal",
    } size 4108 align 1
    /// Value of an [`HcclConfig`]; a union of one member.
    HcclConfigValue {
        /// The value.
        value: i32 as "value",
    } size 4 align 4
    /// Settings of a communicator, version 10.
    HcclCommConfig {
        /// Size of the structure in bytes, magic word, version, and 8 bytes of zeros.
        header: [u32; 6] as "reserved",
        /// MB of each of its two buffers.
        buffer_mb: u32 as "hcclBufferSize",
        /// 1 if sums are taken in a fixed order.
        deterministic: u32 as "hcclDeterministic",
        /// Its name; empty for a generated name.
        name: [c_char; 128] as "hcclCommName",
        /// A text for messages.
        udi: [c_char; 128] as "hcclUdi",
        /// Where operations are expanded; 0 for the product's default.
        expansion: u32 as "hcclOpExpansionMode",
        /// Of RDMA.
        traffic_class: u32 as "hcclRdmaTrafficClass",
        /// Of RDMA.
        service_level: u32 as "hcclRdmaServiceLevel",
        /// The rank in the whole job, for messages.
        world_rank: u32 as "hcclWorldRankID",
        /// The job, for messages.
        job: u64 as "hcclJobID",
        /// Of graphs.
        zero_copy: u8 as "aclGraphZeroCopyEnable",
        /// Seconds that an operation waits for other ranks.
        exec_timeout_s: i32 as "hcclExecTimeOut",
        /// Algorithms by level; empty for automatic ones.
        algorithm: [c_char; 1600] as "hcclAlgo",
        /// By level.
        retry: [c_char; 50] as "hcclRetryEnable",
        /// Of retries.
        retry_parameters: [c_char; 128] as "hcclRetryParams",
        /// Of buffers that communicators share.
        buffer_name: [c_char; 128] as "hcclBufferName",
        /// Quality of service.
        qos: u32 as "hcclQos",
        /// GB of address space for symmetric memory.
        window_gb: u64 as "hcclSymWinMaxMemSizePerRank",
    } size 2240 align 8
}

/// Bytes of an [`HcclRootInfo`].
pub const HCCL_ROOT_INFO_BYTES: usize = 4108;
/// A field of [`HcclCommConfig`] that keeps its default.
pub const HCCL_NOT_SET: u32 = 0xffff_ffff;
const HCCL_COMM_CONFIG_MAGIC_WORD: u32 = 0xf0f0_f0f0;
const HCCL_COMM_CONFIG_VERSION: u32 = 10;

impl HcclCommConfig {
    /// The defaults, as the inline function of the vendor's header sets them.
    pub(crate) fn new() -> Self {
        let size = size_of::<Self>() as u32;
        Self {
            header: [
                size,
                0,
                HCCL_COMM_CONFIG_MAGIC_WORD,
                HCCL_COMM_CONFIG_VERSION,
                0,
                0,
            ],
            buffer_mb: HCCL_NOT_SET,
            deterministic: HCCL_NOT_SET,
            name: [0; 128],
            udi: [0; 128],
            expansion: 0,
            traffic_class: HCCL_NOT_SET,
            service_level: HCCL_NOT_SET,
            world_rank: 0,
            job: 0,
            zero_copy: 0,
            exec_timeout_s: -1,
            algorithm: [0; 1600],
            retry: [0; 50],
            retry_parameters: [0; 128],
            buffer_name: [0; 128],
            qos: HCCL_NOT_SET,
            window_gb: 16,
        }
    }
}

/// Magic number of a binary of vector kernels.
pub const BINARY_MAGIC_VECTOR: u32 = 0x4141_5246;

/// A stream takes its resources when it is created, not when work is queued.
pub const STREAM_FAST_LAUNCH: u32 = 1;
/// A wait for a stream polls, instead of sleeping until it is notified.
pub const STREAM_FAST_SYNC: u32 = 2;

pub(super) fn all_constants() -> Vec<(&'static str, i64)> {
    let mut all = enumeration_constants();
    all.extend(code::all());
    let magic = i64::from(BINARY_MAGIC_VECTOR);
    let not_set = i64::from(HCCL_NOT_SET);
    all.push(("HCCL_COMM_DETERMINISTIC_CONFIG_NOT_SET", not_set));
    all.push((
        "HCCL_COMM_CONFIG_MAGIC_WORD",
        HCCL_COMM_CONFIG_MAGIC_WORD.into(),
    ));
    all.push(("HCCL_COMM_CONFIG_VERSION", HCCL_COMM_CONFIG_VERSION.into()));
    all.push(("ACL_RT_BINARY_MAGIC_ELF_VECTOR_CORE", magic));
    all.push(("ACL_STREAM_FAST_LAUNCH", STREAM_FAST_LAUNCH.into()));
    all.push(("ACL_STREAM_FAST_SYNC", STREAM_FAST_SYNC.into()));
    all
}
