// x @ R by the cube unit, for the rotation y = x*a + (x @ R)*b.
//
// Problem. What moves the other member of a pair into place depends on the pairing, and costs the
// vector unit more for some of them. R is a signed permutation of the rotated channels, so that the
// product does it for all pairings in the same time, and exactly: each of its sums has one term
// that is not zero. Where the members of a pair change their places (interleave-half) x itself is
// permuted as well: x @ [P | R], `products` of 2.
//
// Data layout. A cube core works for its two vector cores, tile by tile as they do, so that a row
// has the number in the product that it has in the vector core's slot.
//
//   L1   R, and the rows of two tiles      Nz: 16 channels of all rows, then the next 16
//   L0A  the rows of two tiles             Zz
//   L0B  R, resident                       Zn
//   L0C  two products in f32               Nz
//   workspace in global memory, [vector core][2 steps][product][row][channel], 16 bits: on dav-2201
//        the units share no buffer, so the product crosses the L2 cache
//
// Pseudo code, of the cube core and of each vector core.
//   load R: GM to L1 to L0B, once               for each tile of this core (rope_rotate.h):
//   for each step:                                wait for kProductReady
//     wait for kProductTaken (from the third on)  load the product and the rows      MTE2
//     for the tile of each vector core:           set kProductTaken                  MTE2
//       load its rows into L1          MTE2       y = x*a + product*b                V
//       L1 to L0A                      MTE1       store y                            MTE3
//       L0C = L0A x L0B                M        then take part in the other's steps
//       L0C to the workspace           FIX
//     set kProductReady                FIX
//
// What is not finite spreads over its row: 0 * inf is NaN. The vector kernels keep it to its pair.
#pragma once

#include "rope_base.h"

namespace rope {

// Flags between a cube core and its vector cores, and between what modes: mode 2 of
// CrossCoreSetFlag.
constexpr uint16_t kProductReady = 0, kProductTaken = 1;
constexpr uint8_t kCubeAndVectors = 2;
constexpr uint32_t kVectorsOfCube = 2;
constexpr uint32_t kProductsInFlight = 2;  // of each vector core
constexpr uint32_t kFractal = 16;          // rows and channels

// The tiles of one vector core, in its order.
class Tiles {
public:
    __aicore__ inline Tiles(const Tiling& t, uint64_t block, uint64_t blocks)
        : t_(t), parts_(t, block, blocks) {}

    __aicore__ inline bool Next(Tile& tile) {
        if (head_ >= heads_) {
            if (!parts_.Next(part_)) return false;
            head_ = 0;
            heads_ = part_.head_end - part_.head_begin;
        }
        tile = {part_.batch, part_.index, part_.tokens, part_.head_begin + head_,
                Min(t_.heads_per_tile, heads_ - head_)};
        head_ += t_.heads_per_tile;
        return true;
    }

private:
    const Tiling& t_;
    Parts parts_;
    Part part_{};
    uint32_t head_ = 0, heads_ = 0;
};

// Elements of the workspace before the product of a vector core's step.
__aicore__ inline uint64_t ProductStart(const Tiling& t, uint64_t vector, uint64_t step) {
    const uint64_t rows = static_cast<uint64_t>(t.tokens_per_tile) * t.heads_per_tile;
    return (vector * kProductsInFlight + step % kProductsInFlight) * t.products * rows *
           t.row_pitch;
}

// Two halves of a buffer, taken in turns by a pipe that fills and one that empties.
template <HardEvent kFilled, HardEvent kEmptied>
class Halves {
public:
    __aicore__ inline explicit Halves(TPipe& pipe) : pipe_(pipe) {
        for (uint32_t i = 0; i < kVectorsOfCube; ++i) {
            filled_[i] = pipe.AllocEventID<kFilled>();
            emptied_[i] = pipe.AllocEventID<kEmptied>();
            AscendC::SetFlag<kEmptied>(emptied_[i]);
        }
    }
    __aicore__ inline void BeginFill(uint32_t half) { AscendC::WaitFlag<kEmptied>(emptied_[half]); }
    __aicore__ inline void EndFill(uint32_t half) { AscendC::SetFlag<kFilled>(filled_[half]); }
    __aicore__ inline void BeginTake(uint32_t half) { AscendC::WaitFlag<kFilled>(filled_[half]); }
    __aicore__ inline void EndTake(uint32_t half) { AscendC::SetFlag<kEmptied>(emptied_[half]); }
    __aicore__ inline void End() {
        for (uint32_t i = 0; i < kVectorsOfCube; ++i) {
            AscendC::WaitFlag<kEmptied>(emptied_[i]);
            pipe_.ReleaseEventID<kFilled>(filled_[i]);
            pipe_.ReleaseEventID<kEmptied>(emptied_[i]);
        }
    }

private:
    TPipe& pipe_;
    AscendC::TEventID filled_[kVectorsOfCube], emptied_[kVectorsOfCube];
};

template <typename T>
class Multiply {
public:
    __aicore__ inline Multiply(TPipe& pipe, const Tiling& t)
        : pipe_(pipe), t_(t), l1_(pipe), l0_(pipe), l0c_(pipe) {}

    __aicore__ inline void Run(GM_ADDR q, GM_ADDR k, GM_ADDR matrix, GM_ADDR workspace) {
        GM_ADDR const input[kTensors] = {q, k};
        for (uint32_t i = 0; i < kTensors; ++i)
            in_[i].SetGlobalBuffer(reinterpret_cast<__gm__ T*>(input[i]), t_.input[i].extent);
        const uint64_t cube = AscendC::GetBlockIdx(), cubes = AscendC::GetBlockNum();
        const uint64_t vectors = cubes * kVectorsOfCube;
        workspace_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(workspace),
                                   ProductStart(t_, vectors, 0));
        InitBuffers();
        LoadMatrix(matrix);
        Tiles first(t_, cube * kVectorsOfCube, vectors);
        Tiles second(t_, cube * kVectorsOfCube + 1, vectors);
        uint64_t step = 0;
        for (Tile tile[kVectorsOfCube]{};; ++step) {
            const bool has[kVectorsOfCube] = {first.Next(tile[0]), second.Next(tile[1])};
            if (!has[0] && !has[1]) break;
            if (step >= kProductsInFlight) AscendC::CrossCoreWaitFlag(kProductTaken);
            for (uint32_t i = 0; i < kVectorsOfCube; ++i) {
                if (has[i]) Product(tile[i], i, ProductStart(t_, cube * kVectorsOfCube + i, step));
            }
            AscendC::CrossCoreSetFlag<kCubeAndVectors, PIPE_FIX>(kProductReady);
        }
        // The last products; no flag may be left for the next kernel.
        const uint64_t left = step < kProductsInFlight ? step : kProductsInFlight;
        for (uint64_t i = 0; i < left; ++i) AscendC::CrossCoreWaitFlag(kProductTaken);
        l1_.End();
        l0_.End();
        l0c_.End();
    }

private:
    TPipe& pipe_;
    const Tiling& t_;
    GlobalTensor<T> in_[kTensors], workspace_;
    Halves<HardEvent::MTE2_MTE1, HardEvent::MTE1_MTE2> l1_;
    Halves<HardEvent::MTE1_M, HardEvent::M_MTE1> l0_;
    Halves<HardEvent::M_FIX, HardEvent::FIX_M> l0c_;
    TBuf<TPosition::A1> rows_l1_;
    TBuf<TPosition::B1> matrix_l1_;
    TBuf<TPosition::A2> rows_l0_;
    TBuf<TPosition::B2> matrix_l0_;
    TBuf<TPosition::CO1> sums_;
    uint32_t half_rows_;  // rows of a tile, in whole fractals

    __aicore__ inline uint32_t Columns() const { return t_.products * t_.row_pitch; }

    __aicore__ inline void InitBuffers() {
        half_rows_ = RoundUp(t_.tokens_per_tile * t_.heads_per_tile, kFractal);
        const uint32_t bytes = static_cast<uint32_t>(sizeof(T));
        const uint32_t rows = kVectorsOfCube * half_rows_ * t_.row_pitch * bytes;
        const uint32_t matrix = t_.row_pitch * Columns() * bytes;
        pipe_.InitBuffer(rows_l1_, rows);
        pipe_.InitBuffer(matrix_l1_, matrix);
        pipe_.InitBuffer(rows_l0_, rows);
        pipe_.InitBuffer(matrix_l0_, matrix);
        pipe_.InitBuffer(sums_, kVectorsOfCube * half_rows_ * Columns() *
                                    static_cast<uint32_t>(sizeof(float)));
    }

    // R, or P and R side by side, into L0B.
    __aicore__ inline void LoadMatrix(GM_ADDR address) {
        GlobalTensor<T> gm;
        gm.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(address),
                           static_cast<uint64_t>(t_.row_pitch) * Columns());
        const LocalTensor<T> l1 = matrix_l1_.template Get<T>();
        const LocalTensor<T> l0 = matrix_l0_.template Get<T>();
        const uint16_t inner = static_cast<uint16_t>(t_.row_pitch);
        const uint16_t columns = static_cast<uint16_t>(Columns());
        AscendC::DataCopy(l1, gm,
                          AscendC::Nd2NzParams(1, inner, columns, 0, columns, inner, 1, 0));
        const auto id = pipe_.AllocEventID<HardEvent::MTE2_MTE1>();
        AscendC::SetFlag<HardEvent::MTE2_MTE1>(id);
        AscendC::WaitFlag<HardEvent::MTE2_MTE1>(id);
        pipe_.ReleaseEventID<HardEvent::MTE2_MTE1>(id);
        // A row of fractals at a time, each transposed.
        const uint32_t across = Columns() / kFractal;
        for (uint32_t i = 0; i < t_.row_pitch / kFractal; ++i) {
            AscendC::LoadData(
                l0[i * across * kFractal * kFractal], l1[i * kFractal * kFractal],
                AscendC::LoadData2DParams(0, static_cast<uint8_t>(across),
                                          static_cast<uint16_t>(t_.row_pitch / kFractal), 0, 0,
                                          true, 0));
        }
    }

    __aicore__ inline void Product(const Tile& tile, uint32_t half, uint64_t start) {
        const uint32_t rows = tile.tokens * tile.heads;
        const uint32_t whole = RoundUp(rows, kFractal);
        const LocalTensor<T> l1 = rows_l1_.template Get<T>()[half * half_rows_ * t_.row_pitch];
        const LocalTensor<T> l0 = rows_l0_.template Get<T>()[half * half_rows_ * t_.row_pitch];
        const LocalTensor<float> sums =
            sums_.template Get<float>()[half * half_rows_ * Columns()];

        l1_.BeginFill(half);
        for (uint32_t i = 0; i < kTensors; ++i) LoadRows(tile, i, l1, whole);
        // With one row the product would take it for a plain vector: a second one, of no use.
        if (rows == 1) {
            for (uint32_t i = 0; i < kTensors; ++i) LoadRows(tile, i, l1[kFractal], whole);
        }
        l1_.EndFill(half);

        l1_.BeginTake(half);
        l0_.BeginFill(half);
        const uint32_t inner = t_.row_pitch / kFractal;
        for (uint32_t i = 0; i < whole / kFractal; ++i) {
            AscendC::LoadData(
                l0[i * inner * kFractal * kFractal], l1[i * kFractal * kFractal],
                AscendC::LoadData2DParams(0, static_cast<uint8_t>(inner),
                                          static_cast<uint16_t>(whole / kFractal), 0, 0, false, 0));
        }
        l1_.EndTake(half);
        l0_.EndFill(half);

        l0_.BeginTake(half);
        l0c_.BeginFill(half);
        AscendC::Mmad(sums, l0, matrix_l0_.template Get<T>(),
                      AscendC::MmadParams(static_cast<uint16_t>(Max(rows, 2)),
                                          static_cast<uint16_t>(Columns()),
                                          static_cast<uint16_t>(t_.row_pitch), 0, false, true));
        l0_.EndTake(half);
        l0c_.EndFill(half);

        l0c_.BeginTake(half);
        constexpr QuantMode_t kRounding =
            kUpperHalf<T> ? QuantMode_t::F322BF16 : QuantMode_t::F322F16;
        for (uint32_t i = 0; i < t_.products; ++i) {
            AscendC::Fixpipe(
                workspace_[start + static_cast<uint64_t>(i) * rows * t_.row_pitch],
                sums[i * t_.row_pitch * whole],
                AscendC::FixpipeParamsV220(static_cast<uint16_t>(t_.row_pitch),
                                           static_cast<uint16_t>(rows),
                                           static_cast<uint16_t>(whole), t_.row_pitch, false,
                                           kRounding, 0, 1, 0, 0, 0));
        }
        l0c_.EndTake(half);
    }

    // The rows of q or k that belong to `tile`, at their numbers in the tile's slot.
    __aicore__ inline void LoadRows(const Tile& tile, uint32_t tensor, const LocalTensor<T>& l1,
                                    uint32_t whole) {
        constexpr uint64_t kMostStride = 65535;
        const Tensor& shape = t_.input[tensor];
        const uint32_t first = tensor == 0 ? 0 : t_.heads[0];
        const uint32_t begin = Max(tile.head_begin, first);
        const uint32_t end = Min(tile.head_begin + tile.heads, first + t_.heads[tensor]);
        if (begin >= end) return;
        uint32_t inner = t_.head_major ? tile.tokens : end - begin;
        uint32_t outer = t_.head_major ? end - begin : tile.tokens;
        const uint64_t inner_stride = t_.head_major ? shape.token_stride : shape.head_stride;
        const uint64_t outer_stride = t_.head_major ? shape.head_stride : shape.token_stride;
        const uint32_t outer_rows = t_.head_major ? tile.tokens : tile.heads;
        const uint32_t row = (begin - tile.head_begin) * (t_.head_major ? tile.tokens : 1);
        const uint64_t from = tile.batch * shape.batch_stride + tile.index * shape.token_stride +
                              (begin - first) * shape.head_stride + t_.load[0].channel;
        // Rows without gaps are one matrix.
        if (outer_rows == inner && outer_stride == inner * inner_stride) {
            inner *= outer;
            outer = 1;
        }
        const bool by_rows = inner > 1 && inner_stride > kMostStride;
        const bool by_matrices = by_rows || (outer > 1 && outer_stride > kMostStride);
        AscendC::Nd2NzParams copy;
        copy.ndNum = static_cast<uint16_t>(by_matrices ? 1 : outer);
        copy.nValue = static_cast<uint16_t>(by_rows ? 1 : inner);
        copy.dValue = static_cast<uint16_t>(t_.load[0].length);
        copy.srcNdMatrixStride =
            static_cast<uint16_t>(by_matrices || outer == 1 ? 0 : outer_stride);
        copy.srcDValue = static_cast<uint16_t>(by_rows || inner == 1 ? t_.load[0].length
                                                                     : inner_stride);
        copy.dstNzC0Stride = static_cast<uint16_t>(whole);
        copy.dstNzNStride = 1;
        copy.dstNzMatrixStride = static_cast<uint16_t>(outer == 1 ? 0 : outer_rows * kFractal);
        for (uint32_t o = 0; o < (by_matrices ? outer : 1); ++o) {
            for (uint32_t i = 0; i < (by_rows ? inner : 1); ++i) {
                AscendC::DataCopy(l1[(row + o * outer_rows + i) * kFractal],
                                  in_[tensor][from + o * outer_stride + i * inner_stride], copy);
            }
        }
    }
};

}  // namespace rope
