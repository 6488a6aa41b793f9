//! burn's operations.

mod activation;
mod bool;
mod conv;
mod elementwise;
mod float;
mod index;
mod int;
pub(crate) mod launch;
mod matmul;
mod module;
pub(crate) mod movement;
mod norm;
mod quantized;
mod reduce;
mod table;
mod transaction;
pub(crate) mod views;

/// Implements one of burn's operation traits and lists its methods.
///
/// - `native`: methods that run on the device. Each names the element types that it takes there,
///   and the operators that it calls, by their methods of `Operators`; other types go to the host.
/// - `fallback`: methods that run on the host.
/// - `other`: methods that the lists leave out.
///
/// In the rows `T` is `AscendTensor`.
macro_rules! operations {
    (
        $trait:ident;
        native { $(
            fn $n:ident($($na:ident: $nt:ty),* $(,)?) -> $nr:ty; $types:ident [$($operator:ident),*] $body:block
        )* }
        fallback { $( fn $f:ident($($fa:ident: $ft:ty),* $(,)?) -> $fr:ty; )* }
        other { $($other:tt)* }
    ) => {
        impl $trait<$crate::Ascend> for $crate::Ascend {
            $(
                #[allow(clippy::too_many_arguments, reason = "burn's signature")]
                fn $n($($na: $nt),*) -> $nr {
                    #[allow(unused_imports, reason = "a method without tensors has no types")]
                    use $crate::ops::launch::{Fits as _, Types};
                    if !(true $( && $na.fits(Types::$types) )*) {
                        return $crate::fallback::host!($trait::$n($($na),*) -> $nr);
                    }
                    $body
                }
            )*
            $(
                #[allow(clippy::too_many_arguments, reason = "burn's signature")]
                fn $f($($fa: $ft),*) -> $fr {
                    $crate::fallback::host!($trait::$f($($fa),*) -> $fr)
                }
            )*
            $($other)*
        }

        /// The methods that this file implements.
        #[cfg_attr(not(test), allow(dead_code, reason = "read by the test of the documentation"))]
        pub(super) const ROWS: &[$crate::ops::table::Row] = &[
            $( $crate::ops::table::Row {
                method: stringify!($n),
                native: Some(($crate::ops::launch::Types::$types, &[$(stringify!($operator)),*])),
            }, )*
            $( $crate::ops::table::Row { method: stringify!($f), native: None }, )*
        ];
    };
}
pub(crate) use operations;
