//! The update of AdamW, by ordinary operations.

use burn_attention::AdamWOps;

use crate::Ascend;

impl AdamWOps for Ascend {}
