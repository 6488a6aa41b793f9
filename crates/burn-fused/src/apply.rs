//! The implementation of an operation.

/// The implementation of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Implementation {
    /// The backend's kernel and the hand-written backward; composed if the backend has no kernel.
    #[default]
    Fused,
    /// Ordinary operations with their own backwards: the baseline.
    Composed,
}

/// Defines `reaches(&DispatchDevice) -> bool`, which is true if burn's dispatch routes the
/// operations of the calling crate to the backend of a device. It routes them to the backends in
/// their `#[backend_extension]` and would panic for others. The list here is the same, except
/// `Autodiff` and `Fusion`.
#[macro_export]
macro_rules! reaches {
    ($( $backend:ident $(: cfg($($cfg:tt)*))? ),* $(,)?) => {
        /// True if burn's dispatch routes this crate's operations to the backend of a device.
        pub(crate) fn reaches(device: &::burn::backend::DispatchDevice) -> bool {
            use ::burn::backend::DispatchDevice;
            match device {
                $(
                    $( #[cfg($($cfg)*)] )?
                    DispatchDevice::$backend(_) => true,
                )*
                DispatchDevice::Autodiff(device) => reaches(device),
                #[allow(
                    unreachable_patterns,
                    reason = "unless burn has other backends enabled"
                )]
                _ => false,
            }
        }
    };
}
