//! Devices that a server holds, by burn-remote.

use burn::backend::ir::BackendIr;
use burn_remote::server::CustomOpRegistry;

use crate::norm_rotary::{self, NormRotaryOps};
use crate::rotary;

/// Registers this crate's operations with a server, which runs them with the kernels of its backend
/// `B`, or composed if `B` has none.
///
/// An operation that the server cannot read, such as one from a client of another version, ends the
/// client's session; the server's log has the reason.
pub fn register<B: BackendIr + NormRotaryOps>(operations: &mut CustomOpRegistry<B>) {
    rotary::wire::register(operations);
    norm_rotary::wire::register(operations);
}
