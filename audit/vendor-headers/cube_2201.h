// The intrinsics of the cube core of dav-2201 that the kernels use: compiled, not run. The types of
// their memories are checked; the rest of the parameters is the vendor's headers' own.
#pragma once

#include "core.h"

#define CCE_CUBE(name, to, from)                          \
    template <class D, class S, class... A>               \
    [[noreturn]] inline void name(to D*, from S*, A...) { \
        cce_absent(#name);                                \
    }
CCE_CUBE(copy_gm_to_cbuf_multi_nd2nz_b16, __cbuf__, __gm__)
CCE_CUBE(load_cbuf_to_ca, __ca__, __cbuf__)
CCE_CUBE(load_cbuf_to_cb, __cb__, __cbuf__)
CCE_CUBE(copy_matrix_cc_to_gm, __gm__, __cc__)
template <class C, class L, class R, class... A>
[[noreturn]] inline void mad(__cc__ C*, __ca__ L*, __cb__ R*, A...) {
    cce_absent("mad");
}
