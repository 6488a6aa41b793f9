//! The update and its sums of squares as custom operations.

use burn::backend::{Remote, TensorMetadata, tensor::FloatTensor};
use burn::tensor::FloatDType;
use burn_fused::{NoNumbers, Reader, WireOp, Writer, like, send};

use super::op::{AdamWOp, AdamWOps, AdamWRounded, rounded};
use super::{shape_of_sums, type_of_sums};
use crate::error::{AttentionError, Result};

/// The custom operations.
const UPDATE: &str = "adamw.update";
const ROUNDED_UPDATE: &str = "adamw.rounded_update";
const SUMS: &str = "adamw.square_sums";

/// Types of rounded values.
const NARROW: [FloatDType; 2] = [FloatDType::F16, FloatDType::BF16];

/// An update whose values are also rounded to one of [`NARROW`].
#[derive(Clone, Copy, Debug, PartialEq)]
struct RoundedUpdate(AdamWOp, FloatDType);

type Sums = NoNumbers<AttentionError, 2>;

impl WireOp for AdamWOp {
    const VERSION: u64 = 3;
    type Error = AttentionError;

    fn write(&self, numbers: &mut Writer) {
        let [beta_1, beta_2] = self.betas;
        for number in [self.rate, self.decay, beta_1, beta_2, self.epsilon] {
            numbers.float(number);
        }
        numbers.size(self.steps as usize);
        numbers.float(self.scale);
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
            scale: numbers.float("the scale")?,
        })
    }
}

impl WireOp for RoundedUpdate {
    const VERSION: u64 = 2;
    type Error = AttentionError;

    fn write(&self, numbers: &mut Writer) {
        self.0.write(numbers);
        numbers.one_of(&NARROW, &self.1);
    }

    fn read(numbers: &mut Reader<'_>) -> Result<Self> {
        let op = AdamWOp::read(numbers)?;
        Ok(Self(
            op,
            numbers.one_of("the type of the rounded values", &NARROW)?,
        ))
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

    fn adamw_rounded(
        value: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        op: AdamWOp,
        dtype: FloatDType,
    ) -> AdamWRounded<Self> {
        if !NARROW.contains(&dtype) {
            return rounded::<Self>(Self::adamw(value, gradient, first, second, op), dtype);
        }
        let narrow = (value.shape(), dtype.into());
        let outputs = [like(&value), narrow, like(&first), like(&second)];
        let inputs = vec![value, gradient, first, second];
        send(ROUNDED_UPDATE, &RoundedUpdate(op, dtype), inputs, outputs).into()
    }

    fn square_sums(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let sums = (shape_of_sums(&x.shape()), type_of_sums(x.dtype()));
        let [sums] = send(SUMS, &Sums::default(), vec![x], [sums]);
        sums
    }
}

#[cfg(feature = "remote-server")]
mod server {
    use burn::backend::ir::BackendIr;
    use burn_fused::handle;
    use burn_remote::server::CustomOpRegistry;

    use super::*;
    use crate::adamw::{check, check_squares};

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
        handle(
            operations,
            ROUNDED_UPDATE,
            |RoundedUpdate(op, _), tensors: &[_; 4]| check(tensors.each_ref(), *op),
            |RoundedUpdate(op, dtype), [value, gradient, first, second]| {
                <[_; 4]>::from(B::adamw_rounded(value, gradient, first, second, op, dtype))
            },
        );
        handle(
            operations,
            SUMS,
            |_: &Sums, [x]: &[_; 1]| check_squares(x),
            |_, [x]| [B::square_sums(x)],
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
            scale: 0.7,
        };
        assert_eq!(decode::<AdamWOp>(&encode(&op), &[]), Ok(op));
        let rounded = RoundedUpdate(op, FloatDType::BF16);
        assert_eq!(decode::<RoundedUpdate>(&encode(&rounded), &[]), Ok(rounded));
    }
}
