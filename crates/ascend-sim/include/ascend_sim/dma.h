// Copies between global memory and the unified buffer (MTE2 in, MTE3 out) and inside the buffer
// (V).
#pragma once

#include "params.h"
#include "tensors.h"

namespace ascend_sim {

inline std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) {
    return (value + unit - 1) / unit * unit;
}

constexpr std::int64_t kMaxBlockCount = 4095;
constexpr std::int64_t kMaxBlockBytes = 2097151;
constexpr std::int64_t kMaxShort = 65535;

// One transfer of `count` runs of `length` bytes. A step is the distance between the starts of two
// runs.
struct Transfer {
    std::uint64_t count, length;
    std::int64_t global_step, ub_step;
    std::uint64_t left_bytes, right_bytes;  // padding around each run, in the unified buffer
};

inline void check_position(const Op& op, AscendC::TPosition position) {
    using AscendC::TPosition;
    const bool calc = position == TPosition::VECCALC && __NPU_ARCH__ == 2201;
    if (calc || position == TPosition::GM)
        block().stop("dma-parameter", op.at,
                     "%s: a %s tensor takes no part in copies to or from global memory on dav-%d; "
                     "use VECIN or VECOUT",
                     op.name, calc ? "VECCALC" : "GM", __NPU_ARCH__);
}

inline void count_transfer(Block& running, const Op& op, const GmView& global, const Transfer& t,
                           bool write) {
    Counters& counters = running.counters;
    (write ? counters.gm_bytes_written : counters.gm_bytes_read) += t.count * t.length;
    ++(write ? counters.gm_transfers_out : counters.gm_transfers_in);
    running.count(op, write ? "UB -> GM" : "GM -> UB", t.count * t.length);
    (write ? counters.gm_bursts_out : counters.gm_bursts_in) += t.count;
    running.record(op, global.start, t.length, static_cast<std::uint64_t>(t.global_step), t.count,
                   write);
}

// GM -> UB. `fill` is the padding element, `filled` whether padding has a value at all.
template <class T>
void load(Block& running, const Op& op, const UbView& target, const GmView& source,
          const Transfer& t, T fill, bool filled) {
    running.require_aligned(op, target, 0, "dst");
    for (std::uint64_t run = 0; run < t.count; ++run) {
        const std::int64_t from = static_cast<std::int64_t>(run) * t.global_step;
        const std::int64_t to = static_cast<std::int64_t>(run) * t.ub_step;
        const std::uint8_t* bytes = running.global(op, source, from, t.length, "src", false);
        const std::uint64_t used = t.left_bytes + t.length + t.right_bytes;
        const std::uint64_t whole = round_up(used, kGranuleBytes);
        const std::uint32_t at = running.write(
            op, target, to, whole, "dst", filled && used != t.length ? kDefined : kUnspecified);
        std::uint8_t* destination = running.ub.data() + at;
        if (filled && used != t.length) {
            for (std::uint64_t i = 0; i + sizeof(T) <= whole; i += sizeof(T))
                std::memcpy(destination + i, &fill, sizeof(T));
        } else {
            std::memset(destination, 0xff, whole);
        }
        std::memcpy(destination + t.left_bytes, bytes, t.length);
        std::memset(running.state.data() + at + t.left_bytes, kDefined, t.length);
    }
    count_transfer(running, op, source, t, false);
}

// UB -> GM.
template <class T>
void add_in_place(std::uint8_t* target, const std::uint8_t* source, std::uint64_t bytes) {
    for (std::uint64_t i = 0; i + sizeof(T) <= bytes; i += sizeof(T)) {
        T sum, term;
        std::memcpy(&sum, target + i, sizeof(T));
        std::memcpy(&term, source + i, sizeof(T));
        if constexpr (std::is_same_v<T, half>) {
            sum = half(static_cast<float>(sum) + static_cast<float>(term));
        } else if constexpr (std::is_same_v<T, bfloat16_t>) {
            sum = bfloat16_t(AscendC::ToFloat(sum) + AscendC::ToFloat(term));
        } else {
            sum = static_cast<T>(sum + term);
        }
        std::memcpy(target + i, &sum, sizeof(T));
    }
}

template <class T>
void store(Block& running, const Op& op, const GmView& target, const UbView& source,
           const Transfer& t) {
    running.require_aligned(op, source, 0, "src");
    for (std::uint64_t run = 0; run < t.count; ++run) {
        const std::int64_t to = static_cast<std::int64_t>(run) * t.global_step;
        const std::int64_t from = static_cast<std::int64_t>(run) * t.ub_step;
        std::uint32_t at;
        const bool defined = running.read(op, source, from, t.length, "src", &at);
        if (!defined)
            running.report(
                "ub-undefined-read", op.at,
                "%s: bytes of %s without a defined value (padding of a copy) go to global memory",
                op.name, running.describe(source).c_str());
        std::uint8_t* bytes = running.global(op, target, to, t.length, "dst", true);
        if (running.atomic_add) {
            add_in_place<T>(bytes, running.ub.data() + at, t.length);
        } else {
            std::memcpy(bytes, running.ub.data() + at, t.length);
        }
    }
    count_transfer(running, op, target, t, true);
}

template <class Params>
bool check_short_params(const Op& op, const Params& params) {
    require_range("dma-parameter", op, "blockCount", params.blockCount, 0, kMaxBlockCount);
    require_range("dma-parameter", op, "blockLen (32-byte units)", params.blockLen, 0, kMaxShort);
    require_range("dma-parameter", op, "srcGap", params.srcGap, 0, kMaxShort);
    require_range("dma-parameter", op, "dstGap", params.dstGap, 0, kMaxShort);
    return params.blockCount.get() != 0 && params.blockLen.get() != 0;
}

// blockLen and the strides of a padded copy; true when there is something to copy.
inline bool check_ext_params(const Op& op, const AscendC::DataCopyExtParams& params,
                             std::int64_t global_stride, const char* global_name, bool reads_global,
                             std::int64_t ub_stride, const char* ub_name,
                             std::size_t element_bytes) {
    require_range("dma-parameter", op, "blockCount", params.blockCount, 0, kMaxBlockCount);
    require_range("dma-parameter", op, "blockLen (bytes)", params.blockLen, 0, kMaxBlockBytes);
    const std::int64_t wide = __NPU_ARCH__ == 3510;
    require_range("dma-parameter", op, global_name, global_stride,
                  wide && reads_global ? -params.blockLen.get() : 0,
                  wide ? (std::int64_t{1} << 40) - 1 : 0xffffffffLL);
    require_range("dma-parameter", op, ub_name, ub_stride, 0, wide ? kMaxShort : 0xffffffffLL);
    if (params.blockLen.get() % static_cast<std::int64_t>(element_bytes) != 0)
        block().stop("dma-parameter", op.at,
                     "%s: blockLen of %lld bytes is not a multiple of the element size %zu",
                     op.name, static_cast<long long>(params.blockLen.get()), element_bytes);
    return params.blockCount.get() != 0 && params.blockLen.get() != 0;
}

inline Transfer short_transfer(const AscendC::DataCopyParams& params, std::int64_t global_gap,
                               std::int64_t ub_gap) {
    const std::uint64_t length = static_cast<std::uint64_t>(params.blockLen.get()) * kGranuleBytes;
    return {static_cast<std::uint64_t>(params.blockCount.get()),
            length,
            static_cast<std::int64_t>(length) + global_gap * kGranuleBytes,
            static_cast<std::int64_t>(length) + ub_gap * kGranuleBytes,
            0,
            0};
}

template <class T>
Transfer contiguous(Block& running, const Op& op, std::uint32_t elements) {
    const std::uint64_t bytes = std::uint64_t{elements} * sizeof(T);
    if (bytes % kGranuleBytes != 0)
        running.report("dma-parameter", op.at,
                       "%s: %u elements are %llu bytes, not a multiple of 32: the device drops the "
                       "rest; use DataCopyPad",
                       op.name, elements, static_cast<unsigned long long>(bytes));
    return {1, bytes / kGranuleBytes * kGranuleBytes, 0, 0, 0, 0};
}

template <class T>
void require_element_aligned(Block& running, const Op& op, const GmView& view) {
    if (view.start % sizeof(T) != 0)
        running.stop("dma-parameter", op.at,
                     "%s: the global address is not aligned to the element of %zu bytes", op.name,
                     sizeof(T));
}

}  // namespace ascend_sim

namespace AscendC {

template <class T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, std::uint32_t count,
              ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("DataCopy(UB, GM)", at, kPipeMte2);
    check_position(op, dst.GetPosition());
    require_element_aligned<T>(running, op, src.view());
    const Transfer t = contiguous<T>(running, op, count);
    if (t.length != 0) load<T>(running, op, dst.view(), src.view(), t, T{}, false);
}

template <class T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, std::uint32_t count,
              ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("DataCopy(GM, UB)", at, kPipeMte3);
    check_position(op, src.GetPosition());
    require_element_aligned<T>(running, op, dst.view());
    const Transfer t = contiguous<T>(running, op, count);
    if (t.length != 0) store<T>(running, op, dst.view(), src.view(), t);
}

template <class T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& params,
              ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("DataCopy(UB, GM)", at, kPipeMte2);
    check_position(op, dst.GetPosition());
    require_element_aligned<T>(running, op, src.view());
    if (check_short_params(op, params))
        load<T>(running, op, dst.view(), src.view(),
                short_transfer(params, params.srcGap, params.dstGap), T{}, false);
}

template <class T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params,
              ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("DataCopy(GM, UB)", at, kPipeMte3);
    check_position(op, src.GetPosition());
    require_element_aligned<T>(running, op, dst.view());
    if (check_short_params(op, params))
        store<T>(running, op, dst.view(), src.view(),
                 short_transfer(params, params.dstGap, params.srcGap));
}

template <class T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src,
                 const DataCopyExtParams& params, const DataCopyPadExtParams<T>& padding,
                 ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("DataCopyPad(UB, GM)", at, kPipeMte2);
    check_position(op, dst.GetPosition());
    if (!check_ext_params(op, params, params.srcStride, "srcStride (bytes)", true, params.dstStride,
                          "dstStride (32-byte blocks)", sizeof(T)))
        return;
    constexpr std::int64_t kMaxPadding = kGranuleBytes / sizeof(T);
    require_range("dma-parameter", op, "leftPadding (elements)", padding.leftPadding, 0,
                  kMaxPadding);
    require_range("dma-parameter", op, "rightPadding (elements)", padding.rightPadding, 0,
                  kMaxPadding);
    if constexpr (sizeof(T) == 8) {
        if (padding.isPad && padding.paddingValue != T{})
            running.stop("dma-parameter", op.at, "%s: paddingValue must be 0 for 64-bit elements",
                         op.name);
    }
    const std::uint64_t length = static_cast<std::uint64_t>(params.blockLen.get());
    const std::uint64_t left = static_cast<std::uint64_t>(padding.leftPadding.get()) * sizeof(T);
    const std::uint64_t right = static_cast<std::uint64_t>(padding.rightPadding.get()) * sizeof(T);
    const Transfer t{static_cast<std::uint64_t>(params.blockCount.get()),
                     length,
                     static_cast<std::int64_t>(length) + params.srcStride.get(),
                     static_cast<std::int64_t>(round_up(left + length + right, kGranuleBytes)) +
                         params.dstStride.get() * kGranuleBytes,
                     left,
                     right};
    load<T>(running, op, dst.view(), src.view(), t, padding.paddingValue, padding.isPad);
}

template <class T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src,
                 const DataCopyExtParams& params, ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("DataCopyPad(GM, UB)", at, kPipeMte3);
    check_position(op, src.GetPosition());
    if (!check_ext_params(op, params, params.dstStride, "dstStride (bytes)", false,
                          params.srcStride, "srcStride (32-byte blocks)", sizeof(T)))
        return;
    const std::uint64_t length = static_cast<std::uint64_t>(params.blockLen.get());
    const Transfer t{static_cast<std::uint64_t>(params.blockCount.get()),
                     length,
                     static_cast<std::int64_t>(length) + params.dstStride.get(),
                     static_cast<std::int64_t>(round_up(length, kGranuleBytes)) +
                         params.srcStride.get() * kGranuleBytes,
                     0,
                     0};
    store<T>(running, op, dst.view(), src.view(), t);
}

// Later copies to global memory add instead of overwriting.
template <class T>
void SetAtomicAdd() {
    ascend_sim::block().atomic_add = true;
}

inline void DisableDmaAtomic() { ascend_sim::block().atomic_add = false; }
inline void SetAtomicNone() { DisableDmaAtomic(); }

}  // namespace AscendC
