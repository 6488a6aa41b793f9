//! Served devices, through burn-remote: an operation is sent as one custom operation and runs on
//! the server's backend; the tensors stay on their device.

use burn::backend::ir::BackendIr;
use burn_remote::server::CustomOpRegistry;

use crate::adamw::{self, AdamWOps};
use crate::adapter::{self, AdapterOps};
use crate::attention::{self, AttentionOps};
use crate::gated_delta::{self, GatedDeltaOps};
use crate::grouped_linear::{self, GroupedLinearOps};
use crate::layer_norm::{self, LayerNormOps};
use crate::rms_norm::{self, RmsNormOps};
use crate::routes::{self, RoutesOps};
use crate::short_convolution::{self, ShortConvolutionOps};
use crate::swiglu::{self, SwiGluOps};
use crate::views;

/// A backend that can run this crate's operations in a server.
pub trait ServedOps:
    BackendIr
    + AdamWOps
    + AdapterOps
    + AttentionOps
    + GatedDeltaOps
    + GroupedLinearOps
    + LayerNormOps
    + RmsNormOps
    + RoutesOps
    + ShortConvolutionOps
    + SwiGluOps
{
}

impl<B> ServedOps for B where
    B: BackendIr
        + AdamWOps
        + AdapterOps
        + AttentionOps
        + GatedDeltaOps
        + GroupedLinearOps
        + LayerNormOps
        + RmsNormOps
        + RoutesOps
        + ShortConvolutionOps
        + SwiGluOps
{
}

/// Registers this crate's operations with a server, which runs them on its backend `B`.
///
/// An operation that the server cannot read, such as one from a client of another version, ends the
/// client's session; the server's log has the reason.
pub fn register<B: ServedOps>(operations: &mut CustomOpRegistry<B>) {
    adamw::wire::register(operations);
    adapter::wire::register(operations);
    attention::wire::register(operations);
    gated_delta::wire::register(operations);
    grouped_linear::wire::register(operations);
    layer_norm::wire::register(operations);
    rms_norm::wire::register(operations);
    routes::wire::register(operations);
    short_convolution::wire::register(operations);
    swiglu::wire::register(operations);
    views::wire::register(operations);
}
