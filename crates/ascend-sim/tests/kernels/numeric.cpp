// Conversions of whole arrays, for comparison with another implementation.
#include "kernel_operator.h"

using namespace AscendC;

// Casts `elements` per block in chunks that the buffer holds.
template <class D, class S>
__aicore__ inline void convert(GM_ADDR from, GM_ADDR to, uint32_t elements, RoundMode mode) {
    constexpr uint32_t kChunk = 4096;
    TPipe pipe;
    TQue<TPosition::VECIN, 1> in;
    TQue<TPosition::VECOUT, 1> out;
    pipe.InitBuffer(in, 2, kChunk * sizeof(S));
    pipe.InitBuffer(out, 2, kChunk * sizeof(D));
    GlobalTensor<S> source;
    GlobalTensor<D> target;
    source.SetGlobalBuffer((__gm__ S*)from, elements);
    target.SetGlobalBuffer((__gm__ D*)to, elements);
    for (uint32_t start = 0; start < elements; start += kChunk) {
        LocalTensor<S> a = in.AllocTensor<S>();
        DataCopy(a, source[start], kChunk);
        in.EnQue(a);
        a = in.DeQue<S>();
        LocalTensor<D> b = out.AllocTensor<D>();
        Cast(b, a, mode, kChunk);
        in.FreeTensor(a);
        out.EnQue(b);
        b = out.DeQue<D>();
        DataCopy(target[start], b, kChunk);
        out.FreeTensor(b);
    }
}

#define CONVERSION(name, D, S) \
    extern "C" __global__ __aicore__ void name(GM_ADDR from, GM_ADDR to, uint32_t elements, \
                                               uint32_t mode) { \
        convert<D, S>(from, to, elements, static_cast<RoundMode>(mode)); \
    }

CONVERSION(half_to_float, float, half)
CONVERSION(bf16_to_float, float, bfloat16_t)
CONVERSION(float_to_half, half, float)
CONVERSION(float_to_bf16, bfloat16_t, float)
CONVERSION(float_to_int, int32_t, float)
CONVERSION(int_to_float, float, int32_t)

// The vector instructions once each: 14 rows of 64 results.
extern "C" __global__ __aicore__ void instructions(GM_ADDR from, GM_ADDR to) {
    constexpr uint32_t kRow = 64;
    TPipe pipe;
    TQue<TPosition::VECIN, 1> in;
    TQue<TPosition::VECOUT, 1> out;
    TBuf<TPosition::VECCALC> scratch;
    pipe.InitBuffer(in, 1, 2 * kRow * sizeof(float));
    pipe.InitBuffer(out, 1, 14 * kRow * sizeof(float));
    pipe.InitBuffer(scratch, 4096);
    GlobalTensor<float> source, target;
    source.SetGlobalBuffer((__gm__ float*)from, 2 * kRow);
    target.SetGlobalBuffer((__gm__ float*)to, 14 * kRow);
    LocalTensor<float> a = in.AllocTensor<float>();
    DataCopy(a, source, 2 * kRow);
    in.EnQue(a);
    a = in.DeQue<float>();
    LocalTensor<float> b = a[kRow];
    LocalTensor<float> r = out.AllocTensor<float>();
    Add(r, a, b, kRow);
    Mul(r[kRow], a, b, 64, 1, {1, 1, 1, 8, 8, 8});
    // Row 2: a * b + a through MulAddDst.
    Adds(r[2 * kRow], a, 0.0f, kRow);
    PipeBarrier<PIPE_V>();
    MulAddDst(r[2 * kRow], a, b, kRow);
    // Row 3: one block of b (repeat and block stride 0) times every block of a.
    Mul(r[3 * kRow], a, b, 64, 1, {1, 1, 0, 8, 8, 0});
    // Row 4: even then odd elements of a.
    uint64_t kept = 0;
    GatherMask(r[4 * kRow], a, 1, false, 0, {1, 1, 8, 0}, kept);
    GatherMask(r[4 * kRow + 32], a, 2, false, 0, {1, 1, 8, 0}, kept);
    // Row 5: a reversed through Gather.
    LocalTensor<int32_t> index = scratch.Get<int32_t>();
    CreateVecIndex(index, 0, kRow);
    PipeBarrier<PIPE_V>();
    Muls(index, index, -4, kRow);
    PipeBarrier<PIPE_V>();
    Adds(index, index, 252, kRow);
    PipeBarrier<PIPE_V>();
    Gather(r[5 * kRow], a, index.ReinterpretCast<uint32_t>(), 0, kRow);
    // Row 6: the low half of each word cleared: And on halves of words.
    LocalTensor<uint32_t> ones = scratch.GetWithOffset<uint32_t>(kRow, 1024);
    Duplicate(ones, 0xffff0000u, kRow);
    PipeBarrier<PIPE_V>();
    And(r[6 * kRow].ReinterpretCast<uint16_t>(), a.ReinterpretCast<uint16_t>(),
        ones.ReinterpretCast<uint16_t>(), 2 * kRow);
    // Row 7: the low half of each word moved up.
    ShiftLeft(r[7 * kRow].ReinterpretCast<uint32_t>(), a.ReinterpretCast<uint32_t>(), 16u, kRow);
    // Row 8: eight elements of a, each over a block.
    Brcb(r[8 * kRow], a, 1, {1, 8});
    // Row 9: only masked elements change.
    Duplicate(r[9 * kRow], 0.0f, kRow);
    PipeBarrier<PIPE_V>();
    uint64_t mask[2] = {0xaaaaaaaaaaaaaaaaull, 0};
    Add(r[9 * kRow], a, b, mask, 1, {1, 1, 1, 8, 8, 8});
    // Row 10: Axpy; row 11: a copy with exchanged halves.
    Duplicate(r[10 * kRow], 1.0f, kRow);
    PipeBarrier<PIPE_V>();
    Axpy(r[10 * kRow], a, 2.0f, kRow);
    DataCopy(r[11 * kRow], a[32], 32);
    DataCopy(r[11 * kRow + 32], a, 32);
    // Row 12: roots of b; row 13: the sums of a and of b, of all elements and of the first 40.
    Sqrt(r[12 * kRow], b, kRow);
    Duplicate(r[13 * kRow], 0.0f, kRow);
    PipeBarrier<PIPE_V>();
    WholeReduceSum(r[13 * kRow], a, 64, 2, 1, 1, 8);
    PipeBarrier<PIPE_V>();
    WholeReduceSum(r[13 * kRow + 2], a, 40, 2, 3, 1, 8);
    in.FreeTensor(a);
    out.EnQue(r);
    r = out.DeQue<float>();
    DataCopy(target, r, 14 * kRow);
    out.FreeTensor(r);
}
