// Parameter structures of copies and vector instructions.
#pragma once

#include <cstdint>

#include "block.h"

namespace ascend_sim {

// A field or parameter of type `Stored` on the device. The host keeps the given value, so that one
// that the device would truncate is reported instead of truncated.
template <class Stored>
class Narrow {
public:
    Narrow() = default;
    template <class Given,
              std::enable_if_t<std::is_integral_v<Given> || std::is_enum_v<Given>, int> = 0>
    constexpr Narrow(Given value) : value_(static_cast<std::int64_t>(value)) {}
    constexpr operator std::int64_t() const { return value_; }
    constexpr std::int64_t get() const { return value_; }

private:
    std::int64_t value_;
};

using Narrow8 = Narrow<std::uint8_t>;
using Narrow16 = Narrow<std::uint16_t>;
using Narrow32 = Narrow<std::uint32_t>;

inline void require_range(const char* kind, const Op& op, const char* field, std::int64_t value,
                          std::int64_t low, std::int64_t high) {
    if (value >= low && value <= high) return;
    block().stop(kind, op.at, "%s: %s is %lld, outside the documented range [%lld, %lld]", op.name,
                 field, static_cast<long long>(value), static_cast<long long>(low),
                 static_cast<long long>(high));
}

}  // namespace ascend_sim

namespace AscendC {

using ascend_sim::Narrow16;
using ascend_sim::Narrow32;
using ascend_sim::Narrow8;

#if __NPU_ARCH__ == 3510
using DmaStride = std::int64_t;
#else
using DmaStride = std::uint32_t;
#endif

struct DataCopyParams {
    DataCopyParams() = default;
    DataCopyParams(std::uint16_t count, std::uint16_t length, std::uint16_t source_gap,
                   std::uint16_t target_gap)
        : blockCount(count), blockLen(length), srcGap(source_gap), dstGap(target_gap) {}
    Narrow16 blockCount = 1;
    Narrow16 blockLen = 0;
    union {
        Narrow16 srcGap = 0;
        Narrow16 srcStride;
    };
    union {
        Narrow16 dstGap = 0;
        Narrow16 dstStride;
    };
};

struct DataCopyExtParams {
    DataCopyExtParams() = default;
    DataCopyExtParams(std::uint16_t count, std::uint32_t length, DmaStride source_stride,
                      DmaStride target_stride, std::uint32_t reserved)
        : blockCount(count),
          blockLen(length),
          srcStride(source_stride),
          dstStride(target_stride),
          rsv(reserved) {}
    Narrow16 blockCount = 1;
    Narrow32 blockLen = 0;
    ascend_sim::Narrow<DmaStride> srcStride = 0;
    ascend_sim::Narrow<DmaStride> dstStride = 0;
    std::uint32_t rsv = 0;
};

template <class T>
struct DataCopyPadExtParams {
    DataCopyPadExtParams() = default;
    DataCopyPadExtParams(bool pad, std::uint8_t left, std::uint8_t right, T value)
        : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
    bool isPad = false;
    Narrow8 leftPadding = 0;
    Narrow8 rightPadding = 0;
    T paddingValue = T{};
};

struct UnaryRepeatParams {
    UnaryRepeatParams() = default;
    UnaryRepeatParams(std::uint16_t target_block, std::uint16_t source_block,
                      std::uint8_t target_repeat, std::uint8_t source_repeat)
        : dstBlkStride(target_block),
          srcBlkStride(source_block),
          dstRepStride(target_repeat),
          srcRepStride(source_repeat) {}
    Narrow16 dstBlkStride = 1;
    Narrow16 srcBlkStride = 1;
    Narrow8 dstRepStride = 8;
    Narrow8 srcRepStride = 8;
};

struct BinaryRepeatParams {
    BinaryRepeatParams() = default;
    BinaryRepeatParams(std::uint8_t target_block, std::uint8_t first_block,
                       std::uint8_t second_block, std::uint8_t target_repeat,
                       std::uint8_t first_repeat, std::uint8_t second_repeat)
        : dstBlkStride(target_block),
          src0BlkStride(first_block),
          src1BlkStride(second_block),
          dstRepStride(target_repeat),
          src0RepStride(first_repeat),
          src1RepStride(second_repeat) {}
    Narrow8 dstBlkStride = 1;
    Narrow8 src0BlkStride = 1;
    Narrow8 src1BlkStride = 1;
    Narrow8 dstRepStride = 8;
    Narrow8 src0RepStride = 8;
    Narrow8 src1RepStride = 8;
};

struct CopyRepeatParams {
    CopyRepeatParams() = default;
    CopyRepeatParams(std::uint16_t target_block, std::uint16_t source_block,
                     std::uint16_t target_repeat, std::uint16_t source_repeat)
        : dstStride(target_block),
          srcStride(source_block),
          dstRepeatSize(target_repeat),
          srcRepeatSize(source_repeat) {}
    Narrow16 dstStride = 0;
    Narrow16 srcStride = 0;
    Narrow16 dstRepeatSize = 8;
    Narrow16 srcRepeatSize = 8;
};

struct BrcbRepeatParams {
    BrcbRepeatParams() = default;
    BrcbRepeatParams(std::uint16_t target_block, std::uint16_t target_repeat)
        : dstBlkStride(target_block), dstRepStride(target_repeat) {}
    Narrow16 dstBlkStride = 1;
    Narrow16 dstRepStride = 8;
};

struct GatherMaskParams {
    GatherMaskParams() = default;
    GatherMaskParams(std::uint8_t block_stride, std::uint16_t repeats, std::uint16_t repeat_stride,
                     std::uint8_t pattern_stride)
        : src0BlockStride(block_stride),
          repeatTimes(repeats),
          src0RepeatStride(repeat_stride),
          src1RepeatStride(pattern_stride) {}
    Narrow8 src0BlockStride = 1;
    Narrow16 repeatTimes = 0;
    Narrow16 src0RepeatStride = 8;
    Narrow8 src1RepeatStride = 8;
};

enum class MaskMode : std::uint8_t { NORMAL, COUNTER };

constexpr std::uint64_t MASK_PLACEHOLDER = 0;

}  // namespace AscendC
