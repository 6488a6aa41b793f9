//! The devices of a run.

use std::fmt;
use std::sync::Arc;

use burn::tensor::Device;

use crate::error::Result;
use crate::ranks::{Collective, HostSums, Rank};

/// The devices of this process, one rank each.
pub trait Team: fmt::Debug + Send + Sync {
    /// The devices, without autodiff.
    fn devices(&self) -> &[Device];

    /// Joins the other ranks as `rank`, and returns the sums over all of them. Each rank calls it
    /// once, in a thread of its own.
    ///
    /// # Errors
    /// Those of the devices and of the other ranks.
    fn join(&self, rank: &Rank) -> Result<Arc<dyn Collective>>;
}

/// Devices of any kind in one process, which sum in host memory.
#[derive(Clone, Debug)]
pub struct HostTeam(pub Vec<Device>);

impl Team for HostTeam {
    fn devices(&self) -> &[Device] {
        &self.0
    }

    fn join(&self, rank: &Rank) -> Result<Arc<dyn Collective>> {
        Ok(Arc::new(HostSums(rank.clone())))
    }
}
