//! The backends of operations.

/// Defines the trait of an operation, and what extends it to each backend. One with kernels of
/// CubeCL begins with `Fusion;`: burn's fusion passes it on as it is.
macro_rules! operation {
    (Fusion; $($trait:tt)*) => {
        operation!([Fusion: cfg(feature = "fusion"),] $($trait)*);
    };
    (
        [$($fusion:tt)*]
        $(#[$about:meta])* $vis:vis trait $name:ident $(: $first:ident + $second:ident)? {
            $($methods:tt)*
        }
    ) => {
        #[burn::backend::backend_extension(
            Flex: cfg(feature = "flex"),
            Cube: cfg(feature = "cube"),
            Remote: cfg(feature = "remote"),
            $($fusion)*
            Autodiff
        )]
        $(#[$about])*
        $vis trait $name: burn::backend::Backend $(+ $first + $second)? { $($methods)* }
    };
    ($($trait:tt)*) => {
        operation!([] $($trait)*);
    };
}
