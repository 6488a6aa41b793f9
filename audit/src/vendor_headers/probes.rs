//! Calls that break a rule of the vendor, each beside the same call without the fault.

use std::fmt::Write as _;
use std::path::Path;

/// A call of Ascend C on tensors of 1 KiB (see [`source`]).
pub(super) struct Probe {
    pub(super) call: &'static str,
    pub(super) fault: &'static str,
    right: &'static str,
    wrong: &'static str,
}

const fn row(
    call: &'static str,
    fault: &'static str,
    right: &'static str,
    wrong: &'static str,
) -> Probe {
    Probe {
        call,
        fault,
        right,
        wrong,
    }
}

/// What is wrong.
const MANY: &str = "more elements than the tensors have";
const REPEATS: &str = "a repeat beyond the tensors";
const STEP: &str = "a step between repeats beyond the tensors";
const BLOCK: &str = "an operand that starts inside a block";
const MASK: &str = "a mask of more lanes than a repeat has";

/// One or more for each call of the kernels that runs on a vector core.
#[rustfmt::skip]
pub(super) const PROBES: [Probe; 42] = [
    row("Add", MANY, "Add(a, b, c, 256)", "Add(a, b, c, 264)"),
    row("Add", REPEATS, "Add(a, b, c, 64, 4, two)", "Add(a, b, c, 64, 5, two)"),
    row("Sub", BLOCK, "Sub(a[8], b, c, 64)", "Sub(a[1], b, c, 64)"),
    row("Sub", REPEATS, "Sub(a, b, c, 64, 4, two)", "Sub(a, b[64], c, 64, 4, two)"),
    row("Mul", STEP, "Mul(a, b, c, 64, 2, two)", "Mul(a, b, c, 64, 2, far)"),
    row("Mul", BLOCK, "Mul(a, b, c[8], 64)", "Mul(a, b, c[3], 64)"),
    row("Div", MANY, "Div(a, b, c, 256)", "Div(a, b[128], c, 256)"),
    row("MulAddDst", MANY, "MulAddDst(a, b, c, 256)", "MulAddDst(a, b, c, 257)"),
    row("Adds", MANY, "Adds(a, b, 1.0f, 256)", "Adds(a, b, 1.0f, 257)"),
    row("Muls", BLOCK, "Muls(a, b[8], 2.0f, 64)", "Muls(a, b[5], 2.0f, 64)"),
    row("Muls", REPEATS, "Muls(a, b, 2.0f, 64, 4, one)", "Muls(a, b, 2.0f, 64, 5, one)"),
    row("Sqrt", MANY, "Sqrt(a, b, 256)", "Sqrt(a, b[64], 256)"),
    row("Exp", BLOCK, "Exp(a[8], b, 64)", "Exp(a[2], b, 64)"),
    row("Cast", MANY, "Cast(b, h, RoundMode::CAST_NONE, 256)",
        "Cast(b, h, RoundMode::CAST_NONE, 512)"),
    row("Cast", BLOCK, "Cast(b, h[16], RoundMode::CAST_NONE, 64)",
        "Cast(b, h[3], RoundMode::CAST_NONE, 64)"),
    row("Cast", REPEATS, "Cast(b, h, RoundMode::CAST_NONE, 64, 4, half_one)",
        "Cast(b, h, RoundMode::CAST_NONE, 64, 5, half_one)"),
    row("Gather", MANY, "Gather(a, b, u, 0, 256)", "Gather(a, b, u, 0, 264)"),
    row("Gather", BLOCK, "Gather(a, b, u[8], 0, 64)", "Gather(a[1], b, u, 0, 64)"),
    row("Brcb", REPEATS, "Brcb(a, b, 4, {1, 8})", "Brcb(a, b, 5, {1, 8})"),
    row("Brcb", BLOCK, "Brcb(a[8], b, 2, {1, 8})", "Brcb(a[4], b, 2, {1, 8})"),
    row("Duplicate", MANY, "Duplicate(a, 0.0f, 256)", "Duplicate(a, 0.0f, 257)"),
    row("WholeReduceSum", REPEATS, "WholeReduceSum(a, b, 64, 4, 1, 1, 8)",
        "WholeReduceSum(a, b, 64, 5, 1, 1, 8)"),
    row("ShiftLeft", BLOCK, "ShiftLeft(u, t[8], 1u, 64)", "ShiftLeft(u, t[1], 1u, 64)"),
    row("ShiftRight", MANY, "ShiftRight(u, t, 1u, 256)", "ShiftRight(u, t, 1u, 257)"),
    row("Or", MANY, "Or(w, v, w, 512)", "Or(w, v, w, 528)"),
    row("Copy", REPEATS, "Copy(w, v, 128, 4, {1, 1, 8, 8})", "Copy(w, v, 128, 5, {1, 1, 8, 8})"),
    row("DataCopyPad (load)", BLOCK, "DataCopyPad(a[8], gm, copy, pad)",
        "DataCopyPad(a[1], gm, copy, pad)"),
    row("DataCopyPad (load)", MANY, "DataCopyPad(a, gm, copy, pad)",
        "DataCopyPad(a, gm, large, pad)"),
    row("DataCopyPad (store)", BLOCK, "DataCopyPad(gm, b[8], copy)", "DataCopyPad(gm, b[1], copy)"),
    row("DataCopyPad (store)", MANY, "DataCopyPad(gm, b, copy)", "DataCopyPad(gm, b, large)"),
    row("DataCopy", MANY, "DataCopy(a, gm, 256)", "DataCopy(a, gm, 320)"),
    row("DataCopy", BLOCK, "DataCopy(a[8], gm, 64)", "DataCopy(a[1], gm, 64)"),
    row("Add", MASK, "Add(a, b, c, 64, 1, two)", "Add(a, b, c, 65, 1, two)"),
    row("Cast", MASK, "Cast(b, h, RoundMode::CAST_NONE, 64, 1, half_one)",
        "Cast(b, h, RoundMode::CAST_NONE, 65, 1, half_one)"),
    row("WholeReduceSum", MASK, "WholeReduceSum(a, b, 64, 1, 1, 1, 8)",
        "WholeReduceSum(a, b, 65, 1, 1, 1, 8)"),
    row("Add", "a count below 0", "Add(a, b, c, 8)", "Add(a, b, c, -1)"),
    row("Brcb", "dst is its source", "Brcb(a, b, 1, {1, 8})", "Brcb(a, a, 1, {1, 8})"),
    row("ShiftRight", "more bits than a lane has", "ShiftRight(u, t, 32u, 64)",
        "ShiftRight(u, t, 33u, 64)"),
    row("Gather", "a source inside an element", "Gather(a, b, u, 4, 64)", "Gather(a, b, u, 2, 64)"),
    row("DataCopy", "no whole blocks", "DataCopy(a, gm, 8)", "DataCopy(a, gm, 7)"),
    row("DataCopyPad (load)", "padding of more than a block", "DataCopyPad(a, gm, copy, pad)",
        "DataCopyPad(a, gm, copy, wide)"),
    row("DataCopyPad (store)", "more than 4,095 runs", "DataCopyPad(gm, b, copy)",
        "DataCopyPad(gm, b, runs)"),
];

/// A kernel with the parameters of the sums of squares that makes one call: of probe i, the right
/// one if the number of elements is 2 i + 1, the wrong one if it is one more.
pub(super) fn source(tiling: &Path) -> String {
    let mut text = format!(
        "#include \"kernel_operator.h\"\n#include \"{}\"\n\
         using namespace AscendC;\n\
         extern \"C\" __global__ __aicore__ void rope_square_sums_f32(GM_ADDR x, GM_ADDR y,\n    \
         rope::DenseTiling tiling) {{\n    {SETUP}    switch (tiling.elements) {{\n",
        tiling.display()
    );
    for (index, probe) in PROBES.iter().enumerate() {
        let (first, second) = (2 * index + 1, 2 * index + 2);
        // Writing to a string does not fail.
        let _ = writeln!(text, "    case {first}: {}; break;", probe.right);
        let _ = writeln!(text, "    case {second}: {}; break;", probe.wrong);
    }
    text + "    }\n    PipeBarrier<PIPE_ALL>();\n}\n"
}

const SETUP: &str = "\
TPipe pipe;
    TBuf<TPosition::VECIN> buffers[3];
    for (auto& buffer : buffers) pipe.InitBuffer(buffer, 1024);
    auto a = buffers[0].Get<float>(), b = buffers[1].Get<float>(), c = buffers[2].Get<float>();
    auto h = a.ReinterpretCast<half>();
    auto t = b.ReinterpretCast<uint32_t>(), u = c.ReinterpretCast<uint32_t>();
    auto w = a.ReinterpretCast<uint16_t>(), v = b.ReinterpretCast<uint16_t>();
    Duplicate(a, 0.0f, 256);
    Duplicate(b, 1.0f, 256);
    Duplicate(c, 0.0f, 256);
    const BinaryRepeatParams two(1, 1, 1, 8, 8, 8), far(1, 1, 1, 255, 8, 8);
    const UnaryRepeatParams one(1, 1, 8, 8), half_one(1, 1, 8, 4);
    DataCopyExtParams copy(1, 256, 0, 0, 0), large(1, 2048, 0, 0, 0);
    DataCopyExtParams runs(4096, 4, 0, 0, 0);
    DataCopyPadExtParams<float> pad, wide(true, 9, 0, 0.0f);
    GlobalTensor<float> gm;
    gm.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(x), 4096);
    PipeBarrier<PIPE_ALL>();
";
