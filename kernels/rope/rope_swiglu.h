// The gate of a feed-forward network, and its backward, over dense tensors.
//
// Problem. With s = 1 / (1 + e^-gate) and silu = gate * s,
//   y = silu * up
//   dup = dy * silu,  dgate = dy * (s + silu * (1 - s)) * up,  and y again if it is wanted
// in f32, each result rounded once. In dgate the slope comes before up: where it is small, dy * up
// can overflow and the result not.
//
// Data layout. A tile is a run of elements; each tensor has a slot of its own. y replaces the gate
// in its slot; in the backward, dgate and dup replace gate and up, and y replaces dy.
//
// Pseudo code.
//   for each tile of this core:
//     load gate, up (and dy)                    MTE2
//     widen, compute, round                     V
//     store y, or dgate and dup (and y)         MTE3
#pragma once

#include "rope_base.h"

namespace rope {

template <typename T, bool kBackward>
class SwiGlu {
    static constexpr bool kWide = sizeof(T) == 4;
    // f32 copies of the inputs, and numbers of the computation.
    static constexpr uint32_t kWork = (kWide ? 0 : (kBackward ? 3 : 2)) + (kBackward ? 3 : 1);

public:
    __aicore__ inline SwiGlu(TPipe& pipe, const DenseTiling& t) : pipe_(pipe), t_(t) {}

    // `third` receives y in the backward, if it is not null. It may be dy.
    __aicore__ inline void Run(GM_ADDR gate, GM_ADDR up, GM_ADDR dy, GM_ADDR first,
                               GM_ADDR second, GM_ADDR third) {
        const uint64_t block = AscendC::GetBlockIdx(), blocks = AscendC::GetBlockNum();
        if (IsBeyond(block, blocks)) return;
        const uint64_t tiles = (t_.elements + t_.tile - 1) / t_.tile;
        const uint64_t begin = tiles * block / blocks, end = tiles * (block + 1) / blocks;
        if (begin >= end) return;
        GM_ADDR const addresses[kTensorCount] = {gate, up, dy, first, second, third};
        has_output_ = third != nullptr;
        for (uint32_t i = 0; i < kTensorCount; ++i) {
            gm_[i].SetGlobalBuffer(reinterpret_cast<__gm__ T*>(addresses[i]), t_.elements);
        }
        const uint32_t slot = t_.tile * static_cast<uint32_t>(sizeof(T)) + kSlackBytes;
        pipe_.InitBuffer(gate_, 2, slot);
        pipe_.InitBuffer(up_, 2, slot);
        if constexpr (kBackward) pipe_.InitBuffer(dy_, 2, slot);
        pipe_.InitBuffer(work_, kWork * t_.tile * static_cast<uint32_t>(sizeof(float)) +
                                    kSlackBytes);
        for (uint64_t tile = begin; tile < end; ++tile) RunTile(tile * t_.tile);
    }

private:
    static constexpr uint32_t kTensorCount = 6;
    using Slots = AscendC::TQueBind<TPosition::VECIN, TPosition::VECOUT, 1>;

    TPipe& pipe_;
    const DenseTiling& t_;
    GlobalTensor<T> gm_[kTensorCount];
    Slots gate_, up_, dy_;
    TBuf<TPosition::VECCALC> work_;
    uint32_t count_;
    bool has_output_;

    // The tensor in f32: itself, or a copy in part `part` of the work area.
    __aicore__ inline LocalTensor<float> Widen(const LocalTensor<T>& x, uint32_t part) {
        if constexpr (kWide) {
            return x;
        } else {
            const LocalTensor<float> wide = Work(part);
            AscendC::Cast(wide, x, RoundMode::CAST_NONE, count_);
            return wide;
        }
    }

    __aicore__ inline void Narrow(const LocalTensor<T>& out, const LocalTensor<float>& x) {
        if constexpr (!kWide) AscendC::Cast(out, x, RoundMode::CAST_RINT, count_);
    }

    __aicore__ inline LocalTensor<float> Work(uint32_t part) {
        return work_.Get<float>()[part * t_.tile];
    }

    __aicore__ inline void RunTile(uint64_t start) {
        const uint64_t left = t_.elements - start;
        count_ = left < t_.tile ? static_cast<uint32_t>(left) : t_.tile;
        const int32_t n = static_cast<int32_t>(count_);
        LocalTensor<T> gate = LoadRun(gate_, gm_[0][start], count_);
        LocalTensor<T> up = LoadRun(up_, gm_[1][start], count_), dy;
        if constexpr (kBackward) dy = LoadRun(dy_, gm_[2][start], count_);
        // Writes of this tile to the work area come after the reads of the previous one.
        VectorBarrier();
        const LocalTensor<float> g = Widen(gate, kWork - 1), u = Widen(up, kWork - 2);
        const LocalTensor<float> s = Work(0);
        VectorBarrier();
        AscendC::Muls(s, g, -1.0f, n);
        VectorBarrier();
        AscendC::Exp(s, s, n);
        VectorBarrier();
        AscendC::Adds(s, s, 1.0f, n);
        VectorBarrier();
        if constexpr (kBackward) {
            const LocalTensor<float> d = Widen(dy, kWork - 3);
            const LocalTensor<float> silu = Work(1), slope = Work(2);
            AscendC::Duplicate(slope, 1.0f, n);
            VectorBarrier();
            AscendC::Div(s, slope, s, n);
            VectorBarrier();
            AscendC::Mul(silu, g, s, n);
            AscendC::Sub(slope, slope, s, n);
            VectorBarrier();
            AscendC::Mul(slope, slope, silu, n);
            VectorBarrier();
            AscendC::Add(slope, slope, s, n);
            VectorBarrier();
            AscendC::Mul(slope, slope, d, n);
            VectorBarrier();
            AscendC::Mul(g, slope, u, n);
            if (has_output_) AscendC::Mul(s, silu, u, n);
            VectorBarrier();
            AscendC::Mul(u, d, silu, n);
            VectorBarrier();
            Narrow(gate, g);
            Narrow(up, u);
            if (has_output_) {
                if constexpr (kWide) {
                    AscendC::Muls(dy, s, 1.0f, n);
                } else {
                    Narrow(dy, s);
                }
                StoreRun(dy_, dy, gm_[5][start], count_);
            } else {
                dy_.FreeTensor(dy);
            }
            StoreRun(gate_, gate, gm_[3][start], count_);
            StoreRun(up_, up, gm_[4][start], count_);
        } else {
            AscendC::Div(s, g, s, n);
            VectorBarrier();
            AscendC::Mul(g, s, u, n);
            VectorBarrier();
            Narrow(gate, g);
            StoreRun(gate_, gate, gm_[3][start], count_);
            up_.FreeTensor(up);
        }
    }
};

}  // namespace rope
