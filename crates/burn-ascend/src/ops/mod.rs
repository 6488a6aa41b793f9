//! burn's operations.

mod bool;
mod float;
mod int;
mod module;
mod quantized;
mod transaction;
pub(crate) mod views;

use crate::fallback::{FromHost, Trip};
use crate::tensor::AscendTensor;

/// A dense copy.
pub(crate) fn copy(tensor: &AscendTensor) -> AscendTensor {
    let mut trip = Trip::new("contiguous");
    let host = crate::tensor::whole_block(tensor, &mut trip);
    AscendTensor::from_host(host, &mut trip)
}

/// Implements one of burn's operation traits: methods that run on the device, and methods that run on the host.
///
/// A method of `native` that is handed element types outside its set runs on the host as well.
macro_rules! operations {
    (
        $trait:ident;
        views { $( fn $v:ident($($va:ident: $vt:ty),* $(,)?) -> $vr:ty $vbody:block )* }
        fallback { $( fn $f:ident($($fa:ident: $ft:ty),* $(,)?) -> $fr:ty; )* }
        other { $($other:tt)* }
    ) => {
        impl $trait<$crate::Ascend> for $crate::Ascend {
            $( fn $v($($va: $vt),*) -> $vr $vbody )*
            $(
                #[allow(clippy::too_many_arguments, reason = "burn's signature")]
                fn $f($($fa: $ft),*) -> $fr {
                    $crate::fallback::host!($trait::$f($($fa),*) -> $fr)
                }
            )*
            $($other)*
        }
    };
}
pub(crate) use operations;
