// What both architectures have: flags, barriers, masks, transfers, rounding. Parameters are typed:
// an argument of another type or address space does not compile.
#pragma once

#include "core.h"

namespace cce {

inline Unit unit_of(pipe_t pipe) {
    switch (pipe) {
        case PIPE_S:
            return kS;
        case PIPE_V:
            return kV;
        case PIPE_MTE2:
            return kMte2;
        case PIPE_MTE3:
            return kMte3;
        default:
            core().stop("event", "pipe %d does not exist on a vector core", int(pipe));
    }
}

template <class T>
inline int64_t address(__ubuf__ T* pointer) {
#if ASCENDC_CPU_DEBUG
    return (const uint8_t*)pointer - core().ub;
#else
    return (int64_t)(uint64_t)pointer;
#endif
}
inline int64_t address(__ubuf__ void* pointer) { return address((__ubuf__ uint8_t*)pointer); }

inline void check_transfer(const char* op, int64_t ub, uint32_t count, uint32_t length) {
    if (ub % 32 != 0) core().stop("ub-misaligned", "%s: UB byte %ld", op, long(ub));
    if (count == 0 || count > 4095)
        core().report("dma-parameter", "%s: %u blocks, 1..=4095 are allowed", op, count);
    if (length == 0 || length > 2097151)
        core().report("dma-parameter", "%s: blocks of %u bytes, 1..=2097151 are allowed", op,
                      length);
}

// `count` runs of `length` bytes into the unified buffer, each padded on both sides by elements of
// `unit` bytes. Gaps: bytes in global memory, blocks of 32 bytes in the unified buffer.
inline void load(const char* op, int64_t to, uint64_t from, uint32_t unit, uint32_t count,
                 uint32_t length, uint8_t left, uint8_t right, uint32_t gm_gap, uint32_t ub_gap) {
    Core& c = core();
    const uint32_t epoch = c.issue(kMte2, op);
    check_transfer(op, to, count, length);
    if (left * unit > 32 || right * unit > 32)
        c.report("dma-parameter", "%s: padding of %u and %u elements of %u bytes", op, left, right,
                 unit);
    const uint32_t padded = left * unit + length + right * unit;
    const uint32_t span = (padded + 31) / 32 * 32;
    const uint64_t stride = length + uint64_t(gm_gap);
    ++c.counters->gm_transfers_in;
    c.counters->gm_bursts_in += count;
    c.counters->gm_bytes_read += uint64_t(count) * length;
    for (uint32_t i = 0; i < count; ++i) {
        const int64_t ub = to + int64_t(i) * (span + int64_t(ub_gap) * 32);
        const uint8_t* bytes = c.gm(op, from + i * stride, length, false);
        c.ub_write(op, kMte2, epoch, "dst", ub, span);
        // Up to the end of the last block: the hardware writes something or keeps it.
        std::memset(c.ub + ub, 0xff, span);
        uint8_t* at = c.ub + ub;
        for (uint32_t p = 0; p < left; ++p, at += unit) std::memcpy(at, &c.pad_value, unit);
        std::memcpy(at, bytes, length);
        at += length;
        for (uint32_t p = 0; p < right; ++p, at += unit) std::memcpy(at, &c.pad_value, unit);
    }
    c.note_gm(op, kMte2, epoch, from, length, stride, count, false);
}

// The way back.
inline void store(const char* op, uint64_t to, int64_t from, uint32_t count, uint32_t length,
                  uint32_t ub_gap, uint32_t gm_gap) {
    Core& c = core();
    const uint32_t epoch = c.issue(kMte3, op);
    check_transfer(op, from, count, length);
    const uint32_t span = (length + 31) / 32 * 32;
    const uint64_t stride = length + uint64_t(gm_gap);
    ++c.counters->gm_transfers_out;
    c.counters->gm_bursts_out += count;
    c.counters->gm_bytes_written += uint64_t(count) * length;
    for (uint32_t i = 0; i < count; ++i) {
        const int64_t ub = from + int64_t(i) * (span + int64_t(ub_gap) * 32);
        uint8_t* bytes = c.gm(op, to + i * stride, length, true);
        c.ub_read(op, kMte3, epoch, "src", ub, length);
        std::memcpy(bytes, c.ub + ub, length);
    }
    c.note_gm(op, kMte3, epoch, to, length, stride, count, true);
}

template <class To, class From>
inline To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Of a conversion: the last letter of an intrinsic's name.
enum class Rounding : char {
    kNearestEven = 'r',
    kNearestAway = 'a',
    kFloor = 'f',
    kCeil = 'c',
    kZero = 'z',
    kOdd = 'o',
};

// `value` as a whole number. Exact: the callers' values fit a double.
inline double whole(double value, Rounding rounding) {
    switch (rounding) {
        case Rounding::kNearestEven:
            return std::nearbyint(value);
        case Rounding::kNearestAway:
            return std::round(value);
        case Rounding::kFloor:
            return std::floor(value);
        case Rounding::kCeil:
            return std::ceil(value);
        case Rounding::kZero:
            return std::trunc(value);
        case Rounding::kOdd: {
            const double cut = std::trunc(value);
            return cut == value || std::fmod(cut, 2) != 0 ? cut : cut + std::copysign(1.0, value);
        }
    }
    core().stop("absent-intrinsic", "rounding mode %d", int(rounding));
}

// Bit 48 of CTRL clear: conversions saturate.
inline bool saturates() { return (core().ctrl >> 48 & 1) == 0; }

// f32 to a float of 16 bits with `mantissa` bits after the point and least exponent `least`. When
// conversions saturate, NaN becomes zero and what is too large the largest number.
inline uint16_t narrow(float value, int mantissa, int least, float largest, Rounding rounding) {
    const uint32_t bits = bits_of<uint32_t>(value);
    const uint16_t sign = uint16_t(bits >> 31 << 15);
    const uint16_t infinity = uint16_t(0x7fff >> mantissa << mantissa);
    if (std::isnan(value)) {
        if (saturates()) return 0;
        return mantissa == 7 ? uint16_t(bits >> 16 | 0x40) : bits_of<uint16_t>(half(value));
    }
    const uint16_t most = uint16_t(sign | (infinity - 1));
    if (std::isinf(value)) return saturates() ? most : uint16_t(sign | infinity);
    if (value == 0) return sign;
    const int exponent = std::max(std::ilogb(value), least);
    const double rounded = std::ldexp(
        whole(std::ldexp(double(value), mantissa - exponent), rounding), exponent - mantissa);
    if (std::fabs(rounded) > double(largest)) {
        const bool away = rounding == Rounding::kNearestEven ||
                          rounding == Rounding::kNearestAway ||
                          rounding == (sign != 0 ? Rounding::kFloor : Rounding::kCeil);
        return saturates() || !away ? most : uint16_t(sign | infinity);
    }
    // Exact by now; a zero keeps its sign.
    const float exact = std::copysign(float(rounded), value);
    return mantissa == 7 ? uint16_t(bits_of<uint32_t>(exact) >> 16)
                         : bits_of<uint16_t>(half(exact));
}
inline uint16_t to_bf16(float value, Rounding rounding) {
    return narrow(value, 7, -126, bits_of<float>(0x7f7f0000u), rounding);
}
inline uint16_t to_f16(float value, Rounding rounding) {
    return narrow(value, 10, -14, 65504.0f, rounding);
}
// A signalling NaN becomes a quiet one, as of f16; the documentation does not say.
inline float from_bf16(uint16_t bits) {
    const uint32_t quiet = (bits & 0x7fff) > 0x7f80 ? 0x400000 : 0;
    return bits_of<float>(uint32_t(bits) << 16 | quiet);
}
inline float from_f16(uint16_t bits) { return static_cast<float>(bits_of<half>(bits)); }
// A whole number as the f32 next to it.
inline float to_f32(double value, Rounding rounding) {
    constexpr int kMantissa = 23;
    if (value == 0) return 0;
    const int exponent = std::ilogb(value);
    if (exponent <= kMantissa) return float(value);
    const double rounded = whole(std::ldexp(value, kMantissa - exponent), rounding);
    return float(std::ldexp(rounded, exponent - kMantissa));
}
// Saturating, NaN to zero.
template <class Integer>
inline Integer to_integer(float value, Rounding rounding) {
    if (std::isnan(value)) return 0;
    const double low = double(std::numeric_limits<Integer>::min());
    const double high = double(std::numeric_limits<Integer>::max());
    const double rounded = whole(value, rounding);
    if (rounded <= low) return std::numeric_limits<Integer>::min();
    if (rounded >= high) return std::numeric_limits<Integer>::max();
    return static_cast<Integer>(rounded);
}

inline int16_t to_short(int32_t value) {
    return int16_t(std::min(std::max(value, int32_t(INT16_MIN)), int32_t(INT16_MAX)));
}

}  // namespace cce

// --- order ---
inline void set_flag(pipe_t from, pipe_t to, int64_t id) {
    cce::core().set(cce::unit_of(from), cce::unit_of(to), int(id));
}
inline void wait_flag(pipe_t from, pipe_t to, int64_t id) {
    cce::core().wait(cce::unit_of(from), cce::unit_of(to), int(id));
}
inline void pipe_barrier(pipe_t pipe) {
    cce::Core& c = cce::core();
    if (pipe == PIPE_ALL) {
        // The vendor's TPipe issues one when it is destroyed; the simulator counts none for it.
        ++c.issued_by_name["barrier_all"];
        return c.barrier_all();
    }
    ++c.counters->barriers[pipe];
    const cce::Unit unit = cce::unit_of(pipe);
    c.seen[unit].epoch[unit] = c.issued[unit];
}
template <class... A>
inline void dcci(A...) {}
template <class... A>
inline void dsb(A...) {}

// --- state ---
inline void set_mask_count() { cce::core().counter_mode = true; }
inline void set_mask_norm() { cce::core().counter_mode = false; }
inline void set_vector_mask(uint64_t high, uint64_t low) {
    cce::core().mask_high = high;
    cce::core().mask_low = low;
}
inline void set_mov_pad_val(uint64_t value) { cce::core().pad_value = value; }
inline uint64_t get_ctrl() { return cce::core().ctrl; }
inline void set_ctrl(uint64_t value) { cce::core().ctrl = value; }
inline uint64_t get_rsvd_cnt() { return cce::core().gathered; }
inline void set_atomic_none() {}
inline void set_padding(uint64_t) {}
inline int64_t get_block_idx() { return cce::core().index; }
inline int64_t get_block_num() { return cce::core().launch->block_count; }
inline int64_t get_subblockid() { return 0; }
inline int64_t get_subblockdim() { return 1; }
inline __gm__ uint8_t* __get_kfc_workspace_addr() { cce_absent("__get_kfc_workspace_addr"); }
inline int64_t get_pc() { return 0; }
inline int64_t get_imm(int64_t value) { return value; }
namespace bisheng::cce {
inline void metrics_prof_start() {}
inline void metrics_prof_stop() {}
}  // namespace bisheng::cce
[[noreturn]] inline void trap() { cce::core().stop("trap", "trap() was called"); }

// --- scalar ---
// The first bit that is zero; -1 where there is none.
inline int64_t sff0(uint64_t bits) { return ~bits != 0 ? __builtin_ctzll(~bits) : -1; }
inline uint64_t sbitset0(uint64_t bits, int64_t at) { return bits & ~(1ull << at); }
inline uint64_t sbitset1(uint64_t bits, int64_t at) { return bits | (1ull << at); }

// --- transfers of dav-2201, which the headers of dav-3510 name too ---
#define CCE_TRANSFER(suffix, bytes)                                                                \
    inline void copy_gm_to_ubuf_align_##suffix(__ubuf__ void* to, __gm__ void* from, uint8_t,      \
                                               uint16_t count, uint32_t length, uint8_t left,      \
                                               uint8_t right, uint32_t gm_gap, uint32_t ub_gap) {  \
        cce::load("copy_gm_to_ubuf_align_" #suffix, cce::address(to), (uint64_t)from, bytes,       \
                  count, length, left, right, gm_gap, ub_gap);                                     \
    }                                                                                              \
    inline void copy_ubuf_to_gm_align_##suffix(__gm__ void* to, __ubuf__ void* from, uint8_t,      \
                                               uint16_t count, uint32_t length, uint8_t, uint8_t,  \
                                               uint32_t ub_gap, uint32_t gm_gap) {                 \
        cce::store("copy_ubuf_to_gm_align_" #suffix, (uint64_t)to, cce::address(from), count,      \
                   length, ub_gap, gm_gap);                                                        \
    }
CCE_TRANSFER(b8, 1)
CCE_TRANSFER(b16, 2)
CCE_TRANSFER(b32, 4)
// Whole blocks of 32 bytes, which lengths and gaps count.
inline void copy_gm_to_ubuf(__ubuf__ void* to, __gm__ void* from, uint8_t, uint16_t count,
                            uint16_t length, uint16_t gm_gap, uint16_t ub_gap) {
    cce::load("copy_gm_to_ubuf", cce::address(to), (uint64_t)from, 1, count, length * 32u, 0, 0,
              gm_gap * 32u, ub_gap);
}
inline void copy_ubuf_to_gm(__gm__ void* to, __ubuf__ void* from, uint8_t, uint16_t count,
                            uint16_t length, uint16_t ub_gap, uint16_t gm_gap) {
    cce::store("copy_ubuf_to_gm", (uint64_t)to, cce::address(from), count, length * 32u, ub_gap,
               gm_gap * 32u);
}
