// Names of the dav-3510 compiler. Values matter only where registers_3510.h reads them.
#pragma once

#define CCE_TYPE(name, size)     \
    struct name {                \
        unsigned char raw[size]; \
    };
CCE_TYPE(hifloat8_t, 1)
CCE_TYPE(fp8_e5m2_t, 1)
CCE_TYPE(fp8_e4m3fn_t, 1)
CCE_TYPE(fp8_e8m0_t, 1)
CCE_TYPE(fp4x2_e2m1_t, 1)
CCE_TYPE(fp4x2_e1m2_t, 1)
CCE_TYPE(int4x2_t, 1)
using float8_e5m2_t = fp8_e5m2_t;
using float8_e4m3_t = fp8_e4m3fn_t;
using float8_e8m0_t = fp8_e8m0_t;
using float4_e1m2x2_t = fp4x2_e1m2_t;
using float4_e2m1x2_t = fp4x2_e2m1_t;

// Vector registers have 256 bytes.
CCE_TYPE(vector_s8, 256)
CCE_TYPE(vector_u8, 256)
CCE_TYPE(vector_s16, 256)
CCE_TYPE(vector_u16, 256)
CCE_TYPE(vector_s32, 256)
CCE_TYPE(vector_u32, 256)
CCE_TYPE(vector_s64, 256)
CCE_TYPE(vector_u64, 256)
CCE_TYPE(vector_f16, 256)
CCE_TYPE(vector_bf16, 256)
CCE_TYPE(vector_f32, 256)
CCE_TYPE(vector_s4x2, 256)
CCE_TYPE(vector_hif8, 256)
CCE_TYPE(vector_f8e8m0, 256)
CCE_TYPE(vector_f8e5m2, 256)
CCE_TYPE(vector_f8e4m3, 256)
CCE_TYPE(vector_f4e2m1x2, 256)
CCE_TYPE(vector_f4e1m2x2, 256)

enum class ROUND {
    R,
    A,
    F,
    C,
    Z,
    O,
    H,
    CAST_RINT,
    CAST_FLOOR,
    CAST_CEIL,
    CAST_ROUND,
    CAST_TRUNC,
    CAST_ODD,
    CAST_HYBRID,
    CAST_NONE
};
enum class Bin {};
enum class Dist {};
enum class DistVST {};
enum class HiloPart {};
enum class Mode {};
enum class Order {};
enum class Part {};
enum class Part_T {};
enum class Pat {};
enum class Pos {};
enum class Post {};
enum class RoundingSaturation {};
enum class Spr {};
enum class StoreMode {};
enum class QuantMode_post { NoConv };
enum class L1CacheType { NON_CACHEABLE };
enum class LD_L2CacheType { L2_CACHE_HINT_NORMAL_FV };
enum CceLiteral {
    HIGHER,
    LOWER,
    LD_VST,
    MODE_ZEROING,
    PART_EVEN,
    PAT_ALL,
    PAT_ALLF,
    POST_UPDATE,
    ROUND_R,
    ROUND_Z,
    RS_DISABLE,
    ST_VLD,
    ST_VST,
    SV_ALL,
    VLD_ST,
    VLD_VST,
    VST_LD,
    VST_ST,
    VST_VLD,
    VST_VST,
    VS_ALL,
    VV_ALL
};
#define __VEC_SCOPE__

// Of the SIMT unit, which no kernel here uses.
struct CceDim {
    int x, y, z;
};
inline CceDim threadIdx, blockIdx, blockDim, gridDim;
inline int warpSize = 32;
inline int laneid() { return 0; }
inline unsigned lanemask_lt() { return 0; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
template <class T>
inline T __shfl(T value, int, int) {
    return value;
}
template <auto, auto, class T>
inline T __ldg(T* at) {
    return *at;
}
namespace __cce_scalar {
template <class... A>
inline void copy_ubuf_to_ubuf(A...) {
    cce_absent("copy_ubuf_to_ubuf");
}
}  // namespace __cce_scalar
namespace bisheng::cce {
template <int pipe, class T>
inline void mark_stamp(T) {}
template <int pipe, int at>
inline void mark_stamp() {}
}  // namespace bisheng::cce
