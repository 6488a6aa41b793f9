//! The operations on a device that a server holds, by burn-remote.

use burn::backend::{Remote, tensor::FloatTensor};
use burn_fused::{OpError, Reader, WireOp, Writer, like, send};
use rope_core::{Direction, Geometry, HeadNorm, Layout, NormOrder, Pairing};

use crate::error::{Result, RotaryError};
use crate::norm::{NormRotaryOp, NormRotaryOps};
use crate::ops::{RotaryOp, RotaryOps};

/// In the order of the wire; append only.
const PAIRINGS: [Pairing; 4] = [
    Pairing::Half,
    Pairing::Adjacent,
    Pairing::Quarter,
    Pairing::InterleaveHalf,
];
/// In the order of the wire; append only.
const LAYOUTS: [Layout; 4] = [Layout::Bsnd, Layout::Bnsd, Layout::Sbnd, Layout::Tnd];
/// In the order of the wire; append only.
const DIRECTIONS: [Direction; 2] = [Direction::Forward, Direction::Adjoint];
/// In the order of the wire; append only.
const ORDERS: [NormOrder; 2] = [NormOrder::BeforeRotation, NormOrder::AfterRotation];

/// The custom operations.
const PAIR: &str = "rope.rotary_pair";
const SINGLE: &str = "rope.rotary_single";
const ANGLE_GRADIENTS: &str = "rope.rotary_angle_gradients";
const NORM: &str = "rope.norm_rotary";
const NORM_BACKWARD: &str = "rope.norm_rotary_backward";

impl WireOp for RotaryOp {
    const VERSION: u64 = 2;
    type Error = RotaryError;

    fn write(&self, numbers: &mut Writer) {
        let geometry = self.geometry;
        numbers.one_of(&DIRECTIONS, &self.direction);
        numbers.one_of(&LAYOUTS, &self.layout);
        numbers.one_of(&PAIRINGS, &geometry.pairing());
        numbers.flag(geometry.per_channel());
        numbers.size(geometry.head_dim());
        numbers.size(geometry.rotary_dim());
        numbers.size(geometry.rotary_offset());
    }

    fn read(numbers: &mut Reader<'_>) -> Result<Self> {
        let direction = numbers.one_of("the direction", &DIRECTIONS)?;
        let layout = numbers.one_of("the layout", &LAYOUTS)?;
        let pairing = numbers.one_of("the pairing", &PAIRINGS)?;
        let per_channel = numbers.flag("per channel")?;
        let head_dim = numbers.size("head_dim", usize::MAX)?;
        let rotary_dim = numbers.size("rotary_dim", usize::MAX)?;
        let offset = numbers.size("rotary_offset", usize::MAX)?;
        Ok(Self {
            geometry: Geometry::new(head_dim, rotary_dim, offset, pairing, per_channel)?,
            layout,
            direction,
        })
    }
}

/// The numbers of the forward rotation, then those of the norm.
impl WireOp for NormRotaryOp {
    const VERSION: u64 = RotaryOp::VERSION;
    type Error = RotaryError;

    fn write(&self, numbers: &mut Writer) {
        self.rotary(Direction::Forward).write(numbers);
        numbers.one_of(&ORDERS, &self.norm.order());
        numbers.flag(self.norm.unit_offset());
        numbers.float(self.norm.eps());
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
        })
    }
}

impl RotaryOps for Remote {
    fn rotary_pair(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: RotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = [like(&q), like(&k)];
        send(PAIR, &op, vec![q, k, angles], outputs).into()
    }

    fn rotary_single(
        x: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: RotaryOp,
    ) -> FloatTensor<Self> {
        let outputs = [like(&x)];
        let [x] = send(SINGLE, &op, vec![x, angles], outputs);
        x
    }

    fn rotary_angle_gradients(
        x: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: RotaryOp,
    ) -> FloatTensor<Self> {
        let outputs = [like(&angles)];
        let [gradients] = send(ANGLE_GRADIENTS, &op, vec![x, gradient, angles], outputs);
        gradients
    }
}

impl NormRotaryOps for Remote {
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

    /// Adds this crate's operations to those that a server runs, by the kernels of its backend `B`,
    /// or composed if `B` has none.
    ///
    /// An operation that the server cannot read, as from a client of another version, ends the
    /// client's session; the server's log has the reason.
    pub fn register<B: BackendIr + NormRotaryOps>(operations: &mut CustomOpRegistry<B>) {
        handle(
            operations,
            PAIR,
            |op: &RotaryOp, [q, k, angles]: &[_; 3]| op.check(q, Some(k), angles),
            |op, [q, k, angles]| <[_; 2]>::from(B::rotary_pair(q, k, angles, op)),
        );
        handle(
            operations,
            SINGLE,
            |op: &RotaryOp, [x, angles]: &[_; 2]| op.check(x, None, angles),
            |op, [x, angles]| [B::rotary_single(x, angles, op)],
        );
        handle(
            operations,
            ANGLE_GRADIENTS,
            |op: &RotaryOp, [x, dy, angles]: &[_; 3]| op.check_gradient(x, dy, angles),
            |op, [x, dy, angles]| [B::rotary_angle_gradients(x, dy, angles, op)],
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
pub use server::register;

#[cfg(test)]
mod tests {
    use burn::backend::ir::ScalarIr;
    use burn_fused::{decode, encode};

    use super::*;

    fn operation() -> RotaryOp {
        RotaryOp {
            geometry: Geometry::new(128, 64, 32, Pairing::Quarter, true).expect("a valid geometry"),
            layout: Layout::Sbnd,
            direction: Direction::Adjoint,
        }
    }

    fn norm() -> NormRotaryOp {
        NormRotaryOp {
            geometry: operation().geometry,
            layout: Layout::Sbnd,
            norm: HeadNorm::new(1e-5).expect("a valid eps"),
        }
    }

    #[test]
    fn the_numbers_on_the_wire_stay_what_they_are() {
        let numbers = [2, 1, 2, 2, 1, 128, 64, 32].map(ScalarIr::UInt);
        assert_eq!(encode(&operation()), numbers);
        let norms = [2, 0, 2, 2, 1, 128, 64, 32, 0, 0].map(ScalarIr::UInt);
        let eps = [ScalarIr::Float(1e-5)];
        assert_eq!(encode(&norm()), [&norms[..], &eps].concat());
    }

    #[test]
    fn every_operation_comes_back() {
        for pairing in Pairing::ALL {
            for layout in LAYOUTS {
                for direction in DIRECTIONS {
                    for per_channel in [false, true] {
                        let geometry = Geometry::new(24, 16, 4, pairing, per_channel);
                        let op = RotaryOp {
                            geometry: geometry.expect("a valid geometry"),
                            layout,
                            direction,
                        };
                        assert_eq!(decode(&encode(&op), &[]), Ok(op));
                    }
                }
            }
        }
        for order in ORDERS {
            for unit_offset in [false, true] {
                let norm = norm().norm.with_order(order).with_unit_offset(unit_offset);
                let op = NormRotaryOp {
                    norm,
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
        refused(0, ScalarIr::UInt(1), "the version is 1, expected 2");
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
