// The AdamW update of a parameter, and the sums of squares that clipping needs, over dense tensors.
//
// Problem. With g = gradient * scale, for each element
//   first  = first + (g - first) * of_gradient
//   second = second * kept + g * g * of_square
//   root   = sqrt(second) / correction + epsilon
//   value  = value * stay - first / root * step
// in f32 and in this order, each operation rounded; the new values are also rounded to T. A gradient
// of 16 bits is widened first. For the norm of the gradients, the squares of every kChunk elements
// are summed in halves, a tree.
//
// Data layout. A tile is a run of elements; each tensor has a slot of its own, where its new values
// replace it. A row of `rows_` is what is left of a chunk before its lanes are summed.
//
// Pseudo code.
//   update, for each tile of this core:
//     load value, gradient, first, second       MTE2
//     widen the gradient, update, round         V
//     store value, first, second, rounded       MTE3
//   sums, for each kSums chunks of this core:
//     for each chunk:
//       load, widen, square, add halves         MTE2, V
//     sum the lanes of all                      V
//     store the sums                            MTE3
#pragma once

#include "rope_base.h"

namespace rope {

// T is the type of the rounded values, float for none; G is that of the gradient.
template <typename T, typename G>
class AdamW {
    static constexpr bool kRounds = sizeof(T) != 4;
    static constexpr bool kWidens = sizeof(G) != 4;
    // The numbers of the computation, and the gradient in f32.
    static constexpr uint32_t kWork = kWidens ? 3 : 2;

public:
    __aicore__ inline AdamW(TPipe& pipe, const AdamWTiling& t) : pipe_(pipe), t_(t) {}

    __aicore__ inline void Run(GM_ADDR value, GM_ADDR gradient, GM_ADDR first, GM_ADDR second,
                               GM_ADDR rounded) {
        const uint64_t block = AscendC::GetBlockIdx(), blocks = AscendC::GetBlockNum();
        if (IsBeyond(block, blocks)) return;
        const uint64_t tiles = (t_.elements + t_.tile - 1) / t_.tile;
        const uint64_t begin = tiles * block / blocks, end = tiles * (block + 1) / blocks;
        if (begin >= end) return;
        GM_ADDR const addresses[kTensorCount] = {value, first, second};
        for (uint32_t i = 0; i < kTensorCount; ++i) {
            gm_[i].SetGlobalBuffer(reinterpret_cast<__gm__ float*>(addresses[i]), t_.elements);
        }
        gradient_gm_.SetGlobalBuffer(reinterpret_cast<__gm__ G*>(gradient), t_.elements);
        rounded_gm_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(rounded), t_.elements);
        const uint32_t slot = t_.tile * static_cast<uint32_t>(sizeof(float)) + kSlackBytes;
        pipe_.InitBuffer(value_, 2, slot);
        pipe_.InitBuffer(gradient_, 2, t_.tile * static_cast<uint32_t>(sizeof(G)) + kSlackBytes);
        pipe_.InitBuffer(first_, 2, slot);
        pipe_.InitBuffer(second_, 2, slot);
        if constexpr (kRounds) {
            pipe_.InitBuffer(rounded_, 2,
                             t_.tile * static_cast<uint32_t>(sizeof(T)) + kSlackBytes);
        }
        pipe_.InitBuffer(work_,
                         kWork * t_.tile * static_cast<uint32_t>(sizeof(float)) + kSlackBytes);
        for (uint64_t tile = begin; tile < end; ++tile) RunTile(tile * t_.tile);
    }

private:
    static constexpr uint32_t kTensorCount = 3;
    using Slots = AscendC::TQueBind<TPosition::VECIN, TPosition::VECOUT, 1>;

    TPipe& pipe_;
    const AdamWTiling& t_;
    GlobalTensor<float> gm_[kTensorCount];
    GlobalTensor<G> gradient_gm_;
    GlobalTensor<T> rounded_gm_;
    Slots value_, first_, second_;
    AscendC::TQue<TPosition::VECIN, 1> gradient_;
    AscendC::TQue<TPosition::VECOUT, 1> rounded_;
    TBuf<TPosition::VECCALC> work_;

    // The gradient in f32: itself, or a copy in the work area.
    __aicore__ inline LocalTensor<float> Widen(const LocalTensor<G>& gradient, uint32_t count) {
        if constexpr (kWidens) {
            const LocalTensor<float> wide = work_.Get<float>()[2 * t_.tile];
            AscendC::Cast(wide, gradient, RoundMode::CAST_NONE, count);
            VectorBarrier();
            return wide;
        } else {
            return gradient;
        }
    }

    __aicore__ inline void RunTile(uint64_t start) {
        const uint64_t left = t_.elements - start;
        const uint32_t count = left < t_.tile ? static_cast<uint32_t>(left) : t_.tile;
        const int32_t n = static_cast<int32_t>(count);
        LocalTensor<float> value = LoadRun(value_, gm_[0][start], count);
        LocalTensor<float> first = LoadRun(first_, gm_[1][start], count);
        LocalTensor<float> second = LoadRun(second_, gm_[2][start], count);
        LocalTensor<G> loaded = gradient_.AllocTensor<G>();
        DataCopyPad(loaded, gradient_gm_[start], OneRun<G>(count), DataCopyPadExtParams<G>());
        gradient_.EnQue(loaded);
        loaded = gradient_.DeQue<G>();
        const LocalTensor<float> gradient = Widen(loaded, count);
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
        gradient_.FreeTensor(loaded);
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
        StoreRun(first_, first, gm_[1][start], count);
        StoreRun(second_, second, gm_[2][start], count);
    }
};

template <typename T>
class SquareSums {
    static constexpr bool kWidens = sizeof(T) != 4;

public:
    __aicore__ inline SquareSums(TPipe& pipe, const DenseTiling& t) : pipe_(pipe), t_(t) {}

    __aicore__ inline void Run(GM_ADDR x, GM_ADDR sums) {
        const uint64_t block = AscendC::GetBlockIdx(), blocks = AscendC::GetBlockNum();
        if (IsBeyond(block, blocks)) return;
        const uint64_t chunks = (t_.elements + t_.tile - 1) / t_.tile;
        uint64_t chunk = chunks * block / blocks;
        const uint64_t end = chunks * (block + 1) / blocks;
        if (chunk >= end) return;
        x_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(x), t_.elements);
        sums_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(sums), chunks);
        constexpr uint32_t kBytes = sizeof(float);
        pipe_.InitBuffer(slots_, 2, t_.tile * static_cast<uint32_t>(sizeof(T)) + kSlackBytes);
        if constexpr (kWidens) pipe_.InitBuffer(wide_, t_.tile * kBytes + kSlackBytes);
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
    GlobalTensor<T> x_;
    GlobalTensor<float> sums_;
    AscendC::TQue<TPosition::VECIN, 1> slots_;
    AscendC::TQue<TPosition::VECOUT, 1> out_;
    TBuf<TPosition::VECCALC> work_, wide_;
    LocalTensor<float> rows_;

    // The chunk in f32: itself, or a copy.
    __aicore__ inline LocalTensor<float> Widen(const LocalTensor<T>& x, uint32_t count) {
        if constexpr (kWidens) {
            const LocalTensor<float> wide = wide_.Get<float>();
            // Comes after the reads of the previous chunk.
            VectorBarrier();
            AscendC::Cast(wide, x, RoundMode::CAST_NONE, count);
            VectorBarrier();
            return wide;
        } else {
            return x;
        }
    }

    // Adds the squares of a chunk in halves, down to the lanes of row `row`.
    __aicore__ inline void Reduce(uint64_t start, uint32_t row) {
        const uint64_t left = t_.elements - start;
        const uint32_t count = left < t_.tile ? static_cast<uint32_t>(left) : t_.tile;
        const uint32_t padded = RoundUp(count, kBlockBytes / sizeof(T));
        LocalTensor<T> loaded = slots_.AllocTensor<T>();
        DataCopyPad(loaded, x_[start], OneRun<T>(count), Padding<T>(count));
        slots_.EnQue(loaded);
        loaded = slots_.DeQue<T>();
        const LocalTensor<float> x = Widen(loaded, padded);
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
        slots_.FreeTensor(loaded);
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
