// The vendor's kernel_operator.h with its own checks of each call, which are part of the unit.
#pragma once
#include <mutex>

#include "basic_api/kernel_basic_intf.h"
#include "global_scalars.h"
#if ASCENDC_CPU_DEBUG
#include "rules.h"  // made by `cargo xaudit vendor-rules`: the sources of the checks

namespace cce {

// The vendor's checks keep their state in the process: blocks take turns.
struct RulesTurn {
    static inline std::mutex mutex;
    std::lock_guard<std::mutex> guard{mutex};

    void begin(Core& c) const {
        block_idx = c.index;
        block_num = c.launch->block_count;
        AscendC::ConstDefiner::Instance().hardwareCpuBufferMap[AscendC::Hardware::UB] = c.ub;
    }
};

}  // namespace cce

// What the headers only declare: the source of a gather, and a lock between processes.
namespace AscendC {
inline void SetModelGatherbSrc0Tensor(uint64_t source, uint32_t) {
    cce::core().gather_from = uint32_t(source - uint64_t(cce::core().ub));
}
inline bool g_isAtomic = false;
inline AtomicType g_atomicType = SUM;
inline ProcessLock* ProcessLock::processLock = nullptr;
inline ProcessLock* ProcessLock::CreateLock() { return nullptr; }
inline int ProcessLock::Write() { return 0; }
inline int ProcessLock::Read() { return 0; }
inline int ProcessLock::Unlock() { return 0; }
}  // namespace AscendC
#endif
