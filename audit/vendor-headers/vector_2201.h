// The vector instructions of dav-2201, which work on the unified buffer: those that a kernel of
// this project uses or may want, in every type that they take. The rest is absent.
#pragma once

#include "intrinsics.h"

namespace cce {

constexpr uint32_t kRepeatBytes = 256;
constexpr uint32_t kMostLanes = 128;

// An operand: where it starts, bytes of a lane, and how many blocks of 32 bytes lie between blocks
// and between repeats.
struct Side {
    int64_t at;
    uint32_t bytes;
    int64_t block, repeat;
    const char* role;

    int64_t lane(uint64_t r, uint32_t l) const {
        const uint32_t per_block = 32 / bytes;
        return at + (int64_t(r) * repeat + int64_t(l / per_block) * block) * 32 +
               int64_t(l % per_block) * bytes;
    }
};

inline bool masked(uint32_t lane) {
    const Core& c = core();
    return ((lane < 64 ? c.mask_low >> lane : c.mask_high >> (lane - 64)) & 1) != 0;
}

// What an instruction runs over: repeats, and lanes of the last one (counter mode takes a count).
struct Extent {
    uint64_t repeats;
    uint32_t lanes, tail;

    uint32_t lanes_of(uint64_t repeat) const {
        return repeat + 1 == repeats && tail != 0 ? tail : lanes;
    }
};
inline Extent begin(const char* op, uint32_t widest, uint8_t repeat) {
    Core& c = core();
    Extent extent{repeat, kRepeatBytes / widest, 0};
    if (c.counter_mode) {
        const uint64_t count = c.mask_low & 0xffffffff;
        extent.repeats = (count + extent.lanes - 1) / extent.lanes;
        extent.tail = uint32_t(count % extent.lanes);
    } else if (widest == 4 && c.mask_high != 0 && !(c.mask_high == ~0ull && c.mask_low == ~0ull)) {
        c.report("vector-parameter", "%s: high mask 0x%lx for 32-bit lanes", op, c.mask_high);
    }
    if (extent.repeats == 0)
        c.report("vector-parameter", "%s: nothing to do (the repeat count or the count is 0)", op);
    c.counters->vector_repeats += extent.repeats;
    return extent;
}
inline void aligned(const char* op, const Side& side) {
    if (side.at % 32 != 0)
        core().stop("ub-misaligned", "%s: %s starts at UB byte %ld", op, side.role, long(side.at));
}

// Runs an instruction whose lanes are independent: `f` makes the bytes of a lane of the destination
// of those of each source. All lanes of a repeat are read before any is written.
template <size_t N, class F>
inline void run(const char* op, const Side& dst, const Side (&src)[N], uint8_t repeat, F f) {
    Core& c = core();
    const uint32_t epoch = c.issue(kV, op);
    aligned(op, dst);
    uint32_t widest = dst.bytes;
    for (const Side& side : src) {
        aligned(op, side);
        widest = std::max(widest, side.bytes);
    }
    const Extent extent = begin(op, widest, repeat);
    const uint32_t step = 32 / widest;
    for (uint64_t r = 0; r < extent.repeats; ++r) {
        const uint32_t lanes = extent.lanes_of(r);
        const auto on = [&](uint32_t l) { return c.counter_mode || masked(l); };
        // Runs of lanes inside a block, so that each granule is checked once.
        const auto runs = [&](auto touch) {
            for (uint32_t l = 0; l < lanes;) {
                if (!on(l)) {
                    ++l;
                    continue;
                }
                uint32_t next = l + 1;
                while (next < lanes && next % step != 0 && on(next)) ++next;
                touch(l, next - l);
                l = next;
            }
        };
        runs([&](uint32_t l, uint32_t n) {
            for (const Side& side : src)
                c.ub_read(op, kV, epoch, side.role, side.lane(r, l), n * side.bytes);
        });
        runs([&](uint32_t l, uint32_t n) {
            c.ub_write(op, kV, epoch, dst.role, dst.lane(r, l), n * dst.bytes);
        });
        uint8_t in[N][kMostLanes * 4], out[kMostLanes * 4];
        for (uint32_t l = 0; l < lanes; ++l) {
            if (!on(l)) continue;
            for (size_t k = 0; k < N; ++k)
                std::memcpy(in[k] + l * src[k].bytes, c.ub + src[k].lane(r, l), src[k].bytes);
        }
        for (uint32_t l = 0; l < lanes; ++l) {
            if (!on(l)) continue;
            const uint8_t* sources[N];
            for (size_t k = 0; k < N; ++k) sources[k] = in[k] + l * src[k].bytes;
            f(out + l * dst.bytes, sources, l);
        }
        for (uint32_t l = 0; l < lanes; ++l)
            if (on(l)) std::memcpy(c.ub + dst.lane(r, l), out + l * dst.bytes, dst.bytes);
    }
}

template <class T>
inline T get(const uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}
template <class T>
inline void put(uint8_t* at, T value) {
    std::memcpy(at, &value, sizeof value);
}

template <class T, class F>
inline void binary(const char* op, __ubuf__ T* dst, __ubuf__ T* a, __ubuf__ T* b, uint8_t repeat,
                   uint8_t dst_block, uint8_t a_block, uint8_t b_block, uint8_t dst_repeat,
                   uint8_t a_repeat, uint8_t b_repeat, F f) {
    const Side src[] = {{address(a), sizeof(T), a_block, a_repeat, "src0"},
                        {address(b), sizeof(T), b_block, b_repeat, "src1"}};
    run(op, Side{address(dst), sizeof(T), dst_block, dst_repeat, "dst"}, src, repeat,
        [&](uint8_t* out, const uint8_t* const* in, uint32_t) {
            put<T>(out, f(get<T>(in[0]), get<T>(in[1])));
        });
}
template <class D, class S, class F>
inline void unary(const char* op, __ubuf__ D* dst, __ubuf__ S* a, uint8_t repeat,
                  uint16_t dst_block, uint16_t a_block, uint16_t dst_repeat, uint16_t a_repeat,
                  F f) {
    const Side src[] = {{address(a), sizeof(S), a_block, a_repeat, "src"}};
    run(op, Side{address(dst), sizeof(D), dst_block, dst_repeat, "dst"}, src, repeat,
        [&](uint8_t* out, const uint8_t* const* in, uint32_t) { put<D>(out, f(get<S>(in[0]))); });
}

// The sum of each repeat's selected lanes, one value a repeat. Neighbours are added, then
// neighbouring sums, as in the simulator; the documentation does not say.
template <class T>
inline void sum_repeats(const char* op, __ubuf__ T* dst, const Side& src, uint8_t repeat,
                        uint16_t dst_step) {
    Core& c = core();
    const uint32_t epoch = c.issue(kV, op);
    aligned(op, src);
    const Extent extent = begin(op, sizeof(T), repeat);
    for (uint64_t r = 0; r < extent.repeats; ++r) {
        T values[kMostLanes] = {};
        for (uint32_t l = 0; l < extent.lanes_of(r); ++l) {
            if (!c.counter_mode && !masked(l)) continue;
            c.ub_read(op, kV, epoch, src.role, src.lane(r, l), sizeof(T));
            values[l] = get<T>(c.ub + src.lane(r, l));
        }
        for (uint32_t n = extent.lanes / 2; n > 0; n /= 2)
            for (uint32_t l = 0; l < n; ++l) values[l] = values[2 * l] + values[2 * l + 1];
        const int64_t to = address(dst) + int64_t(r) * dst_step * int64_t(sizeof(T));
        c.ub_write(op, kV, epoch, "dst", to, sizeof(T));
        put<T>(c.ub + to, values[0]);
    }
}

// A lane of the destination for each 32-bit byte offset, which counts from `base`.
inline void gather(const char* op, int64_t dst, uint32_t bytes, int64_t offsets, uint32_t base,
                   uint16_t dst_repeat, uint8_t repeat) {
    Core& c = core();
    const uint32_t epoch = c.issue(kV, op);
    if (dst % 32 != 0 || offsets % 32 != 0)
        c.stop("ub-misaligned", "%s: dst at UB byte %ld, offsets at %ld", op, long(dst),
               long(offsets));
#if ASCENDC_CPU_DEBUG
    base = c.gather_from;
#endif
    const Extent extent = begin(op, bytes, repeat);
    for (uint64_t r = 0; r < extent.repeats; ++r) {
        uint8_t out[kRepeatBytes];
        const uint32_t lanes = extent.lanes_of(r);
        const auto on = [&](uint32_t l) { return c.counter_mode || masked(l); };
        for (uint32_t l = 0; l < lanes; ++l) {
            if (!on(l)) continue;
            const int64_t at = offsets + (int64_t(r) * extent.lanes + l) * 4;
            c.ub_read(op, kV, epoch, "offsets", at, 4);
            const uint64_t from = uint64_t(base) + get<uint32_t>(c.ub + at);
            if (from % bytes != 0)
                c.stop("ub-misaligned", "%s: source byte %lu is not a multiple of %u", op, from,
                       bytes);
            c.ub_read(op, kV, epoch, "src", int64_t(from), bytes);
            std::memcpy(out + l * bytes, c.ub + from, bytes);
        }
        for (uint32_t l = 0; l < lanes; ++l) {
            if (!on(l)) continue;
            const int64_t to = dst + int64_t(r) * dst_repeat * 32 + int64_t(l) * bytes;
            c.ub_write(op, kV, epoch, "dst", to, bytes);
            std::memcpy(c.ub + to, out + l * bytes, bytes);
        }
    }
}

// Eight blocks a repeat: copies of the block at each offset (`from_offsets`), or of eight elements,
// each filling a block.
inline void blocks(const char* op, int64_t dst, uint32_t bytes, int64_t src, uint32_t base,
                   bool from_offsets, uint16_t dst_block, uint16_t dst_repeat, uint8_t repeat) {
    Core& c = core();
    const uint32_t epoch = c.issue(kV, op);
    if (dst % 32 != 0 || src % 32 != 0)
        c.stop("ub-misaligned", "%s: dst at UB byte %ld, src at %ld", op, long(dst), long(src));
    c.counters->vector_repeats += repeat;
    const uint32_t step = from_offsets ? 4 : bytes;
    for (uint32_t r = 0; r < repeat; ++r) {
        uint8_t out[8][32];
        for (uint32_t b = 0; b < 8; ++b) {
            const int64_t at = src + int64_t(r * 8 + b) * step;
            c.ub_read(op, kV, epoch, from_offsets ? "offsets" : "src", at, step);
            if (from_offsets) {
                const uint64_t from = uint64_t(base) + get<uint32_t>(c.ub + at);
                if (from % 32 != 0)
                    c.stop("ub-misaligned", "%s: source byte %lu is not a multiple of 32", op,
                           from);
                c.ub_read(op, kV, epoch, "src", int64_t(from), 32);
                std::memcpy(out[b], c.ub + from, 32);
            } else {
                for (uint32_t l = 0; l < 32; l += bytes) std::memcpy(out[b] + l, c.ub + at, bytes);
            }
        }
        for (uint32_t b = 0; b < 8; ++b) {
            const int64_t to = dst + (int64_t(r) * dst_repeat + int64_t(b) * dst_block) * 32;
            c.ub_write(op, kV, epoch, "dst", to, 32);
            std::memcpy(c.ub + to, out[b], 32);
        }
    }
}

// A bit for each lane, packed repeat after repeat.
template <class T, class F>
inline void compare(const char* op, __ubuf__ uint8_t* dst, __ubuf__ T* a, __ubuf__ T* b,
                    uint8_t repeat, uint8_t a_block, uint8_t b_block, uint8_t a_repeat,
                    uint8_t b_repeat, F f) {
    Core& c = core();
    const uint32_t epoch = c.issue(kV, op);
    const Side first{address(a), sizeof(T), a_block, a_repeat, "src0"};
    const Side second{address(b), sizeof(T), b_block, b_repeat, "src1"};
    aligned(op, first);
    aligned(op, second);
    const Extent extent = begin(op, sizeof(T), repeat);
    const uint32_t bytes = extent.lanes / 8;
    for (uint64_t r = 0; r < extent.repeats; ++r) {
        uint8_t out[kMostLanes / 8] = {};
        for (uint32_t l = 0; l < extent.lanes; ++l) {
            c.ub_read(op, kV, epoch, "src0", first.lane(r, l), sizeof(T));
            c.ub_read(op, kV, epoch, "src1", second.lane(r, l), sizeof(T));
            const T x = get<T>(c.ub + first.lane(r, l)), y = get<T>(c.ub + second.lane(r, l));
            out[l / 8] |= uint8_t(f(x, y) ? 1 : 0) << l % 8;
        }
        const int64_t to = address(dst) + int64_t(r) * bytes;
        c.ub_write(op, kV, epoch, "dst", to, bytes);
        std::memcpy(c.ub + to, out, bytes);
    }
}

// Elements that a bit pattern keeps, one after the other. Patterns 1 to 7 are built in; 0 takes the
// bits of `mask`.
inline void reduce_by_pattern(const char* op, int64_t dst, uint32_t bytes, int64_t src,
                              int64_t mask, uint16_t repeats, uint8_t src_block, uint8_t pattern,
                              uint16_t src_repeat, uint8_t mask_repeat) {
    static const uint64_t built_in[] = {0, 0x5555, 0xaaaa, 0x1111, 0x2222, 0x4444, 0x8888, 0xffff};
    Core& c = core();
    const uint32_t epoch = c.issue(kV, op);
    if (pattern > 7) c.stop("vector-parameter", "%s: pattern %u", op, pattern);
    if (dst % 32 != 0 || src % 32 != 0)
        c.stop("ub-misaligned", "%s: dst at UB byte %ld, src at %ld", op, long(dst), long(src));
    c.counters->vector_repeats += repeats;
    const Side side{src, bytes, src_block, src_repeat, "src"};
    const uint32_t lanes =
        c.counter_mode ? uint32_t(c.mask_low & 0xffffffff) : kRepeatBytes / bytes;
    uint64_t kept = 0;
    for (uint32_t r = 0; r < repeats; ++r) {
        for (uint32_t l = 0; l < lanes; ++l) {
            bool keep = (built_in[pattern] >> l % 16 & 1) != 0;
            if (pattern == 0) {
                const int64_t at = mask + int64_t(r) * mask_repeat * 32 + l / 8;
                c.ub_read(op, kV, epoch, "pattern", at, 1);
                keep = (c.ub[at] >> l % 8 & 1) != 0;
            }
            c.ub_read(op, kV, epoch, "src", side.lane(r, l), bytes);
            if (!keep) continue;
            const int64_t to = dst + int64_t(kept++) * bytes;
            c.ub_write(op, kV, epoch, "dst", to, bytes);
            std::memmove(c.ub + to, c.ub + side.lane(r, l), bytes);
        }
    }
    c.gathered = kept;
}

template <class T>
inline T shift_right(T value, uint32_t by, bool round) {
    if (by >= sizeof(T) * 8) return T(value < 0 ? -1 : 0);
    const T shifted = T(value >> by);
    return round && by > 0 ? T(shifted + (value >> (by - 1) & 1)) : shifted;
}

}  // namespace cce

// --- two sources ---
#define CCE_BINARY(name, T, expression)                                                         \
    inline void name(__ubuf__ T* dst, __ubuf__ T* a, __ubuf__ T* b, uint8_t repeat, uint8_t db, \
                     uint8_t ab, uint8_t bb, uint8_t dr, uint8_t ar, uint8_t br) {              \
        cce::binary(#name, dst, a, b, repeat, db, ab, bb, dr, ar, br,                           \
                    [](T x, T y) -> T { return static_cast<T>(expression); });                  \
    }
#define CCE_ARITHMETIC(name, expression)  \
    CCE_BINARY(name, float, expression)   \
    CCE_BINARY(name, half, expression)    \
    CCE_BINARY(name, int16_t, expression) \
    CCE_BINARY(name, int32_t, expression)
CCE_ARITHMETIC(vadd, x + y)
CCE_ARITHMETIC(vsub, x - y)
CCE_ARITHMETIC(vmul, x* y)
CCE_ARITHMETIC(vmax, x < y ? y : x)
CCE_ARITHMETIC(vmin, y < x ? y : x)
CCE_BINARY(vdiv, float, x / y)
CCE_BINARY(vdiv, half, x / y)
CCE_BINARY(vand, int16_t, x& y)
CCE_BINARY(vand, uint16_t, x& y)
CCE_BINARY(vor, int16_t, x | y)
CCE_BINARY(vor, uint16_t, x | y)

// dst += a * b: product and sum round apart, as in the simulator; the documentation does not say.
#define CCE_MULTIPLY_ADD(D, S)                                                                  \
    inline void vmla(__ubuf__ D* dst, __ubuf__ S* a, __ubuf__ S* b, uint8_t repeat, uint8_t db, \
                     uint8_t ab, uint8_t bb, uint8_t dr, uint8_t ar, uint8_t br) {              \
        const cce::Side src[] = {{cce::address(dst), sizeof(D), db, dr, "dst"},                 \
                                 {cce::address(a), sizeof(S), ab, ar, "src0"},                  \
                                 {cce::address(b), sizeof(S), bb, br, "src1"}};                 \
        cce::run("vmla", src[0], src, repeat,                                                   \
                 [](uint8_t* out, const uint8_t* const* in, uint32_t) {                         \
                     const D product = D(cce::get<S>(in[1])) * D(cce::get<S>(in[2]));           \
                     cce::put<D>(out, cce::get<D>(in[0]) + product);                            \
                 });                                                                            \
    }
CCE_MULTIPLY_ADD(float, float)
CCE_MULTIPLY_ADD(half, half)
CCE_MULTIPLY_ADD(float, half)

// --- one source ---
#define CCE_UNARY(name, T, expression)                                                         \
    inline void name(__ubuf__ T* dst, __ubuf__ T* a, uint8_t repeat, uint16_t db, uint16_t ab, \
                     uint16_t dr, uint16_t ar) {                                               \
        cce::unary(#name, dst, a, repeat, db, ab, dr, ar,                                      \
                   [](T x) -> T { return static_cast<T>(expression); });                       \
    }
CCE_UNARY(vnot, int16_t, ~x)
CCE_UNARY(vnot, uint16_t, ~x)
CCE_UNARY(vabs, float, std::fabs(x))
CCE_UNARY(vabs, half, x < 0 ? half(-x) : x)
CCE_UNARY(vrelu, float, x > 0 ? x : 0)
CCE_UNARY(vrelu, half, x > 0 ? x : half(0))
CCE_UNARY(vrelu, int32_t, x > 0 ? x : 0)
CCE_UNARY(vsqrt, float, std::sqrt(x))
CCE_UNARY(vexp, float, std::exp(x))

inline void vcadd(__ubuf__ float* dst, __ubuf__ float* a, uint8_t repeat, uint16_t dr, uint16_t ab,
                  uint16_t ar, bool) {
    cce::sum_repeats("vcadd", dst, {cce::address(a), sizeof(float), ab, ar, "src"}, repeat, dr);
}

// One source and a scalar. Integers wrap.
#define CCE_WITH_SCALAR(name, T, expression)                                           \
    inline void name(__ubuf__ T* dst, __ubuf__ T* a, T y, uint8_t repeat, uint16_t db, \
                     uint16_t ab, uint16_t dr, uint16_t ar) {                          \
        cce::unary(#name, dst, a, repeat, db, ab, dr, ar,                              \
                   [y](T x) -> T { return static_cast<T>(expression); });              \
    }
CCE_WITH_SCALAR(vadds, float, x + y)
CCE_WITH_SCALAR(vadds, half, x + y)
CCE_WITH_SCALAR(vadds, int16_t, x + y)
CCE_WITH_SCALAR(vadds, int32_t, uint32_t(x) + uint32_t(y))
CCE_WITH_SCALAR(vmuls, float, x* y)
CCE_WITH_SCALAR(vmuls, half, x* y)
CCE_WITH_SCALAR(vmuls, int16_t, x* y)
CCE_WITH_SCALAR(vmuls, int32_t, uint32_t(x) * uint32_t(y))
#define CCE_BOUND(name, T, expression)                                                           \
    inline void name(__ubuf__ T* dst, __ubuf__ T* a, T y, uint8_t repeat, uint16_t db,           \
                     uint16_t ab, uint8_t dr, uint8_t ar, bool, bool) {                          \
        cce::unary(#name, dst, a, repeat, db, ab, dr, ar, [y](T x) -> T { return expression; }); \
    }
#define CCE_BOUNDS(T)                  \
    CCE_BOUND(vmaxs, T, x < y ? y : x) \
    CCE_BOUND(vmins, T, y < x ? y : x)
CCE_BOUNDS(float)
CCE_BOUNDS(half)
CCE_BOUNDS(int16_t)
CCE_BOUNDS(int32_t)

// dst += a * scalar.
#define CCE_AXPY(D, S)                                                                  \
    inline void vaxpy(__ubuf__ D* dst, __ubuf__ S* a, S y, uint8_t repeat, uint16_t db, \
                      uint16_t ab, uint8_t dr, uint8_t ar) {                            \
        const cce::Side src[] = {{cce::address(dst), sizeof(D), db, dr, "dst"},         \
                                 {cce::address(a), sizeof(S), ab, ar, "src"}};          \
        cce::run("vaxpy", src[0], src, repeat,                                          \
                 [y](uint8_t* out, const uint8_t* const* in, uint32_t) {                \
                     const D product = D(cce::get<S>(in[1])) * D(y);                    \
                     cce::put<D>(out, cce::get<D>(in[0]) + product);                    \
                 });                                                                    \
    }
CCE_AXPY(float, float)
CCE_AXPY(half, half)
CCE_AXPY(float, half)

#define CCE_SHIFTS(T, Scalar)                                                                  \
    inline void vshl(__ubuf__ T* dst, __ubuf__ T* a, uint32_t by, uint8_t repeat, uint16_t db, \
                     uint16_t ab, uint16_t dr, uint16_t ar) {                                  \
        cce::unary("vshl", dst, a, repeat, db, ab, dr, ar, [by](T x) -> T {                    \
            return by >= sizeof(T) * 8 ? T(0) : T(std::make_unsigned_t<T>(x) << by);           \
        });                                                                                    \
    }                                                                                          \
    inline void vshr(__ubuf__ T* dst, __ubuf__ T* a, Scalar by, uint8_t repeat, uint16_t db,   \
                     uint16_t ab, uint16_t dr, uint16_t ar, bool round) {                      \
        cce::unary("vshr", dst, a, repeat, db, ab, dr, ar,                                     \
                   [by, round](T x) { return cce::shift_right<T>(x, uint32_t(by), round); });  \
    }
CCE_SHIFTS(uint16_t, uint32_t)
CCE_SHIFTS(uint32_t, uint32_t)
CCE_SHIFTS(int16_t, int32_t)
CCE_SHIFTS(int32_t, int32_t)

#define CCE_COPY(T)                                                                             \
    inline void vcopy(__ubuf__ T* dst, __ubuf__ T* a, uint8_t repeat, uint16_t db, uint16_t ab, \
                      uint16_t dr, uint16_t ar) {                                               \
        cce::unary("vcopy", dst, a, repeat, db, ab, dr, ar, [](T x) { return x; });             \
    }
CCE_COPY(uint16_t)
CCE_COPY(uint32_t)

// --- no source ---
template <class T>
inline void vector_dup(__ubuf__ T* dst, T value, uint8_t repeat, uint16_t db, uint16_t, uint16_t dr,
                       uint16_t) {
    const cce::Side to{cce::address(dst), sizeof(T), db, dr, "dst"};
    cce::Core& c = cce::core();
    const uint32_t epoch = c.issue(cce::kV, "vector_dup");
    cce::aligned("vector_dup", to);
    const cce::Extent extent = cce::begin("vector_dup", sizeof(T), repeat);
    for (uint64_t r = 0; r < extent.repeats; ++r)
        for (uint32_t l = 0; l < extent.lanes_of(r); ++l) {
            if (!c.counter_mode && !cce::masked(l)) continue;
            c.ub_write("vector_dup", cce::kV, epoch, "dst", to.lane(r, l), sizeof(T));
            std::memcpy(c.ub + to.lane(r, l), &value, sizeof value);
        }
}

// --- rearranging ---
#define CCE_GATHER(T)                                                                             \
    inline void vgather(__ubuf__ T* dst, __ubuf__ uint32_t* offsets, uint32_t base, uint16_t dr,  \
                        uint8_t repeat) {                                                         \
        cce::gather("vgather", cce::address(dst), sizeof(T), cce::address(offsets), base, dr,     \
                    repeat);                                                                      \
    }                                                                                             \
    inline void vgatherb(__ubuf__ T* dst, __ubuf__ uint32_t* offsets, uint32_t base, uint16_t dr, \
                         uint8_t db, uint8_t repeat) {                                            \
        cce::blocks("vgatherb", cce::address(dst), sizeof(T), cce::address(offsets), base, true,  \
                    db, dr, repeat);                                                              \
    }                                                                                             \
    inline void vbrcb(__ubuf__ T* dst, __ubuf__ T* src, uint16_t db, uint16_t dr,                 \
                      uint8_t repeat) {                                                           \
        cce::blocks("vbrcb", cce::address(dst), sizeof(T), cce::address(src), 0, false, db, dr,   \
                    repeat);                                                                      \
    }                                                                                             \
    inline void vreducev2(__ubuf__ T* dst, __ubuf__ T* src, __ubuf__ T* mask, uint16_t repeats,   \
                          uint8_t src_block, uint8_t pattern, uint16_t src_repeat,                \
                          uint8_t mask_repeat) {                                                  \
        cce::reduce_by_pattern("vreducev2", cce::address(dst), sizeof(T), cce::address(src),      \
                               cce::address(mask), repeats, src_block, pattern, src_repeat,       \
                               mask_repeat);                                                      \
    }
CCE_GATHER(uint16_t)
CCE_GATHER(uint32_t)

// --- comparing and selecting ---
#define CCE_COMPARE(condition, T, expression)                                                 \
    inline void vcmpv_##condition(__ubuf__ uint8_t* dst, __ubuf__ T* a, __ubuf__ T* b,        \
                                  uint8_t repeat, uint8_t, uint8_t ab, uint8_t bb, uint8_t,   \
                                  uint8_t ar, uint8_t br) {                                   \
        cce::compare("vcmpv_" #condition, dst, a, b, repeat, ab, bb, ar, br,                  \
                     [](T x, T y) { return expression; });                                    \
    }                                                                                         \
    inline void vcmpvs_##condition(__ubuf__ uint8_t* dst, __ubuf__ T* a, T y, uint8_t repeat, \
                                   uint16_t, uint16_t ab, uint16_t, uint16_t ar) {            \
        cce::compare("vcmpvs_" #condition, dst, a, a, repeat, uint8_t(ab), uint8_t(ab),       \
                     uint8_t(ar), uint8_t(ar), [y](T x, T) { return expression; });           \
    }
#define CCE_COMPARISONS(T)        \
    CCE_COMPARE(eq, T, x == y)    \
    CCE_COMPARE(ne, T, !(x == y)) \
    CCE_COMPARE(lt, T, x < y)     \
    CCE_COMPARE(le, T, x <= y)    \
    CCE_COMPARE(gt, T, x > y)     \
    CCE_COMPARE(ge, T, x >= y)
CCE_COMPARISONS(float)
CCE_COMPARISONS(half)

// By the bits of the compare mask, which begin anew with each repeat.
inline void set_cmpmask(__ubuf__ void* from) {
    cce::Core& c = cce::core();
    const uint32_t epoch = c.issue(cce::kV, "set_cmpmask");
    const int64_t at = cce::address(from);
    c.ub_read("set_cmpmask", cce::kV, epoch, "src", at, sizeof c.compare_mask);
    std::memcpy(c.compare_mask, c.ub + at, sizeof c.compare_mask);
}
#define CCE_SELECT(T)                                                                           \
    inline void vsel(__ubuf__ T* dst, __ubuf__ T* a, __ubuf__ T* b, uint8_t repeat, uint8_t db, \
                     uint8_t ab, uint8_t bb, uint8_t dr, uint8_t ar, uint8_t br) {              \
        const cce::Side src[] = {{cce::address(a), sizeof(T), ab, ar, "src0"},                  \
                                 {cce::address(b), sizeof(T), bb, br, "src1"}};                 \
        cce::run("vsel", cce::Side{cce::address(dst), sizeof(T), db, dr, "dst"}, src, repeat,   \
                 [](uint8_t* out, const uint8_t* const* in, uint32_t lane) {                    \
                     const uint64_t bits = cce::core().compare_mask[lane / 64];                 \
                     std::memcpy(out, in[bits >> lane % 64 & 1 ? 0 : 1], sizeof(T));            \
                 });                                                                            \
    }
CCE_SELECT(half)
CCE_SELECT(float)

// --- conversions ---
#define CCE_CONVERT(name, D, Bits, S, From, expression)                                            \
    inline void vconv_##name(__ubuf__ D* dst, __ubuf__ S* a, uint8_t repeat, uint16_t db,          \
                             uint16_t ab, uint16_t dr, uint16_t ar) {                              \
        cce::unary("vconv_" #name, (__ubuf__ Bits*)dst, (__ubuf__ From*)a, repeat, db, ab, dr, ar, \
                   [](From x) -> Bits { return expression; });                                     \
    }
#define CCE_CONVERT_ROUNDED(letter, mode)                                        \
    CCE_CONVERT(f322bf16##letter, bfloat16_t, uint16_t, float, float,            \
                cce::to_bf16(x, cce::Rounding::mode))                            \
    CCE_CONVERT(f322f16##letter, half, uint16_t, float, float,                   \
                cce::to_f16(x, cce::Rounding::mode))                             \
    CCE_CONVERT(f322f32##letter, float, float, float, float,                     \
                float(cce::whole(x, cce::Rounding::mode)))                       \
    CCE_CONVERT(f322s16##letter, int16_t, int16_t, float, float,                 \
                cce::to_integer<int16_t>(x, cce::Rounding::mode))                \
    CCE_CONVERT(f322s32##letter, int32_t, int32_t, float, float,                 \
                cce::to_integer<int32_t>(x, cce::Rounding::mode))                \
    CCE_CONVERT(s322f32##letter, float, float, int32_t, int32_t,                 \
                cce::to_f32(x, cce::Rounding::mode))                             \
    CCE_CONVERT(f162s16##letter, int16_t, int16_t, half, uint16_t,               \
                cce::to_integer<int16_t>(cce::from_f16(x), cce::Rounding::mode)) \
    CCE_CONVERT(f162s32##letter, int32_t, int32_t, half, uint16_t,               \
                cce::to_integer<int32_t>(cce::from_f16(x), cce::Rounding::mode)) \
    CCE_CONVERT(bf162s32##letter, int32_t, int32_t, bfloat16_t, uint16_t,        \
                cce::to_integer<int32_t>(cce::from_bf16(x), cce::Rounding::mode))
CCE_CONVERT_ROUNDED(r, kNearestEven)
CCE_CONVERT_ROUNDED(a, kNearestAway)
CCE_CONVERT_ROUNDED(f, kFloor)
CCE_CONVERT_ROUNDED(c, kCeil)
CCE_CONVERT_ROUNDED(z, kZero)
CCE_CONVERT(f322f16o, half, uint16_t, float, float, cce::to_f16(x, cce::Rounding::kOdd))
// Without a letter: nearest even where the value does not fit.
CCE_CONVERT(f322f16, half, uint16_t, float, float, cce::to_f16(x, cce::Rounding::kNearestEven))
CCE_CONVERT(f162f32, float, float, half, uint16_t, cce::from_f16(x))
CCE_CONVERT(bf162f32, float, float, bfloat16_t, uint16_t, cce::from_bf16(x))
CCE_CONVERT(s162f32, float, float, int16_t, int16_t, float(x))
CCE_CONVERT(s322s16, int16_t, int16_t, int32_t, int32_t, cce::to_short(x))
CCE_CONVERT(s322f32, float, float, int32_t, int32_t, float(x))
CCE_CONVERT(s162f16, half, uint16_t, int16_t, int16_t,
            cce::to_f16(float(x), cce::Rounding::kNearestEven))
