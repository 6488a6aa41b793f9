// Scalar accesses to global memory, included after the vendor's headers. Those dereference the
// address, which is the simulated device's; for the element types below it is translated and
// checked as that of a transfer is.
#pragma once

#include "core.h"

namespace cce {

inline uint8_t* scalar_access(const char* op, uint64_t at, uint64_t bytes, bool is_write) {
    Core& c = core();
    const uint32_t epoch = c.issue(kS, op);
    uint8_t* const found = c.gm(op, at, bytes, is_write);
    ++c.counters->scalar_gm_accesses;
    (is_write ? c.counters->gm_bytes_written : c.counters->gm_bytes_read) += bytes;
    c.note_gm(op, kS, epoch, at, bytes, 0, 1, is_write);
    return found;
}
template <class T>
inline T read_scalar(uint64_t at) {
    T value;
    std::memcpy(&value, scalar_access("GlobalTensor::GetValue", at, sizeof value, false),
                sizeof value);
    return value;
}
template <class T>
inline void write_scalar(uint64_t at, T value) {
    std::memcpy(scalar_access("GlobalTensor::SetValue", at, sizeof value, true), &value,
                sizeof value);
}

}  // namespace cce

// A reference could be read or written: the harness has none.
#define CCE_GLOBAL_SCALARS(T)                                                        \
    template <>                                                                      \
    inline T AscendC::GlobalTensor<T>::GetValue(const uint64_t offset) const {       \
        return cce::read_scalar<T>((uint64_t)GetPhyAddr(offset));                    \
    }                                                                                \
    template <>                                                                      \
    inline void AscendC::GlobalTensor<T>::SetValue(const uint64_t offset, T value) { \
        cce::write_scalar((uint64_t)GetPhyAddr(offset), value);                      \
    }                                                                                \
    template <>                                                                      \
    inline __gm__ T& AscendC::GlobalTensor<T>::operator()(const uint64_t) const {    \
        cce_absent("GlobalTensor::operator()");                                      \
    }
CCE_GLOBAL_SCALARS(bool)
CCE_GLOBAL_SCALARS(int8_t)
CCE_GLOBAL_SCALARS(uint8_t)
CCE_GLOBAL_SCALARS(int16_t)
CCE_GLOBAL_SCALARS(uint16_t)
CCE_GLOBAL_SCALARS(half)
CCE_GLOBAL_SCALARS(bfloat16_t)
CCE_GLOBAL_SCALARS(int32_t)
CCE_GLOBAL_SCALARS(uint32_t)
CCE_GLOBAL_SCALARS(float)
CCE_GLOBAL_SCALARS(int64_t)
CCE_GLOBAL_SCALARS(uint64_t)
CCE_GLOBAL_SCALARS(double)
