// Shared by the rotary kernels: which tiles a core takes, how rows move, arithmetic over rows.
//
// Map in global memory, 32-bit words, for the rotation:
//   [coef_pitch] byte offset of each coefficient in the token's angles     (if expand)
//   [coef_pitch] sign of each coefficient, f32                             (if expand)
//   [row_pitch]  byte offset of each channel's source in its row           (if the kernel permutes)
#pragma once

#include "kernel_operator.h"
#include "rope_tiling.h"

namespace rope {

using AscendC::DataCopyExtParams;
using AscendC::DataCopyPad;
using AscendC::DataCopyPadExtParams;
using AscendC::GlobalTensor;
using AscendC::HardEvent;
using AscendC::LocalTensor;
using AscendC::RoundMode;
using AscendC::TBuf;
using AscendC::TPipe;
using AscendC::TPosition;

constexpr uint32_t kBlockBytes = 32;
constexpr uint32_t kLanes = 64;          // f32 of one vector repeat
constexpr uint32_t kMaxRepeats = 255;    // of one vector instruction
constexpr uint32_t kMaxRowStride = 255;  // blocks between repeats
// After each buffer: an instruction with a mask still spans whole repeats, and their blocks should
// not reach into another operand.
constexpr uint32_t kSlackBytes = 256;

// The pairings as the kernel sees them.
enum class Pairs : uint8_t {
    kSplit,         // segments: half and quarter
    kAdjacent,      // neighbours
    kDeinterleave,  // neighbours in, halves out
    kInterleave,    // halves in, neighbours out: the adjoint of the former
    kMatrix,        // any: a product with a matrix moves the channels (rope_matrix.h)
};

// Whether a T is the upper half of an f32.
template <typename T>
constexpr bool kUpperHalf = false;
template <>
constexpr bool kUpperHalf<bfloat16_t> = true;

__aicore__ inline uint32_t RoundUp(uint32_t value, uint32_t unit) {
    return (value + unit - 1) / unit * unit;
}
__aicore__ inline uint32_t Min(uint32_t a, uint32_t b) { return a < b ? a : b; }
__aicore__ inline uint64_t MinOf(uint64_t a, uint64_t b) { return a < b ? a : b; }
__aicore__ inline uint32_t Max(uint32_t a, uint32_t b) { return a < b ? b : a; }

// Orders dependent vector instructions. dav-3510 does so itself.
__aicore__ inline void VectorBarrier() {
#if __NPU_ARCH__ == 2201
    AscendC::PipeBarrier<PIPE_V>();
#endif
}

// Whether a core has no share of the work, and must not touch memory. So it is if the kernel was
// compiled for more kinds of cores than it states: two vector cores a block have twice the numbers.
__aicore__ inline bool IsBeyond(uint64_t block, uint64_t blocks) { return block >= blocks; }

// A transfer of a run of elements.
template <typename T>
__aicore__ inline DataCopyExtParams OneRun(uint32_t count) {
    DataCopyExtParams copy;
    copy.blockCount = 1;
    copy.blockLen = count * static_cast<uint32_t>(sizeof(T));
    return copy;
}

// Moves `count` rows of `length` elements between global memory, `gm_pitch` elements apart, and
// the unified buffer, `ub_pitch` elements apart.
template <typename E>
__aicore__ inline DataCopyExtParams Rectangle(uint32_t count, uint32_t length, uint64_t gm_pitch,
                                              uint32_t ub_pitch, bool loads) {
    constexpr uint32_t kSize = sizeof(E);
    const uint32_t gm_gap = static_cast<uint32_t>((gm_pitch - length) * kSize);
    const uint32_t ub_gap =
        (ub_pitch * kSize - RoundUp(length * kSize, kBlockBytes)) / kBlockBytes;
    DataCopyExtParams copy;
    copy.blockCount = static_cast<uint16_t>(count);
    copy.blockLen = length * kSize;
    copy.srcStride = loads ? gm_gap : ub_gap;
    copy.dstStride = loads ? ub_gap : gm_gap;
    return copy;
}

template <typename E>
__aicore__ inline DataCopyPadExtParams<E> Padding(uint32_t length) {
    constexpr uint32_t kElements = kBlockBytes / sizeof(E);
    const uint32_t padded = RoundUp(length, kElements);
    DataCopyPadExtParams<E> pad;
    pad.isPad = padded != length;
    pad.rightPadding = static_cast<uint8_t>(padded - length);
    return pad;
}

// Loads a run of elements into a slot that also stores.
template <typename T, typename Slots>
__aicore__ inline LocalTensor<T> LoadRun(Slots& slots, const GlobalTensor<T>& gm, uint32_t count) {
    LocalTensor<T> slot = slots.template AllocTensor<T>();
    DataCopyPad(slot, gm, OneRun<T>(count), DataCopyPadExtParams<T>());
    slots.template EnQue<TPosition::GM, TPosition::VECIN, T>(slot);
    return slots.template DeQue<TPosition::GM, TPosition::VECIN, T>();
}

// Stores a slot and gives it back.
template <typename T, typename Slots>
__aicore__ inline void StoreRun(Slots& slots, LocalTensor<T>& slot, const GlobalTensor<T>& gm,
                                uint32_t count) {
    slots.template EnQue<TPosition::VECOUT, TPosition::GM, T>(slot);
    slot = slots.template DeQue<TPosition::VECOUT, TPosition::GM, T>();
    DataCopyPad(gm, slot, OneRun<T>(count));
    slots.FreeTensor(slot);
}

// A run of tokens of one batch, with a range of their heads (q's heads, then k's).
struct Part {
    uint64_t batch, index, row;  // index of the first token in its batch, row of its angles
    uint32_t tokens, head_begin, head_end;
};

// The parts of vector core `block` of `blocks`. The work is tokens * head_groups units, cut evenly.
class Parts {
public:
    __aicore__ inline Parts(const Tiling& t, uint64_t block, uint64_t blocks) : t_(t) {
        const uint64_t units = t.tokens * t.head_groups;
        unit_ = units * block / blocks;
        end_ = units * (block + 1) / blocks;
    }

    __aicore__ inline bool Next(Part& part) {
        if (unit_ >= end_) return false;
        const uint64_t token = unit_ / t_.head_groups;
        const uint32_t group = static_cast<uint32_t>(unit_ % t_.head_groups);
        const uint64_t left = end_ - unit_;
        const uint32_t heads = t_.heads[0] + t_.heads[1];
        part.batch = token / t_.seq;
        part.index = token % t_.seq;
        part.row = part.batch * t_.angle_batch_stride + part.index;
        const uint64_t whole = left / t_.head_groups;
        if (group == 0 && whole > 0) {
            const uint64_t in_batch = t_.seq - part.index;
            part.tokens = static_cast<uint32_t>(whole < in_batch ? whole : in_batch);
            part.tokens = Min(part.tokens, t_.tokens_per_tile);
            part.head_begin = 0;
            part.head_end = heads;
            unit_ += static_cast<uint64_t>(part.tokens) * t_.head_groups;
        } else {
            const uint64_t rest = t_.head_groups - group;
            const uint32_t groups = static_cast<uint32_t>(left < rest ? left : rest);
            part.tokens = 1;
            part.head_begin = heads * group / t_.head_groups;
            part.head_end = heads * (group + groups) / t_.head_groups;
            unit_ += groups;
        }
        return true;
    }

private:
    const Tiling& t_;
    uint64_t unit_, end_;
};

// One tile in the unified buffer.
struct Tile {
    uint64_t batch, index;
    uint32_t tokens, head_begin, heads;
};

// An axis of a transfer: n steps, gm apart in global memory and ub in the unified buffer.
struct Axis {
    uint32_t n;
    uint64_t gm;
    uint32_t ub;
};

// A span of the rows of one tensor: where it lies in global memory and in the unified buffer.
struct SpanRows {
    const Tensor& shape;
    const Span& span;
    const Route& route;
    uint32_t first, last;  // the tensor's heads, counted over q's and then k's
    uint32_t row, start;   // elements between rows in the unified buffer, and before the first
};

// Moves the rows that belong to `tile`. One call of DataCopyPad where the layout allows.
template <typename T, bool kLoad>
__aicore__ inline void MoveSpan(const SpanRows& rows, const Tile& tile, bool head_major,
                                const LocalTensor<T>& ub, const GlobalTensor<T>& gm) {
    const Tensor& shape = rows.shape;
    const Span& span = rows.span;
    const Route& route = rows.route;
    const uint32_t row = rows.row, first = rows.first;
    const uint32_t begin = Max(tile.head_begin, first);
    const uint32_t end = Min(tile.head_begin + tile.heads, rows.last);
    if (begin >= end) return;

    constexpr uint32_t kUnit = kBlockBytes / sizeof(T);
    const uint32_t piece = RoundUp(span.length, kUnit);
    const uint32_t token_step = head_major ? row : tile.heads * row;
    const uint32_t head_step = head_major ? tile.tokens * row : row;
    Axis axes[3] = {
        {span.pieces, span.length, piece},
        {end - begin, shape.head_stride, head_step},
        {tile.tokens, shape.token_stride, token_step},
    };
    uint32_t run = span.length;
    if (route.fold == kFoldPieces) {
        axes[1] = {axes[1].n * span.pieces, span.length, piece};
        axes[0].n = 1;
    } else if (route.fold != kFoldNone) {
        Axis& folded = route.fold == kFoldHeads ? axes[1] : axes[2];
        run *= folded.n;
        folded.n = 1;
    }
    const Axis counted = axes[route.count];
    axes[route.count].n = 1;

    const uint64_t gm_base = tile.batch * shape.batch_stride + tile.index * shape.token_stride +
                             (begin - first) * shape.head_stride + span.channel;
    const uint32_t ub_base = rows.start + (begin - tile.head_begin) * head_step;
    const uint32_t padded = RoundUp(run, kUnit);
    DataCopyExtParams copy;
    copy.blockCount = static_cast<uint16_t>(counted.n);
    copy.blockLen = run * static_cast<uint32_t>(sizeof(T));
    // The host counts an axis only if its gap has 32 bits, the width of this field on dav-2201.
    const auto gm_gap =
        static_cast<uint32_t>(counted.n > 1 ? (counted.gm - run) * sizeof(T) : 0);
    const uint32_t ub_gap = counted.n > 1 ? (counted.ub - padded) / kUnit : 0;
    for (uint32_t i = 0; i < axes[2].n; ++i) {
        for (uint32_t j = 0; j < axes[1].n; ++j) {
            for (uint32_t k = 0; k < axes[0].n; ++k) {
                const uint64_t from = gm_base + i * axes[2].gm + j * axes[1].gm + k * axes[0].gm;
                const uint32_t to = ub_base + i * axes[2].ub + j * axes[1].ub + k * axes[0].ub;
                if constexpr (kLoad) {
                    copy.srcStride = gm_gap;
                    copy.dstStride = ub_gap;
                    DataCopyPadExtParams<T> pad;
                    pad.isPad = padded != run;
                    pad.rightPadding = static_cast<uint8_t>(padded - run);
                    DataCopyPad(ub[to], gm[from], copy, pad);
                } else {
                    copy.srcStride = ub_gap;
                    copy.dstStride = gm_gap;
                    DataCopyPad(gm[from], ub[to], copy);
                }
            }
        }
    }
}

// Moves the rows of q or k. `kLoad` is the direction, `kInput` says whose layout the rows have.
template <typename T, bool kLoad, bool kInput = kLoad>
__aicore__ inline void MoveRows(const Tiling& t, const Tile& tile, uint32_t tensor,
                                uint32_t span_index, const LocalTensor<T>& ub,
                                const GlobalTensor<T>& gm) {
    const Span& span = kInput ? t.load[span_index] : t.store[span_index];
    const uint32_t piece = RoundUp(span.length, kBlockBytes / static_cast<uint32_t>(sizeof(T)));
    const uint32_t first = tensor == 0 ? 0 : t.heads[0];
    const SpanRows rows{
        kInput ? t.input[tensor] : t.output[tensor],
        span,
        kInput ? t.load_route[span_index][tensor] : t.store_route[span_index][tensor],
        first,
        first + t.heads[tensor],
        span_index == 0 ? t.row_pitch : piece,
        0};
    MoveSpan<T, kLoad>(rows, tile, t.head_major != 0, ub, gm);
}

// Rows in the unified buffer: start (element) and distance (elements, a multiple of 32 bytes).
struct Rows {
    uint32_t start, stride;
};

enum class Arithmetic : uint8_t { kMul, kAdd, kSub };

// dst = a (op) b over `lanes` leading lanes of `rows` rows. Rows that are narrower than a repeat
// are taken in turns, so that no repeat reaches into the next. With `kBlock` a row of b is one
// block of 32 bytes, for all lanes.
template <Arithmetic kOp, bool kBlock = false>
__aicore__ inline void OverRows(const LocalTensor<float>& dst, Rows d,
                                const LocalTensor<float>& first, Rows a,
                                const LocalTensor<float>& second, Rows b, uint32_t lanes,
                                uint32_t rows) {
    constexpr uint32_t kUnit = kBlockBytes / sizeof(float);
    const uint32_t turns = Min(rows, (kLanes + d.stride - 1) / d.stride);
    // A repeat's step has eight bits; rows that lie further apart are taken one by one.
    const uint32_t furthest = turns * Max(d.stride, Max(a.stride, b.stride)) / kUnit;
    const uint32_t most = furthest > kMaxRowStride ? 1 : kMaxRepeats;
    const AscendC::BinaryRepeatParams step(1, 1, kBlock ? 0 : 1,
                                           static_cast<uint8_t>(turns * d.stride / kUnit),
                                           static_cast<uint8_t>(turns * a.stride / kUnit),
                                           static_cast<uint8_t>(turns * b.stride / kUnit));
    for (uint32_t turn = 0; turn < turns; ++turn) {
        const uint32_t own = (rows - turn + turns - 1) / turns;
        for (uint32_t done = 0; done < own; done += most) {
            const uint8_t repeats = static_cast<uint8_t>(Min(own - done, most));
            const uint32_t row = turn + done * turns;
            for (uint32_t lane = 0; lane < lanes; lane += kLanes) {
                const uint64_t mask = Min(lanes - lane, kLanes);
                const LocalTensor<float> out = dst[d.start + row * d.stride + lane];
                const LocalTensor<float> x = first[a.start + row * a.stride + lane];
                const LocalTensor<float> y = second[b.start + row * b.stride + (kBlock ? 0 : lane)];
                if constexpr (kOp == Arithmetic::kMul) AscendC::Mul(out, x, y, mask, repeats, step);
                if constexpr (kOp == Arithmetic::kAdd) AscendC::Add(out, x, y, mask, repeats, step);
                if constexpr (kOp == Arithmetic::kSub) AscendC::Sub(out, x, y, mask, repeats, step);
            }
        }
    }
}

// dst = src * coefficient of the row's token, over one segment of every row of the tile. One
// instruction runs along the inner or the outer axis, whichever is longer.
__aicore__ inline void ScaleSegment(const Tiling& t, const Tile& tile,
                                    const LocalTensor<float>& dst, uint32_t dst_start,
                                    const LocalTensor<float>& src, uint32_t src_start,
                                    const LocalTensor<float>& coef, uint32_t coef_start) {
    constexpr uint32_t kUnit = kBlockBytes / sizeof(float);
    const uint32_t pitch = t.row_pitch;
    const uint32_t inner = t.head_major ? tile.tokens : tile.heads;
    const uint32_t outer = t.head_major ? tile.heads : tile.tokens;
    const uint32_t inner_coef = t.head_major ? t.coef_pitch : 0;
    const uint32_t outer_coef = t.head_major ? 0 : t.coef_pitch;
    const uint32_t line = inner * pitch;
    if (outer <= inner || line / kUnit > kMaxRowStride) {
        for (uint32_t o = 0; o < outer; ++o) {
            OverRows<Arithmetic::kMul>(
                dst, Rows{dst_start + o * line, pitch}, src, Rows{src_start + o * line, pitch},
                coef, Rows{coef_start + o * outer_coef, inner_coef}, t.segment_length, inner);
        }
    } else {
        for (uint32_t i = 0; i < inner; ++i) {
            OverRows<Arithmetic::kMul>(
                dst, Rows{dst_start + i * pitch, line}, src, Rows{src_start + i * pitch, line},
                coef, Rows{coef_start + i * inner_coef, outer_coef}, t.segment_length, outer);
        }
    }
}

// dst = src converted, over the `lanes` at the start of each row. One side is f32, the other has 16
// bits.
template <typename D, typename S>
__aicore__ inline void ConvertRows(const LocalTensor<D>& dst, Rows d, const LocalTensor<S>& src,
                                   Rows s, RoundMode mode, uint32_t lanes, uint32_t rows) {
    const AscendC::UnaryRepeatParams step(
        1, 1, static_cast<uint8_t>(d.stride * sizeof(D) / kBlockBytes),
        static_cast<uint8_t>(s.stride * sizeof(S) / kBlockBytes));
    for (uint32_t row = 0; row < rows; row += kMaxRepeats) {
        const uint8_t repeats = static_cast<uint8_t>(Min(rows - row, kMaxRepeats));
        for (uint32_t lane = 0; lane < lanes; lane += kLanes) {
            AscendC::Cast(dst[d.start + row * d.stride + lane],
                          src[s.start + row * s.stride + lane], mode,
                          static_cast<uint64_t>(Min(lanes - lane, kLanes)), repeats, step);
        }
    }
}

// What happens to the words of OverWords.
enum class WordOp : uint8_t {
    kUp,          // << 16
    kDown,        // >> 16
    kDownSigned,  // >> 16, keeping the sign
    kLow,         // the lower half is copied, the upper one of dst stays
    kHigh,        // the upper half is copied, the lower one of dst stays
};

// dst = op(src) over the 32-bit `lanes` at the start of each row.
template <WordOp kOp>
__aicore__ inline void OverWords(const LocalTensor<float>& dst, Rows d,
                                 const LocalTensor<float>& src, Rows s, uint32_t lanes,
                                 uint32_t rows) {
    constexpr uint32_t kUnit = kBlockBytes / sizeof(float);
    const uint8_t d_step = static_cast<uint8_t>(d.stride / kUnit);
    const uint8_t s_step = static_cast<uint8_t>(s.stride / kUnit);
    const AscendC::UnaryRepeatParams step(1, 1, d_step, s_step);
    for (uint32_t row = 0; row < rows; row += kMaxRepeats) {
        const uint8_t repeats = static_cast<uint8_t>(Min(rows - row, kMaxRepeats));
        for (uint32_t lane = 0; lane < lanes; lane += kLanes) {
            const uint32_t words = Min(lanes - lane, kLanes);
            const LocalTensor<float> to = dst[d.start + row * d.stride + lane];
            const LocalTensor<float> from = src[s.start + row * s.stride + lane];
            if constexpr (kOp == WordOp::kUp) {
                AscendC::ShiftLeft(to.template ReinterpretCast<uint32_t>(),
                                   from.template ReinterpretCast<uint32_t>(),
                                   static_cast<uint32_t>(16), words, repeats, step);
            } else if constexpr (kOp == WordOp::kDown) {
                AscendC::ShiftRight(to.template ReinterpretCast<uint32_t>(),
                                    from.template ReinterpretCast<uint32_t>(),
                                    static_cast<uint32_t>(16), words, repeats, step);
            } else if constexpr (kOp == WordOp::kDownSigned) {
                AscendC::ShiftRight(to.template ReinterpretCast<int32_t>(),
                                    from.template ReinterpretCast<int32_t>(), 16, words, repeats,
                                    step);
            } else {
                // A bit for each half of a word, 32 words in each element of the mask.
                constexpr uint64_t kHalves =
                    kOp == WordOp::kLow ? 0x5555555555555555 : 0xaaaaaaaaaaaaaaaa;
                constexpr uint32_t kEach = 32;
                const uint32_t low = Min(words, kEach), high = words - low;
                uint64_t mask[2] = {kHalves >> (2 * (kEach - low)),
                                    high > 0 ? kHalves >> (2 * (kEach - high)) : 0};
                AscendC::Copy(to.template ReinterpretCast<uint16_t>(),
                              from.template ReinterpretCast<uint16_t>(), mask, repeats,
                              AscendC::CopyRepeatParams(1, 1, d_step, s_step));
            }
        }
    }
}

// Rows of pairs of 16-bit neighbours. In a slot a pair is one 32-bit word; in the work area its
// members are f32 in two segments.
struct PairRows {
    uint32_t pairs;  // of a row
    uint32_t pitch;  // f32 of a segment
    uint32_t rows;
    uint32_t row;        // elements of a row
    uint32_t start = 0;  // of a row's pairs

    __aicore__ inline Rows Slot() const { return {start / 2, row / 2}; }
    __aicore__ inline Rows First() const { return {start, row}; }
    __aicore__ inline Rows Second() const { return {start + pitch, row}; }
    __aicore__ inline uint32_t Elements() const { return rows * row; }
};

// x = the members of the pairs in `data`. `scratch` is as large as x.
//
// A bfloat16 moved into the upper half of a word is its value as f32. A half has to be converted;
// so the words are narrowed as integers, which keeps every bit.
template <typename T>
__aicore__ inline void TakeApart(const LocalTensor<float>& x, const LocalTensor<T>& data,
                                 const LocalTensor<float>& scratch, const PairRows& p) {
    const LocalTensor<float> words = data.template ReinterpretCast<float>();
    if constexpr (kUpperHalf<T>) {
        OverWords<WordOp::kUp>(x, p.First(), words, p.Slot(), p.pairs, p.rows);
        OverWords<WordOp::kDown>(scratch, p.Second(), words, p.Slot(), p.pairs, p.rows);
        VectorBarrier();
        OverWords<WordOp::kUp>(x, p.Second(), scratch, p.Second(), p.pairs, p.rows);
    } else {
        OverWords<WordOp::kUp>(scratch, p.First(), words, p.Slot(), p.pairs, p.rows);
        OverWords<WordOp::kDownSigned>(x, p.Second(), words, p.Slot(), p.pairs, p.rows);
        VectorBarrier();
        OverWords<WordOp::kDownSigned>(x, p.First(), scratch, p.First(), p.pairs, p.rows);
        VectorBarrier();
        AscendC::Cast(scratch.template ReinterpretCast<int16_t>(),
                      x.template ReinterpretCast<int32_t>(), RoundMode::CAST_NONE, p.Elements());
        VectorBarrier();
        AscendC::Cast(x, scratch.template ReinterpretCast<T>(), RoundMode::CAST_NONE,
                      p.Elements());
    }
}

// The inverse: rounds x, to nearest even, and puts its pairs into `data`. x is used up.
template <typename T>
__aicore__ inline void PutTogether(const LocalTensor<T>& data, const LocalTensor<float>& x,
                                   const LocalTensor<float>& scratch, const PairRows& p) {
    const LocalTensor<float> words = data.template ReinterpretCast<float>();
    const LocalTensor<T> rounded = scratch.template ReinterpretCast<T>();
    AscendC::Cast(rounded, x, RoundMode::CAST_RINT, p.Elements());
    VectorBarrier();
    if constexpr (kUpperHalf<T>) {
        AscendC::Cast(x, rounded, RoundMode::CAST_NONE, p.Elements());
        VectorBarrier();
        OverWords<WordOp::kDown>(words, p.Slot(), x, p.First(), p.pairs, p.rows);
        VectorBarrier();
        OverWords<WordOp::kHigh>(words, p.Slot(), x, p.Second(), p.pairs, p.rows);
    } else {
        // Widened as integers; only the way to 32 bits leads over f32, which holds 16 of them.
        AscendC::Cast(x, scratch.template ReinterpretCast<int16_t>(), RoundMode::CAST_NONE,
                      p.Elements());
        VectorBarrier();
        AscendC::Cast(x.template ReinterpretCast<int32_t>(), x, RoundMode::CAST_RINT, p.Elements());
        VectorBarrier();
        OverWords<WordOp::kUp>(words, p.Slot(), x, p.Second(), p.pairs, p.rows);
        VectorBarrier();
        OverWords<WordOp::kLow>(words, p.Slot(), x, p.First(), p.pairs, p.rows);
    }
}

// Exchanges the members of adjacent 16-bit pairs: both halves of each 32-bit word. `scratch` holds
// four bytes for each element; the result is in its second half.
template <typename T>
__aicore__ inline LocalTensor<T> SwapHalves(const LocalTensor<T>& x,
                                            const LocalTensor<float>& scratch, uint32_t elements) {
    static_assert(sizeof(T) == 2, "a pair is one word");
    const uint32_t words = elements / 2;
    const LocalTensor<uint32_t> high = scratch.template ReinterpretCast<uint32_t>();
    const LocalTensor<uint32_t> low = high[words];
    const LocalTensor<uint32_t> source = x.template ReinterpretCast<uint32_t>();
    AscendC::ShiftLeft(high, source, static_cast<uint32_t>(16), static_cast<int32_t>(words));
    AscendC::ShiftRight(low, source, static_cast<uint32_t>(16), static_cast<int32_t>(words));
    VectorBarrier();
    AscendC::Or(low.template ReinterpretCast<uint16_t>(), high.template ReinterpretCast<uint16_t>(),
                low.template ReinterpretCast<uint16_t>(), static_cast<int32_t>(elements));
    VectorBarrier();
    return low.template ReinterpretCast<T>();
}

// Brings `words` words of a small table into the unified buffer, before the first tile.
__aicore__ inline void LoadWords(TPipe& pipe, const LocalTensor<float>& ub, GM_ADDR address,
                                 uint32_t words) {
    GlobalTensor<float> gm;
    gm.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(address), words);
    DataCopyExtParams copy;
    copy.blockCount = 1;
    copy.blockLen = words * static_cast<uint32_t>(sizeof(float));
    DataCopyPad(ub, gm, copy, DataCopyPadExtParams<float>());
    const auto id = pipe.AllocEventID<HardEvent::MTE2_V>();
    AscendC::SetFlag<HardEvent::MTE2_V>(id);
    AscendC::WaitFlag<HardEvent::MTE2_V>(id);
    pipe.ReleaseEventID<HardEvent::MTE2_V>(id);
}

// Brings the angles of the part's tokens into the queue, as they are laid out in global memory.
__aicore__ inline void LoadAngles(const Tiling& t, const Part& part,
                                  AscendC::TQue<TPosition::VECIN, 1>& queue,
                                  const GlobalTensor<float>& gm) {
    LocalTensor<float> raw = queue.AllocTensor<float>();
    const uint32_t padded = RoundUp(t.angle_length, kBlockBytes / sizeof(float));
    DataCopyExtParams copy;
    copy.blockCount = static_cast<uint16_t>(part.tokens * t.angle_pieces);
    copy.blockLen = t.angle_length * static_cast<uint32_t>(sizeof(float));
    DataCopyPadExtParams<float> pad;
    pad.isPad = padded != t.angle_length;
    pad.rightPadding = static_cast<uint8_t>(padded - t.angle_length);
    DataCopyPad(raw, gm[part.row * 2 * t.angle_width], copy, pad);
    queue.EnQue(raw);
}

// Repeats a row of byte offsets for `rows` rows that are `row_bytes` apart. The first barrier of a
// tile orders their use.
__aicore__ inline void RepeatOffsets(const LocalTensor<uint32_t>& dst,
                                     const LocalTensor<uint32_t>& row, uint32_t pitch,
                                     uint32_t rows, uint32_t row_bytes) {
    for (uint32_t i = 0; i < rows; ++i) {
        AscendC::Adds(dst[i * pitch].template ReinterpretCast<int32_t>(),
                      row.template ReinterpretCast<int32_t>(), static_cast<int32_t>(i * row_bytes),
                      static_cast<int32_t>(pitch));
    }
}

}  // namespace rope
