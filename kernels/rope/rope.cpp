// Entry points: one for each element type and pairing, rotation and angle gradient.
//
// All take device addresses and the tiling by value. An absent tensor (no k) is a null address with
// no heads.
#include "kernel_operator.h"
#include "rope_angle_grad.h"
#include "rope_rotate.h"

#define ROPE_ROTATE(name, type, pairs)                                                            \
    extern "C" __global__ __aicore__ void rope_rotate_##name(GM_ADDR q, GM_ADDR k, GM_ADDR q_out, \
                                                             GM_ADDR k_out, GM_ADDR angles,       \
                                                             GM_ADDR map, rope::Tiling tiling) {  \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                           \
        AscendC::TPipe pipe;                                                                      \
        rope::Rotate<type, rope::Pairs::pairs> kernel(pipe, tiling);                              \
        kernel.Run(q, k, q_out, k_out, angles, map);                                              \
    }

#define ROPE_ANGLE_GRAD(name, type, pairs)                                                     \
    extern "C" __global__ __aicore__ void rope_angle_grad_##name(                              \
        GM_ADDR q, GM_ADDR k, GM_ADDR q_grad, GM_ADDR k_grad, GM_ADDR angle_grad, GM_ADDR map, \
        rope::Tiling tiling) {                                                                 \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                        \
        AscendC::TPipe pipe;                                                                   \
        rope::AngleGrad<type, rope::Pairs::pairs> kernel(pipe, tiling);                        \
        kernel.Run(q, k, q_grad, k_grad, angle_grad, map);                                     \
    }

#define ROPE_OF_TYPE(name, type)                          \
    ROPE_ROTATE(split_##name, type, kSplit)               \
    ROPE_ROTATE(adjacent_##name, type, kAdjacent)         \
    ROPE_ROTATE(deinterleave_##name, type, kDeinterleave) \
    ROPE_ROTATE(interleave_##name, type, kInterleave)     \
    ROPE_ANGLE_GRAD(split_##name, type, kSplit)           \
    ROPE_ANGLE_GRAD(adjacent_##name, type, kAdjacent)     \
    ROPE_ANGLE_GRAD(deinterleave_##name, type, kDeinterleave)

ROPE_OF_TYPE(f32, float)
ROPE_OF_TYPE(f16, half)
ROPE_OF_TYPE(bf16, bfloat16_t)
