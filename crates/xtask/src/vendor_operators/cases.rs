//! Calls made from the operator table: which types, shapes, strides, attributes and absences each
//! operator is asked about.
//!
//! A call is an example of its operator with one thing or two changed. Examples are rows by the
//! parameters that the table names; the first is the base of all changes.

use std::collections::HashSet;

use rope_ascend::aclnn::OperatorInfo;

use super::call::{Argument, Call, TYPES, Tensor, type_of};
use super::{Result, VendorError};

/// Examples of the operators with some parameters.
struct Family {
    /// The names of the parameters in the table; numbers end in `:Num`.
    parameters: &'static str,
    /// The operators, if not all with these parameters.
    only: &'static [&'static str],
    /// Arguments as calls write them. `*` is a type that varies, `$` each of [`SHAPES`].
    examples: &'static [&'static str],
}

/// Shapes of each rank that a descriptor is asked with, and empty ones.
const SHAPES: [&str; 14] = [
    "[2,3]",
    "[]",
    "[1]",
    "[3]",
    "[2,3,4]",
    "[2,1,3,1]",
    "[2,2,2,2,2]",
    "[2,2,2,2,2,2]",
    "[2,2,2,2,2,2,2]",
    "[2,2,2,2,2,2,2,2]",
    "[2,2,2,2,2,2,2,2,2]",
    "[0]",
    "[0,3]",
    "[2,0,3]",
];

/// Changes of a tensor's shape beside those.
const OTHER_SHAPES: [&str; 5] = ["[3,2]", "[2,1]", "[1,3]", "[1,2,3]", "[2]"];

const FAMILIES: &[Family] = &[
    all("x out", &["*$ *$"]),
    all(
        "x other out",
        &[
            "*$ *$ *$",
            "*[2,1] *[1,3] *[2,3]",
            "*[2,3] *[3] *[2,3]",
            WIDE_BROADCAST,
        ],
    ),
    all("x other:Num out", &["*$ *:1 *$"]),
    all("x exponent:Num out", &["*$ *:2 *$"]),
    all(
        "x exponent out",
        &["*$ *$ *$", "*[2,1] *[1,3] *[2,3]", WIDE_BROADCAST],
    ),
    all("grad output out", &["*$ *$ *$", "*[2,1] *[1,3] *[2,3]"]),
    all(
        "x other alpha:Num out",
        &["*$ *$ *:1 *$", "*[2,1] *[1,3] *:1 *[2,3]"],
    ),
    all(
        "x other:Num alpha:Num out",
        &["*$ *:1 *:1 *$", "*$ *:1 f32:0.5 *$"],
    ),
    all(
        "x low:Num high:Num out",
        &["*$ *:0 *:1 *$", "*$ null *:1 *$", "*$ null null *$"],
    ),
    all("x approximate out", &["*$ 0 *$"]),
    all(
        "grad x approximate out",
        &["*$ *$ \"none\" *$", "*[2,1] *[1,3] \"none\" *[2,3]"],
    ),
    all(
        "condition x other out",
        &[
            "bool$ *$ *$ *$",
            "bool[2,1] *[3] *[] *[2,3]",
            "bool[2] *[2,3] *[2,3] *[2,3]",
        ],
    ),
    all(
        "x mask value:Num",
        &["*$ bool$ *:1", "*[2,3] bool[3] *:1", "*[3] bool[2,3] *:1"],
    ),
    all("x dtype out", &["*$ * *$"]),
    all("x value:Num", &["*$ *:1"]),
    all(
        "x source",
        &[
            "*$ *$",
            "*[2,3] *[3]",
            "*[2,3] *[2,1]",
            "*[] *[1]",
            "*[1] *[]",
        ],
    ),
    all(
        "start:Num end:Num step:Num out",
        &[
            "*:0 *:5 *:1 *[5]",
            "*:5 *:0 i64:-1 *[5]",
            "*:0 *:5 *:0 *[5]",
            "*:0 *:5 *:1 *$",
        ],
    ),
    all(
        "x low high seed offset",
        &["*$ 0 1 1 0", "*$ 1 0 1 0", "*$ 0 0 1 4"],
    ),
    all(
        "x mean deviation seed offset",
        &["*$ 0 1 1 0", "*$ 0 -1 1 0", "*$ 0 0 1 4"],
    ),
    all(
        "x probability:Num seed offset",
        &["*$ f64:0.5 1 0", "*$ f32:0.5 1 4", "*$ f32:2 1 0"],
    ),
    all(
        "x dims keep_dims dtype out",
        &[
            "*[2,3] {1} 0 * *[2]",
            "*[2,3] {} 0 * *[]",
            "*[2,3] {} 1 * *[1,1]",
            "*[2,3] {0,1} 0 * *[]",
            "*[2,3] {-1} 1 * *[2,1]",
            "*[2,3] {1,-1} 0 * *[2]",
            "*[] {} 0 * *[]",
            "*[] {0} 0 * *[]",
            "*[0,3] {0} 0 * *[3]",
            "*[0,3] {1} 0 * *[0]",
            "*[0,3] {} 0 * *[]",
            "*[2,2,2,2,2,2,2,2] {7} 0 * *[2,2,2,2,2,2,2]",
            "*[2,2,2,2,2,2,2,2,2] {8} 0 * *[2,2,2,2,2,2,2,2]",
        ],
    ),
    all(
        "x dims keep_dims out",
        &[
            "*[2,3] {1} 0 *[2]",
            "*[2,3] {} 0 *[]",
            "*[2,3] {} 1 *[1,1]",
            "*[2,3] {0,1} 0 *[]",
            "*[2,3] {-1} 1 *[2,1]",
            "*[2,3] {1,-1} 0 *[2]",
            "*[] {} 0 *[]",
            "*[] {0} 0 *[]",
            "*[0,3] {0} 0 *[3]",
            "*[0,3] {1} 0 *[0]",
            "*[0,3] {} 0 *[]",
            "*[2,2,2,2,2,2,2,2] {7} 0 *[2,2,2,2,2,2,2]",
            "*[2,2,2,2,2,2,2,2,2] {8} 0 *[2,2,2,2,2,2,2,2]",
        ],
    ),
    all(
        "x dim keep_dim out indices",
        &[
            "*[2,3] 1 0 *[2] i64[2]",
            "*[2,3] -1 1 *[2,1] i64[2,1]",
            "*[2,3] 1 0 *[2] i32[2]",
            "*[] 0 0 *[] i64[]",
            "*[] -1 0 *[] i64[]",
            "*[0,3] 0 0 *[3] i64[3]",
            "*[0,3] 1 0 *[0] i64[0]",
            "*[2,2,2,2,2,2,2,2] 0 0 *[2,2,2,2,2,2,2] i64[2,2,2,2,2,2,2]",
            "*[2,2,2,2,2,2,2,2,2] 0 0 *[2,2,2,2,2,2,2,2] i64[2,2,2,2,2,2,2,2]",
        ],
    ),
    all(
        "x dim keep_dim out",
        &[
            "*[2,3] 1 0 i64[2]",
            "*[2,3] -1 1 i64[2,1]",
            "*[2,3] 1 0 i32[2]",
            "*[] 0 0 i64[]",
            "*[] -1 0 i64[]",
            "*[0,3] 0 0 i64[3]",
            "*[0,3] 1 0 i64[0]",
            "*[2,2,2,2,2,2,2,2] 0 0 i64[2,2,2,2,2,2,2]",
            "*[2,2,2,2,2,2,2,2,2] 0 0 i64[2,2,2,2,2,2,2,2]",
        ],
    ),
    all(
        "x dim keep_dim dtype out",
        &[
            "*[2,3] 1 0 * *[2]",
            "*[2,3] -1 1 * *[2,1]",
            "*[] 0 0 * *[]",
            "*[0,3] 0 0 * *[3]",
            "*[0,3] 1 0 * *[0]",
            "*[2,2,2,2,2,2,2,2] 0 0 * *[2,2,2,2,2,2,2]",
            "*[2,2,2,2,2,2,2,2,2] 0 0 * *[2,2,2,2,2,2,2,2]",
        ],
    ),
    all(
        "x dim dtype out",
        &["*[2,3] 1 * *[2,3]", "*$ 0 * *$", "*$ -1 * *$"],
    ),
    all(
        "tensors dim out",
        &[
            "(*[2,3];*[2,3]) 1 *[2,6]",
            "(*[2,3];*[2,3]) -2 *[4,3]",
            "(*[2,3]) 0 *[2,3]",
            "(*[2,3];*[0]) 0 *[2,3]",
            "(*[2,3];*[0,3]) 0 *[2,3]",
            "(*[0,4];*[2,3]) 0 *[2,3]",
            "(*[2,3];*[3,2]) 0 *[5,3]",
            "(*[];*[]) 0 *[2]",
            "() 0 *[2]",
            "(*[2,3];f16[2,3]) 0 *[4,3]",
            "(*[2,3];i64[2,3]) 0 *[4,3]",
            "(*[2,3];*[2,3]) 0 *[4,2]",
            "(*[2,3]/[1,2];*[2,3]) 0 *[4,3]",
            "(*[2,2,2,2,2,2,2,2];*[2,2,2,2,2,2,2,2]) 0 *[4,2,2,2,2,2,2,2]",
            "(*[2,2,2,2,2,2,2,2,2];*[2,2,2,2,2,2,2,2,2]) 0 *[4,2,2,2,2,2,2,2,2]",
        ],
    ),
    all(
        "x repeats out",
        &[
            "*[2,3] {2,2} *[4,6]",
            "*[2,3] {1,1} *[2,3]",
            "*[2,3] {2,2,2} *[2,4,6]",
            "*[2,3] {0,1} *[0,3]",
            "*[2,3] {2} *[2,6]",
            "*[] {} *[]",
            "*[] {2} *[2]",
            "*[0,3] {2,1} *[0,3]",
            "*[1,1,1,1,1] {2,2,2,2,2} *[2,2,2,2,2]",
            "*[2,2,2,2,2,2,2,2] {2,1,1,1,1,1,1,1} *[4,2,2,2,2,2,2,2]",
        ],
    ),
    all(
        "x dims out",
        &[
            "*[2,3] {1} *[2,3]",
            "*$ {0} *$",
            "*$ {} *$",
            "*[2,3] {0,-1} *[2,3]",
        ],
    ),
    some(
        "x dim index out",
        &["aclnnGather"],
        &[
            "*[2,3] 1 i64[2,2] *[2,2]",
            "*[2,3] 1 i32[2,2] *[2,2]",
            "*[2,3] 0 i64[1,3] *[1,3]",
            "*[2,3] 0 i64[1,4] *[1,4]",
            "*[2,3] 1 i64[0,2] *[0,2]",
            "*[2,0] 1 i64[2,2] *[2,2]",
            "*$ 0 i64$ *$",
            "*[] 0 i64[1] *[1]",
            "*[3] 0 i64[] *[]",
        ],
    ),
    some(
        "x dim index out",
        &["aclnnIndexSelect"],
        &[
            "*[2,3] 1 i64[2] *[2,2]",
            "*[2,3] 0 i64[4] *[4,3]",
            "*[2,3] 1 i32[2] *[2,2]",
            "*[2,3] 1 i64[] *[2,1]",
            "*[2,3] 1 i64[] *[2]",
            "*[2,3] 1 i64[0] *[2,0]",
            "*[2,3] 1 i64[2,2] *[2,4]",
            "*[0,3] 0 i64[2] *[2,3]",
            "*[0,3] 1 i64[2] *[0,2]",
            "*[] 0 i64[1] *[]",
            "*[3] 0 i64[] *[]",
            "*[2,2,2,2,2,2,2,2] 0 i64[2] *[2,2,2,2,2,2,2,2]",
            "*[2,2,2,2,2,2,2,2,2] 0 i64[2] *[2,2,2,2,2,2,2,2,2]",
        ],
    ),
    all(
        "x dim index source reduce",
        &[
            "*[2,3] 1 i64[2,2] *[2,2] 0",
            "*[2,3] 1 i64[2,2] *[2,2] 1",
            "*[2,3] 1 i32[2,2] *[2,2] 0",
            "*[2,3] 1 i64[2,2] *[2,3] 0",
            "*[2,3] 1 i64[2,3] *[2,2] 0",
            "*[2,3] 1 i64[0,2] *[0,2] 0",
            "*[2,3] 0 i64[3,3] *[3,3] 0",
            "*[2,3] 0 i64[1,4] *[1,4] 0",
            "*$ 0 i64$ *$ 0",
            "*[3] 0 i64[1] *[] 0",
        ],
    ),
    all(
        "x dim index source out",
        &[
            "*[2,3] 1 i64[2,2] *[2,2] *[2,3]",
            "*[2,3] 1 i32[2,2] *[2,2] *[2,3]",
            "*[2,3] 1 i64[2,2] *[2,3] *[2,3]",
            "*[2,3] 1 i64[2,3] *[2,2] *[2,3]",
            "*[2,3] 1 i64[0,2] *[0,2] *[2,3]",
            "*[2,3] 0 i64[3,3] *[3,3] *[2,3]",
            "*[2,3] 0 i64[1,4] *[1,4] *[2,3]",
            "*$ 0 i64$ *$ *$",
            "*[3] 0 i64[1] *[] *[3]",
        ],
    ),
    all(
        "x dim index source alpha:Num out",
        &[
            "*[2,3] 1 i64[2] *[2,2] *:1 *[2,3]",
            "*[2,3] 1 i32[2] *[2,2] *:1 *[2,3]",
            "*[2,3] 0 i64[4] *[4,3] *:1 *[2,3]",
            "*[2,3] 1 i64[] *[2,1] *:1 *[2,3]",
            "*[2,3] 1 i64[] *[2] *:1 *[2,3]",
            "*[2,3] 1 i64[0] *[2,0] *:1 *[2,3]",
            "*[2,3] 1 i64[2,2] *[2,4] *:1 *[2,3]",
            "*[2,3] 1 i64[2] *[2,3] *:1 *[2,3]",
            "*[0,3] 1 i64[2] *[0,2] *:1 *[0,3]",
            "*[] 0 i64[1] *[] *:1 *[]",
            "*[3] 0 i64[1] *[1] *:1 *[3]",
            "*[2,2,2,2,2,2,2,2] 0 i64[2] *[2,2,2,2,2,2,2,2] *:1 *[2,2,2,2,2,2,2,2]",
        ],
    ),
    all(
        "weight indices out",
        &[
            "*[5,3] i64[4] *[4,3]",
            "*[5,3] i32[4] *[4,3]",
            "*[5,3] i64[] *[3]",
            "*[5,3] i64[4,5] *[4,5,3]",
            "*[5,3] i64[0] *[0,3]",
            "*[5,0] i64[4] *[4,0]",
            "*[0,3] i64[4] *[4,3]",
            "*[3] i64[4] *[4]",
            "*[2,2,3] i64[4] *[4,2,3]",
            "*[5,3] i64[2,2,2,2,2,2,2] *[2,2,2,2,2,2,2,3]",
            "*[5,3] i64[2,2,2,2,2,2,2,2] *[2,2,2,2,2,2,2,2,3]",
        ],
    ),
    all(
        "grad indices rows padding scale_by_frequency out",
        &[
            "*[4,3] i64[4] 5 18446744073709551615 0 *[5,3]",
            "*[4,3] i32[4] 5 18446744073709551615 0 *[5,3]",
            "*[4,3] i64[4] 5 18446744073709551615 1 *[5,3]",
            "*[3] i64[] 5 18446744073709551615 0 *[5,3]",
            "*[4,5,3] i64[4,5] 5 18446744073709551615 0 *[5,3]",
            "*[4,3] i64[2,2] 5 18446744073709551615 0 *[5,3]",
            "*[2,2,3] i64[4] 5 18446744073709551615 0 *[5,3]",
            "*[0,3] i64[0] 5 18446744073709551615 0 *[5,3]",
            "*[4,0] i64[4] 5 18446744073709551615 0 *[5,0]",
            "*[4,3] i64[4] 0 18446744073709551615 0 *[0,3]",
        ],
    ),
    some(
        "x other out cube_math",
        &["aclnnMm"],
        &[
            "*[2,3] *[3,4] *[2,4] 0",
            "*[2,3]/[1,2] *[3,4] *[2,4] 0",
            "*[2,3] *[3,4]/[1,3] *[2,4] 0",
            "*[2,3]/[7,1] *[3,4] *[2,4] 0",
            "*[0,3] *[3,4] *[0,4] 0",
            "*[2,0] *[0,4] *[2,4] 0",
            "*[2,3] *[4,4] *[2,4] 0",
            "f16[2,3] f16[3,4] f32[2,4] 0",
            "bf16[2,3] bf16[3,4] f32[2,4] 0",
            "bf16[2,3] f32[3,4] f32[2,4] 0",
            "bf16[2,3] f16[3,4] f32[2,4] 0",
        ],
    ),
    some(
        "x other out cube_math",
        &["aclnnBatchMatMul"],
        &[
            "*[5,2,3] *[5,3,4] *[5,2,4] 0",
            "*[5,2,3]/[6,1,2] *[5,3,4] *[5,2,4] 0",
            "*[5,2,3] *[5,3,4]/[12,1,3] *[5,2,4] 0",
            "*[5,2,3]/[100,7,1] *[5,3,4] *[5,2,4] 0",
            "*[5,2,3]/[0,3,1] *[5,3,4] *[5,2,4] 0",
            "*[1,2,3] *[5,3,4] *[5,2,4] 0",
            "*[5,2,3] *[1,3,4] *[5,2,4] 0",
            "*[5,2,3] *[2,3,4] *[5,2,4] 0",
            "*[0,2,3] *[0,3,4] *[0,2,4] 0",
            "*[5,2,0] *[5,0,4] *[5,2,4] 0",
            "f16[5,2,3] f16[5,3,4] f32[5,2,4] 0",
            "bf16[5,2,3] f32[5,3,4] f32[5,2,4] 0",
        ],
    ),
    all("x dim out", &["*$ 0 *$", "*$ -1 *$", "*$ 1 *$"]),
    all(
        "x normalized weight bias epsilon out mean rstd",
        &[
            "*[2,3] {3} *[3] *[3] 0.00001 *[2,3] *[2,1] *[2,1]",
            "*[2,3] {3} *[3] *[3] 0.00001 *[2,3] f32[2,1] f32[2,1]",
            "*[2,3] {3} f32[3] f32[3] 0.00001 *[2,3] f32[2,1] f32[2,1]",
            "*[2,3] {3} null null 0.00001 *[2,3] null null",
            "*[2,3] {3} *[3] null 0.00001 *[2,3] *[2,1] *[2,1]",
            "*[2,3] {3} null *[3] 0.00001 *[2,3] *[2,1] *[2,1]",
            "*[2,3] {3} *[3] *[3] 0.00001 *[2,3] *[2] *[2]",
            "*[2,3] {2,3} *[2,3] *[2,3] 0.00001 *[2,3] *[1,1] *[1,1]",
            "*[0,3] {3} *[3] *[3] 0.00001 *[0,3] *[0,1] *[0,1]",
            "*[2,0] {0} *[0] *[0] 0.00001 *[2,0] *[2,1] *[2,1]",
            "*[2,3] {} *[3] *[3] 0.00001 *[2,3] *[2,1] *[2,1]",
        ],
    ),
];

/// More axes that repeat than a kernel of the AI CPU takes.
const WIDE_BROADCAST: &str = "*[2,1,2,1,2,1,2] *[1,2,1,2,1,2,1] *[2,2,2,2,2,2,2]";

const fn all(parameters: &'static str, examples: &'static [&'static str]) -> Family {
    some(parameters, &[], examples)
}

const fn some(
    parameters: &'static str,
    only: &'static [&'static str],
    examples: &'static [&'static str],
) -> Family {
    Family {
        parameters,
        only,
        examples,
    }
}

/// Types that the changes of shapes, strides and attributes are made with.
const FEW_TYPES: [&str; 6] = ["f32", "f16", "bf16", "f64", "i64", "bool"];
/// Most calls of an operator for each kind of change.
const MOST: usize = 2200;
/// Values of a parameter by its kind in the operator table; axes are those of `dim`.
const AXES: [&str; 9] = ["-10", "-3", "-2", "-1", "0", "1", "2", "3", "9"];
const CODES: [&str; 7] = ["-1", "0", "1", "2", "3", "4", "5"];
const COUNTS: [&str; 7] = [
    "0",
    "1",
    "4",
    "5",
    "6",
    "1099511627776",
    "18446744073709551615",
];
const REALS: [&str; 8] = ["0", "1", "-1", "0.5", "0.00001", "inf", "-inf", "NaN"];
const LISTS: [&str; 12] = [
    "{}", "{0}", "{1}", "{-1}", "{2}", "{3}", "{-3}", "{0,1}", "{1,1}", "{2,3}", "{-1,1}",
    "{1,2,3}",
];
const TEXTS: [&str; 6] = [
    "\"none\"", "\"tanh\"", "\"\"", "\"None\"", "\"erf\"", "\"mean\"",
];
const FLOATS: [&str; 11] = [
    "0",
    "1",
    "-1",
    "0.1",
    "0.5",
    "12345.678",
    "100000",
    "1e39",
    "inf",
    "-inf",
    "NaN",
];
const INTEGERS: [&str; 8] = [
    "0",
    "1",
    "-1",
    "2",
    "300",
    "70000",
    "2147483648",
    "9007199254740993",
];

/// What an operator is asked about, each call once.
pub(super) fn cases(operator: &'static OperatorInfo) -> Result<Vec<Call>> {
    let examples = examples(operator)?;
    let base = &examples[0];
    let mut calls: Vec<Call> = Vec::new();
    let typed = |example: &str, dtype: &str| {
        Call::parse(&format!(
            "{} {}",
            operator.function,
            example.replace('*', dtype)
        ))
        .map_err(|error| VendorError::Failed(error.to_string()))
    };
    let few: Vec<Call> = FEW_TYPES
        .iter()
        .map(|dtype| typed(base, dtype))
        .collect::<Result<_>>()?;
    for example in &examples {
        for dtype in FEW_TYPES {
            calls.push(typed(example, dtype)?);
        }
    }
    let alike: Vec<Call> = TYPES
        .iter()
        .map(|(dtype, _)| typed(base, dtype))
        .collect::<Result<_>>()?;
    calls.extend(thinned(by_types(&alike)));
    let mut changed = Vec::new();
    // A copy only moves: the element type and the strides are all that there is to it.
    let changing = if operator.method == "copy" {
        &alike
    } else {
        &few
    };
    for call in changing {
        for at in 0..call.arguments.len() {
            changed.extend(changes(call, at));
        }
    }
    calls.extend(thinned(changed));
    calls.extend(thinned(by_scalars(&alike)));
    let mut seen = HashSet::new();
    calls.retain(|call| seen.insert(call.to_string()));
    Ok(calls)
}

/// The examples of an operator, with a type that varies.
fn examples(operator: &OperatorInfo) -> Result<Vec<String>> {
    let name = |(name, kind): &(&'static str, &'static str)| {
        format!("{name}{}", if kind.ends_with("Num") { ":Num" } else { "" })
    };
    let names: Vec<String> = operator.parameters.iter().map(name).collect();
    let names = names.join(" ");
    let matching = |family: &&Family| family.parameters == names;
    let of = |family: &&Family| family.only.contains(&operator.function);
    let family = FAMILIES.iter().filter(matching).find(of);
    let general = || {
        FAMILIES
            .iter()
            .filter(matching)
            .find(|family| family.only.is_empty())
    };
    let family = family.or_else(general).ok_or_else(|| {
        let function = operator.function;
        VendorError::Failed(format!(
            "no examples of calls of {function}, with the parameters {names}: add a row in cases.rs"
        ))
    })?;
    let expand = |example: &&str| -> Vec<String> {
        if example.contains('$') {
            SHAPES
                .iter()
                .map(|shape| example.replace('$', shape))
                .collect()
        } else {
            vec![(*example).to_owned()]
        }
    };
    Ok(family.examples.iter().flat_map(expand).collect())
}

/// Every combination of types of up to three parameters; of more, every pair, from calls with one
/// type.
fn by_types(alike: &[Call]) -> Vec<Call> {
    let first = &alike[0];
    let is_typed = |at: &usize| retyped(&first.arguments[*at], TYPES[0].0).is_some();
    let typed: Vec<usize> = (0..first.arguments.len()).filter(is_typed).collect();
    let mut calls = Vec::new();
    let mut with = |from: &Call, changes: &[(usize, &str)]| {
        let mut call = from.clone();
        for (at, dtype) in changes {
            if let Some(argument) = retyped(&call.arguments[*at], dtype) {
                call.arguments[*at] = argument;
            }
        }
        calls.push(call);
    };
    if typed.len() <= 3 {
        for (a, _) in TYPES {
            for (b, _) in TYPES {
                for (c, _) in TYPES {
                    let changes: Vec<_> = typed.iter().copied().zip([a, b, c]).collect();
                    with(first, &changes);
                }
            }
        }
        return calls;
    }
    for call in alike {
        for at in &typed {
            TYPES
                .iter()
                .for_each(|(dtype, _)| with(call, &[(*at, dtype)]));
        }
    }
    for (index, one) in typed.iter().enumerate() {
        for other in &typed[index + 1..] {
            for (a, _) in TYPES {
                TYPES
                    .iter()
                    .for_each(|(b, _)| with(first, &[(*one, a), (*other, b)]));
            }
        }
    }
    calls
}

/// The argument with another element type, if it has one.
fn retyped(argument: &Argument, dtype: &str) -> Option<Argument> {
    let dtype = type_of(dtype)?;
    match argument {
        Argument::Tensor(tensor) => Some(Argument::Tensor(Tensor {
            dtype,
            ..tensor.clone()
        })),
        Argument::Tensors(tensors) => {
            let with = |tensor: &Tensor| Tensor {
                dtype,
                ..tensor.clone()
            };
            Some(Argument::Tensors(tensors.iter().map(with).collect()))
        }
        Argument::Scalar(_, value) => Some(Argument::Scalar(dtype, value.clone())),
        Argument::DType(_) => Some(Argument::DType(dtype)),
        _ => None,
    }
}

/// The call with one argument changed: another shape, other strides, another value, none.
fn changes(call: &Call, at: usize) -> Vec<Call> {
    let (name, kind) = call.operator.parameters[at];
    let values: &[&str] = match kind {
        "i64" if name == "dim" => &AXES,
        "i64" | "CubeMath" => &CODES,
        "u64" => &COUNTS,
        "f32" | "f64" => &REALS,
        "bool" => &["0", "1"],
        "Ints" => &LISTS,
        "Text" => &TEXTS,
        "DataType" => &["99", "-1"],
        _ => &[],
    };
    let mut arguments: Vec<Argument> = values
        .iter()
        .filter_map(|value| Argument::parse(kind, value))
        .collect();
    if let Argument::Tensor(tensor) = &call.arguments[at] {
        arguments.extend(tensor_changes(tensor).into_iter().map(Argument::Tensor));
    }
    let is_pointer = !matches!(
        kind,
        "i64" | "u64" | "f32" | "f64" | "bool" | "CubeMath" | "DataType"
    );
    arguments.extend(is_pointer.then_some(Argument::Null));
    let with = |argument| {
        let mut call = call.clone();
        call.arguments[at] = argument;
        call
    };
    arguments.into_iter().map(with).collect()
}

/// The tensor in another shape, or with other strides.
fn tensor_changes(tensor: &Tensor) -> Vec<Tensor> {
    let shapes = SHAPES.iter().chain(&OTHER_SHAPES);
    let shapes = shapes.filter_map(
        |shape| match Argument::parse("In", &format!("f32{shape}")) {
            Some(Argument::Tensor(shape)) => Some(Tensor {
                dims: shape.dims,
                ..tensor.clone()
            }),
            _ => None,
        },
    );
    let mut changed: Vec<Tensor> = shapes.collect();
    let strided = |strides: Vec<i64>| Tensor {
        strides: Some(strides),
        ..tensor.clone()
    };
    let (rank, dense) = (tensor.dims.len(), tensor.dense());
    if rank > 0 {
        let mut expanded = dense.clone();
        expanded[0] = 0;
        changed.push(strided(expanded));
        changed.push(strided(dense.iter().map(|stride| stride * 2).collect()));
    }
    if rank > 1 {
        // The last two axes stored the other way round, and rows with a gap.
        let mut transposed = dense.clone();
        transposed[rank - 1] = tensor.dims[rank - 2];
        transposed[rank - 2] = 1;
        changed.push(strided(transposed));
        let last = tensor.dims[rank - 1];
        changed.push(strided(
            dense
                .iter()
                .map(|s| if *s > 1 { s / last * (last + 1) } else { *s })
                .collect(),
        ));
    }
    changed.push(Tensor {
        offset: 4,
        ..tensor.clone()
    });
    changed
}

/// Each scalar in every type with values inside and outside of the tensors' type.
fn by_scalars(alike: &[Call]) -> Vec<Call> {
    let mut calls = Vec::new();
    for call in alike {
        for (at, argument) in call.arguments.iter().enumerate() {
            let Argument::Scalar(..) = argument else {
                continue;
            };
            for (name, dtype) in TYPES {
                let values: &[&str] = match name {
                    "bool" => &["0", "1"],
                    "f32" | "f16" | "bf16" | "f64" => &FLOATS,
                    _ => &INTEGERS,
                };
                for value in values {
                    let mut call = call.clone();
                    call.arguments[at] = Argument::Scalar(dtype, (*value).to_owned());
                    calls.push(call);
                }
            }
        }
    }
    calls
}

/// At most [`MOST`] of the calls, evenly spaced.
fn thinned(calls: Vec<Call>) -> Vec<Call> {
    let count = calls.len();
    let most = MOST.min(count);
    let mut kept = Vec::with_capacity(most);
    for (at, call) in calls.into_iter().enumerate() {
        let share = |at: usize| at * most / count;
        if at == 0 || share(at) != share(at - 1) {
            kept.push(call);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use rope_ascend::aclnn::OPERATORS;

    use super::*;

    #[test]
    fn each_operator_has_calls_of_each_kind_and_the_same_ones_each_time() {
        for operator in OPERATORS {
            let calls = cases(operator).expect(operator.function);
            let text = |calls: &[Call]| calls.iter().map(Call::to_string).collect::<Vec<_>>();
            assert_eq!(text(&calls), text(&cases(operator).expect("as before")));
            assert!(
                (100..=6600).contains(&calls.len()),
                "{}: {} calls",
                operator.function,
                calls.len()
            );
            for (at, (name, kind)) in operator.parameters.iter().enumerate() {
                let mut values = calls.iter().map(|call| &call.arguments[at]);
                let first = values.next().expect("a call");
                assert!(
                    values.any(|value| value != first),
                    "{}: {name} ({kind}) never varies",
                    operator.function
                );
            }
            let tensors = || {
                calls
                    .iter()
                    .flat_map(|call| &call.arguments)
                    .flat_map(Argument::tensors)
            };
            for (name, dtype) in TYPES {
                let is_there = tensors().any(|tensor| tensor.dtype == dtype);
                assert!(is_there, "{}: no tensor of {name}", operator.function);
            }
            assert!(
                tensors().any(|tensor| tensor.strides.is_some()),
                "{}",
                operator.function
            );
            assert!(
                tensors().any(|tensor| tensor.dims.contains(&0)),
                "{}",
                operator.function
            );
            assert!(
                tensors().any(|tensor| tensor.dims.len() == 9),
                "{}",
                operator.function
            );
        }
    }

    #[test]
    fn thinning_keeps_the_first_and_no_more_than_it_may() {
        let operator = &OPERATORS[0];
        let call = cases(operator).expect("calls").swap_remove(0);
        assert_eq!(thinned(vec![call.clone(); 3]).len(), 3);
        assert_eq!(thinned(vec![call; 3 * MOST + 1]).len(), MOST);
        assert!(thinned(Vec::new()).is_empty());
    }
}
