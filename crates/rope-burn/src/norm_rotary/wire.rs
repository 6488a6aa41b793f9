//! The norm with its rotation on a served device.

use burn::backend::{Remote, tensor::FloatTensor};
use burn_fused::{OpError, Reader, WireOp, Writer, like, send};
use rope_core::{Direction, HeadNorm, NormOrder};

use super::{NormRotaryOp, NormRotaryOps};
use crate::error::{Result, RotaryError};
use crate::rotary::RotaryOp;

/// In the order of the wire; append only.
const ORDERS: [NormOrder; 2] = [NormOrder::BeforeRotation, NormOrder::AfterRotation];

/// The custom operations.
const NORM_PAIR: &str = "rope.norm_rotary_pair";
const NORM: &str = "rope.norm_rotary";
const NORM_BACKWARD: &str = "rope.norm_rotary_backward";

/// The numbers of the forward rotation, then those of the norm.
impl WireOp for NormRotaryOp {
    const VERSION: u64 = 3;
    type Error = RotaryError;

    fn write(&self, numbers: &mut Writer) {
        self.rotary(Direction::Forward).write(numbers);
        numbers.one_of(&ORDERS, &self.norm.order());
        numbers.flag(self.norm.unit_offset());
        numbers.float(self.norm.eps());
        numbers.flag(self.skips_weight);
    }

    fn read(numbers: &mut Reader<'_>) -> Result<Self> {
        let rotary = RotaryOp::read(numbers)?;
        if rotary.direction != Direction::Forward {
            // The operation's name says the direction.
            return Err(OpError::Wire {
                what: "the direction of a norm",
                expected: "forward".to_owned(),
                found: "adjoint".to_owned(),
            }
            .into());
        }
        let order = numbers.one_of("the norm's order", &ORDERS)?;
        let unit_offset = numbers.flag("the weights' offset")?;
        let norm = HeadNorm::new(numbers.float("eps")?)?;
        Ok(Self {
            geometry: rotary.geometry,
            layout: rotary.layout,
            norm: norm.with_order(order).with_unit_offset(unit_offset),
            skips_weight: numbers.flag("the unread gradient of the weight")?,
        })
    }
}

impl NormRotaryOps for Remote {
    fn norm_rotary_pair(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        q_weight: FloatTensor<Self>,
        k_weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = [like(&q), like(&k)];
        let inputs = vec![q, k, q_weight, k_weight, angles];
        send(NORM_PAIR, &op, inputs, outputs).into()
    }

    fn norm_rotary(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> FloatTensor<Self> {
        let outputs = [like(&x)];
        let [x] = send(NORM, &op, vec![x, weight, angles], outputs);
        x
    }

    fn norm_rotary_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = [like(&x), like(&weight)];
        let inputs = vec![x, weight, angles, gradient];
        send(NORM_BACKWARD, &op, inputs, outputs).into()
    }
}

#[cfg(feature = "remote-server")]
mod server {
    use burn::backend::ir::BackendIr;
    use burn_fused::handle;
    use burn_remote::server::CustomOpRegistry;

    use super::*;

    /// Lets a server normalise and rotate by its backend.
    pub(crate) fn register<B: BackendIr + NormRotaryOps>(operations: &mut CustomOpRegistry<B>) {
        handle(
            operations,
            NORM_PAIR,
            |op: &NormRotaryOp, [q, k, q_weight, k_weight, angles]: &[_; 5]| {
                op.rotary(Direction::Forward).check(q, Some(k), angles)?;
                op.check_weight("the weight of q", q_weight, q)?;
                op.check_weight("the weight of k", k_weight, k)
            },
            |op, [q, k, q_weight, k_weight, angles]| {
                <[_; 2]>::from(B::norm_rotary_pair(q, k, q_weight, k_weight, angles, op))
            },
        );
        handle(
            operations,
            NORM,
            |op: &NormRotaryOp, [x, weight, angles]: &[_; 3]| {
                op.rotary(Direction::Forward).check(x, None, angles)?;
                op.check_weight("weight", weight, x)
            },
            |op, [x, weight, angles]| [B::norm_rotary(x, weight, angles, op)],
        );
        handle(
            operations,
            NORM_BACKWARD,
            |op: &NormRotaryOp, [x, weight, angles, dy]: &[_; 4]| {
                let rotary = op.rotary(Direction::Forward);
                rotary.check_gradient(x, dy, angles)?;
                op.check_weight("weight", weight, x)
            },
            |op, [x, weight, angles, dy]| {
                <[_; 2]>::from(B::norm_rotary_backward(x, weight, angles, dy, op))
            },
        );
    }
}

#[cfg(feature = "remote-server")]
pub(crate) use server::register;

#[cfg(test)]
mod tests {
    use burn::backend::ir::ScalarIr;
    use burn_fused::{decode, encode};
    use rope_core::{Geometry, Layout, Pairing};

    use super::*;

    fn norm() -> NormRotaryOp {
        NormRotaryOp {
            geometry: Geometry::new(128, 64, 32, Pairing::Quarter, true).expect("a valid geometry"),
            layout: Layout::Sbnd,
            norm: HeadNorm::new(1e-5).expect("a valid eps"),
            skips_weight: false,
        }
    }

    #[test]
    fn the_numbers_on_the_wire_stay_what_they_are_and_come_back() {
        let numbers = [3, 0, 2, 2, 1, 128, 64, 32, 0, 0].map(ScalarIr::UInt);
        let rest = [ScalarIr::Float(1e-5), ScalarIr::UInt(0)];
        assert_eq!(encode(&norm()), [&numbers[..], &rest].concat());
        for order in ORDERS {
            for unit_offset in [false, true] {
                let norm = norm().norm.with_order(order).with_unit_offset(unit_offset);
                let op = NormRotaryOp {
                    norm,
                    skips_weight: unit_offset,
                    ..self::norm()
                };
                assert_eq!(decode(&encode(&op), &[]), Ok(op));
            }
        }
    }

    #[test]
    fn foreign_numbers_are_refused_by_name() {
        let valid = encode(&norm());
        let refused = |index: usize, number: ScalarIr, part: &str| {
            let mut scalars = valid.clone();
            scalars[index] = number;
            let error = decode::<NormRotaryOp>(&scalars, &[]).expect_err(part);
            assert!(error.to_string().contains(part), "{part} is not in {error}");
        };
        refused(0, ScalarIr::UInt(1), "the version is 1, expected 3");
        refused(1, ScalarIr::UInt(1), "the direction of a norm");
        refused(1, ScalarIr::UInt(2), "the direction is 2");
        refused(2, ScalarIr::UInt(4), "the layout");
        refused(3, ScalarIr::UInt(u64::MAX), "the pairing");
        refused(4, ScalarIr::UInt(2), "per channel");
        refused(5, ScalarIr::Int(1), "head_dim is Int(1)");
        refused(6, ScalarIr::UInt(63), "63");
        refused(8, ScalarIr::UInt(2), "the norm's order");
        refused(9, ScalarIr::Int(0), "the weights' offset");
        refused(10, ScalarIr::UInt(1), "eps is 1");
        refused(10, ScalarIr::Float(-1.0), "-1");
        refused(11, ScalarIr::UInt(2), "the unread gradient");
    }

    /// Corrupts every pair of numbers of an encoded norm: refused, or an operation that is written
    /// as it was read.
    #[test]
    fn damaged_numbers_are_refused_or_read_as_they_are() {
        let numbers = encode(&norm());
        let large = [1 << 16, (1 << 16) + 1, 1 << 32, u64::MAX];
        let mut others: Vec<ScalarIr> = (0..6).chain(large).map(ScalarIr::UInt).collect();
        let floats = [0.0, 1e-5, -1.0, f64::INFINITY, f64::NAN];
        others.extend(floats.map(ScalarIr::Float));
        others.extend([ScalarIr::Int(-1), ScalarIr::Bool(true)]);
        let (mut read, mut refused) = (0, 0);
        let mut check = |scalars: &[ScalarIr]| match decode::<NormRotaryOp>(scalars, &[]) {
            Ok(op) => {
                assert_eq!(encode(&op), scalars);
                read += 1;
            }
            Err(_) => refused += 1,
        };
        for first in 0..numbers.len() {
            for second in first..numbers.len() {
                for (one, two) in others
                    .iter()
                    .flat_map(|a| others.iter().map(move |b| (a, b)))
                {
                    let mut scalars = numbers.clone();
                    (scalars[first], scalars[second]) = (*one, *two);
                    check(&scalars);
                }
            }
        }
        assert!(
            read > 100 && refused > 1000,
            "{read} read, {refused} refused"
        );
    }
}
