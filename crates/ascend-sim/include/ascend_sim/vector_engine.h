// How a vector instruction iterates over its operands: repeats of eight 32-byte blocks, masks and
// strides.
#pragma once

#include <array>

#include "dma.h"

namespace ascend_sim {

constexpr std::uint32_t kRepeatBytes = 256;
constexpr std::uint32_t kBlocksPerRepeat = 8;
constexpr std::int64_t kMaxRepeats = 255;

struct Operand {
    UbView view;
    std::uint32_t element_bytes;
    std::int64_t block_stride;   // 32-byte units
    std::int64_t repeat_stride;  // 32-byte units
    const char* role;
};

// Elements [first, first + count) of each repeat.
struct Run {
    std::uint32_t first, count;
};

struct Shape {
    bool contiguous = false;  // first-n form: `elements` in a row, no strides
    std::uint64_t elements = 0;
    std::uint32_t per_repeat = 0;  // of the widest operand type
    std::uint64_t repeats = 0;
    std::uint32_t tail = 0;  // counter mode: elements of the last repeat, 0 when it is whole
    std::vector<Run> runs;
};

// A zero count does nothing on 2201 and is unspecified on 3510.
inline bool nothing_to_do(Block& running, const Op& op, std::uint64_t amount, const char* what) {
    if (amount != 0) return false;
    if (__NPU_ARCH__ == 3510)
        running.report("vector-parameter", op.at,
                       "%s: %s is 0, which dav-3510 does not promise to treat as no work", op.name,
                       what);
    return true;
}

template <class T>
constexpr const char* type_name() {
    if (std::is_same_v<T, float>) return "f32";
    if (std::is_same_v<T, half>) return "f16";
    if (std::is_same_v<T, bfloat16_t>) return "bf16";
    constexpr const char* kIntegers[2][4] = {{"u8", "u16", "u32", "u64"},
                                             {"i8", "i16", "i32", "i64"}};
    constexpr int kWidth = sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 1 : sizeof(T) == 4 ? 2 : 3;
    return kIntegers[std::is_signed_v<T>][kWidth];
}

// The type of the operands, or "source -> destination" where they differ.
template <class D, class S = D>
const char* types_of() {
    if (std::is_same_v<D, S>) return type_name<D>();
    static const std::string text = std::string(type_name<S>()) + " -> " + type_name<D>();
    return text.c_str();
}

inline void count_vector(Block& running, const Op& op, std::uint64_t repeats) {
    running.count(op, op.name, repeats);
    ++running.counters.vector_instructions;
    running.counters.vector_repeats += repeats;
}

inline Shape first_elements(Block& running, const Op& op, std::int64_t count,
                            std::uint32_t widest) {
    if (count < 0)
        running.stop("vector-parameter", op.at, "%s: count is %lld", op.name,
                     static_cast<long long>(count));
    Shape shape;
    shape.contiguous = true;
    shape.elements = static_cast<std::uint64_t>(count);
    if (!nothing_to_do(running, op, shape.elements, "count"))
        count_vector(running, op, round_up(shape.elements * widest, kRepeatBytes) / kRepeatBytes);
    return shape;
}

// Runs of set mask bits, split at the blocks of the widest type: strides are constant in a run.
inline void add_runs(Shape& shape, std::uint64_t low, std::uint64_t high, std::uint32_t per_block) {
    for (std::uint32_t i = 0; i < shape.per_repeat; ++i) {
        const bool on = ((i < 64 ? low >> i : high >> (i - 64)) & 1) != 0;
        if (!on) continue;
        const bool extends = !shape.runs.empty() &&
                             shape.runs.back().first + shape.runs.back().count == i &&
                             i % per_block != 0;
        if (extends) {
            ++shape.runs.back().count;
        } else {
            shape.runs.push_back({i, 1});
        }
    }
}

inline Shape base_shape(const Op& op, std::int64_t repeats, std::uint32_t widest) {
    require_range("vector-parameter", op, "repeatTime", repeats, 0, kMaxRepeats);
    Shape shape;
    shape.per_repeat = kRepeatBytes / widest;
    shape.repeats = static_cast<std::uint64_t>(repeats);
    return shape;
}

inline std::pair<std::uint64_t, std::uint64_t> leading_bits(std::uint64_t count) {
    const auto bits = [](std::uint64_t n) {
        return n >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << n) - 1;
    };
    return {bits(count), count > 64 ? bits(count - 64) : 0};
}

// The shape of a masked instruction; without `set_mask` the mask register is used instead of the
// parameter.
inline Shape masked(Block& running, const Op& op, bool set_mask, std::uint64_t low,
                    std::uint64_t high, std::int64_t repeats, std::uint32_t widest) {
    Shape shape = base_shape(op, repeats, widest);
    if (set_mask) {
        if (running.counter_mode) {
            running.report(
                "vector-parameter", op.at,
                "%s: the mask mode is still Counter; call SetMaskNorm or ResetMask first", op.name);
        }
    } else if (running.counter_mode) {
        const std::uint64_t elements = running.mask_low;
        shape.repeats = round_up(elements, shape.per_repeat) / shape.per_repeat;
        shape.tail = static_cast<std::uint32_t>(elements % shape.per_repeat);
        low = high = ~std::uint64_t{0};
    } else {
        low = running.mask_low;
        high = running.mask_high;
    }
    add_runs(shape, low, high, kGranuleBytes / widest);
    if (!nothing_to_do(running, op, shape.repeats, "repeatTime") &&
        !nothing_to_do(running, op, shape.runs.size(), "mask"))
        count_vector(running, op, shape.repeats);
    return shape;
}

inline Shape leading_mask(Block& running, const Op& op, bool set_mask, std::uint64_t mask,
                          std::int64_t repeats, std::uint32_t widest) {
    const std::uint32_t limit = kRepeatBytes / widest;
    if (set_mask && mask > limit)
        running.report("vector-parameter", op.at,
                       "%s: mask %llu is above the %u elements of a repeat", op.name,
                       static_cast<unsigned long long>(mask), limit);
    const auto [low, high] = leading_bits(std::min<std::uint64_t>(mask, limit));
    return masked(running, op, set_mask, low, high, repeats, widest);
}

inline Shape bit_mask(Block& running, const Op& op, bool set_mask, const std::uint64_t* mask,
                      std::int64_t repeats, std::uint32_t widest) {
    if (set_mask && widest >= 4 && mask[1] != 0)
        running.stop("vector-parameter", op.at, "%s: mask[1] must be 0 for elements of %u bytes",
                     op.name, widest);
    return masked(running, op, set_mask, mask[0], mask[1], repeats, widest);
}

inline std::int64_t element_offset(const Operand& operand, std::uint64_t repeat,
                                   std::uint32_t element) {
    const std::uint32_t per_block = kGranuleBytes / operand.element_bytes;
    return (static_cast<std::int64_t>(repeat) * operand.repeat_stride +
            static_cast<std::int64_t>(element / per_block) * operand.block_stride) *
               kGranuleBytes +
           static_cast<std::int64_t>(element % per_block) * operand.element_bytes;
}

// The byte interval that an operand covers, from its start.
inline std::pair<std::int64_t, std::int64_t> footprint(const Operand& operand, const Shape& shape) {
    if (shape.contiguous)
        return {0, static_cast<std::int64_t>(shape.elements * operand.element_bytes)};
    const std::int64_t last = element_offset(operand, shape.repeats - 1, shape.per_repeat - 1);
    return {0, last + operand.element_bytes};
}

// Source and destination must be the same bytes or disjoint, inside a repeat and from one repeat to
// the next; `exempt` is the documented exception of some two-source instructions.
inline void check_overlap(Block& running, const Op& op, const Shape& shape, const Operand& target,
                          const Operand& source, bool exempt) {
    const auto target_extent = footprint(target, shape);
    const auto source_extent = footprint(source, shape);
    const std::int64_t distance =
        static_cast<std::int64_t>(source.view.start) - static_cast<std::int64_t>(target.view.start);
    if (distance + source_extent.second <= 0 || distance >= target_extent.second) return;
    const bool same_width = target.element_bytes == source.element_bytes;
    const auto complain = [&](const char* how) {
        running.report("overlap", op.at,
                       "%s: dst and %s overlap %s, which the instruction does not support", op.name,
                       source.role, how);
    };
    if (shape.contiguous) {
        if (distance != 0 || !same_width) complain("without being the same elements");
        return;
    }
    const auto blocks = [&](const Operand& operand, std::uint64_t repeat,
                            std::array<std::int64_t, kBlocksPerRepeat>& list) {
        const std::uint32_t count =
            kBlocksPerRepeat * operand.element_bytes * shape.per_repeat / kRepeatBytes;
        for (std::uint32_t b = 0; b < count; ++b)
            list[b] = operand.view.start / kGranuleBytes +
                      static_cast<std::int64_t>(repeat) * operand.repeat_stride +
                      b * operand.block_stride;
        return count;
    };
    std::array<std::int64_t, kBlocksPerRepeat> written, read;
    for (std::uint64_t repeat = 0; repeat < shape.repeats; ++repeat) {
        const std::uint32_t targets = blocks(target, repeat, written);
        std::uint32_t sources = blocks(source, repeat, read);
        for (std::uint32_t i = 0; i < targets; ++i)
            for (std::uint32_t j = 0; j < sources; ++j)
                if (written[i] == read[j] && (i != j || !same_width))
                    return complain("inside a repeat without being the same blocks");
        if (exempt || repeat + 1 == shape.repeats) continue;
        sources = blocks(source, repeat + 1, read);
        for (std::uint32_t i = 0; i < targets; ++i)
            for (std::uint32_t j = 0; j < sources; ++j)
                if (written[i] == read[j]) return complain("from one repeat to the next");
    }
}

// Runs one instruction. `compute(dst, sources..., n)` handles n elements in a row.
template <std::size_t N, class Compute>
void run_vector(Block& running, const Op& op, const Shape& shape, const Operand& target,
                const std::array<Operand, N>& sources, bool reads_target, Compute compute) {
    running.require_aligned(op, target.view, 0, target.role);
    for (const Operand& source : sources) running.require_aligned(op, source.view, 0, source.role);
    if (!shape.contiguous && target.block_stride == 0 && shape.repeats != 0)
        running.stop("vector-parameter", op.at, "%s: dstBlkStride is 0, which is undefined",
                     op.name);

    const auto apply = [&](std::int64_t target_offset,
                           const std::array<std::int64_t, N>& source_offsets, std::uint64_t count) {
        std::array<std::uint32_t, N> where{};
        bool defined = true;
        for (std::size_t s = 0; s < N; ++s)
            defined &= running.read(op, sources[s].view, source_offsets[s],
                                    count * sources[s].element_bytes, sources[s].role, &where[s]);
        std::uint32_t target_start = 0;
        const std::uint64_t target_bytes = count * target.element_bytes;
        if (reads_target)
            defined &= running.read(op, target.view, target_offset, target_bytes, target.role,
                                    &target_start);
        std::vector<std::uint8_t> states;
        if (!defined) {
            // Element by element: a result is defined if all that it is computed from is.
            states.assign(target_bytes, kDefined);
            for (std::uint64_t i = 0; i < count; ++i) {
                bool good = true;
                for (std::size_t s = 0; s < N; ++s)
                    for (std::uint32_t b = 0; b < sources[s].element_bytes; ++b)
                        good &=
                            running.state[where[s] + i * sources[s].element_bytes + b] == kDefined;
                if (reads_target)
                    for (std::uint32_t b = 0; b < target.element_bytes; ++b)
                        good &=
                            running.state[target_start + i * target.element_bytes + b] == kDefined;
                if (!good)
                    std::memset(states.data() + i * target.element_bytes, kUnspecified,
                                target.element_bytes);
            }
        }
        target_start =
            running.write(op, target.view, target_offset, target_bytes, target.role, kDefined);
        if (!defined)
            std::memcpy(running.state.data() + target_start, states.data(), states.size());
        compute(running.ub.data() + target_start, where, count);
    };

    if (shape.contiguous) {
        if (shape.elements == 0) return;
        apply(0, std::array<std::int64_t, N>{}, shape.elements);
        return;
    }
    // Without block strides a run of whole blocks is contiguous and handled at once.
    bool dense = target.block_stride == 1;
    for (const Operand& source : sources) dense &= source.block_stride == 1;
    std::vector<Run> runs;
    for (const Run& run : shape.runs) {
        if (dense && !runs.empty() && runs.back().first + runs.back().count == run.first) {
            runs.back().count += run.count;
        } else {
            runs.push_back(run);
        }
    }
    for (std::uint64_t repeat = 0; repeat < shape.repeats; ++repeat) {
        const bool last = repeat + 1 == shape.repeats && shape.tail != 0;
        for (const Run& run : runs) {
            std::uint32_t count = run.count;
            if (last) {
                if (run.first >= shape.tail) break;
                count = std::min(count, shape.tail - run.first);
            }
            std::array<std::int64_t, N> offsets{};
            for (std::size_t s = 0; s < N; ++s)
                offsets[s] = element_offset(sources[s], repeat, run.first);
            apply(element_offset(target, repeat, run.first), offsets, count);
        }
    }
}

template <class T>
Operand operand(const AscendC::LocalTensor<T>& tensor, const char* role,
                std::int64_t block_stride = 1, std::int64_t repeat_stride = 8) {
    return {tensor.view(), sizeof(T), block_stride, repeat_stride, role};
}

// The scalar of an instruction does not take part in deducing T.
template <class T>
struct Identity {
    using type = T;
};
template <class T>
using Scalar = const typename Identity<T>::type&;

template <class T, class... Allowed>
inline constexpr bool is_one_of = (std::is_same_v<T, Allowed> || ...);

}  // namespace ascend_sim

namespace AscendC {

inline void SetMaskNorm() { ascend_sim::block().counter_mode = false; }
inline void SetMaskCount() { ascend_sim::block().counter_mode = true; }

template <class T, MaskMode mode = MaskMode::NORMAL>
void SetVectorMask(std::uint64_t high, std::uint64_t low) {
    ascend_sim::block().mask_high = high;
    ascend_sim::block().mask_low = low;
}

template <class T, MaskMode mode = MaskMode::NORMAL>
void SetVectorMask(std::int32_t length) {
    ascend_sim::Block& running = ascend_sim::block();
    if (mode == MaskMode::COUNTER) {
        running.mask_high = 0;
        running.mask_low = static_cast<std::uint64_t>(length);
    } else {
        const auto [low, high] = ascend_sim::leading_bits(static_cast<std::uint64_t>(length));
        running.mask_low = low;
        running.mask_high = high;
    }
}

inline void ResetMask() {
    ascend_sim::block().mask_low = ascend_sim::block().mask_high = ~std::uint64_t{0};
}

}  // namespace AscendC
