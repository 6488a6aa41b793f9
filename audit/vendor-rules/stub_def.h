// What the vendor's headers for its checks expect of the library that simulates a core: counts of
// cores, and the functions that report. Written from how its public headers use them.
#pragma once

#include "core.h"

#include <cassert>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <map>
#include <set>
#include <string>

#define ASCENDC_HOST_AICORE

// 8-bit types that the kernels do not use.
struct fp8_e5m2_t {};
struct fp8_e4m3fn_t {};
struct fp8_e8m0_t {};
struct hifloat8_t {};
struct fp4x2_e2m1_t {};
struct fp4x2_e1m2_t {};

inline thread_local int64_t block_idx = 0;
inline thread_local int64_t block_num = 1;
constexpr int64_t sub_block_idx = 0;
constexpr int32_t g_taskRation = 1;
inline uint64_t g_fixpipeNdNzParam = 0;
namespace AscendC {
constexpr int AIC_TYPE = 1, AIV_TYPE = 2;
inline bool g_isVdeq = false;
// What another tool of the vendor records of the queues' buffers.
#define RULES_UNRECORDED(name) \
    template <class... A>      \
    inline void name(A&&...) {}
RULES_UNRECORDED(AscendCBufAbsAddr)
RULES_UNRECORDED(AscendCBufAlloc)
RULES_UNRECORDED(AscendCBufDeque)
RULES_UNRECORDED(AscendCBufEnque)
RULES_UNRECORDED(AscendCBufFree)
RULES_UNRECORDED(AscendCBufGet)
RULES_UNRECORDED(AscendCBufInit)
RULES_UNRECORDED(AscendCQueCreate)
RULES_UNRECORDED(AscendCRecordPoolHierarchy)
RULES_UNRECORDED(AscendCTBufPoolInit)
RULES_UNRECORDED(AscendCTBufPoolResetCheck)
RULES_UNRECORDED(AscendCUpdateTbufPoolStatus)
}  // namespace AscendC
inline int32_t g_coreType = AscendC::AIV_TYPE;

// A check that fails prints what is wrong and raises a signal: here it is a violation. Blocks take
// turns, so that there is one text.
inline std::string rules_said;
inline void rules_say(const char* format, ...) __attribute__((format(printf, 1, 2)));
inline void rules_say(const char* format, ...) {
    char text[500];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (std::strncmp(text, "[ERROR]", 7) == 0) rules_said += text;
}
inline void rules_broken() {
    for (char& letter : rules_said)
        if (letter == '\n') letter = ' ';
    cce::core().report("vendor-rule", "%s", rules_said.c_str());
    rules_said.clear();
}
namespace std {
using ::rules_say;
}
#define printf rules_say
#define raise(signal) rules_broken()
