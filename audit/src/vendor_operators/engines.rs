//! What `rope-ascend` says of where operators run, held to the kernels that the vendor's code
//! chooses.

use std::collections::{BTreeMap, BTreeSet};

use rope_ascend::aclnn::{Operand, engines, runs_on_ai_cpu};
use rope_ascend::sys::aclDataType;
use serde::Serialize;

use super::ask::Answer;
use super::call::{Argument, Call, TYPES, type_name};

/// How a kernel of the AI CPU ends in an [`Answer`].
const AI_CPU: &str = ":AI CPU";
/// Operators whose output holds truth values.
const TRUTH: &str = "eq ne gt ge lt le eq_scalar ne_scalar gt_scalar ge_scalar lt_scalar le_scalar \
                     logical_and logical_or logical_xor logical_not any all";
/// Operators whose output holds indices.
const INDICES: &str = "argmax argmin";
/// Operators of which the tables, which know neither numbers nor ranks, may say AI CPU where the
/// vendor's code stays on the AI Core: powers with a shorter way, draws of a probability below 1,
/// the index in a tensor without axes.
const CAUTIOUS: &str = "pow_scalar bernoulli argmin";

/// Operators whose first phases take every type. Those that have a kernel are in its definition,
/// which is looked at when it is launched; the others are not compared.
const UNTYPED: &str = "flash_attention flash_attention_grad flash_attention_packed \
                       flash_attention_packed_grad";

fn is_in(words: &str, word: &str) -> bool {
    words.split_whitespace().any(|each| each == word)
}

/// Calls in the terms of the tables, compared with them.
#[derive(Debug, Default, Serialize)]
pub(super) struct Placement {
    /// Calls whose kernels were compared.
    compared: usize,
    /// Those that the vendor's code runs elsewhere than the tables say.
    misplaced: Vec<String>,
    /// Those of [`CAUTIOUS`] that it runs on the AI Core nevertheless.
    cautious: usize,
    /// Operators that accept other types than the tables list.
    mistyped: Vec<String>,
}

/// Whether the vendor's code launches a kernel on the AI CPU.
fn found(answer: &Answer) -> bool {
    answer.kernels.iter().any(|kernel| kernel.ends_with(AI_CPU))
}

/// Whether the tables and the vendor's code disagree about where an accepted call runs.
pub(super) fn is_misplaced(call: &Call, answer: &Answer) -> bool {
    // Without a kernel it runs nowhere.
    !answer.kernels.is_empty() && predicted(call) != found(answer)
}

/// Whether the tables say that the call runs on the AI CPU.
fn predicted(call: &Call) -> bool {
    let sizes = |values: &[i64]| -> Vec<usize> {
        let size = |value: &i64| usize::try_from(*value).unwrap_or(0);
        values.iter().map(size).collect()
    };
    let mut views = Vec::new();
    for ((parameter, kind), argument) in call.operator.parameters.iter().zip(&call.arguments) {
        for tensor in argument.tensors() {
            let strides = tensor.strides.clone().unwrap_or_else(|| tensor.dense());
            let is_written = matches!(*kind, "Out" | "OptOut" | "Ref" | "OptRef");
            let (dims, strides) = (sizes(&tensor.dims), sizes(&strides));
            views.push((*parameter, is_written, tensor.dtype, dims, strides));
        }
    }
    let operands: Vec<Operand<'_>> = views
        .iter()
        .map(|(parameter, is_written, dtype, dims, strides)| Operand {
            parameter,
            is_written: *is_written,
            dtype: *dtype,
            dims,
            strides,
        })
        .collect();
    runs_on_ai_cpu(call.operator.method, &operands)
}

/// The one type of a call, where the tables speak of it: all tensors and numbers have the type,
/// except indices, masks, truth values, and what a cast gives; and no tensor is empty.
fn type_of_tables(call: &Call) -> Option<aclDataType> {
    let method = call.operator.method;
    let mut types = BTreeSet::new();
    for ((parameter, _), argument) in call.operator.parameters.iter().zip(&call.arguments) {
        let tensors = argument.tensors();
        if tensors.iter().any(|tensor| tensor.dims.contains(&0)) {
            return None;
        }
        let of_argument: Vec<i32> = match argument {
            Argument::Scalar(dtype, _) | Argument::DType(dtype) => vec![dtype.0],
            _ => tensors.iter().map(|tensor| tensor.dtype.0).collect(),
        };
        let is_expected = |expected: &[aclDataType]| {
            of_argument
                .iter()
                .all(|dtype| expected.contains(&aclDataType(*dtype)))
        };
        let (integers, truth) = (
            [aclDataType::INT32, aclDataType::INT64],
            [aclDataType::BOOL],
        );
        let is_known = match *parameter {
            "alpha" | "probability" => true,
            "dtype" | "out" if method == "cast" => true,
            "index" | "indices" => is_expected(&integers),
            "out" if is_in(INDICES, method) => is_expected(&integers),
            "updates" => is_expected(&[aclDataType::FLOAT, aclDataType::INT64]),
            "condition" | "mask" | "atten_mask" => is_expected(&truth),
            "softmax_max" | "softmax_sum" => is_expected(&[aclDataType::FLOAT]),
            "out" if is_in(TRUTH, method) => is_expected(&truth),
            _ => {
                types.extend(of_argument);
                true
            }
        };
        if !is_known {
            return None;
        }
    }
    let mut types = types.into_iter();
    types
        .next()
        .filter(|_| types.next().is_none())
        .map(aclDataType)
}

/// Compares the calls of a sweep that the vendor's code accepts.
pub(super) fn place(calls: &[Call], answers: &[Answer]) -> Placement {
    let mut placement = Placement::default();
    // Types that each operator accepted, in the order of the table of types.
    let mut accepted: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
    for (call, answer) in calls.iter().zip(answers) {
        let method = call.operator.method;
        let seen = accepted.entry(method).or_default();
        if answer.vendor.code != 0 {
            continue;
        }
        let Some(dtype) = type_of_tables(call) else {
            continue;
        };
        let (core, cpu) = engines(method).unwrap_or_default();
        let name = type_name(dtype);
        if is_in(UNTYPED, method) && !is_in(core, &name) && !is_in(cpu, &name) {
            continue;
        }
        seen.extend(TYPES.iter().position(|(_, each)| *each == dtype));
        placement.compared += usize::from(!answer.kernels.is_empty());
        if is_misplaced(call, answer) {
            if is_in(CAUTIOUS, method) && !found(answer) {
                placement.cautious += 1;
            } else {
                placement
                    .misplaced
                    .push(format!("{call}: {}", answer.kernels.join(", ")));
            }
        }
    }
    for (method, found) in accepted {
        let (core, cpu) = engines(method).unwrap_or_default();
        let listed = |name: &str| is_in(core, name) || is_in(cpu, name);
        for (at, (name, _)) in TYPES.iter().enumerate() {
            if found.contains(&at) != listed(name) {
                let verb = if listed(name) {
                    "does not take"
                } else {
                    "takes"
                };
                placement.mistyped.push(format!("{method} {verb} {name}"));
            }
        }
    }
    placement
}

impl Placement {
    /// What is not as it should be.
    pub(super) fn failures(&self) -> Vec<String> {
        let first = |wrong: &[String], what: &str| {
            let first = wrong.first()?;
            Some(format!(
                "{what} of {} calls or types, such as {first}",
                wrong.len()
            ))
        };
        let elsewhere = "the tables of rope-ascend (aclnn/ai_cpu.rs) name another processor";
        let types = "the tables of rope-ascend (aclnn/ai_cpu.rs) list other types";
        let misplaced = first(&self.misplaced, elsewhere);
        misplaced
            .into_iter()
            .chain(first(&self.mistyped, types))
            .collect()
    }

    pub(super) fn table(&self) -> String {
        let mut text =
            "\n| processors by the tables of rope-ascend | calls |\n|---|---|\n".to_owned();
        let mut row = |name: &str, calls: usize| text += &format!("| {name} | {calls} |\n");
        row("compared with the vendor's kernels", self.compared);
        row("on another processor", self.misplaced.len());
        row(
            "on the AI Core, where the tables have no number to tell",
            self.cautious,
        );
        for wrong in self.misplaced.iter().chain(&self.mistyped) {
            text += &format!("wrong in the tables: {wrong}\n");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use rope_ascend::aclnn::OPERATORS;

    use super::super::ask::Verdict;
    use super::*;

    fn asked(line: &str, code: i32, kernels: &str) -> (Call, Answer) {
        let vendor = Verdict {
            code,
            message: String::new(),
        };
        let kernels = kernels.split_terminator(',').map(str::to_owned).collect();
        let answer = Answer {
            vendor,
            kernels,
            ..Answer::default()
        };
        (Call::parse(line).expect(line), answer)
    }

    #[test]
    fn calls_are_compared_where_the_tables_speak_of_them() {
        for (line, dtype) in [
            ("aclnnAdd f16[2] f16[2] i64:1 f16[2]", Some("f16")),
            ("aclnnAdd f16[2] f32[2] i64:1 f32[2]", None),
            ("aclnnAdd f16[2] f16[0] i64:1 f16[2]", None),
            ("aclnnGtScalar i8[2] i8:1 bool[2]", Some("i8")),
            ("aclnnGtScalar i8[2] i8:1 i8[2]", None),
            ("aclnnCast i16[2] bf16 bf16[2]", Some("i16")),
            ("aclnnGather u8[2] 0 i32[2] u8[2]", Some("u8")),
            ("aclnnArgMax i32[2] 0 0 i64[]", Some("i32")),
            ("aclnnSWhere u8[2] f32[2] f32[2] f32[2]", None),
            ("aclnnMean f32[2] {} 0 f64 f32[]", None),
        ] {
            let call = Call::parse(line).expect(line);
            assert_eq!(
                type_of_tables(&call).map(type_name).as_deref(),
                dtype,
                "{line}"
            );
        }
    }

    #[test]
    fn other_processors_and_other_types_are_reported() {
        let (calls, answers): (Vec<_>, Vec<_>) = [
            asked("aclnnNeg f64[2] f64[2]", 0, "Neg:AI CPU"),
            asked("aclnnNeg f32[2] f32[2]", 0, "Neg:AI Core"),
            asked("aclnnNeg f16[2] f16[2]", 0, "Neg:AI CPU"),
            asked(
                "aclnnNeg bf16[2]/[4] bf16[2]",
                0,
                "AsStrided:AI Core,Neg:AI CPU",
            ),
            asked("aclnnNeg bf16[0] bf16[0]", 0, ""),
            asked("aclnnNeg i8[2] i8[2]", 161002, ""),
            asked("aclnnNeg i32[2] i32[2]", 0, "Neg:AI Core"),
            asked("aclnnNeg i64[2] i64[2]", 0, "Neg:AI Core"),
            asked("aclnnNeg u8[2] u8[2]", 0, "Neg:AI Core"),
            asked(
                "aclnnPowTensorScalar i64[2] i64:2 i64[2]",
                0,
                "Square:AI Core",
            ),
        ]
        .into_iter()
        .unzip();
        let placement = place(&calls, &answers);
        assert_eq!((placement.compared, placement.cautious), (8, 1));
        let misplaced = [
            "aclnnNeg f16[2] f16[2]: Neg:AI CPU",
            "aclnnNeg bf16[2]/[4] bf16[2]: AsStrided:AI Core, Neg:AI CPU",
        ];
        assert_eq!(placement.misplaced, misplaced);
        let of_neg = placement
            .mistyped
            .iter()
            .filter(|text| text.starts_with("neg "));
        let of_neg: Vec<&str> = of_neg.map(String::as_str).collect();
        assert_eq!(of_neg, ["neg does not take i8", "neg takes u8"]);
        assert_eq!(placement.failures().len(), 2);
    }

    #[test]
    fn each_operator_that_is_named_is_in_the_table() {
        for words in [TRUTH, INDICES, CAUTIOUS, UNTYPED] {
            for word in words.split_whitespace() {
                assert!(OPERATORS.iter().any(|each| each.method == word), "{word}");
            }
        }
    }
}
