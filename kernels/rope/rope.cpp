// Entry points: one for each element type and pairing, of the rotation, the gradient of the angles,
// and the norm with the rotation and its backward; one for each element type of the low-rank term,
// the gate of a feed-forward network, the short convolution, the backward of both, the AdamW update
// with rounded values, the sums of squares, and the inputs of the gated delta rule's products; one
// of the rule's chunks; and for each 16-bit type one with a cube core, and one of the update with a
// gradient of that type.
//
// All take device addresses and the tiling by value. An absent tensor (no k) is a null address with
// no heads.
//
// The kind of cores is stated twice. KERNEL_TASK_TYPE_DEFAULT is a macro of the vendor's headers,
// which expands to nothing unless the build's plug-in gave it a meaning first. The qualifiers are
// words of the device compiler, which no header defines; the vendor's examples have them from
// CANN 8.5 on. A compiler that does not know them wants ROPE_NO_QUALIFIERS.
#include "kernel_operator.h"
#include "rope_angle_grad.h"
#include "rope_delta.h"
#include "rope_low_rank.h"
#include "rope_norm.h"
#include "rope_rotate.h"
#include "rope_short_convolution.h"
#include "rope_swiglu.h"
#include "rope_update.h"

#ifdef ROPE_NO_QUALIFIERS
#define ROPE_VECTOR
#define ROPE_MIX
#else
#define ROPE_VECTOR __vector__
#define ROPE_MIX __mix__(1, 2)
#endif

#define ROPE_ROTATE(name, type, pairs)                                                   \
    extern "C" ROPE_VECTOR __global__ __aicore__ void rope_rotate_##name(                \
        GM_ADDR q, GM_ADDR k, GM_ADDR q_out, GM_ADDR k_out, GM_ADDR angles, GM_ADDR map, \
        rope::Tiling tiling) {                                                           \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                  \
        AscendC::TPipe pipe;                                                             \
        rope::Rotate<type, rope::Pairs::pairs> kernel(pipe, tiling);                     \
        kernel.Run(q, k, q_out, k_out, angles, map);                                     \
    }

#define ROPE_ANGLE_GRAD(name, type, pairs)                                                     \
    extern "C" ROPE_VECTOR __global__ __aicore__ void rope_angle_grad_##name(                  \
        GM_ADDR q, GM_ADDR k, GM_ADDR q_grad, GM_ADDR k_grad, GM_ADDR angle_grad, GM_ADDR map, \
        rope::Tiling tiling) {                                                                 \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                        \
        AscendC::TPipe pipe;                                                                   \
        rope::AngleGrad<type, rope::Pairs::pairs> kernel(pipe, tiling);                        \
        kernel.Run(q, k, q_grad, k_grad, angle_grad, map);                                     \
    }

// With a cube core: any pairing, `matrix` moves the channels.
#define ROPE_MATRIX(name, type)                                                          \
    extern "C" ROPE_MIX __global__ __aicore__ void rope_matrix_##name(                   \
        GM_ADDR q, GM_ADDR k, GM_ADDR q_out, GM_ADDR k_out, GM_ADDR angles, GM_ADDR map, \
        GM_ADDR matrix, GM_ADDR workspace, rope::Tiling tiling) {                        \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);                               \
        AscendC::TPipe pipe;                                                             \
        if ASCEND_IS_AIC {                                                               \
            rope::Multiply<type> product(pipe, tiling);                                  \
            product.Run(q, k, matrix, workspace);                                        \
        }                                                                                \
        if ASCEND_IS_AIV {                                                               \
            rope::Rotate<type, rope::Pairs::kMatrix> kernel(pipe, tiling);               \
            kernel.Run(q, k, q_out, k_out, angles, map, workspace);                      \
        }                                                                                \
    }
// The gradients of y and the sums for the gradients of the weights are of the backward alone.
#define ROPE_NORM_ENTRY(name, type, pairs, backward)                                          \
    extern "C" ROPE_VECTOR __global__ __aicore__ void name(                                   \
        GM_ADDR q, GM_ADDR k, GM_ADDR q_out, GM_ADDR k_out, GM_ADDR q_grad, GM_ADDR k_grad,   \
        GM_ADDR q_weight, GM_ADDR k_weight, GM_ADDR angles, GM_ADDR map, GM_ADDR weight_sums, \
        rope::NormTiling tiling) {                                                            \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                       \
        AscendC::TPipe pipe;                                                                  \
        rope::Norm<type, rope::Pairs::pairs, backward> kernel(pipe, tiling);                  \
        kernel.Run({q, k, q_out, k_out, q_grad, k_grad, q_weight, k_weight, angles, map,      \
                    weight_sums});                                                            \
    }
#define ROPE_NORM(name, type, pairs)                         \
    ROPE_NORM_ENTRY(rope_norm_##name, type, pairs, false)    \
    ROPE_NORM_ENTRY(rope_norm_grad_##name, type, pairs, true)

#define ROPE_LOW_RANK(name, type)                                                              \
    extern "C" ROPE_VECTOR __global__ __aicore__ void rope_low_rank_##name(                    \
        GM_ADDR y, GM_ADDR h, GM_ADDR b, GM_ADDR rounded_h, rope::LowRankTiling tiling) {      \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                        \
        AscendC::TPipe pipe;                                                                   \
        rope::LowRank<type> kernel(pipe, tiling);                                              \
        kernel.Run(y, h, b, rounded_h);                                                        \
    }

#define ROPE_SWIGLU_ENTRY(name, type, backward)                                        \
    extern "C" ROPE_VECTOR __global__ __aicore__ void name(                            \
        GM_ADDR gate, GM_ADDR up, GM_ADDR dy, GM_ADDR first, GM_ADDR second,           \
        GM_ADDR third, rope::DenseTiling tiling) {                                     \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                \
        AscendC::TPipe pipe;                                                           \
        rope::SwiGlu<type, backward> kernel(pipe, tiling);                             \
        kernel.Run(gate, up, dy, first, second, third);                                \
    }
#define ROPE_SWIGLU(name, type)                     \
    ROPE_SWIGLU_ENTRY(rope_swiglu_##name, type, false) \
    ROPE_SWIGLU_ENTRY(rope_swiglu_grad_##name, type, true)

// The gradients of y and the sums for the gradient of the weight are of the backward alone.
#define ROPE_SHORT_CONVOLUTION_ENTRY(name, type, backward)                             \
    extern "C" ROPE_VECTOR __global__ __aicore__ void name(                            \
        GM_ADDR x, GM_ADDR weight, GM_ADDR starts, GM_ADDR dy, GM_ADDR out,            \
        GM_ADDR weight_sums, rope::ShortConvolutionTiling tiling) {                    \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                \
        AscendC::TPipe pipe;                                                           \
        rope::ShortConvolution<type, backward> kernel(pipe, tiling);                   \
        kernel.Run(x, weight, starts, dy, out, weight_sums);                           \
    }
#define ROPE_SHORT_CONVOLUTION(name, type)                                   \
    ROPE_SHORT_CONVOLUTION_ENTRY(rope_short_convolution_##name, type, false) \
    ROPE_SHORT_CONVOLUTION_ENTRY(rope_short_convolution_grad_##name, type, true)

#define ROPE_ADAMW(name, type, gradient_type)                                          \
    extern "C" ROPE_VECTOR __global__ __aicore__ void rope_adamw_##name(               \
        GM_ADDR value, GM_ADDR gradient, GM_ADDR first, GM_ADDR second,                \
        GM_ADDR rounded, rope::AdamWTiling tiling) {                                   \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                \
        AscendC::TPipe pipe;                                                           \
        rope::AdamW<type, gradient_type> kernel(pipe, tiling);                         \
        kernel.Run(value, gradient, first, second, rounded);                           \
    }

#define ROPE_SQUARE_SUMS(name, type)                                                   \
    extern "C" ROPE_VECTOR __global__ __aicore__ void rope_square_sums_##name(         \
        GM_ADDR x, GM_ADDR sums, rope::DenseTiling tiling) {                           \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                \
        AscendC::TPipe pipe;                                                           \
        rope::SquareSums<type> kernel(pipe, tiling);                                   \
        kernel.Run(x, sums);                                                           \
    }

#define ROPE_DELTA_PREPARE(name, type)                                                    \
    extern "C" ROPE_VECTOR __global__ __aicore__ void rope_delta_prepare_##name(          \
        GM_ADDR q, GM_ADDR k, GM_ADDR v, GM_ADDR g, GM_ADDR beta, GM_ADDR qk,             \
        GM_ADDR driven, GM_ADDR left, GM_ADDR base, GM_ADDR numbers, GM_ADDR values,      \
        GM_ADDR gradient, GM_ADDR joint, rope::DeltaTiling tiling) {                                                       \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                   \
        AscendC::TPipe pipe;                                                              \
        rope::DeltaPrepare<type> kernel(pipe, tiling);                                    \
        kernel.Run({q, k, v, g, beta, qk, driven, left, base, numbers, values, gradient,  \
                    joint});                                                              \
    }

extern "C" ROPE_VECTOR __global__ __aicore__ void rope_delta_local_f32(
    GM_ADDR products, GM_ADDR numbers, GM_ADDR left, GM_ADDR inverse, GM_ADDR decays,
    rope::DeltaTiling tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    AscendC::TPipe pipe;
    rope::DeltaLocal kernel(pipe, tiling);
    kernel.Run(products, numbers, left, inverse, decays);
}

#define ROPE_OF_TYPE(name, type)                          \
    ROPE_DELTA_PREPARE(name, type)                        \
    ROPE_SWIGLU(name, type)                               \
    ROPE_SHORT_CONVOLUTION(name, type)                    \
    ROPE_ADAMW(name, type, float)                         \
    ROPE_SQUARE_SUMS(name, type)                          \
    ROPE_LOW_RANK(name, type)                             \
    ROPE_ROTATE(split_##name, type, kSplit)               \
    ROPE_ROTATE(adjacent_##name, type, kAdjacent)         \
    ROPE_ROTATE(deinterleave_##name, type, kDeinterleave) \
    ROPE_ROTATE(interleave_##name, type, kInterleave)     \
    ROPE_ANGLE_GRAD(split_##name, type, kSplit)           \
    ROPE_ANGLE_GRAD(adjacent_##name, type, kAdjacent)     \
    ROPE_ANGLE_GRAD(deinterleave_##name, type, kDeinterleave) \
    ROPE_NORM(split_##name, type, kSplit)                 \
    ROPE_NORM(adjacent_##name, type, kAdjacent)           \
    ROPE_NORM(deinterleave_##name, type, kDeinterleave)

ROPE_OF_TYPE(f32, float)
ROPE_OF_TYPE(f16, half)
ROPE_OF_TYPE(bf16, bfloat16_t)
ROPE_ADAMW(narrow_f16, half, half)
ROPE_ADAMW(narrow_bf16, bfloat16_t, bfloat16_t)

// On dav-3510 the cube unit takes other fractals, and hands its product to the vector unit's
// buffer.
#if __NPU_ARCH__ == 2201
ROPE_MATRIX(f16, half)
ROPE_MATRIX(bf16, bfloat16_t)
#endif
