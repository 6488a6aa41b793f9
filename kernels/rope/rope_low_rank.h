// The term of a low-rank adapter, added to the product of its layer in one pass over it.
//
// Problem. For a layer's product y and an adapter of rank R,
//   y[t][c] += sum over r of h[r][t] * b[r][c]
// in f32, rounded once. h may come in two parts that are added first: the products with the upper
// and the lower half of a 32-bit factor. The gradients need h in the type of y, so it can be
// stored rounded.
//
// Data layout. A tile is some rows of y and some of its columns.
//   slot [row][column] of the tile in T, widened into acc [row][column] f32 if T has 16 bits
//   b [rank][column], loaded once for all rows of a core
//   h [part][rank][row]; spread [rank of a chunk][row][8 lanes], one value over a block
//   two planes [row][column] of products: Mul and Add take 4 cycles, MulAddDst takes 6
//
// Pseudo code.
//   for each tile of this core, columns outermost:
//     load b if the columns are new, h, the rows of y              MTE2
//     h = h of part 0 + h of part 1;  acc = f32(slot)              V
//     for each rank: acc[row] += h[rank][row] * b[rank]            V
//     slot = round(acc)                                            V
//     store the rows; with the first columns also h                MTE3
#pragma once

#include "rope_base.h"

namespace rope {

template <typename T>
class LowRank {
    static constexpr bool kWide = sizeof(T) == 4;
    static constexpr uint32_t kUnit = kBlockBytes / sizeof(float);

public:
    __aicore__ inline LowRank(TPipe& pipe, const LowRankTiling& t) : pipe_(pipe), t_(t) {}

    __aicore__ inline void Run(GM_ADDR y, GM_ADDR h, GM_ADDR b, GM_ADDR rounded_h) {
        const uint64_t block = AscendC::GetBlockIdx(), blocks = AscendC::GetBlockNum();
        if (IsBeyond(block, blocks)) return;
        const uint64_t row_tiles = (t_.rows + t_.row_tile - 1) / t_.row_tile;
        const uint64_t column_tiles = (t_.columns + t_.column_tile - 1) / t_.column_tile;
        const uint64_t tiles = row_tiles * column_tiles;
        uint64_t tile = tiles * block / blocks;
        const uint64_t end = tiles * (block + 1) / blocks;
        if (tile >= end) return;
        Bind(y, h, b, rounded_h);
        InitBuffers();
        LocalTensor<float> factor;
        for (uint64_t columns = column_tiles; tile < end; ++tile) {
            column_ = tile / row_tiles * t_.column_tile;
            row_ = tile % row_tiles * t_.row_tile;
            width_ = static_cast<uint32_t>(MinOf(t_.columns - column_, t_.column_tile));
            height_ = static_cast<uint32_t>(MinOf(t_.rows - row_, t_.row_tile));
            if (columns != tile / row_tiles) {
                if (columns != column_tiles) factor_.FreeTensor(factor);
                columns = tile / row_tiles;
                factor = LoadFactor();
            }
            RunTile(factor);
        }
        factor_.FreeTensor(factor);
    }

private:
    TPipe& pipe_;
    const LowRankTiling& t_;
    GlobalTensor<T> y_, rounded_;
    GlobalTensor<float> h_, b_;
    AscendC::TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> slots_;
    AscendC::TQue<TPosition::VECIN, 1> factor_, inner_;
    AscendC::TQue<TPosition::VECOUT, 1> inner_out_;
    TBuf<TPosition::VECCALC> work_;
    LocalTensor<float> spread_, planes_, acc_;
    uint64_t row_, column_;
    uint32_t height_, width_;

    __aicore__ inline void Bind(GM_ADDR y, GM_ADDR h, GM_ADDR b, GM_ADDR rounded_h) {
        const uint64_t elements = t_.rows * t_.columns;
        y_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(y), elements);
        const uint64_t inner = t_.rows * t_.rank;
        h_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(h),
                           (t_.parts - 1) * t_.part_stride + inner);
        b_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(b),
                           static_cast<uint64_t>(t_.rank) * t_.columns);
        rounded_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(rounded_h), inner);
    }

    // Between the parts of h: a repeat over a row of one must not reach into the other's.
    __aicore__ inline uint32_t PartPitch() const { return Max(t_.rank * t_.row_tile, kLanes); }

    __aicore__ inline void InitBuffers() {
        constexpr uint32_t kBytes = sizeof(float);
        const uint32_t tile = t_.row_tile * t_.column_tile, inner = t_.rank * t_.row_tile;
        pipe_.InitBuffer(slots_, kLowRankSlots,
                         tile * static_cast<uint32_t>(sizeof(T)) + kSlackBytes);
        pipe_.InitBuffer(factor_, 1, t_.rank * t_.column_tile * kBytes + kSlackBytes);
        pipe_.InitBuffer(inner_, 2, ((t_.parts - 1) * PartPitch() + inner) * kBytes + kSlackBytes);
        if (t_.stores_h) {
            pipe_.InitBuffer(inner_out_, 1,
                             inner * static_cast<uint32_t>(sizeof(T)) + kSlackBytes);
        }
        const uint32_t spread = kLowRankChunk * t_.row_tile * kUnit;
        const uint32_t planes = kLowRankPlanes * tile;
        pipe_.InitBuffer(work_, (spread + planes + (kWide ? 0 : tile)) * kBytes + kSlackBytes);
        spread_ = work_.Get<float>();
        planes_ = spread_[spread];
        if constexpr (!kWide) acc_ = planes_[planes];
    }

    __aicore__ inline LocalTensor<float> LoadFactor() {
        LocalTensor<float> b = factor_.AllocTensor<float>();
        DataCopyPad(b, b_[column_],
                    Rectangle<float>(t_.rank, width_, t_.columns, t_.column_tile, true),
                    Padding<float>(width_));
        factor_.EnQue(b);
        return factor_.DeQue<float>();
    }

    __aicore__ inline LocalTensor<float> LoadInner() {
        LocalTensor<float> h = inner_.AllocTensor<float>();
        for (uint32_t part = 0; part < t_.parts; ++part) {
            DataCopyPad(h[part * PartPitch()], h_[part * t_.part_stride + row_],
                        Rectangle<float>(t_.rank, height_, t_.rows, t_.row_tile, true),
                        Padding<float>(height_));
        }
        inner_.EnQue(h);
        return inner_.DeQue<float>();
    }

    __aicore__ inline void RunTile(const LocalTensor<float>& b) {
        LocalTensor<float> h = LoadInner();
        LocalTensor<T> slot = slots_.template AllocTensor<T>();
        const uint64_t start = row_ * t_.columns + column_;
        DataCopyPad(slot, y_[start],
                    Rectangle<T>(height_, width_, t_.columns, t_.column_tile, true),
                    Padding<T>(width_));
        slots_.template EnQue<TPosition::GM, TPosition::VECIN, T>(slot);
        slot = slots_.template DeQue<TPosition::GM, TPosition::VECIN, T>();

        const Rows columns{0, t_.column_tile}, rows{0, t_.row_tile};
        // Writes of this tile to the work area come after the reads of the previous one.
        VectorBarrier();
        if (t_.parts > 1) {
            const Rows second{PartPitch(), t_.row_tile};
            OverRows<Arithmetic::kAdd>(h, rows, h, rows, h, second, height_, t_.rank);
        }
        LocalTensor<float> sum;
        if constexpr (kWide) {
            sum = slot;
        } else {
            sum = acc_;
            ConvertRows(sum, columns, slot, columns, RoundMode::CAST_NONE, width_, height_);
        }
        for (uint32_t first = 0; first < t_.rank; first += kLowRankChunk) {
            AddRanks(sum, h, b, first, Min(kLowRankChunk, t_.rank - first));
        }
        VectorBarrier();
        if constexpr (!kWide) {
            ConvertRows(slot, columns, sum, columns, RoundMode::CAST_RINT, width_, height_);
            if (t_.stores_h && column_ == 0) StoreInner(h);
        }
        inner_.FreeTensor(h);
        slots_.template EnQue<TPosition::VECOUT, TPosition::GM, T>(slot);
        slot = slots_.template DeQue<TPosition::VECOUT, TPosition::GM, T>();
        DataCopyPad(y_[start], slot,
                    Rectangle<T>(height_, width_, t_.columns, t_.column_tile, false));
        slots_.FreeTensor(slot);
    }

    // sum += h * b over some ranks.
    __aicore__ inline void AddRanks(const LocalTensor<float>& sum, const LocalTensor<float>& h,
                                    const LocalTensor<float>& b, uint32_t first, uint32_t count) {
        const uint8_t eighths = static_cast<uint8_t>((height_ + kUnit - 1) / kUnit);
        // h is there, and the values that are spread next replace those of the previous ranks.
        VectorBarrier();
        for (uint32_t i = 0; i < count; ++i) {
            AscendC::Brcb(spread_[i * t_.row_tile * kUnit], h[(first + i) * t_.row_tile], eighths,
                          AscendC::BrcbRepeatParams(1, kUnit));
        }
        // A product needs no barrier to the sum of the product before it, in the other plane.
        VectorBarrier();
        Multiply(0, b[first * t_.column_tile]);
        for (uint32_t i = 1; i < count; ++i) {
            VectorBarrier();
            Multiply(i, b[(first + i) * t_.column_tile]);
            AddProduct(sum, i - 1);
        }
        VectorBarrier();
        AddProduct(sum, count - 1);
    }

    __aicore__ inline LocalTensor<float> Plane(uint32_t i) const {
        return planes_[i % kLowRankPlanes * t_.row_tile * t_.column_tile];
    }

    // The product of rank i of the chunk. One repeat is a row: b stays, h moves on by a block.
    __aicore__ inline void Multiply(uint32_t i, const LocalTensor<float>& b) {
        const uint8_t pitch = static_cast<uint8_t>(t_.column_tile / kUnit);
        const AscendC::BinaryRepeatParams step(1, 1, 0, pitch, 0, 1);
        for (uint32_t lane = 0; lane < width_; lane += kLanes) {
            const uint64_t mask = Min(width_ - lane, kLanes);
            AscendC::Mul(Plane(i)[lane], b[lane], spread_[i * t_.row_tile * kUnit], mask,
                         static_cast<uint8_t>(height_), step);
        }
    }

    __aicore__ inline void AddProduct(const LocalTensor<float>& sum, uint32_t i) {
        const Rows columns{0, t_.column_tile};
        OverRows<Arithmetic::kAdd>(sum, columns, sum, columns, Plane(i), columns, width_, height_);
    }

    __aicore__ inline void StoreInner(const LocalTensor<float>& h) {
        LocalTensor<T> rounded = inner_out_.template AllocTensor<T>();
        const Rows rows{0, t_.row_tile};
        ConvertRows(rounded, rows, h, rows, RoundMode::CAST_RINT, height_, t_.rank);
        inner_out_.EnQue(rounded);
        rounded = inner_out_.template DeQue<T>();
        DataCopyPad(rounded_[row_], rounded,
                    Rectangle<T>(t_.rank, height_, t_.rows, t_.row_tile, false));
        inner_out_.FreeTensor(rounded);
    }
};

}  // namespace rope
