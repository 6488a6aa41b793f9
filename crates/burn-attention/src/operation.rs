//! The backends of operations.

/// Defines the trait of an operation, and what extends it to each backend.
macro_rules! operation {
    ($(#[$about:meta])* $vis:vis trait $name:ident { $($methods:tt)* }) => {
        #[burn::backend::backend_extension(
            Flex: cfg(feature = "flex"),
            Cube: cfg(feature = "cube"),
            Remote: cfg(feature = "remote"),
            Autodiff
        )]
        $(#[$about])*
        $vis trait $name: burn::backend::Backend { $($methods)* }
    };
}
