// RMSNorm of each head fused with its rotation, and the backward of both.
//
// Problem. For each head x of a token, of D channels, with the weight w of its tensor,
//   y = R (x * rstd * w),  rstd = 1 / sqrt(mean(x^2) + eps),   or, with the norm after rotation,
//   y = R x * rstd * w     with the mean of (R x)^2.
// Backward: let x be what is normalised (x, or R x), and g the gradient of n * w with n = x * rstd
// (R^T dy, or dy). With h = g * w,
//   d = rstd * (h - n * mean(h * n)),  dx = d, or R^T d,  dw = sum of g * n over tokens and heads.
// rstd is computed again from x, which the backward reads anyway.
//
// Data layout. A tile is several tokens with several heads of one tensor, whole heads in one slot
// of the unified buffer. The arithmetic sees the first members of all pairs in one segment of a row
// and the second ones in another (of quarters, two of each), whatever the order in memory is.
//
//   slot [row][channels before | rotated | after], padded to 32 bytes (backward: x, then dy)
//   x, g, t [row] the same in f32, the rotated channels in the order of the segments
//   w [tensor][channel], in the same order
//   sums [tensor][row of a tile]: g * n, added up tile by tile (backward)
//
// Pseudo code.
//   for each part of this core (tokens of one batch):
//     load angles of its tokens: one transfer
//     for q, then k; for each tile of the part:
//       load rows of x, and of dy                                   MTE2
//       x = f32(slot);  t = x * x;  rstd = 1 / sqrt(sum(t) / D + eps)  V
//       x = x * rstd;  x = x * w;  rotate x;  slot = x              V
//       or x = x * rstd;  t = g * x;  sums += t;  m = sum(t * w) / D
//          g = (g * w - x * m) * rstd;  slot = g                    V
//       store the rows                                              MTE3
//   backward: add up the sums' rows, and store them for this core
//
// The sums of a core are added in the order of its tiles, rows by halves at the end; the caller
// adds those of the cores. So two runs on one kind of device agree bit for bit.
//
// Map in global memory, 32-bit words:
//   [row_pitch] byte offset of each lane's weight
//   [head_dim, padded to 8] byte offset of each channel's gradient of the weight in a row
//   [row_pitch] byte offset of each lane's source in a row of x, [row_pitch] the same of y; then
//   [row_pitch] of each channel of x in a row of lanes, [row_pitch] of y: if the type is f32 and
//   the kernel permutes
#pragma once

#include "rope_base.h"

namespace rope {

// Device addresses; null where there is no k, and of the backward's in the forward. GM_ADDR is a
// macro that ends in a pointer, so each has a declaration of its own.
struct NormAddresses {
    GM_ADDR q;
    GM_ADDR k;
    GM_ADDR q_out;
    GM_ADDR k_out;
    GM_ADDR q_grad;
    GM_ADDR k_grad;
    GM_ADDR q_weight;
    GM_ADDR k_weight;
    GM_ADDR angles;
    GM_ADDR map;
    GM_ADDR weight_sums;
};

template <typename T, Pairs kPairs, bool kBackward>
class Norm {
    static constexpr bool kWide = sizeof(T) == 4;
    // Whether pairs are neighbours in x, and in y.
    static constexpr bool kNeighboursX = kPairs != Pairs::kSplit;
    static constexpr bool kNeighboursY = kPairs == Pairs::kAdjacent;
    // f32 data is worked on in its slot, unless it is permuted on the way.
    static constexpr bool kCopies = !kWide || kNeighboursX;
    // WholeReduceSum of this many rows at once: its results start aligned.
    static constexpr uint32_t kSumRows = 248;
    static constexpr uint32_t kUnit = kBlockBytes / sizeof(float);

public:
    __aicore__ inline Norm(TPipe& pipe, const NormTiling& t) : pipe_(pipe), n_(t), t_(t.rope) {}

    __aicore__ inline void Run(const NormAddresses& a) {
        if (IsBeyond(AscendC::GetBlockIdx(), AscendC::GetBlockNum())) return;
        Bind(a);
        InitBuffers(a);
        Parts parts(t_, AscendC::GetBlockIdx(), AscendC::GetBlockNum());
        Part part;
        while (parts.Next(part)) {
            LoadAngles(t_, part, angles_, angles_gm_);
            LocalTensor<float> coef = angles_.DeQue<float>();
            for (uint32_t tensor = 0; tensor < kTensors; ++tensor) RunTensor(part, tensor, coef);
            angles_.FreeTensor(coef);
        }
        if constexpr (kBackward) StoreSums();
    }

private:
    TPipe& pipe_;
    const NormTiling& n_;
    const Tiling& t_;
    GlobalTensor<T> in_[kTensors], out_[kTensors], gradient_[kTensors];
    GlobalTensor<float> angles_gm_, weight_sums_;
    AscendC::TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> slots_;
    AscendC::TQue<TPosition::VECIN, 1> angles_;
    AscendC::TQue<TPosition::VECOUT, 1> sums_out_;
    TBuf<TPosition::VECCALC> work_, statistics_, weights_buffer_;
    TBuf<TPosition::VECIN> map_;
    LocalTensor<float> t_work_, x_, g_, sums_, map_words_, weights_;
    // Of each row: sums of its chunks of lanes, then rstd and the mean, each over a block.
    LocalTensor<float> chunk_sums_, rstd_, mean_;
    uint32_t tile_rows_, stat_pitch_;

    __aicore__ inline void Bind(const NormAddresses& a) {
        GM_ADDR const input[kTensors] = {a.q, a.k};
        GM_ADDR const output[kTensors] = {a.q_out, a.k_out};
        GM_ADDR const gradient[kTensors] = {a.q_grad, a.k_grad};
        for (uint32_t i = 0; i < kTensors; ++i) {
            in_[i].SetGlobalBuffer(reinterpret_cast<__gm__ T*>(input[i]), t_.input[i].extent);
            out_[i].SetGlobalBuffer(reinterpret_cast<__gm__ T*>(output[i]), t_.output[i].extent);
            if constexpr (kBackward) {
                gradient_[i].SetGlobalBuffer(reinterpret_cast<__gm__ T*>(gradient[i]),
                                             n_.gradient[i].extent);
            }
        }
        angles_gm_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(a.angles),
                                   t_.angle_rows * 2 * t_.angle_width);
        if constexpr (kBackward) {
            weight_sums_.SetGlobalBuffer(
                reinterpret_cast<__gm__ float*>(a.weight_sums),
                static_cast<uint64_t>(AscendC::GetBlockNum()) * Tensors() * n_.head_dim);
        }
    }

    __aicore__ inline uint32_t Tensors() const { return t_.heads[1] > 0 ? 2 : 1; }

    __aicore__ inline void InitBuffers(const NormAddresses& a) {
        constexpr uint32_t kBytes = sizeof(float);
        tile_rows_ = t_.tokens_per_tile * t_.heads_per_tile;
        stat_pitch_ = RoundUp(tile_rows_, kUnit);
        const uint32_t tile = tile_rows_ * t_.row_pitch;
        pipe_.InitBuffer(
            slots_, static_cast<uint8_t>(t_.slots),
            (kBackward ? 2 * tile + kLanes : tile) * static_cast<uint32_t>(sizeof(T)) +
                kSlackBytes);
        pipe_.InitBuffer(angles_, 2, t_.tokens_per_tile * t_.raw_pitch * kBytes + kSlackBytes);

        const uint32_t copies = 1 + (kCopies ? (kBackward ? 2 : 1) : 0);
        const uint32_t work = copies * (tile + kLanes) + (kBackward ? Tensors() * tile : 0);
        pipe_.InitBuffer(work_, work * kBytes + kSlackBytes);
        t_work_ = work_.Get<float>();
        if constexpr (kCopies) x_ = t_work_[tile + kLanes];
        if constexpr (kCopies && kBackward) g_ = t_work_[2 * (tile + kLanes)];
        if constexpr (kBackward) sums_ = t_work_[copies * (tile + kLanes)];
        // The sums begin with 0; what lies between segments is converted with them, so it has to be
        // something.
        AscendC::Duplicate(t_work_, 0.0f, static_cast<int32_t>(work));

        const uint32_t chunks = Chunks() * stat_pitch_;
        const uint32_t statistics = chunks + (kBackward ? 2 : 1) * kUnit * stat_pitch_;
        pipe_.InitBuffer(statistics_, statistics * kBytes + kSlackBytes);
        chunk_sums_ = statistics_.Get<float>();
        rstd_ = chunk_sums_[chunks];
        if constexpr (kBackward) mean_ = rstd_[kUnit * stat_pitch_];
        // Rows are spread over blocks by eights: the last ones may be none of the tile's.
        AscendC::Duplicate(chunk_sums_, 1.0f, static_cast<int32_t>(chunks));

        const uint32_t channels = RoundUp(n_.head_dim, kUnit);
        const uint32_t words = RoundUp(t_.map_words, kUnit);
        pipe_.InitBuffer(map_, (words + kTensors * channels) * kBytes + kSlackBytes);
        map_words_ = map_.Get<float>();
        LoadWords(pipe_, map_words_, a.map, t_.map_words);
        pipe_.InitBuffer(weights_buffer_, kTensors * t_.row_pitch * kBytes + kSlackBytes);
        weights_ = weights_buffer_.Get<float>();
        GM_ADDR const weight[kTensors] = {a.q_weight, a.k_weight};
        for (uint32_t i = 0; i < Tensors(); ++i) {
            const LocalTensor<float> loaded = map_words_[words + i * channels];
            LoadWords(pipe_, loaded, weight[i], n_.head_dim);
            AscendC::Gather(weights_[i * t_.row_pitch], loaded, Offsets(0), 0, t_.row_pitch);
        }
        VectorBarrier();
        AscendC::Adds(weights_, weights_, n_.weight_offset,
                      static_cast<int32_t>(Tensors() * t_.row_pitch));
        if constexpr (kBackward) {
            pipe_.InitBuffer(sums_out_, 1, channels * kBytes + kSlackBytes);
        }
    }

    __aicore__ inline LocalTensor<uint32_t> Offsets(uint32_t start) const {
        return map_words_[start].template ReinterpretCast<uint32_t>();
    }
    // Rows of offsets for the permutation of x or y on its way in or out.
    __aicore__ inline LocalTensor<uint32_t> Permutation(bool of_y, bool out) const {
        const uint32_t index = 2 * (out ? 1 : 0) + (of_y ? 1 : 0);
        return Offsets((1 + index) * t_.row_pitch + RoundUp(n_.head_dim, kUnit));
    }

    // Repeats that the lanes of a row take, of one run after the other.
    __aicore__ inline uint32_t Chunks() const {
        uint32_t chunks = 0;
        for (uint32_t i = 0; i < n_.runs; ++i) chunks += (n_.run_length[i] + kLanes - 1) / kLanes;
        return chunks;
    }

    __aicore__ inline void RunTensor(const Part& part, uint32_t tensor,
                                     const LocalTensor<float>& coef) {
        const uint32_t first = tensor == 0 ? 0 : t_.heads[0];
        const uint32_t begin = Max(part.head_begin, first);
        const uint32_t end = Min(part.head_end, first + t_.heads[tensor]);
        for (uint32_t head = begin; head < end; head += t_.heads_per_tile) {
            const Tile tile{part.batch, part.index, part.tokens, head,
                            Min(t_.heads_per_tile, end - head)};
            RunTile(tile, tensor, coef);
        }
    }

    __aicore__ inline void RunTile(const Tile& tile, uint32_t tensor,
                                   const LocalTensor<float>& coef) {
        const uint32_t half = kBackward ? tile_rows_ * t_.row_pitch + kLanes : 0;
        LocalTensor<T> slot = slots_.template AllocTensor<T>();
        for (uint32_t span = 0; span < kSpans; ++span) {
            Move<true>(tile, tensor, slot, in_[tensor], t_.input[tensor], t_.load[span],
                       t_.load_route[span][tensor], n_.load_start[span]);
            if constexpr (kBackward) {
                Move<true>(tile, tensor, slot[half], gradient_[tensor], n_.gradient[tensor],
                           n_.gradient_load[span], n_.gradient_route[span][tensor],
                           n_.gradient_start[span]);
            }
        }
        slots_.template EnQue<TPosition::GM, TPosition::VECIN, T>(slot);
        slot = slots_.template DeQue<TPosition::GM, TPosition::VECIN, T>();
        if constexpr (kBackward) {
            BackwardRows(tile, tensor, slot, slot[half], coef);
        } else {
            ForwardRows(tile, tensor, slot, coef);
        }
        slots_.template EnQue<TPosition::VECOUT, TPosition::GM, T>(slot);
        slot = slots_.template DeQue<TPosition::VECOUT, TPosition::GM, T>();
        for (uint32_t span = 0; span < kSpans; ++span) {
            Move<false>(tile, tensor, slot[half], out_[tensor], t_.output[tensor], t_.store[span],
                        t_.store_route[span][tensor], n_.store_start[span]);
        }
        slots_.FreeTensor(slot);
    }

    template <bool kLoad>
    __aicore__ inline void Move(const Tile& tile, uint32_t tensor, const LocalTensor<T>& ub,
                                const GlobalTensor<T>& gm, const Tensor& shape, const Span& span,
                                const Route& route, uint32_t start) {
        if (span.length == 0) return;
        const uint32_t first = tensor == 0 ? 0 : t_.heads[0];
        const SpanRows rows{shape, span,          route, first, first + t_.heads[tensor],
                            t_.row_pitch, start};
        MoveSpan<T, kLoad>(rows, tile, t_.head_major != 0, ub, gm);
    }

    __aicore__ inline void ForwardRows(const Tile& tile, uint32_t tensor,
                                       const LocalTensor<T>& data,
                                       const LocalTensor<float>& coef) {
        const uint32_t rows = tile.tokens * tile.heads;
        // Writes of this tile to the work area come after the reads of the previous one.
        VectorBarrier();
        const LocalTensor<float> x = Widen<kNeighboursX>(x_, data, rows, false);
        VectorBarrier();
        if (n_.after) Rotate(tile, x, coef, false);
        Rstd(x, rows);
        ByRow(x, x, rstd_, rows);
        VectorBarrier();
        ByChannel(x, x, tensor, rows);
        VectorBarrier();
        if (!n_.after) Rotate(tile, x, coef, false);
        Narrow<kNeighboursY>(data, x, rows, true);
    }

    __aicore__ inline void BackwardRows(const Tile& tile, uint32_t tensor,
                                        const LocalTensor<T>& data,
                                        const LocalTensor<T>& gradient,
                                        const LocalTensor<float>& coef) {
        const uint32_t rows = tile.tokens * tile.heads;
        VectorBarrier();
        const LocalTensor<float> x = Widen<kNeighboursX>(x_, data, rows, false);
        const LocalTensor<float> g = Widen<kNeighboursY>(g_, gradient, rows, true);
        VectorBarrier();
        if (n_.after) {
            Rotate(tile, x, coef, false);
        } else {
            Rotate(tile, g, coef, true);
        }
        Rstd(x, rows);
        ByRow(x, x, rstd_, rows);
        VectorBarrier();
        Over<Arithmetic::kMul>(t_work_, g, x, rows);
        VectorBarrier();
        ByChannel(g, g, tensor, rows);
        const LocalTensor<float> sums = sums_[tensor * tile_rows_ * t_.row_pitch];
        Over<Arithmetic::kAdd>(sums, sums, t_work_, rows);
        VectorBarrier();
        ByChannel(t_work_, t_work_, tensor, rows);
        Mean(rows);
        AscendC::Brcb(mean_, chunk_sums_, Eighths(rows), AscendC::BrcbRepeatParams(1, kUnit));
        VectorBarrier();
        ByRow(x, x, mean_, rows);
        VectorBarrier();
        Over<Arithmetic::kSub>(g, g, x, rows);
        VectorBarrier();
        ByRow(g, g, rstd_, rows);
        VectorBarrier();
        if (n_.after) Rotate(tile, g, coef, true);
        Narrow<kNeighboursX>(gradient, g, rows, false);
    }

    // dst = a (op) b over the channels of all rows.
    template <Arithmetic kOp>
    __aicore__ inline void Over(const LocalTensor<float>& dst, const LocalTensor<float>& a,
                                const LocalTensor<float>& b, uint32_t rows) {
        for (uint32_t i = 0; i < n_.runs; ++i) {
            const Rows run{n_.run_start[i], t_.row_pitch};
            OverRows<kOp>(dst, run, a, run, b, run, n_.run_length[i], rows);
        }
    }
    // dst = a * (the row's number).
    __aicore__ inline void ByRow(const LocalTensor<float>& dst, const LocalTensor<float>& a,
                                 const LocalTensor<float>& blocks, uint32_t rows) {
        for (uint32_t i = 0; i < n_.runs; ++i) {
            const Rows run{n_.run_start[i], t_.row_pitch};
            OverRows<Arithmetic::kMul, true>(dst, run, a, run, blocks, Rows{0, kUnit},
                                             n_.run_length[i], rows);
        }
    }
    // dst = a * (the channel's weight).
    __aicore__ inline void ByChannel(const LocalTensor<float>& dst, const LocalTensor<float>& a,
                                     uint32_t tensor, uint32_t rows) {
        for (uint32_t i = 0; i < n_.runs; ++i) {
            const Rows run{n_.run_start[i], t_.row_pitch};
            const Rows weights{tensor * t_.row_pitch + n_.run_start[i], 0};
            OverRows<Arithmetic::kMul>(dst, run, a, run, weights_, weights, n_.run_length[i],
                                       rows);
        }
    }

    __aicore__ inline uint8_t Eighths(uint32_t rows) const {
        return static_cast<uint8_t>((rows + kUnit - 1) / kUnit);
    }

    // rstd_ = 1 / sqrt(mean(x^2) + eps) of each row. Overwrites t.
    __aicore__ inline void Rstd(const LocalTensor<float>& x, uint32_t rows) {
        const int32_t count = static_cast<int32_t>(rows);
        Over<Arithmetic::kMul>(t_work_, x, x, rows);
        Mean(rows);
        AscendC::Adds(chunk_sums_, chunk_sums_, n_.eps, count);
        VectorBarrier();
        AscendC::Sqrt(chunk_sums_, chunk_sums_, count);
        // Divided once for each row, not for each channel.
        AscendC::Duplicate(rstd_, 1.0f, count);
        VectorBarrier();
        AscendC::Div(chunk_sums_, rstd_, chunk_sums_, count);
        VectorBarrier();
        AscendC::Brcb(rstd_, chunk_sums_, Eighths(rows), AscendC::BrcbRepeatParams(1, kUnit));
        VectorBarrier();
    }

    // The mean of each row of t, into the first chunk's sums.
    __aicore__ inline void Mean(uint32_t rows) {
        const int32_t count = static_cast<int32_t>(rows);
        VectorBarrier();
        uint32_t chunks = 0;
        for (uint32_t i = 0; i < n_.runs; ++i) {
            const uint32_t length = n_.run_length[i];
            for (uint32_t lane = 0; lane < length; lane += kLanes, ++chunks) {
                const int32_t mask = static_cast<int32_t>(Min(length - lane, kLanes));
                for (uint32_t row = 0; row < rows; row += kSumRows) {
                    const LocalTensor<float> from =
                        t_work_[row * t_.row_pitch + n_.run_start[i] + lane];
                    AscendC::WholeReduceSum(chunk_sums_[chunks * stat_pitch_ + row], from, mask,
                                            static_cast<int32_t>(Min(rows - row, kSumRows)), 1, 1,
                                            static_cast<int32_t>(t_.row_pitch / kUnit));
                }
            }
        }
        VectorBarrier();
        for (uint32_t i = 1; i < chunks; ++i) {
            AscendC::Add(chunk_sums_, chunk_sums_, chunk_sums_[i * stat_pitch_], count);
            VectorBarrier();
        }
        AscendC::Muls(chunk_sums_, chunk_sums_, n_.inv_head_dim, count);
        VectorBarrier();
    }

    // Rotates the rows of x, or applies the adjoint. Overwrites t.
    __aicore__ inline void Rotate(const Tile& tile, const LocalTensor<float>& x,
                                  const LocalTensor<float>& coef, bool adjoint) {
        const uint32_t rows = tile.tokens * tile.heads;
        const auto& a = adjoint ? n_.adjoint_a_offset : t_.a_offset;
        const auto& b = adjoint ? n_.adjoint_b_offset : t_.b_offset;
        const uint32_t negative = adjoint ? n_.adjoint_b_negative : t_.b_negative;
        for (uint32_t k = 0; k < t_.segments; ++k) {
            ScaleSegment(t_, tile, t_work_, Segment(k), x, Segment(k ^ 1), coef, b[k]);
        }
        VectorBarrier();
        for (uint32_t k = 0; k < t_.segments; ++k) {
            ScaleSegment(t_, tile, x, Segment(k), x, Segment(k), coef, a[k]);
        }
        VectorBarrier();
        for (uint32_t k = 0; k < t_.segments; ++k) {
            const Rows segment{Segment(k), t_.row_pitch};
            if (negative >> k & 1) {
                OverRows<Arithmetic::kSub>(x, segment, x, segment, t_work_, segment,
                                           t_.segment_length, rows);
            } else {
                OverRows<Arithmetic::kAdd>(x, segment, x, segment, t_work_, segment,
                                           t_.segment_length, rows);
            }
        }
        VectorBarrier();
    }

    __aicore__ inline uint32_t Segment(uint32_t k) const {
        return n_.segment_start + k * n_.segment_pitch;
    }

    __aicore__ inline PairRows Words(uint32_t rows) const {
        return {t_.segment_length, n_.segment_pitch, rows, t_.row_pitch, n_.segment_start};
    }

    // The rows of x or y as f32, in the order of the segments. Overwrites t.
    template <bool kNeighbours>
    __aicore__ inline LocalTensor<float> Widen(const LocalTensor<float>& copy,
                                               const LocalTensor<T>& data, uint32_t rows,
                                               bool of_y) {
        const uint32_t elements = rows * t_.row_pitch;
        if constexpr (!kCopies) {
            return data;
        } else if constexpr (kWide && kNeighbours) {
            Permute(copy, data, Permutation(of_y, false), rows);
        } else if constexpr (kWide) {
            // A product with 1 keeps every number, and the sign of 0.
            AscendC::Muls(copy, data, 1.0f, static_cast<int32_t>(elements));
        } else if constexpr (kNeighbours) {
            TakeApart(copy, data, t_work_, Words(rows));
            VectorBarrier();
            ConvertOthers(copy, data, RoundMode::CAST_NONE, rows);
        } else {
            AscendC::Cast(copy, data, RoundMode::CAST_NONE, elements);
        }
        return copy;
    }

    // The inverse: rounds once, to nearest even. y is used up, and so is t.
    template <bool kNeighbours>
    __aicore__ inline void Narrow(const LocalTensor<T>& data, const LocalTensor<float>& y,
                                  uint32_t rows, bool of_y) {
        const uint32_t elements = rows * t_.row_pitch;
        if constexpr (!kCopies) {
            return;
        } else if constexpr (kWide && kNeighbours) {
            Permute(data, y, Permutation(of_y, true), rows);
        } else if constexpr (kWide) {
            AscendC::Muls(data, y, 1.0f, static_cast<int32_t>(elements));
        } else if constexpr (kNeighbours) {
            ConvertOthers(data, y, RoundMode::CAST_RINT, rows);
            PutTogether(data, y, t_work_, Words(rows));
        } else {
            AscendC::Cast(data, y, RoundMode::CAST_RINT, elements);
        }
    }

    __aicore__ inline void Permute(const LocalTensor<float>& dst, const LocalTensor<float>& src,
                                   const LocalTensor<uint32_t>& offsets, uint32_t rows) {
        for (uint32_t row = 0; row < rows; ++row) {
            const uint32_t start = row * t_.row_pitch;
            AscendC::Gather(dst[start], src, offsets,
                            start * static_cast<uint32_t>(sizeof(float)), t_.row_pitch);
        }
    }

    // Converts the channels before the rotated ones, and those after them.
    template <typename D, typename S>
    __aicore__ inline void ConvertOthers(const LocalTensor<D>& dst, const LocalTensor<S>& src,
                                         RoundMode mode, uint32_t rows) {
        const uint32_t after = n_.head_dim - n_.rotary_offset - t_.segments * t_.segment_length;
        if (n_.rotary_offset > 0) {
            const Rows run{0, t_.row_pitch};
            ConvertRows(dst, run, src, run, mode, n_.rotary_offset, rows);
        }
        if (after > 0) {
            const Rows run{Segment(t_.segments), t_.row_pitch};
            ConvertRows(dst, run, src, run, mode, after, rows);
        }
    }

    // Adds up the rows of the sums of g * n, and stores them in the order of the weight.
    __aicore__ inline void StoreSums() {
        const int32_t channels = static_cast<int32_t>(n_.head_dim);
        for (uint32_t tensor = 0; tensor < Tensors(); ++tensor) {
            const LocalTensor<float> sums = sums_[tensor * tile_rows_ * t_.row_pitch];
            for (uint32_t rows = tile_rows_; rows > 1;) {
                const uint32_t half = rows / 2, from = (rows - half) * t_.row_pitch;
                AscendC::Add(sums, sums, sums[from], static_cast<int32_t>(half * t_.row_pitch));
                VectorBarrier();
                rows -= half;
            }
            LocalTensor<float> out = sums_out_.AllocTensor<float>();
            AscendC::Gather(out, sums, Offsets(t_.row_pitch), 0, static_cast<uint32_t>(channels));
            sums_out_.EnQue(out);
            out = sums_out_.DeQue<float>();
            DataCopyExtParams copy;
            copy.blockCount = 1;
            copy.blockLen = n_.head_dim * static_cast<uint32_t>(sizeof(float));
            const uint64_t row = static_cast<uint64_t>(AscendC::GetBlockIdx()) * Tensors() + tensor;
            DataCopyPad(weight_sums_[row * n_.head_dim], out, copy);
            sums_out_.FreeTensor(out);
        }
    }
};

}  // namespace rope
