// The parts of the gated delta rule between its products of matrices.
//
// Problem. In a chunk of 64 tokens, with P(i, j) = exp(sum of g after j up to i) for j up to i, and
// c(i) = the sum of g up to i,
//   A(i, j) = beta(i) <k(i), k(j)> P(i, j) for j before i, T = (1 + A)^-1
//   weights(i, j) = <q(i), k(j)> P(i, j)
// `DeltaPrepare` computes what the products take of q, k, v, g and beta; `DeltaLocal` computes T and
// the weights of the products with k. Tokens after the last are zeros. Numbers are f32.
//
// Data layout. A unit is a chunk of a head of v of a sample; of each, all dense:
//   qk      [2 chunk][key_dim]                    q, normalised and scaled; then k, normalised
//   driven  [chunk][value_dim + key_dim]          beta v, beta exp(c) k
//   left    [chunk][key_dim + chunk]              exp(sum of g after i) k; the weights, transposed
//   base    [key_dim + chunk][key_dim]            exp(c of the last token) I; exp(c) q
//   numbers [kDeltaNumbers][chunk]                g, beta, exp(c), exp(sum of g after i), and what
//                                                 normalises q and k
//   products [chunk][2 chunk]                     <k(j), q(i)>, <k(j), k(i)> in row j
//   decays, inverse [chunk][chunk]                P transposed, T
//   joint   [key_dim + 2 chunk][value_dim]        of the backward; the gradient of the output comes
//                                                 after key_dim rows
//
// Departures. Sums of g are added token by token from one of their ends, never differences of longer
// sums, which beside a token that forgets all would lose the digits of those that forget little. T
// is built by forward substitution, because powers of A exceed all precision if keys are similar:
//   T = I;  for each token j: T[i] -= A(i, j) T[j] for the rows i after j
// With P and A transposed, column j of A is a row, whose numbers Brcb spreads over blocks.
#pragma once

#include "rope_base.h"

namespace rope {

// Tokens of a chunk: one repeat holds a number of each.
constexpr uint32_t kChunk = kLanes;

// Moves rows of `length` elements to global memory, where they start `pitch` elements apart.
__aicore__ inline void StoreRows(const GlobalTensor<float>& gm, uint32_t pitch,
                                 const LocalTensor<float>& ub, Rows from, uint32_t length,
                                 uint32_t rows) {
    DataCopyExtParams copy;
    copy.blockCount = static_cast<uint16_t>(rows);
    copy.blockLen = length * static_cast<uint32_t>(sizeof(float));
    copy.srcStride = (from.stride - length) * static_cast<uint32_t>(sizeof(float)) / kBlockBytes;
    copy.dstStride = (pitch - length) * static_cast<uint32_t>(sizeof(float));
    DataCopyPad(gm, ub[from.start], copy);
}

// The addresses of DeltaPrepare.
struct DeltaAddresses {
    GM_ADDR q;
    GM_ADDR k;
    GM_ADDR v;
    GM_ADDR g;
    GM_ADDR beta;
    GM_ADDR qk;
    GM_ADDR driven;
    GM_ADDR left;
    GM_ADDR base;
    GM_ADDR numbers;
    GM_ADDR values;
    GM_ADDR gradient;
    GM_ADDR joint;
};

template <typename T>
class DeltaPrepare {
    static constexpr bool kWide = sizeof(T) == 4;
    static constexpr uint32_t kUnit = kBlockBytes / sizeof(float);
    static constexpr uint32_t kSpread = kChunk * kUnit;

public:
    __aicore__ inline DeltaPrepare(TPipe& pipe, const DeltaTiling& t) : pipe_(pipe), t_(t) {}

    __aicore__ inline void Run(const DeltaAddresses& a) {
        const uint64_t block = AscendC::GetBlockIdx(), blocks = AscendC::GetBlockNum();
        if (IsBeyond(block, blocks)) return;
        const uint64_t begin = t_.units * block / blocks, end = t_.units * (block + 1) / blocks;
        if (begin >= end) return;
        Bind(a);
        InitBuffers();
        for (uint64_t unit = begin; unit < end; ++unit) RunUnit(unit);
    }

private:
    TPipe& pipe_;
    const DeltaTiling& t_;
    GlobalTensor<T> q_, k_, v_, gradient_;
    GlobalTensor<float> g_, beta_gm_, qk_, driven_, left_, base_, numbers_, values_, joint_;
    AscendC::TQue<TPosition::VECIN, 1> raw_, columns_;
    AscendC::TQue<TPosition::VECOUT, 1> out_, numbers_out_;
    TBuf<TPosition::VECCALC> wide_, work_;
    // A number of each token, over a block: g, beta, exp(c), exp(sum of g after it), beta exp(c).
    LocalTensor<float> g_spread_, beta_, from_start_, to_end_, rate_;
    LocalTensor<float> factors_, ones_;
    uint32_t valid_;  // tokens of the unit's chunk

    template <typename E>
    __aicore__ inline static void Set(GlobalTensor<E>& gm, GM_ADDR address, uint64_t elements) {
        gm.SetGlobalBuffer(reinterpret_cast<__gm__ E*>(address), elements);
    }

    __aicore__ inline void Bind(const DeltaAddresses& a) {
        const uint64_t tokens = t_.matrices / t_.heads * t_.tokens;
        Set(q_, a.q, tokens * t_.key_heads * t_.key_dim);
        Set(k_, a.k, tokens * t_.key_heads * t_.key_dim);
        Set(v_, a.v, tokens * t_.heads * t_.value_dim);
        Set(g_, a.g, tokens * t_.heads);
        Set(beta_gm_, a.beta, tokens * t_.heads);
        Set(qk_, a.qk, t_.units * 2 * kChunk * t_.key_dim);
        Set(driven_, a.driven, t_.units * kChunk * (t_.value_dim + t_.key_dim));
        Set(left_, a.left, t_.units * kChunk * (t_.key_dim + kChunk));
        Set(base_, a.base, t_.units * (t_.key_dim + kChunk) * t_.key_dim);
        Set(numbers_, a.numbers, t_.units * kDeltaNumbers * kChunk);
        Set(values_, a.values, t_.units * kChunk * t_.value_dim);
        Set(gradient_, a.gradient, tokens * t_.heads * t_.value_dim);
        Set(joint_, a.joint, t_.units * (t_.key_dim + 2 * kChunk) * t_.value_dim);
    }

    __aicore__ inline void InitBuffers() {
        constexpr uint32_t kBytes = sizeof(float);
        constexpr uint32_t kInBlock = kBlockBytes / sizeof(T);
        const uint32_t widest = Max(t_.key_dim, t_.value_dim);
        const uint32_t tile = t_.row_tile * widest;
        pipe_.InitBuffer(raw_, 2, t_.row_tile * RoundUp(widest, kInBlock) *
                                          static_cast<uint32_t>(sizeof(T)) + kSlackBytes);
        pipe_.InitBuffer(columns_, 2, kSpread * kBytes + kSlackBytes);
        pipe_.InitBuffer(out_, 2, tile * kBytes + kSlackBytes);
        pipe_.InitBuffer(numbers_out_, 1, kDeltaNumbers * kChunk * kBytes + kSlackBytes);
        if constexpr (!kWide) pipe_.InitBuffer(wide_, tile * kBytes + kSlackBytes);
        pipe_.InitBuffer(work_, (6 * kSpread + kChunk) * kBytes + kSlackBytes);
        const LocalTensor<float> work = work_.Get<float>();
        g_spread_ = work;
        beta_ = work[kSpread];
        from_start_ = work[2 * kSpread];
        to_end_ = work[3 * kSpread];
        rate_ = work[4 * kSpread];
        factors_ = work[5 * kSpread];
        ones_ = work[6 * kSpread];
    }

    __aicore__ inline void RunUnit(uint64_t unit) {
        const uint64_t matrix = unit % t_.matrices;
        const uint64_t token = (t_.first_chunk + unit / t_.matrices) * kChunk;
        const uint64_t left = t_.tokens - token;
        valid_ = left < kChunk ? static_cast<uint32_t>(left) : kChunk;
        const uint64_t row = matrix / t_.heads * t_.tokens + token;
        const uint64_t head = matrix % t_.heads;
        LocalTensor<float> numbers = numbers_out_.AllocTensor<float>();
        Numbers(row * t_.heads + head, numbers);
        const uint64_t key_head = head / (t_.heads / t_.key_heads);
        const uint64_t key_row = (row * t_.key_heads + key_head) * t_.key_dim;
        const uint64_t value_row = (row * t_.heads + head) * t_.value_dim;
        for (uint32_t first = 0; first < kChunk; first += t_.row_tile) {
            Queries(unit, key_row, first, numbers[4 * kChunk + first]);
            Keys(unit, key_row, first, numbers[5 * kChunk + first]);
            Values(unit, value_row, first);
        }
        Through(unit);
        numbers_out_.EnQue(numbers);
        numbers = numbers_out_.DeQue<float>();
        constexpr uint32_t kCount = kDeltaNumbers * kChunk;
        DataCopyPad(numbers_[unit * kCount], numbers, OneRun<float>(kCount));
        numbers_out_.FreeTensor(numbers);
    }

    // A number of each token of a head, in a row, and over blocks.
    __aicore__ inline void Column(const GlobalTensor<float>& gm, const LocalTensor<float>& row,
                                  const LocalTensor<float>& spread) {
        LocalTensor<float> column = columns_.AllocTensor<float>();
        DataCopyExtParams copy;
        copy.blockCount = static_cast<uint16_t>(valid_);
        copy.blockLen = static_cast<uint32_t>(sizeof(float));
        copy.srcStride = (t_.heads - 1) * static_cast<uint32_t>(sizeof(float));
        DataCopyPadExtParams<float> pad;
        pad.isPad = true;
        pad.rightPadding = static_cast<uint8_t>(kUnit - 1);
        DataCopyPad(column, gm, copy, pad);
        columns_.EnQue(column);
        column = columns_.DeQue<float>();
        if (valid_ < kChunk) {
            AscendC::Duplicate(column[valid_ * kUnit], 0.0f,
                               static_cast<int32_t>((kChunk - valid_) * kUnit));
            VectorBarrier();
        }
        FirstOfBlocks(row, column);
        columns_.FreeTensor(column);
        VectorBarrier();
        AscendC::Brcb(spread, row, static_cast<uint8_t>(kChunk / kUnit),
                      AscendC::BrcbRepeatParams(1, kUnit));
    }

    __aicore__ inline static void FirstOfBlocks(const LocalTensor<float>& row,
                                                const LocalTensor<float>& blocks) {
        AscendC::WholeReduceSum(row, blocks, 1, static_cast<int32_t>(kChunk), 1, 1, 1);
    }

    __aicore__ inline void Numbers(uint64_t at, const LocalTensor<float>& numbers) {
        Column(g_[at], numbers, g_spread_);
        Column(beta_gm_[at], numbers[kChunk], beta_);
        constexpr int32_t kBlock = static_cast<int32_t>(kUnit);
        constexpr int32_t kAll = static_cast<int32_t>(kSpread);
        constexpr uint32_t kLast = (kChunk - 1) * kUnit;
        AscendC::Duplicate(to_end_[kLast], 0.0f, kBlock);
        AscendC::Muls(from_start_, g_spread_, 1.0f, kAll);
        for (uint32_t i = kUnit; i <= kLast; i += kUnit) {
            VectorBarrier();
            AscendC::Add(from_start_[i], from_start_[i], from_start_[i - kUnit], kBlock);
            const uint32_t j = kLast - i;
            AscendC::Add(to_end_[j], to_end_[j + kUnit], g_spread_[j + kUnit], kBlock);
        }
        VectorBarrier();
        AscendC::Exp(from_start_, from_start_, kAll);
        AscendC::Exp(to_end_, to_end_, kAll);
        VectorBarrier();
        AscendC::Mul(rate_, beta_, from_start_, kAll);
        FirstOfBlocks(numbers[2 * kChunk], from_start_);
        FirstOfBlocks(numbers[3 * kChunk], to_end_);
    }

    // The rows of a tile in f32, zeros after the last token.
    __aicore__ inline LocalTensor<float> Load(const GlobalTensor<T>& gm, uint32_t pitch,
                                              uint32_t width, uint32_t first,
                                              LocalTensor<T>& raw) {
        constexpr uint32_t kInBlock = kBlockBytes / sizeof(T);
        const uint32_t rows = valid_ > first ? Min(valid_ - first, t_.row_tile) : 0;
        const uint32_t padded = RoundUp(width, kInBlock);
        raw = raw_.AllocTensor<T>();
        if (rows > 0) {
            DataCopyExtParams copy;
            copy.blockCount = static_cast<uint16_t>(rows);
            copy.blockLen = width * static_cast<uint32_t>(sizeof(T));
            copy.srcStride = (pitch - width) * static_cast<uint32_t>(sizeof(T));
            DataCopyPadExtParams<T> pad;
            pad.isPad = padded != width;
            pad.rightPadding = static_cast<uint8_t>(padded - width);
            DataCopyPad(raw, gm[static_cast<uint64_t>(first) * pitch], copy, pad);
        }
        raw_.EnQue(raw);
        raw = raw_.template DeQue<T>();
        LocalTensor<float> x;
        // Of all work areas: writes come after the reads of the tile before.
        VectorBarrier();
        if constexpr (kWide) {
            x = raw;
        } else {
            x = wide_.Get<float>();
            if (rows > 0) {
                ConvertRows(x, Rows{0, width}, raw, Rows{0, padded}, RoundMode::CAST_NONE, width,
                            rows);
            }
        }
        if (rows < t_.row_tile) {
            AscendC::Duplicate(x[rows * width], 0.0f,
                               static_cast<int32_t>((t_.row_tile - rows) * width));
        }
        VectorBarrier();
        return x;
    }

    // out = x * factor / sqrt(sum of squares + epsilon) of each row; what normalises goes to `norms`.
    __aicore__ inline void Normalise(const LocalTensor<float>& out, const LocalTensor<float>& x,
                                     const LocalTensor<float>& norms, float factor) {
        const Rows rows{0, t_.key_dim};
        const uint32_t width = t_.key_dim, count = t_.row_tile;
        const int32_t n = static_cast<int32_t>(count);
        OverRows<Arithmetic::kMul>(out, rows, x, rows, x, rows, width, count);
        for (uint32_t lane = kLanes; lane < width; lane += kLanes) {
            VectorBarrier();
            OverRows<Arithmetic::kAdd>(out, rows, out, rows, out, Rows{lane, width},
                                       Min(width - lane, kLanes), count);
        }
        VectorBarrier();
        AscendC::WholeReduceSum(norms, out, static_cast<int32_t>(Min(width, kLanes)), n, 1, 1,
                                static_cast<int32_t>(width / kUnit));
        AscendC::Duplicate(ones_, 1.0f, n);
        VectorBarrier();
        AscendC::Adds(norms, norms, t_.epsilon, n);
        VectorBarrier();
        AscendC::Sqrt(norms, norms, n);
        VectorBarrier();
        AscendC::Div(norms, ones_, norms, n);
        VectorBarrier();
        AscendC::Muls(ones_, norms, factor, n);
        VectorBarrier();
        AscendC::Brcb(factors_, ones_, static_cast<uint8_t>(count / kUnit),
                      AscendC::BrcbRepeatParams(1, kUnit));
        VectorBarrier();
        ByRow(out, x, factors_, width);
    }

    // out = x * the row's number.
    __aicore__ inline void ByRow(const LocalTensor<float>& out, const LocalTensor<float>& x,
                                 const LocalTensor<float>& blocks, uint32_t width) {
        const Rows rows{0, width};
        OverRows<Arithmetic::kMul, true>(out, rows, x, rows, blocks, Rows{0, kUnit}, width,
                                         t_.row_tile);
    }

    // Stores a tile of rows; its slot can still be read.
    __aicore__ inline void Store(const GlobalTensor<float>& gm, uint32_t pitch,
                                 LocalTensor<float>& tile, uint32_t width, uint32_t rows) {
        out_.EnQue(tile);
        tile = out_.DeQue<float>();
        StoreRows(gm, pitch, tile, Rows{0, width}, width, rows);
    }

    // Stores x * the row's number.
    __aicore__ inline void StoreScaled(const GlobalTensor<float>& gm, uint32_t pitch,
                                       const LocalTensor<float>& x,
                                       const LocalTensor<float>& blocks, uint32_t width) {
        LocalTensor<float> out = out_.AllocTensor<float>();
        VectorBarrier();
        ByRow(out, x, blocks, width);
        Store(gm, pitch, out, width, t_.row_tile);
        out_.FreeTensor(out);
    }

    __aicore__ inline void Queries(uint64_t unit, uint64_t from, uint32_t first,
                                   const LocalTensor<float>& norms) {
        const uint32_t width = t_.key_dim;
        LocalTensor<T> raw;
        const LocalTensor<float> x = Load(q_[from], t_.key_heads * width, width, first, raw);
        LocalTensor<float> q = out_.AllocTensor<float>();
        Normalise(q, x, norms, t_.scale);
        raw_.FreeTensor(raw);
        Store(qk_[(unit * 2 * kChunk + first) * width], width, q, width, t_.row_tile);
        StoreScaled(base_[(unit * (width + kChunk) + width + first) * width], width, q,
                    from_start_[first * kUnit], width);
        out_.FreeTensor(q);
    }

    __aicore__ inline void Keys(uint64_t unit, uint64_t from, uint32_t first,
                                const LocalTensor<float>& norms) {
        const uint32_t width = t_.key_dim, driven = t_.value_dim + width;
        LocalTensor<T> raw;
        const LocalTensor<float> x = Load(k_[from], t_.key_heads * width, width, first, raw);
        LocalTensor<float> k = out_.AllocTensor<float>();
        Normalise(k, x, norms, 1.0f);
        raw_.FreeTensor(raw);
        const uint64_t row = unit * kChunk + first;
        Store(qk_[(row + (unit + 1) * kChunk) * width], width, k, width, t_.row_tile);
        StoreScaled(driven_[row * driven + t_.value_dim], driven, k, rate_[first * kUnit], width);
        StoreScaled(left_[row * (width + kChunk)], width + kChunk, k, to_end_[first * kUnit],
                    width);
        out_.FreeTensor(k);
    }

    __aicore__ inline void Values(uint64_t unit, uint64_t from, uint32_t first) {
        const uint32_t width = t_.value_dim, driven = width + t_.key_dim;
        LocalTensor<T> raw;
        const LocalTensor<float> x = Load(v_[from], t_.heads * width, width, first, raw);
        const uint64_t row = unit * kChunk + first;
        StoreScaled(driven_[row * driven], driven, x, beta_[first * kUnit], width);
        if (t_.keeps) StoreWide(values_[row * width], x, width);
        raw_.FreeTensor(raw);
        if (t_.keeps) {
            const LocalTensor<float> dout =
                Load(gradient_[from], t_.heads * width, width, first, raw);
            const uint64_t joint = unit * (t_.key_dim + 2 * kChunk) + t_.key_dim + first;
            StoreWide(joint_[joint * width], dout, width);
            raw_.FreeTensor(raw);
        }
    }

    __aicore__ inline void StoreWide(const GlobalTensor<float>& gm, const LocalTensor<float>& x,
                                     uint32_t width) {
        LocalTensor<float> out = out_.AllocTensor<float>();
        AscendC::Muls(out, x, 1.0f, static_cast<int32_t>(t_.row_tile * width));
        Store(gm, width, out, width, t_.row_tile);
        out_.FreeTensor(out);
    }

    // exp(c of the last token) I.
    __aicore__ inline void Through(uint64_t unit) {
        const uint32_t width = t_.key_dim;
        const LocalTensor<float> last = from_start_[(kChunk - 1) * kUnit];
        for (uint32_t first = 0; first < width; first += t_.row_tile) {
            const uint32_t rows = Min(width - first, t_.row_tile);
            LocalTensor<float> out = out_.AllocTensor<float>();
            AscendC::Duplicate(out, 0.0f, static_cast<int32_t>(rows * width));
            VectorBarrier();
            for (uint32_t row = 0; row < rows; ++row) {
                const uint32_t lane = (first + row) % kLanes;
                const LocalTensor<float> lanes = out[row * width + first + row - lane];
                uint64_t mask[2] = {uint64_t{1} << lane, 0};
                AscendC::Add(lanes, lanes, last, mask, 1,
                             AscendC::BinaryRepeatParams(1, 1, 0, 8, 8, 0));
            }
            Store(base_[(unit * (width + kChunk) + first) * width], width, out, width, rows);
            out_.FreeTensor(out);
        }
    }
};

class DeltaLocal {
    static constexpr uint32_t kUnit = kBlockBytes / sizeof(float);
    static constexpr uint32_t kSquare = kChunk * kChunk;
    static constexpr uint32_t kPitch = 2 * kChunk;  // of a row of the products
    static constexpr uint32_t kSpread = kChunk * kUnit;
    // The logarithm of 0, finite: no product with it is NaN.
    static constexpr float kForgotten = -1e30f;

public:
    __aicore__ inline DeltaLocal(TPipe& pipe, const DeltaTiling& t) : pipe_(pipe), t_(t) {}

    __aicore__ inline void Run(GM_ADDR products, GM_ADDR numbers, GM_ADDR left, GM_ADDR inverse,
                               GM_ADDR decays) {
        const uint64_t block = AscendC::GetBlockIdx(), blocks = AscendC::GetBlockNum();
        if (IsBeyond(block, blocks)) return;
        const uint64_t begin = t_.units * block / blocks, end = t_.units * (block + 1) / blocks;
        if (begin >= end) return;
        Set(products_, products, t_.units * kChunk * kPitch);
        Set(numbers_, numbers, t_.units * kDeltaNumbers * kChunk);
        Set(left_, left, t_.units * kChunk * (t_.key_dim + kChunk));
        Set(inverse_, inverse, t_.units * kSquare);
        Set(decays_, decays, t_.units * kSquare);
        constexpr uint32_t kBytes = sizeof(float);
        pipe_.InitBuffer(slots_, 2, kChunk * kPitch * kBytes + kSlackBytes);
        pipe_.InitBuffer(rates_, 2, 2 * kChunk * kBytes + kSlackBytes);
        pipe_.InitBuffer(inverse_out_, 1, kSquare * kBytes + kSlackBytes);
        pipe_.InitBuffer(decays_out_, 1, kSquare * kBytes + kSlackBytes);
        pipe_.InitBuffer(work_, (2 * kSquare + 2 * kSpread) * kBytes + kSlackBytes);
        empty_ = work_.Get<float>();
        terms_ = empty_[kSquare];
        spread_ = terms_[kSquare];
        // The logarithms of P before any g: 0 on the diagonal, nothing below it.
        AscendC::Duplicate(empty_, kForgotten, static_cast<int32_t>(kSquare));
        VectorBarrier();
        Diagonal(empty_, 0.0f);
        for (uint64_t unit = begin; unit < end; ++unit) RunUnit(unit);
    }

private:
    TPipe& pipe_;
    const DeltaTiling& t_;
    GlobalTensor<float> products_, numbers_, left_, inverse_, decays_;
    AscendC::TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> slots_;
    AscendC::TQue<TPosition::VECIN, 1> rates_;
    AscendC::TQue<TPosition::VECOUT, 1> inverse_out_, decays_out_;
    TBuf<TPosition::VECCALC> work_;
    LocalTensor<float> empty_, terms_, spread_;

    __aicore__ inline static void Set(GlobalTensor<float>& gm, GM_ADDR address, uint64_t elements) {
        gm.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(address), elements);
    }

    __aicore__ inline static void Diagonal(const LocalTensor<float>& square, float value) {
        for (uint32_t i = 0; i < kChunk; ++i) {
            uint64_t mask[2] = {uint64_t{1} << i, 0};
            AscendC::Duplicate(square[i * kChunk], value, mask, 1, 1, 8);
        }
    }

    __aicore__ inline static void Spread(const LocalTensor<float>& blocks,
                                         const LocalTensor<float>& row, uint32_t count) {
        AscendC::Brcb(blocks, row, static_cast<uint8_t>(count / kUnit),
                      AscendC::BrcbRepeatParams(1, kUnit));
    }

    __aicore__ inline void RunUnit(uint64_t unit) {
        LocalTensor<float> slot = LoadRun<float>(slots_, products_[unit * kChunk * kPitch],
                                                 kChunk * kPitch);
        // g and beta come first.
        LocalTensor<float> rates = rates_.AllocTensor<float>();
        DataCopyPad(rates, numbers_[unit * kDeltaNumbers * kChunk], OneRun<float>(2 * kChunk),
                    DataCopyPadExtParams<float>());
        rates_.EnQue(rates);
        rates = rates_.DeQue<float>();
        LocalTensor<float> decays = decays_out_.AllocTensor<float>();
        // Writes of this unit to the work area come after the reads of the previous one.
        VectorBarrier();
        Decays(decays, rates);
        const Rows square{0, kChunk}, queries{0, kPitch}, keys{kChunk, kPitch};
        OverRows<Arithmetic::kMul>(slot, queries, slot, queries, decays, square, kChunk, kChunk);
        OverRows<Arithmetic::kMul>(slot, keys, slot, keys, decays, square, kChunk, kChunk);
        VectorBarrier();
        OverRows<Arithmetic::kMul>(slot, keys, slot, keys, rates, Rows{kChunk, 0}, kChunk, kChunk);
        rates_.FreeTensor(rates);
        decays_out_.EnQue(decays);
        decays = decays_out_.DeQue<float>();
        if (t_.keeps) DataCopyPad(decays_[unit * kSquare], decays, OneRun<float>(kSquare));
        decays_out_.FreeTensor(decays);
        LocalTensor<float> inverse = inverse_out_.AllocTensor<float>();
        Invert(inverse, slot[kChunk]);
        StoreRun(inverse_out_, inverse, inverse_[unit * kSquare], kSquare);
        slots_.EnQue<TPosition::VECOUT, TPosition::GM, float>(slot);
        slot = slots_.DeQue<TPosition::VECOUT, TPosition::GM, float>();
        const uint32_t pitch = t_.key_dim + kChunk;
        StoreRows(left_[unit * kChunk * pitch + t_.key_dim], pitch, slot, queries, kChunk, kChunk);
        slots_.FreeTensor(slot);
    }

    // P transposed: row j is row j + 1 and g of token j + 1, for the tokens after j.
    __aicore__ inline void Decays(const LocalTensor<float>& decays,
                                  const LocalTensor<float>& rates) {
        AscendC::Adds(decays, empty_, 0.0f, static_cast<int32_t>(kSquare));
        Spread(spread_, rates, kChunk);
        for (uint32_t j = kChunk - 1; j-- > 0;) {
            VectorBarrier();
            uint64_t mask[2] = {~uint64_t{0} << (j + 1), 0};
            AscendC::Add(decays[j * kChunk], decays[(j + 1) * kChunk], spread_[(j + 1) * kUnit],
                         mask, 1, AscendC::BinaryRepeatParams(1, 1, 0, 8, 8, 0));
        }
        VectorBarrier();
        AscendC::Exp(decays, decays, static_cast<int32_t>(kSquare));
        VectorBarrier();
    }

    // inverse = (1 + A)^-1; row j of `a`, in the pitch of the products, has A(i, j) for i after j.
    __aicore__ inline void Invert(const LocalTensor<float>& inverse, const LocalTensor<float>& a) {
        VectorBarrier();
        AscendC::Duplicate(inverse, 0.0f, static_cast<int32_t>(kSquare));
        SpreadColumn(a, 0);
        VectorBarrier();
        Diagonal(inverse, 1.0f);
        for (uint32_t j = 0; j + 1 < kChunk; ++j) {
            const uint32_t row = j + 1, own = row % kUnit * kUnit;
            const uint64_t mask = row;
            const uint8_t rows = static_cast<uint8_t>(kChunk - row);
            const LocalTensor<float> terms = terms_[row * kChunk], rest = inverse[row * kChunk];
            VectorBarrier();
            AscendC::Mul(terms, inverse[j * kChunk], spread_[j % 2 * kSpread + own], mask, rows,
                         AscendC::BinaryRepeatParams(1, 1, 0, 8, 0, 1));
            if (row + 1 < kChunk) SpreadColumn(a, row);
            VectorBarrier();
            AscendC::Sub(rest, rest, terms, mask, rows,
                         AscendC::BinaryRepeatParams(1, 1, 1, 8, 8, 8));
        }
    }

    // Column j of A over blocks, from the aligned row before its first: in turns in two areas.
    __aicore__ inline void SpreadColumn(const LocalTensor<float>& a, uint32_t j) {
        const uint32_t first = (j + 1) / kUnit * kUnit;
        Spread(spread_[j % 2 * kSpread], a[j * kPitch + first], kChunk - first);
    }
};

}  // namespace rope
