//! The code that computes an operation.

/// The code that computes an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Implementation {
    /// The backend's kernel and the hand-written backward; composed if the backend has no kernel.
    #[default]
    Fused,
    /// Ordinary operations and their backwards: the baseline.
    Composed,
}

/// Defines `reaches(&DispatchDevice) -> bool`: whether burn's dispatch takes the operations of the
/// calling crate to the backend of a device. It takes them to those in their `#[backend_extension]`,
/// and would panic for others: the list here is the same, but for `Autodiff` and `Fusion`.
#[macro_export]
macro_rules! reaches {
    ($( $backend:ident $(: cfg($($cfg:tt)*))? ),* $(,)?) => {
        /// True if burn's dispatch takes this crate's operations to the backend of a device.
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
