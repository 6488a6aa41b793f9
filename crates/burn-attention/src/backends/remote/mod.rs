//! A device of a server, by burn-remote: an operation of this crate travels as one custom operation
//! and runs by the server's backend; the tensors stay on their device.

mod attention;
mod norm;
mod wire;

#[cfg(feature = "remote-server")]
mod server {
    use burn::backend::ir::BackendIr;
    use burn_remote::server::BackendServer;

    use super::{attention, norm};
    use crate::norm::RmsNormOps;
    use crate::ops::AttentionOps;

    /// What a server's backend runs of this crate's operations.
    pub trait ServedOps: BackendIr + AttentionOps + RmsNormOps {}

    impl<B: BackendIr + AttentionOps + RmsNormOps> ServedOps for B {}

    /// Lets a server run this crate's operations by its backend `B`.
    ///
    /// An operation that the server cannot read, as from a client of another version, ends the
    /// client's session; the server's log has the reason.
    pub fn register<B: ServedOps>(server: BackendServer<B>) -> BackendServer<B> {
        norm::register(attention::register(server))
    }
}

#[cfg(feature = "remote-server")]
pub use server::{ServedOps, register};
