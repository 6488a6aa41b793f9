// LocalTensor and GlobalTensor: typed views of a buffer or of global memory.
#pragma once

#include "numeric.h"
#include "sync.h"

namespace AscendC {

enum class TPosition : std::uint8_t {
    GM,
    A1,
    A2,
    B1,
    B2,
    C1,
    C2,
    CO1,
    CO2,
    VECIN,
    VECOUT,
    VECCALC,
    MAX
};
using QuePosition = TPosition;

enum class CacheMode : std::uint8_t {
    CACHE_MODE_DISABLE = 0,
    CACHE_MODE_NORMAL = 1,
    CACHE_MODE_PERSISTENT = 4
};
enum class CacheLine : std::uint8_t { SINGLE_CACHE_LINE, ENTIRE_DATA_CACHE };
enum class DcciDst : std::uint8_t { CACHELINE_ALL, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };

template <class T>
class LocalTensor {
public:
    using PrimType = T;

    LocalTensor() = default;
    LocalTensor(ascend_sim::UbView view, std::uint32_t elements, TPosition position)
        : view_(view), elements_(elements), position_(position) {}

    LocalTensor operator[](std::uint32_t offset) const {
        using namespace ascend_sim;
        UbView view = view_;
        if (std::uint64_t{offset} * sizeof(T) > view.size_bytes) {
            Block& running = block();
            running.stop("tensor-bounds", running.last,
                         "LocalTensor[%u]: the tensor (%s) has %u elements left; in a statement "
                         "after this line",
                         offset, running.describe(view).c_str(),
                         static_cast<std::uint32_t>(view.size_bytes / sizeof(T)));
        }
        view.start += offset * sizeof(T);
        view.size_bytes -= offset * sizeof(T);
        return LocalTensor(view, elements_ > offset ? elements_ - offset : 0, position_);
    }

    template <class U>
    LocalTensor<U> ReinterpretCast() const {
        return LocalTensor<U>(
            view_, static_cast<std::uint32_t>(std::uint64_t{elements_} * sizeof(T) / sizeof(U)),
            position_);
    }

    T GetValue(std::uint32_t index, ASCEND_SIM_HERE) const {
        using namespace ascend_sim;
        Block& running = block();
        const Op op = running.begin("GetValue", at, kPipeS);
        std::uint32_t where;
        if (!running.read(op, view_, std::int64_t{index} * sizeof(T), sizeof(T), "the tensor",
                          &where))
            running.report("ub-undefined-read", at,
                           "GetValue: element %u of %s holds padding whose value is unspecified",
                           index, running.describe(view_).c_str());
        ++running.counters.scalar_ub_accesses;
        T value;
        std::memcpy(&value, running.ub.data() + where, sizeof value);
        return value;
    }

    template <class V>
    void SetValue(std::uint32_t index, V value, ASCEND_SIM_HERE) const {
        using namespace ascend_sim;
        Block& running = block();
        const Op op = running.begin("SetValue", at, kPipeS);
        const std::uint32_t where = running.write(op, view_, std::int64_t{index} * sizeof(T),
                                                  sizeof(T), "the tensor", kDefined);
        ++running.counters.scalar_ub_accesses;
        const T converted = static_cast<T>(value);
        std::memcpy(running.ub.data() + where, &converted, sizeof converted);
    }

    T operator()(std::uint32_t index, ASCEND_SIM_HERE) const { return GetValue(index, at); }
    void SetSize(std::uint32_t elements) { elements_ = elements; }
    std::uint32_t GetSize() const { return elements_; }
    std::uint32_t GetLength() const { return elements_ * sizeof(T); }
    TPosition GetPosition() const { return position_; }
    // An offset into the unified buffer: host code cannot follow a buffer pointer.
    std::uint64_t GetPhyAddr(std::uint32_t offset = 0) const {
        return view_.start + std::uint64_t{offset} * sizeof(T);
    }

    const ascend_sim::UbView& view() const { return view_; }

private:
    ascend_sim::UbView view_;
    std::uint32_t elements_ = 0;
    TPosition position_ = TPosition::VECCALC;
};

template <class T>
class GlobalTensor {
public:
    using PrimType = T;

    void SetGlobalBuffer(T* address, std::uint64_t elements) {
        view_.start = reinterpret_cast<std::uint64_t>(address);
        view_.size_bytes = elements * sizeof(T);
        view_.bounded = true;
    }

    void SetGlobalBuffer(T* address) {
        view_.start = reinterpret_cast<std::uint64_t>(address);
        view_.size_bytes = 0;
        view_.bounded = false;
    }

    GlobalTensor operator[](std::uint64_t offset) const {
        using namespace ascend_sim;
        GlobalTensor result = *this;
        result.view_.start += offset * sizeof(T);
        if (view_.bounded) {
            if (offset > view_.size_bytes / sizeof(T)) {
                Block& running = block();
                running.stop("gm-out-of-bounds", running.last,
                             "GlobalTensor[%llu]: the tensor has %llu elements left; in a "
                             "statement after this line",
                             static_cast<unsigned long long>(offset),
                             static_cast<unsigned long long>(view_.size_bytes / sizeof(T)));
            }
            result.view_.size_bytes -= offset * sizeof(T);
        }
        return result;
    }

    template <class U>
    GlobalTensor<U> ReinterpretCast() const {
        GlobalTensor<U> result;
        result.assign(view_);
        return result;
    }

    T GetValue(std::uint64_t index, ASCEND_SIM_HERE) const {
        using namespace ascend_sim;
        Block& running = block();
        const Op op = running.begin("GlobalTensor::GetValue", at, kPipeS);
        const std::int64_t offset = static_cast<std::int64_t>(index * sizeof(T));
        const std::uint8_t* bytes =
            running.global(op, view_, offset, sizeof(T), "the tensor", false);
        running.record(op, view_.start + offset, sizeof(T), 0, 1, false);
        running.counters.gm_bytes_read += sizeof(T);
        ++running.counters.scalar_gm_accesses;
        T value;
        std::memcpy(&value, bytes, sizeof value);
        return value;
    }

    void SetValue(std::uint64_t index, T value, ASCEND_SIM_HERE) const {
        using namespace ascend_sim;
        Block& running = block();
        const Op op = running.begin("GlobalTensor::SetValue", at, kPipeS);
        const std::int64_t offset = static_cast<std::int64_t>(index * sizeof(T));
        std::uint8_t* bytes = running.global(op, view_, offset, sizeof(T), "the tensor", true);
        running.record(op, view_.start + offset, sizeof(T), 0, 1, true);
        running.counters.gm_bytes_written += sizeof(T);
        ++running.counters.scalar_gm_accesses;
        std::memcpy(bytes, &value, sizeof value);
    }

    T operator()(std::uint64_t index, ASCEND_SIM_HERE) const { return GetValue(index, at); }
    std::uint64_t GetSize() const { return view_.bounded ? view_.size_bytes / sizeof(T) : 0; }
    T* GetPhyAddr(std::uint64_t offset = 0) const {
        return reinterpret_cast<T*>(view_.start + offset * sizeof(T));
    }
    void SetL2CacheHint(CacheMode) {}

    const ascend_sim::GmView& view() const { return view_; }
    void assign(const ascend_sim::GmView& view) { view_ = view; }

private:
    ascend_sim::GmView view_;
};

// The data cache is not modelled: these order nothing and move nothing.
template <class T, CacheLine, DcciDst = DcciDst::CACHELINE_ALL>
void DataCacheCleanAndInvalid(const GlobalTensor<T>&) {}

}  // namespace AscendC
