//! Each operation of a device once, against the CPU: the operations of burn's tensors that models
//! and training use. Together they run each of the vendor's operators that the backend calls.
//!
//! Inputs are rounded to the element type, the reference is computed on the CPU in f32.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use burn::backend::ExecutionError;
use burn::tensor::activation::{gelu, log_softmax, relu, sigmoid, softmax};
use burn::tensor::module::{embedding, linear};
use burn::tensor::{Bool, DType, Device, Distribution, IndexingUpdateOp, Int, Tensor, TensorData};
use burn_attention::{
    Attention, AttentionMask, MaskRules, grouped_linear, layer_norm, rms_norm, wide_linear,
};
use serde::Serialize;

/// A result, or the device's error.
type Read = Result<TensorData, ExecutionError>;

/// The operands of every case: `[4, 6]` unless said otherwise.
struct Operands {
    device: Device,
    dtype: DType,
    /// From -2 to 2.
    x: Tensor<2>,
    /// From 0.25 to 2.25.
    y: Tensor<2>,
    /// `[6, 4]`.
    right: Tensor<2>,
    /// `[2, 4, 6]`.
    batch: Tensor<3>,
    /// `[6]`.
    channels: Tensor<1>,
    /// From 0 to 3.
    index: Tensor<2, Int>,
    mask: Tensor<2, Bool>,
}

impl Operands {
    /// Values that are rounded to one type, in another.
    fn new(device: &Device, rounded_to: DType, dtype: DType) -> Self {
        let float = |shape: &[usize], low: f64| {
            let count = shape.iter().product::<usize>();
            // Multiples of the golden ratio, spread evenly.
            let values = (1..=count).map(|at| (at as f64 * 0.618_034).fract() * 4.0);
            let values: Vec<f64> = match low < 0.0 {
                true => values.map(|value| value + low).collect(),
                false => values.map(|value| value / 2.0 + low).collect(),
            };
            let narrow = TensorData::new(values, shape.to_vec()).convert_dtype(rounded_to);
            narrow.convert_dtype(dtype)
        };
        let numbers: Vec<i64> = (0..24).map(|at| (at * 7 + 3) % 4).collect();
        let flags: Vec<bool> = numbers.iter().map(|number| number % 2 == 0).collect();
        Self {
            dtype,
            x: Tensor::from_data(float(&[4, 6], -2.0), (device, dtype)),
            y: Tensor::from_data(float(&[4, 6], 0.25), (device, dtype)),
            right: Tensor::from_data(float(&[6, 4], -2.0), (device, dtype)),
            batch: Tensor::from_data(float(&[2, 4, 6], -2.0), (device, dtype)),
            channels: Tensor::from_data(float(&[6], -2.0), (device, dtype)),
            index: Tensor::from_data(TensorData::new(numbers, [4, 6]), device),
            mask: Tensor::from_data(TensorData::new(flags, [4, 6]), device),
            device: device.clone(),
        }
    }

    fn x(&self) -> Tensor<2> {
        self.x.clone()
    }

    fn y(&self) -> Tensor<2> {
        self.y.clone()
    }

    fn index(&self) -> Tensor<2, Int> {
        self.index.clone()
    }

    fn mask(&self) -> Tensor<2, Bool> {
        self.mask.clone()
    }

    fn other_mask(&self) -> Tensor<2, Bool> {
        self.x().greater(self.y())
    }

    /// A row of indices, from 0 to 3.
    fn row(&self) -> Tensor<1, Int> {
        self.index().slice([0..1, 0..4]).reshape([4])
    }

    /// Each channel of a row once, in another order.
    fn order(&self) -> Tensor<2, Int> {
        let order: Vec<i64> = (0..24).map(|at| (at % 6) * 5 % 6).collect();
        Tensor::from_data(TensorData::new(order, [4, 6]), &self.device)
    }

    /// The gradient of a function's sum of squares.
    fn gradient<const D: usize>(
        &self,
        x: &Tensor<D>,
        f: impl FnOnce(Tensor<D>) -> Tensor<D>,
    ) -> Read {
        let x = tracked(x).require_grad();
        let out = f(x.clone());
        let gradients = (out.clone() * out).sum().backward();
        match x.grad(&gradients) {
            Some(gradient) => gradient.try_into_data(),
            None => Err(ExecutionError::with_context(
                "the operation gave no gradient".to_owned(),
            )),
        }
    }

    /// Attention over two packed sequences, `[1, 2, 4, 16]`, or over one that is causal.
    fn attend(q: Tensor<4>, ends: Option<&[usize]>) -> Tensor<4> {
        let rules = MaskRules {
            causal: ends.is_none(),
            cu_seqlens: ends,
            ..MaskRules::default()
        };
        let mask = AttentionMask::new(&rules, 1, 4, 4).expect("sizes that fit");
        let (k, v) = (q.clone() * 0.5, q.clone() + 0.25);
        let out = Attention::new(mask).try_forward(q, k, v);
        out.expect("shapes that fit")
    }

    fn centred(x: Tensor<2>, [weight, bias]: [&Tensor<1>; 2]) -> Tensor<2> {
        layer_norm(x, weight.clone(), bias.clone(), 1e-5).expect("shapes that fit")
    }

    /// A row of the first group and three of the second.
    fn grouped(x: Tensor<2>, weight: Tensor<3>) -> Tensor<2> {
        grouped_linear(x, weight, &[1, 3]).expect("groups that fit")
    }

    fn heads(&self) -> Tensor<4> {
        let twice = self.batch.clone().repeat_dim(2, 3);
        twice.slice([0..2, 0..4, 0..16]).reshape([1, 2, 4, 16])
    }
}

/// A tensor that an autodiff graph can begin at.
fn tracked<const D: usize>(x: &Tensor<D>) -> Tensor<D> {
    Tensor::from_inner(x.clone())
}

/// Reads results.
trait Reads {
    fn reads(self) -> Vec<Read>;
}

impl<const D: usize> Reads for Tensor<D> {
    fn reads(self) -> Vec<Read> {
        vec![self.try_into_data()]
    }
}

impl<const D: usize> Reads for Tensor<D, Int> {
    fn reads(self) -> Vec<Read> {
        vec![self.try_into_data()]
    }
}

impl<const D: usize> Reads for Tensor<D, Bool> {
    fn reads(self) -> Vec<Read> {
        vec![self.try_into_data()]
    }
}

impl<A: Reads, B: Reads> Reads for (A, B) {
    fn reads(self) -> Vec<Read> {
        let mut all = self.0.reads();
        all.extend(self.1.reads());
        all
    }
}

impl Reads for Read {
    fn reads(self) -> Vec<Read> {
        vec![self]
    }
}

/// An operation by name.
struct Case {
    name: &'static str,
    run: fn(&Operands) -> Vec<Read>,
}

/// A run that takes longer is repeated.
const AGAIN: Duration = Duration::from_secs(1);
/// Operations that burn approximates where a device has none of its own, and their errors by type.
const APPROXIMATED: [(&str, DType, f64); 2] = [
    ("GELU, backward", DType::F32, 1e-3),
    ("error function", DType::F16, 4e-3),
];

macro_rules! cases {
    ($($name:literal: |$o:ident| $result:expr;)*) => {
        &[$(Case { name: $name, run: |$o| Reads::reads($result) }),*]
    };
}

const CASES: &[Case] = cases! {
    "add": |o| o.x() + o.y();
    "add a number": |o| o.x() + 0.5;
    "subtract": |o| o.x() - o.y();
    "subtract a number": |o| o.x() - 0.75;
    "multiply": |o| o.x() * o.y();
    "multiply by a number": |o| o.x() * 1.5;
    "divide": |o| o.x() / o.y();
    "divide by a number": |o| o.x() / 1.5;
    "remainder": |o| o.x().remainder(o.y() + 3.0);
    "remainder of a number": |o| (o.x() * 2.0).remainder_scalar(3.0);
    "power": |o| o.y().powf(o.x());
    "power of a number": |o| o.y().powf_scalar(1.5);
    "negate": |o| -o.x();
    "absolute value": |o| o.x().abs();
    "sign": |o| o.x().sign();
    "square root": |o| o.y().sqrt();
    "reciprocal": |o| o.y().recip();
    "exponential": |o| o.x().exp();
    "logarithm": |o| o.y().log();
    "logarithm of 1 + x": |o| o.y().log1p();
    "error function": |o| o.x().erf();
    "tanh": |o| o.x().tanh();
    "sine": |o| o.x().sin();
    "cosine": |o| o.x().cos();
    "floor": |o| o.x().floor();
    "ceil": |o| o.x().ceil();
    "round": |o| (o.x() * 1.25).round();
    "clamp": |o| o.x().clamp(-0.5, 0.75);
    "sigmoid": |o| sigmoid(o.x());
    "sigmoid, backward": |o| o.gradient(&o.x(), sigmoid);
    "GELU": |o| gelu(o.x());
    "GELU, backward": |o| o.gradient(&o.x(), gelu);
    "ReLU": |o| relu(o.x());
    "equal": |o| o.index().equal(o.index().flip([0]));
    "not equal": |o| o.index().not_equal(o.index().flip([0]));
    "greater": |o| o.x().greater(o.y());
    "greater or equal": |o| o.x().greater_equal(o.y());
    "less": |o| o.x().lower(o.y());
    "less or equal": |o| o.x().lower_equal(o.y());
    "equal to a number": |o| o.index().equal_elem(2);
    "not equal to a number": |o| o.index().not_equal_elem(2);
    "greater than a number": |o| o.x().greater_elem(0.5);
    "at least a number": |o| o.x().greater_equal_elem(0.5);
    "less than a number": |o| o.x().lower_elem(0.5);
    "at most a number": |o| o.x().lower_equal_elem(0.5);
    "and": |o| o.mask().bool_and(o.other_mask());
    "or": |o| o.mask().bool_or(o.other_mask());
    "exclusive or": |o| o.mask().bool_xor(o.other_mask());
    "not": |o| o.mask().bool_not();
    "choose by a mask": |o| o.x().mask_where(o.mask(), o.y());
    "fill by a mask": |o| o.x().mask_fill(o.mask(), 0.25);
    "cast to whole numbers": |o| o.x().int();
    "cast from whole numbers": |o| o.index().float().cast(DType::F32);
    "cast to f32": |o| o.x().cast(DType::F32);
    "fill": |o| Tensor::<2>::full([4, 6], 0.75, (&o.device, o.dtype));
    "copy into a part": |o| o.x().slice_assign([1..3, 2..5], o.y().slice([0..2, 0..3]));
    "a range": |o| Tensor::<1, Int>::arange(3..19, &o.device);
    "uniform numbers": |o| {
        let drawn = Tensor::<2>::random([64, 64], Distribution::Uniform(1.0, 2.0), (&o.device, o.dtype));
        let [low, high] = [drawn.clone().greater_equal_elem(1.0), drawn.clone().lower_equal_elem(2.0)];
        (low.bool_and(high).all(), drawn.mean().sub_scalar(1.5).abs().lower_elem(0.05))
    };
    "normal numbers": |o| {
        let drawn = Tensor::<2>::random([64, 64], Distribution::Normal(0.0, 1.0), (&o.device, o.dtype));
        let drawn = drawn.cast(DType::F32);
        (drawn.clone().mean().abs().lower_elem(0.1), (drawn.clone() * drawn).mean().lower_elem(1.2))
    };
    "coin flips": |o| {
        let drawn = Tensor::<2>::random([64, 64], Distribution::Bernoulli(0.25), (&o.device, o.dtype));
        drawn.cast(DType::F32).mean().sub_scalar(0.25).abs().lower_elem(0.05)
    };
    "sum of an axis": |o| o.x().sum_dim(1);
    "mean of an axis": |o| o.x().mean_dim(0);
    "largest": |o| o.x().max();
    "smallest": |o| o.x().min();
    "largest of an axis": |o| o.x().max_dim(1);
    "largest of an axis and its place": |o| o.x().max_dim_with_indices(1);
    "smallest of an axis and its place": |o| o.x().min_dim_with_indices(1);
    "place of the largest": |o| o.x().argmax(1);
    "place of the smallest": |o| o.x().argmin(1);
    "product of an axis": |o| o.y().prod_dim(1);
    "any": |o| o.mask().any_dim(1);
    "all": |o| o.mask().all_dim(1);
    "cumulative sum": |o| o.x().cumsum(1);
    "concatenate": |o| Tensor::cat(vec![o.x(), o.y(), o.x()], 1);
    "repeat": |o| o.x().repeat_dim(1, 3);
    "flip": |o| o.x().flip([0, 1]);
    "flip whole numbers": |o| o.index().flip([1]);
    "flip a mask": |o| o.mask().flip([1]);
    "divide whole numbers": |o| o.index().div_scalar(2);
    "transpose and copy": |o| o.x().swap_dims(0, 1).reshape([24]);
    "gather": |o| o.x().gather(1, o.index());
    "scatter and add": |o| o.x().scatter(1, o.index(), o.y(), IndexingUpdateOp::Add);
    "scatter": |o| o.x().scatter(1, o.order(), o.y(), IndexingUpdateOp::Assign);
    "select rows": |o| o.x().select(0, o.row());
    "add to rows": |o| o.x().select_assign(0, o.row(), o.y(), IndexingUpdateOp::Add);
    "embedding": |o| embedding(o.x(), o.index());
    "embedding, backward": |o| o.gradient(&o.x(), |weight| {
        embedding(weight, o.index()).reshape([24, 6]).slice([0..24, 0..6])
    });
    "product": |o| o.x().matmul(o.right.clone());
    "product, transposed": |o| o.x().transpose().matmul(o.y());
    "product with a bias": |o| {
        linear(o.x(), o.right.clone(), Some(o.channels.clone().narrow(0, 0, 4)))
    };
    "linear layer with a bias": |o| {
        let bias = o.channels.clone().narrow(0, 0, 4);
        wide_linear(o.x(), o.right.clone(), Some(bias)).expect("shapes that fit")
    };
    "batch of products": |o| o.batch.clone().matmul(o.batch.clone().swap_dims(1, 2));
    "product, backward": |o| o.gradient(&o.x(), |x| x.matmul(tracked(&o.right)));
    "products of groups": |o| Operands::grouped(o.x(), o.batch.clone());
    "products of groups, backward": |o| {
        let of_x = o.gradient(&o.x(), |x| Operands::grouped(x, tracked(&o.batch)));
        (of_x, o.gradient(&o.batch, |weight| {
            Operands::grouped(tracked(&o.x), weight).unsqueeze()
        }))
    };
    "softmax": |o| softmax(o.x(), 1);
    "softmax, backward": |o| o.gradient(&o.x(), |x| softmax(x, 1));
    "log-softmax": |o| log_softmax(o.x(), 1);
    "layer norm": |o| Operands::centred(o.x(), [&o.channels; 2]);
    "layer norm, backward": |o| o.gradient(&o.x(), |x| {
        Operands::centred(x, [&tracked(&o.channels), &tracked(&o.channels)])
    });
    "RMS norm": |o| rms_norm(o.x(), o.channels.clone(), 1e-6).expect("shapes that fit");
    "RMS norm, backward": |o| o.gradient(&o.x(), |x| {
        rms_norm(x, tracked(&o.channels), 1e-6).expect("shapes that fit")
    });
    "attention": |o| Operands::attend(o.heads(), None);
    "attention, backward": |o| o.gradient(&o.heads(), |q| Operands::attend(q, None));
    "packed attention": |o| Operands::attend(o.heads(), Some(&[0, 3, 4]));
    "packed attention, backward": |o| o.gradient(&o.heads(), |q| {
        Operands::attend(q, Some(&[0, 3, 4]))
    });
};

/// The result of an operation in an element type.
#[derive(Clone, Debug, Serialize)]
pub struct OperationRow {
    /// The operation.
    pub case: &'static str,
    /// The element type of its floats.
    pub dtype: &'static str,
    /// The largest error, in units of the largest value of the reference or of 1.
    pub max_error: f64,
    /// The largest error that passes.
    pub tolerance: f64,
    /// True if the results agree.
    pub pass: bool,
    /// The device's error or the difference that has no size.
    pub problem: Option<String>,
    /// The time of the operation; of a second run, if the first took long.
    pub seconds: f64,
}

/// The operations in each of the types, and their number; `from` skips those before.
///
/// `begin` is called with an operation's number before it runs, `end` with its result.
///
/// # Errors
/// Those of the callbacks.
pub fn check_operations<E>(
    device: &Device,
    dtypes: &[DType],
    from: usize,
    mut begin: impl FnMut(usize, &'static str) -> Result<(), E>,
    mut end: impl FnMut(OperationRow) -> Result<(), E>,
) -> Result<(), E> {
    let all = dtypes
        .iter()
        .flat_map(|dtype| CASES.iter().map(move |case| (*dtype, case)));
    for (number, (dtype, case)) in all.enumerate().skip(from) {
        begin(number, case.name)?;
        end(check(device, dtype, case))?;
    }
    Ok(())
}

/// The tolerance of floats: two units of the last place, or an approximation of f32.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-6),
        DType::F16 => 2f64.powi(-9),
        _ => 1e-5,
    }
}

fn check(device: &Device, dtype: DType, case: &Case) -> OperationRow {
    let results = |device: &Device, computed_in: DType| {
        // burn reports wrong shapes and lacking operations by panics.
        let run = AssertUnwindSafe(|| (case.run)(&Operands::new(device, dtype, computed_in)));
        match catch_unwind(run) {
            Ok(results) => results
                .into_iter()
                .collect::<Result<Vec<_>, _>>()
                .map_err(|error| error.to_string()),
            Err(panic) => Err(said(&panic)),
        }
    };
    let started = Instant::now();
    let both =
        results(&Device::flex(), DType::F32).and_then(|cpu| Ok((cpu, results(device, dtype)?)));
    let mut took = started.elapsed();
    // The first run of an operation may compile kernels.
    if took > AGAIN {
        let started = Instant::now();
        let _checked = results(device, dtype);
        took = took.min(started.elapsed());
    }
    let compared = both.and_then(|(cpu, found)| {
        let mut errors = cpu.iter().zip(&found).map(|(cpu, found)| error(cpu, found));
        errors.try_fold(0f64, |most, error| Ok(most.max(error?)))
    });
    let mut approximated = APPROXIMATED.iter();
    let approximated = approximated.find(|row| (row.0, row.1) == (case.name, dtype));
    let tolerance = tolerance(dtype).max(approximated.map_or(0.0, |row| row.2));
    let (max_error, problem) = match compared {
        Ok(error) => (error, None),
        Err(problem) => (f64::INFINITY, Some(problem)),
    };
    OperationRow {
        case: case.name,
        dtype: dtype.name(),
        max_error,
        tolerance,
        pass: max_error <= tolerance,
        problem,
        seconds: took.as_secs_f64(),
    }
}

/// The text of a panic.
fn said(panic: &Box<dyn std::any::Any + Send>) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic").to_owned()
}

/// The largest difference, in units of the largest value or of 1. Whole numbers and flags are equal
/// or not.
fn error(expected: &TensorData, found: &TensorData) -> Result<f64, String> {
    if expected.shape() != found.shape() {
        return Err(format!(
            "expected shape {:?}, found {:?}",
            expected.shape(),
            found.shape()
        ));
    }
    let values = |data: &TensorData| match data.dtype() {
        DType::Bool(_) => data.iter::<bool>().map(f64::from).collect(),
        _ => data.iter::<f64>().collect::<Vec<f64>>(),
    };
    let (expected, found) = (values(expected), values(found));
    let largest = expected
        .iter()
        .fold(1f64, |most, value| most.max(value.abs()));
    for (at, (one, other)) in expected.iter().zip(&found).enumerate() {
        if one.is_finite() != other.is_finite() {
            return Err(format!("element {at}: expected {one}, found {other}"));
        }
    }
    let differences = expected
        .iter()
        .zip(&found)
        .filter(|(one, _)| one.is_finite());
    Ok(differences.fold(0f64, |most, (one, other)| most.max((one - other).abs())) / largest)
}
