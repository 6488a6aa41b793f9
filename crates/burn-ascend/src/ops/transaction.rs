//! Reads several tensors: burn's default.

use burn::backend::ops::TransactionOps;

use crate::Ascend;

impl TransactionOps<Ascend> for Ascend {}
