// Gradient of the angles: what d(loss)/d(cos) and d(loss)/d(sin) of each token are, given x and the
// gradient g of y.
//
// Problem. From y1 = c1*x1 - s1*x2 and y2 = s2*x1 + c2*x2, summed over the heads of q and k:
//   dc1 = sum g1*x1,  ds1 = -sum g1*x2,  dc2 = sum g2*x2,  ds2 = sum g2*x1,
// and dc = dc1 + dc2, ds = ds1 + ds2 where a pair shares its angle. In the order of the segments
// that is
//   A[p] = sum g[p]*x[p],   B[p] = sum g[p]*x[partner(p)],
// and each output lane is one or two signed channels of A and B. Which ones, the host says.
//
// Determinism. One core sums all heads of a token, in an order that depends on the number of heads
// and the tile size only: halves are added pairwise within a tile of heads, tiles in order.
//
// Lane map in global memory, 32-bit words: for each of `terms` (angle_pieces) terms,
//   [coef_pitch] byte offset of each output lane in A | B,  [coef_pitch] its sign, f32;
// then [row_pitch] byte offset of each channel's source in its row, if the kernel permutes.
#pragma once

#include "rope_base.h"

namespace rope {

template <typename T, Pairs kPairs>
class AngleGrad {
    static constexpr bool kWide = sizeof(T) == 4;
    // f32: by Gather.
    static constexpr bool kPermute = kWide && kPairs == Pairs::kDeinterleave;
    static constexpr bool kGatherPartner = kWide && kPairs == Pairs::kAdjacent;
    // 16 bits: neighbours are taken apart. x is laid out as the input, g as the output.
    static constexpr bool kWordsG = !kWide && kPairs == Pairs::kAdjacent;
    static constexpr bool kWordsX = kWordsG || (!kWide && kPairs == Pairs::kDeinterleave);
    static constexpr bool kCopyX = !kWide || kPermute || kGatherPartner;

public:
    __aicore__ inline AngleGrad(TPipe& pipe, const Tiling& t) : pipe_(pipe), t_(t) {}

    __aicore__ inline void Run(GM_ADDR q, GM_ADDR k, GM_ADDR q_grad, GM_ADDR k_grad,
                               GM_ADDR angle_grad, GM_ADDR map) {
        if (IsBeyond(AscendC::GetBlockIdx(), AscendC::GetBlockNum())) return;
        Bind(q, k, q_grad, k_grad, angle_grad);
        InitBuffers(map);
        Parts parts(t_, AscendC::GetBlockIdx(), AscendC::GetBlockNum());
        Part part;
        while (parts.Next(part)) {
            LocalTensor<float> out = out_.AllocTensor<float>();
            // Tokens outermost: the sums of one token stay in the unified buffer.
            for (uint32_t token = 0; token < part.tokens; ++token) {
                AscendC::Duplicate(sums_, 0.0f, static_cast<int32_t>(2 * t_.row_pitch));
                for (uint32_t head = 0; head < part.head_end; head += t_.heads_per_tile) {
                    AddTile({part.batch, part.index + token, 1, head,
                             Min(t_.heads_per_tile, part.head_end - head)});
                }
                Combine(out, token * t_.coef_pitch);
            }
            out_.EnQue(out);
            out = out_.DeQue<float>();
            DataCopyExtParams copy;
            copy.blockCount = static_cast<uint16_t>(part.tokens);
            copy.blockLen = 2 * t_.angle_width * static_cast<uint32_t>(sizeof(float));
            DataCopyPad(angle_grad_[part.row * 2 * t_.angle_width], out, copy);
            out_.FreeTensor(out);
        }
    }

private:
    TPipe& pipe_;
    const Tiling& t_;
    GlobalTensor<T> x_gm_[kTensors], g_gm_[kTensors];
    GlobalTensor<float> angle_grad_;
    AscendC::TQue<TPosition::VECIN, 1> slots_;
    AscendC::TQue<TPosition::VECOUT, 1> out_;
    TBuf<TPosition::VECCALC> work_, sums_buffer_, term_, permutation_;
    TBuf<TPosition::VECIN> map_;
    // g*x and g*partner(x).
    LocalTensor<float> product_, across_;
    LocalTensor<float> x_, g_, sums_, map_words_;
    LocalTensor<uint32_t> offsets_;
    uint32_t segment_pitch_;

    __aicore__ inline void Bind(GM_ADDR q, GM_ADDR k, GM_ADDR q_grad, GM_ADDR k_grad,
                                GM_ADDR angle_grad) {
        GM_ADDR const x[kTensors] = {q, k};
        GM_ADDR const g[kTensors] = {q_grad, k_grad};
        for (uint32_t i = 0; i < kTensors; ++i) {
            x_gm_[i].SetGlobalBuffer(reinterpret_cast<__gm__ T*>(x[i]), t_.input[i].extent);
            g_gm_[i].SetGlobalBuffer(reinterpret_cast<__gm__ T*>(g[i]), t_.output[i].extent);
        }
        angle_grad_.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(angle_grad),
                                    t_.angle_rows * 2 * t_.angle_width);
    }

    __aicore__ inline void InitBuffers(GM_ADDR map) {
        const uint32_t tile = t_.heads_per_tile * t_.row_pitch;
        pipe_.InitBuffer(slots_, static_cast<uint8_t>(t_.slots),
                         2 * tile * static_cast<uint32_t>(sizeof(T)) + kSlackBytes);
        pipe_.InitBuffer(out_, 2,
                         t_.tokens_per_tile * t_.coef_pitch * static_cast<uint32_t>(sizeof(float)) +
                             kSlackBytes);
        segment_pitch_ = t_.row_pitch / t_.segments;
        const uint32_t work = t_.heads_per_tile * t_.row_pitch;
        const uint32_t copies = kWide ? (kCopyX ? 3 : 2) : 4;
        pipe_.InitBuffer(
            work_, copies * (work + kLanes) * static_cast<uint32_t>(sizeof(float)) + kSlackBytes);
        product_ = work_.Get<float>();
        across_ = product_[work + kLanes];
        if constexpr (kCopyX) x_ = product_[2 * (work + kLanes)];
        if constexpr (!kWide) g_ = product_[3 * (work + kLanes)];
        // What lies between the segments is added up with them; it has to be something.
        if (t_.segment_length != segment_pitch_) {
            AscendC::Duplicate(product_, 0.0f, static_cast<int32_t>(copies * (work + kLanes)));
        }
        pipe_.InitBuffer(sums_buffer_,
                         2 * t_.row_pitch * static_cast<uint32_t>(sizeof(float)) + kSlackBytes);
        sums_ = sums_buffer_.Get<float>();
        pipe_.InitBuffer(term_, t_.coef_pitch * static_cast<uint32_t>(sizeof(float)) + kSlackBytes);
        pipe_.InitBuffer(map_, t_.map_words * static_cast<uint32_t>(sizeof(float)) + kSlackBytes);
        map_words_ = map_.Get<float>();
        LoadWords(pipe_, map_words_, map, t_.map_words);
        if constexpr (kPermute || kGatherPartner) {
            pipe_.InitBuffer(permutation_,
                             work * static_cast<uint32_t>(sizeof(uint32_t)) + kSlackBytes);
            offsets_ = permutation_.Get<uint32_t>();
            RepeatOffsets(offsets_,
                          map_words_[2 * t_.angle_pieces * t_.coef_pitch]
                              .template ReinterpretCast<uint32_t>(),
                          t_.row_pitch, t_.heads_per_tile,
                          t_.row_pitch * static_cast<uint32_t>(sizeof(T)));
        }
    }

    __aicore__ inline void AddTile(const Tile& tile) {
        const uint32_t half = t_.heads_per_tile * t_.row_pitch;
        LocalTensor<T> slot = slots_.template AllocTensor<T>();
        for (uint32_t i = 0; i < kTensors; ++i) {
            MoveRows<T, true>(t_, tile, i, 0, slot, x_gm_[i]);
            LoadGradient(tile, i, slot[half]);
        }
        slots_.EnQue(slot);
        slot = slots_.template DeQue<T>();
        AddRows(slot, slot[half], tile.heads);
        slots_.FreeTensor(slot);
    }

    // The gradient is laid out as the output of the forward: its routes are the store's.
    __aicore__ inline void LoadGradient(const Tile& tile, uint32_t tensor,
                                        const LocalTensor<T>& ub) {
        MoveRows<T, true, false>(t_, tile, tensor, 0, ub, g_gm_[tensor]);
    }

    // Adds `rows` heads of one token to the sums.
    __aicore__ inline void AddRows(const LocalTensor<T>& x_data, const LocalTensor<T>& g_data,
                                   uint32_t rows) {
        const uint32_t elements = rows * t_.row_pitch;
        VectorBarrier();
        LocalTensor<float> x;
        if constexpr (kPermute) {
            AscendC::Gather(x_, x_data, offsets_, 0, elements);
            x = x_;
        } else {
            x = Widen<kWordsX>(x_, x_data, product_, rows);
        }
        const LocalTensor<float> g = Widen<kWordsG>(g_, g_data, across_, rows);
        LocalTensor<float> partner = x;
        if constexpr (kGatherPartner) {
            AscendC::Gather(x_, x_data, offsets_, 0, elements);
            partner = x_;
        }
        VectorBarrier();
        AscendC::Mul(product_, g, x, static_cast<int32_t>(elements));
        for (uint32_t k = 0; k < t_.segments; ++k) {
            const uint32_t other = t_.segments > 1 ? k ^ 1 : k;
            const Rows own{k * segment_pitch_, t_.row_pitch},
                across{other * segment_pitch_, t_.row_pitch};
            OverRows<Arithmetic::kMul>(across_, own, g, own, partner, across, t_.segment_length,
                                       rows);
        }
        Reduce(rows);
    }

    // sums += the rows of both products, by halves.
    __aicore__ inline void Reduce(uint32_t rows) {
        VectorBarrier();
        const int32_t pitch = static_cast<int32_t>(t_.row_pitch);
        while (rows > 1) {
            const uint32_t half = rows / 2, from = (rows - half) * t_.row_pitch;
            const int32_t count = static_cast<int32_t>(half) * pitch;
            AscendC::Add(product_, product_, product_[from], count);
            AscendC::Add(across_, across_, across_[from], count);
            VectorBarrier();
            rows -= half;
        }
        AscendC::Add(sums_, sums_, product_, pitch);
        AscendC::Add(sums_[t_.row_pitch], sums_[t_.row_pitch], across_, pitch);
        VectorBarrier();
    }

    // The rows of x or g as f32, in the order of the segments.
    template <bool kWords>
    __aicore__ inline LocalTensor<float> Widen(const LocalTensor<float>& copy,
                                               const LocalTensor<T>& data,
                                               const LocalTensor<float>& scratch, uint32_t rows) {
        if constexpr (kWide) {
            return data;
        } else if constexpr (kWords) {
            TakeApart(copy, data, scratch,
                      {t_.segment_length, segment_pitch_, rows, t_.row_pitch});
            return copy;
        } else {
            AscendC::Cast(copy, data, RoundMode::CAST_NONE, rows * t_.row_pitch);
            return copy;
        }
    }

    // The token's output row from its sums.
    __aicore__ inline void Combine(const LocalTensor<float>& out, uint32_t start) {
        const uint32_t pitch = t_.coef_pitch;
        const LocalTensor<float> gathered = term_.Get<float>();
        for (uint32_t term = 0; term < t_.angle_pieces; ++term) {
            const LocalTensor<float> words = map_words_[2 * term * pitch];
            const LocalTensor<float> row = out[start];
            AscendC::Gather(gathered, sums_, words.template ReinterpretCast<uint32_t>(), 0, pitch);
            VectorBarrier();
            if (term == 0) {
                AscendC::Mul(row, gathered, words[pitch], static_cast<int32_t>(pitch));
            } else {
                AscendC::Mul(gathered, gathered, words[pitch], static_cast<int32_t>(pitch));
                VectorBarrier();
                AscendC::Add(row, row, gathered, static_cast<int32_t>(pitch));
            }
            VectorBarrier();
        }
    }
};

}  // namespace rope
