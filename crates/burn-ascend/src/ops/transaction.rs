//! Reads of several tensors, and operations across devices: burn's defaults.

use burn::backend::distributed::DistributedOps;
use burn::backend::ops::TransactionOps;

use crate::Ascend;

impl TransactionOps<Ascend> for Ascend {}

// No collective operations: each device is its own.
impl DistributedOps<Ascend> for Ascend {}
