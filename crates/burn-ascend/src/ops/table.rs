//! What runs where, as a table.

use super::launch::Types;

/// One method of burn's operation traits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// The method.
    pub(crate) method: &'static str,
    /// The element types that run on the device and the methods of `Operators` that do it; none runs on the host.
    pub(crate) native: Option<(Types, &'static [&'static str])>,
}
