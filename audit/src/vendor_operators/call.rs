//! A call of an operator's first phase, as text: `aclnnAdd f32[2,3] f32[3]/[1]+4 i64:1 f32[2,3]`.
//!
//! | argument | text |
//! |---|---|
//! | tensor | type, dims; strides unless it is dense; offset unless 0 |
//! | list of tensors | `(f32[2];f32[3])` |
//! | scalar | `f16:0.5`, type and value |
//! | integers | `{1,-1}` |
//! | text | `"none"` |
//! | element type | `f32`, or its number |
//! | number | `1`, `0.5`; truth values are 0 and 1 |
//! | none | `null` |
//!
//! The simulator records calls in the same form.

use std::fmt;

use rope_ascend::aclnn::{OPERATORS, OperatorInfo};
use rope_ascend::sys::aclDataType;

/// The element types of the vendor's headers that operators here take or refuse.
pub(super) const TYPES: [(&str, aclDataType); 13] = [
    ("f32", aclDataType::FLOAT),
    ("f16", aclDataType::FLOAT16),
    ("bf16", aclDataType::BF16),
    ("f64", aclDataType::DOUBLE),
    ("i8", aclDataType::INT8),
    ("i16", aclDataType::INT16),
    ("i32", aclDataType::INT32),
    ("i64", aclDataType::INT64),
    ("u8", aclDataType::UINT8),
    ("u16", aclDataType::UINT16),
    ("u32", aclDataType::UINT32),
    ("u64", aclDataType::UINT64),
    ("bool", aclDataType::BOOL),
];

/// The name of an element type, or its number.
pub(super) fn type_name(dtype: aclDataType) -> String {
    let known = TYPES.iter().find(|(_, each)| *each == dtype);
    known.map_or_else(|| dtype.0.to_string(), |(name, _)| (*name).to_owned())
}

pub(super) fn type_of(name: &str) -> Option<aclDataType> {
    let known = TYPES.iter().find(|(each, _)| *each == name);
    known.map_or_else(
        || name.parse().ok().map(aclDataType),
        |(_, dtype)| Some(*dtype),
    )
}

/// A view. Strides and offset count elements.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tensor {
    pub(super) dtype: aclDataType,
    pub(super) dims: Vec<i64>,
    /// Those of a dense tensor if absent.
    pub(super) strides: Option<Vec<i64>>,
    pub(super) offset: i64,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Argument {
    Null,
    Tensor(Tensor),
    Tensors(Vec<Tensor>),
    /// Type, and value as it is written.
    Scalar(aclDataType, String),
    Ints(Vec<i64>),
    Text(String),
    DType(aclDataType),
    Integer(i128),
    Real(f64),
}

/// A call: the operator and its arguments, as many as it has parameters.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) operator: &'static OperatorInfo,
    pub(super) arguments: Vec<Argument>,
}

/// What is wrong with a line.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ParseError {
    #[error("{0} is not in the operator table")]
    Operator(String),
    #[error("{function} has {expected} parameters, {found} arguments were found")]
    Count {
        function: &'static str,
        expected: usize,
        found: usize,
    },
    #[error("{text:?} is no {kind} ({parameter} of {function})")]
    Argument {
        function: &'static str,
        parameter: &'static str,
        kind: &'static str,
        text: String,
    },
}

impl Call {
    pub(super) fn parse(line: &str) -> Result<Self, ParseError> {
        let (function, rest) = line.split_once(' ').unwrap_or((line, ""));
        let operator = OPERATORS.iter().find(|each| each.function == function);
        let operator = operator.ok_or_else(|| ParseError::Operator(function.to_owned()))?;
        let words: Vec<&str> = rest.split_whitespace().collect();
        let parameters = operator.parameters;
        if words.len() != parameters.len() {
            return Err(ParseError::Count {
                function: operator.function,
                expected: parameters.len(),
                found: words.len(),
            });
        }
        let argument = |(word, (parameter, kind)): (&&str, &(&'static str, &'static str))| {
            Argument::parse(kind, word).ok_or_else(|| ParseError::Argument {
                function: operator.function,
                parameter,
                kind,
                text: (*word).to_owned(),
            })
        };
        let arguments = words.iter().zip(parameters).map(argument);
        Ok(Self {
            operator,
            arguments: arguments.collect::<Result<_, _>>()?,
        })
    }
}

impl Argument {
    /// An argument of a kind of the operator table.
    pub(super) fn parse(kind: &str, text: &str) -> Option<Self> {
        if text == "null" {
            return Some(Self::Null);
        }
        match kind {
            "In" | "Out" | "Ref" | "OptIn" | "OptOut" | "OptRef" => {
                Tensor::parse(text).map(Self::Tensor)
            }
            "Ins" | "Outs" | "OptIns" | "OptOuts" => {
                let members = text.strip_prefix('(')?.strip_suffix(')')?;
                let members = members.split(';').filter(|member| !member.is_empty());
                members
                    .map(Tensor::parse)
                    .collect::<Option<_>>()
                    .map(Self::Tensors)
            }
            "Num" | "OptNum" => {
                let (dtype, value) = text.split_once(':')?;
                Some(Self::Scalar(type_of(dtype)?, value.to_owned()))
            }
            "Ints" | "OptInts" => {
                integers(text.strip_prefix('{')?.strip_suffix('}')?).map(Self::Ints)
            }
            "Text" => Some(Self::Text(
                text.strip_prefix('"')?.strip_suffix('"')?.to_owned(),
            )),
            "DataType" => type_of(text).map(Self::DType),
            "f32" | "f64" => text.parse().ok().map(Self::Real),
            _ => text.parse().ok().map(Self::Integer),
        }
    }

    /// The tensors of the argument.
    pub(super) fn tensors(&self) -> &[Tensor] {
        match self {
            Self::Tensor(tensor) => std::slice::from_ref(tensor),
            Self::Tensors(tensors) => tensors,
            _ => &[],
        }
    }
}

fn integers(text: &str) -> Option<Vec<i64>> {
    let numbers = text.split(',').filter(|number| !number.is_empty());
    numbers.map(|number| number.parse().ok()).collect()
}

impl Tensor {
    fn parse(text: &str) -> Option<Self> {
        let (dtype, rest) = text.split_once('[')?;
        let (dims, rest) = rest.split_once(']')?;
        let (strides, rest) = match rest.strip_prefix("/[") {
            None => (None, rest),
            Some(rest) => {
                let (strides, rest) = rest.split_once(']')?;
                (Some(integers(strides)?), rest)
            }
        };
        let offset = match rest {
            "" => 0,
            rest => rest.strip_prefix('+')?.parse().ok()?,
        };
        let tensor = Self {
            dtype: type_of(dtype)?,
            dims: integers(dims)?,
            strides,
            offset,
        };
        let rank = tensor.dims.len();
        tensor
            .strides
            .as_ref()
            .is_none_or(|strides| strides.len() == rank)
            .then_some(tensor)
    }

    /// The strides of a dense tensor of its shape.
    pub(super) fn dense(&self) -> Vec<i64> {
        let mut strides = vec![1; self.dims.len()];
        for axis in (1..self.dims.len()).rev() {
            strides[axis - 1] = strides[axis] * self.dims[axis].max(1);
        }
        strides
    }
}

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]", type_name(self.dtype), joined(&self.dims))?;
        if let Some(strides) = &self.strides {
            write!(f, "/[{}]", joined(strides))?;
        }
        if self.offset != 0 {
            write!(f, "+{}", self.offset)?;
        }
        Ok(())
    }
}

impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => write!(f, "null"),
            Self::Tensor(tensor) => tensor.fmt(f),
            Self::Tensors(tensors) => {
                let members: Vec<String> = tensors.iter().map(Tensor::to_string).collect();
                write!(f, "({})", members.join(";"))
            }
            Self::Scalar(dtype, value) => write!(f, "{}:{value}", type_name(*dtype)),
            Self::Ints(values) => write!(f, "{{{}}}", joined(values)),
            Self::Text(text) => write!(f, "{text:?}"),
            Self::DType(dtype) => f.write_str(&type_name(*dtype)),
            Self::Integer(value) => value.fmt(f),
            Self::Real(value) => value.fmt(f),
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.operator.function)?;
        self.arguments
            .iter()
            .try_for_each(|argument| write!(f, " {argument}"))
    }
}

fn joined(values: &[i64]) -> String {
    let values: Vec<String> = values.iter().map(i64::to_string).collect();
    values.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_read_and_written() {
        for line in [
            "aclnnAdd f32[2,3] f16[3]/[2]+4 i64:1 f32[2,3]",
            "aclnnCat (f32[2];f32[]) -1 bf16[3]",
            "aclnnCat () 0 null",
            "aclnnReduceSum 35[2] {0,-1} 1 i64 f32[]",
            "aclnnGeluBackwardV2 f32[2] f32[2] \"none\" f32[2]",
            "aclnnInplaceNormal f32[2] 0.5 1 -7 18446744073709551615",
            "aclnnLtScalar f32[2] f64:inf bool[2]",
        ] {
            assert_eq!(Call::parse(line).expect(line).to_string(), line);
        }
    }

    #[test]
    fn wrong_lines_are_refused() {
        for (line, message) in [
            ("aclnnNo f32[2]", "aclnnNo is not in the operator table"),
            (
                "aclnnNeg f32[2]",
                "aclnnNeg has 2 parameters, 1 arguments were found",
            ),
            (
                "aclnnNeg f32[2] f32[2]/[1,1]",
                "\"f32[2]/[1,1]\" is no Out (out of aclnnNeg)",
            ),
        ] {
            let error = Call::parse(line).expect_err(line);
            assert_eq!(error.to_string(), message);
        }
    }
}
