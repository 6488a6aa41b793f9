// Instructions that move elements inside the unified buffer: fill, broadcast, copy, gather,
// interleave.
#pragma once

#include "vector.h"

namespace ascend_sim {

template <class T>
inline constexpr bool kMovable16or32 = sizeof(T) == 2 || sizeof(T) == 4;
#if __NPU_ARCH__ == 2201
template <class T>
inline constexpr bool kMovable = sizeof(T) == 2 || sizeof(T) == 4;
#else
template <class T>
inline constexpr bool kMovable = sizeof(T) <= 8;
#endif

inline bool overlaps(const UbView& a, std::uint64_t a_bytes, const UbView& b,
                     std::uint64_t b_bytes) {
    return a.start < b.start + b_bytes && b.start < a.start + a_bytes;
}

inline void require_disjoint(Block& running, const Op& op, const UbView& target,
                             std::uint64_t target_bytes, const UbView& source,
                             std::uint64_t source_bytes, const char* role) {
    if (overlaps(target, target_bytes, source, source_bytes))
        running.report("overlap", op.at,
                       "%s: dst and %s share memory, which the instruction does not support",
                       op.name, role);
}

// Moves one element, with its state.
inline void move(Block& running, const Op& op, const UbView& target, std::int64_t to,
                 const UbView& source, std::int64_t from, std::uint32_t bytes, const char* role) {
    std::uint32_t read_at;
    const bool defined = running.read(op, source, from, bytes, role, &read_at);
    std::uint8_t value[kGranuleBytes];
    std::memcpy(value, running.ub.data() + read_at, bytes);
    const std::uint32_t write_at =
        running.write(op, target, to, bytes, "dst", defined ? kDefined : kUnspecified);
    std::memcpy(running.ub.data() + write_at, value, bytes);
}

template <class T>
void copy_blocks(Block& running, const Op& op, const AscendC::LocalTensor<T>& dst,
                 const AscendC::LocalTensor<T>& src, const Transfer& t) {
    running.require_aligned(op, dst.view(), 0, "dst");
    running.require_aligned(op, src.view(), 0, "src");
    for (std::uint64_t run = 0; run < t.count; ++run) {
        const std::int64_t from = static_cast<std::int64_t>(run) * t.global_step;
        const std::int64_t to = static_cast<std::int64_t>(run) * t.ub_step;
        for (std::uint64_t b = 0; b < t.length; b += kGranuleBytes)
            move(running, op, dst.view(), to + b, src.view(), from + b, kGranuleBytes, "src");
    }
    count_vector(running, op, round_up(t.count * t.length, kRepeatBytes) / kRepeatBytes);
}

template <class T>
void check_interleave(Block& running, const Op& op, const AscendC::LocalTensor<T>& dst0,
                      const AscendC::LocalTensor<T>& dst1, const AscendC::LocalTensor<T>& src0,
                      const AscendC::LocalTensor<T>& src1, std::int32_t count) {
    if (count <= 0 || count % 2 != 0)
        running.stop("vector-parameter", op.at, "%s: count %d is not a positive even number",
                     op.name, count);
    const std::uint64_t bytes = static_cast<std::uint64_t>(count) * sizeof(T);
    for (const auto* target : {&dst0, &dst1}) {
        running.require_aligned(op, target->view(), 0, "dst");
        for (const auto* source : {&src0, &src1}) {
            running.require_aligned(op, source->view(), 0, "src");
            require_disjoint(running, op, target->view(), bytes, source->view(), bytes, "src");
        }
    }
    count_vector(running, op, 2 * round_up(bytes, kRepeatBytes) / kRepeatBytes);
}

template <class T>
T read_scalar(Block& running, const Op& op, const UbView& view, std::int64_t offset,
              const char* role) {
    std::uint32_t at;
    if (!running.read(op, view, offset, sizeof(T), role, &at))
        running.report("ub-undefined-read", op.at,
                       "%s: %s holds padding whose value is unspecified", op.name, role);
    T value;
    std::memcpy(&value, running.ub.data() + at, sizeof value);
    return value;
}

template <class T>
void fill(Block& running, const Op& op, const Shape& shape, const Operand& d, T value) {
    run_vector<0>(running, op, shape, d, {}, false,
                  [&](std::uint8_t* target, const auto&, std::uint64_t n) {
                      std::fill_n(reinterpret_cast<T*>(target), n, value);
                  });
}

}  // namespace ascend_sim

namespace AscendC {

// UB -> UB, on pipe V.
template <class T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, std::uint32_t count,
              ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("DataCopy(UB, UB)", at, kPipeV, types_of<T>());
    copy_blocks(running, op, dst, src, contiguous<T>(running, op, count));
}

template <class T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params,
              ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("DataCopy(UB, UB)", at, kPipeV, types_of<T>());
    if (check_short_params(op, params))
        copy_blocks(running, op, dst, src, short_transfer(params, params.srcGap, params.dstGap));
}

}  // namespace AscendC

namespace ascend_sim {

template <class T>
void copy_strided(Block& running, const Op& op, const AscendC::LocalTensor<T>& dst,
                  const AscendC::LocalTensor<T>& src, const Shape& shape,
                  const AscendC::CopyRepeatParams& p) {
    require_range("vector-parameter", op, "dstStride", p.dstStride, 0, kMaxShort);
    require_range("vector-parameter", op, "srcStride", p.srcStride, 0, kMaxShort);
    require_range("vector-parameter", op, "dstRepeatSize", p.dstRepeatSize, 0, 4095);
    require_range("vector-parameter", op, "srcRepeatSize", p.srcRepeatSize, 0, 4095);
    unary<T>(running, op, shape, operand(dst, "dst", p.dstStride, p.dstRepeatSize),
             operand(src, "src", p.srcStride, p.srcRepeatSize), [](T x) { return x; });
}

}  // namespace ascend_sim

namespace AscendC {

template <class T, bool isSetMask = true, std::enable_if_t<ascend_sim::kMovable<T>, bool> = true>
void Copy(const LocalTensor<T>& dst, const LocalTensor<T>& src, std::uint64_t mask,
          Narrow8 repeatTime, const CopyRepeatParams& p, ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("Copy", at, kPipeV, types_of<T>());
    copy_strided(running, op, dst, src,
                 leading_mask(running, op, isSetMask, mask, repeatTime, sizeof(T)), p);
}

template <class T, bool isSetMask = true, std::enable_if_t<ascend_sim::kMovable<T>, bool> = true>
void Copy(const LocalTensor<T>& dst, const LocalTensor<T>& src, std::uint64_t mask[],
          Narrow8 repeatTime, const CopyRepeatParams& p, ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("Copy", at, kPipeV, types_of<T>());
    copy_strided(running, op, dst, src,
                 bit_mask(running, op, isSetMask, mask, repeatTime, sizeof(T)), p);
}

template <class T, bool isSetMask = true, std::enable_if_t<ascend_sim::kMovable<T>, bool> = true>
void Duplicate(const LocalTensor<T>& dst, ascend_sim::Scalar<T> value, std::int32_t count,
               ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("Duplicate", at, kPipeV, types_of<T>());
    fill<T>(running, op, first_elements(running, op, count, sizeof(T)), operand(dst, "dst"), value);
}

template <class T, bool isSetMask = true, std::enable_if_t<ascend_sim::kMovable<T>, bool> = true>
void Duplicate(const LocalTensor<T>& dst, ascend_sim::Scalar<T> value, std::uint64_t mask,
               Narrow8 repeatTime, Narrow16 dstBlockStride, Narrow8 dstRepeatStride,
               ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("Duplicate", at, kPipeV, types_of<T>());
    require_range("vector-parameter", op, "dstRepeatStride", dstRepeatStride, 0, 255);
    fill<T>(running, op, leading_mask(running, op, isSetMask, mask, repeatTime, sizeof(T)),
            operand(dst, "dst", dstBlockStride, dstRepeatStride), value);
}

template <class T, bool isSetMask = true, std::enable_if_t<ascend_sim::kMovable<T>, bool> = true>
void Duplicate(const LocalTensor<T>& dst, ascend_sim::Scalar<T> value, std::uint64_t mask[],
               Narrow8 repeatTime, Narrow16 dstBlockStride, Narrow8 dstRepeatStride,
               ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("Duplicate", at, kPipeV, types_of<T>());
    require_range("vector-parameter", op, "dstRepeatStride", dstRepeatStride, 0, 255);
    fill<T>(running, op, bit_mask(running, op, isSetMask, mask, repeatTime, sizeof(T)),
            operand(dst, "dst", dstBlockStride, dstRepeatStride), value);
}

// Each repeat spreads eight source elements over eight 32-byte blocks.
template <class T, std::enable_if_t<ascend_sim::kMovable<T>, bool> = true>
void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, Narrow8 repeatTime,
          const BrcbRepeatParams& p, ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("Brcb", at, kPipeV, types_of<T>());
    require_range("vector-parameter", op, "repeatTime", repeatTime, 0, kMaxRepeats);
    require_range("vector-parameter", op, "dstBlkStride", p.dstBlkStride, 1, kMaxShort);
    require_range("vector-parameter", op, "dstRepStride", p.dstRepStride, 0, kMaxShort);
    if (nothing_to_do(running, op, static_cast<std::uint64_t>(repeatTime.get()), "repeatTime"))
        return;
    running.require_aligned(op, dst.view(), 0, "dst");
    running.require_aligned(op, src.view(), 0, "src");
    const std::int64_t extent =
        ((repeatTime - 1) * p.dstRepStride + (kBlocksPerRepeat - 1) * p.dstBlkStride + 1) *
        kGranuleBytes;
    require_disjoint(running, op, dst.view(), static_cast<std::uint64_t>(extent), src.view(),
                     static_cast<std::uint64_t>(repeatTime.get()) * kBlocksPerRepeat * sizeof(T),
                     "src");
    count_vector(running, op, static_cast<std::uint64_t>(repeatTime.get()));
    for (std::int64_t repeat = 0; repeat < repeatTime; ++repeat)
        for (std::int64_t b = 0; b < kBlocksPerRepeat; ++b)
            for (std::uint32_t i = 0; i < kGranuleBytes; i += sizeof(T))
                move(running, op, dst.view(),
                     (repeat * p.dstRepStride + b * p.dstBlkStride) * kGranuleBytes + i, src.view(),
                     (repeat * kBlocksPerRepeat + b) * static_cast<std::int64_t>(sizeof(T)),
                     sizeof(T), "src");
}

// dst[i] = the source element at byte srcBaseAddr + srcOffset[i].
template <class T, std::enable_if_t<ascend_sim::kMovable<T>, bool> = true>
void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src,
            const LocalTensor<std::uint32_t>& srcOffset, std::uint32_t srcBaseAddr,
            std::uint32_t count, ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("Gather", at, kPipeV, types_of<T>());
    if (nothing_to_do(running, op, count, "count")) return;
    // dav-2201 counts the whole repeats in eight bits; dav-3510 loops.
    constexpr std::uint32_t kPerRepeat = sizeof(T) == 2 ? 128 : 64;
    if (__NPU_ARCH__ == 2201)
        require_range("vector-parameter", op, "count / elements of a repeat", count / kPerRepeat, 0,
                      kMaxRepeats);
    count_vector(running, op,
                 round_up(std::uint64_t{count} * sizeof(T), kRepeatBytes) / kRepeatBytes);
    running.require_aligned(op, dst.view(), 0, "dst");
    running.require_aligned(op, src.view(), 0, "src");
    running.require_aligned(op, srcOffset.view(), 0, "srcOffset");
    require_disjoint(running, op, dst.view(), std::uint64_t{count} * sizeof(T), srcOffset.view(),
                     std::uint64_t{count} * sizeof(std::uint32_t), "srcOffset");
    const std::int64_t target_begin =
        static_cast<std::int64_t>(dst.view().start) - static_cast<std::int64_t>(src.view().start);
    const std::int64_t target_end = target_begin + std::int64_t{count} * sizeof(T);
    for (std::uint32_t i = 0; i < count; ++i) {
        const std::uint64_t from = std::uint64_t{srcBaseAddr} +
                                   read_scalar<std::uint32_t>(running, op, srcOffset.view(),
                                                              std::int64_t{i} * 4, "srcOffset");
        if (from % sizeof(T) != 0)
            running.stop("ub-misaligned", at,
                         "Gather: offset %u is byte %llu, not a multiple of the element size %zu",
                         i, static_cast<unsigned long long>(from), sizeof(T));
        const std::int64_t begin = static_cast<std::int64_t>(from);
        if (begin < target_end && target_begin < begin + static_cast<std::int64_t>(sizeof(T)))
            running.report("overlap", op.at,
                           "Gather: dst and src share memory (element %u reads byte %llu of src), "
                           "which the instruction does not support",
                           i, static_cast<unsigned long long>(from));
        move(running, op, dst.view(), std::int64_t{i} * sizeof(T), src.view(),
             static_cast<std::int64_t>(from), sizeof(T), "src");
    }
}

}  // namespace AscendC

namespace ascend_sim {

// Packs the elements for which `selected(index in repeat, repeat)` holds.
template <class T, class Selected>
std::uint64_t gather_mask(Block& running, const Op& op, const AscendC::LocalTensor<T>& dst,
                          const AscendC::LocalTensor<T>& src, bool reduce_mode, std::uint32_t mask,
                          const AscendC::GatherMaskParams& p, Selected selected) {
    running.require_aligned(op, dst.view(), 0, "dst");
    running.require_aligned(op, src.view(), 0, "src0");
    require_range("vector-parameter", op, "src0BlockStride", p.src0BlockStride, 0, 255);
    require_range("vector-parameter", op, "repeatTimes", p.repeatTimes, 0, kMaxShort);
    require_range("vector-parameter", op, "src0RepeatStride", p.src0RepeatStride, 0, kMaxShort);
    constexpr std::uint32_t kPerRepeat = kRepeatBytes / sizeof(T);
    const std::uint32_t each = reduce_mode ? mask : kPerRepeat;
    const std::uint64_t repeats = static_cast<std::uint64_t>(p.repeatTimes.get());
    count_vector(running, op,
                 reduce_mode ? repeats * (round_up(each, kPerRepeat) / kPerRepeat) : repeats);
    running.counter_mode = false;
    const Operand source = operand(src, "src0", p.src0BlockStride, p.src0RepeatStride);
    std::uint64_t kept = 0;
    for (std::uint64_t repeat = 0; repeat < repeats; ++repeat)
        for (std::uint32_t i = 0; i < each; ++i) {
            if (!selected(i, repeat)) continue;
            const std::int64_t from = element_offset(source, repeat, i);
            move(running, op, dst.view(), static_cast<std::int64_t>(kept * sizeof(T)), src.view(),
                 from, sizeof(T), "src0");
            ++kept;
        }
    return kept;
}

inline bool pattern_selects(const Op& op, std::uint8_t pattern, std::uint32_t index) {
    switch (pattern) {
        case 1:
            return index % 2 == 0;
        case 2:
            return index % 2 == 1;
        case 3:
        case 4:
        case 5:
        case 6:
            return index % 4 == static_cast<std::uint32_t>(pattern - 3);
        case 7:
            return true;
        default:
            block().stop("vector-parameter", op.at, "GatherMask: pattern %u is not one of 1..7",
                         pattern);
    }
}

}  // namespace ascend_sim

namespace AscendC {

enum class GatherMaskMode : std::uint8_t { VERSION_V1 = 0, VERSION_V2 = 1 };
constexpr GatherMaskMode defaultGatherMaskMode = GatherMaskMode::VERSION_V1;

template <class T, GatherMaskMode mode = defaultGatherMaskMode,
          std::enable_if_t<ascend_sim::kMovable16or32<T>, bool> = true>
void GatherMask(const LocalTensor<T>& dst, const LocalTensor<T>& src0, std::uint8_t src1Pattern,
                bool reduceMode, std::uint32_t mask, const GatherMaskParams& params,
                std::uint64_t& rsvdCnt, ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("GatherMask", at, kPipeV, types_of<T>());
    rsvdCnt = gather_mask<T>(
        running, op, dst, src0, reduceMode, mask, params,
        [&](std::uint32_t i, std::uint64_t) { return pattern_selects(op, src1Pattern, i); });
}

template <class T, class U, GatherMaskMode mode = defaultGatherMaskMode,
          std::enable_if_t<ascend_sim::kMovable16or32<T> && sizeof(T) == sizeof(U), bool> = true>
void GatherMask(const LocalTensor<T>& dst, const LocalTensor<T>& src0,
                const LocalTensor<U>& src1Pattern, bool reduceMode, std::uint32_t mask,
                const GatherMaskParams& params, std::uint64_t& rsvdCnt, ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    static_assert(
        std::is_unsigned_v<U>,
        "GatherMask: the pattern is uint16_t for 16-bit and uint32_t for 32-bit elements");
    Block& running = block();
    const Op op = running.begin("GatherMask", at, kPipeV, types_of<T>());
    constexpr std::uint32_t kBits = sizeof(U) * 8;
    rsvdCnt = gather_mask<T>(
        running, op, dst, src0, reduceMode, mask, params,
        [&](std::uint32_t i, std::uint64_t repeat) {
            const std::int64_t offset =
                static_cast<std::int64_t>(repeat) * params.src1RepeatStride * kGranuleBytes +
                i / kBits * sizeof(U);
            return ((read_scalar<U>(running, op, src1Pattern.view(), offset, "src1Pattern") >>
                     (i % kBits)) &
                    1) != 0;
        });
}

// dst[i] = firstValue + i.
template <class T,
          std::enable_if_t<ascend_sim::is_one_of<T, std::int16_t, half, std::int32_t, float>,
                           bool> = true>
void CreateVecIndex(const LocalTensor<T>& dst, ascend_sim::Scalar<T> firstValue,
                    std::uint32_t count, ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("CreateVecIndex", at, kPipeV, types_of<T>());
    run_vector<0>(running, op, first_elements(running, op, count, sizeof(T)), operand(dst, "dst"),
                  {}, false, [&](std::uint8_t* target, const auto&, std::uint64_t n) {
                      for (std::uint64_t i = 0; i < n; ++i)
                          reinterpret_cast<T*>(target)[i] =
                              evaluate<AddOf, T>(firstValue, static_cast<T>(static_cast<int>(i)));
                  });
}

#if __NPU_ARCH__ == 3510
// dst0 and dst1 receive the elements of the two sources alternately.
template <class T>
void Interleave(const LocalTensor<T>& dst0, const LocalTensor<T>& dst1, const LocalTensor<T>& src0,
                const LocalTensor<T>& src1, std::int32_t count, ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("Interleave", at, kPipeV, types_of<T>());
    ascend_sim::check_interleave(running, op, dst0, dst1, src0, src1, count);
    for (std::int32_t i = 0; i < 2 * count; ++i)
        move(running, op, (i < count ? dst0 : dst1).view(), std::int64_t{i % count} * sizeof(T),
             (i % 2 ? src1 : src0).view(), std::int64_t{i / 2} * sizeof(T), sizeof(T), "src");
}

// dst0 takes the even elements of src0 followed by src1, dst1 the odd ones.
template <class T>
void DeInterleave(const LocalTensor<T>& dst0, const LocalTensor<T>& dst1,
                  const LocalTensor<T>& src0, const LocalTensor<T>& src1, std::int32_t count,
                  ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("DeInterleave", at, kPipeV, types_of<T>());
    ascend_sim::check_interleave(running, op, dst0, dst1, src0, src1, count);
    for (std::int32_t i = 0; i < 2 * count; ++i)
        move(running, op, (i % 2 ? dst1 : dst0).view(), std::int64_t{i / 2} * sizeof(T),
             (i < count ? src0 : src1).view(), std::int64_t{i % count} * sizeof(T), sizeof(T),
             "src");
}
#endif

}  // namespace AscendC
