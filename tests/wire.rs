//! Damaged operations from a client with the token: a server's session computes each or refuses it
//! by name, on Flex and on a simulated NPU.

mod random;

use std::panic::{self, AssertUnwindSafe};

use ascend_sim::control;
use burn::backend::Backend;
use burn::backend::flex::{Flex, FlexDevice};
use burn::backend::ir::{BackendIr, CustomOpIr, OperationIr, ScalarIr, TensorId, TensorIr};
use burn::tensor::{DType, Shape, TensorData};
use burn_ascend::{Ascend, AscendDevice, operations};
use burn_attention::remote::ServedOps;
use burn_router::{CustomOpRegistry, TensorInterpreter};
use random::Random;
use rope_burn::NormRotaryOps;

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
    // Another version; order, offset and epsilon of the norm; the weight's gradient is read.
    let epsilon = [ScalarIr::Float(1e-6)];
    let norm = [
        &ints(&[3]),
        &rotary[1..],
        &ints(&[0, 0]),
        &epsilon,
        &ints(&[0]),
    ]
    .concat();
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
    let row_numbers = f32(&[3, 1]);
    let (matrix, flat, one) = (f32(&[3, 8]), f32(&[24]), f32(&[1]));
    let f16 = (vec![3, 8], DType::F16);
    // The rate, the decay, betas and epsilon, the number of updates, the scale.
    let real = ScalarIr::Float(0.1);
    let update = [&[real; 5][..], &ints(&[3]), &[real]].concat();
    let narrow = |shape: &[usize]| (shape.to_vec(), DType::BF16);
    let (tokens, factor, rounded) = (narrow(&[5, 8]), narrow(&[4, 8]), narrow(&[2, 5]));
    let (inner, half, sums) = (f32(&[4, 5]), f32(&[2, 8]), narrow(&[2, 8]));
    // Version; three groups, of 2, 0 and 3 rows.
    let groups = ints(&[1, 3, 2, 0, 3]);
    let (matrices, products) = (narrow(&[3, 4, 8]), narrow(&[5, 4]));
    let indices = |shape: &[usize]| (shape.to_vec(), DType::I32);
    let (of_rows, places, shares) = (indices(&[6]), indices(&[5, 3]), f32(&[5, 3]));
    let routed = narrow(&[6, 8]);
    let (samples, taps) = (narrow(&[2, 5, 8]), narrow(&[8, 4]));
    // Version; one sequence after the first, from token 2.
    let sequences = ints(&[1, 1, 2]);
    let (dq, dv, dg) = (
        narrow(&[1, 70, 1, 8]),
        narrow(&[1, 70, 2, 8]),
        f32(&[1, 70, 2]),
    );
    let dstates = f32(&[3, 2, 8, 8]);
    // Version; all states are returned, no size of blocks; a second sequence, from token 5.
    let delta = ints(&[1, 1, 0, 0, 1, 5]);
    vec![
        call("rope.rotary_pair", &[&x, &k, &angles], &[&x, &k], &rotary),
        call("rope.rotary_single", &[&x, &angles], &[&x], &rotary),
        call(
            "rope.rotary_angle_gradients",
            &[&x, &x, &angles],
            &[&angles],
            &rotary,
        ),
        call(
            "rope.norm_rotary_pair",
            &[&x, &k, &weight, &weight, &angles],
            &[&x, &k],
            &norm,
        ),
        call("rope.norm_rotary", &[&x, &weight, &angles], &[&x], &norm),
        call(
            "rope.norm_rotary_backward",
            &[&x, &weight, &angles, &x],
            &[&x, &weight],
            &norm,
        ),
        call(
            "adamw.update",
            &[&matrix, &matrix, &matrix, &matrix],
            &[&matrix, &matrix, &matrix],
            &[&ints(&[3])[..], &update[..]].concat(),
        ),
        call(
            "adamw.rounded_update",
            &[&matrix, &matrix, &matrix, &matrix],
            &[&matrix, &f16, &matrix, &matrix],
            &[&ints(&[2])[..], &update[..], &ints(&[0])].concat(),
        ),
        call("adamw.square_sums", &[&flat], &[&one], &ints(&[2])),
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
            &[&matrix, &row_numbers],
            &[ScalarIr::UInt(2), ScalarIr::Float(1e-6)],
        ),
        call(
            "rms_norm.backward",
            &[&matrix, &weight, &row_numbers, &matrix],
            &[&matrix, &weight],
            &ints(&[3]),
        ),
        call(
            "layer_norm.forward",
            &[&matrix, &weight, &weight],
            &[&matrix, &row_numbers, &row_numbers],
            &[ScalarIr::UInt(2), ScalarIr::Float(1e-6)],
        ),
        call(
            "layer_norm.backward",
            &[&matrix, &weight, &row_numbers, &row_numbers, &matrix],
            &[&matrix, &weight, &weight],
            &ints(&[3]),
        ),
        call("adapter.inner", &[&factor, &tokens], &[&inner], &ints(&[1])),
        call(
            "adapter.add",
            &[&tokens, &inner, &half],
            &[&tokens, &rounded],
            &ints(&[1]),
        ),
        call(
            "adapter.gradient",
            &[&rounded, &tokens],
            &[&half],
            &ints(&[1]),
        ),
        call(
            "adapter.product_add",
            &[&sums, &rounded, &tokens],
            &[&sums],
            &ints(&[1]),
        ),
        call(
            "grouped_linear.forward",
            &[&tokens, &matrices],
            &[&products],
            &groups,
        ),
        call(
            "grouped_linear.x_gradient",
            &[&products, &matrices],
            &[&tokens],
            &groups,
        ),
        call(
            "grouped_linear.weight_gradient",
            &[&tokens, &products],
            &[&matrices],
            &groups,
        ),
        call("routes.rows", &[&tokens, &of_rows], &[&routed], &ints(&[1])),
        call(
            "routes.rows_backward",
            &[&routed, &places],
            &[&tokens],
            &ints(&[1]),
        ),
        call(
            "routes.sum",
            &[&routed, &shares, &places],
            &[&tokens],
            &ints(&[1]),
        ),
        call(
            "routes.sum_backward",
            &[&routed, &shares, &tokens, &places],
            &[&routed, &shares],
            &ints(&[1]),
        ),
        call(
            "short_convolution.forward",
            &[&samples, &taps],
            &[&samples],
            &sequences,
        ),
        call(
            "short_convolution.backward",
            &[&samples, &taps, &samples],
            &[&samples, &taps],
            &sequences,
        ),
        call(
            "gated_delta.forward",
            &[&dq, &dq, &dv, &dg, &dg],
            &[&dv, &dstates],
            &delta,
        ),
        call(
            "gated_delta.backward",
            &[&dq, &dq, &dv, &dg, &dg, &dstates, &dv],
            &[&dq, &dq, &dv, &dg, &dg],
            &delta,
        ),
        // Version; two views: the first tensor whole, and a row of the second.
        call(
            "views.take",
            &[&tokens, &half],
            &[&(vec![40], DType::BF16), &f32(&[1, 8])],
            &ints(&[1, 2, 0, 0, 1, 40, 1, 8, 2, 1, 8]),
        ),
        call(
            "swiglu.forward",
            &[&tokens, &tokens],
            &[&tokens],
            &ints(&[1]),
        ),
        call(
            "swiglu.backward",
            &[&tokens, &tokens, &tokens],
            &[&tokens, &tokens],
            &ints(&[1]),
        ),
        call(
            "swiglu.backward_with_output",
            &[&tokens, &tokens, &tokens],
            &[&tokens, &tokens, &tokens],
            &ints(&[1]),
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

/// The outcome of the call in a session of a server: nothing if it computes, else the words of the
/// panic that ends the session.
fn outcome<B: BackendIr>(
    call: &Call,
    device: &B::Device,
    operations: &CustomOpRegistry<B>,
) -> Result<(), String> {
    let mut session = TensorInterpreter::with_custom_ops(device.clone(), operations.clone());
    let mut inputs = Vec::new();
    for (shape, dtype) in &call.inputs {
        let value = match dtype {
            // The token of a row, and places that have none: a device does not check indices.
            DType::I32 if shape.len() == 1 => 0,
            DType::I32 => 100,
            // The largest of a query's four scores is 4, and so is the sum of its exponentials.
            _ if shape.last() == Some(&2) => 4,
            _ => 1,
        };
        let data = TensorData::full_dtype(shape.clone(), value, *dtype);
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

/// Gives `count` damaged calls of each operation to a server's session on a device. After each that
/// is computed, `look` says what is wrong with the device.
fn soak<B: ServedOps + NormRotaryOps>(
    device: &B::Device,
    count: usize,
    look: impl Fn() -> Option<String>,
) {
    let operations = operations::<B>();
    let mut random = Random(1);
    for call in calls() {
        outcome(&call, device, &operations).unwrap_or_else(|cause| panic!("{call:?}: {cause}"));
        assert_eq!(look(), None, "{call:?}");
        let hook = panic::take_hook();
        panic::set_hook(Box::new(|_| {}));
        let (mut refused, mut wrong) = (0, None);
        for _ in 0..count {
            let damaged = random.damaged(&call);
            let found = match outcome(&damaged, device, &operations) {
                Err(cause) => {
                    refused += 1;
                    (!cause.starts_with(call.id)).then_some(cause)
                }
                Ok(()) => look(),
            };
            wrong = wrong.or_else(|| found.map(|cause| format!("{damaged:?}: {cause}")));
        }
        panic::set_hook(hook);
        assert_eq!(
            wrong, None,
            "refused without the operation's name, or a fault"
        );
        println!("{}: {refused} of {count} refused", call.id);
        assert!(refused * 4 > count, "{}: {refused} of {count}", call.id);
    }
}

fn soak_on_each_device(on_flex: usize, on_npu: usize) {
    soak::<Flex>(&FlexDevice, on_flex, || None);
    let npu = AscendDevice::simulated(0);
    soak::<Ascend>(&npu, on_npu, || {
        // A failure is that of the tensors, which nobody reads.
        let _failed = Ascend::sync(&npu);
        let mut violations = control::take_violations();
        // Numbers of another forward have its shapes: the device finds that, and ends its stream.
        violations.retain(|violation| !violation.message.contains("are of another forward"));
        if npu.failure().is_some() {
            let _failed = npu.close();
        }
        violations.first().map(ToString::to_string)
    });
}

#[test]
fn damaged_operations_are_refused_by_name() {
    soak_on_each_device(1000, 100);
}

#[test]
#[ignore = "minutes: 100,000 of each operation"]
fn damaged_operations_for_long() {
    soak_on_each_device(100_000, 10_000);
}
