//! The C interface of the Ascend runtime, in the vendor's spelling and without logic.
//!
//! Functions are declared once, in [`functions!`](self) tables. A table defines the structure of
//! function pointers that the loader fills, and the list of [`Signature`]s that `cargo xtask abi`
//! checks against the vendor's headers.
//!
//! # Source
//! ACL headers 1.17.0 as shipped in the PyPI wheel torch-npu 2.14.0 (`torch_npu/include/acl`), and
//! for `aclnn` and `aclrtc` the public operator and runtime-compiler documentation.
#![allow(non_camel_case_types, non_snake_case, reason = "the vendor's spelling")]
#![allow(
    unsafe_code,
    reason = "the table turns resolved addresses into function pointers"
)]

mod acl_rt;
mod acl_rtc;
mod aclnn;
mod describe;
mod hccl;
mod operators;
mod types;

pub use acl_rt::AclRt;
pub use acl_rtc::AclRtc;
pub use aclnn::AclMeta;
pub use describe::{CType, Field, Record, Signature, constants, records};
pub use hccl::Hccl;
pub use operators::{AclFused, AclOperators, AclRotary, Kind, Operator, Run, kind};
pub(crate) use operators::{for_each_fused_operator, for_each_operator, for_each_rotary_operator};
pub use types::*;

use std::ffi::{CStr, c_void};

/// Returns the address of a symbol, or null if there is none.
pub type Resolve<'a> = dyn FnMut(&CStr) -> *const c_void + 'a;

/// Declares a table of C functions: a structure of function pointers, its loader, and the list of
/// signatures.
macro_rules! functions {
    (
        $(#[$meta:meta])*
        $table:ident {
            required { $( $(#[$rm:meta])* fn $r:ident($($ra:ident: $rt:ty),* $(,)?) -> $rr:ty; )* }
            optional { $( $(#[$om:meta])* fn $o:ident($($oa:ident: $ot:ty),* $(,)?) -> $or:ty; )* }
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug)]
        pub struct $table {
            $( $(#[$rm])* pub $r: unsafe extern "C" fn($($ra: $rt),*) -> $rr, )*
            $( $(#[$om])* pub $o: Option<unsafe extern "C" fn($($oa: $ot),*) -> $or>, )*
        }

        impl $table {
            /// Fills the table from `resolve`.
            ///
            /// # Errors
            /// The required symbols that `resolve` does not know.
            ///
            /// # Safety
            /// - Each address that `resolve` returns is that of the C function of that name, with
            ///   the signature that this table declares.
            /// - The code at the addresses stays mapped as long as the table is used.
            pub unsafe fn load(
                resolve: &mut $crate::sys::Resolve<'_>,
            ) -> Result<Self, Vec<&'static str>> {
                #[allow(unused_mut, reason = "a table may have no required function")]
                let mut missing: Vec<&'static str> = Vec::new();
                $(
                    let $r = resolve($crate::sys::c_name(concat!(stringify!($r), "\0")));
                    if $r.is_null() {
                        missing.push(stringify!($r));
                    }
                )*
                if !missing.is_empty() {
                    return Err(missing);
                }
                Ok(Self {
                    $(
                        // SAFETY: not null (checked above); the caller vouches for the signature.
                        $r: unsafe { std::mem::transmute::<
                            *const std::ffi::c_void,
                            unsafe extern "C" fn($($rt),*) -> $rr,
                        >($r) },
                    )*
                    $(
                        $o: {
                            let name = $crate::sys::c_name(concat!(stringify!($o), "\0"));
                            let address = resolve(name);
                            // SAFETY: a null pointer becomes `None`, the null niche of the function
                            // pointer; the caller vouches for the signature of any other address.
                            unsafe { std::mem::transmute::<
                                *const std::ffi::c_void,
                                Option<unsafe extern "C" fn($($ot),*) -> $or>,
                            >(address) }
                        },
                    )*
                })
            }

            /// The optional functions that this table lacks.
            pub fn missing(&self) -> Vec<&'static str> {
                #[allow(unused_mut, reason = "a table may have no optional function")]
                let mut missing: Vec<&'static str> = Vec::new();
                $( if self.$o.is_none() { missing.push(stringify!($o)); } )*
                missing
            }

            /// The C signatures of the table's functions.
            pub fn signatures() -> Vec<$crate::sys::Signature> {
                use $crate::sys::CType;
                vec![
                    $( $crate::sys::Signature {
                        name: stringify!($r),
                        returns: <$rr as CType>::c(),
                        parameters: vec![$(<$rt as CType>::c()),*],
                        required: true,
                    }, )*
                    $( $crate::sys::Signature {
                        name: stringify!($o),
                        returns: <$or as CType>::c(),
                        parameters: vec![$(<$ot as CType>::c()),*],
                        required: false,
                    }, )*
                ]
            }
        }
    };
}
use functions;

/// The C string of a literal that ends in its nul byte.
fn c_name(name_with_nul: &'static str) -> &'static CStr {
    CStr::from_bytes_with_nul(name_with_nul.as_bytes()).unwrap_or_default()
}
