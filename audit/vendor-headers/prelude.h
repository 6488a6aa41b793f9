// What the device compiler supplies by itself: keywords, address spaces, types, enumerations. Comes
// before everything else of a compilation.
//
// A pointer to the unified buffer is a pointer relative to a segment register that holds the start
// of the buffer (clang's address space 256 on x86-64), so that its addresses are the device's, from
// 0 on, and that a pointer of another space does not convert. Addresses of global memory are those
// of the simulated device.
#pragma once

#if __NPU_ARCH__ != 2201
#undef ASCENDC_CPU_DEBUG  // the vendor's checks are of dav-2201
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if __NPU_ARCH__ == 2201
#define __DAV_C220__
// A kernel with a cube core is compiled once for each kind of core.
#ifdef HARNESS_CUBE
#define __DAV_C220_CUBE__
#else
#define __DAV_C220_VEC__
#endif
#define __CCE_AICORE__ 220
#elif __NPU_ARCH__ == 3510
#define __DAV_C310__
#define __DAV_C310_VEC__
#define __CCE_AICORE__ 310
#else
#error "the harness knows __NPU_ARCH__ 2201 and 3510"
#endif
#ifdef HARNESS_CUBE
#define __DAV_CUBE__
#else
#define __DAV_VEC__
#endif
#define __CCE_IS_AICORE__ 1
#if !ASCENDC_CPU_DEBUG
#define __NPU_DEVICE__
#endif

// With the vendor's own checks (`cargo xaudit vendor-rules`), its headers take the host's pointers.
#if ASCENDC_CPU_DEBUG
#define __gm__
#define __cbuf__
#define __ca__
#define __cb__
#define __cc__
#define __fbuf__
#define __biasbuf__
#define __ssbuf__
#define __ubuf__
#else
// The vendor's printing code mixes string literals with pointers to global memory, so that a space
// of its own for global memory is for checks of the kernels only.
#ifdef HARNESS_GM_SPACE
#define __gm__ __attribute__((address_space(1)))
#else
#define __gm__
#endif
#define __cbuf__ __attribute__((address_space(2)))
#define __ca__ __attribute__((address_space(3)))
#define __cb__ __attribute__((address_space(4)))
#define __cc__ __attribute__((address_space(5)))
#define __fbuf__ __attribute__((address_space(7)))
#define __biasbuf__ __attribute__((address_space(8)))
#define __ssbuf__ __attribute__((address_space(9)))
#define __ubuf__ __attribute__((address_space(256)))
#endif
#define __global__
#define __aicore__
#define __host__
#define __host_aicore__
#define __vector__
#define __mix__(cube, vector)
#define __cube__
#define __simd_vf__
#define __simd_callee__
#define __simt_vf__
#define __simt_callee__
#define __BLOCK_LOCAL__ thread_local
#define __WORKGROUP_LOCAL__ thread_local
#define __sync_noalias__
#define __sync_alias__
#define __check_sync_alias__
#define __in_pipe__(...)
#define __out_pipe__(...)
#define __inout_pipe__(...)
#define __disable_kernel_type_autoinfer__

#if ASCENDC_CPU_DEBUG
struct half {
    _Float16 value;
    half() = default;
    constexpr half(float of) : value(static_cast<_Float16>(of)) {}
    constexpr operator float() const { return value; }
    constexpr float ToFloat() const { return value; }
};
#else
using half = _Float16;
#endif
struct bfloat16_t {
    uint16_t bits;
    bfloat16_t() = default;
    constexpr bfloat16_t(float value)
        : bits(static_cast<uint16_t>(__builtin_bit_cast(uint32_t, value) >> 16)) {}
    constexpr operator float() const {
        return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
    }
    constexpr float ToFloat() const { return *this; }
};

enum pipe_t {
    PIPE_S,
    PIPE_V,
    PIPE_M,
    PIPE_MTE1,
    PIPE_MTE2,
    PIPE_MTE3,
    PIPE_ALL,
    PIPE_MTE4,
    PIPE_MTE5,
    PIPE_V2,
    PIPE_FIX
};
enum event_t {
    EVENT_ID0,
    EVENT_ID1,
    EVENT_ID2,
    EVENT_ID3,
    EVENT_ID4,
    EVENT_ID5,
    EVENT_ID6,
    EVENT_ID7
};
enum ub_addr8_t { VA0, VA1, VA2, VA3, VA4, VA5, VA6, VA7 };
enum mem_dsb_t { DSB_ALL, DSB_DDR, DSB_UB, DSB_SEQ };
enum class mem_t { L1, L0A, L0B, L0C, UB, BT };
enum class pad_t { PAD_NONE };
enum class cache_line_t { SINGLE_CACHE_LINE, ENTIRE_DATA_CACHE };
enum class dcci_dst_t { CACHELINE_ALL, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };
enum class Order_t { VALUE_INDEX, INDEX_VALUE, ONLY_VALUE, ONLY_INDEX };
enum class atomic_type_t { ATOMIC_NONE };
enum class atomic_op_t { ATOMIC_SUM };
enum addr_cal_mode_t { inc, dec };
// Of the cube unit: the values do not matter.
enum QuantMode_t {
    VQF322HIF8_PRE_HYBRID,
    VQF322FP8_PRE,
    QF322HIF8_PRE_HYBRID,
    QF322FP8_PRE,
    NoQuant,
    F322F16,
    VQF322HIF8_PRE,
    QF322HIF8_PRE,
    VDEQF16,
    DEQF16,
    VREQ8,
    REQ8,
    VQF322B8_PRE,
    QF322B8_PRE,
    F322BF16,
    VQS322BF16_PRE,
    QS322BF16_PRE,
    VQF322F16_PRE,
    QF322F16_PRE,
    VQF322BF16_PRE,
    QF322BF16_PRE,
    QF322F32_PRE,
    VQF322F32_PRE
};
// A mask register of dav-3510: one entry for each byte of a vector register.
struct vector_bool {
    unsigned char on[256];
};
struct vector_align {};
struct vector_address {};
struct Literal {};
enum { L128, H128 };

// What an intrinsic returns that the harness does not implement; calling one is a violation.
struct CceAny {
    template <class T>
    operator T() const {
        __builtin_trap();
    }
};
[[noreturn]] inline void cce_absent(const char* name);
#define CCE_ABSENT(name)       \
    template <class... A>      \
    inline CceAny name(A...) { \
        cce_absent(#name);     \
    }
#define CCE_ABSENT_NUMBER(name)  \
    template <class... A>        \
    inline uint64_t name(A...) { \
        cce_absent(#name);       \
    }

#include "core.h"
#include "intrinsics.h"
#if __NPU_ARCH__ == 3510
#include "types_3510.h"
#else
#include "cube_2201.h"
#include "vector_2201.h"
#endif
// The names that the vendor's headers use and that are nowhere above: made by `cargo xaudit
// vendor-headers` from the compiler's errors.
#if __NPU_ARCH__ == 3510
#include "absent_3510.h"
#include "registers_3510.h"
#else
#ifdef HARNESS_CUBE
#include "absent_2201_cube.h"
#else
#include "absent_2201.h"
#endif
#endif
