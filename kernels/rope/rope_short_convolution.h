// A short causal convolution of each channel with SiLU, and its backward, over packed sequences.
//
// Problem. Rows are tokens, cut into sequences. With back(j) = taps - 1 - j
//   z[t]  = sum over j of w[j] * x[t - back(j)],  s = 1 / (1 + e^-z),  y = z * s
//   dz    = dy * (s + z * s * (1 - s))
//   dx[t] = sum over j of w[j] * dz[t + back(j)]
//   dw[j] = sum over t of dz[t] * x[t - back(j)]
// without the terms that cross the border of a sequence. In f32, each operation rounded, sums in
// the order of j; y and dx are rounded once. dw is summed for each part of the rows.
//
// Data layout. A tile is some rows and some columns (channels). Its rows are dense, padded to whole
// blocks of T, so that a shift by rows is an offset. The taps - 1 rows before a tile are loaded
// with it; in the backward also those after it, whose dz is computed again.
//   x      [halo + rows + halo][column]   from `halo` rows before the tile
//   dz     [rows + halo][column]          replaces z
//   w, dw  [tap][column]
//   starts [sequence] i32 in global memory, ascending from 0: a term of row t that reaches `back`
//          rows back crosses a border if a sequence starts in (t - back, t]
//
// Pseudo code.
//   for each part of this core, columns outermost:
//     load w if the columns are new                                MTE2
//     for each tile of the part:
//       find the starts that concern it                            S
//       load x (and dy)                                            MTE2
//       for each tap: product = w * shifted x; clear what crosses a border; z += product    V
//       y = silu(z), or dz; then dx as z, and for each tap the rows of dz * x added in halves   V
//       store y or dx                                              MTE3
//     store dw of the part                                         MTE3
#pragma once

#include "rope_base.h"

namespace rope {

template <typename T, bool kBackward>
class ShortConvolution {
    static constexpr bool kWide = sizeof(T) == 4;
    static constexpr uint32_t kUnit = kBlockBytes / sizeof(T);
    // Numbers of the computation: z and products, and what a 16-bit output is rounded from; then
    // f32 copies of x and dy.
    static constexpr uint32_t kSum = 2, kCopies = kBackward ? 3 : 2;
    static constexpr uint32_t kPlanes = kWide ? 2 : kCopies + (kBackward ? 2 : 1);

public:
    __aicore__ inline ShortConvolution(TPipe& pipe, const ShortConvolutionTiling& t)
        : pipe_(pipe), t_(t), halo_(t.taps - 1) {}

    // `out` is y, or dx.
    __aicore__ inline void Run(GM_ADDR x, GM_ADDR weight, GM_ADDR starts, GM_ADDR dy, GM_ADDR out,
                               GM_ADDR sums) {
        const uint64_t block = AscendC::GetBlockIdx(), blocks = AscendC::GetBlockNum();
        if (IsBeyond(block, blocks)) return;
        const uint64_t tiles = (t_.rows + t_.row_tile - 1) / t_.row_tile;
        const uint64_t column_tiles = (t_.channels + t_.column_tile - 1) / t_.column_tile;
        const uint64_t all = column_tiles * t_.parts;
        uint64_t part = all * block / blocks;
        const uint64_t end = all * (block + 1) / blocks;
        if (part >= end) return;
        Bind(x, weight, starts, dy, out, sums);
        InitBuffers();
        for (uint64_t columns = column_tiles; part < end; ++part) {
            const uint64_t row_part = part % t_.parts;
            if (columns != part / t_.parts) {
                columns = part / t_.parts;
                column_ = columns * t_.column_tile;
                width_ = static_cast<uint32_t>(MinOf(t_.channels - column_, t_.column_tile));
                pitch_ = RoundUp(width_, kUnit);
                LoadWeight();
            }
            LocalTensor<float> dw;
            if constexpr (kBackward) {
                dw = sums_.template AllocTensor<float>();
                AscendC::Duplicate(dw, 0.0f, static_cast<int32_t>(t_.taps * pitch_));
            }
            const uint64_t last = tiles * (row_part + 1) / t_.parts;
            for (uint64_t tile = tiles * row_part / t_.parts; tile < last; ++tile) {
                RunTile(tile * t_.row_tile, dw);
            }
            if constexpr (kBackward) StoreSums(dw, row_part);
        }
    }

private:
    TPipe& pipe_;
    const ShortConvolutionTiling& t_;
    const uint32_t halo_;  // rows before a tile that it needs
    GlobalTensor<T> x_, dy_, out_, weight_;
    GlobalTensor<int32_t> starts_;
    GlobalTensor<float> sums_gm_;
    AscendC::TQue<TPosition::VECIN, 1> xs_, dys_, weights_;
    AscendC::TQue<TPosition::VECOUT, 1> outs_, sums_;
    TBuf<TPosition::VECCALC> work_, wide_weight_;
    LocalTensor<float> w_;
    uint64_t column_, row_;
    uint64_t first_start_, end_start_;  // the starts that concern the tile
    uint32_t width_, pitch_;            // columns of the tile, and padded
    uint32_t rows_;

    __aicore__ inline static uint64_t MaxOf(uint64_t a, uint64_t b) { return a < b ? b : a; }

    __aicore__ inline void Bind(GM_ADDR x, GM_ADDR weight, GM_ADDR starts, GM_ADDR dy, GM_ADDR out,
                                GM_ADDR sums) {
        const uint64_t elements = t_.rows * t_.channels;
        const uint64_t taps = static_cast<uint64_t>(t_.taps) * t_.channels;
        x_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(x), elements);
        weight_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(weight), taps);
        starts_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(starts), t_.sequences);
        out_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(out), elements);
        if constexpr (kBackward) {
            dy_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(dy), elements);
            sums_gm_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(sums), t_.parts * taps);
        }
    }

    // Rows of a slot or a plane.
    __aicore__ inline uint32_t MostRows() const {
        return t_.row_tile + (kBackward ? 2 : 1) * halo_;
    }

    // f32 of a plane. A repeat over its last row must not reach into the next plane.
    __aicore__ inline uint32_t PlaneElements() const {
        return MostRows() * t_.column_tile + kSlackBytes / static_cast<uint32_t>(sizeof(float));
    }

    __aicore__ inline LocalTensor<float> Plane(uint32_t i) {
        return work_.Get<float>()[i * PlaneElements()];
    }

    __aicore__ inline void InitBuffers() {
        constexpr uint32_t kBytes = sizeof(float), kSize = sizeof(T);
        const uint32_t slot = MostRows() * t_.column_tile * kSize + kSlackBytes;
        const uint32_t taps = t_.taps * t_.column_tile;
        pipe_.InitBuffer(xs_, 2, slot);
        pipe_.InitBuffer(outs_, 2, slot);
        pipe_.InitBuffer(weights_, 1, taps * kSize + kSlackBytes);
        pipe_.InitBuffer(wide_weight_, taps * kBytes + kSlackBytes);
        pipe_.InitBuffer(work_, kPlanes * PlaneElements() * kBytes);
        if constexpr (kBackward) {
            pipe_.InitBuffer(dys_, 2, slot);
            pipe_.InitBuffer(sums_, 1, taps * kBytes + kSlackBytes);
        }
        w_ = wide_weight_.Get<float>();
    }

    __aicore__ inline void LoadWeight() {
        LocalTensor<T> weight = weights_.template AllocTensor<T>();
        DataCopyPad(weight, weight_[column_],
                    Rectangle<T>(t_.taps, width_, t_.channels, pitch_, true), Padding<T>(width_));
        weights_.EnQue(weight);
        weight = weights_.template DeQue<T>();
        const uint32_t count = t_.taps * pitch_;
        if constexpr (kWide) {
            AscendC::Muls(w_, weight, 1.0f, static_cast<int32_t>(count));
        } else {
            AscendC::Cast(w_, weight, RoundMode::CAST_NONE, count);
        }
        weights_.FreeTensor(weight);
    }

    // Loads `count` rows, the first of them `row`, into a slot after `skipped` of its rows.
    template <typename Slots>
    __aicore__ inline LocalTensor<T> Load(Slots& slots, const GlobalTensor<T>& gm, uint64_t row,
                                          uint32_t skipped, uint32_t count) {
        LocalTensor<T> slot = slots.template AllocTensor<T>();
        DataCopyPad(slot[skipped * pitch_], gm[row * t_.channels + column_],
                    Rectangle<T>(count, width_, t_.channels, pitch_, true), Padding<T>(width_));
        slots.EnQue(slot);
        return slots.template DeQue<T>();
    }

    // The rows of a slot in f32: the slot itself, or a copy.
    template <typename Slots>
    __aicore__ inline LocalTensor<float> Widen(Slots& slots, LocalTensor<T>& slot, uint32_t plane,
                                               uint32_t skipped, uint32_t count) {
        if constexpr (kWide) {
            return slot;
        } else {
            const LocalTensor<float> wide = Plane(plane);
            const uint32_t start = skipped * pitch_;
            AscendC::Cast(wide[start], slot[start], RoundMode::CAST_NONE, count * pitch_);
            slots.FreeTensor(slot);
            return wide;
        }
    }

    // The first of the starts that is not before `row`.
    __aicore__ inline uint64_t StartFrom(uint64_t row) const {
        uint64_t low = 0, high = t_.sequences;
        while (low < high) {
            const uint64_t middle = (low + high) / 2;
            if (static_cast<uint64_t>(starts_.GetValue(middle)) < row) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        return low;
    }

    // Clears the products that cross a border: the later row of product 0 is `origin`, the earlier
    // one lies `back` rows before.
    __aicore__ inline void ClearCrossing(const LocalTensor<float>& products, uint64_t origin,
                                         uint32_t rows, uint32_t back) {
        if (back == 0 || first_start_ == end_start_) return;
        VectorBarrier();
        uint64_t cleared = origin;
        for (uint64_t i = first_start_; i < end_start_; ++i) {
            const uint64_t start = static_cast<uint64_t>(starts_.GetValue(i));
            const uint64_t from = MaxOf(start, cleared), to = MinOf(start + back, origin + rows);
            if (from >= to) continue;
            AscendC::Duplicate(products[static_cast<uint32_t>(from - origin) * pitch_], 0.0f,
                               static_cast<int32_t>((to - from) * pitch_));
            cleared = to;
        }
    }

    // sum = the sum of w[j] times the rows of `source`, back(j) rows earlier, or later for the
    // adjoint.
    template <bool kAdjoint>
    __aicore__ inline void Convolve(const LocalTensor<float>& sum,
                                    const LocalTensor<float>& products,
                                    const LocalTensor<float>& source, uint32_t rows) {
        const Rows dense{0, pitch_};
        for (uint32_t tap = 0; tap < t_.taps; ++tap) {
            const uint32_t back = halo_ - tap;
            const LocalTensor<float> to = tap == 0 ? sum : products;
            const Rows moved{(kAdjoint ? back : tap) * pitch_, pitch_};
            // `source` is there, and the products before this one are added.
            VectorBarrier();
            OverRows<Arithmetic::kMul>(to, dense, source, moved, w_, Rows{tap * pitch_, 0}, pitch_,
                                       rows);
            ClearCrossing(to, row_ + (kAdjoint ? back : 0), rows, back);
            if (tap == 0) continue;
            VectorBarrier();
            AscendC::Add(sum, sum, products, static_cast<int32_t>(rows * pitch_));
        }
    }

    // 1 + e^-z
    __aicore__ inline void Divisor(const LocalTensor<float>& out, const LocalTensor<float>& z,
                                   int32_t n) {
        VectorBarrier();
        AscendC::Muls(out, z, -1.0f, n);
        VectorBarrier();
        AscendC::Exp(out, out, n);
        VectorBarrier();
        AscendC::Adds(out, out, 1.0f, n);
    }

    __aicore__ inline void RunTile(uint64_t row, const LocalTensor<float>& dw) {
        row_ = row;
        rows_ = static_cast<uint32_t>(MinOf(t_.rows - row, t_.row_tile));
        const uint32_t before = static_cast<uint32_t>(MinOf(row, halo_));
        const uint64_t left = t_.rows - row - rows_;
        const uint32_t after = kBackward ? static_cast<uint32_t>(MinOf(left, halo_)) : 0;
        first_start_ = StartFrom(row < halo_ ? 0 : row + 1 - halo_);
        end_start_ = StartFrom(row + rows_ + (kBackward ? halo_ : 0));
        const uint32_t missing = halo_ - before, computed = rows_ + after;
        LocalTensor<T> x_slot = Load(xs_, x_, row - before, missing, before + computed);
        const LocalTensor<float> x = Widen(xs_, x_slot, kCopies, missing, before + computed);
        // Products with rows before the first are cleared, but must be defined.
        if (missing > 0) {
            AscendC::Duplicate(x, 0.0f, static_cast<int32_t>(missing * pitch_));
        }
        const LocalTensor<float> z = Plane(0), products = Plane(1);
        Convolve<false>(z, products, x, computed);
        LocalTensor<T> out = outs_.template AllocTensor<T>();
        if constexpr (kBackward) {
            RunBackward(out, x, after, dw);
        } else {
            const int32_t n = static_cast<int32_t>(rows_ * pitch_);
            Divisor(products, z, n);
            VectorBarrier();
            if constexpr (kWide) {
                AscendC::Div(out, z, products, n);
            } else {
                AscendC::Div(products, z, products, n);
                VectorBarrier();
                AscendC::Cast(out, products, RoundMode::CAST_RINT, rows_ * pitch_);
            }
        }
        if constexpr (kWide) xs_.FreeTensor(x_slot);
        outs_.EnQue(out);
        out = outs_.template DeQue<T>();
        DataCopyPad(out_[row * t_.channels + column_], out,
                    Rectangle<T>(rows_, width_, t_.channels, pitch_, false));
        outs_.FreeTensor(out);
    }

    // dx into `out`, and its terms of dw.
    __aicore__ inline void RunBackward(const LocalTensor<T>& out, const LocalTensor<float>& x,
                                       uint32_t after, const LocalTensor<float>& dw) {
        const LocalTensor<float> z = Plane(0), products = Plane(1);
        LocalTensor<float> sum;
        if constexpr (kWide) {
            sum = out;
        } else {
            sum = Plane(kSum);
        }
        const uint32_t computed = rows_ + after;
        LocalTensor<T> dy_slot = Load(dys_, dy_, row_, 0, computed);
        const LocalTensor<float> dy = Widen(dys_, dy_slot, kCopies + 1, 0, computed);
        const int32_t n = static_cast<int32_t>(computed * pitch_);
        const LocalTensor<float> s = products, slope = sum;
        Divisor(s, z, n);
        AscendC::Duplicate(slope, 1.0f, n);
        VectorBarrier();
        AscendC::Div(s, slope, s, n);
        VectorBarrier();
        AscendC::Sub(slope, slope, s, n);
        AscendC::Mul(z, z, s, n);
        VectorBarrier();
        AscendC::Mul(slope, slope, z, n);
        VectorBarrier();
        AscendC::Add(slope, slope, s, n);
        VectorBarrier();
        AscendC::Mul(z, slope, dy, n);
        if constexpr (kWide) dys_.FreeTensor(dy_slot);
        // Products with rows after the last must be defined: they are added.
        if (after < halo_) {
            AscendC::Duplicate(z[computed * pitch_], 0.0f,
                               static_cast<int32_t>((halo_ - after) * pitch_));
        }
        Convolve<true>(sum, products, z, rows_);
        if constexpr (!kWide) {
            VectorBarrier();
            AscendC::Cast(out, sum, RoundMode::CAST_RINT, rows_ * pitch_);
        }
        for (uint32_t tap = 0; tap < t_.taps; ++tap) {
            // The products before these are added.
            VectorBarrier();
            AscendC::Mul(products, z, x[tap * pitch_], static_cast<int32_t>(rows_ * pitch_));
            ClearCrossing(products, row_, rows_, halo_ - tap);
            for (uint32_t rows = rows_; rows > 1;) {
                const uint32_t half = rows / 2;
                rows -= half;
                VectorBarrier();
                AscendC::Add(products, products, products[rows * pitch_],
                             static_cast<int32_t>(half * pitch_));
            }
            VectorBarrier();
            AscendC::Add(dw[tap * pitch_], dw[tap * pitch_], products,
                         static_cast<int32_t>(pitch_));
        }
    }

    __aicore__ inline void StoreSums(LocalTensor<float>& dw, uint64_t part) {
        sums_.EnQue(dw);
        dw = sums_.template DeQue<float>();
        DataCopyPad(sums_gm_[part * t_.taps * t_.channels + column_], dw,
                    Rectangle<float>(t_.taps, width_, t_.channels, pitch_, false));
        sums_.FreeTensor(dw);
    }
};

}  // namespace rope
