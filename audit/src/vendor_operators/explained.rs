//! Differences between the vendor's first phases and the simulator that are meant to be.
//!
//! Where a published document states a limit that the code does not check, the simulator keeps it:
//! the document is what the vendor promises, and later code may check it.

use super::ask::Answer;
use super::call::{Argument, Call, Tensor};
use super::compare::Difference;

/// Calls that are judged differently, and why that is right.
pub(super) struct Explained {
    /// The operators; all if empty.
    pub(super) operators: &'static [&'static str],
    pub(super) difference: Difference,
    /// What the vendor's message contains.
    pub(super) vendor: &'static str,
    /// What the simulator's message contains.
    pub(super) simulator: &'static str,
    /// Whether only calls are meant in which a tensor has no elements.
    pub(super) empty: bool,
    pub(super) reason: &'static str,
}

impl Explained {
    pub(super) fn explains(&self, call: &Call, difference: Difference, answer: &Answer) -> bool {
        let function = call.operator.function;
        (self.operators.is_empty() || self.operators.contains(&function))
            && self.difference == difference
            && answer.vendor.message.contains(self.vendor)
            && answer.simulator.message.contains(self.simulator)
            && (!self.empty || tensors(call).any(|tensor| tensor.dims.contains(&0)))
    }
}

fn tensors(call: &Call) -> impl Iterator<Item = &Tensor> {
    call.arguments.iter().flat_map(Argument::tensors)
}

/// The simulator refuses what the vendor accepts.
const fn stricter(
    operators: &'static [&'static str],
    simulator: &'static str,
    reason: &'static str,
) -> Explained {
    Explained {
        operators,
        difference: Difference::SimulatorRefuses,
        vendor: "",
        simulator,
        empty: false,
        reason,
    }
}

/// The vendor answers a call without elements before it has looked at the other arguments.
const fn without_elements(
    operators: &'static [&'static str],
    simulator: &'static str,
) -> Explained {
    Explained {
        empty: true,
        ..stricter(
            operators,
            simulator,
            "a call without elements: the vendor returns before it checks the other arguments",
        )
    }
}

/// Both refuse, with other codes.
const fn other_code(
    operators: &'static [&'static str],
    vendor: &'static str,
    reason: &'static str,
) -> Explained {
    Explained {
        difference: Difference::Codes,
        vendor,
        ..stricter(operators, "", reason)
    }
}

const RANK_0: &str = "rank 0, where the document begins at 1";
const RANK_9: &str = "rank 9, where the document ends at 8";
const STRIDED: &str = "a strided tensor, which the document does not tick for this parameter";
const OWN_TYPES: &str = "a type that the document does not list";
const CUBE: &str = "a cubeMathType that the document excludes";

const ATTENTION: &[&str] = &[
    "aclnnFlashAttentionScore",
    "aclnnFlashAttentionScoreGrad",
    "aclnnFlashAttentionUnpaddingScoreGrad",
    "aclnnFlashAttentionVarLenScore",
];

const GROUPED: &[&str] = &["aclnnGroupedMatmulV4"];

/// The first row that fits explains a call. A row that explains none is an error.
pub(super) const EXPLAINED: &[Explained] = &[
    stricter(
        &[],
        "elements share memory",
        "an output whose elements share memory: the vendor does not look at its strides, and the \
         result depends on the order of the writes",
    ),
    Explained {
        difference: Difference::VendorDies,
        ..stricter(
            &["aclnnEmbeddingDenseBackward"],
            "",
            "a gradient of rank 0, for which the vendor's loop over axes does not end",
        )
    },
    stricter(
        &[],
        "a broadcast over",
        "a broadcast over more than five joined axes in f64 or i16, which the page on broadcasting \
         excludes",
    ),
    stricter(
        &["aclnnMuls", "aclnnDivs"],
        "does not convert",
        "the type that self and the number promote to has to convert to the output's by the \
         documents; the code checks nothing (Muls), or self's type (Divs)",
    ),
    stricter(
        &["aclnnInplaceMaskedFillScalar"],
        "does not convert",
        "a value that does not convert to the tensor's type, 161002 by the document",
    ),
    stricter(
        &["aclnnPowTensorScalar"],
        "of integers 0 or more is expected",
        "a negative exponent of integers, which the document excludes and the code refuses on \
         Ascend 950 only",
    ),
    stricter(
        &[
            "aclnnClamp",
            "aclnnFlip",
            "aclnnInplaceCopy",
            "aclnnLogSoftmax",
            "aclnnMaxDim",
            "aclnnMinDim",
            "aclnnSign",
        ],
        "has rank 0",
        RANK_0,
    ),
    stricter(
        &[
            "aclnnArange",
            "aclnnGeluBackwardV2",
            "aclnnGeluV2",
            "aclnnLogicalNot",
            "aclnnMuls",
            "aclnnSign",
        ],
        "has rank 9",
        RANK_9,
    ),
    stricter(
        &[
            "aclnnAddmm",
            "aclnnBatchMatMul",
            "aclnnCast",
            "aclnnCat",
            "aclnnFlip",
            "aclnnIndexAdd",
            "aclnnIndexSelect",
            "aclnnMm",
            "aclnnScatterAdd",
        ],
        "a contiguous tensor is expected",
        STRIDED,
    ),
    stricter(
        &[
            "aclnnArgMax",
            "aclnnCumsum",
            "aclnnErf",
            "aclnnFlashAttentionScore",
            "aclnnFlashAttentionScoreGrad",
            "aclnnFlashAttentionUnpaddingScoreGrad",
            "aclnnFlashAttentionVarLenScore",
            "aclnnGeluBackwardV2",
            "aclnnInplaceNormal",
            "aclnnLogicalAnd",
            "aclnnMaxDim",
            "aclnnMinDim",
            "aclnnSigmoid",
        ],
        ", one of [",
        OWN_TYPES,
    ),
    stricter(
        &["aclnnAddmm"],
        ", one of [",
        "a bias or an output of another type than the factors, which the backend never gives",
    ),
    stricter(
        &["aclnnEmbeddingDenseBackward", "aclnnLayerNorm", "aclnnMm"],
        "out is ",
        "an output that has not the type of the input or of the promotion, as the document says",
    ),
    stricter(
        &["aclnnGeluV2"],
        "approximate is",
        "an approximation other than 0 and 1, which the document excludes",
    ),
    stricter(
        &["aclnnAddmm", "aclnnBatchMatMul", "aclnnMm"],
        "cubeMathType is",
        CUBE,
    ),
    stricter(
        &["aclnnInplaceScatter"],
        "reduce is",
        "a reduction other than 0, 1 and 2, which the document excludes",
    ),
    stricter(
        &["aclnnGather"],
        "of self is expected",
        "ranks 0 and 1, which are equal for the code and not by the document",
    ),
    stricter(
        &["aclnnInplaceBernoulli"],
        "a multiple of 4",
        "an offset that is no multiple of 4, which the document excludes",
    ),
    stricter(
        &["aclnnInplaceBernoulli"],
        "prob is NaN",
        "NaN, which is not between 0 and 1 as the document says",
    ),
    stricter(
        &["aclnnRepeat"],
        "at most",
        "more than four repeats above 1, 561103 by the document",
    ),
    stricter(
        &[
            "aclnnAmax",
            "aclnnAmin",
            "aclnnArgMax",
            "aclnnMaxDim",
            "aclnnMinDim",
        ],
        "no extreme",
        "the extreme of nothing: 161002 by the documents of Amax and Amin; the vendor leaves the \
         output of the others as it was",
    ),
    without_elements(
        &[
            "aclnnAny",
            "aclnnArgMax",
            "aclnnArgMin",
            "aclnnIndexSelect",
            "aclnnMaxDim",
            "aclnnMean",
            "aclnnMinDim",
            "aclnnProdDim",
            "aclnnReduceSum",
            "aclnnRepeat",
            "aclnnSoftmax",
        ],
        " has shape",
    ),
    without_elements(&["aclnnLeTensor", "aclnnNeTensor"], "do not broadcast"),
    without_elements(&["aclnnInplaceScatter", "aclnnScatterAdd"], "index has"),
    without_elements(&["aclnnSoftmax"], "is expected"),
    stricter(
        &["aclnnCat"],
        "tensors is empty",
        "a list of no tensors: the vendor returns before it checks the output",
    ),
    stricter(
        &["aclnnRepeat"],
        "out has shape",
        "no repeats: the vendor returns before it checks the output",
    ),
    stricter(
        &["aclnnArange"],
        "does not lead to the end",
        "infinity as an i64, which C++ leaves open; the simulator takes the nearest number",
    ),
    Explained {
        difference: Difference::VendorRefuses,
        vendor: "-9223372036854775808",
        ..stricter(
            &["aclnnArange"],
            "",
            "infinity as an i64, which C++ leaves open; the simulator takes the nearest number",
        )
    },
    other_code(
        &["aclnnLtScalar"],
        "!= nullptr failed",
        "a null, 161001 by the document",
    ),
    other_code(
        &["aclnnScatterAdd"],
        "should be same with output's shape",
        "an output of another shape than self, 161002 by the document",
    ),
    stricter(
        ATTENTION,
        "tiling: ",
        "what attention's tiling refuses, which runs on a device after the first phase",
    ),
    stricter(
        ATTENTION,
        "not modelled",
        "what the simulator has not of attention: pse, dropout, padding masks, prefixes, BSH, SBH, \
         and TND without lengths",
    ),
    stricter(
        GROUPED,
        "not modelled",
        "what the simulator has not of grouped products: biases, scales, and several tensors",
    ),
    stricter(
        GROUPED,
        "out is ",
        "an output of another type: the code logs that it does not match, and goes on",
    ),
    stricter(
        GROUPED,
        "x is Int8",
        "quantised products, which are not modelled",
    ),
    stricter(
        &["aclnnFlashAttentionScoreGrad"],
        "inputLayout is",
        "a layout that the document does not list; of longer names the code reads four letters",
    ),
    other_code(
        &["aclnnFlashAttentionScoreGrad"],
        "InferShape failed",
        "an empty layout, 161002 by the document",
    ),
    other_code(
        &["aclnnFlashAttentionVarLenScore"],
        "should be same with output's shape",
        "a value without an axis of channels, 161002 by the document; the code takes what lies in \
         memory after its shape",
    ),
    Explained {
        difference: Difference::VendorDies,
        ..stricter(
            &[
                "aclnnFlashAttentionScoreGrad",
                "aclnnFlashAttentionUnpaddingScoreGrad",
            ],
            "",
            "a null layout, 161001 by the document, which the code reads",
        )
    },
    Explained {
        difference: Difference::VendorDies,
        ..stricter(
            &["aclnnFlashAttentionVarLenScore"],
            "",
            "no lengths, of which the code reads the first",
        )
    },
];
