//! The simulated machine: the numbers that a program can query.

use std::ffi::CStr;

/// The properties that the simulated device reports and enforces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Name that `aclrtGetSocName` returns.
    pub soc_name: &'static CStr,
    /// `__NPU_ARCH__` that kernels must be compiled for: 2201 or 3510.
    pub architecture: u32,
    /// Number of devices.
    pub devices: u32,
    /// Vector cores per device (attribute 201).
    pub vector_cores: u32,
    /// Bytes of unified buffer per vector core that attribute 204 reports: those that SIMT code may
    /// use, 0 where there is none.
    pub ub_bytes: u64,
    /// Bytes of the unified buffer that a kernel may use.
    pub ub_usable_bytes: u64,
    /// Device memory in bytes (attribute 301), also the limit of what can be allocated.
    pub memory_bytes: u64,
    /// L2 cache in bytes (attribute 302).
    pub l2_bytes: u64,
    /// True if conversions to floating-point types saturate (bit 48 of CTRL is 0, the documented
    /// default): infinity becomes the largest finite number and NaN becomes zero.
    pub saturate: bool,
    /// True if kernel binaries hold a variable for the address of the flags between cores (feature
    /// 2 of `.ascend.meta`). Where they do not, it is the first argument of a MIX kernel, which
    /// only `aclrtKernelArgsFinalize` fills.
    pub sync_in_binary: bool,
    /// True if kernel binaries describe their parameters, as `aclrtLaunchKernelWithArgsArray`
    /// needs.
    pub describes_parameters: bool,
}

impl Machine {
    /// Atlas A2: dav-2201, 40 vector cores. The usable buffer excludes the 256 bytes and the 8 KiB
    /// that the toolchain reserves by default.
    ///
    /// The variable `ASCEND_SIM_CORES` is another number of vector cores, here and in
    /// [`ascend_950`](Self::ascend_950).
    ///
    /// # Panics
    /// If `ASCEND_SIM_CORES` is no number.
    pub fn ascend_910b() -> Self {
        Self {
            soc_name: c"Ascend910B3",
            architecture: 2201,
            devices: 1,
            vector_cores: cores(40),
            ub_bytes: 0,
            ub_usable_bytes: 184 * 1024 - 256,
            memory_bytes: 64 << 30,
            l2_bytes: 192 << 20,
            saturate: true,
            sync_in_binary: false,
            describes_parameters: true,
        }
    }

    /// Ascend 950: dav-3510, 64 vector cores.
    pub fn ascend_950() -> Self {
        Self {
            soc_name: c"Ascend950PR_9599",
            architecture: 3510,
            vector_cores: cores(64),
            ub_bytes: 216 * 1024,
            ub_usable_bytes: 248 * 1024,
            ..Self::ascend_910b()
        }
    }
}

fn cores(usual: u32) -> u32 {
    let wanted = std::env::var("ASCEND_SIM_CORES").ok();
    wanted.map_or(usual, |n| n.parse().expect("ASCEND_SIM_CORES is a number"))
}

impl Default for Machine {
    /// `ascend_910b`, or what the variable `ASCEND_SIM_MACHINE` names in its place: `ascend_950`.
    fn default() -> Self {
        match std::env::var("ASCEND_SIM_MACHINE").as_deref() {
            Ok("ascend_950") => Self::ascend_950(),
            _ => Self::ascend_910b(),
        }
    }
}
