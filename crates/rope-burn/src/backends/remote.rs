//! A device behind burn-remote: the rotation travels as one custom operation and runs by the kernels of the served
//! backend, without the tensors leaving their device.
//!
//! q and k move into the operation. Where the client holds no other handle of theirs, the server's is the only one, and
//! its backend may rotate them where they lie.

use burn::backend::ir::{CustomOpIr, ScalarIr, TensorIr};
use burn::backend::{Remote, TensorMetadata, tensor::FloatTensor};
use burn::remote::CustomOpClient;
use burn::tensor::{DType, Shape};
use rope_core::{Direction, Geometry, Layout, Pairing};

use crate::error::{Result, RotaryError};
use crate::ops::{RotaryOp, RotaryOps};

/// Of the numbers that a [`RotaryOp`] travels as. Another meaning of any of them is another version.
const VERSION: u64 = 1;
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

/// The place of a value in a list that has it.
fn place<T: PartialEq>(list: &[T], value: &T) -> u64 {
    list.iter().take_while(|other| *other != value).count() as u64
}

/// The numbers of an operation: version, direction, layout, pairing, whether angles are per channel, the head's
/// channels, its rotated channels, and the first of them.
fn encode(op: &RotaryOp) -> Vec<ScalarIr> {
    let geometry = op.geometry;
    let numbers = [
        VERSION,
        place(&DIRECTIONS, &op.direction),
        place(&LAYOUTS, &op.layout),
        place(&PAIRINGS, &geometry.pairing()),
        u64::from(geometry.per_channel()),
        geometry.head_dim() as u64,
        geometry.rotary_dim() as u64,
        geometry.rotary_offset() as u64,
    ];
    numbers.map(ScalarIr::UInt).to_vec()
}

/// The operation that [`encode`] made the numbers of.
#[cfg_attr(
    not(feature = "remote-server"),
    allow(dead_code, reason = "a client only encodes")
)]
fn decode(scalars: &[ScalarIr]) -> Result<RotaryOp> {
    let wrong = |what, expected: &dyn core::fmt::Display, found: &dyn core::fmt::Display| {
        let (expected, found) = (expected.to_string(), found.to_string());
        Err(RotaryError::Wire {
            what,
            expected,
            found,
        })
    };
    let mut numbers = Vec::with_capacity(scalars.len());
    for scalar in scalars {
        match scalar {
            ScalarIr::UInt(number) => numbers.push(*number),
            other => return wrong("a number", &"unsigned", &format!("{other:?}")),
        }
    }
    match numbers.first() {
        Some(&VERSION) => {}
        Some(version) => return wrong("the version", &VERSION, version),
        None => return wrong("the version", &VERSION, &"nothing"),
    }
    let &[
        _,
        direction,
        layout,
        pairing,
        per_channel,
        head_dim,
        rotary_dim,
        rotary_offset,
    ] = &numbers[..]
    else {
        return wrong("the count of numbers", &8, &numbers.len());
    };
    let size = |what, number| match usize::try_from(number) {
        Ok(size) => Ok(size),
        Err(_) => wrong(what, &"an index", &number).map(|_: RotaryOp| 0),
    };
    let sizes = (
        size("head_dim", head_dim)?,
        size("rotary_dim", rotary_dim)?,
        size("rotary_offset", rotary_offset)?,
    );
    fn of<T: Copy>(list: &[T], number: u64) -> Option<T> {
        list.get(usize::try_from(number).ok()?).copied()
    }
    let Some(direction) = of(&DIRECTIONS, direction) else {
        return wrong("the direction", &"0 or 1", &direction);
    };
    let Some(layout) = of(&LAYOUTS, layout) else {
        return wrong("the layout", &"0 to 3", &layout);
    };
    let Some(pairing) = of(&PAIRINGS, pairing) else {
        return wrong("the pairing", &"0 to 3", &pairing);
    };
    let Some(per_channel) = of(&[false, true], per_channel) else {
        return wrong("per channel", &"0 or 1", &per_channel);
    };
    let (head_dim, rotary_dim, rotary_offset) = sizes;
    Ok(RotaryOp {
        geometry: Geometry::new(head_dim, rotary_dim, rotary_offset, pairing, per_channel)?,
        layout,
        direction,
    })
}

/// Sends an operation. Outputs are given by shape and type.
fn send<const N: usize>(
    id: &'static str,
    inputs: Vec<FloatTensor<Remote>>,
    outputs: [(Shape, DType); N],
    op: RotaryOp,
) -> [FloatTensor<Remote>; N] {
    let client = CustomOpClient::new(&inputs[0].device());
    let outputs =
        outputs.map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype));
    let inputs: Vec<TensorIr> = inputs.into_iter().map(|tensor| tensor.into_ir()).collect();
    let sent = client.register(CustomOpIr::with_scalars(id, &inputs, &outputs, encode(&op)));
    let count = sent.len();
    sent.try_into()
        .unwrap_or_else(|_| panic!("{id} has {N} outputs, the client registered {count}"))
}

/// Refuses here what would end the session there.
fn check(
    op: &RotaryOp,
    q: &FloatTensor<Remote>,
    k: Option<&FloatTensor<Remote>>,
    [cos, sin]: [&FloatTensor<Remote>; 2],
) {
    let describe = |x: &FloatTensor<Remote>| (x.shape(), x.dtype());
    let (q, k, cos, sin) = (describe(q), k.map(describe), describe(cos), describe(sin));
    let checked = op.check(
        (&q.0, q.1),
        k.as_ref().map(|k| (&k.0, k.1)),
        (&cos.0, cos.1),
        (&sin.0, sin.1),
    );
    checked.unwrap_or_else(|error| panic!("{error}"));
}

impl RotaryOps for Remote {
    fn rotary_pair(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        op: RotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        check(&op, &q, Some(&k), [&cos, &sin]);
        let outputs = [(q.shape(), q.dtype()), (k.shape(), k.dtype())];
        let [q, k] = send(PAIR, vec![q, k, cos, sin], outputs, op);
        (q, k)
    }

    fn rotary_single(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        op: RotaryOp,
    ) -> FloatTensor<Self> {
        check(&op, &x, None, [&cos, &sin]);
        let output = [(x.shape(), x.dtype())];
        let [x] = send(SINGLE, vec![x, cos, sin], output, op);
        x
    }

    fn rotary_angle_gradients(
        x: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        op: RotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        check(&op, &x, Some(&gradient), [&cos, &cos]);
        let output = (cos.shape(), cos.dtype());
        let inputs = vec![x, gradient, cos];
        let [dcos, dsin] = send(ANGLE_GRADIENTS, inputs, [output.clone(), output], op);
        (dcos, dsin)
    }
}

#[cfg(feature = "remote-server")]
mod server {
    use burn::backend::ir::{BackendIr, HandleContainer};
    use burn_remote::server::BackendServer;

    use super::*;

    /// Lets a server run this crate's operations, by the kernels of its backend `B`; composed where `B` has none.
    ///
    /// A rotation that the server cannot read, as from a client of another version, ends the client's session; why stands in
    /// the server's log.
    pub fn register<B: BackendIr + RotaryOps>(server: BackendServer<B>) -> BackendServer<B> {
        let pair = |[q, k, cos, sin]: [_; 4], op| B::rotary_pair(q, k, cos, sin, op).into();
        let single = |[x, cos, sin]: [_; 3], op| [B::rotary_single(x, cos, sin, op)];
        let angle_gradients =
            |[x, dy, cos]: [_; 3], op| B::rotary_angle_gradients(x, dy, cos, op).into();
        server
            .with_custom_op(PAIR, handler::<B, 4, 2>(pair))
            .with_custom_op(SINGLE, handler::<B, 3, 1>(single))
            .with_custom_op(ANGLE_GRADIENTS, handler::<B, 3, 2>(angle_gradients))
    }

    /// Runs an operation on the tensors that it names.
    fn handler<B: BackendIr, const IN: usize, const OUT: usize>(
        run: fn([FloatTensor<B>; IN], RotaryOp) -> [FloatTensor<B>; OUT],
    ) -> impl Fn(&mut HandleContainer<B::Handle>, &CustomOpIr, &B::Device) + Send + Sync {
        move |handles, ir, _| {
            // burn's way to fail an operation: the session ends, and the client's next read is an error.
            let op = decode(&ir.scalars).unwrap_or_else(|error| panic!("{}: {error}", ir.id));
            let (inputs, outputs) = ir.as_fixed::<IN, OUT>();
            let inputs = inputs
                .each_ref()
                .map(|tensor| handles.get_float_tensor::<B>(tensor));
            for (output, tensor) in outputs.iter().zip(run(inputs, op)) {
                handles.register_float_tensor::<B>(&output.id, tensor);
            }
        }
    }
}

#[cfg(feature = "remote-server")]
pub use server::register;

#[cfg(test)]
mod tests {
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
        let numbers = [1, 1, 2, 2, 1, 128, 64, 32].map(ScalarIr::UInt);
        assert_eq!(encode(&operation()), numbers);
    }

    #[test]
    fn every_operation_comes_back() {
        for pairing in Pairing::ALL {
            for layout in [Layout::Bsnd, Layout::Bnsd, Layout::Sbnd, Layout::Tnd] {
                for direction in [Direction::Forward, Direction::Adjoint] {
                    for per_channel in [false, true] {
                        let geometry = Geometry::new(24, 16, 4, pairing, per_channel);
                        let op = RotaryOp {
                            geometry: geometry.expect("a valid geometry"),
                            layout,
                            direction,
                        };
                        assert_eq!(decode(&encode(&op)), Ok(op));
                    }
                }
            }
        }
    }

    #[test]
    fn foreign_numbers_are_refused_by_name() {
        let valid = encode(&operation());
        let refused = |place: usize, number: ScalarIr, part: &str| {
            let mut scalars = valid.clone();
            scalars[place] = number;
            let error = decode(&scalars).expect_err(part).to_string();
            assert!(error.contains(part), "{part} is not in {error}");
        };
        refused(0, ScalarIr::UInt(2), "the version is 2, expected 1");
        refused(0, ScalarIr::Int(1), "a number is Int(1)");
        refused(1, ScalarIr::UInt(2), "the direction");
        refused(2, ScalarIr::UInt(4), "the layout");
        refused(3, ScalarIr::UInt(u64::MAX), "the pairing");
        refused(4, ScalarIr::UInt(2), "per channel");
        refused(6, ScalarIr::UInt(63), "63");
        assert!(decode(&valid[..7]).is_err() && decode(&[]).is_err());
    }
}
