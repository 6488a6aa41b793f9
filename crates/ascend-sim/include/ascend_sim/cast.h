// Cast: conversions between number formats, with the rounding modes that each architecture
// documents.
#pragma once

#include "vector_engine.h"

namespace ascend_sim {

using Modes = std::uint32_t;
constexpr Modes mode_bit(RoundMode mode) { return 1u << static_cast<int>(mode); }
constexpr Modes kNone = mode_bit(RoundMode::CAST_NONE);
constexpr Modes kFive = mode_bit(RoundMode::CAST_RINT) | mode_bit(RoundMode::CAST_FLOOR) |
                        mode_bit(RoundMode::CAST_CEIL) | mode_bit(RoundMode::CAST_ROUND) |
                        mode_bit(RoundMode::CAST_TRUNC);
constexpr Modes kOdd = mode_bit(RoundMode::CAST_ODD);
constexpr bool k2201 = __NPU_ARCH__ == 2201;

// The modes of a conversion; 0 where the architecture has none.
template <class D, class S>
constexpr Modes cast_modes() {
    using std::int16_t, std::int32_t, std::int64_t;
    const auto is = [](auto d, auto s) {
        return std::is_same_v<D, typename decltype(d)::type> &&
               std::is_same_v<S, typename decltype(s)::type>;
    };
    const Identity<float> f32;
    const Identity<half> f16;
    const Identity<bfloat16_t> bf16;
    const Identity<int16_t> i16;
    const Identity<int32_t> i32;
    const Identity<int64_t> i64;
    if (is(f32, f16) || is(f32, bf16)) return kNone;
    if (is(f16, f32)) return kFive | kOdd | kNone;
    if (is(bf16, f32)) return kFive;
    if (is(f16, bf16) || is(bf16, f16)) return k2201 ? 0 : kFive;
    if (is(f32, f32) || is(i32, f32) || is(i16, f32) || is(i64, f32) || is(f32, i64)) return kFive;
    if (is(f32, i32) || is(f16, i16)) return k2201 ? kFive | kNone : kFive;
    if (is(i32, f16) || is(i16, f16) || is(i32, bf16)) return kFive;
    if (is(i16, i32) || is(i64, i32) || is(i32, i64) || is(f32, i16)) return kNone;
    return 0;
}

template <class S>
float float_of(S value) {
    if constexpr (std::is_same_v<S, bfloat16_t>) {
        return AscendC::ToFloat(value);
    } else {
        return static_cast<float>(value);
    }
}

template <class D, class S>
D convert(S value, RoundMode mode, bool saturate) {
    if constexpr (std::is_integral_v<S> && std::is_integral_v<D>) {
        const std::int64_t wide = value;
        return static_cast<D>(std::clamp<std::int64_t>(wide, std::numeric_limits<D>::min(),
                                                       std::numeric_limits<D>::max()));
    } else if constexpr (std::is_integral_v<S> && std::is_same_v<D, float>) {
        return integer_to_float(value, mode);
    } else if constexpr (std::is_integral_v<D>) {
        return to_integer<D>(float_of(value), mode);
    } else if constexpr (std::is_same_v<D, float> && std::is_same_v<S, float>) {
        const double rounded = std::isfinite(value) ? static_cast<double>(value) : 0.0;
        if (!std::isfinite(value) || std::fabs(value) >= 8388608.0f) return value;
        return std::copysign(static_cast<float>(to_integer<std::int64_t>(rounded, mode)), value);
    } else if constexpr (std::is_same_v<D, float>) {
        return float_of(value);
    } else {
        constexpr bool kHalf = std::is_same_v<D, half>;
        D result;
        result.bits = narrow < kHalf ? 5 : 8, kHalf ? 10 : 7 > (float_of(value), mode, saturate);
        return result;
    }
}

template <class D, class S>
void cast(Block& running, const Op& op, const Shape& shape, const Operand& d, const Operand& a,
          RoundMode mode) {
    static_assert(cast_modes<D, S>() != 0,
                  "Cast: the architecture has no conversion between these types");
    static constexpr const char* kNames[] = {"CAST_NONE",  "CAST_RINT",  "CAST_FLOOR", "CAST_CEIL",
                                             "CAST_ROUND", "CAST_TRUNC", "CAST_ODD"};
    if (!(cast_modes<D, S>() & mode_bit(mode)))
        running.stop("vector-parameter", op.at,
                     "Cast: %s is not documented for this pair of types on dav-%d",
                     kNames[static_cast<int>(mode)], __NPU_ARCH__);
    if (shape.repeats != 0 || shape.contiguous) check_overlap(running, op, shape, d, a, false);
    const bool saturate = running.launch.saturate;
    run_vector<1>(
        running, op, shape, d, {a}, false,
        [&](std::uint8_t* target, const std::array<std::uint32_t, 1>& where, std::uint64_t n) {
            D* out = reinterpret_cast<D*>(target);
            const S* x = reinterpret_cast<const S*>(running.ub.data() + where[0]);
            for (std::uint64_t i = 0; i < n; ++i) out[i] = convert<D, S>(x[i], mode, saturate);
        });
}

template <class D, class S>
constexpr std::uint32_t widest = sizeof(D) > sizeof(S) ? sizeof(D) : sizeof(S);

}  // namespace ascend_sim

namespace AscendC {

template <class D, class S>
void Cast(const LocalTensor<D>& dst, const LocalTensor<S>& src, const RoundMode& mode,
          std::uint32_t count, ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("Cast", at, kPipeV, types_of<D, S>());
    cast<D, S>(running, op, first_elements(running, op, count, widest<D, S>), operand(dst, "dst"),
               operand(src, "src"), mode);
}

template <class D, class S, bool isSetMask = true>
void Cast(const LocalTensor<D>& dst, const LocalTensor<S>& src, const RoundMode& mode,
          std::uint64_t mask, Narrow8 repeatTime, const UnaryRepeatParams& p, ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("Cast", at, kPipeV, types_of<D, S>());
    check_unary_params(op, p);
    const Shape shape = leading_mask(running, op, isSetMask, mask, repeatTime, widest<D, S>);
    cast<D, S>(running, op, shape, operand(dst, "dst", p.dstBlkStride, p.dstRepStride),
               operand(src, "src", p.srcBlkStride, p.srcRepStride), mode);
}

template <class D, class S, bool isSetMask = true>
void Cast(const LocalTensor<D>& dst, const LocalTensor<S>& src, const RoundMode& mode,
          std::uint64_t mask[], Narrow8 repeatTime, const UnaryRepeatParams& p, ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    const Op op = running.begin("Cast", at, kPipeV, types_of<D, S>());
    check_unary_params(op, p);
    const Shape shape = bit_mask(running, op, isSetMask, mask, repeatTime, widest<D, S>);
    cast<D, S>(running, op, shape, operand(dst, "dst", p.dstBlkStride, p.dstRepStride),
               operand(src, "src", p.srcBlkStride, p.srcRepStride), mode);
}

}  // namespace AscendC
