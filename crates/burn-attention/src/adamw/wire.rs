//! The update as a custom operation.

use burn::backend::{Remote, tensor::FloatTensor};
use burn_fused::{Reader, WireOp, Writer, like, send};

use super::op::{AdamWOp, AdamWOps};
use crate::error::{AttentionError, Result};

/// The custom operation.
const UPDATE: &str = "adamw.update";

impl WireOp for AdamWOp {
    const VERSION: u64 = 1;
    type Error = AttentionError;

    fn write(&self, numbers: &mut Writer) {
        let [beta_1, beta_2] = self.betas;
        for number in [self.rate, self.decay, beta_1, beta_2, self.epsilon] {
            numbers.float(number);
        }
        numbers.size(self.steps as usize);
    }

    fn read(numbers: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            rate: numbers.float("the rate")?,
            decay: numbers.float("the decay")?,
            betas: [
                numbers.float("the first beta")?,
                numbers.float("the second beta")?,
            ],
            epsilon: numbers.float("epsilon")?,
            steps: numbers.size("the number of updates", usize::MAX)? as u64,
        })
    }
}

impl AdamWOps for Remote {
    fn adamw(
        value: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        op: AdamWOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = [like(&value), like(&first), like(&second)];
        let inputs = vec![value, gradient, first, second];
        send(UPDATE, &op, inputs, outputs).into()
    }
}

#[cfg(feature = "remote-server")]
mod server {
    use burn::backend::ir::BackendIr;
    use burn_fused::handle;
    use burn_remote::server::CustomOpRegistry;

    use super::*;
    use crate::adamw::check;

    /// Lets a server update by its backend.
    pub(crate) fn register<B: BackendIr + AdamWOps>(operations: &mut CustomOpRegistry<B>) {
        handle(
            operations,
            UPDATE,
            |op: &AdamWOp, tensors: &[_; 4]| check(tensors.each_ref(), *op),
            |op, [value, gradient, first, second]| {
                <[_; 3]>::from(B::adamw(value, gradient, first, second, op))
            },
        );
    }
}

#[cfg(feature = "remote-server")]
pub(crate) use server::register;

#[cfg(test)]
mod tests {
    use burn_fused::{decode, encode};

    use super::*;

    #[test]
    fn the_numbers_of_an_update_come_back() {
        let op = AdamWOp {
            rate: 0.1,
            decay: 0.2,
            betas: [0.3, 0.4],
            epsilon: 0.5,
            steps: 6,
        };
        assert_eq!(decode::<AdamWOp>(&encode(&op), &[]), Ok(op));
    }
}
