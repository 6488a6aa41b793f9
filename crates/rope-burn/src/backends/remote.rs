//! A device of a server, by burn-remote: the rotation travels as one custom operation and runs by
//! the kernels of the server's backend; the tensors stay on their device.
//!
//! q and k move into the operation. If the client holds no other handle of theirs, the server's is
//! the only one, and its backend may rotate them in place.

use burn::backend::ir::{CustomOpIr, ScalarIr, TensorIr};
use burn::backend::{Remote, TensorMetadata, tensor::FloatTensor};
use burn::remote::CustomOpClient;
use burn::tensor::{DType, Shape};
use rope_core::{Direction, Geometry, HeadNorm, Layout, NormOrder, Pairing};

use crate::error::{Result, RotaryError};
use crate::norm::{NormRotaryOp, NormRotaryOps};
use crate::ops::{RotaryOp, RotaryOps};

/// The version of the numbers that a [`RotaryOp`] travels as; another meaning of one is another
/// version.
const VERSION: u64 = 2;
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
/// Numbers of a [`RotaryOp`].
const ROTARY_NUMBERS: usize = 8;

/// The custom operations.
const PAIR: &str = "rope.rotary_pair";
const SINGLE: &str = "rope.rotary_single";
const ANGLE_GRADIENTS: &str = "rope.rotary_angle_gradients";
const NORM: &str = "rope.norm_rotary";
const NORM_BACKWARD: &str = "rope.norm_rotary_backward";

/// The index of a value in a list that contains it.
fn index_of<T: PartialEq>(list: &[T], value: &T) -> u64 {
    list.iter().take_while(|other| *other != value).count() as u64
}

/// The numbers of an operation: version, direction, layout, pairing, whether angles are per
/// channel, the head's channels, the number of rotated ones, and the first of them.
fn encode(op: &RotaryOp) -> Vec<ScalarIr> {
    let geometry = op.geometry;
    let numbers = [
        VERSION,
        index_of(&DIRECTIONS, &op.direction),
        index_of(&LAYOUTS, &op.layout),
        index_of(&PAIRINGS, &geometry.pairing()),
        u64::from(geometry.per_channel()),
        geometry.head_dim() as u64,
        geometry.rotary_dim() as u64,
        geometry.rotary_offset() as u64,
    ];
    numbers.map(ScalarIr::UInt).to_vec()
}

/// The inverse of [`encode`].
#[cfg_attr(
    not(feature = "remote-server"),
    allow(dead_code, reason = "a client only encodes")
)]
fn decode(scalars: &[ScalarIr]) -> Result<RotaryOp> {
    // The version first: in another version the numbers mean something else.
    let version = scalars.first();
    if !matches!(version, Some(ScalarIr::UInt(VERSION))) {
        return Err(wrong("the version", VERSION.to_string(), version));
    }
    let number = |index, what, limit| number(scalars, index, what, limit);
    if let Some(extra) = scalars.get(ROTARY_NUMBERS) {
        return Err(wrong("a ninth number", "eight".into(), Some(extra)));
    }
    let direction = DIRECTIONS[number(1, "the direction", DIRECTIONS.len())?];
    let layout = LAYOUTS[number(2, "the layout", LAYOUTS.len())?];
    let pairing = PAIRINGS[number(3, "the pairing", PAIRINGS.len())?];
    let per_channel = number(4, "per channel", 2)? == 1;
    let size = |index, what| number(index, what, usize::MAX);
    let (head_dim, rotary_dim) = (size(5, "head_dim")?, size(6, "rotary_dim")?);
    let rotary_offset = size(7, "rotary_offset")?;
    Ok(RotaryOp {
        geometry: Geometry::new(head_dim, rotary_dim, rotary_offset, pairing, per_channel)?,
        layout,
        direction,
    })
}

#[cfg_attr(
    not(feature = "remote-server"),
    allow(dead_code, reason = "a client only encodes")
)]
fn wrong(what: &'static str, expected: String, found: Option<&ScalarIr>) -> RotaryError {
    RotaryError::Wire {
        what,
        expected,
        found: match found {
            Some(ScalarIr::UInt(number)) => number.to_string(),
            Some(other) => format!("{other:?}"),
            None => "missing".into(),
        },
    }
}

#[cfg_attr(
    not(feature = "remote-server"),
    allow(dead_code, reason = "a client only encodes")
)]
fn number(scalars: &[ScalarIr], index: usize, what: &'static str, limit: usize) -> Result<usize> {
    match scalars.get(index) {
        Some(ScalarIr::UInt(number)) if *number < limit as u64 => Ok(*number as usize),
        found => Err(wrong(what, format!("a number below {limit}"), found)),
    }
}

/// The numbers of the forward rotation, then the order, whether 1 is added to the weights, and eps.
fn encode_norm(op: &NormRotaryOp) -> Vec<ScalarIr> {
    let mut scalars = encode(&op.rotary(Direction::Forward));
    let numbers = [
        index_of(&ORDERS, &op.norm.order()),
        u64::from(op.norm.unit_offset()),
    ];
    scalars.extend(numbers.map(ScalarIr::UInt));
    scalars.push(ScalarIr::Float(op.norm.eps()));
    scalars
}

/// The inverse of [`encode_norm`].
#[cfg_attr(
    not(feature = "remote-server"),
    allow(dead_code, reason = "a client only encodes")
)]
fn decode_norm(scalars: &[ScalarIr]) -> Result<NormRotaryOp> {
    let (rotary, norm) = scalars.split_at(scalars.len().min(ROTARY_NUMBERS));
    let rotary = decode(rotary)?;
    // The operation's name says the direction; the number is always the first.
    number(scalars, 1, "the direction of a norm", 1)?;
    let order = ORDERS[number(norm, 0, "the norm's order", ORDERS.len())?];
    let unit_offset = number(norm, 1, "the weights' offset", 2)? == 1;
    let eps = match norm.get(2) {
        Some(ScalarIr::Float(eps)) => *eps,
        found => return Err(wrong("eps", "a float".into(), found)),
    };
    if let Some(extra) = norm.get(3) {
        return Err(wrong("a twelfth number", "eleven".into(), Some(extra)));
    }
    let norm = HeadNorm::new(eps)?;
    Ok(NormRotaryOp {
        geometry: rotary.geometry,
        layout: rotary.layout,
        norm: norm.with_order(order).with_unit_offset(unit_offset),
    })
}

/// Sends an operation with its numbers. Outputs are given by shape and type.
fn send<const N: usize>(
    id: &'static str,
    inputs: Vec<FloatTensor<Remote>>,
    outputs: [(Shape, DType); N],
    scalars: Vec<ScalarIr>,
) -> [FloatTensor<Remote>; N] {
    let client = CustomOpClient::new(&inputs[0].device());
    let outputs =
        outputs.map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype));
    let inputs: Vec<TensorIr> = inputs.into_iter().map(|tensor| tensor.into_ir()).collect();
    let sent = client.register(CustomOpIr::with_scalars(id, &inputs, &outputs, scalars));
    let count = sent.len();
    sent.try_into()
        .unwrap_or_else(|_| panic!("{id} has {N} outputs, the client registered {count}"))
}

impl RotaryOps for Remote {
    fn rotary_pair(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: RotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = [(q.shape(), q.dtype()), (k.shape(), k.dtype())];
        let [q, k] = send(PAIR, vec![q, k, angles], outputs, encode(&op));
        (q, k)
    }

    fn rotary_single(
        x: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: RotaryOp,
    ) -> FloatTensor<Self> {
        let output = [(x.shape(), x.dtype())];
        let [x] = send(SINGLE, vec![x, angles], output, encode(&op));
        x
    }

    fn rotary_angle_gradients(
        x: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        op: RotaryOp,
    ) -> FloatTensor<Self> {
        let output = [(angles.shape(), angles.dtype())];
        let [gradients] = send(
            ANGLE_GRADIENTS,
            vec![x, gradient, angles],
            output,
            encode(&op),
        );
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
        let output = [(x.shape(), x.dtype())];
        let [x] = send(NORM, vec![x, weight, angles], output, encode_norm(&op));
        x
    }

    fn norm_rotary_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        angles: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        op: NormRotaryOp,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let outputs = [(x.shape(), x.dtype()), (weight.shape(), weight.dtype())];
        let inputs = vec![x, weight, angles, gradient];
        send(NORM_BACKWARD, inputs, outputs, encode_norm(&op)).into()
    }
}

#[cfg(feature = "remote-server")]
mod server {
    use burn::backend::ir::{BackendIr, HandleContainer};
    use burn_remote::server::CustomOpRegistry;

    use super::*;

    /// Adds this crate's operations to those that a server runs, by the kernels of its backend `B`,
    /// or composed if `B` has none.
    ///
    /// An operation that the server cannot read, as from a client of another version, ends the
    /// client's session; the server's log has the reason.
    pub fn register<B: BackendIr + NormRotaryOps>(operations: &mut CustomOpRegistry<B>) {
        let pair = Handler {
            decode,
            check: |[q, k, angles]: &[_; 3], op: &RotaryOp| op.check(q, Some(k), angles),
            run: |[q, k, angles], op| B::rotary_pair(q, k, angles, op).into(),
        };
        let single = Handler {
            decode,
            check: |[x, angles]: &[_; 2], op: &RotaryOp| op.check(x, None, angles),
            run: |[x, angles], op| [B::rotary_single(x, angles, op)],
        };
        let angle_gradients = Handler {
            decode,
            check: |[x, dy, angles]: &[_; 3], op: &RotaryOp| op.check_gradient(x, dy, angles),
            run: |[x, dy, angles], op| [B::rotary_angle_gradients(x, dy, angles, op)],
        };
        let norm = Handler {
            decode: decode_norm,
            check: |[x, weight, angles]: &[_; 3], op: &NormRotaryOp| {
                op.rotary(Direction::Forward).check(x, None, angles)?;
                op.check_weight("weight", weight, x)
            },
            run: |[x, weight, angles], op| [B::norm_rotary(x, weight, angles, op)],
        };
        let norm_backward = Handler {
            decode: decode_norm,
            check: |[x, weight, angles, dy]: &[_; 4], op: &NormRotaryOp| {
                op.rotary(Direction::Forward)
                    .check_gradient(x, dy, angles)?;
                op.check_weight("weight", weight, x)
            },
            run: |[x, weight, angles, dy], op| {
                B::norm_rotary_backward(x, weight, angles, dy, op).into()
            },
        };
        operations.register(PAIR, pair.of::<B>());
        operations.register(SINGLE, single.of::<B>());
        operations.register(ANGLE_GRADIENTS, angle_gradients.of::<B>());
        operations.register(NORM, norm.of::<B>());
        operations.register(NORM_BACKWARD, norm_backward.of::<B>());
    }

    /// How a server reads an operation, checks it against its tensors, and computes it.
    struct Handler<T, Op, const IN: usize, const OUT: usize> {
        decode: fn(&[ScalarIr]) -> Result<Op>,
        check: fn(&[T; IN], &Op) -> Result<()>,
        run: fn([T; IN], Op) -> [T; OUT],
    }

    impl<T: 'static, Op: 'static, const IN: usize, const OUT: usize> Handler<T, Op, IN, OUT> {
        /// Runs the operation on the tensors that it names.
        fn of<B>(
            self,
        ) -> impl Fn(&mut HandleContainer<B::Handle>, &CustomOpIr, &B::Device) + Send + Sync
        where
            B: BackendIr<FloatTensorPrimitive = T>,
        {
            let Self { decode, check, run } = self;
            move |handles, ir, _| {
                let mut read = || {
                    let op = decode(&ir.scalars)?;
                    let named: Result<&[TensorIr; IN], _> = ir.inputs[..].try_into();
                    let named = named.map_err(|_| RotaryError::Wire {
                        what: "the number of tensors",
                        expected: IN.to_string(),
                        found: ir.inputs.len().to_string(),
                    })?;
                    if let Some(other) = named.iter().find(|x| !x.dtype.is_float()) {
                        return Err(RotaryError::Wire {
                            what: "the type of a tensor",
                            expected: "a float".into(),
                            found: format!("{:?}", other.dtype),
                        });
                    }
                    let tensors = named.each_ref().map(|x| handles.get_float_tensor::<B>(x));
                    check(&tensors, &op)?;
                    Ok((tensors, op))
                };
                // How an operation fails in burn-remote: the session ends, and the client's next
                // read is an error.
                let (tensors, op) =
                    read().unwrap_or_else(|error: RotaryError| panic!("{}: {error}", ir.id));
                for (output, tensor) in ir.outputs.iter().zip(run(tensors, op)) {
                    handles.register_float_tensor::<B>(&output.id, tensor);
                }
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
        let numbers = [2, 1, 2, 2, 1, 128, 64, 32].map(ScalarIr::UInt);
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

    fn norm() -> NormRotaryOp {
        NormRotaryOp {
            geometry: operation().geometry,
            layout: Layout::Sbnd,
            norm: HeadNorm::new(1e-5).expect("a valid eps"),
        }
    }

    #[test]
    fn every_norm_comes_back_and_foreign_numbers_are_refused() {
        let op = norm();
        let mut numbers: Vec<_> = [2, 0, 2, 2, 1, 128, 64, 32, 0, 0]
            .map(ScalarIr::UInt)
            .into();
        numbers.push(ScalarIr::Float(1e-5));
        assert_eq!(encode_norm(&op), numbers);
        for order in ORDERS {
            for unit_offset in [false, true] {
                let norm = op.norm.with_order(order).with_unit_offset(unit_offset);
                let op = NormRotaryOp { norm, ..op };
                assert_eq!(decode_norm(&encode_norm(&op)), Ok(op));
            }
        }
        let refused = |index: usize, number: ScalarIr, part: &str| {
            let mut scalars = numbers.clone();
            scalars[index] = number;
            let error = decode_norm(&scalars).expect_err(part).to_string();
            assert!(error.contains(part), "{part} is not in {error}");
        };
        refused(0, ScalarIr::UInt(1), "the version is 1, expected 2");
        refused(8, ScalarIr::UInt(2), "the norm's order");
        refused(9, ScalarIr::Int(0), "the weights' offset");
        refused(10, ScalarIr::UInt(1), "eps is 1");
        refused(10, ScalarIr::Float(-1.0), "-1");
        assert!(decode_norm(&numbers[..10]).is_err() && decode_norm(&numbers[..8]).is_err());
        assert!(decode_norm(&[&numbers[..], &numbers[..1]].concat()).is_err());
    }

    #[test]
    fn foreign_numbers_are_refused_by_name() {
        let valid = encode(&operation());
        let refused = |index: usize, number: ScalarIr, part: &str| {
            let mut scalars = valid.clone();
            scalars[index] = number;
            let error = decode(&scalars).expect_err(part).to_string();
            assert!(error.contains(part), "{part} is not in {error}");
        };
        refused(0, ScalarIr::UInt(1), "the version is 1, expected 2");
        refused(0, ScalarIr::Int(2), "the version is Int(2)");
        refused(5, ScalarIr::Int(1), "head_dim is Int(1)");
        refused(1, ScalarIr::UInt(2), "the direction");
        refused(2, ScalarIr::UInt(4), "the layout");
        refused(3, ScalarIr::UInt(u64::MAX), "the pairing");
        refused(4, ScalarIr::UInt(2), "per channel");
        refused(6, ScalarIr::UInt(63), "63");
        assert!(decode(&valid[..7]).is_err() && decode(&[]).is_err());
        assert!(decode(&[&valid[..], &valid[..1]].concat()).is_err());
    }

    /// Any two numbers of a norm's in turn become others: refused, or an operation that is written
    /// as it was read.
    #[test]
    fn damaged_numbers_are_refused_or_read_as_they_are() {
        let numbers = encode_norm(&norm());
        let large = [1 << 16, (1 << 16) + 1, 1 << 32, u64::MAX];
        let mut others: Vec<ScalarIr> = (0..6).chain(large).map(ScalarIr::UInt).collect();
        let floats = [0.0, 1e-5, -1.0, f64::INFINITY, f64::NAN];
        others.extend(floats.map(ScalarIr::Float));
        others.extend([ScalarIr::Int(-1), ScalarIr::Bool(true)]);
        let (mut read, mut refused) = (0, 0);
        let mut check = |scalars: &[ScalarIr]| match decode_norm(scalars) {
            Ok(op) => {
                assert_eq!(encode_norm(&op), scalars);
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
