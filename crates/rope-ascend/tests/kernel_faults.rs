//! Faults seeded into the kernels of `kernels/rope`: each is reported by kind and place, or changes
//! a bit of the result.
//!
//! All faults are compiled into one library. Each edit of a source asks `rope_fault(N)` whether
//! fault N is on; the test sets it by an environment variable. No line moves.
#![allow(
    unsafe_code,
    reason = "the test sets a variable and copies to device memory beyond 32 bits"
)]
#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    missing_docs,
    reason = "test code"
)]

mod support;

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::path::Path;

use ascend_sim::abi::runtime::aclrtMemcpy;
use ascend_sim::{Machine, Violation, control};
use half::{bf16, f16};
use rope_ascend::rope::{
    AngleGradient, DeltaSizes, Heads, LayerKernels, Operand, Rotation, Rotator, Unit,
};
use rope_ascend::safe::DeviceBuffer;
use rope_core::{Direction, Geometry, HeadNorm, HeadsLayout, Layout, NormOrder, Pairing, Strides};
use support::delta;
use support::layer::{self, Case as LayerCase};
use support::norm::{Case as NormCase, run as run_norm, run_into as run_norm_into};
use support::rotate_plainly;
use support::{At, Bench, FEW_CORES, Number, Numbers, angles, index, kernel_names, pair_channels};

/// Read by `rope_fault`.
const VARIABLE: &str = "ROPE_FAULT";
const FILES: [&str; 12] = [
    "rope_tiling.h",
    "rope_base.h",
    "rope_matrix.h",
    "rope_rotate.h",
    "rope_angle_grad.h",
    "rope_norm.h",
    "rope_low_rank.h",
    "rope_short_convolution.h",
    "rope_swiglu.h",
    "rope_delta.h",
    "rope_update.h",
    "rope.cpp",
];
const BASE: &str = "rope_base.h";
const MATRIX: &str = "rope_matrix.h";
const ROTATE: &str = "rope_rotate.h";
const ANGLE_GRAD: &str = "rope_angle_grad.h";
const NORM: &str = "rope_norm.h";
const LOW_RANK: &str = "rope_low_rank.h";
const CONVOLUTION: &str = "rope_short_convolution.h";
const SWIGLU: &str = "rope_swiglu.h";
const UPDATE: &str = "rope_update.h";
const DELTA: &str = "rope_delta.h";
const BARRIER: &str = "VectorBarrier();";
/// The number that lets half of the blocks do the work of all: the others are beyond the launch.
const HALF: i32 = -2;
/// Where the number of blocks is used first.
const UNITS: &str = "const uint64_t units =";
const BEYOND: &str = "a block beyond the launch works";

/// The evidence of a fault.
#[derive(Clone, Copy, Debug)]
enum Caught {
    /// A violation of this kind with these words in its message or line of source.
    By(&'static str, &'static str),
    /// The result.
    Wrong,
}
use Caught::{By, Wrong};

struct Fault {
    name: &'static str,
    file: &'static str,
    /// Texts of the file and what takes the place of all their occurrences: `FAULT` says whether
    /// the fault is on.
    edits: &'static [(&'static str, &'static str)],
    caught: Caught,
}

/// Rows of a file, a name, the check that finds the fault, and edits.
macro_rules! faults {
    ($($file:ident $name:expr => $caught:expr; $($old:literal => $new:literal),+;)*) => {
        &[$(Fault { name: $name, file: $file, edits: &[$(($old, $new)),+], caught: $caught }),*]
    };
}

const FAULTS: &[Fault] = faults! {
    DELTA "a token forgets by g of the one before it" => Wrong;
        "decays[(j + 1) * kChunk], spread_[(j + 1) * kUnit]" =>
            "decays[(j + 1) * kChunk], spread_[(j + 1 - (FAULT)) * kUnit]";
    DELTA "tokens after the last are no zeros" => By("ub-undefined-read", "DataCopyPad");
        "if (rows < t_.row_tile) {" => "if (rows < t_.row_tile && !(FAULT && rows > 0)) {";
    DELTA "A has g in place of beta" => Wrong;
        "rates, Rows{kChunk, 0}" => "rates, Rows{FAULT ? 0 : kChunk, 0}";
    DELTA "the last token reads no write of the one before it" => Wrong;
        "j + 1 < kChunk; ++j" => "j + 1 + (FAULT) < kChunk; ++j";
    DELTA "k has the factor of q" => Wrong;
        "Normalise(k, x, norms, 1.0f);" => "Normalise(k, x, norms, FAULT ? t_.scale : 1.0f);";
    DELTA "a head of v has the next head of k" => Wrong;
        "head / (t_.heads / t_.key_heads)" =>
            "(FAULT ? head % t_.key_heads : head / (t_.heads / t_.key_heads))";
    DELTA "lanes beyond the first are not in a norm" => Wrong;
        "for (uint32_t lane = kLanes; lane < width; lane += kLanes) {\n            VectorBarrier();" =>
            "for (uint32_t lane = kLanes; lane < width && !(FAULT); lane += kLanes) {\n            VectorBarrier();";
    DELTA "products are not given back" => By("queue", "FreeTensor is missing");
        "        slots_.FreeTensor(slot);" => "        if (!(FAULT)) slots_.FreeTensor(slot);";
    LOW_RANK "a sum is rounded towards zero" => Wrong;
        "ConvertRows(slot, columns, sum, columns, RoundMode::CAST_RINT," =>
            "ConvertRows(slot, columns, sum, columns, \
             FAULT ? RoundMode::CAST_TRUNC : RoundMode::CAST_RINT,";
    LOW_RANK "the second part of h is left out" => Wrong;
        "if (t_.parts > 1) {" => "if (t_.parts > 1 && !(FAULT)) {";
    LOW_RANK "the last rank is left out" => Wrong;
        "Min(kLowRankChunk, t_.rank - first)" => "Min(kLowRankChunk, t_.rank - first) - (FAULT)";
    LOW_RANK "b is of the first columns" => Wrong;
        "DataCopyPad(b, b_[column_]," => "DataCopyPad(b, b_[(FAULT) ? 0 : column_],";
    LOW_RANK "b is not given back" => By("queue", "FreeTensor is missing");
        "        }\n        factor_.FreeTensor(factor);" =>
            "        }\n        if (!(FAULT)) factor_.FreeTensor(factor);";
    LOW_RANK "the rows of one tile belong to two cores" => By("block-conflict", "blocks run in any");
        "const uint64_t end = tiles * (block + 1) / blocks;" =>
            "const uint64_t end = tiles * (block + 1) / blocks + (FAULT && block + 1 < blocks);";
    LOW_RANK "a row too many is stored" => By("gm-out-of-bounds", "DataCopyPad");
        "DataCopyPad(y_[start], slot,\n                    Rectangle<T>(height_," =>
            "DataCopyPad(y_[start], slot,\n                    Rectangle<T>(height_ + (FAULT),";
    CONVOLUTION "borders are ignored" => Wrong;
        "if (back == 0 || first_start_ == end_start_) return;" =>
            "if (back == 0 || first_start_ == end_start_ || (FAULT)) return;";
    CONVOLUTION "a border clears a row too few" => Wrong;
        "to = MinOf(start + back, origin + rows)" =>
            "to = MinOf(start + back - (FAULT), origin + rows)";
    CONVOLUTION "a start before the tile is forgotten" => Wrong;
        "row < halo_ ? 0 : row + 1 - halo_" => "FAULT ? row : row < halo_ ? 0 : row + 1 - halo_";
    CONVOLUTION "a start after the tile is forgotten" => Wrong;
        "row + rows_ + (kBackward ? halo_ : 0)" =>
            "row + rows_ + (kBackward && !(FAULT) ? halo_ : 0)";
    CONVOLUTION "rows of sequences of one token are cleared twice at once"
        => By("ordering", "Duplicate");
        "cleared = to;" => "cleared = FAULT ? origin : to;";
    CONVOLUTION "the adjoint reads the rows before" => Wrong;
        "(kAdjoint ? back : tap) * pitch_" => "(kAdjoint && !(FAULT) ? back : tap) * pitch_";
    CONVOLUTION "the taps are in the other order" => Wrong;
        "w_, Rows{tap * pitch_, 0}" => "w_, Rows{(FAULT ? back : tap) * pitch_, 0}";
    CONVOLUTION "rows before the first are not defined" => By("ub-undefined-read", "Mul");
        "if (missing > 0) {" => "if (missing > 0 && !(FAULT)) {";
    CONVOLUTION "rows after the last are not defined" => Wrong;
        "if (after < halo_) {" => "if (after < halo_ && !(FAULT)) {";
    CONVOLUTION "a row of an odd number is not added" => Wrong;
        "rows -= half;" => "rows = FAULT ? half : rows - half;";
    CONVOLUTION "the weight is of the first columns" => Wrong;
        "DataCopyPad(weight, weight_[column_]," =>
            "DataCopyPad(weight, weight_[(FAULT) ? 0 : column_],";
    CONVOLUTION "an output is truncated" => Wrong;
        "Cast(out, products, RoundMode::CAST_RINT, rows_ * pitch_)" =>
            "Cast(out, products, FAULT ? RoundMode::CAST_TRUNC : RoundMode::CAST_RINT, \
             rows_ * pitch_)";
    CONVOLUTION "sums go on from those of another part" => By("ub-undefined-read", "Add");
        "AscendC::Duplicate(dw, 0.0f," => "if (!(FAULT)) AscendC::Duplicate(dw, 0.0f,";
    CONVOLUTION "sums of all parts are stored at the first" => Wrong;
        "sums_gm_[part * t_.taps" => "sums_gm_[(FAULT ? 0 : part) * t_.taps";
    CONVOLUTION "a row too many is loaded" => By("gm-out-of-bounds", "DataCopyPad");
        "Load(dys_, dy_, row_, 0, computed)" => "Load(dys_, dy_, row_, 0, computed + (FAULT))";
    CONVOLUTION "the gradient is not given back" => By("queue", "FreeTensor is missing");
        "if constexpr (kWide) dys_.FreeTensor(dy_slot);" =>
            "if constexpr (kWide) if (!(FAULT)) dys_.FreeTensor(dy_slot);";
    SWIGLU "the gate has another sign" => Wrong;
        "AscendC::Muls(s, g, -1.0f, n);" => "AscendC::Muls(s, g, FAULT ? 1.0f : -1.0f, n);";
    SWIGLU "an element too many is moved" => By("gm-out-of-bounds", "DataCopyPad");
        "StoreRun(gate_, gate, gm_[3][start], count_);" =>
            "StoreRun(gate_, gate, gm_[3][start], count_ + (FAULT));";
    SWIGLU "up is not given back" => By("queue", "FreeTensor is missing");
        "up_.FreeTensor(up);" => "if (!(FAULT)) up_.FreeTensor(up);";
    SWIGLU "the output is that of another gate" => Wrong;
        "if (has_output_) AscendC::Mul(s, silu, u, n);" =>
            "if (has_output_) AscendC::Mul(s, (FAULT) ? u : silu, u, n);";
    SWIGLU "the output is never stored" => By("queue", "FreeTensor is missing");
        "StoreRun(dy_, dy, gm_[5][start], count_);" =>
            "if (!(FAULT)) StoreRun(dy_, dy, gm_[5][start], count_);";
    UPDATE "the gradient is not scaled" => Wrong;
        "Muls(gradient, gradient, t_.scale, n)" =>
            "Muls(gradient, gradient, (FAULT) ? 1.0f : t_.scale, n)";
    UPDATE "the values do not decay" => Wrong;
        "Muls(value, value, t_.stay, n)" => "Muls(value, value, (FAULT) ? 1.0f : t_.stay, n)";
    UPDATE "epsilon is left out" => Wrong;
        "Adds(a, a, t_.epsilon, n)" => "Adds(a, a, (FAULT) ? 0.0f : t_.epsilon, n)";
    UPDATE "rounded values are truncated" => Wrong;
        "Cast(rounded, value, RoundMode::CAST_RINT, count)" =>
            "Cast(rounded, value, (FAULT) ? RoundMode::CAST_TRUNC : RoundMode::CAST_RINT, count)";
    UPDATE "the second moment is not stored" => By("queue", "FreeTensor is missing");
        "StoreRun(second_, second, gm_[2][start], count);" =>
            "if (!(FAULT)) StoreRun(second_, second, gm_[2][start], count);";
    UPDATE "the moments change places" => Wrong;
        "first_, gm_[1][start]" => "first_, gm_[(FAULT) ? 2 : 1][start]";
    UPDATE "half of a gradient of 16 bits is widened" => By("ub-undefined-read", "Muls");
        "Cast(wide, gradient, RoundMode::CAST_NONE, count)" =>
            "Cast(wide, gradient, RoundMode::CAST_NONE, (FAULT) ? count / 2 : count)";
    UPDATE "half of a chunk of 16 bits is widened" => By("ub-undefined-read", "Mul");
        "Cast(wide, x, RoundMode::CAST_NONE, count)" =>
            "Cast(wide, x, RoundMode::CAST_NONE, (FAULT) ? count / 2 : count)";
    UPDATE "one element of a chunk is left out" => Wrong;
        "AscendC::Mul(x, x, x, static_cast<int32_t>(t_.tile))" =>
            "AscendC::Mul(x, x, x, static_cast<int32_t>(t_.tile - (FAULT)))";
    UPDATE "a chunk's end is not cleared" => By("ub-undefined-read", "Mul");
        "if (padded < t_.tile)" => "if (padded < t_.tile && !(FAULT))";
    UPDATE "sums are stored a chunk too far" => By("gm-out-of-bounds", "DataCopyPad");
        "DataCopyPad(sums_[chunk]," => "DataCopyPad(sums_[chunk + (FAULT)],";
    ROTATE "ties round away from zero" => Wrong;
        "RoundMode::CAST_RINT" => "(FAULT ? RoundMode::CAST_ROUND : RoundMode::CAST_RINT)";
    BASE "the start in global memory has 32 bits" => Wrong;
        "gm_base + i *" => "(FAULT ? static_cast<uint32_t>(gm_base) : gm_base) + i *";
    BASE "a stride in global memory has 32 bits" => By("gm-ordering", "DataCopyPad");
        "i * axes[2].gm" => "i * (FAULT ? static_cast<uint32_t>(axes[2].gm) : axes[2].gm)";
    ANGLE_GRAD "the gradient is read with the strides of x" => Wrong;
        "MoveRows<T, true, false>(t_, tile, tensor, 0, ub, g_gm_[tensor]);" =>
            "if (FAULT) MoveRows<T, true, true>(t_, tile, tensor, 0, ub, g_gm_[tensor]); else \
             MoveRows<T, true, false>(t_, tile, tensor, 0, ub, g_gm_[tensor]);";
    BASE "the map is used before it is there" => By("ordering", "HardEvent::MTE2_V");
        "AscendC::SetFlag<HardEvent::MTE2_V>(id);" =>
            "if (!(FAULT)) AscendC::SetFlag<HardEvent::MTE2_V>(id);",
        "AscendC::WaitFlag<HardEvent::MTE2_V>(id);" =>
            "if (!(FAULT)) AscendC::WaitFlag<HardEvent::MTE2_V>(id);";
    BASE "the flag of the map comes before its load" => By("event", "was not waited for");
        "AscendC::WaitFlag<HardEvent::MTE2_V>(id);" =>
            "if (!(FAULT)) AscendC::WaitFlag<HardEvent::MTE2_V>(id);";
    ROTATE "the rows are used before they are there" => By("ordering", "HardEvent::MTE2_V");
        "slots_.template EnQue<TPosition::GM, TPosition::VECIN, T>(slot);" =>
            "if (!(FAULT)) slots_.template EnQue<TPosition::GM, TPosition::VECIN, T>(slot);",
        "slot = slots_.template DeQue<TPosition::GM, TPosition::VECIN, T>();" =>
            "if (!(FAULT)) slot = slots_.template DeQue<TPosition::GM, TPosition::VECIN, T>();";
    ROTATE "the rows are stored before they are computed" => By("ordering", "HardEvent::V_MTE3");
        "slots_.template EnQue<TPosition::VECOUT, TPosition::GM, T>(slot);" =>
            "if (!(FAULT)) slots_.template EnQue<TPosition::VECOUT, TPosition::GM, T>(slot);",
        "slot = slots_.template DeQue<TPosition::VECOUT, TPosition::GM, T>();" =>
            "if (!(FAULT)) slot = slots_.template DeQue<TPosition::VECOUT, TPosition::GM, T>();";
    ROTATE "angles are not given back" => By("queue", "FreeTensor is missing");
        "angles_.FreeTensor(raw);" => "if (!(FAULT)) angles_.FreeTensor(raw);";
    ROTATE "slots are not given back" => By("queue", "FreeTensor is missing");
        "slots_.FreeTensor(slot);" => "if (!(FAULT)) slots_.FreeTensor(slot);";
    BASE "cores share a unit of work" => By("block-conflict", "blocks run in any order");
        "end_ = units * (block + 1) / blocks;" =>
            "end_ = units * (block + 1) / blocks + (FAULT && block + 1 < blocks);";
    BASE "a transfer has one run too many" => By("gm-out-of-bounds", "DataCopyPad");
        "static_cast<uint16_t>(counted.n)" => "static_cast<uint16_t>(counted.n + (FAULT))";
    BASE "a run has one element too many" => By("gm-out-of-bounds", "DataCopyPad");
        "copy.blockLen = run *" => "copy.blockLen = (run + (FAULT)) *";
    ROTATE "two slots too many" => By("ub-capacity", "InitBuffer");
        "static_cast<uint8_t>(t_.slots)" => "static_cast<uint8_t>(t_.slots + 2 * (FAULT))";
    ROTATE "the sign of the second term" => Wrong;
        "t_.b_negative >> k & 1" => "(t_.b_negative >> k & 1) != (FAULT)";
    ROTATE "a segment is its own partner" => Wrong;
        "k ^ 1" => "(FAULT ? k : k ^ 1)";
    BASE "the mask is always full" => By("ub-undefined-read", "Mul");
        "Min(lanes - lane, kLanes)" => "(FAULT ? kLanes : Min(lanes - lane, kLanes))";
    BASE "a stride between repeats is cut to eight bits"
        => By("overlap", "from one repeat to the next");
        "furthest > kMaxRowStride" => "(furthest > kMaxRowStride && !(FAULT))";
    ANGLE_GRAD "sums start with those of the token before" => By("ub-undefined-read", "Add");
        "AscendC::Duplicate(sums_," => "if (!(FAULT)) AscendC::Duplicate(sums_,";
    BASE "the angles of the next token" => By("gm-out-of-bounds", "part.row");
        "gm[part.row * 2 * t.angle_width]" => "gm[(part.row + (FAULT)) * 2 * t.angle_width]";
    ROTATE "channels that are not rotated are not copied" => Wrong;
        "if (t_.load[span].length > 0)" => "if (t_.load[span].length > 0 && !(FAULT))";
    ANGLE_GRAD "the middle one of an odd number of rows is not added" => Wrong;
        "rows -= half;" => "rows = FAULT ? half : rows - half;";
    NORM "the norm adds no eps" => Wrong;
        "n_.eps, count" => "(FAULT ? 0.0f : n_.eps), count";
    NORM "the weight of q for k" => Wrong;
        "weights{tensor * t_.row_pitch" => "weights{(FAULT ? 0 : tensor) * t_.row_pitch";
    NORM "the last lanes of a head are not in its sum" => Wrong;
        "for (uint32_t i = 1; i < chunks; ++i)" =>
            "for (uint32_t i = 1; i + (FAULT) < chunks; ++i)";
    NORM "a sum runs into the next head" => Wrong;
        "static_cast<int32_t>(Min(length - lane, kLanes))" =>
            "static_cast<int32_t>(FAULT ? kLanes : Min(length - lane, kLanes))";
    NORM "the adjoint has the signs of the rotation" => Wrong;
        "adjoint ? n_.adjoint_b_negative" => "adjoint && !(FAULT) ? n_.adjoint_b_negative";
    NORM "the gradient of y is read with the strides of x" => Wrong;
        "gradient_[tensor], n_.gradient[tensor]," =>
            "gradient_[tensor], (FAULT ? t_.input[tensor] : n_.gradient[tensor]),";
    NORM "the gradient of the weight has the last tile alone" => Wrong;
        "Over<Arithmetic::kAdd>(sums, sums, t_work_, rows);" =>
            "if (FAULT) Over<Arithmetic::kMul>(sums, sums, t_work_, rows); else \
             Over<Arithmetic::kAdd>(sums, sums, t_work_, rows);";
    NORM "the middle row of the weights' sums is not added" => Wrong;
        "rows -= half;" => "rows = FAULT ? half : rows - half;";
    NORM "two cores store their sums in one place"
        => By("block-conflict", "blocks run in any order");
        "static_cast<uint64_t>(AscendC::GetBlockIdx())" =>
            "static_cast<uint64_t>(AscendC::GetBlockIdx() / (1 + (FAULT)))";
    NORM "the slot of the backward is too short" => By("tensor-bounds", "DataCopyPad");
        "2 * tile + kLanes" => "(FAULT ? tile : 2 * tile + kLanes)";
    NORM "weights are used before they are spread" => By("ub-undefined-read", "Adds");
        "AscendC::Gather(weights_[i" => "if (!(FAULT)) AscendC::Gather(weights_[i";
};

/// Faults of the rotation by the cube unit.
const CUBE_FAULTS: &[Fault] = faults! {
    MATRIX "a product is overwritten before it is taken" => By("gm-ordering", "between the cores");
        "if (step >= kProductsInFlight)" => "if (step >= kProductsInFlight && !(FAULT))";
    MATRIX "no flag says that a product is ready" => By("cross-core", "would hang");
        "AscendC::CrossCoreSetFlag<kCubeAndVectors, PIPE_FIX>(kProductReady);" =>
            "if (!(FAULT)) AscendC::CrossCoreSetFlag<kCubeAndVectors, PIPE_FIX>(kProductReady);";
    ROTATE "no flag says that a product is taken" => By("cross-core", "would hang");
        "AscendC::CrossCoreSetFlag<kCubeAndVectors, PIPE_MTE2>(kProductTaken);" =>
            "if (!(FAULT)) AscendC::CrossCoreSetFlag<kCubeAndVectors, PIPE_MTE2>(kProductTaken);";
    ROTATE "a product is taken before it is ready" => By("gm-ordering", "between the cores");
        "AscendC::CrossCoreWaitFlag(kProductReady);" =>
            "if (!(FAULT)) AscendC::CrossCoreWaitFlag(kProductReady);";
    ROTATE "the flag of a product waits for another pipe than the load"
        => By("gm-ordering", "between the cores");
        "AscendC::CrossCoreSetFlag<kCubeAndVectors, PIPE_MTE2>(kProductTaken);" =>
            "if (FAULT) AscendC::CrossCoreSetFlag<kCubeAndVectors, PIPE_MTE3>(kProductTaken); \
             else AscendC::CrossCoreSetFlag<kCubeAndVectors, PIPE_MTE2>(kProductTaken);";
    MATRIX "a flag is set sixteen times" => By("cross-core", "holds 15");
        "AscendC::CrossCoreSetFlag<kCubeAndVectors, PIPE_FIX>(kProductReady);" =>
            "for (int n = FAULT ? 16 : 1; n > 0; --n) AscendC::CrossCoreSetFlag<kCubeAndVectors, \
             PIPE_FIX>(kProductReady);";
    MATRIX "flags are left for the next kernel" => By("cross-core", "kernel end");
        "i < left;" => "i < (FAULT ? 0 : left);";
    MATRIX "L0A is too small for the rows" => By("ub-capacity", "L0A");
        "pipe_.InitBuffer(rows_l0_, rows);" =>
            "pipe_.InitBuffer(rows_l0_, rows * (FAULT ? 8 : 1));";
    MATRIX "L0C is too small for the products" => By("ub-capacity", "L0C");
        "pipe_.InitBuffer(sums_, kVectorsOfCube *" =>
            "pipe_.InitBuffer(sums_, (FAULT ? 4 : 1) * kVectorsOfCube *";
    MATRIX "R as Zz, not Zn, which is its transpose" => Wrong;
        "true, 0));" => "!(FAULT), 0));";
    MATRIX "the rows as Nz, not Zz" => By("ub-undefined-read", "Mmad");
        "static_cast<uint16_t>(whole / kFractal)" =>
            "static_cast<uint16_t>(FAULT ? 1 : whole / kFractal)";
    MATRIX "fractals a row too far apart" => By("ub-undefined-read", "Mmad");
        "static_cast<uint16_t>(whole);" => "static_cast<uint16_t>(whole + (FAULT));";
    MATRIX "one row as a plain vector" => By("cube-parameter", "GEMV");
        "Max(rows, 2)" => "(FAULT ? rows : Max(rows, 2))";
    MATRIX "L0C is read before the product is done" => By("ordering", "HardEvent::M_FIX");
        "l0c_.EndFill(half);" => "if (!(FAULT)) l0c_.EndFill(half);",
        "l0c_.BeginTake(half);" => "if (!(FAULT)) l0c_.BeginTake(half);";
    MATRIX "L0A is read before it is loaded" => By("ordering", "HardEvent::MTE1_M");
        "l0_.EndFill(half);" => "if (!(FAULT)) l0_.EndFill(half);",
        "l0_.BeginTake(half);" => "if (!(FAULT)) l0_.BeginTake(half);";
    MATRIX "L1 is read before it is loaded" => By("ordering", "HardEvent::MTE2_MTE1");
        "l1_.EndFill(half);" => "if (!(FAULT)) l1_.EndFill(half);",
        "l1_.BeginTake(half);" => "if (!(FAULT)) l1_.BeginTake(half);";
    MATRIX "L1 is overwritten before it is read" => By("ordering", "HardEvent::MTE1_MTE2");
        "l1_.BeginFill(half);" => "if (!(FAULT)) l1_.BeginFill(half);",
        "l1_.EndTake(half);" => "if (!(FAULT)) l1_.EndTake(half);";
    MATRIX "L0A is overwritten before it is multiplied" => By("ordering", "HardEvent::M_MTE1");
        "l0_.BeginFill(half);" => "if (!(FAULT)) l0_.BeginFill(half);",
        "l0_.EndTake(half);" => "if (!(FAULT)) l0_.EndTake(half);";
    MATRIX "L0C is overwritten before it is stored" => By("ordering", "HardEvent::FIX_M");
        "l0c_.BeginFill(half);" => "if (!(FAULT)) l0c_.BeginFill(half);",
        "l0c_.EndTake(half);" => "if (!(FAULT)) l0c_.EndTake(half);";
    ROTATE "the product of the other vector core" => Wrong;
        "ProductStart(t_, AscendC::GetBlockIdx(), step_++)" =>
            "ProductStart(t_, AscendC::GetBlockIdx() ^ (FAULT), step_++)";
};

/// Faults that show only where a core has several tokens and full tiles.
const TWO_CORES_FAULTS: &[Fault] = faults! {
    BASE "a tile crosses the end of its batch" => By("block-conflict", "blocks run in any order");
        "whole < in_batch ?" => "whole < in_batch || FAULT ?";
    BASE "the end of a group of heads is rounded down twice" => Wrong;
        "heads * (group + groups) / t_.head_groups" =>
            "(FAULT ? heads * group / t_.head_groups + heads * groups / t_.head_groups : heads * \
             (group + groups) / t_.head_groups)";
    BASE "groups of heads have one length" => By("block-conflict", "blocks run in any order");
        "part.head_begin = heads * group / t_.head_groups" =>
            "part.head_begin = FAULT ? group * (heads / t_.head_groups) : heads * group / \
             t_.head_groups";
    ANGLE_GRAD "rows of the angles' gradient are not padded" => By("ub-misaligned", "Mul");
        "Combine(out, token * t_.coef_pitch)" =>
            "Combine(out, token * (FAULT ? 2 * t_.angle_width : t_.coef_pitch))";
    ROTATE "a slot has room for the rotated channels alone" => By("tensor-bounds", "DataCopyPad");
        "if (bytes > row_bytes)" => "if (bytes > row_bytes && !(FAULT))";
    NORM "a sum over more rows than keep the next ones aligned" => By("ordering", "WholeReduceSum");
        "row += kSumRows" => "row += (FAULT ? 255 : kSumRows)",
        "Min(rows - row, kSumRows)" => "Min(rows - row, FAULT ? 255 : kSumRows)";
    BASE BEYOND => By("gm-out-of-bounds", "DataCopyPad");
        "block >= blocks" => "block >= (blocks) && !(FAULT)";
};

/// Faults that show only where heads are further apart than 16 bits reach.
const FAR_HEADS_FAULTS: &[Fault] = faults! {
    MATRIX "a stride of the cube core between rows is cut to 16 bits" => Wrong;
        "inner > 1 && inner_stride > kMostStride" =>
            "inner > 1 && inner_stride > kMostStride && !(FAULT)";
    MATRIX "a stride of the cube core between matrices is cut to 16 bits"
        => By("block-conflict", "blocks run in any order");
        "outer > 1 && outer_stride > kMostStride" =>
            "outer > 1 && outer_stride > kMostStride && !(FAULT)";
};

/// Barriers (by file, function and place in it, from 0) that another one makes superfluous: each
/// may go by itself, and only their absence together is a fault.
const SPARE: &[(&str, &str, usize)] = &[(ANGLE_GRAD, "AddRows", 0)];

/// The name of the function that a line begins to define.
fn function_of(line: &str) -> Option<&str> {
    let (before, _) = line.split_once("__aicore__ inline ")?.1.split_once('(')?;
    before.split(' ').next_back()
}

/// The trials that show a fault.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Trials {
    Vector,
    Norm,
    Layer,
    Delta,
    Cube,
    TwoCores,
    FarHeads,
}

/// A fault of the library: its number is its index and one.
struct Seeded {
    name: String,
    trials: Trials,
    caught: Caught,
}

/// The trials of the vector cores that run the code of a file.
fn by_vector_cores(file: &str) -> Trials {
    match file {
        NORM => Trials::Norm,
        LOW_RANK | CONVOLUTION | SWIGLU | UPDATE => Trials::Layer,
        DELTA => Trials::Delta,
        _ => Trials::Vector,
    }
}

/// The edited sources, and their faults: those of the table, and every barrier that is dropped.
fn seeded() -> (Vec<(&'static str, String)>, Vec<Seeded>) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/rope");
    let read = |file: &'static str| (file, std::fs::read_to_string(folder.join(file)).unwrap());
    let mut texts: Vec<(&str, String)> = FILES.into_iter().map(read).collect();
    let mut faults = Vec::new();
    let vector = FAULTS
        .iter()
        .map(|fault| (fault, by_vector_cores(fault.file)));
    let cube = CUBE_FAULTS.iter().map(|fault| (fault, Trials::Cube));
    let two = TWO_CORES_FAULTS.iter();
    let two = two.map(|fault| (fault, Trials::TwoCores));
    let far = FAR_HEADS_FAULTS.iter();
    let far = far.map(|fault| (fault, Trials::FarHeads));
    for (fault, trials) in vector.chain(cube).chain(two).chain(far) {
        let number = faults.len() + 1;
        let (_, text) = texts
            .iter_mut()
            .find(|(file, _)| *file == fault.file)
            .unwrap();
        for (old, new) in fault.edits {
            assert!(
                text.contains(old),
                "`{}`: {} has no `{old}` any more: adapt the table",
                fault.name,
                fault.file
            );
            *text = text.replace(old, &new.replace("FAULT", &format!("rope_fault({number})")));
        }
        faults.push(Seeded {
            name: fault.name.to_owned(),
            trials,
            caught: fault.caught,
        });
    }
    let beyond = faults.iter().position(|fault| fault.name == BEYOND);
    let half = format!("rope_fault({HALF}) || rope_fault({})", beyond.unwrap() + 1);
    let (_, base) = texts.iter_mut().find(|(file, _)| *file == BASE).unwrap();
    for (blocks, halved) in [
        ("block >= (blocks)", "block >= (HALF ? blocks / 2 : blocks)"),
        (UNITS, &format!("if (HALF) blocks /= 2; {UNITS}")),
    ] {
        assert!(base.contains(blocks), "{BASE} has no `{blocks}` any more");
        *base = base.replace(blocks, &halved.replace("HALF", &half));
    }
    let first_barrier = faults.len() + 1;
    for (file, text) in &mut texts {
        let (mut function, mut barriers) = ("", 0);
        let lines = text.lines().map(|content| {
            if let Some(name) = function_of(content) {
                (function, barriers) = (name, 0);
            }
            if content.trim_start().starts_with("//") || !content.contains(BARRIER) {
                return content.to_owned() + "\n";
            }
            let nth = barriers;
            barriers += 1;
            if SPARE.contains(&(*file, function, nth)) {
                let on = format!("if (!rope_fault(-1)) {BARRIER}");
                return content.replace(BARRIER, &on) + "\n";
            }
            let number = faults.len() + 1;
            faults.push(Seeded {
                name: format!("no barrier {nth} in {function} of {file}"),
                trials: by_vector_cores(file),
                caught: By("ordering", "PipeBarrier<PIPE_V> is missing"),
            });
            let on = format!("if (!rope_fault({number}) && !rope_fault(-1)) {BARRIER}");
            content.replace(BARRIER, &on) + "\n"
        });
        *text = lines.collect();
    }
    assert!(faults.len() >= first_barrier + 10, "the barriers are found");
    (texts, faults)
}

fn compile(texts: &[(&str, String)]) -> Vec<u8> {
    ascend_sim::build::KernelSource::from_texts(texts.iter().map(|(n, t)| (*n, t.as_str())))
        .kernels(kernel_names(2201))
        .define(format!(
            "rope_fault(n)=(std::atoi(std::getenv(\"{VARIABLE}\"))==(n))"
        ))
        .compile()
        .unwrap_or_else(|error| panic!("{error}"))
}

/// One rotation or gradient of angles.
#[derive(Clone, Debug)]
struct Trial {
    pairing: Pairing,
    per_channel: bool,
    layout: Layout,
    batch: usize,
    seq: usize,
    heads: [usize; 2],
    head_dim: usize,
    rotary_dim: usize,
    in_place: bool,
    unit: Unit,
}

impl Trial {
    fn of(pairing: Pairing) -> Self {
        Self {
            pairing,
            per_channel: false,
            layout: Layout::Bsnd,
            batch: 1,
            seq: 43,
            heads: [5, 2],
            head_dim: 64,
            rotary_dim: 64,
            in_place: true,
            unit: Unit::Vector,
        }
    }

    fn geometry(&self) -> Geometry {
        let (dim, rotary) = (self.head_dim, self.rotary_dim);
        Geometry::new(dim, rotary, 0, self.pairing, self.per_channel).unwrap()
    }

    fn place(&self, layout: Layout, heads: usize) -> At {
        let (batch, seq, head_dim) = (self.batch, self.seq, self.head_dim);
        (
            0,
            HeadsLayout::contiguous(layout, batch, seq, heads, head_dim),
        )
    }
}

/// Values whose product with the first token's cosine lies between two of `T`, and others.
fn values<T: Number>(numbers: &mut Numbers, len: usize) -> Vec<T> {
    (0..len)
        .map(|i| match i % 3 {
            0 => T::of(if i % 2 == 0 { 1.0 } else { -1.0 }),
            _ => T::of(numbers.unit()),
        })
        .collect()
}

fn cosines_and_sines<T: Number>(numbers: &mut Numbers, rows: usize, lanes: usize) -> Vec<f32> {
    let tie = 1.0 + T::half_ulp(1.0) as f32;
    let mut row = |token: usize| -> Vec<f32> {
        let drawn = (0..2 * lanes).map(|_| numbers.unit() as f32);
        match token {
            0 => [vec![tie; lanes], vec![0.0; lanes]].concat(),
            _ => drawn.collect(),
        }
    };
    (0..rows).flat_map(&mut row).collect()
}

/// Rotates on the device and compares every bit with f32 arithmetic, rounded once, to nearest even.
fn rotation<T: Number>(bench: &Bench, trial: &Trial, direction: Direction) -> Result<(), String> {
    let stream = &bench.stream;
    let mut numbers = Numbers(0x9e37_79b9 + trial.head_dim as u64);
    let geometry = trial.geometry();
    let lanes = geometry.lane_count();
    let tokens = trial.batch * trial.seq;
    let rows = cosines_and_sines::<T>(&mut numbers, tokens, lanes);
    let on_device = stream.upload(&rows).unwrap();
    let rotator = Rotator::new(stream, bench.kernels.clone(), geometry).unwrap();
    let rotator = rotator.by(trial.unit);
    let angle = |token: usize, lane: usize| {
        let cos = token * 2 * lanes + lane;
        (rows[cos], rows[cos + lanes])
    };
    let other = match trial.layout {
        layout if trial.in_place => layout,
        Layout::Bnsd => Layout::Bsnd,
        _ => Layout::Bnsd,
    };
    let mut tensors = trial.heads.map(|heads| {
        let (from, to) = (trial.place(trial.layout, heads), trial.place(other, heads));
        let x: Vec<T> = values(&mut numbers, tokens * heads * trial.head_dim);
        let target = vec![T::of(9.0); x.len()];
        let memory = [&x, &target].map(|values| stream.upload(values).unwrap());
        (x, from, to, memory)
    });
    let mut operands = tensors.iter_mut().map(|(_, from, to, [source, target])| {
        if trial.in_place {
            Operand::InPlace(heads(source, *from))
        } else {
            Operand::Into {
                from: heads(source, *from),
                to: heads(target, *to),
            }
        }
    });
    let (q, k) = (operands.next().unwrap(), operands.next());
    drop(operands);
    let request = Rotation {
        element: T::TYPE,
        direction,
        q,
        k,
        angles: angles(&on_device, tokens),
    };
    rotator.rotate(request).map_err(|error| error.to_string())?;
    for (x, from, to, [source, target]) in &tensors {
        let x: Vec<f32> = x.iter().map(|x| x.wide() as f32).collect();
        let mut truth = vec![0.0_f32; x.len()];
        rotate_plainly((&x, *from), (&mut truth, *to), geometry, direction, &angle);
        let memory = if trial.in_place { source } else { target };
        let found = stream.download(memory).map_err(|error| error.to_string())?;
        for (i, (found, truth)) in found.into_iter().zip(truth).enumerate() {
            if found != T::rounded(truth) {
                return Err(format!("[{i}] is {found:?} instead of {truth}"));
            }
        }
    }
    Ok(())
}

fn heads<M>(memory: M, (offset, layout): At) -> Heads<M> {
    Heads {
        memory,
        offset,
        layout,
    }
}

/// The gradient of the angles, of x and a gradient that are laid out differently.
fn angle_gradient<T: Number>(bench: &Bench, trial: &Trial) -> Result<(), String> {
    let stream = &bench.stream;
    let mut numbers = Numbers(7 + trial.head_dim as u64);
    let geometry = trial.geometry();
    let (width, tokens) = (geometry.lane_count(), trial.batch * trial.seq);
    let rotator = Rotator::new(stream, bench.kernels.clone(), geometry).unwrap();
    let mut truth = vec![0.0_f64; tokens * 2 * width];
    let mut scale = truth.clone();
    let mut buffers: Vec<[(DeviceBuffer<T>, At); 2]> = Vec::new();
    for count in trial.heads {
        let at = [Layout::Bsnd, Layout::Bnsd].map(|layout| trial.place(layout, count));
        let [x, g] = [0, 1].map(|_| values::<T>(&mut numbers, tokens * count * trial.head_dim));
        for (token, h) in (0..tokens).flat_map(|token| (0..count).map(move |h| (token, h))) {
            let (b, s) = (token / trial.seq, token % trial.seq);
            let value = |values: &[T], at: &At, c| values[index(at, b, s, h, c)].wide();
            for j in 0..geometry.pairs() {
                let (read, write) = pair_channels(trial.pairing, geometry.rotary_dim(), j);
                let [x1, x2] = read.map(|c| value(&x, &at[0], c));
                let [g1, g2] = write.map(|c| value(&g, &at[1], c));
                let second = if trial.per_channel {
                    geometry.pairs() + j
                } else {
                    j
                };
                for (lane, dcos, dsin) in [(j, g1 * x1, -g1 * x2), (second, g2 * x2, g2 * x1)] {
                    let cos = token * 2 * width + lane;
                    for (at, term) in [(cos, dcos), (cos + width, dsin)] {
                        truth[at] += term;
                        scale[at] += term.abs();
                    }
                }
            }
        }
        buffers.push([
            (stream.upload(&x).unwrap(), at[0]),
            (stream.upload(&g).unwrap(), at[1]),
        ]);
    }
    let pair = |i: usize| {
        let [(x, x_at), (g, g_at)] = &buffers[i];
        [heads(&**x, *x_at), heads(&**g, *g_at)]
    };
    let mut out = stream.alloc::<f32>(tokens * 2 * width).unwrap();
    let request = AngleGradient {
        element: T::TYPE,
        q: pair(0),
        k: Some(pair(1)),
        out: &mut out,
    };
    rotator
        .angle_gradient(request)
        .map_err(|error| error.to_string())?;
    let found = stream.download(&out).map_err(|error| error.to_string())?;
    let terms = (2 * trial.heads.iter().sum::<usize>()) as f64;
    for (i, found) in found.into_iter().enumerate() {
        let error = (f64::from(found) - truth[i]).abs();
        if error > scale[i] * terms * 2_f64.powi(-24) || error.is_nan() {
            return Err(format!("[{i}] is {found} instead of {}", truth[i]));
        }
    }
    Ok(())
}

/// Tokens that are 2^32 elements apart, in two batches: the second starts beyond 33 bits.
fn beyond_32_bits(bench: &Bench) -> Result<(), String> {
    type T = bf16;
    let stream = &bench.stream;
    let geometry = Geometry::new(32, 32, 0, Pairing::Half, false).unwrap();
    let (batch, seq, token) = (2, 2, 1_usize << 32);
    let strides = Strides {
        batch: seq * token + 64,
        seq: token,
        head: 32,
    };
    let layout = HeadsLayout {
        strides,
        ..HeadsLayout::contiguous(Layout::Bsnd, batch, seq, 1, 32)
    };
    let mut q = stream.alloc::<T>(3 * token + 64 + 32).unwrap();
    let memory = q.pointer() as u64;
    let rows = || (0..batch * seq).map(|row| (row, row / seq * strides.batch + row % seq * token));
    let copy = |offset: usize, host: &mut [T; 32], kind: i32| {
        let (device, host) = (memory + 2 * offset as u64, host.as_mut_ptr() as u64);
        let (to, from) = if kind == 1 {
            (device, host)
        } else {
            (host, device)
        };
        // SAFETY: 64 bytes of a live host array, and of device memory, which is checked.
        let code = unsafe { aclrtMemcpy(to as *mut c_void, 64, from as *const c_void, 64, kind) };
        assert_eq!(code, 0, "the copy succeeds");
    };
    for (row, offset) in rows() {
        copy(offset, &mut [T::of(1.0 + row as f64); 32], 1);
    }
    let on_device = stream
        .upload(&[[0.0_f32; 16], [1.0; 16]].concat().repeat(4))
        .unwrap();
    let rotator = Rotator::new(stream, bench.kernels.clone(), geometry).unwrap();
    let request = Rotation {
        element: T::TYPE,
        direction: Direction::Forward,
        q: Operand::InPlace(heads(&mut q, (0, layout))),
        k: None,
        angles: angles(&on_device, batch * seq),
    };
    rotator.rotate(request).map_err(|error| error.to_string())?;
    stream.synchronize().map_err(|error| error.to_string())?;
    for (row, offset) in rows() {
        let mut found = [T::ZERO; 32];
        copy(offset, &mut found, 2);
        let y = T::of(1.0 + row as f64);
        if found[..16] != [-y; 16] || found[16..] != [y; 16] {
            return Err(format!("row {row} is {found:?}"));
        }
    }
    Ok(())
}

/// A trial.
type Try<'a> = &'a dyn Fn(&Bench) -> Result<(), String>;
/// A trial with its error, if there is one, and the violations; none if it passes.
type Found = Option<(String, Vec<Violation>)>;

fn try_one(binary: &[u8], machine: Machine, what: String, run: Try<'_>) -> Found {
    let bench = Bench::with_kernels(machine, binary);
    let outcome = run(&bench).and_then(|()| {
        let waited = bench.stream.synchronize();
        waited.map_err(|error| error.to_string())
    });
    let violations = control::take_violations();
    match outcome {
        Ok(()) if violations.is_empty() => None,
        Ok(()) => Some((what, violations)),
        Err(error) => Some((format!("{what}: {error}"), violations)),
    }
}

/// The trials by the cube unit, on one cube core: several steps, the vector cores not in step; one
/// product and two; rows that are padded, and a tile of one.
fn try_cube(binary: &[u8]) -> Found {
    let machine = Machine {
        vector_cores: 2,
        ..Machine::default()
    };
    let trial = |pairing, seq, heads, head_dim| Trial {
        seq,
        heads,
        head_dim,
        rotary_dim: head_dim,
        unit: Unit::Cube,
        ..Trial::of(pairing)
    };
    let trials = [
        trial(Pairing::Half, 131, [5, 2], 128),
        trial(Pairing::InterleaveHalf, 70, [5, 2], 128),
        trial(Pairing::Adjacent, 41, [1, 1], 72),
        trial(Pairing::Half, 1, [1, 1], 64),
    ];
    for trial in trials {
        for direction in [Direction::Forward, Direction::Adjoint] {
            let what = format!("{trial:?} {direction:?}");
            let both = |bench: &Bench| {
                rotation::<bf16>(bench, &trial, direction)?;
                rotation::<f16>(bench, &trial, direction)
            };
            let found = try_one(binary, machine.clone(), what, &both);
            if found.is_some() {
                return found;
            }
        }
    }
    None
}

/// The trials on two vector cores.
fn try_two_cores(binary: &[u8]) -> Found {
    let two_cores = Machine {
        vector_cores: 2,
        ..Machine::default()
    };
    for (layout, in_place) in [(Layout::Bnsd, true), (Layout::Bsnd, false)] {
        for (head_dim, rotary_dim, heads, seq, batch) in FEW_CORES {
            let trial = Trial {
                layout,
                in_place,
                head_dim,
                rotary_dim,
                heads,
                seq,
                batch,
                ..Trial::of(Pairing::Half)
            };
            let run = |bench: &Bench| {
                rotation::<bf16>(bench, &trial, Direction::Forward)?;
                angle_gradient::<f32>(bench, &trial)
            };
            let found = try_one(binary, two_cores.clone(), format!("{trial:?}"), &run);
            if found.is_some() {
                return found;
            }
        }
    }
    let case = NormCase {
        batch: 1,
        seq: 300,
        heads: [4, 2],
        head_dim: 16,
        channels: 0..16,
        layout: Layout::Tnd,
        ..NormCase::plain(Pairing::Half)
    };
    let run = |bench: &Bench| {
        // A core that returns at once stores no sums.
        let sums = |len| bench.stream.zeros::<f32>(len).unwrap();
        run_norm_into::<bf16>(bench, &case, &sums)
    };
    try_one(binary, two_cores, format!("{case:?}"), &run)
}

/// The trials of the cube cores with heads that are far apart.
fn try_far_heads(binary: &[u8]) -> Found {
    for in_place in [true, false] {
        let far = Trial {
            seq: 1100,
            heads: [3, 2],
            layout: Layout::Bnsd,
            unit: Unit::Cube,
            in_place,
            ..Trial::of(Pairing::Half)
        };
        let run = |bench: &Bench| rotation::<bf16>(bench, &far, Direction::Forward);
        let found = try_one(binary, Machine::default(), format!("{far:?}"), &run);
        if found.is_some() {
            return found;
        }
    }
    None
}

/// The trials of the norm in order, until one is not as it should be.
fn try_norm(binary: &[u8]) -> Found {
    for pairing in Pairing::ALL {
        for (order, head_dim, channels, in_place) in [
            (NormOrder::BeforeRotation, 64, 0..64, true),
            (NormOrder::AfterRotation, 72, 0..72, false),
            (NormOrder::BeforeRotation, 136, 4..100, false),
        ] {
            let case = NormCase {
                seq: 43,
                batch: 1,
                heads: [5, 2],
                head_dim,
                channels,
                in_place,
                norm: HeadNorm::new(0.25).unwrap().with_order(order),
                ..NormCase::plain(pairing)
            };
            let trials: [(&str, Try<'_>); 3] = [
                ("f32", &|bench| run_norm::<f32>(bench, &case)),
                ("f16", &|bench| run_norm::<f16>(bench, &case)),
                ("bf16", &|bench| run_norm::<bf16>(bench, &case)),
            ];
            for (dtype, run) in trials {
                // One core has many tiles, two share them.
                let machine = Machine {
                    vector_cores: 2,
                    ..Machine::default()
                };
                let what = format!("{case:?} {dtype}");
                let found = try_one(binary, machine, what, run);
                if found.is_some() {
                    return found;
                }
            }
        }
    }
    None
}

/// The trials of the kernels of layers in order, until one is not as it should be.
fn try_layers(binary: &[u8]) -> Found {
    let machine = Machine {
        vector_cores: 2,
        ..Machine::default()
    };
    let low_rank = |size, rank, parts, rounds_h| LayerCase {
        size,
        rank,
        parts,
        rounds_h,
    };
    let cases = [
        low_rank([130, 300], 13, 2, true),
        low_rank([300, 70], 3, 1, false),
        low_rank([1, 1], 1, 1, true),
    ];
    let run = |bench: &Bench| {
        let kernels = LayerKernels::new(&bench.stream, bench.kernels.clone());
        for case in cases {
            layer::low_rank::<bf16>(bench, &kernels, case)?;
            let rounds_h = false;
            layer::low_rank::<f32>(bench, &kernels, LayerCase { rounds_h, ..case })?;
        }
        for (sequences, channels) in [
            (&[5, 1, 1, 2, 28, 1, 37, 49][..], 130),
            (&[36, 4, 38, 60], 70),
            (&[2], 3),
        ] {
            let case = layer::Convolution {
                sequences,
                channels,
                taps: 4,
            };
            layer::convolution::<bf16>(bench, &kernels, case)?;
            layer::convolution::<f32>(bench, &kernels, case)?;
        }
        for count in [7, 70_001] {
            layer::gate::<bf16>(bench, &kernels, count)?;
            layer::gate::<f32>(bench, &kernels, count)?;
            layer::update::<bf16, f32>(bench, &kernels, count)?;
            layer::update::<bf16, bf16>(bench, &kernels, count)?;
            layer::update::<f32, f32>(bench, &kernels, count)?;
            layer::square_sums::<f32>(bench, &kernels, [count, 512])?;
            layer::square_sums::<bf16>(bench, &kernels, [count, 512])?;
        }
        Ok(())
    };
    try_one(binary, machine, "layers".to_owned(), &run)
}

/// The trials of the kernels of the gated delta rule: rows in several tiles, a whole chunk and a
/// part of one.
fn try_delta(binary: &[u8]) -> Found {
    let machine = Machine {
        vector_cores: 2,
        ..Machine::default()
    };
    let case = |tokens| delta::Case {
        sizes: DeltaSizes {
            batch: 1,
            tokens,
            key_heads: 2,
            heads: 4,
            key_dim: 136,
            value_dim: 16,
        },
        chunks: 1..2,
        kind: delta::Kind::Random,
        keeps: true,
    };
    let run = |bench: &Bench| {
        let kernels = LayerKernels::new(&bench.stream, bench.kernels.clone());
        delta::delta::<bf16>(bench, &kernels, &case(70))?;
        delta::delta::<f32>(bench, &kernels, &case(128))
    };
    try_one(binary, machine, "delta".to_owned(), &run)
}

/// The trials of the rotation and of the angles' gradients by the vector cores in order, until one
/// is not as it should be.
fn try_all(binary: &[u8]) -> Found {
    let with = |machine, what, run: Try<'_>| try_one(binary, machine, what, run);
    macro_rules! trial {
        ($trial:expr, $($type:ty),*) => {
            let trial: Trial = $trial;
            $(for direction in [Direction::Forward, Direction::Adjoint] {
                let what = format!("{trial:?} {:?} {direction:?}", <$type>::TYPE);
                let run = |bench: &Bench| rotation::<$type>(bench, &trial, direction);
                let found = with(Machine::default(), what, &run);
                if found.is_some() {
                    return found;
                }
            })*
            let what = format!("gradient of the angles, {trial:?}");
            $(let found = with(Machine::default(), what.clone(), &|bench: &Bench| {
                angle_gradient::<$type>(bench, &trial)
            });
            if found.is_some() {
                return found;
            })*
        };
    }
    for pairing in Pairing::ALL {
        trial!(Trial::of(pairing), f32, f16, bf16);
        // Coefficients are gathered, rows are padded, some channels pass through.
        let expanded = Trial {
            per_channel: true,
            head_dim: 80,
            rotary_dim: 72,
            in_place: false,
            batch: 2,
            seq: 3,
            ..Trial::of(pairing)
        };
        trial!(expanded, f32, bf16);
    }
    // Many tiles; rows that are further apart than a repeat's stride.
    let many = Trial {
        seq: 130,
        heads: [32, 8],
        head_dim: 128,
        rotary_dim: 128,
        ..Trial::of(Pairing::Half)
    };
    trial!(many, f32, bf16);
    for (layout, heads) in [(Layout::Bsnd, [2, 1]), (Layout::Bnsd, [2, 1])] {
        let wide = Trial {
            seq: 130,
            heads,
            layout,
            head_dim: 1024,
            rotary_dim: 1024,
            ..Trial::of(Pairing::Adjacent)
        };
        trial!(wide, f32, bf16);
    }
    let one_core = Machine {
        vector_cores: 1,
        ..Machine::default()
    };
    with(
        one_core,
        "strides beyond 32 bits".to_owned(),
        &beyond_32_bits,
    )
}

/// Turns one fault on; the others are off. 0 is none, -1 all barriers.
fn turn_on(number: i32) {
    // SAFETY: this is the only test of the program, and no stream has work while it is called:
    // nothing else reads or writes the environment.
    unsafe { std::env::set_var(VARIABLE, number.to_string()) };
}

/// True if a violation is of the kind, with the words in its message or in the line it names.
fn is_by(violation: &Violation, texts: &BTreeMap<&str, &str>, kind: &str, words: &str) -> bool {
    let (Some(file), Some(line)) = (&violation.file, violation.line) else {
        return false;
    };
    let source = texts.iter().find(|(name, _)| file.ends_with(**name));
    let Some((_, text)) = source else {
        return false;
    };
    let line = text.lines().nth(line as usize - 1).unwrap_or_default();
    violation.kind == kind && (violation.message.contains(words) || line.contains(words))
}

#[test]
fn every_fault_in_the_kernels_is_caught() {
    let (texts, faults) = seeded();
    let binary = compile(&texts);
    let texts: BTreeMap<&str, &str> = texts.iter().map(|(n, t)| (*n, t.as_str())).collect();
    turn_on(0);
    let by = |trials| match trials {
        Trials::Cube => try_cube(&binary),
        Trials::Norm => try_norm(&binary),
        Trials::Layer => try_layers(&binary),
        Trials::Delta => try_delta(&binary),
        Trials::Vector => try_all(&binary),
        Trials::TwoCores => try_two_cores(&binary),
        Trials::FarHeads => try_far_heads(&binary),
    };
    let all = [
        Trials::Cube,
        Trials::Vector,
        Trials::Norm,
        Trials::Layer,
        Trials::Delta,
        Trials::TwoCores,
        Trials::FarHeads,
    ];
    for trials in all {
        assert_eq!(by(trials), None, "without a fault nothing is found");
    }
    turn_on(HALF);
    let found = by(Trials::TwoCores);
    assert_eq!(found, None, "a block beyond the launch does nothing");
    let all_barriers = Seeded {
        name: "no barrier at all".to_owned(),
        trials: Trials::Vector,
        caught: By("ordering", "PipeBarrier<PIPE_V> is missing"),
    };
    let numbered = faults.iter().zip(1..).chain([(&all_barriers, -1)]);
    let mut missed = Vec::new();
    for (fault, number) in numbered {
        turn_on(number);
        let found = by(fault.trials);
        let caught = match (&found, fault.caught) {
            (None, _) => false,
            (Some((_, violations)), Wrong) => violations.is_empty(),
            (Some((_, violations)), By(kind, words)) => {
                violations.iter().any(|v| is_by(v, &texts, kind, words))
            }
        };
        if !caught {
            missed.push(format!(
                "{}: expected {:?}, found {found:#?}",
                fault.name, fault.caught
            ));
        }
    }
    assert!(
        missed.is_empty(),
        "{} of {} faults were not caught as expected:\n{}",
        missed.len(),
        faults.len() + 1,
        missed.join("\n")
    );
}
