//! A strict simulator of the Ascend runtime.
