// half and bfloat16_t, and the rounding of one number format into another, bit for bit.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace AscendC {

enum class RoundMode : std::uint8_t {
    CAST_NONE = 0,
    CAST_RINT,
    CAST_FLOOR,
    CAST_CEIL,
    CAST_ROUND,
    CAST_TRUNC,
    CAST_ODD,
};

}  // namespace AscendC

namespace ascend_sim {

using AscendC::RoundMode;

inline std::uint32_t float_bits(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float bits_float(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Whether a magnitude with a remainder is rounded away from zero. `remainder` is below `unit`.
inline bool rounds_up(RoundMode mode, bool negative, bool odd, std::uint64_t remainder,
                      std::uint64_t unit) {
    const std::uint64_t half_unit = unit / 2;
    switch (mode) {
        case RoundMode::CAST_NONE:
        case RoundMode::CAST_RINT:
            return remainder > half_unit || (remainder == half_unit && odd);
        case RoundMode::CAST_ROUND:
            return remainder >= half_unit;
        case RoundMode::CAST_FLOOR:
            return negative && remainder != 0;
        case RoundMode::CAST_CEIL:
            return !negative && remainder != 0;
        case RoundMode::CAST_ODD:
            return !odd && remainder != 0;
        case RoundMode::CAST_TRUNC:
            return false;
    }
    return false;
}

// Rounds an f32 into a 16-bit format with `kExponentBits` and `kMantissaBits`.
// Saturating, infinities become the largest finite number and NaN becomes zero.
template <int kExponentBits, int kMantissaBits>
std::uint16_t narrow(float value, RoundMode mode, bool saturate) {
    constexpr std::uint32_t kInfinity = ((1u << kExponentBits) - 1) << kMantissaBits;
    constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
    const std::uint32_t bits = float_bits(value);
    const std::uint32_t sign = bits >> 31;
    const std::uint16_t sign_bit = static_cast<std::uint16_t>(sign << 15);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        if (saturate) return 0;
        const std::uint32_t payload = (magnitude & 0x7fffffu) >> (23 - kMantissaBits);
        return static_cast<std::uint16_t>(sign_bit | kInfinity | (1u << (kMantissaBits - 1)) |
                                          payload);
    }
    if (magnitude == 0x7f800000u)
        return static_cast<std::uint16_t>(sign_bit | (saturate ? kInfinity - 1 : kInfinity));
    const int exponent = static_cast<int>(magnitude >> 23);
    const std::uint64_t mantissa = (magnitude & 0x7fffffu) | (exponent ? 0x800000u : 0);
    const int target =
        (exponent ? exponent : 1) - 127 + kBias;  // biased exponent in the target format
    int shift = 23 - kMantissaBits + (target < 1 ? 1 - target : 0);
    if (shift > 60) shift = 60;
    const std::uint64_t unit = std::uint64_t{1} << shift;
    std::uint64_t kept = mantissa >> shift;
    if (rounds_up(mode, sign != 0, kept & 1, mantissa & (unit - 1), unit)) ++kept;
    // The implicit bit of `kept` carries into the exponent field, also when rounding overflowed.
    const std::uint64_t field = static_cast<std::uint64_t>(target < 1 ? 0 : target - 1)
                                << kMantissaBits;
    std::uint64_t result = field + kept;
    if (result >= kInfinity) {
        const bool toward_zero = mode == RoundMode::CAST_TRUNC || mode == RoundMode::CAST_ODD ||
                                 (mode == RoundMode::CAST_FLOOR && !sign) ||
                                 (mode == RoundMode::CAST_CEIL && sign);
        result = saturate || toward_zero ? kInfinity - 1 : kInfinity;
    }
    return static_cast<std::uint16_t>(sign_bit | result);
}

template <int kExponentBits, int kMantissaBits>
float widen(std::uint16_t bits) {
    constexpr std::uint32_t kMantissaMask = (1u << kMantissaBits) - 1;
    constexpr std::uint32_t kExponentMax = (1u << kExponentBits) - 1;
    constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
    const std::uint32_t sign = static_cast<std::uint32_t>(bits >> 15) << 31;
    const std::uint32_t exponent = (bits >> kMantissaBits) & kExponentMax;
    const std::uint32_t mantissa = bits & kMantissaMask;
    if (exponent == kExponentMax) {
        const std::uint32_t payload = mantissa ? 0x400000u | (mantissa << (23 - kMantissaBits)) : 0;
        return bits_float(sign | 0x7f800000u | payload);
    }
    if (exponent == 0) {
        // Exact: the smallest step of the 16-bit format is an f32, and so is every multiple of it.
        static const float step = std::ldexp(1.0f, 1 - kBias - kMantissaBits);
        const float magnitude = static_cast<float>(mantissa) * step;
        return bits_float(sign | float_bits(magnitude));
    }
    return bits_float(sign | ((exponent + 127 - kBias) << 23) | (mantissa << (23 - kMantissaBits)));
}

// Rounds to an integer, saturating at the limits of `I`; NaN becomes zero.
template <class I>
I to_integer(double value, RoundMode mode) {
    if (std::isnan(value)) return 0;
    double rounded = value;
    switch (mode) {
        case RoundMode::CAST_NONE:
        case RoundMode::CAST_RINT:
            rounded = std::nearbyint(value);
            break;
        case RoundMode::CAST_FLOOR:
            rounded = std::floor(value);
            break;
        case RoundMode::CAST_CEIL:
            rounded = std::ceil(value);
            break;
        case RoundMode::CAST_ROUND:
            rounded = std::round(value);
            break;
        case RoundMode::CAST_TRUNC:
        case RoundMode::CAST_ODD:
            rounded = std::trunc(value);
            break;
    }
    // 2^(bits-1) is exact in a double where the largest integer may not be.
    const double limit = std::ldexp(1.0, std::numeric_limits<I>::digits);
    if (rounded >= limit) return std::numeric_limits<I>::max();
    if (rounded < static_cast<double>(std::numeric_limits<I>::min()))
        return std::numeric_limits<I>::min();
    return static_cast<I>(rounded);
}

// Rounds an integer to f32.
inline float integer_to_float(std::int64_t value, RoundMode mode) {
    const bool negative = value < 0;
    std::uint64_t magnitude =
        negative ? 0 - static_cast<std::uint64_t>(value) : static_cast<std::uint64_t>(value);
    int shift = 0;
    while ((magnitude >> shift) >= (std::uint64_t{1} << 24)) ++shift;
    const std::uint64_t unit = std::uint64_t{1} << shift;
    std::uint64_t kept = magnitude >> shift;
    if (shift != 0 && rounds_up(mode, negative, kept & 1, magnitude & (unit - 1), unit)) ++kept;
    const float result = std::ldexp(static_cast<float>(kept), shift);
    return negative ? -result : result;
}

}  // namespace ascend_sim

struct half {
    std::uint16_t bits;
    half() = default;
    half(float value)
        : bits(ascend_sim::narrow<5, 10>(value, AscendC::RoundMode::CAST_RINT, false)) {}
    half(double value) : half(static_cast<float>(value)) {}
    half(int value) : half(static_cast<float>(value)) {}
    operator float() const { return ascend_sim::widen<5, 10>(bits); }
};

struct bfloat16_t {
    std::uint16_t bits;
    bfloat16_t() = default;
    explicit bfloat16_t(float value)
        : bits(ascend_sim::narrow<8, 7>(value, AscendC::RoundMode::CAST_RINT, false)) {}
    explicit bfloat16_t(double value) : bfloat16_t(static_cast<float>(value)) {}
    explicit bfloat16_t(int value) : bfloat16_t(static_cast<float>(value)) {}
};

static_assert(sizeof(half) == 2 && sizeof(bfloat16_t) == 2);

namespace AscendC {

inline float ToFloat(const bfloat16_t& value) { return ascend_sim::widen<8, 7>(value.bits); }
inline float ToFloat(const half& value) { return value; }
inline bfloat16_t ToBfloat16(const float& value) { return bfloat16_t(value); }

}  // namespace AscendC
