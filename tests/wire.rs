//! Damaged operations, as a client that has the token could send them: whatever an operation says,
//! a server's session refuses it by name or computes it.

mod random;

use std::panic::{self, AssertUnwindSafe};

use burn::backend::flex::{Flex, FlexDevice};
use burn::backend::ir::{CustomOpIr, OperationIr, ScalarIr, TensorId, TensorIr};
use burn::tensor::{DType, Shape, TensorData};
use burn_router::{CustomOpRegistry, TensorInterpreter};
use random::Random;

type Described = (Vec<usize>, DType);

/// An operation as the wire has it.
#[derive(Clone, Debug)]
struct Call {
    id: &'static str,
    inputs: Vec<Described>,
    outputs: Vec<Described>,
    numbers: Vec<ScalarIr>,
}

/// Each operation, as a client of this release sends it.
fn calls() -> Vec<Call> {
    let f32 = |shape: &[usize]| (shape.to_vec(), DType::F32);
    let ints = |numbers: &[u64]| numbers.iter().copied().map(ScalarIr::UInt).collect();
    let (x, k, angles, weight) = (
        f32(&[1, 4, 2, 8]),
        f32(&[1, 4, 1, 8]),
        f32(&[4, 8]),
        f32(&[8]),
    );
    // Version, direction, layout BSND, halves, shared angles, head, rotated channels, their first.
    let rotary: Vec<ScalarIr> = ints(&[2, 0, 0, 0, 0, 8, 8, 0]);
    let norm = [&rotary[..], &ints(&[0, 0]), &[ScalarIr::Float(1e-6)]].concat();
    let (q, kv, rows) = (f32(&[1, 2, 4, 8]), f32(&[1, 1, 4, 8]), f32(&[1, 2, 4, 2]));
    // Version, scale, no blocks, their scores, no gradient of a bias; 4 keys for 4 queries.
    let scale = ScalarIr::Float(0.5);
    let counts = ints(&[0, 0, 0, 4, 1, 4, 0, 4, 0, 0, 0]);
    let attention = [&ints(&[3]), &[scale][..], &counts].concat();
    let call = |id, inputs: &[&Described], outputs: &[&Described], numbers: &[ScalarIr]| Call {
        id,
        inputs: inputs.iter().copied().cloned().collect(),
        outputs: outputs.iter().copied().cloned().collect(),
        numbers: numbers.to_vec(),
    };
    let of_rows = f32(&[3, 1]);
    let matrix = f32(&[3, 8]);
    vec![
        call("rope.rotary_pair", &[&x, &k, &angles], &[&x, &k], &rotary),
        call("rope.rotary_single", &[&x, &angles], &[&x], &rotary),
        call(
            "rope.rotary_angle_gradients",
            &[&x, &x, &angles],
            &[&angles],
            &rotary,
        ),
        call("rope.norm_rotary", &[&x, &weight, &angles], &[&x], &norm),
        call(
            "rope.norm_rotary_backward",
            &[&x, &weight, &angles, &x],
            &[&x, &weight],
            &norm,
        ),
        call(
            "attention.forward",
            &[&q, &kv, &kv],
            &[&q, &rows],
            &attention,
        ),
        call(
            "attention.backward",
            &[&q, &kv, &kv, &q, &rows, &q],
            &[&q, &kv, &kv],
            &attention,
        ),
        call(
            "rms_norm.forward",
            &[&matrix, &weight],
            &[&matrix, &of_rows],
            &[ScalarIr::UInt(2), ScalarIr::Float(1e-6)],
        ),
        call(
            "rms_norm.backward",
            &[&matrix, &weight, &of_rows, &matrix],
            &[&matrix, &weight],
            &ints(&[2]),
        ),
    ]
}

impl Random {
    fn tensor(&mut self, described: &mut Described) {
        const TYPES: [DType; 6] = [
            DType::F32,
            DType::F64,
            DType::F16,
            DType::BF16,
            DType::I64,
            DType::I32,
        ];
        let (shape, dtype) = described;
        match self.below(6) {
            0 => *dtype = TYPES[self.below(TYPES.len())],
            1 => shape.push(1 + self.below(3)),
            2 if shape.len() > 1 => drop(shape.remove(self.below(shape.len()))),
            _ => {
                let dim = self.below(shape.len());
                shape[dim] = self.below(10);
            }
        }
    }

    fn number(&mut self) -> ScalarIr {
        match self.below(6) {
            0 => ScalarIr::UInt(u64::MAX >> self.below(64)),
            1 => ScalarIr::Float([f64::NAN, -1.0, 0.0, 1e300, f64::INFINITY][self.below(5)]),
            2 => ScalarIr::Int(-1),
            3 => ScalarIr::Bool(true),
            _ => ScalarIr::UInt(self.below(10) as u64),
        }
    }

    /// The call with one to three things changed.
    fn damaged(&mut self, call: &Call) -> Call {
        let mut call = call.clone();
        for _ in 0..=self.below(3) {
            let (inputs, numbers) = (call.inputs.len(), call.numbers.len());
            match self.below(10) {
                0 if inputs > 1 => drop(call.inputs.remove(self.below(inputs))),
                1 => call.inputs.push(call.inputs[self.below(inputs)].clone()),
                2 => call.inputs.swap(0, self.below(inputs)),
                3 if numbers > 0 => call.numbers.truncate(self.below(numbers)),
                4 => call.numbers.push(self.number()),
                5 | 6 if numbers > 0 => {
                    let index = self.below(numbers);
                    call.numbers[index] = self.number();
                }
                7 => {
                    let index = self.below(call.outputs.len());
                    self.tensor(&mut call.outputs[index]);
                }
                _ => {
                    let index = self.below(inputs);
                    self.tensor(&mut call.inputs[index]);
                }
            }
        }
        call
    }
}

/// What a session of a server does with the call: nothing if it computes, else the words of the
/// panic that ends the session.
fn outcome(call: &Call, operations: &CustomOpRegistry<Flex>) -> Result<(), String> {
    let mut session = TensorInterpreter::with_custom_ops(FlexDevice, operations.clone());
    let mut inputs = Vec::new();
    for (shape, dtype) in &call.inputs {
        let data = TensorData::full_dtype(shape.clone(), 1, *dtype);
        inputs.push(session.register_tensor_data_desc(data));
    }
    let output = |(index, (shape, dtype)): (usize, &Described)| {
        let id = TensorId::new(1 << 40 | index as u64);
        TensorIr::uninit(id, Shape::from(shape.clone()), *dtype)
    };
    let outputs: Vec<TensorIr> = call.outputs.iter().enumerate().map(output).collect();
    let ir = CustomOpIr::with_scalars(call.id, &inputs, &outputs, call.numbers.clone());
    let run = move || session.register_op(OperationIr::Custom(ir));
    panic::catch_unwind(AssertUnwindSafe(run)).map_err(|cause| {
        let text = cause.downcast_ref::<String>().cloned();
        text.or_else(|| cause.downcast_ref::<&str>().map(|text| (*text).to_owned()))
            .unwrap_or_default()
    })
}

/// Gives `count` damaged calls of each operation to a server's session.
fn soak(count: usize) {
    let mut operations = CustomOpRegistry::new();
    rope_burn::remote::register(&mut operations);
    burn_attention::remote::register(&mut operations);
    let mut random = Random(1);
    for call in calls() {
        outcome(&call, &operations).unwrap_or_else(|cause| panic!("{call:?}: {cause}"));
        let hook = panic::take_hook();
        panic::set_hook(Box::new(|_| {}));
        let (mut refused, mut unnamed) = (0, None);
        for _ in 0..count {
            let damaged = random.damaged(&call);
            if let Err(cause) = outcome(&damaged, &operations) {
                refused += 1;
                if !cause.starts_with(call.id) {
                    unnamed = Some(format!("{damaged:?}: {cause}"));
                }
            }
        }
        panic::set_hook(hook);
        assert_eq!(unnamed, None, "refused without the operation's name");
        println!("{}: {refused} of {count} refused", call.id);
        assert!(refused * 4 > count, "{}: {refused} of {count}", call.id);
    }
}

#[test]
fn damaged_operations_are_refused_by_name() {
    soak(1000);
}

#[test]
#[ignore = "minutes: 100,000 of each operation"]
fn damaged_operations_for_long() {
    soak(100_000);
}
