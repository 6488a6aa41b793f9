//! Compiles the kernels at run time, if the installation can.
#![allow(unsafe_code, reason = "calls of the run-time compiler")]

use std::ffi::CString;

use crate::error::{AscendError, Result};
use crate::loader::Api;
use crate::safe::Architecture;
use crate::sys::{AclRtc, aclrtcProg};

/// The kernel sources, in the order in which they include each other; the last has the entry
/// points.
pub(crate) const KERNEL_SOURCES: [(&str, &str); 12] = [
    (
        "rope_tiling.h",
        include_str!("../../kernels/rope/rope_tiling.h"),
    ),
    (
        "rope_base.h",
        include_str!("../../kernels/rope/rope_base.h"),
    ),
    (
        "rope_matrix.h",
        include_str!("../../kernels/rope/rope_matrix.h"),
    ),
    (
        "rope_rotate.h",
        include_str!("../../kernels/rope/rope_rotate.h"),
    ),
    (
        "rope_angle_grad.h",
        include_str!("../../kernels/rope/rope_angle_grad.h"),
    ),
    (
        "rope_norm.h",
        include_str!("../../kernels/rope/rope_norm.h"),
    ),
    (
        "rope_low_rank.h",
        include_str!("../../kernels/rope/rope_low_rank.h"),
    ),
    (
        "rope_short_convolution.h",
        include_str!("../../kernels/rope/rope_short_convolution.h"),
    ),
    (
        "rope_swiglu.h",
        include_str!("../../kernels/rope/rope_swiglu.h"),
    ),
    (
        "rope_delta.h",
        include_str!("../../kernels/rope/rope_delta.h"),
    ),
    (
        "rope_update.h",
        include_str!("../../kernels/rope/rope_update.h"),
    ),
    ("rope.cpp", include_str!("../../kernels/rope/rope.cpp")),
];

/// Omits the device compiler's keywords for kinds of cores.
const NO_QUALIFIERS: &str = "#define ROPE_NO_QUALIFIERS\n";

/// The sources as one text: the compiler takes a single source, so inclusions among them go.
fn single_source() -> String {
    KERNEL_SOURCES
        .iter()
        .flat_map(|(_, text)| text.lines())
        .filter(|line| !line.starts_with("#include \"rope_") && !line.starts_with("#pragma once"))
        .flat_map(|line| [line, "\n"])
        .collect()
}

/// A compilation by `libacl_rtc`.
#[derive(Debug)]
pub(super) struct Compilation {
    pub(super) source: String,
    pub(super) options: Vec<String>,
}

impl Compilation {
    /// Of the kernels for `architecture`.
    pub(super) fn of(architecture: Architecture) -> Self {
        Self {
            source: single_source(),
            options: vec![format!("--npu-arch={}", architecture.name())],
        }
    }

    /// Builds the binary. If the compiler rejects the source, it is retried without keywords that
    /// the compiler may not know (see `rope.cpp`).
    ///
    /// # Errors
    /// [`AscendError::Load`] if the library is missing (CANN 8.5 and later have it), and
    /// [`AscendError::Compile`] with the compiler's log of the whole source.
    #[doc(alias = "aclrtcCompileProg")]
    pub(super) fn run(&self, api: &Api) -> Result<Vec<u8>> {
        let rtc = api.rtc.as_ref().map_err(Clone::clone)?;
        self.compile(rtc, &self.source).or_else(|error| {
            let source = format!("{NO_QUALIFIERS}{}", self.source);
            self.compile(rtc, &source).map_err(|_| error)
        })
    }

    fn compile(&self, rtc: &AclRtc, source: &str) -> Result<Vec<u8>> {
        let source = CString::new(source).unwrap_or_default();
        let mut program: aclrtcProg = std::ptr::null_mut();
        // SAFETY: nul-terminated texts that live through the call; no headers, so null lists; a
        // local receives the handle.
        let code = unsafe {
            (rtc.aclrtcCreateProg)(
                &raw mut program,
                source.as_ptr(),
                c"rope".as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null(),
            )
        };
        check(code, "the program could not be created")?;
        let binary = build(rtc, program, &self.options);
        // SAFETY: a live program, not used afterwards.
        let destroyed = unsafe { (rtc.aclrtcDestroyProg)(&raw mut program) };
        let binary = binary?;
        check(destroyed, "the program could not be destroyed")?;
        Ok(binary)
    }
}

fn build(rtc: &AclRtc, program: aclrtcProg, options: &[String]) -> Result<Vec<u8>> {
    let options = options.iter().map(|option| CString::new(option.as_str()));
    let options: Vec<CString> = options.map(Result::unwrap_or_default).collect();
    let pointers: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
    let count = i32::try_from(pointers.len()).unwrap_or(0);
    // SAFETY: a live program, and as many nul-terminated options as the count says.
    let code = unsafe { (rtc.aclrtcCompileProg)(program, count, pointers.as_ptr()) };
    if code != 0 {
        return Err(AscendError::Compile {
            code,
            log: log(rtc, program),
        });
    }
    let mut bytes = 0;
    // SAFETY: a live, compiled program; a local receives the size.
    let code = unsafe { (rtc.aclrtcGetBinDataSize)(program, &raw mut bytes) };
    check(code, "the compiler gave no size of the binary")?;
    let mut binary = vec![0_u8; bytes];
    // SAFETY: the buffer has the size that the compiler asked for.
    let code = unsafe { (rtc.aclrtcGetBinData)(program, binary.as_mut_ptr().cast()) };
    check(code, "the compiler gave no binary")?;
    Ok(binary)
}

fn check(code: i32, what: &str) -> Result<()> {
    if code == 0 {
        Ok(())
    } else {
        Err(AscendError::Compile {
            code,
            log: what.to_owned(),
        })
    }
}

fn log(rtc: &AclRtc, program: aclrtcProg) -> String {
    let mut bytes = 0;
    // SAFETY: a live program; a local receives the size.
    if unsafe { (rtc.aclrtcGetCompileLogSize)(program, &raw mut bytes) } != 0 || bytes == 0 {
        return "the compiler left no log".to_owned();
    }
    let mut text = vec![0_u8; bytes];
    // SAFETY: the buffer has the size that the compiler asked for.
    if unsafe { (rtc.aclrtcGetCompileLog)(program, text.as_mut_ptr().cast()) } != 0 {
        return "the compiler's log could not be read".to_owned();
    }
    String::from_utf8_lossy(&text)
        .trim_end_matches('\0')
        .trim()
        .to_owned()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "test code")]
mod tests {
    use super::*;

    /// The qualifier of an entry point, and the type that its first statement gives it.
    #[test]
    fn qualifier_and_task_type_of_each_kernel_agree() {
        let source = single_source();
        assert!(source.contains("#define ROPE_VECTOR __vector__\n"));
        assert!(source.contains("#define ROPE_MIX __mix__(1, 2)\n"));
        let (mut vector, mut mix) = (0, 0);
        for entry in source.split("extern \"C\" ").skip(1) {
            let (_, statements) = entry.split_once("KERNEL_TASK_TYPE_DEFAULT(").unwrap();
            if entry.starts_with("ROPE_VECTOR __global__ __aicore__ void ") {
                assert!(statements.starts_with("KERNEL_TYPE_AIV_ONLY)"), "{entry}");
                vector += 1;
            } else {
                assert!(entry.starts_with("ROPE_MIX __global__"), "{entry}");
                assert!(
                    statements.starts_with("KERNEL_TYPE_MIX_AIC_1_2)"),
                    "{entry}"
                );
                mix += 1;
            }
        }
        assert_eq!((vector, mix), (10, 1));
    }

    #[test]
    fn the_single_source_includes_only_the_vendor() {
        let source = single_source();
        let included: Vec<&str> = source
            .lines()
            .filter(|line| line.starts_with("#include"))
            .collect();
        assert!(
            included
                .iter()
                .all(|line| line.contains("kernel_operator.h") || line.contains('<')),
            "{included:?}"
        );
        assert!(source.contains("rope_rotate_##name"));
    }
}
