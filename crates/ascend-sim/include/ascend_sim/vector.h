// Element-wise vector instructions.
#pragma once

#include "vector_engine.h"

namespace ascend_sim {

// Arithmetic of one element. half is computed in f32 and rounded to nearest even once.
#define ASCEND_SIM_FUNCTION(name, result, ...)   \
    struct name {                                \
        template <class T>                       \
        static T apply(__VA_ARGS__) {            \
            return static_cast<T>(result);       \
        }                                        \
    };
ASCEND_SIM_FUNCTION(AddOf, a + b, T a, T b)
ASCEND_SIM_FUNCTION(SubOf, a - b, T a, T b)
ASCEND_SIM_FUNCTION(MulOf, a * b, T a, T b)
ASCEND_SIM_FUNCTION(DivOf, a / b, T a, T b)
ASCEND_SIM_FUNCTION(MaxOf, a > b ? a : b, T a, T b)
ASCEND_SIM_FUNCTION(MinOf, a < b ? a : b, T a, T b)
ASCEND_SIM_FUNCTION(AndOf, a & b, T a, T b)
ASCEND_SIM_FUNCTION(OrOf, a | b, T a, T b)
ASCEND_SIM_FUNCTION(AbsOf, a < T(0) ? -a : a, T a)
ASCEND_SIM_FUNCTION(NotOf, ~a, T a)
ASCEND_SIM_FUNCTION(SqrtOf, std::sqrt(a), T a)
ASCEND_SIM_FUNCTION(ExpOf, std::exp(a), T a)

template <class F, class T>
T evaluate(T a, T b) {
    if constexpr (std::is_same_v<T, half>) {
        return half(F::apply(static_cast<float>(a), static_cast<float>(b)));
    } else if constexpr (std::is_same_v<T, bfloat16_t>) {
        return bfloat16_t(F::apply(AscendC::ToFloat(a), AscendC::ToFloat(b)));
    } else if constexpr (std::is_integral_v<T> &&
                         (std::is_same_v<F, AddOf> || std::is_same_v<F, SubOf> ||
                          std::is_same_v<F, MulOf>)) {
        // Integers wrap around, as unsigned arithmetic does.
        using U = std::make_unsigned_t<T>;
        return static_cast<T>(F::apply(static_cast<U>(a), static_cast<U>(b)));
    } else {
        return F::apply(a, b);
    }
}

template <class F, class T>
T evaluate(T a) {
    if constexpr (std::is_same_v<T, half>) {
        return half(F::apply(static_cast<float>(a)));
    } else {
        return F::apply(a);
    }
}

// Which types an instruction takes on the modelled architecture.
#if __NPU_ARCH__ == 2201
template <class T>
inline constexpr bool kArithmetic = is_one_of<T, std::int16_t, half, std::int32_t, float>;
template <class T>
inline constexpr bool kBitwise = is_one_of<T, std::int16_t, std::uint16_t>;
#else
template <class T>
inline constexpr bool kArithmetic =
    is_one_of<T, std::int16_t, std::uint16_t, half, bfloat16_t, std::int32_t, std::uint32_t, float>;
template <class T>
inline constexpr bool kBitwise =
    is_one_of<T, std::int16_t, std::uint16_t, std::int32_t, std::uint32_t>;
#endif
template <class T>
inline constexpr bool kFloating = is_one_of<T, half, float>;
template <class T>
inline constexpr bool kShift =
    is_one_of<T, std::int16_t, std::uint16_t, std::int32_t, std::uint32_t>;

template <class T>
const T* at_bytes(const Block& running, std::uint32_t where) {
    return reinterpret_cast<const T*>(running.ub.data() + where);
}

template <class F, class T>
void binary(Block& running, const Op& op, const Shape& shape, const Operand& d, const Operand& a,
            const Operand& b) {
    const bool exempt = is_one_of<F, AddOf, SubOf, MulOf, MaxOf, MinOf> &&
                        is_one_of<T, half, std::int32_t, float> &&
                        (b.repeat_stride == 0 || d.repeat_stride == 0);
    if (shape.repeats != 0 || shape.contiguous) {
        check_overlap(running, op, shape, d, a, false);
        check_overlap(running, op, shape, d, b, exempt);
    }
    run_vector<2>(
        running, op, shape, d, {a, b}, false,
        [&](std::uint8_t* target, const std::array<std::uint32_t, 2>& where, std::uint64_t n) {
            T* out = reinterpret_cast<T*>(target);
            const T* x = at_bytes<T>(running, where[0]);
            const T* y = at_bytes<T>(running, where[1]);
            for (std::uint64_t i = 0; i < n; ++i) out[i] = evaluate<F, T>(x[i], y[i]);
        });
}

template <class T, class Compute>
void unary(Block& running, const Op& op, const Shape& shape, const Operand& d, const Operand& a,
           Compute compute) {
    if (shape.repeats != 0 || shape.contiguous) check_overlap(running, op, shape, d, a, false);
    run_vector<1>(
        running, op, shape, d, {a}, false,
        [&](std::uint8_t* target, const std::array<std::uint32_t, 1>& where, std::uint64_t n) {
            T* out = reinterpret_cast<T*>(target);
            const T* x = at_bytes<T>(running, where[0]);
            for (std::uint64_t i = 0; i < n; ++i) out[i] = compute(x[i]);
        });
}

// dst = dst + a * b, the product rounded before the sum (the device's rounding is not documented).
template <class D, class S>
void multiply_add(Block& running, const Op& op, const Shape& shape, const Operand& d,
                  const Operand& a, const Operand& b) {
    if (shape.repeats != 0 || shape.contiguous) {
        check_overlap(running, op, shape, d, a, false);
        check_overlap(running, op, shape, d, b, false);
    }
    run_vector<2>(
        running, op, shape, d, {a, b}, true,
        [&](std::uint8_t* target, const std::array<std::uint32_t, 2>& where, std::uint64_t n) {
            D* out = reinterpret_cast<D*>(target);
            const S* x = at_bytes<S>(running, where[0]);
            const S* y = at_bytes<S>(running, where[1]);
            for (std::uint64_t i = 0; i < n; ++i) {
                const float product = static_cast<float>(x[i]) * static_cast<float>(y[i]);
                out[i] = static_cast<D>(static_cast<float>(out[i]) + product);
            }
        });
}

template <class D, class S>
void axpy(Block& running, const Op& op, const Shape& shape, const Operand& d, const Operand& a,
          S scalar) {
    if (shape.repeats != 0 || shape.contiguous) check_overlap(running, op, shape, d, a, false);
    run_vector<1>(
        running, op, shape, d, {a}, true,
        [&](std::uint8_t* target, const std::array<std::uint32_t, 1>& where, std::uint64_t n) {
            D* out = reinterpret_cast<D*>(target);
            const S* x = at_bytes<S>(running, where[0]);
            for (std::uint64_t i = 0; i < n; ++i) {
                const float product = static_cast<float>(x[i]) * static_cast<float>(scalar);
                out[i] = static_cast<D>(static_cast<float>(out[i]) + product);
            }
        });
}

// dst = src0 * dst + src1.
template <class T>
void fused_multiply_add(Block& running, const Op& op, const Shape& shape, const Operand& d,
                        const Operand& a, const Operand& b) {
    if (shape.repeats != 0 || shape.contiguous) {
        check_overlap(running, op, shape, d, a, false);
        check_overlap(running, op, shape, d, b, false);
    }
    run_vector<2>(
        running, op, shape, d, {a, b}, true,
        [&](std::uint8_t* target, const std::array<std::uint32_t, 2>& where, std::uint64_t n) {
            T* out = reinterpret_cast<T*>(target);
            const T* x = at_bytes<T>(running, where[0]);
            const T* y = at_bytes<T>(running, where[1]);
            for (std::uint64_t i = 0; i < n; ++i) {
                const float product = static_cast<float>(x[i]) * static_cast<float>(out[i]);
                out[i] = static_cast<T>(product + static_cast<float>(y[i]));
            }
        });
}

// The sum of each repeat's selected elements, one value a repeat, `repeat_stride` of them apart.
// Neighbours are added, then neighbouring sums (the device's order is not documented).
template <class T>
void sum_repeats(Block& running, const Op& op, const Shape& shape, const AscendC::LocalTensor<T>& d,
                 std::int64_t repeat_stride, const Operand& a) {
    running.require_aligned(op, a.view, 0, a.role);
    const UbView target = d.view();
    for (std::uint64_t repeat = 0; repeat < shape.repeats; ++repeat) {
        std::array<T, kRepeatBytes / sizeof(T)> values{};
        bool defined = true;
        for (const Run& run : shape.runs) {
            std::uint32_t where = 0;
            const std::uint64_t bytes = run.count * sizeof(T);
            defined &= running.read(op, a.view, element_offset(a, repeat, run.first), bytes, a.role,
                                    &where);
            for (std::uint32_t i = 0; i < run.count; ++i)
                values[run.first + i] = at_bytes<T>(running, where)[i];
        }
        for (std::size_t n = values.size() / 2; n > 0; n /= 2)
            for (std::size_t i = 0; i < n; ++i)
                values[i] = evaluate<AddOf, T>(values[2 * i], values[2 * i + 1]);
        const std::int64_t offset = static_cast<std::int64_t>(repeat) * repeat_stride * sizeof(T);
        const std::uint32_t to = running.write(op, target, offset, sizeof(T), "dst",
                                               defined ? kDefined : kUnspecified);
        std::memcpy(running.ub.data() + to, &values[0], sizeof(T));
    }
}

// A signed left shift keeps the sign bit, as documented.
template <class T>
T shift_left(T value, std::int64_t bits) {
    constexpr int kWidth = sizeof(T) * 8;
    using U = std::make_unsigned_t<T>;
    const U shifted = bits >= kWidth ? 0 : static_cast<U>(static_cast<U>(value) << bits);
    if constexpr (std::is_unsigned_v<T>) {
        return shifted;
    } else {
        constexpr U kSign = static_cast<U>(U{1} << (kWidth - 1));
        return static_cast<T>((static_cast<U>(value) & kSign) | (shifted & static_cast<U>(~kSign)));
    }
}

template <class T>
T shift_right(T value, std::int64_t bits, bool round) {
    constexpr int kWidth = sizeof(T) * 8;
    T shifted = bits >= kWidth ? (std::is_signed_v<T> && value < 0 ? static_cast<T>(-1) : T{0})
                               : static_cast<T>(value >> bits);
    if (round && bits > 0 && bits <= kWidth && std::is_signed_v<T>)
        shifted = static_cast<T>(shifted + ((value >> (bits - 1)) & 1));
    return shifted;
}

template <class T>
void check_shift(const Op& op, T bits, bool round) {
    require_range("vector-parameter", op, "the shift", static_cast<std::int64_t>(bits), 0,
                  __NPU_ARCH__ == 2201 ? std::int64_t{sizeof(T) * 8} : 64);
    if (round && __NPU_ARCH__ == 3510)
        block().stop("vector-parameter", op.at, "%s: roundEn is not supported on dav-3510",
                     op.name);
}

}  // namespace ascend_sim

namespace AscendC {

// The three forms of a two-source instruction: first n elements, leading mask, bit mask.
#define ASCEND_SIM_TWO_SOURCES(Name, D, S, SET, HEAD, RUN)                               \
    HEAD void Name(const LocalTensor<D>& dst, const LocalTensor<S>& src0,                \
                   const LocalTensor<S>& src1, std::int32_t count, ASCEND_SIM_HERE) {    \
        using namespace ascend_sim;                                                      \
        Block& running = block();                                                        \
        const Op op = running.begin(#Name, at, kPipeV, (types_of<D, S>()));              \
        const Shape shape = first_elements(running, op, count, sizeof(D));               \
        RUN(running, op, shape, operand(dst, "dst"), operand(src0, "src0"),              \
            operand(src1, "src1"));                                                      \
    }                                                                                    \
    HEAD void Name(const LocalTensor<D>& dst, const LocalTensor<S>& src0,                \
                   const LocalTensor<S>& src1, std::uint64_t mask, Narrow8 repeatTime,   \
                   const BinaryRepeatParams& p, ASCEND_SIM_HERE) {                       \
        using namespace ascend_sim;                                                      \
        Block& running = block();                                                        \
        const Op op = running.begin(#Name, at, kPipeV, (types_of<D, S>()));              \
        check_binary_params(op, p);                                                      \
        const Shape shape = leading_mask(running, op, SET, mask, repeatTime, sizeof(D)); \
        RUN(running, op, shape, operand(dst, "dst", p.dstBlkStride, p.dstRepStride),     \
            operand(src0, "src0", p.src0BlkStride, p.src0RepStride),                     \
            operand(src1, "src1", p.src1BlkStride, p.src1RepStride));                    \
    }                                                                                    \
    HEAD void Name(const LocalTensor<D>& dst, const LocalTensor<S>& src0,                \
                   const LocalTensor<S>& src1, std::uint64_t mask[], Narrow8 repeatTime, \
                   const BinaryRepeatParams& p, ASCEND_SIM_HERE) {                       \
        using namespace ascend_sim;                                                      \
        Block& running = block();                                                        \
        const Op op = running.begin(#Name, at, kPipeV, (types_of<D, S>()));              \
        check_binary_params(op, p);                                                      \
        const Shape shape = bit_mask(running, op, SET, mask, repeatTime, sizeof(D));     \
        RUN(running, op, shape, operand(dst, "dst", p.dstBlkStride, p.dstRepStride),     \
            operand(src0, "src0", p.src0BlkStride, p.src0RepStride),                     \
            operand(src1, "src1", p.src1BlkStride, p.src1RepStride));                    \
    }

#define ASCEND_SIM_COMMA ,
#define ASCEND_SIM_BINARY(Name, F, ALLOWED)                                             \
    template <class T, bool isSetMask = true>                                           \
    using Require##Name = std::enable_if_t<ascend_sim::ALLOWED<T>, bool>;               \
    ASCEND_SIM_TWO_SOURCES(Name, T, T, isSetMask,                                       \
                           template <class T ASCEND_SIM_COMMA bool isSetMask =          \
                                         true ASCEND_SIM_COMMA Require##Name<T> = true> \
                           ,                                                            \
                           (binary<F ASCEND_SIM_COMMA T>))

}  // namespace AscendC

namespace ascend_sim {

inline void check_binary_params(const Op& op, const AscendC::BinaryRepeatParams& p) {
    for (const auto& [name, value] :
         {std::pair<const char*, std::int64_t>{"dstBlkStride", p.dstBlkStride},
          {"src0BlkStride", p.src0BlkStride},
          {"src1BlkStride", p.src1BlkStride},
          {"dstRepStride", p.dstRepStride},
          {"src0RepStride", p.src0RepStride},
          {"src1RepStride", p.src1RepStride}})
        require_range("vector-parameter", op, name, value, 0, 255);
}

inline void check_unary_params(const Op& op, const AscendC::UnaryRepeatParams& p) {
    require_range("vector-parameter", op, "dstBlkStride", p.dstBlkStride, 0, kMaxShort);
    require_range("vector-parameter", op, "srcBlkStride", p.srcBlkStride, 0, kMaxShort);
    require_range("vector-parameter", op, "dstRepStride", p.dstRepStride, 0, 255);
    require_range("vector-parameter", op, "srcRepStride", p.srcRepStride, 0, 255);
}

}  // namespace ascend_sim

namespace AscendC {

// A type that the architecture's instruction does not take is no match for the overloads.
ASCEND_SIM_BINARY(Add, AddOf, kArithmetic)
ASCEND_SIM_BINARY(Sub, SubOf, kArithmetic)
ASCEND_SIM_BINARY(Mul, MulOf, kArithmetic)
ASCEND_SIM_BINARY(Max, MaxOf, kArithmetic)
ASCEND_SIM_BINARY(Min, MinOf, kArithmetic)
ASCEND_SIM_BINARY(Div, DivOf, kFloating)
ASCEND_SIM_BINARY(And, AndOf, kBitwise)
ASCEND_SIM_BINARY(Or, OrOf, kBitwise)

#define ASCEND_SIM_FLOAT_HEAD                                                          \
    template <class D, class S, bool isSetMask = true,                                 \
              std::enable_if_t<ascend_sim::kFloating<D> && ascend_sim::kFloating<S> && \
                                   sizeof(D) >= sizeof(S),                             \
                               bool> = true>
ASCEND_SIM_TWO_SOURCES(MulAddDst, D, S, isSetMask, ASCEND_SIM_FLOAT_HEAD, (multiply_add<D, S>))

#define ASCEND_SIM_SAME_HEAD                  \
    template <class T, bool isSetMask = true, \
              std::enable_if_t<ascend_sim::kFloating<T>, bool> = true>
ASCEND_SIM_TWO_SOURCES(FusedMulAdd, T, T, isSetMask, ASCEND_SIM_SAME_HEAD, fused_multiply_add<T>)

// The three forms of an instruction with one source and EXTRA parameters.
#define ASCEND_SIM_ONE_SOURCE(Name, D, S, SET, HEAD, EXTRA, STRIDED_EXTRA, CHECK, RUN)             \
    HEAD void Name(const LocalTensor<D>& dst, const LocalTensor<S>& src EXTRA, std::int32_t count, \
                   ASCEND_SIM_HERE) {                                                              \
        using namespace ascend_sim;                                                                \
        Block& running = block();                                                                  \
        [[maybe_unused]] constexpr bool roundEn = false;                                           \
        const Op op = running.begin(#Name, at, kPipeV, (types_of<D, S>()));                        \
        CHECK;                                                                                     \
        const Shape shape = first_elements(running, op, count, sizeof(D));                         \
        const Operand d = operand(dst, "dst"), a = operand(src, "src");                            \
        RUN;                                                                                       \
    }                                                                                              \
    HEAD void Name(const LocalTensor<D>& dst, const LocalTensor<S>& src EXTRA, std::uint64_t mask, \
                   Narrow8 repeatTime, const UnaryRepeatParams& p STRIDED_EXTRA,                   \
                   ASCEND_SIM_HERE) {                                                              \
        using namespace ascend_sim;                                                                \
        Block& running = block();                                                                  \
        const Op op = running.begin(#Name, at, kPipeV, (types_of<D, S>()));                        \
        CHECK;                                                                                     \
        check_unary_params(op, p);                                                                 \
        const Shape shape = leading_mask(running, op, SET, mask, repeatTime, sizeof(D));           \
        const Operand d = operand(dst, "dst", p.dstBlkStride, p.dstRepStride);                     \
        const Operand a = operand(src, "src", p.srcBlkStride, p.srcRepStride);                     \
        RUN;                                                                                       \
    }                                                                                              \
    HEAD void Name(const LocalTensor<D>& dst, const LocalTensor<S>& src EXTRA,                     \
                   std::uint64_t mask[], Narrow8 repeatTime,                                       \
                   const UnaryRepeatParams& p STRIDED_EXTRA, ASCEND_SIM_HERE) {                    \
        using namespace ascend_sim;                                                                \
        Block& running = block();                                                                  \
        const Op op = running.begin(#Name, at, kPipeV, (types_of<D, S>()));                        \
        CHECK;                                                                                     \
        check_unary_params(op, p);                                                                 \
        const Shape shape = bit_mask(running, op, SET, mask, repeatTime, sizeof(D));               \
        const Operand d = operand(dst, "dst", p.dstBlkStride, p.dstRepStride);                     \
        const Operand a = operand(src, "src", p.srcBlkStride, p.srcRepStride);                     \
        RUN;                                                                                       \
    }

#define ASCEND_SIM_SCALAR ASCEND_SIM_COMMA ascend_sim::Scalar<T> scalarValue
#define ASCEND_SIM_ROUND ASCEND_SIM_COMMA bool roundEn
#define ASCEND_SIM_HEAD(ALLOWED)                                              \
    template <class T ASCEND_SIM_COMMA bool isSetMask = true ASCEND_SIM_COMMA \
                  std::enable_if_t<ascend_sim::ALLOWED<T> ASCEND_SIM_COMMA bool> = true>

ASCEND_SIM_ONE_SOURCE(Adds, T, T, isSetMask, ASCEND_SIM_HEAD(kArithmetic), ASCEND_SIM_SCALAR, , ,
                      unary<T>(running, op, shape, d, a,
                               [&](T x) { return evaluate<AddOf, T>(x, scalarValue); }))
ASCEND_SIM_ONE_SOURCE(Muls, T, T, isSetMask, ASCEND_SIM_HEAD(kArithmetic), ASCEND_SIM_SCALAR, , ,
                      unary<T>(running, op, shape, d, a,
                               [&](T x) { return evaluate<MulOf, T>(x, scalarValue); }))
ASCEND_SIM_ONE_SOURCE(Maxs, T, T, isSetMask, ASCEND_SIM_HEAD(kArithmetic), ASCEND_SIM_SCALAR, , ,
                      unary<T>(running, op, shape, d, a,
                               [&](T x) { return evaluate<MaxOf, T>(x, scalarValue); }))
ASCEND_SIM_ONE_SOURCE(Mins, T, T, isSetMask, ASCEND_SIM_HEAD(kArithmetic), ASCEND_SIM_SCALAR, , ,
                      unary<T>(running, op, shape, d, a,
                               [&](T x) { return evaluate<MinOf, T>(x, scalarValue); }))
ASCEND_SIM_ONE_SOURCE(ShiftLeft, T, T, isSetMask, ASCEND_SIM_HEAD(kShift), ASCEND_SIM_SCALAR, ,
                      check_shift<T>(op, scalarValue, false),
                      unary<T>(running, op, shape, d, a,
                               [&](T x) { return shift_left<T>(x, scalarValue); }))
ASCEND_SIM_ONE_SOURCE(ShiftRight, T, T, isSetMask, ASCEND_SIM_HEAD(kShift), ASCEND_SIM_SCALAR,
                      ASCEND_SIM_ROUND = false, check_shift<T>(op, scalarValue, roundEn),
                      unary<T>(running, op, shape, d, a,
                               [&](T x) { return shift_right<T>(x, scalarValue, roundEn); }))
ASCEND_SIM_ONE_SOURCE(Abs, T, T, isSetMask, ASCEND_SIM_HEAD(kFloating), , , ,
                      unary<T>(running, op, shape, d, a,
                               [&](T x) { return evaluate<AbsOf, T>(x); }))
ASCEND_SIM_ONE_SOURCE(Not, T, T, isSetMask, ASCEND_SIM_HEAD(kBitwise), , , ,
                      unary<T>(running, op, shape, d, a,
                               [&](T x) { return evaluate<NotOf, T>(x); }))
ASCEND_SIM_ONE_SOURCE(Sqrt, T, T, isSetMask, ASCEND_SIM_HEAD(kFloating), , , ,
                      unary<T>(running, op, shape, d, a,
                               [&](T x) { return evaluate<SqrtOf, T>(x); }))
ASCEND_SIM_ONE_SOURCE(Exp, T, T, isSetMask, ASCEND_SIM_HEAD(kFloating), , , ,
                      unary<T>(running, op, shape, d, a,
                               [&](T x) { return evaluate<ExpOf, T>(x); }))

#define ASCEND_SIM_SUM_REPEATS(MASK_TYPE, MASKED)                                                  \
    template <class T, bool isSetMask = true,                                                      \
              std::enable_if_t<ascend_sim::kFloating<T>, bool> = true>                             \
    void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, MASK_TYPE,           \
                        std::int32_t repeatTime, std::int32_t dstRepStride,                        \
                        std::int32_t srcBlkStride, std::int32_t srcRepStride, ASCEND_SIM_HERE) {   \
        using namespace ascend_sim;                                                                \
        Block& running = block();                                                                  \
        const Op op = running.begin("WholeReduceSum", at, kPipeV, types_of<T>());                  \
        require_range("vector-parameter", op, "dstRepStride", dstRepStride, 0, kMaxShort);         \
        require_range("vector-parameter", op, "srcBlkStride", srcBlkStride, 0, kMaxShort);         \
        require_range("vector-parameter", op, "srcRepStride", srcRepStride, 0, kMaxShort);         \
        const Shape shape = MASKED(running, op, isSetMask, mask, repeatTime, sizeof(T));           \
        sum_repeats(running, op, shape, dst, dstRepStride,                                         \
                    operand(src, "src", srcBlkStride, srcRepStride));                              \
    }
ASCEND_SIM_SUM_REPEATS(std::int32_t mask, leading_mask)
ASCEND_SIM_SUM_REPEATS(const std::uint64_t mask[], bit_mask)

#define ASCEND_SIM_AXPY_SCALAR ASCEND_SIM_COMMA const S& scalarValue
ASCEND_SIM_ONE_SOURCE(Axpy, D, S, isSetMask, ASCEND_SIM_FLOAT_HEAD, ASCEND_SIM_AXPY_SCALAR, , ,
                      (axpy<D, S>(running, op, shape, d, a, scalarValue)))

}  // namespace AscendC
