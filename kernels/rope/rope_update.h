// The AdamW update of a parameter, and the sums of squares that clipping needs, over dense f32.
//
// Problem. With g = gradient * scale, for each element
//   first  = first + (g - first) * of_gradient
//   second = second * kept + g * g * of_square
//   root   = sqrt(second) / correction + epsilon
//   value  = value * stay - first / root * step
// in f32 and in this order, each operation rounded; the new values are also rounded to T. For the
// norm of the gradients, the squares of every kChunk elements are summed in halves, a tree.
//
// Data layout. A tile is a run of elements; each tensor has a slot of its own, where its new values
// replace it. A row of `rows_` is what is left of a chunk before its lanes are summed.
//
// Pseudo code.
//   update, for each tile of this core:
//     load value, gradient, first, second       MTE2
//     update, round                             V
//     store value, first, second, rounded       MTE3
//   sums, for each kSums chunks of this core:
//     for each chunk: load, square, add halves  MTE2, V
//     sum the lanes of all                      V
//     store the sums                            MTE3
#pragma once

#include "rope_base.h"

namespace rope {

// T is the type of the rounded values, float for none.
template <typename T>
class AdamW {
    static constexpr bool kRounds = sizeof(T) != 4;

public:
    __aicore__ inline AdamW(TPipe& pipe, const AdamWTiling& t) : pipe_(pipe), t_(t) {}

    __aicore__ inline void Run(GM_ADDR value, GM_ADDR gradient, GM_ADDR first, GM_ADDR second,
                               GM_ADDR rounded) {
        const uint64_t block = AscendC::GetBlockIdx(), blocks = AscendC::GetBlockNum();
        if (IsBeyond(block, blocks)) return;
        const uint64_t tiles = (t_.elements + t_.tile - 1) / t_.tile;
        const uint64_t begin = tiles * block / blocks, end = tiles * (block + 1) / blocks;
        if (begin >= end) return;
        GM_ADDR const addresses[kTensorCount] = {value, gradient, first, second};
        for (uint32_t i = 0; i < kTensorCount; ++i) {
            gm_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(addresses[i]), t_.elements);
        }
        rounded_gm_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(rounded), t_.elements);
        const uint32_t slot = t_.tile * static_cast<uint32_t>(sizeof(float)) + kSlackBytes;
        pipe_.InitBuffer(value_, 2, slot);
        pipe_.InitBuffer(gradient_, 2, slot);
        pipe_.InitBuffer(first_, 2, slot);
        pipe_.InitBuffer(second_, 2, slot);
        if constexpr (kRounds) {
            pipe_.InitBuffer(rounded_, 2,
                             t_.tile * static_cast<uint32_t>(sizeof(T)) + kSlackBytes);
        }
        pipe_.InitBuffer(work_, 2 * t_.tile * static_cast<uint32_t>(sizeof(float)) + kSlackBytes);
        for (uint64_t tile = begin; tile < end; ++tile) RunTile(tile * t_.tile);
    }

private:
    static constexpr uint32_t kTensorCount = 4;
    using Slots = AscendC::TQueBind<TPosition::VECIN, TPosition::VECOUT, 1>;

    TPipe& pipe_;
    const AdamWTiling& t_;
    GlobalTensor<float> gm_[kTensorCount];
    GlobalTensor<T> rounded_gm_;
    Slots value_, first_, second_;
    AscendC::TQue<TPosition::VECIN, 1> gradient_;
    AscendC::TQue<TPosition::VECOUT, 1> rounded_;
    TBuf<TPosition::VECCALC> work_;

    __aicore__ inline void RunTile(uint64_t start) {
        const uint64_t left = t_.elements - start;
        const uint32_t count = left < t_.tile ? static_cast<uint32_t>(left) : t_.tile;
        const int32_t n = static_cast<int32_t>(count);
        LocalTensor<float> value = LoadRun(value_, gm_[0][start], count);
        LocalTensor<float> first = LoadRun(first_, gm_[2][start], count);
        LocalTensor<float> second = LoadRun(second_, gm_[3][start], count);
        LocalTensor<float> gradient = gradient_.AllocTensor<float>();
        DataCopyPad(gradient, gm_[1][start], OneRun<float>(count), DataCopyPadExtParams<float>());
        gradient_.EnQue(gradient);
        gradient = gradient_.DeQue<float>();
        const LocalTensor<float> a = work_.Get<float>(), b = a[t_.tile];
        AscendC::Muls(gradient, gradient, t_.scale, n);
        // Writes of this tile to the work area also come after the reads of the previous one.
        VectorBarrier();
        AscendC::Sub(a, gradient, first, n);
        AscendC::Mul(b, gradient, gradient, n);
        VectorBarrier();
        AscendC::Muls(a, a, t_.of_gradient, n);
        AscendC::Muls(b, b, t_.of_square, n);
        AscendC::Muls(second, second, t_.kept, n);
        AscendC::Muls(value, value, t_.stay, n);
        VectorBarrier();
        gradient_.FreeTensor(gradient);
        AscendC::Add(first, first, a, n);
        AscendC::Add(second, second, b, n);
        VectorBarrier();
        AscendC::Sqrt(a, second, n);
        AscendC::Duplicate(b, t_.correction, n);
        VectorBarrier();
        AscendC::Div(a, a, b, n);
        VectorBarrier();
        AscendC::Adds(a, a, t_.epsilon, n);
        VectorBarrier();
        AscendC::Div(a, first, a, n);
        VectorBarrier();
        AscendC::Muls(a, a, t_.step, n);
        VectorBarrier();
        AscendC::Sub(value, value, a, n);
        if constexpr (kRounds) {
            LocalTensor<T> rounded = rounded_.template AllocTensor<T>();
            VectorBarrier();
            AscendC::Cast(rounded, value, RoundMode::CAST_RINT, count);
            rounded_.EnQue(rounded);
            rounded = rounded_.template DeQue<T>();
            DataCopyPad(rounded_gm_[start], rounded, OneRun<T>(count));
            rounded_.FreeTensor(rounded);
        }
        StoreRun(value_, value, gm_[0][start], count);
        StoreRun(first_, first, gm_[2][start], count);
        StoreRun(second_, second, gm_[3][start], count);
    }
};

class SquareSums {
public:
    __aicore__ inline SquareSums(TPipe& pipe, const DenseTiling& t) : pipe_(pipe), t_(t) {}

    __aicore__ inline void Run(GM_ADDR x, GM_ADDR sums) {
        const uint64_t block = AscendC::GetBlockIdx(), blocks = AscendC::GetBlockNum();
        if (IsBeyond(block, blocks)) return;
        const uint64_t chunks = (t_.elements + t_.tile - 1) / t_.tile;
        uint64_t chunk = chunks * block / blocks;
        const uint64_t end = chunks * (block + 1) / blocks;
        if (chunk >= end) return;
        x_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(x), t_.elements);
        sums_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(sums), chunks);
        constexpr uint32_t kBytes = sizeof(float);
        pipe_.InitBuffer(slots_, 2, t_.tile * kBytes + kSlackBytes);
        pipe_.InitBuffer(out_, 2, kSums * kBytes + kSlackBytes);
        pipe_.InitBuffer(work_, kSums * kLanes * kBytes + kSlackBytes);
        rows_ = work_.Get<float>();
        while (chunk < end) {
            const uint64_t left = end - chunk;
            const uint32_t count = left < kSums ? static_cast<uint32_t>(left) : kSums;
            for (uint32_t i = 0; i < count; ++i) Reduce((chunk + i) * t_.tile, i);
            Store(chunk, count);
            chunk += count;
        }
    }

private:
    static constexpr uint32_t kSums = 64;

    TPipe& pipe_;
    const DenseTiling& t_;
    GlobalTensor<float> x_, sums_;
    AscendC::TQue<TPosition::VECIN, 1> slots_;
    AscendC::TQue<TPosition::VECOUT, 1> out_;
    TBuf<TPosition::VECCALC> work_;
    LocalTensor<float> rows_;

    // Adds the squares of a chunk in halves, down to the lanes of row `row`.
    __aicore__ inline void Reduce(uint64_t start, uint32_t row) {
        const uint64_t left = t_.elements - start;
        const uint32_t count = left < t_.tile ? static_cast<uint32_t>(left) : t_.tile;
        constexpr uint32_t kUnit = kBlockBytes / sizeof(float);
        const uint32_t padded = RoundUp(count, kUnit);
        LocalTensor<float> x = slots_.AllocTensor<float>();
        DataCopyPadExtParams<float> pad;
        pad.isPad = padded != count;
        pad.rightPadding = static_cast<uint8_t>(padded - count);
        DataCopyPad(x, x_[start], OneRun<float>(count), pad);
        slots_.EnQue(x);
        x = slots_.DeQue<float>();
        if (padded < t_.tile) {
            AscendC::Duplicate(x[padded], 0.0f, static_cast<int32_t>(t_.tile - padded));
            VectorBarrier();
        }
        AscendC::Mul(x, x, x, static_cast<int32_t>(t_.tile));
        for (uint32_t half = t_.tile / 2; half > kLanes; half /= 2) {
            VectorBarrier();
            AscendC::Add(x, x, x[half], static_cast<int32_t>(half));
        }
        // The sums of the rows before are read, too.
        VectorBarrier();
        AscendC::Add(rows_[row * kLanes], x, x[kLanes], static_cast<int32_t>(kLanes));
        slots_.FreeTensor(x);
    }

    __aicore__ inline void Store(uint64_t chunk, uint32_t count) {
        LocalTensor<float> out = out_.AllocTensor<float>();
        VectorBarrier();
        AscendC::WholeReduceSum(out, rows_, static_cast<int32_t>(kLanes),
                                static_cast<int32_t>(count), 1, 1,
                                static_cast<int32_t>(kLanes * sizeof(float) / kBlockBytes));
        out_.EnQue(out);
        out = out_.DeQue<float>();
        DataCopyPad(sums_[chunk], out, OneRun<float>(count));
        out_.FreeTensor(out);
    }
};

}  // namespace rope
