//! A device's cores and their memory.

use crate::error::{AscendError, Result};

/// Architecture of the vector cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Architecture {
    /// Atlas A2 and A3 (910B, 910C).
    Dav2201,
    /// Ascend 950.
    Dav3510,
}

impl Architecture {
    /// The compiler's name of the architecture.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Dav2201 => "dav-2201",
            Self::Dav3510 => "dav-3510",
        }
    }

    /// Unified buffer that a kernel may use by default: 192 KiB less 256 bytes and the compiler's
    /// 8 KiB, and 256 KiB less 8 KiB.
    const fn usable_ub_bytes(self) -> u32 {
        match self {
            Self::Dav2201 => 192 * 1024 - 256 - 8 * 1024,
            Self::Dav3510 => 256 * 1024 - 8 * 1024,
        }
    }
}

/// The properties of a device that tiling needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Machine {
    /// Vector cores.
    pub(crate) vector_cores: u32,
    /// Bytes of unified buffer that a kernel may use on each.
    pub(crate) ub_bytes: u32,
    /// Architecture.
    pub(crate) architecture: Architecture,
}

impl Machine {
    /// Creates a machine from the device's attributes. The unified buffer is the architecture's, or
    /// the reported size if smaller. Without an architecture number, the reported size decides:
    /// only Ascend 950 reports it.
    ///
    /// # Errors
    /// [`AscendError::InvalidArgument`] for an architecture that the kernels do not support, or
    /// sizes that make no sense.
    pub(crate) fn new(
        vector_cores: i64,
        ub_bytes: Option<i64>,
        architecture: Option<i64>,
    ) -> Result<Self> {
        const OP: &str = "machine";
        const LARGEST_2201: i64 = 192 * 1024;
        let architecture = match architecture {
            Some(2201) => Architecture::Dav2201,
            Some(3510) => Architecture::Dav3510,
            None if ub_bytes.is_some_and(|n| n > LARGEST_2201) => Architecture::Dav3510,
            None => Architecture::Dav2201,
            Some(other) => {
                return Err(AscendError::argument(
                    OP,
                    "architecture",
                    "2201 or 3510",
                    other,
                ));
            }
        };
        let cores = u32::try_from(vector_cores)
            .ok()
            .filter(|n| (1..=65_535).contains(n));
        let cores = cores
            .ok_or_else(|| AscendError::argument(OP, "vector cores", "1 to 65535", vector_cores))?;
        let usable = architecture.usable_ub_bytes();
        let reported = ub_bytes.map_or(Ok(usable), |bytes| {
            let reported = u32::try_from(bytes).ok().filter(|&n| n >= 16 * 1024);
            reported.ok_or_else(|| {
                AscendError::argument(OP, "unified buffer", "at least 16 KiB", bytes)
            })
        })?;
        Ok(Self {
            vector_cores: cores,
            ub_bytes: reported.min(usable),
            architecture,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_architectures_are_refused() {
        assert!(Machine::new(40, None, Some(1001)).is_err());
        assert!(Machine::new(0, None, Some(2201)).is_err());
    }

    #[test]
    fn the_unified_buffer_is_the_architectures_unless_the_device_has_less() {
        let of = |ub, architecture| {
            let machine = Machine::new(64, ub, architecture).expect("valid");
            (machine.architecture, machine.ub_bytes)
        };
        let (a2, a5) = (Architecture::Dav2201, Architecture::Dav3510);
        assert_eq!(of(None, Some(2201)), (a2, 184 * 1024 - 256));
        assert_eq!(of(None, None), (a2, 184 * 1024 - 256));
        assert_eq!(of(Some(216 * 1024), Some(3510)), (a5, 216 * 1024));
        assert_eq!(of(Some(216 * 1024), None), (a5, 216 * 1024));
        assert_eq!(of(None, Some(3510)), (a5, 248 * 1024));
        assert!(Machine::new(64, Some(1), Some(3510)).is_err());
    }
}
