// Language extensions of the device compiler, as far as host code has to accept them.
#pragma once

#include <cstddef>
#include <cstdint>

#ifndef __NPU_ARCH__
#error "define __NPU_ARCH__ as 2201 or 3510"
#endif
#if __NPU_ARCH__ != 2201 && __NPU_ARCH__ != 3510
#error "the simulator models __NPU_ARCH__ 2201 and 3510"
#endif

#define __global__
#define __aicore__
#define __vector__
#define __mix__(cube, vector)
#define __gm__
#define __ubuf__
#define ASCEND_IS_AIV (!::ascend_sim::on_cube_core())
#define ASCEND_IS_AIC (::ascend_sim::on_cube_core())
#define ASCEND_SIM 1

// The kinds of kernels that are modelled: vector cores alone, or one cube core with two of them.
#define KERNEL_TYPE_AIV_ONLY 0
#define KERNEL_TYPE_MIX_AIC_1_2 1
#define KERNEL_TASK_TYPE_DEFAULT(type) ::ascend_sim::require_task_type(type)

// A macro, as the vendor's headers have it: `const GM_ADDR a[] = .., b[] = ..` declares arrays of
// two types, which an alias would hide.
#define GM_ADDR __gm__ uint8_t*

enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_ALL, PIPE_FIX };

// Conversions of a product on its way out of the cube unit: those that are modelled.
enum QuantMode_t { NoQuant, F322F16, F322BF16 };
