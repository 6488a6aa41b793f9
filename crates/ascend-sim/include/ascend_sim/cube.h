// The cube unit of dav-2201: matrices from global memory to L1, from there to L0A and L0B, their
// product in L0C, and from there back to global memory.
//
// Matrices lie in fractals of 512 bytes, 16 x 16 elements of 16 bits. In L1 and L0C (Nz) the
// fractals of a column of fractals follow one another, in L0A (Zz) those of a row; both hold rows
// inside. In L0B (Zn) fractals follow one another along a row of fractals and hold columns inside.
// A position has no memory of what layout was meant: a wrong one gives wrong results, or reads what
// was never written.
#pragma once

#include "cast.h"
#include "queues.h"

namespace ascend_sim {

constexpr std::uint32_t kFractal = 16;  // rows and columns of 16-bit elements
constexpr std::uint32_t kFractalBytes = 512;
constexpr std::int64_t kMostMatrix = 4095;

inline void require_position(const Op& op, AscendC::TPosition found, Space wanted,
                             const char* role) {
    using AscendC::TPosition;
    const bool in_core = found == TPosition::VECIN || found == TPosition::VECOUT ||
                         found == TPosition::VECCALC || found == TPosition::GM;
    if (in_core || space_of(found) != wanted)
        block().stop("cube-parameter", op.at, "%s: %s is a tensor at %s, it has to be in %s",
                     op.name, role, position_name(found), kSpaceNames[wanted]);
}

template <class T>
constexpr bool is_cube_type = std::is_same_v<T, half> || std::is_same_v<T, bfloat16_t>;

}  // namespace ascend_sim

namespace AscendC {

// Rows and columns in elements; distances in the destination in 32 bytes, but the last one.
struct Nd2NzParams {
    Nd2NzParams() = default;
    Nd2NzParams(std::uint16_t matrices, std::uint16_t rows, std::uint16_t columns,
                std::uint16_t source_matrix, std::uint16_t source_row, std::uint16_t target_column,
                std::uint16_t target_row, std::uint16_t target_matrix)
        : ndNum(matrices),
          nValue(rows),
          dValue(columns),
          srcNdMatrixStride(source_matrix),
          srcDValue(source_row),
          dstNzC0Stride(target_column),
          dstNzNStride(target_row),
          dstNzMatrixStride(target_matrix) {}
    Narrow16 ndNum = 0;
    Narrow16 nValue = 0;
    Narrow16 dValue = 0;
    Narrow16 srcNdMatrixStride = 0;
    Narrow16 srcDValue = 0;
    Narrow16 dstNzC0Stride = 0;
    Narrow16 dstNzNStride = 0;
    Narrow16 dstNzMatrixStride = 0;
};

struct LoadData2DParams {
    LoadData2DParams() = default;
    LoadData2DParams(std::uint16_t start, std::uint8_t repeats, std::uint16_t source_stride,
                     std::uint8_t, std::uint16_t target_gap, bool transpose,
                     std::uint8_t descending)
        : startIndex(start),
          dstGap(target_gap),
          srcStride(source_stride),
          ifTranspose(transpose),
          repeatTimes(repeats),
          addrMode(descending) {}
    Narrow16 startIndex = 0;
    Narrow16 dstGap = 0;
    Narrow16 srcStride = 0;
    bool ifTranspose = false;
    Narrow8 repeatTimes = 0;
    std::uint8_t sid = 0;
    std::uint8_t addrMode = 0;
};

struct MmadParams {
    MmadParams() = default;
    MmadParams(std::uint16_t rows, std::uint16_t columns, std::uint16_t inner, std::uint8_t unit,
               bool from_bias, bool from_zero)
        : m(rows), n(columns), k(inner), unitFlag(unit), cmatrixSource(from_bias),
          cmatrixInitVal(from_zero) {}
    Narrow16 m = 0;
    Narrow16 n = 0;
    Narrow16 k = 0;
    std::uint8_t unitFlag = 0;
    bool cmatrixSource = false;
    bool cmatrixInitVal = true;
};

struct FixpipeParamsV220 {
    FixpipeParamsV220() = default;
    FixpipeParamsV220(std::uint16_t columns, std::uint16_t rows, std::uint16_t source_stride,
                      std::uint32_t target_stride, bool relu, QuantMode_t conversion,
                      std::int64_t scale, std::uint16_t matrices, std::uint16_t source_matrix,
                      std::uint16_t target_matrix, std::uint8_t unit)
        : nSize(columns),
          mSize(rows),
          srcStride(source_stride),
          dstStride(target_stride),
          quantPre(conversion),
          deqScalar(scale),
          ndNum(matrices),
          srcNdStride(source_matrix),
          dstNdStride(target_matrix),
          reluEn(relu),
          unitFlag(unit) {}
    Narrow16 nSize = 0;
    Narrow16 mSize = 0;
    Narrow16 srcStride = 0;
    Narrow32 dstStride = 0;
    QuantMode_t quantPre = QuantMode_t::NoQuant;
    std::int64_t deqScalar = 0;
    Narrow16 ndNum = 1;
    Narrow16 srcNdStride = 0;
    Narrow16 dstNdStride = 0;
    bool reluEn = false;
    std::uint8_t unitFlag = 0;
};

enum class CO2Layout : std::uint8_t { NZ, ROW_MAJOR };
struct FixpipeConfig {
    CO2Layout format;
};
inline constexpr FixpipeConfig CFG_ROW_MAJOR{CO2Layout::ROW_MAJOR};

// Rows from global memory into fractals in L1. Columns are filled with zeros up to 32 bytes.
template <class T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const Nd2NzParams& p,
              ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    static_assert(is_cube_type<T>, "the simulator models matrices of half and bfloat16_t");
    Block& running = block();
    const Op op = running.begin_on(true, "DataCopy(L1, GM)", at, kPipeMte2, type_name<T>());
    require_position(op, dst.GetPosition(), kL1, "dst");
    require_element_aligned<T>(running, op, src.view());
    constexpr const char* kKind = "cube-parameter";
    require_range(kKind, op, "ndNum", p.ndNum, 0, 4095);
    require_range(kKind, op, "nValue", p.nValue, 0, 16384);
    require_range(kKind, op, "dValue", p.dValue, 0, kMaxShort);
    require_range(kKind, op, "srcNdMatrixStride", p.srcNdMatrixStride, 0, kMaxShort);
    require_range(kKind, op, "srcDValue", p.srcDValue, 1, kMaxShort);
    require_range(kKind, op, "dstNzC0Stride", p.dstNzC0Stride, 1, 16384);
    require_range(kKind, op, "dstNzNStride", p.dstNzNStride, 1, 16384);
    require_range(kKind, op, "dstNzMatrixStride", p.dstNzMatrixStride, 0, 16384);
    if (p.ndNum == 0 || p.nValue == 0 || p.dValue == 0) return;
    running.require_aligned(op, dst.view(), 0, "dst");
    const std::int64_t row_bytes = p.dValue * static_cast<std::int64_t>(sizeof(T));
    for (std::int64_t matrix = 0; matrix < p.ndNum; ++matrix) {
        const std::int64_t from_matrix = matrix * p.srcNdMatrixStride * sizeof(T);
        for (std::int64_t row = 0; row < p.nValue; ++row) {
            const std::int64_t from = from_matrix + row * p.srcDValue * sizeof(T);
            const std::uint8_t* bytes = running.global(
                op, src.view(), from, static_cast<std::uint64_t>(row_bytes), "src", false);
            for (std::int64_t done = 0; done < row_bytes; done += kGranuleBytes) {
                const std::int64_t to =
                    matrix * p.dstNzMatrixStride * static_cast<std::int64_t>(sizeof(T)) +
                    (row * p.dstNzNStride + done / kGranuleBytes * p.dstNzC0Stride) * kGranuleBytes;
                const std::uint32_t where =
                    running.write(op, dst.view(), to, kGranuleBytes, "dst", kDefined);
                const std::int64_t left = std::min<std::int64_t>(row_bytes - done, kGranuleBytes);
                std::memset(running.ub.data() + where, 0, kGranuleBytes);
                std::memcpy(running.ub.data() + where, bytes + done,
                            static_cast<std::size_t>(left));
            }
        }
        running.record(op, src.view().start + static_cast<std::uint64_t>(from_matrix),
                       static_cast<std::uint64_t>(row_bytes),
                       static_cast<std::uint64_t>(p.srcDValue.get()) * sizeof(T),
                       static_cast<std::uint64_t>(p.nValue.get()), false);
    }
    const auto bytes = static_cast<std::uint64_t>(p.ndNum * p.nValue * row_bytes);
    running.counters.gm_bytes_read += bytes;
    running.counters.cube_gm_bytes_read += bytes;
    ++running.counters.gm_transfers_in;
    running.counters.gm_bursts_in += static_cast<std::uint64_t>(p.ndNum * p.nValue);
    running.count(op, "GM -> L1", bytes);
}

// Fractals from L1 to L0A or L0B, each transposed or as it is. What is known about bytes moves with
// them, so that fractals may be partly empty.
template <class T>
void LoadData(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LoadData2DParams& p,
              ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    static_assert(is_cube_type<T>, "the simulator models matrices of half and bfloat16_t");
    Block& running = block();
    const bool left = dst.GetPosition() == TPosition::A2;
    const Op op = running.begin_on(true, left ? "LoadData(L0A, L1)" : "LoadData(L0B, L1)", at,
                                   kPipeMte1, type_name<T>());
    require_position(op, src.GetPosition(), kL1, "src");
    require_position(op, dst.GetPosition(), left ? kL0A : kL0B, "dst");
    constexpr const char* kKind = "cube-parameter";
    require_range(kKind, op, "startIndex", p.startIndex, 0, kMaxShort);
    require_range(kKind, op, "repeatTimes", p.repeatTimes, 0, 255);
    require_range(kKind, op, "srcStride", p.srcStride, 0, kMaxShort);
    require_range(kKind, op, "dstGap", p.dstGap, 0, kMaxShort);
    require_range(kKind, op, "addrMode", p.addrMode, 0, 0);
    running.require_aligned(op, dst.view(), 0, "dst", kFractalBytes);
    running.require_aligned(op, src.view(), 0, "src");
    for (std::int64_t repeat = 0; repeat < p.repeatTimes; ++repeat) {
        std::uint32_t from;
        running.read(op, src.view(), (p.startIndex + repeat * p.srcStride) * kFractalBytes,
                     kFractalBytes, "src", &from, true);
        std::uint8_t bytes[kFractalBytes], known[kFractalBytes];
        std::memcpy(bytes, running.ub.data() + from, kFractalBytes);
        std::memcpy(known, running.state.data() + from, kFractalBytes);
        const std::uint32_t to =
            running.write(op, dst.view(), repeat * (p.dstGap + 1) * kFractalBytes, kFractalBytes,
                          "dst", kDefined);
        for (std::uint32_t i = 0; i < kFractal * kFractal; ++i) {
            const std::uint32_t of = p.ifTranspose ? i % kFractal * kFractal + i / kFractal : i;
            std::memcpy(running.ub.data() + to + i * sizeof(T), bytes + of * sizeof(T), sizeof(T));
            std::memcpy(running.state.data() + to + i * sizeof(T), known + of * sizeof(T),
                        sizeof(T));
        }
    }
    running.count(op, op.name,
                  static_cast<std::uint64_t>(p.repeatTimes.get()) * kFractalBytes);
}

// C = A x B in f32, or C += A x B. Products are added in the order of the inner index.
template <class T>
void Mmad(const LocalTensor<float>& dst, const LocalTensor<T>& left, const LocalTensor<T>& right,
          const MmadParams& p, ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    static_assert(is_cube_type<T>, "the simulator models matrices of half and bfloat16_t");
    Block& running = block();
    const Op op = running.begin_on(true, "Mmad", at, kPipeM, type_name<T>());
    require_position(op, dst.GetPosition(), kL0C, "dst");
    require_position(op, left.GetPosition(), kL0A, "fm");
    require_position(op, right.GetPosition(), kL0B, "filter");
    constexpr const char* kKind = "cube-parameter";
    require_range(kKind, op, "m", p.m, 0, kMostMatrix);
    require_range(kKind, op, "n", p.n, 0, kMostMatrix);
    require_range(kKind, op, "k", p.k, 0, kMostMatrix);
    if (p.unitFlag != 0 || p.cmatrixSource)
        running.stop(kKind, at, "Mmad: unitFlag and a bias are not modelled");
    if (p.m == 0 || p.n == 0 || p.k == 0) return;
    if (p.m == 1)
        running.stop(kKind, at,
                     "Mmad: with m of 1 the device reads the left matrix as a plain row (GEMV), "
                     "which is not modelled: multiply two rows");
    running.require_aligned(op, dst.view(), 0, "dst", 1024);
    running.require_aligned(op, left.view(), 0, "fm", kFractalBytes);
    running.require_aligned(op, right.view(), 0, "filter", kFractalBytes);
    const auto m = static_cast<std::uint32_t>(p.m.get()), n = static_cast<std::uint32_t>(p.n.get());
    const auto k = static_cast<std::uint32_t>(p.k.get());
    const auto fractals = [](std::uint32_t size) { return (size + kFractal - 1) / kFractal; };
    const std::uint32_t rows = fractals(m), columns = fractals(n), inner = fractals(k);
    const auto of_line = [](std::uint32_t size, std::uint32_t fractal) {
        return std::min(size - fractal * kFractal, kFractal);
    };
    bool defined = true;
    // A line of a fractal, 32 bytes, as numbers.
    const auto line = [&](const UbView& view, std::uint32_t fractal, std::uint32_t index,
                          std::uint32_t count, const char* role, float* out) {
        std::uint32_t at_byte;
        defined &= running.read(op, view, std::int64_t{fractal} * kFractalBytes + index * 32,
                                count * sizeof(T), role, &at_byte);
        const T* values = reinterpret_cast<const T*>(running.ub.data() + at_byte);
        for (std::uint32_t i = 0; i < count; ++i) out[i] = float_of(values[i]);
    };
    std::vector<float> a(std::size_t{m} * k), b(std::size_t{k} * n);
    for (std::uint32_t i = 0; i < m; ++i)
        for (std::uint32_t f = 0; f < inner; ++f)
            line(left.view(), i / kFractal * inner + f, i % kFractal, of_line(k, f), "fm",
                 a.data() + std::size_t{i} * k + f * kFractal);
    for (std::uint32_t j = 0; j < n; ++j) {
        for (std::uint32_t f = 0; f < inner; ++f) {
            float column[kFractal];
            const std::uint32_t count = of_line(k, f);
            line(right.view(), f * columns + j / kFractal, j % kFractal, count, "filter", column);
            for (std::uint32_t i = 0; i < count; ++i)
                b[std::size_t{f * kFractal + i} * n + j] = column[i];
        }
    }
    if (!defined)
        running.report("ub-undefined-read", at,
                       "Mmad: bytes without a defined value go into the product");
    // A finite factor times zero adds nothing.
    std::vector<std::vector<std::uint32_t>> entries(k);
    for (std::uint32_t i = 0; i < k; ++i)
        for (std::uint32_t j = 0; j < n; ++j)
            if (b[std::size_t{i} * n + j] != 0) entries[i].push_back(j);
    const std::uint32_t column_floats = rows * kFractal * kFractal;
    std::vector<float> sums(n);
    for (std::uint32_t i = 0; i < rows * kFractal; ++i) {
        const auto at_column = [&](std::uint32_t f) {
            return (std::int64_t{f} * column_floats + i * kFractal) * std::int64_t{sizeof(float)};
        };
        std::fill(sums.begin(), sums.end(), 0.0f);
        if (!p.cmatrixInitVal && i < m) {
            for (std::uint32_t f = 0; f < columns; ++f) {
                std::uint32_t from;
                const std::uint32_t count = of_line(n, f);
                running.read(op, dst.view(), at_column(f), count * sizeof(float), "dst", &from);
                std::memcpy(sums.data() + f * kFractal, running.ub.data() + from,
                            count * sizeof(float));
            }
        }
        for (std::uint32_t s = 0; i < m && s < k; ++s) {
            const float x = a[std::size_t{i} * k + s];
            const float* row = b.data() + std::size_t{s} * n;
            if (std::isfinite(x)) {
                for (const std::uint32_t j : entries[s]) sums[j] += x * row[j];
            } else {
                for (std::uint32_t j = 0; j < n; ++j) sums[j] += x * row[j];
            }
        }
        for (std::uint32_t f = 0; f < columns; ++f) {
            const std::uint32_t to = running.write(op, dst.view(), at_column(f),
                                                   kFractal * sizeof(float), "dst", kUnspecified);
            if (i >= m) continue;
            const std::uint32_t count = of_line(n, f);
            for (std::uint32_t j = 0; j < count; ++j) {
                float& sum = sums[f * kFractal + j];
                if (running.launch.saturate && !std::isfinite(sum))
                    sum = std::isnan(sum) ? 0.0f
                                          : std::copysign(std::numeric_limits<float>::max(), sum);
            }
            std::memcpy(running.ub.data() + to, sums.data() + f * kFractal, count * sizeof(float));
            std::memset(running.state.data() + to, kDefined, count * sizeof(float));
        }
    }
    const std::uint64_t multiply_adds = std::uint64_t{m} * n * k;
    ++running.counters.cube_instructions;
    running.counters.cube_multiply_adds += multiply_adds;
    running.count(op, op.name, multiply_adds);
}

// Rows of a product from L0C to global memory, rounded to nearest even.
template <class T, const FixpipeConfig& config = CFG_ROW_MAJOR>
void Fixpipe(const GlobalTensor<T>& dst, const LocalTensor<float>& src, const FixpipeParamsV220& p,
             ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin_on(true, "Fixpipe(GM, L0C)", at, kPipeFix, types_of<T, float>());
    require_position(op, src.GetPosition(), kL0C, "src");
    require_element_aligned<T>(running, op, dst.view());
    constexpr const char* kKind = "cube-parameter";
    require_range(kKind, op, "nSize", p.nSize, 0, kMostMatrix);
    require_range(kKind, op, "mSize", p.mSize, 0, 8192);
    require_range(kKind, op, "srcStride", p.srcStride, 0, kMaxShort);
    require_range(kKind, op, "dstStride", p.dstStride, 1, 0xffffffffLL);
    constexpr QuantMode_t kWanted = std::is_same_v<T, half>         ? QuantMode_t::F322F16
                                    : std::is_same_v<T, bfloat16_t> ? QuantMode_t::F322BF16
                                                                    : QuantMode_t::NoQuant;
    if (p.quantPre != kWanted)
        running.stop(kKind, at,
                     "Fixpipe: quantPre is not the conversion to the destination's type");
    if (p.nSize % kFractal != 0)
        running.stop(kKind, at, "Fixpipe: nSize is %lld, not a multiple of 16",
                     static_cast<long long>(p.nSize.get()));
    if (p.ndNum != 1 || p.reluEn || p.unitFlag != 0)
        running.stop(kKind, at, "Fixpipe: ndNum, reluEn and unitFlag are not modelled");
    if (p.nSize == 0 || p.mSize == 0) return;
    running.require_aligned(op, src.view(), 0, "src", 64);
    const auto row_bytes = static_cast<std::uint64_t>(p.nSize.get()) * sizeof(T);
    bool defined = true;
    for (std::int64_t row = 0; row < p.mSize; ++row) {
        std::uint8_t* bytes =
            running.global(op, dst.view(), row * p.dstStride * static_cast<std::int64_t>(sizeof(T)),
                           row_bytes, "dst", true);
        for (std::int64_t f = 0; f < p.nSize / kFractal; ++f) {
            std::uint32_t from;
            // A column of fractals is srcStride lines of 16 elements long.
            defined &= running.read(op, src.view(),
                                    (f * p.srcStride + row) * kFractal *
                                        static_cast<std::int64_t>(sizeof(float)),
                                    kFractal * sizeof(float), "src", &from);
            const float* sums = reinterpret_cast<const float*>(running.ub.data() + from);
            for (std::uint32_t i = 0; i < kFractal; ++i) {
                T value;
                if constexpr (std::is_same_v<T, float>) {
                    value = sums[i];
                } else {
                    value = convert<T, float>(sums[i], RoundMode::CAST_RINT,
                                              running.launch.saturate);
                }
                std::memcpy(bytes + (f * kFractal + i) * sizeof(T), &value, sizeof(T));
            }
        }
    }
    if (!defined)
        running.report("ub-undefined-read", at,
                       "Fixpipe: parts of L0C that no product wrote go to global memory");
    running.record(op, dst.view().start, row_bytes,
                   static_cast<std::uint64_t>(p.dstStride.get()) * sizeof(T),
                   static_cast<std::uint64_t>(p.mSize.get()), true);
    const std::uint64_t bytes = row_bytes * static_cast<std::uint64_t>(p.mSize.get());
    running.counters.gm_bytes_written += bytes;
    running.counters.cube_gm_bytes_written += bytes;
    ++running.counters.gm_transfers_out;
    running.counters.gm_bursts_out += static_cast<std::uint64_t>(p.mSize.get());
    running.count(op, "L0C -> GM", bytes);
}

}  // namespace AscendC
