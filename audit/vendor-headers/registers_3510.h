// The register instructions of dav-3510 that the vendor's implementation of the kernels' calls
// reaches. A mask has one entry for each byte, of which an element's first counts; lanes that are
// not selected become zero.
#pragma once

#include <utility>

namespace cce {

constexpr uint32_t kRegisterBytes = 256;

template <class R>
inline uint8_t* raw(R& reg) {
    return reinterpret_cast<uint8_t*>(&reg);
}
template <class R>
using Element = typename R::ActualT;
template <class T>
inline T get(const uint8_t* reg, uint32_t lane) {
    T value;
    std::memcpy(&value, reg + lane * sizeof(T), sizeof value);
    return value;
}
template <class T>
inline void put(uint8_t* reg, uint32_t lane, T value) {
    std::memcpy(reg + lane * sizeof(T), &value, sizeof value);
}

// A mask of the first lanes.
inline vector_bool leading(uint32_t lanes, uint32_t bytes) {
    vector_bool mask{};
    for (uint32_t i = 0; i < kRegisterBytes / bytes; ++i) mask.on[i * bytes] = i < lanes;
    return mask;
}
// Numbers of patterns as the vendor's headers give them to pset.
inline vector_bool pattern(int number, uint32_t bytes) {
    static const uint32_t first[] = {1, 2, 3, 4, 8, 16, 32, 64, 128};
    constexpr int kAll = 0, kHalf = 12, kQuarter = 13, kNone = 15;
    const uint32_t all = kRegisterBytes / bytes;
    if (number >= 1 && number <= 9) return leading(std::min(first[number - 1], all), bytes);
    switch (number) {
        case kAll:
            return leading(all, bytes);
        case kHalf:
            return leading(all / 2, bytes);
        case kQuarter:
            return leading(all / 4, bytes);
        case kNone:
            return leading(0, bytes);
        default:
            core().stop("absent-intrinsic", "mask pattern %d", number);
    }
}
// A mask for what is left of a count, which it takes off.
inline vector_bool next(uint32_t& count, uint32_t bytes) {
    const uint32_t now = std::min(count, kRegisterBytes / bytes);
    count -= now;
    return leading(now, bytes);
}

// d = f(a, b) in the selected lanes of T.
template <class T, class D, class A, class B, class F>
inline void lanes(const char* op, D& d, A& a, B& b, const vector_bool& mask, F f) {
    ++core().issued_by_name[op];
    ++core().counters->vector_instructions;
    uint8_t out[kRegisterBytes] = {};
    for (uint32_t i = 0; i < kRegisterBytes / sizeof(T); ++i)
        if (mask.on[i * sizeof(T)]) put<T>(out, i, f(get<T>(raw(a), i), get<T>(raw(b), i)));
    std::memcpy(raw(d), out, kRegisterBytes);
}
template <class T, class D, class A, class F>
inline void lanes(const char* op, D& d, A& a, const vector_bool& mask, F f) {
    lanes<T>(op, d, a, a, mask, [&](T x, T) { return f(x); });
}
// The unsigned type of an element's size, for what works on bits.
template <uint32_t bytes>
using Bits = std::conditional_t<
    bytes == 1, uint8_t,
    std::conditional_t<bytes == 2, uint16_t, std::conditional_t<bytes == 4, uint32_t, uint64_t>>>;

inline Rounding rounding_of(ROUND mode) {
    switch (mode) {
        case ROUND::R:
            return Rounding::kNearestEven;
        case ROUND::A:
            return Rounding::kNearestAway;
        case ROUND::F:
            return Rounding::kFloor;
        case ROUND::C:
            return Rounding::kCeil;
        case ROUND::Z:
            return Rounding::kZero;
        case ROUND::O:
            return Rounding::kOdd;
        default:
            core().stop("absent-intrinsic", "rounding mode %d", int(mode));
    }
}

}  // namespace cce

// --- masks ---
template <class P>
inline vector_bool pset_b32(P) {
    return cce::pattern(static_cast<int>(P::value), 4);
}
template <class P>
inline vector_bool pset_b16(P) {
    return cce::pattern(static_cast<int>(P::value), 2);
}
inline vector_bool plt_b32(uint32_t& count, CceLiteral) { return cce::next(count, 4); }
inline vector_bool plt_b16(uint32_t& count, CceLiteral) { return cce::next(count, 2); }
// What set_vector_mask set, a bit for each lane.
inline vector_bool movp_b16() {
    vector_bool mask{};
    const cce::Core& c = cce::core();
    for (uint32_t i = 0; i < 128; ++i)
        mask.on[i * 2] = (i < 64 ? c.mask_low >> i : c.mask_high >> (i - 64)) & 1;
    return mask;
}
inline vector_bool movp_b32() {
    vector_bool mask{};
    for (uint32_t i = 0; i < 64; ++i) mask.on[i * 4] = cce::core().mask_low >> i & 1;
    return mask;
}
// Lanes of half the size in the lower half of a register, and back. Other halves are absent.
using LowerHalf = std::integral_constant<HiloPart, static_cast<HiloPart>(0)>;
inline void ppack(vector_bool& dst, const vector_bool& src, LowerHalf) {
    vector_bool mask{};
    for (uint32_t i = 0; i < 128; ++i) mask.on[i] = src.on[2 * i];
    dst = mask;
}
inline void punpack(vector_bool& dst, const vector_bool& src, LowerHalf) {
    vector_bool mask{};
    for (uint32_t i = 0; i < 128; ++i) mask.on[2 * i] = src.on[i];
    dst = mask;
}
template <class... A>
inline void mem_bar(A...) {}

// --- between unified buffer and registers ---
template <class D, class T, class Dist>
inline void vlds(D& d, __ubuf__ T* at, int offset, Dist) {
    // Numbers of distributions as the vendor's headers give them.
    constexpr int kNorm = 0, kUnpack16 = 14, kBlocks32 = 17;
    cce::Core& c = cce::core();
    const uint32_t epoch = c.issue(cce::kV, "vlds");
    const int64_t from = cce::address(at) + offset * int64_t(sizeof(T));
    if (from % 32 != 0) c.stop("ub-misaligned", "vlds at UB byte %ld", long(from));
    constexpr int dist = static_cast<int>(Dist::value);
    uint8_t out[cce::kRegisterBytes] = {};
    if (dist == kNorm) {
        c.check("vlds", "src", from, cce::kRegisterBytes);
        std::memcpy(out, c.ub + from, cce::kRegisterBytes);
    } else if (dist == kUnpack16) {
        c.check("vlds", "src", from, cce::kRegisterBytes / 2);
        for (int i = 0; i < 64; ++i) std::memcpy(out + i * 4, c.ub + from + i * 2, 2);
    } else if (dist == kBlocks32) {
        // Each of eight elements fills a block.
        c.check("vlds", "src", from, 32);
        for (int i = 0; i < 64; ++i) std::memcpy(out + i * 4, c.ub + from + i / 8 * 4, 4);
    } else {
        c.stop("absent-intrinsic", "vlds with distribution %d", dist);
    }
    // It loads a whole register, of which a mask takes a part later: only of the first block it is
    // certain that it is wanted.
    c.ub_read("vlds", cce::kV, epoch, "src", from, 32, false);
    std::memcpy(cce::raw(d), out, cce::kRegisterBytes);
}
template <class D, class T, class Dist>
inline void vsts(D& d, __ubuf__ T* at, int offset, Dist, vector_bool& mask) {
    constexpr int kNorm16 = 1, kNorm32 = 2, kPack32 = 7;
    cce::Core& c = cce::core();
    const uint32_t epoch = c.issue(cce::kV, "vsts");
    const int64_t to = cce::address(at) + offset * int64_t(sizeof(T));
    constexpr int dist = static_cast<int>(Dist::value);
    if (dist != kNorm16 && dist != kNorm32 && dist != kPack32)
        c.stop("absent-intrinsic", "vsts with distribution %d", dist);
    if (to % 32 != 0) c.stop("ub-misaligned", "vsts at UB byte %ld", long(to));
    const uint32_t lane = dist == kNorm16 ? 2 : 4, stored = dist == kPack32 ? 2 : lane;
    for (uint32_t i = 0; i < cce::kRegisterBytes / lane; ++i) {
        if (!mask.on[i * lane]) continue;
        c.ub_write("vsts", cce::kV, epoch, "dst", to + i * stored, stored);
        std::memcpy(c.ub + to + i * stored, cce::raw(d) + i * lane, stored);
    }
}
namespace cce {
// Calls f(byte in the register, byte in the unified buffer) for each selected element; blocks of 32
// bytes are `stride >> 16` blocks apart.
template <class T, class F>
inline void strided(const char* op, int64_t at, uint32_t stride, const vector_bool& mask, F f) {
    if (at % 32 != 0) core().stop("ub-misaligned", "%s at UB byte %ld", op, long(at));
    for (uint32_t byte = 0; byte < kRegisterBytes; byte += sizeof(T))
        if (mask.on[byte]) f(byte, at + int64_t(byte / 32) * (stride >> 16) * 32 + byte % 32);
}
}  // namespace cce
template <class D, class T>
inline void vsldb(D& d, __ubuf__ T* at, uint32_t stride, vector_bool& mask) {
    cce::Core& c = cce::core();
    const uint32_t epoch = c.issue(cce::kV, "vsldb");
    std::memset(cce::raw(d), 0, cce::kRegisterBytes);
    cce::strided<T>("vsldb", cce::address(at), stride, mask, [&](uint32_t byte, int64_t from) {
        c.ub_read("vsldb", cce::kV, epoch, "src", from, sizeof(T));
        std::memcpy(cce::raw(d) + byte, c.ub + from, sizeof(T));
    });
}
template <class D, class T>
inline void vsstb(D& d, __ubuf__ T* at, uint32_t stride, vector_bool& mask) {
    cce::Core& c = cce::core();
    const uint32_t epoch = c.issue(cce::kV, "vsstb");
    cce::strided<T>("vsstb", cce::address(at), stride, mask, [&](uint32_t byte, int64_t to) {
        c.ub_write("vsstb", cce::kV, epoch, "dst", to, sizeof(T));
        std::memcpy(c.ub + to, cce::raw(d) + byte, sizeof(T));
    });
}
// With a step of the address, by the low half of `stride` in blocks, after the access.
template <class D, class T, class Post>
inline void vsldb(D& d, __ubuf__ T*& at, uint32_t stride, vector_bool& mask, Post) {
    vsldb(d, at, stride, mask);
    at += (stride & 0xffff) * 32 / sizeof(T);
}
template <class D, class T, class Post>
inline void vsstb(D& d, __ubuf__ T*& at, uint32_t stride, vector_bool& mask, Post) {
    vsstb(d, at, stride, mask);
    at += (stride & 0xffff) * 32 / sizeof(T);
}
// Stores the first elements of a register at any element, and moves the address past them. The
// device gathers them in `vector_align` until `vstas`, here they are written at once.
template <class D, class T, class Post>
inline void vstus(vector_align&, uint32_t count, D& d, __ubuf__ T*& at, Post) {
    cce::Core& c = cce::core();
    const uint32_t epoch = c.issue(cce::kV, "vstus");
    c.ub_write("vstus", cce::kV, epoch, "dst", cce::address(at), count * sizeof(T));
    std::memcpy(c.ub + cce::address(at), cce::raw(d), count * sizeof(T));
    at += count;
}
template <class T, class Post>
inline void vstas(vector_align&, __ubuf__ T*& at, int32_t offset, Post) {
    at += offset;
}
// `index` counts elements.
template <class D, class T, class I>
inline void vgather2(D& d, __ubuf__ T* at, I& index, vector_bool& mask) {
    using Index = std::make_unsigned_t<cce::Element<I>>;
    cce::Core& c = cce::core();
    const uint32_t epoch = c.issue(cce::kV, "vgather2");
    uint8_t out[cce::kRegisterBytes] = {};
    for (uint32_t i = 0; i < cce::kRegisterBytes / sizeof(T); ++i) {
        if (!mask.on[i * sizeof(T)]) continue;
        const int64_t from =
            cce::address(at) + int64_t(cce::get<Index>(cce::raw(index), i)) * int64_t(sizeof(T));
        c.ub_read("vgather2", cce::kV, epoch, "src", from, sizeof(T));
        std::memcpy(out + i * sizeof(T), c.ub + from, sizeof(T));
    }
    std::memcpy(cce::raw(d), out, cce::kRegisterBytes);
}

// --- arithmetic ---
#define CCE_REGISTER_BINARY(name, Type, expression)                                     \
    template <class D, class A, class B, class Mode, class T = cce::Element<D>>         \
    inline void name(D& d, A& a, B& b, vector_bool& mask, Mode) {                       \
        using Lane = Type;                                                              \
        cce::lanes<Lane>(#name, d, a, b, mask,                                          \
                         [](Lane x, Lane y) { return static_cast<Lane>(expression); }); \
    }
CCE_REGISTER_BINARY(vadd, T, x + y)
CCE_REGISTER_BINARY(vsub, T, x - y)
CCE_REGISTER_BINARY(vmul, T, x* y)
CCE_REGISTER_BINARY(vdiv, T, x / y)
CCE_REGISTER_BINARY(vmax, T, x < y ? y : x)
CCE_REGISTER_BINARY(vmin, T, y < x ? y : x)
CCE_REGISTER_BINARY(vand, cce::Bits<sizeof(T)>, x& y)
CCE_REGISTER_BINARY(vor, cce::Bits<sizeof(T)>, x | y)
CCE_REGISTER_BINARY(vxor, cce::Bits<sizeof(T)>, x ^ y)
template <class D, class A, class Mode, class T = cce::Element<D>>
inline void vnot(D& d, A& a, vector_bool& mask, Mode) {
    using Lane = cce::Bits<sizeof(T)>;
    cce::lanes<Lane>("vnot", d, a, mask, [](Lane x) { return static_cast<Lane>(~x); });
}
template <class D, class A, class Mode, class T = cce::Element<D>>
inline void vsqrt(D& d, A& a, vector_bool& mask, Mode) {
    cce::lanes<T>("vsqrt", d, a, mask, [](T x) { return static_cast<T>(std::sqrt(x)); });
}
template <class D, class A, class Mode, class T = cce::Element<D>>
inline void vexp(D& d, A& a, vector_bool& mask, Mode) {
    cce::lanes<T>("vexp", d, a, mask, [](T x) { return static_cast<T>(std::exp(x)); });
}
// The sum of the selected lanes, in the first. Neighbours are added, then neighbouring sums, as in
// the simulator; the documentation does not say.
template <class D, class A, class Mode, class T = cce::Element<D>>
inline void vcadd(D& d, A& a, vector_bool& mask, Mode) {
    ++cce::core().issued_by_name["vcadd"];
    ++cce::core().counters->vector_instructions;
    constexpr uint32_t lanes = cce::kRegisterBytes / sizeof(T);
    T values[lanes] = {};
    for (uint32_t l = 0; l < lanes; ++l)
        if (mask.on[l * sizeof(T)]) values[l] = cce::get<T>(cce::raw(a), l);
    for (uint32_t n = lanes / 2; n > 0; n /= 2)
        for (uint32_t l = 0; l < n; ++l) values[l] = values[2 * l] + values[2 * l + 1];
    std::memset(cce::raw(d), 0, cce::kRegisterBytes);
    cce::put<T>(cce::raw(d), 0, values[0]);
}
#define CCE_REGISTER_SCALAR(name, expression)                                              \
    template <class D, class A, class S, class Mode, class T = cce::Element<D>>            \
    inline void name(D& d, A& a, S s, vector_bool& mask, Mode) {                           \
        const T y = static_cast<T>(s);                                                     \
        cce::lanes<T>(#name, d, a, mask, [y](T x) { return static_cast<T>(expression); }); \
    }
CCE_REGISTER_SCALAR(vadds, x + y)
CCE_REGISTER_SCALAR(vmuls, x* y)
CCE_REGISTER_SCALAR(vmaxs, x < y ? y : x)
CCE_REGISTER_SCALAR(vmins, y < x ? y : x)
CCE_REGISTER_SCALAR(vshls, std::make_unsigned_t<T>(x) << y)
CCE_REGISTER_SCALAR(vshrs, x >> y)
// d += a * b, rounded twice: the documentation does not say.
template <class D, class A, class B, class Mode, class T = cce::Element<D>>
inline void vmula(D& d, A& a, B& b, vector_bool& mask, Mode) {
    D product = d;
    cce::lanes<T>("vmula", product, a, b, mask, [](T x, T y) { return static_cast<T>(x * y); });
    cce::lanes<T>("vmula_sum", d, d, product, mask, [](T x, T y) { return static_cast<T>(x + y); });
}
template <class D, class S, class Mode, class T = cce::Element<D>>
inline void vdup(D& d, S s, vector_bool& mask, Mode) {
    cce::lanes<T>("vdup", d, d, mask, [&](T) { return static_cast<T>(s); });
}
template <class D, class S, class T = cce::Element<D>>
inline void vbr(D& d, S s) {
    for (uint32_t i = 0; i < cce::kRegisterBytes / sizeof(T); ++i)
        cce::put<T>(cce::raw(d), i, static_cast<T>(s));
}

// --- rearranging ---
// The low halves of 32-bit lanes, into one half of the register.
template <class D, class A, class P>
inline void vpack(D& d, A& a, P) {
    uint8_t out[cce::kRegisterBytes] = {};
    constexpr int high = static_cast<int>(P::value);
    for (int i = 0; i < 64; ++i) std::memcpy(out + high * 128 + i * 2, cce::raw(a) + i * 4, 2);
    std::memcpy(cce::raw(d), out, cce::kRegisterBytes);
}
// Elements of one half of the register, each in a lane of twice its size.
template <class D, class A, class P>
inline void vunpack(D& d, A& a, P) {
    using To = cce::Element<D>;
    using From = cce::Element<A>;
    static_assert(sizeof(To) == 2 * sizeof(From));
    ++cce::core().issued_by_name["vunpack"];
    ++cce::core().counters->vector_instructions;
    constexpr uint32_t n = cce::kRegisterBytes / sizeof(To);
    uint8_t out[cce::kRegisterBytes];
    for (uint32_t i = 0; i < n; ++i)
        cce::put<To>(out, i, cce::get<From>(cce::raw(a), static_cast<int>(P::value) * n + i));
    std::memcpy(cce::raw(d), out, cce::kRegisterBytes);
}
template <class D, class A, class B, class T = cce::Element<D>>
inline void vsel(D& d, A& a, B& b, vector_bool& mask) {
    uint8_t out[cce::kRegisterBytes];
    for (uint32_t i = 0; i < cce::kRegisterBytes / sizeof(T); ++i)
        cce::put<T>(out, i, cce::get<T>(mask.on[i * sizeof(T)] ? cce::raw(a) : cce::raw(b), i));
    std::memcpy(cce::raw(d), out, cce::kRegisterBytes);
}
namespace cce {
// The elements of a and b in turns, the first 2 * 128 bytes into `low`, the rest into `high`.
template <class T, class L, class H, class A, class B>
inline void interleave(L& low, H& high, A& a, B& b) {
    constexpr uint32_t n = kRegisterBytes / sizeof(T);
    uint8_t out[2 * kRegisterBytes];
    for (uint32_t i = 0; i < n; ++i) {
        put<T>(out, 2 * i, get<T>(raw(a), i));
        put<T>(out, 2 * i + 1, get<T>(raw(b), i));
    }
    std::memcpy(raw(low), out, kRegisterBytes);
    std::memcpy(raw(high), out + kRegisterBytes, kRegisterBytes);
}
template <class T, class E, class O, class A, class B>
inline void deinterleave(E& even, O& odd, A& a, B& b) {
    constexpr uint32_t n = kRegisterBytes / sizeof(T);
    uint8_t in[2 * kRegisterBytes], out[2][kRegisterBytes];
    std::memcpy(in, raw(a), kRegisterBytes);
    std::memcpy(in + kRegisterBytes, raw(b), kRegisterBytes);
    for (uint32_t i = 0; i < n; ++i) {
        put<T>(out[0], i, get<T>(in, 2 * i));
        put<T>(out[1], i, get<T>(in, 2 * i + 1));
    }
    std::memcpy(raw(even), out[0], kRegisterBytes);
    std::memcpy(raw(odd), out[1], kRegisterBytes);
}
}  // namespace cce
template <class L, class H, class A, class B, class T = cce::Element<L>>
inline void vintlv(L& low, H& high, A& a, B& b) {
    ++cce::core().issued_by_name["vintlv"];
    ++cce::core().counters->vector_instructions;
    cce::interleave<cce::Bits<sizeof(T)>>(low, high, a, b);
}
template <class E, class O, class A, class B, class T = cce::Element<E>>
inline void vdintlv(E& even, O& odd, A& a, B& b) {
    ++cce::core().issued_by_name["vdintlv"];
    ++cce::core().counters->vector_instructions;
    cce::deinterleave<cce::Bits<sizeof(T)>>(even, odd, a, b);
}

// --- conversions ---
namespace cce {
template <class P, class X>
constexpr bool kIs = std::is_same_v<std::remove_cv_t<decltype(P::value)>, X>;

// Between lanes of 32 bits: `f` takes and gives the bits of a lane. Where a type has 16 bits,
// `part` says which half of the lane it has.
template <class F>
inline void convert(const char* op, uint8_t* d, const uint8_t* a, const vector_bool& mask, F f) {
    ++core().issued_by_name[op];
    ++core().counters->vector_instructions;
    uint8_t out[kRegisterBytes] = {};
    for (uint32_t i = 0; i < kRegisterBytes / 4; ++i)
        if (mask.on[i * 4]) f(i, out, a);
    std::memcpy(d, out, kRegisterBytes);
}
}  // namespace cce
// 16 bits to f32 (by part), s32 to f32 (rounded).
template <class D, class A, class How, class Mode, class T = cce::Element<D>,
          class S = cce::Element<A>>
inline void vcvt(D& d, A& a, vector_bool& mask, How, Mode) {
    if constexpr (std::is_same_v<T, float> && sizeof(S) == 2 && cce::kIs<How, ::Part>) {
        cce::convert("vcvt_widen", cce::raw(d), cce::raw(a), mask,
                     [](uint32_t i, uint8_t* out, const uint8_t* in) {
                         const uint32_t from = 2 * i + static_cast<int>(How::value);
                         const uint16_t bits = cce::get<uint16_t>(in, from);
                         if constexpr (std::is_same_v<S, half>)
                             cce::put<float>(out, i, cce::from_f16(bits));
                         else if constexpr (std::is_same_v<S, int16_t>)
                             cce::put<float>(out, i, float(int16_t(bits)));
                         else
                             cce::put<float>(out, i, cce::from_bf16(bits));
                     });
    } else if constexpr (std::is_same_v<T, float> && std::is_same_v<S, int32_t> &&
                         cce::kIs<How, ROUND>) {
        const cce::Rounding rounding = cce::rounding_of(How::value);
        cce::convert("vcvt_float", cce::raw(d), cce::raw(a), mask,
                     [&](uint32_t i, uint8_t* out, const uint8_t* in) {
                         cce::put<float>(out, i, cce::to_f32(cce::get<int32_t>(in, i), rounding));
                     });
    } else {
        cce_absent("vcvt of these types");
    }
}
// s32 to s16 (saturation, part), f32 to s32 (rounding, saturation).
template <class D, class A, class First, class Second, class Mode, class T = cce::Element<D>,
          class S = cce::Element<A>>
inline void vcvt(D& d, A& a, vector_bool& mask, First, Second, Mode) {
    if constexpr (std::is_same_v<T, int16_t> && std::is_same_v<S, int32_t> &&
                  cce::kIs<Second, ::Part>) {
        cce::convert("vcvt_short", cce::raw(d), cce::raw(a), mask,
                     [](uint32_t i, uint8_t* out, const uint8_t* in) {
                         cce::put<int16_t>(out, 2 * i + static_cast<int>(Second::value),
                                           cce::to_short(cce::get<int32_t>(in, i)));
                     });
    } else if constexpr (std::is_same_v<T, int32_t> && std::is_same_v<S, float> &&
                         cce::kIs<First, ROUND>) {
        const cce::Rounding rounding = cce::rounding_of(First::value);
        cce::convert("vcvt_integer", cce::raw(d), cce::raw(a), mask,
                     [&](uint32_t i, uint8_t* out, const uint8_t* in) {
                         const float x = cce::get<float>(in, i);
                         cce::put<int32_t>(out, i, cce::to_integer<int32_t>(x, rounding));
                     });
    } else {
        cce_absent("vcvt of these types");
    }
}
// f32 to 16 bits.
template <class D, class A, class Round, class Saturation, class Part, class Mode,
          class T = cce::Element<D>, class S = cce::Element<A>>
inline void vcvt(D& d, A& a, vector_bool& mask, Round, Saturation, Part, Mode) {
    if constexpr (std::is_same_v<S, float> && sizeof(T) == 2 && !std::is_integral_v<T>) {
        const cce::Rounding rounding = cce::rounding_of(Round::value);
        cce::convert("vcvt_narrow", cce::raw(d), cce::raw(a), mask,
                     [&](uint32_t i, uint8_t* out, const uint8_t* in) {
                         const float x = cce::get<float>(in, i);
                         cce::put<uint16_t>(out, 2 * i + static_cast<int>(Part::value),
                                            std::is_same_v<T, half> ? cce::to_f16(x, rounding)
                                                                    : cce::to_bf16(x, rounding));
                     });
    } else {
        cce_absent("vcvt of these types");
    }
}

// --- transfers: strides run from start to start, in bytes ---
template <class T, class A, class N, class L, class P, class Q, class Pad, class C, class X,
          class Y>
inline void copy_gm_to_ubuf_align_v2(__ubuf__ T* to, __gm__ T* from, A, N count, L length, P left,
                                     Q right, Pad, C, X gm_stride, Y ub_stride) {
    const uint32_t span = (length + (left + right) * sizeof(T) + 31) / 32 * 32;
    if (count > 1 && (ub_stride < span || ub_stride % 32 != 0))
        cce::core().stop("dma-parameter", "copy_gm_to_ubuf_align_v2: stride %u for %u bytes",
                         uint32_t(ub_stride), span);
    cce::load("copy_gm_to_ubuf_align_v2", cce::address(to), (uint64_t)from, sizeof(T), count,
              length, left, right, uint32_t(gm_stride - length),
              count > 1 ? (ub_stride - span) / 32 : 0);
}
template <class A, class N, class L, class C, class X, class Y>
inline void copy_ubuf_to_gm_align_v2(__gm__ void* to, __ubuf__ void* from, A, N count, L length, C,
                                     X gm_stride, Y ub_stride) {
    const uint32_t span = uint32_t((length + 31) / 32 * 32);
    if (count > 1 && (ub_stride < span || ub_stride % 32 != 0))
        cce::core().stop("dma-parameter", "copy_ubuf_to_gm_align_v2: stride %u for %u bytes",
                         uint32_t(ub_stride), span);
    cce::store("copy_ubuf_to_gm_align_v2", (uint64_t)to, (int64_t)(uint64_t)from, uint32_t(count),
               uint32_t(length), count > 1 ? uint32_t((ub_stride - span) / 32) : 0,
               uint32_t(gm_stride - length));
}
// Loops around a transfer: the kernels use none, and the vendor's pipe sets them to one.
constexpr uint64_t kOneLoop = 1ull << 21 | 1;
inline void set_loop_size_ubtoout(uint64_t size) {
    if (size != kOneLoop) cce_absent("set_loop_size_ubtoout");
}
inline void set_loop_size_outtoub(uint64_t size) {
    if (size != kOneLoop) cce_absent("set_loop_size_outtoub");
}
template <class... A>
inline void set_st_atomic_cfg(A...) {}

// --- buffer ids ---
// Assumed: a release with `mode` (the vendor's EnQue and FreeTensor) publishes what its pipe has
// done, and every get waits for what was published; a release without publishes nothing.
template <class P, class I, class M>
inline void get_buf(P pipe, I id, M) {
    cce::Core& c = cce::core();
    if (uint32_t(id) >= cce::kBufferIds) c.stop("event", "get_buf: id %d", int(id));
    if (c.held[id]++ != 0) c.report("event", "get_buf: id %d is held", int(id));
    c.seen[cce::unit_of(pipe)].join(c.buffer_ids[id]);
}
template <class P, class I, class M>
inline void rls_buf(P pipe, I id, M mode) {
    cce::Core& c = cce::core();
    if (uint32_t(id) >= cce::kBufferIds) c.stop("event", "rls_buf: id %d", int(id));
    if (--c.held[id] != 0) c.report("event", "rls_buf: id %d is not held once", int(id));
    if (mode) c.buffer_ids[id].join(c.completed(cce::unit_of(pipe)));
}
inline uint32_t get_repeat_ceiling(uint32_t count, uint32_t unit) {
    return (count + unit - 1) / unit;
}
