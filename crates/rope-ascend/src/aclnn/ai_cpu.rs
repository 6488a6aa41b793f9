//! Calls that the vendor's first phase assigns to the AI CPU.
//!
//! Operators run on the AI Core or, in some element types, on the AI CPU: a few general-purpose
//! cores, much slower, which the operator's documentation does not mention. These tables record the
//! choices of the vendor's first phases, compiled for the host from the sources of [`REVISION`] for
//! Atlas A2 and A3, which choose alike; `cargo xaudit vendor-operators` compares them again.
//! [`ai_cpu_calls`] counts the calls that the tables name.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use super::call::{Argument, Names};
use crate::sys::aclDataType;

/// The repositories of the operators, at the commits used for the tables.
pub const REVISION: &str = "hicann/ops-math at c41933244c31, hicann/ops-nn at e5c3fa9327ea, \
                            hicann/ops-transformer at c29bc1069d32";

macro_rules! engines {
    ($($operators:literal: $ai_core:literal, $ai_cpu:literal;)*) => {
        &[$(($operators, $ai_core, $ai_cpu)),*]
    };
}

/// Operators, by their methods of [`Operators`](super::Operators), with the element types accepted
/// by their first phases: those on the AI Core, and those on the AI CPU.
///
/// The type is that of the operator's tensors and numbers, except indices, conditions, masks and
/// truth values. For a cast, it is the type of the input of casts to 32-bit floats
/// ([`CASTS_ON_AI_CPU`] has the others). Integer powers with an exponent that has a shortcut run on
/// the AI Core, and so do draws with a probability below 1.
const ENGINES: &[(&str, &str, &str)] = engines! {
    "add adds sub mul muls eq ne eq_scalar ne_scalar amax amin prod_dim":
        "f32 f16 bf16 i64 i32 i8 u8 bool", "f64 i16";
    "div divs normal embedding": "f32 f16 bf16 i64 i32 i16 i8 u8 bool", "f64";
    "remainder remainder_scalar arange": "f32 f16 bf16 i64 i32", "f64";
    "pow pow_scalar": "f32 f16 bf16 i32 i8 u8", "f64 i64 i16";
    "neg": "f32 f16 bf16 i64 i32 i8", "f64";
    "abs": "f32 f16 bf16 i64 i32 u8 bool", "f64 i16 i8";
    "sign": "f32 f16 bf16 i32 bool", "f64 i64";
    "sqrt reciprocal exp log log1p erf sin cos ceil sigmoid sigmoid_backward softmax log_softmax":
        "f32 f16 bf16", "f64";
    "tanh gelu gelu_backward embedding_backward mm add_mm batch_mm grouped_mm layer_norm \
     flash_attention flash_attention_grad flash_attention_packed flash_attention_packed_grad":
        "f32 f16 bf16", "";
    "floor": "f32 f16 bf16 i64 i32 i16 i8 u8 u16 u32 u64", "f64";
    "round": "f32 f16 bf16 i32", "f64 i64";
    "clamp argmax": "f32 f16 bf16 i64 i32", "f64 i16 i8 u8";
    "relu": "f32 f16 bf16 i64 i32 i8 u8", "";
    "gt ge lt gt_scalar ge_scalar lt_scalar select_where":
        "f32 f16 bf16 i64 i32 i8 u8 bool", "f64 i16 u16 u32 u64";
    "le le_scalar": "f32 f16 bf16 i64 i32 i8 u8 bool", "f64 i16 u16";
    "logical_and logical_or logical_xor logical_not any all":
        "f32 f16 bf16 i64 i32 i8 bool", "f64 i16 u8";
    "masked_fill": "f32 f16 bf16 i32 i8 bool", "i64";
    "cast": "f32 f16 bf16 i64 i32 i16 i8 u8 bool", "f64 u16 u32 u64";
    "fill": "f32 f16 bf16 i64 i32 i8 u16 u32 u64 bool", "f64 i16 u8";
    "copy": "f32 f16 bf16 f64 i64 i32 i16 i8 u8 u16 u32 u64 bool", "";
    "uniform argmin": "f32 f16 bf16 i64 i32 i16 i8 u8", "f64";
    "bernoulli": "f32 f16 bf16 i32 i8 u8 bool", "f64 i64 i16";
    "reduce_sum": "f32 f16 bf16 i64 i32 bool", "f64 i16 i8 u8";
    "mean": "f32 f16 bf16", "f64 i64 i32 i16 i8 u8";
    "max_dim min_dim": "f32 f16 bf16 i64 bool", "";
    "cumsum": "f32 f16 bf16 i32", "f64 i64 i16 i8 u8";
    "cat": "f32 f16 bf16 f64 i64 i32 i16 i8 u8 bool", "";
    "repeat index_select": "f32 f16 bf16 i64 i32 i16 i8 u8 u16 u32 u64 bool", "f64";
    "flip": "f32 f16 i64 i32 i16", "bf16 f64 i8 u8 bool";
    "gather": "f32 f16 bf16 i64 i32 i16 i8 u8 u16 u32 u64", "f64 bool";
    "scatter scatter_add": "f32 f16 bf16 i32 i8 u8", "f64 i64 i16 bool";
    "index_add": "f32 f16 bf16 i32 i16", "f64 i64 i8 u8 bool";
};

const ALL: &str = "f32 f16 bf16 f64 i64 i32 i16 i8 u8 u16 u32 u64 bool";

/// Types from which and to which casts run on the AI CPU.
const CASTS_ON_AI_CPU: &[(&str, &str)] = &[
    ("f64 u64", ALL),
    (ALL, "f64 u64"),
    ("f32 f16", "u16 u32"),
    ("bf16 bool", "i16 u16 u32"),
    ("i16", "bf16 bool"),
    ("u8", "bool"),
    ("u16 u32", "f32 f16 bf16 bool"),
];

/// Types of which the AI CPU repeats the elements of an input along axes.
const REPEATS_ON_AI_CPU: &str = "i16 u16 u64";

/// Types that operators for all types move on the AI Core only between dense tensors.
const STRIDES_ON_AI_CPU: &str = "f64";

/// Elements of a dense run from which on the AI Core stores into three or four axes.
const LONG_RUN: usize = 32;

/// True if the AI Core stores into a view with these sizes and strides.
///
/// It accepts non-dense outputs with equal gaps along all axes, such as the rows of a padded
/// matrix, and three or four axes with runs of at least 32 elements. (Two more special cases are
/// ignored here.)
pub fn stores_on_ai_core(dims: &[usize], strides: &[usize]) -> bool {
    // For each axis, its stride in a dense view and its actual stride.
    let mut gaps = vec![(1, 0); dims.len()];
    let mut run = 1;
    for (gap, (dim, step)) in gaps.iter_mut().zip(dims.iter().zip(strides)).rev() {
        *gap = (run, *step);
        run *= dim;
    }
    let Some(last) = gaps.iter().rposition(|(dense, step)| dense != step) else {
        return true;
    };
    // The axes joined where one lies densely in the next: the run, and how many there are.
    let (mut axes, mut run, mut joined) = (1, None, (1, 1));
    for (&dim, &step) in dims.iter().zip(strides).rev() {
        let (size, inner) = joined;
        if size * inner == step {
            joined.0 *= dim;
            continue;
        }
        if step < *run.get_or_insert(size) {
            return false;
        }
        axes += 1;
        joined = (dim, step);
    }
    if matches!(axes, 3 | 4) && run.is_some_and(|run| run >= LONG_RUN) {
        return true;
    }
    let (dense, step) = gaps[last];
    let Some(mut gap) = step.checked_sub(dense) else {
        return false;
    };
    (0..last).rev().all(|axis| {
        gap *= dims[axis + 1];
        gaps[axis].1.checked_sub(gaps[axis].0) == Some(gap)
    })
}

/// A tensor of a call, with the properties that determine the processor.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// Its parameter in [`OPERATORS`](super::OPERATORS).
    pub parameter: &'a str,
    /// True if the operator writes it.
    pub is_written: bool,
    /// Element type.
    pub dtype: aclDataType,
    /// Length of each axis.
    pub dims: &'a [usize],
    /// Stride of each axis, in elements.
    pub strides: &'a [usize],
}

/// True if axes with these strides and lengths, from the innermost, have no gap between elements.
fn fit<'a>(axes: impl Iterator<Item = (&'a usize, &'a usize)>) -> bool {
    let mut run = 1;
    axes.filter(|(_, dim)| **dim > 1).all(|(step, dim)| {
        let expected = run;
        run *= dim;
        *step == expected
    })
}

fn is_dense(view: &Operand<'_>) -> bool {
    fit(view.strides.iter().zip(view.dims).rev())
}

/// True if the elements are dense in some order of the axes.
fn is_transposed_dense(view: &Operand<'_>) -> bool {
    let mut axes: Vec<_> = view.strides.iter().zip(view.dims).collect();
    axes.sort_unstable();
    fit(axes.into_iter())
}

fn is_stored_on_ai_core(view: &Operand<'_>) -> bool {
    is_transposed_dense(view) || stores_on_ai_core(view.dims, view.strides)
}

/// True if the AI Core would first have to repeat this input along an axis.
fn is_repeated(view: &Operand<'_>) -> bool {
    view.dims
        .iter()
        .zip(view.strides)
        .any(|(dim, step)| *dim > 1 && *step == 0)
}

/// The name of an element type in [`ENGINES`].
fn name(dtype: aclDataType) -> &'static str {
    match dtype {
        aclDataType::FLOAT => "f32",
        aclDataType::FLOAT16 => "f16",
        aclDataType::BF16 => "bf16",
        aclDataType::DOUBLE => "f64",
        aclDataType::INT64 => "i64",
        aclDataType::INT32 => "i32",
        aclDataType::INT16 => "i16",
        aclDataType::INT8 => "i8",
        aclDataType::UINT8 => "u8",
        aclDataType::UINT16 => "u16",
        aclDataType::UINT32 => "u32",
        aclDataType::UINT64 => "u64",
        aclDataType::BOOL => "bool",
        _ => "",
    }
}

fn has(types: &str, dtype: aclDataType) -> bool {
    let name = name(dtype);
    types.split(' ').any(|listed| listed == name)
}

/// Returns the element types that an operator, given by its method, takes on the AI Core and on the
/// AI CPU.
pub fn engines(method: &str) -> Option<(&'static str, &'static str)> {
    let row = |(methods, ..): &&(&str, &str, &str)| methods.split(' ').any(|m| m == method);
    ENGINES.iter().find(row).map(|(_, core, cpu)| (*core, *cpu))
}

/// True if, according to the tables of this module, a call of the operator with this method of
/// [`Operators`](super::Operators) runs partly or entirely on the AI CPU.
pub fn runs_on_ai_cpu(method: &str, operands: &[Operand<'_>]) -> bool {
    let named = |wanted: &str| operands.iter().find(|each| each.parameter == wanted);
    let typed = ["x", "tensors", "weight", "grad", "out"]
        .into_iter()
        .find_map(named);
    let Some(typed) = typed else {
        return false;
    };
    let slow = match (method, named("out")) {
        ("cast", Some(out)) => CASTS_ON_AI_CPU
            .iter()
            .any(|(from, to)| has(from, typed.dtype) && has(to, out.dtype)),
        _ => engines(method).is_some_and(|(_, cpu)| has(cpu, typed.dtype)),
    };
    let strided = |each: &Operand<'_>| {
        let widened = method == "copy" && typed.dims != each.dims;
        if has(STRIDES_ON_AI_CPU, each.dtype) && (widened || !is_dense(each)) {
            return true;
        }
        if each.is_written {
            return !is_stored_on_ai_core(each);
        }
        has(REPEATS_ON_AI_CPU, each.dtype) && (is_repeated(each) || widened)
    };
    slow || operands.iter().any(strided)
}

/// [`runs_on_ai_cpu`] for the arguments of a call.
pub(super) fn on_ai_cpu(names: Names, arguments: &[Argument<'_>]) -> bool {
    let mut operands = Vec::with_capacity(arguments.len());
    for (parameter, argument) in names.parameters.iter().zip(arguments) {
        let is_written = matches!(
            argument,
            Argument::Out(_) | Argument::Outs(_) | Argument::Ref(_)
        );
        let views = match argument {
            Argument::In(view) | Argument::Ref(view) | Argument::Out(view) => {
                std::slice::from_ref(view)
            }
            Argument::Ins(views) | Argument::Outs(views) => views,
            _ => &[],
        };
        operands.extend(views.iter().map(|view| Operand {
            parameter,
            is_written,
            dtype: view.dtype,
            dims: view.dims,
            strides: view.strides,
        }));
    }
    runs_on_ai_cpu(names.method, &operands)
}

static CALLS: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

/// Counts a call of the operator with this C function.
pub(super) fn count(function: &'static str) {
    let mut calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    *calls.entry(function).or_default() += 1;
}

/// Returns the number of calls on the AI CPU per operator (by its C function), for all streams,
/// since the start or the last [`reset_ai_cpu_calls`]. The counts are calculated from the tables of
/// this module, not observed.
pub fn ai_cpu_calls() -> Vec<(&'static str, u64)> {
    let calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    calls
        .iter()
        .map(|(function, calls)| (*function, *calls))
        .collect()
}

/// Resets the counts of [`ai_cpu_calls`].
pub fn reset_ai_cpu_calls() {
    CALLS.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

#[cfg(test)]
mod tests {
    use super::super::OPERATORS;
    use super::{ENGINES, Operand, engines, runs_on_ai_cpu, stores_on_ai_core};
    use crate::sys::aclDataType;

    #[test]
    fn each_operator_has_one_row() {
        let rows = ENGINES
            .iter()
            .map(|(methods, ..)| methods.split(' ').count());
        assert_eq!(rows.sum::<usize>(), OPERATORS.len());
        for operator in OPERATORS {
            assert!(engines(operator.method).is_some(), "{}", operator.method);
        }
    }

    #[test]
    fn rows_with_gaps_are_stored_by_the_ai_core_and_steps_between_others_are_not() {
        for (dims, strides, expected) in [
            (&[2, 3, 4][..], &[12, 4, 1][..], true),
            // A column block of a matrix.
            (&[5, 3], &[8, 1], true),
            // Every second element.
            (&[5], &[2], true),
            (&[2, 3], &[6, 2], true),
            (&[2, 2], &[12, 2], false),
            (&[2, 2, 2, 3, 6], &[224, 112, 56, 16, 1], false),
            // A block of a cube, by the length of its runs.
            (&[4, 6, 31], &[640, 64, 1], false),
            (&[4, 6, 32], &[640, 64, 1], true),
            (&[3, 2], &[1, 3], false),
        ] {
            assert_eq!(
                stores_on_ai_core(dims, strides),
                expected,
                "{dims:?} {strides:?}"
            );
        }
    }

    #[test]
    fn copies_of_some_types_run_on_the_ai_cpu_unless_both_views_are_dense() {
        let (dense, transposed, repeated) = ([3, 1], [1, 2], [0, 1]);
        for (dtype, source, expected) in [
            (aclDataType::FLOAT, (&[2, 3][..], &transposed[..]), false),
            (aclDataType::FLOAT, (&[2, 3], &repeated), false),
            (aclDataType::DOUBLE, (&[2, 3], &dense), false),
            (aclDataType::DOUBLE, (&[2, 3], &transposed), true),
            (aclDataType::DOUBLE, (&[3], &[1]), true),
            (aclDataType::INT16, (&[2, 3], &transposed), false),
            (aclDataType::INT16, (&[2, 3], &repeated), true),
            (aclDataType::INT16, (&[3], &[1]), true),
        ] {
            let operand = |parameter, dims, strides| Operand {
                parameter,
                is_written: parameter == "x",
                dtype,
                dims,
                strides,
            };
            let (dims, strides) = source;
            let operands = [
                operand("x", &[2, 3], &dense),
                operand("source", dims, strides),
            ];
            let found = runs_on_ai_cpu("copy", &operands);
            assert_eq!(found, expected, "{dtype:?} {dims:?} {strides:?}");
        }
    }
}
