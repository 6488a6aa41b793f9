//! The rotation on a served device.

use burn::backend::{Remote, tensor::FloatTensor};
use burn_fused::{Reader, WireOp, Writer, like, send};
use rope_core::{Direction, Geometry, Layout, Pairing};

use super::{RotaryOp, RotaryOps};
use crate::error::{Result, RotaryError};

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
/// The custom operations.
const PAIR: &str = "rope.rotary_pair";
const SINGLE: &str = "rope.rotary_single";
const ANGLE_GRADIENTS: &str = "rope.rotary_angle_gradients";

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

#[cfg(feature = "remote-server")]
mod server {
    use burn::backend::ir::BackendIr;
    use burn_fused::handle;
    use burn_remote::server::CustomOpRegistry;

    use super::*;

    /// Lets a server rotate with its backend.
    pub(crate) fn register<B: BackendIr + RotaryOps>(operations: &mut CustomOpRegistry<B>) {
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
    }
}

#[cfg(feature = "remote-server")]
pub(crate) use server::register;

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

    #[test]
    fn the_numbers_on_the_wire_stay_what_they_are() {
        let numbers = [2, 1, 2, 2, 1, 128, 64, 32].map(ScalarIr::UInt);
        assert_eq!(encode(&operation()), numbers);
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
    }
}
