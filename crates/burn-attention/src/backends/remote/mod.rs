//! A device of a server, by burn-remote: an operation of this crate travels as one custom operation
//! and runs by the server's backend; the tensors stay on their device.

mod attention;
mod norm;

#[cfg(feature = "remote-server")]
mod server {
    use burn::backend::ir::BackendIr;
    use burn_remote::server::CustomOpRegistry;

    use super::{attention, norm};
    use crate::norm::RmsNormOps;
    use crate::ops::AttentionOps;

    /// What a server's backend runs of this crate's operations.
    pub trait ServedOps: BackendIr + AttentionOps + RmsNormOps {}

    impl<B: BackendIr + AttentionOps + RmsNormOps> ServedOps for B {}

    /// Adds this crate's operations to those that a server runs by its backend `B`.
    ///
    /// An operation that the server cannot read, as from a client of another version, ends the
    /// client's session; the server's log has the reason.
    pub fn register<B: ServedOps>(operations: &mut CustomOpRegistry<B>) {
        attention::register(operations);
        norm::register(operations);
    }
}

#[cfg(feature = "remote-server")]
pub use server::{ServedOps, register};
