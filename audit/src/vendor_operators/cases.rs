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
    /// More examples: the first with these arguments, by parameter. What the operator has no
    /// parameter for is left out; what stands for a tensor stands for its gradient, too.
    changes: &'static [&'static str],
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
    all(
        "addend x other beta:Num alpha:Num out cube_math",
        &[
            "*[2,4] *[2,3] *[3,4] *:1 *:1 *[2,4] 0",
            "*[4] *[2,3] *[3,4] *:1 *:1 *[2,4] 0",
            "*[2,4] *[2,3] *[3,4]/[1,3] *:1 *:1 *[2,4] 0",
            "*[2,4] *[0,3] *[3,4] *:1 *:1 *[0,4] 0",
            "*[2,4] *[2,3] *[4,4] *:1 *:1 *[2,4] 0",
            "*[2,4] *[2,3] *[3,4] *:1 *:1 *[2,4] 4",
            "*[2,4] *[2,3] *[3,4]/[1,3] *:1 *:1 *[2,4] 4",
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
    all(
        "x weight bias scale offset antiquant_scale antiquant_offset per_token_scale group_list \
         activation_input activation_quant_scale activation_quant_offset split_item group_type \
         group_list_type act_type out activation_feature dyn_quant_scale",
        &[
            "(*[5,3]) (*[2,3,4]) null null null null null null i64[2] null null null 3 0 1 0 \
             (*[5,4]) null null",
            "(*[5,3]) (*[2,3,4]/[12,1,3]) null null null null null null i64[2] null null null 3 0 1 \
             0 (*[5,4]) null null",
            "(*[3,5]/[1,3]) (*[5,4]) null null null null null null i64[2] null null null 3 2 1 0 \
             (*[2,3,4]) null null",
            "(*[3,5]) (*[5,4]) null null null null null null i64[2] null null null 3 2 1 0 \
             (*[2,3,4]) null null",
            "(*[5,3]/[1,5]) (*[2,3,4]) null null null null null null i64[2] null null null 3 0 1 0 \
             (*[5,4]) null null",
            "(*[3,5]/[1,3]) (*[5,4]/[1,5]) null null null null null null i64[2] null null null 3 2 \
             1 0 (*[2,3,4]) null null",
            "(*[5,3]) (*[2,3,4]) null null null null null null i64[3] null null null 2 0 0 0 \
             (*[5,4]) null null",
            "(*[5,3]) (*[2,4,3]) null null null null null null i64[2] null null null 3 0 1 0 \
             (*[5,4]) null null",
            "(*[0,3]) (*[2,3,4]) null null null null null null i64[2] null null null 3 0 1 0 \
             (*[0,4]) null null",
            "(*[5,70000]) (*[2,70000,4]) null null null null null null i64[2] null null null 3 0 1 \
             0 (*[5,4]) null null",
            "(*[5,3]) (*[2,3,70000]) null null null null null null i64[2] null null null 3 0 1 0 \
             (*[5,70000]) null null",
            "(*[5,3]) (*[1025,3,4]) null null null null null null i64[1025] null null null 3 0 1 0 \
             (*[5,4]) null null",
            "(*[5,3]) (*[2,3,4]) (*[2,4]) null null null null null i64[2] null null null 3 0 1 0 \
             (*[5,4]) null null",
            "(*[5,3]) (*[2,3,4]) null (*[2,4]) (*[2,4]) (*[2,4]) (*[2,4]) (*[5]) i64[2] (*[5]) \
             (*[5]) (*[5]) 3 0 1 0 (*[5,4]) (*[5]) (*[5])",
            "(*[5,3];*[5,3]) (*[3,4];*[3,4]) null null null null null null null null null null 0 -1 \
             0 0 (*[5,4];*[5,4]) null null",
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
    all(
        "x first second largest grad updates rate beta_1 beta_2 decay epsilon amsgrad maximize",
        &[
            "*$ *$ *$ null *$ f32[1] 0.1 0.9 0.99 0.1 0.00001 0 0",
            "*[2,3] *[2,3] *[2,3] *[2,3] *[2,3] f32[1] 0.1 0.9 0.99 0.1 0.00001 1 1",
            "*[2,3] *[2,3] *[2,3] null *[2,3] f32[1] 0.1 0.9 0.99 0.1 0.00001 1 0",
            "*[2,3] *[2,3] *[2,3] null *[2,3] i64[] 0.1 0.9 0.99 0.1 0.00001 0 0",
            "f32[2,3] f32[2,3] f32[2,3] null *[2,3] i64[1] 0.1 0.9 0.99 0.1 0.00001 0 0",
            "f32[2,3] f32[2,3] f32[2,3] *[2,3] *[2,3] f32[1] 0.1 0.9 0.99 0.1 0.00001 1 0",
        ],
    ),
    attention(
        "q k v real_shift drop_mask padding_mask atten_mask prefix scale keep pre_tokens \
         next_tokens heads layout inner_precise sparse_mode softmax_max softmax_sum softmax_out out",
        &[
            "*[2,4,3,16] *[2,2,5,16] *[2,2,5,16] null null null bool[2,1,3,5] null 0.25 1 \
             2147483647 2147483647 4 \"BNSD\" 0 1 f32[2,4,3,8] f32[2,4,3,8] null *[2,4,3,16]",
        ],
        ATTENTION,
    ),
    attention(
        "q k v dy pse_shift drop_mask padding_mask atten_mask softmax_max softmax_sum softmax_in \
         out prefix scale keep pre_tokens next_tokens heads layout inner_precise sparse_mode dq dk \
         dv dpse",
        &[
            "*[2,4,3,16] *[2,2,5,16] *[2,2,5,16] *[2,4,3,16] null null null bool[2,1,3,5] \
             f32[2,4,3,8] f32[2,4,3,8] null *[2,4,3,16] null 0.25 1 2147483647 2147483647 4 \
             \"BNSD\" 0 1 *[2,4,3,16] *[2,2,5,16] *[2,2,5,16] null",
        ],
        ATTENTION,
    ),
    attention(
        "q k v real_shift drop_mask padding_mask atten_mask prefix q_ends k_ends scale keep \
         pre_tokens next_tokens heads layout inner_precise sparse_mode softmax_max softmax_sum \
         softmax_out out",
        &[
            "*[6,4,16] *[8,2,16] *[8,2,16] null null null bool[2048,2048] null {2,6} {3,8} 0.25 1 \
             2147483647 2147483647 4 \"TND\" 0 3 f32[6,4,8] f32[6,4,8] null *[6,4,16]",
        ],
        PACKED_ATTENTION,
    ),
    attention(
        "q k v dy pse_shift drop_mask padding_mask atten_mask softmax_max softmax_sum softmax_in \
         out prefix q_ends k_ends scale keep pre_tokens next_tokens heads layout inner_precise \
         sparse_mode dq dk dv dpse",
        &[
            "*[6,4,16] *[8,2,16] *[8,2,16] *[6,4,16] null null null bool[2048,2048] f32[6,4,8] \
             f32[6,4,8] null *[6,4,16] null {2,6} {3,8} 0.25 1 2147483647 2147483647 4 \"TND\" 0 3 \
             *[6,4,16] *[8,2,16] *[8,2,16] null",
        ],
        PACKED_ATTENTION,
    ),
];

/// Of attention: layouts, heads, channels, masks and their modes, statistics, and what is empty.
const ATTENTION: &[&str] = &[
    "layout=\"BSND\" q=*[2,3,4,16] k=*[2,5,2,16] v=*[2,5,2,16] out=*[2,3,4,16]",
    "layout=\"BSND\" q=*[2,3,4,20] k=*[2,5,2,20] v=*[2,5,2,20] out=*[2,3,4,20]",
    "layout=\"BSND\" q=*[2,3,4,72] k=*[2,5,4,72] v=*[2,5,4,72] out=*[2,3,4,72]",
    // Rows of more than 65535 channels are transposed first.
    "layout=\"BSND\" heads=256 q=*[1,3,256,272] k=*[1,5,256,272] v=*[1,5,256,272] \
     out=*[1,3,256,272] softmax_max=f32[1,256,3,8] softmax_sum=f32[1,256,3,8]",
    "layout=\"BSH\" q=*[2,3,64] k=*[2,5,32] v=*[2,5,32] out=*[2,3,64]",
    "layout=\"SBH\" q=*[3,2,64] k=*[5,2,32] v=*[5,2,32] out=*[3,2,64]",
    "layout=\"TND\" q=*[6,4,16] k=*[10,2,16] v=*[10,2,16] out=*[6,4,16] softmax_max=f32[6,4,8] \
     softmax_sum=f32[6,4,8]",
    "q=*[2,4,3,8] k=*[2,2,5,8] v=*[2,2,5,8] out=*[2,4,3,8]",
    "q=*[2,4,3,20] k=*[2,2,5,20] v=*[2,2,5,20] out=*[2,4,3,20]",
    "q=*[2,4,3,72] k=*[2,2,5,72] v=*[2,2,5,72] out=*[2,4,3,72]",
    "q=*[2,4,3,80] k=*[2,2,5,80] v=*[2,2,5,80] out=*[2,4,3,80]",
    "q=*[2,4,3,128] k=*[2,2,5,128] v=*[2,2,5,128] out=*[2,4,3,128]",
    "q=*[2,4,3,192] k=*[2,2,5,192] v=*[2,2,5,128] out=*[2,4,3,128]",
    "q=*[2,4,3,200] k=*[2,2,5,200] v=*[2,2,5,200] out=*[2,4,3,200]",
    "q=*[2,4,3,768] k=*[2,2,5,768] v=*[2,2,5,768] out=*[2,4,3,768]",
    "q=*[2,4,3,769] k=*[2,2,5,769] v=*[2,2,5,769] out=*[2,4,3,769]",
    "v=*[2,2,5,8] out=*[2,4,3,8]",
    "v=*[2,2,5,24] out=*[2,4,3,24]",
    "k=*[2,2,5,8]",
    "k=*[2,3,5,16] v=*[2,3,5,16]",
    "k=*[2,8,5,16] v=*[2,8,5,16]",
    "k=*[1,2,5,16] v=*[1,2,5,16]",
    "v=*[2,2,6,16]",
    "v=*[2,1,5,16]",
    "heads=2",
    "heads=8",
    "heads=0",
    "heads=-4",
    "heads=257 q=*[2,257,3,16] k=*[2,257,5,16] v=*[2,257,5,16] out=*[2,257,3,16] \
     softmax_max=f32[2,257,3,8] softmax_sum=f32[2,257,3,8]",
    "q=*[0,4,3,16] k=*[0,2,5,16] v=*[0,2,5,16] out=*[0,4,3,16] softmax_max=f32[0,4,3,8] \
     softmax_sum=f32[0,4,3,8]",
    "q=*[2,4,0,16] out=*[2,4,0,16] softmax_max=f32[2,4,0,8] softmax_sum=f32[2,4,0,8]",
    "k=*[2,2,0,16] v=*[2,2,0,16]",
    "q=*[2,4,3,0] k=*[2,2,5,0] v=*[2,2,5,0] out=*[2,4,3,0]",
    "k=*[2,0,5,16] v=*[2,0,5,16]",
    "atten_mask=null sparse_mode=0",
    "atten_mask=null sparse_mode=1",
    "atten_mask=null sparse_mode=9",
    "atten_mask=null sparse_mode=0 pre_tokens=-1 next_tokens=-1",
    "atten_mask=bool[3,5] sparse_mode=0",
    "atten_mask=bool[2,4,3,5] sparse_mode=0",
    "atten_mask=bool[1,1,3,5]",
    "atten_mask=u8[2,1,3,5]",
    "atten_mask=*[2,1,3,5]",
    "atten_mask=bool[2,3,3,5]",
    "atten_mask=bool[5,3]",
    "atten_mask=bool[3,5] sparse_mode=0 pre_tokens=-1 next_tokens=-1",
    "atten_mask=bool[3,5] sparse_mode=0 pre_tokens=-5 next_tokens=5",
    "atten_mask=bool[2048,2048] sparse_mode=2",
    "atten_mask=bool[2048,2048] sparse_mode=3",
    "atten_mask=bool[2048,2048] sparse_mode=4 pre_tokens=2 next_tokens=0",
    "atten_mask=bool[2048,2048] sparse_mode=4 pre_tokens=-3 next_tokens=1",
    "atten_mask=bool[1,1,2048,2048] sparse_mode=3",
    "atten_mask=bool[3,5] sparse_mode=2",
    "atten_mask=bool[3,5] sparse_mode=3",
    "atten_mask=bool[3,5] sparse_mode=5 prefix={3,5}",
    "atten_mask=bool[3072,2048] sparse_mode=6 prefix={3,5}",
    "atten_mask=bool[2048,2048] sparse_mode=7",
    "atten_mask=bool[2048,2048] sparse_mode=8",
    "prefix={3,5}",
    "real_shift=*[2,4,3,5] pse_shift=*[2,4,3,5]",
    "real_shift=f32[2,4,3,5] pse_shift=f32[2,4,3,5]",
    "drop_mask=u8[15] keep=0.5",
    "keep=0",
    "keep=1.5",
    "padding_mask=*[2,1,3,5]",
    "softmax_out=*[2,4,3,5] softmax_in=*[2,4,3,5] dpse=*[2,4,3,5]",
    "softmax_max=f32[2,4,3] softmax_sum=f32[2,4,3]",
    "softmax_max=*[2,4,3,8] softmax_sum=*[2,4,3,8]",
    "softmax_max=null softmax_sum=null",
    "out=*[2,4,3,8]",
    "out=*[2,3,4,16]",
    "inner_precise=2",
];

/// The same of packed sequences.
const PACKED_ATTENTION: &[&str] = &[
    "layout=\"BSND\" q=*[2,3,4,16] k=*[2,5,2,16] v=*[2,5,2,16] out=*[2,3,4,16] \
     softmax_max=f32[2,4,3,8] softmax_sum=f32[2,4,3,8]",
    "q=*[6,4,20] k=*[8,2,20] v=*[8,2,20] out=*[6,4,20]",
    "q=*[6,4,72] k=*[8,2,72] v=*[8,2,72] out=*[6,4,72]",
    "q=*[6,4,80] k=*[8,2,80] v=*[8,2,80] out=*[6,4,80]",
    "q=*[6,4,100] k=*[8,2,100] v=*[8,2,100] out=*[6,4,100]",
    "q=*[6,4,128] k=*[8,2,128] v=*[8,2,128] out=*[6,4,128]",
    "q=*[6,4,192] k=*[8,2,192] v=*[8,2,128] out=*[6,4,128]",
    "q=*[6,4,513] k=*[8,2,513] v=*[8,2,513] out=*[6,4,513]",
    "q=*[6,4,769] k=*[8,2,769] v=*[8,2,769] out=*[6,4,769]",
    "v=*[8,2,8] out=*[6,4,8]",
    "v=*[8,2,24] out=*[6,4,24]",
    "k=*[8,2,8]",
    "k=*[8,3,16] v=*[8,3,16]",
    "v=*[9,2,16]",
    "heads=2",
    "heads=8",
    "heads=0",
    "q_ends=null k_ends=null",
    "q_ends=null",
    "q_ends={6} k_ends={8}",
    "q_ends={6} k_ends={3,8}",
    "q_ends={} k_ends={}",
    "q_ends={0,6} k_ends={3,8}",
    "q_ends={6,2} k_ends={3,8}",
    "q_ends={2,5} k_ends={3,8}",
    "q_ends={2,7} k_ends={3,8}",
    "q_ends={-2,6} k_ends={3,8}",
    "q_ends={5,6} k_ends={3,8}",
    "q=*[0,4,16] k=*[0,2,16] v=*[0,2,16] out=*[0,4,16] softmax_max=f32[0,4,8] \
     softmax_sum=f32[0,4,8]",
    "k=*[0,2,16] v=*[0,2,16] k_ends={0,0}",
    "q=*[6,4,0] k=*[8,2,0] v=*[8,2,0] out=*[6,4,0]",
    "k=*[8,0,16] v=*[8,0,16]",
    "atten_mask=null sparse_mode=0",
    "atten_mask=null sparse_mode=3",
    "atten_mask=bool[4,5] sparse_mode=0",
    "atten_mask=bool[4,5] sparse_mode=1",
    "atten_mask=bool[2,1,4,5] sparse_mode=0",
    "atten_mask=u8[2048,2048]",
    "atten_mask=*[2048,2048]",
    "atten_mask=bool[1024,1024]",
    "sparse_mode=2",
    "sparse_mode=4 pre_tokens=2 next_tokens=0",
    "sparse_mode=6 prefix={3,5}",
    "sparse_mode=7",
    "sparse_mode=8",
    "prefix={3,5}",
    "real_shift=*[2,4,4,5] pse_shift=*[2,4,4,5]",
    "real_shift=f32[2,4,4,5] pse_shift=f32[2,4,4,5]",
    "drop_mask=u8[15] keep=0.5",
    "padding_mask=*[6]",
    "softmax_out=*[6] softmax_in=*[6] dpse=*[6]",
    "softmax_max=f32[6,4] softmax_sum=f32[6,4]",
    "softmax_max=*[6,4,8] softmax_sum=*[6,4,8]",
    "softmax_max=null softmax_sum=null",
    "out=*[6,4,8]",
    "inner_precise=2",
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
        changes: &[],
    }
}

const fn attention(
    parameters: &'static str,
    examples: &'static [&'static str],
    changes: &'static [&'static str],
) -> Family {
    Family {
        changes,
        ..all(parameters, examples)
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
const LAYOUTS: [&str; 8] = [
    "\"BNSD\"",
    "\"BSND\"",
    "\"BSH\"",
    "\"SBH\"",
    "\"TND\"",
    "\"bnsd\"",
    "\"\"",
    "\"BNSDH\"",
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
    let mut examples: Vec<String> = family.examples.iter().flat_map(expand).collect();
    if let Some(first) = examples.first().cloned() {
        let change = |change: &&str| changed(operator, &first, change);
        examples.extend(family.changes.iter().map(change));
    }
    Ok(examples)
}

/// The example with some arguments replaced.
fn changed(operator: &OperatorInfo, example: &str, change: &str) -> String {
    let given: Vec<(&str, &str)> = change
        .split_whitespace()
        .filter_map(|word| word.split_once('='))
        .collect();
    let value_of = |name: &str| given.iter().find(|(given, _)| *given == name).map(|g| g.1);
    let parameters = operator.parameters.iter().zip(example.split_whitespace());
    let words = parameters.map(|((name, _), word)| {
        let base = match *name {
            "dy" => "out",
            "dq" | "dk" | "dv" => &name[1..],
            name => name,
        };
        value_of(name).or_else(|| value_of(base)).unwrap_or(word)
    });
    words.collect::<Vec<_>>().join(" ")
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
        "Ints" | "OptInts" => &LISTS,
        "Text" if name == "layout" => &LAYOUTS,
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
