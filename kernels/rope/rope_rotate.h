// Rotation of q and k, and its adjoint.
//
// Problem. For each token and head, pairs of channels (x1, x2) become
//   y1 = c1*x1 - s1*x2,   y2 = s2*x1 + c2*x2,
// and in the adjoint dx1 = c1*g1 + s2*g2, dx2 = c2*g2 - s1*g1. Both read
//   y[k] = a[k]*x[k] +- b[k]*x[partner(k)]
// over channel segments k, with a, b and the sign chosen by the host: direction, pairing and
// whether a pair shares its angle are data, not code.
//
// Data layout. A tile is several tokens with all their heads, q's and k's side by side, in one slot
// of the unified buffer. It is overwritten by its rotation, so a slot serves as input and output.
//
//   slot [token][head][segment], padded to 32 bytes   (or [head][token][segment], for BNSD)
//   x, t [row][segment] in f32: the whole tile, so that one instruction runs over many rows and
//        there is a barrier after each step of a tile, not of a part of one
//
// In 16 bits neighbours (but for adjacent halves) are taken apart on their way into x and put
// together on the way back, and the first members of all quarters come before the second ones. So
// the arithmetic sees two long segments, and the angles as they are loaded.
//
// Pseudo code.
//   for each part of this core (tokens of one batch):
//     load angles of its tokens: one transfer
//     for each tile of the part:
//       load q rows, k rows                               MTE2
//       x = f32(slot);  t = b * partner(x);                V
//       x = a * x;  x = x +- t;  slot = x
//       store q rows, k rows                              MTE3
//     out of place, the channels that are not rotated pass through the same slots
// Three slots rotate, so the load of the next tile and the store of the last run beside the
// arithmetic. With a cube core (rope_matrix.h) the partners come out of a product, x as it is.
// Between V instructions that depend on each other there is a V barrier; there is no
// barrier over all pipes.
#pragma once

#include "rope_base.h"
#include "rope_matrix.h"

namespace rope {

template <typename T, Pairs kPairs>
class Rotate {
    static constexpr bool kWide = sizeof(T) == 4;
    // f32: by Gather.
    static constexpr bool kPermuteIn = kWide && kPairs == Pairs::kDeinterleave;
    static constexpr bool kPermuteOut = kWide && kPairs == Pairs::kInterleave;
    static constexpr bool kGatherPartner = kWide && kPairs == Pairs::kAdjacent;
    static constexpr bool kPermutes = kPermuteIn || kPermuteOut || kGatherPartner;
    // 16 bits: by shifts of the pairs' words. Adjacent halves are cheaper exchanged than converted
    // both ways as integers.
    static constexpr bool kSwap = !kWide && !kUpperHalf<T> && kPairs == Pairs::kAdjacent;
    static constexpr bool kAdjacentWords = kUpperHalf<T> && kPairs == Pairs::kAdjacent;
    static constexpr bool kWordsIn = !kWide && (kPairs == Pairs::kDeinterleave || kAdjacentWords);
    static constexpr bool kWordsOut = !kWide && (kPairs == Pairs::kInterleave || kAdjacentWords);
    // f32 data is rotated in its slot, unless it is permuted on the way.
    static constexpr bool kCopyX = !kWide || kPermuteIn || kPermuteOut;
    // The cube core brings the partners; two products bring x as well.
    static constexpr bool kMatrix = kPairs == Pairs::kMatrix;
    static_assert(!kMatrix || !kWide, "products are of 16 bits");

public:
    __aicore__ inline Rotate(TPipe& pipe, const Tiling& t) : pipe_(pipe), t_(t) {}

    __aicore__ inline void Run(GM_ADDR q, GM_ADDR k, GM_ADDR q_out, GM_ADDR k_out, GM_ADDR angles,
                               GM_ADDR map, GM_ADDR workspace = nullptr) {
        const uint64_t block = AscendC::GetBlockIdx();
        const uint64_t blocks = AscendC::GetBlockNum() * (kMatrix ? kVectorsOfCube : 1);
        if (IsBeyond(block, blocks)) return;
        Bind(q, k, q_out, k_out, angles);
        if constexpr (kMatrix) {
            workspace_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(workspace),
                                       ProductStart(t_, blocks, 0));
        }
        InitBuffers(map);
        Parts parts(t_, block, blocks);
        Part part;
        while (parts.Next(part)) {
            LoadAngles(t_, part, angles_, angles_gm_);
            LocalTensor<float> raw = angles_.DeQue<float>();
            const LocalTensor<float> coef = t_.expand ? Expand(raw, part.tokens) : raw;
            const uint32_t heads = part.head_end - part.head_begin;
            for (uint32_t head = 0; head < heads; head += t_.heads_per_tile) {
                const Tile tile{part.batch, part.index, part.tokens, part.head_begin + head,
                                Min(t_.heads_per_tile, heads - head)};
                RotateTile(tile, coef);
                for (uint32_t span = 1; span < kSpans; ++span) {
                    if (t_.load[span].length > 0) PassTile(tile, span);
                }
            }
            angles_.FreeTensor(raw);
        }
        if constexpr (kMatrix) {
            // The cube core's steps go on while the other vector core has tiles.
            Tiles other(t_, block % 2 == 0 ? block + 1 : block - 1, blocks);
            uint64_t steps = 0;
            for (Tile tile{}; other.Next(tile);) ++steps;
            for (; step_ < steps; ++step_) {
                AscendC::CrossCoreWaitFlag(kProductReady);
                AscendC::CrossCoreSetFlag<kCubeAndVectors, PIPE_MTE2>(kProductTaken);
            }
        }
    }

private:
    TPipe& pipe_;
    const Tiling& t_;
    GlobalTensor<T> in_[kTensors], out_[kTensors];
    GlobalTensor<float> angles_gm_;
    GlobalTensor<T> workspace_;
    AscendC::TQue<TPosition::VECIN, 1> products_;
    uint64_t step_ = 0;  // of the cube core
    AscendC::TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> slots_;
    AscendC::TQue<TPosition::VECIN, 1> angles_;
    TBuf<TPosition::VECCALC> work_, coef_, permutation_;
    TBuf<TPosition::VECIN> map_;
    LocalTensor<float> x_, t_work_, map_words_;
    LocalTensor<uint32_t> offsets_;
    uint32_t segment_pitch_;

    __aicore__ inline void Bind(GM_ADDR q, GM_ADDR k, GM_ADDR q_out, GM_ADDR k_out,
                                GM_ADDR angles) {
        GM_ADDR const input[kTensors] = {q, k};
        GM_ADDR const output[kTensors] = {q_out, k_out};
        for (uint32_t i = 0; i < kTensors; ++i) {
            in_[i].SetGlobalBuffer(reinterpret_cast<__gm__ T*>(input[i]), t_.input[i].extent);
            out_[i].SetGlobalBuffer(reinterpret_cast<__gm__ T*>(output[i]), t_.output[i].extent);
        }
        angles_gm_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(angles),
                                   t_.angle_rows * 2 * t_.angle_width);
    }

    __aicore__ inline void InitBuffers(GM_ADDR map) {
        const uint32_t tile_rows = t_.tokens_per_tile * t_.heads_per_tile;
        uint32_t row_bytes = t_.row_pitch * static_cast<uint32_t>(sizeof(T));
        for (uint32_t span = 1; span < kSpans; ++span) {
            const uint32_t bytes =
                RoundUp(t_.load[span].length * static_cast<uint32_t>(sizeof(T)), kBlockBytes);
            if (bytes > row_bytes) row_bytes = bytes;
        }
        pipe_.InitBuffer(slots_, static_cast<uint8_t>(t_.slots),
                         tile_rows * row_bytes + kSlackBytes);
        pipe_.InitBuffer(
            angles_, 2,
            t_.tokens_per_tile * t_.raw_pitch * static_cast<uint32_t>(sizeof(float)) + kSlackBytes);
        if constexpr (kMatrix)
            pipe_.InitBuffer(products_, kProductsInFlight,
                             tile_rows * t_.products * row_bytes + kSlackBytes);
        segment_pitch_ = t_.row_pitch / t_.segments;
        const uint32_t work = tile_rows * t_.row_pitch;
        pipe_.InitBuffer(work_,
                         (kCopyX ? 2 : 1) * (work + kLanes) * static_cast<uint32_t>(sizeof(float)) +
                             kSlackBytes);
        t_work_ = work_.Get<float>();
        if constexpr (kCopyX) x_ = t_work_[work + kLanes];
        if constexpr (kWordsIn || kWordsOut) {
            // What lies between the segments is converted with them; it has to be something.
            if (t_.segment_length != segment_pitch_) {
                AscendC::Duplicate(t_work_, 0.0f, static_cast<int32_t>(2 * (work + kLanes)));
            }
        }
        if (t_.expand)
            pipe_.InitBuffer(
                coef_, t_.tokens_per_tile * t_.coef_pitch * static_cast<uint32_t>(sizeof(float)) +
                           kSlackBytes);
        if (t_.map_words > 0) {
            pipe_.InitBuffer(map_,
                             t_.map_words * static_cast<uint32_t>(sizeof(float)) + kSlackBytes);
            map_words_ = map_.Get<float>();
            LoadWords(pipe_, map_words_, map, t_.map_words);
        }
        if constexpr (kPermutes) {
            pipe_.InitBuffer(permutation_,
                             work * static_cast<uint32_t>(sizeof(uint32_t)) + kSlackBytes);
            offsets_ = permutation_.Get<uint32_t>();
            const uint32_t skip = t_.expand ? 2 * t_.coef_pitch : 0;
            RepeatOffsets(offsets_, map_words_[skip].template ReinterpretCast<uint32_t>(),
                          t_.row_pitch, tile_rows,
                          t_.row_pitch * static_cast<uint32_t>(sizeof(T)));
        }
    }

    // Brings each token's angles into the order of the coefficients.
    __aicore__ inline LocalTensor<float> Expand(const LocalTensor<float>& raw, uint32_t tokens) {
        const LocalTensor<float> coef = coef_.Get<float>();
        const LocalTensor<uint32_t> offsets = map_words_.template ReinterpretCast<uint32_t>();
        // The coefficients before these were read ahead of a barrier of their tile.
        for (uint32_t token = 0; token < tokens; ++token) {
            AscendC::Gather(coef[token * t_.coef_pitch], raw, offsets,
                            token * t_.raw_pitch * static_cast<uint32_t>(sizeof(float)),
                            t_.coef_pitch);
        }
        // The signs are in the matrix.
        if constexpr (kMatrix) return coef;
        VectorBarrier();
        const Rows rows{0, t_.coef_pitch};
        OverRows<Arithmetic::kMul>(coef, rows, coef, rows, map_words_, Rows{t_.coef_pitch, 0},
                                   t_.coef_pitch, tokens);
        // A tile begins with a barrier.
        return coef;
    }

    __aicore__ inline void RotateTile(const Tile& tile, const LocalTensor<float>& coef) {
        LocalTensor<T> slot = slots_.template AllocTensor<T>();
        if constexpr (kMatrix) LoadProduct(tile);
        if (!kMatrix || t_.products == 1) {
            for (uint32_t i = 0; i < kTensors; ++i) MoveRows<T, true>(t_, tile, i, 0, slot, in_[i]);
        }
        slots_.template EnQue<TPosition::GM, TPosition::VECIN, T>(slot);
        slot = slots_.template DeQue<TPosition::GM, TPosition::VECIN, T>();
        RotateRows(tile, slot, coef);
        slots_.template EnQue<TPosition::VECOUT, TPosition::GM, T>(slot);
        slot = slots_.template DeQue<TPosition::VECOUT, TPosition::GM, T>();
        for (uint32_t i = 0; i < kTensors; ++i) MoveRows<T, false>(t_, tile, i, 0, slot, out_[i]);
        slots_.FreeTensor(slot);
    }

    // The tile's rows times the matrix, from the cube core.
    __aicore__ inline void LoadProduct(const Tile& tile) {
        LocalTensor<T> product = products_.AllocTensor<T>();
        AscendC::CrossCoreWaitFlag(kProductReady);
        AscendC::DataCopy(product,
                          workspace_[ProductStart(t_, AscendC::GetBlockIdx(), step_++)],
                          t_.products * tile.tokens * tile.heads * t_.row_pitch);
        AscendC::CrossCoreSetFlag<kCubeAndVectors, PIPE_MTE2>(kProductTaken);
        products_.EnQue(product);
    }

    // Channels that are not rotated, copied bit for bit.
    __aicore__ inline void PassTile(const Tile& tile, uint32_t span) {
        LocalTensor<T> slot = slots_.template AllocTensor<T>();
        for (uint32_t i = 0; i < kTensors; ++i) MoveRows<T, true>(t_, tile, i, span, slot, in_[i]);
        slots_.EnQue(slot);
        slot = slots_.template DeQue<T>();
        for (uint32_t i = 0; i < kTensors; ++i)
            MoveRows<T, false>(t_, tile, i, span, slot, out_[i]);
        slots_.FreeTensor(slot);
    }

    __aicore__ inline void RotateRows(const Tile& tile, const LocalTensor<T>& slot,
                                      const LocalTensor<float>& coef) {
        const uint32_t rows = tile.tokens * tile.heads;
        const uint32_t elements = rows * t_.row_pitch;
        const uint32_t pitch = t_.row_pitch;
        // Writes of this tile to the work area come after the reads of the previous one.
        VectorBarrier();
        const LocalTensor<float> x = Widen(slot, rows);
        const LocalTensor<float> partner = Partner(slot, x, elements);
        VectorBarrier();
        for (uint32_t k = 0; k < t_.segments; ++k) {
            const uint32_t other = t_.segments > 1 ? k ^ 1 : k;
            ScaleSegment(t_, tile, t_work_, k * segment_pitch_, partner, other * segment_pitch_,
                         coef, t_.b_offset[k]);
        }
        VectorBarrier();
        for (uint32_t k = 0; k < t_.segments; ++k) {
            ScaleSegment(t_, tile, x, k * segment_pitch_, x, k * segment_pitch_, coef,
                         t_.a_offset[k]);
        }
        VectorBarrier();
        const LocalTensor<float> y = Result(slot, x);
        for (uint32_t k = 0; k < t_.segments; ++k) {
            const Rows segment{k * segment_pitch_, pitch};
            if (t_.b_negative >> k & 1) {
                OverRows<Arithmetic::kSub>(y, segment, x, segment, t_work_, segment,
                                           t_.segment_length, rows);
            } else {
                OverRows<Arithmetic::kAdd>(y, segment, x, segment, t_work_, segment,
                                           t_.segment_length, rows);
            }
        }
        VectorBarrier();
        Narrow(slot, y, rows);
    }

    __aicore__ inline PairRows Words(uint32_t rows) const {
        return {t_.segment_length, segment_pitch_, rows, t_.row_pitch};
    }

    // The tile as f32, in the order of the segments.
    __aicore__ inline LocalTensor<float> Widen(const LocalTensor<T>& data, uint32_t rows) {
        const uint32_t elements = rows * t_.row_pitch;
        if constexpr (kPermuteIn) {
            AscendC::Gather(x_, data, offsets_, 0, elements);
            return x_;
        } else if constexpr (kWide) {
            return data;
        } else if constexpr (kWordsIn) {
            TakeApart(x_, data, t_work_, Words(rows));
            return x_;
        } else if constexpr (kMatrix) {
            LocalTensor<T> product = products_.DeQue<T>();
            const bool moved = t_.products == 2;
            AscendC::Cast(x_, moved ? product : data, RoundMode::CAST_NONE, elements);
            AscendC::Cast(t_work_, product[moved ? elements : 0], RoundMode::CAST_NONE, elements);
            products_.FreeTensor(product);
            return x_;
        } else if constexpr (kSwap) {
            // x_ serves as scratch for the exchanged pairs first.
            const LocalTensor<T> swapped = SwapHalves(data, x_, elements);
            AscendC::Cast(t_work_, swapped, RoundMode::CAST_NONE, elements);
            VectorBarrier();
            AscendC::Cast(x_, data, RoundMode::CAST_NONE, elements);
            return x_;
        } else {
            if (t_.quarter_length == 0) {
                AscendC::Cast(x_, data, RoundMode::CAST_NONE, elements);
            } else {
                for (uint32_t k = 0; k < kSegments; ++k)
                    ConvertRows(x_, Apart(k), data, Quarter(k), RoundMode::CAST_NONE,
                                t_.quarter_length, rows);
            }
            return x_;
        }
    }

    // Where segment k of a quarter pairing lies in a slot, and where in the work area.
    __aicore__ inline Rows Quarter(uint32_t k) const {
        return {k * t_.quarter_pitch, t_.row_pitch};
    }
    __aicore__ inline Rows Apart(uint32_t k) const {
        return {k % 2 * segment_pitch_ + k / 2 * t_.quarter_length, t_.row_pitch};
    }

    // Where the other member of each pair is read from.
    __aicore__ inline LocalTensor<float> Partner(const LocalTensor<T>& data,
                                                 const LocalTensor<float>& x, uint32_t elements) {
        if constexpr (kGatherPartner) {
            AscendC::Gather(t_work_, data, offsets_, 0, elements);
            return t_work_;
        } else if constexpr (kSwap || kMatrix) {
            return t_work_;
        } else {
            return x;
        }
    }

    __aicore__ inline LocalTensor<float> Result(const LocalTensor<T>& data,
                                                const LocalTensor<float>& x) {
        if constexpr (kPermuteIn) {
            return data;
        } else if constexpr (kPermuteOut) {
            return x_;
        } else {
            return x;
        }
    }

    // Rounds once, to nearest even, and restores the order of the output.
    __aicore__ inline void Narrow(const LocalTensor<T>& data, const LocalTensor<float>& y,
                                  uint32_t rows) {
        const uint32_t elements = rows * t_.row_pitch;
        if constexpr (kPermuteOut) {
            AscendC::Gather(data, y, offsets_, 0, elements);
        } else if constexpr (kWordsOut) {
            PutTogether(data, y, t_work_, Words(rows));
        } else if constexpr (!kWide) {
            if (t_.quarter_length == 0) {
                AscendC::Cast(data, y, RoundMode::CAST_RINT, elements);
            } else {
                for (uint32_t k = 0; k < kSegments; ++k)
                    ConvertRows(data, Quarter(k), y, Apart(k), RoundMode::CAST_RINT,
                                t_.quarter_length, rows);
            }
        }
    }
};

}  // namespace rope
