//! The table of exported functions, and the macro that fills it.

use std::ffi::{CStr, c_void};

/// An exported function.
#[derive(Clone, Copy, Debug)]
pub struct Export {
    /// Its C name.
    pub name: &'static str,
    /// Its type as declared here, in Rust's spelling, such as
    /// `fn(*mut *mut c_void, usize, i32) -> i32`.
    pub signature: &'static str,
    /// Its address.
    pub address: *const c_void,
}

/// Every exported function.
pub fn exports() -> Vec<Export> {
    [
        super::runtime::table(),
        super::aclnn::table(),
        super::operators::table(),
        super::collective::table(),
    ]
    .concat()
}

/// Names of functions, separated by commas, that the simulated runtime lacks.
const LACKED_VARIABLE: &str = "ASCEND_SIM_LACKS";

/// The address of the exported function `name`, null when there is none: what `dlsym` would return
/// for the shared library. A loader that takes its symbols from a closure can take them from here.
/// The variable `ASCEND_SIM_LACKS` names functions, separated by commas, that are not there: those
/// of a newer runtime than the program is to find.
pub fn symbol(name: &CStr) -> *const c_void {
    let lacked = std::env::var(LACKED_VARIABLE).unwrap_or_default();
    if lacked
        .split(',')
        .any(|lacked| lacked.as_bytes() == name.to_bytes())
    {
        return std::ptr::null();
    }
    exports()
        .iter()
        .find(|export| export.name.as_bytes() == name.to_bytes())
        .map_or(std::ptr::null(), |export| export.address)
}

/// Defines exported functions. Those after `status` are logged, take injected failures and convert
/// an error to its code; those after `value` return the value of their body.
macro_rules! export {
    (
        status { $( fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block )* }
        value { $( fn $vname:ident($($varg:ident: $vty:ty),* $(,)?) -> $vret:ty $vbody:block )* }
    ) => {
        $(
            #[doc = concat!("`", stringify!($name), "`, as the vendor's headers declare it.")]
            ///
            /// # Safety
            /// - Pointers are valid as the C declaration requires, or null where it allows null.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $ty),*) -> i32 {
                $crate::state::boundary(stringify!($name), move || $body)
            }
        )*
        $(
            #[doc = concat!("`", stringify!($vname), "`, by its C declaration.")]
            ///
            /// # Safety
            /// - Pointers are valid as the C declaration requires, or null where it allows null.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $vname($($varg: $vty),*) -> $vret $vbody
        )*
        pub(crate) fn table() -> Vec<$crate::abi::Export> {
            vec![
                $( $crate::abi::Export {
                    name: stringify!($name),
                    signature: stringify!(fn($($ty),*) -> i32),
                    address: $name as *const std::ffi::c_void,
                }, )*
                $( $crate::abi::Export {
                    name: stringify!($vname),
                    signature: stringify!(fn($($vty),*) -> $vret),
                    address: $vname as *const std::ffi::c_void,
                }, )*
            ]
        }
    };
}

pub(crate) use export;
