// Included last, in place of the simulator's header of the same name: exports kernels through the
// simulator's launch interface, so that its runtime, the host code and the tests run them.
#pragma once

#include <tuple>

#include "core.h"

namespace cce {

// Arguments follow one another, each at the next multiple of 8.
constexpr uint64_t align8(uint64_t offset) { return (offset + 7) / 8 * 8; }

template <auto kernel>
struct Trampoline;
template <class... A, void (*kernel)(A...)>
struct Trampoline<kernel> {
    static constexpr uint64_t args_bytes() {
        uint64_t offset = 0;
        ((offset = align8(offset) + sizeof(A)), ...);
        return align8(offset);
    }
    // One more than there are: no array is empty.
    static constexpr uint64_t parameter_bytes[] = {sizeof(A)..., 0};
    static constexpr uint64_t parameter_count = sizeof...(A);

    template <class T>
    static T take(const uint8_t* args, uint64_t& offset) {
        offset = align8(offset);
        T value;
        std::memcpy(&value, args + offset, sizeof value);
        offset += sizeof value;
        return value;
    }
    static void call(const uint8_t* args) {
        uint64_t offset = 0;
        // Braces fix the order of evaluation.
        std::tuple<A...> arguments{take<A>(args, offset)...};
        std::apply(kernel, arguments);
    }
};

// A line for the first block of each launch, in the file that HARNESS_COUNTS names: the kernel, and
// how often each intrinsic was issued.
inline void write_counts(const Core& c, const char* kernel) {
    static const char* const path = std::getenv("HARNESS_COUNTS");
    if (path == nullptr || c.index != 0) return;
    std::FILE* file = std::fopen(path, "a");
    if (file == nullptr) return;
    std::fprintf(file, "%s", kernel);
    for (const auto& [name, count] : c.issued_by_name)
        std::fprintf(file, " %s=%lu", name.c_str(), count);
    std::fprintf(file, " barrier_v=%lu\n", c.counters->barriers[PIPE_V]);
    std::fclose(file);
}

inline int32_t run_block(const ascend_sim::KernelEntry& kernel, const ascend_sim::Launch* launch,
                         const uint8_t* args, uint32_t block, ascend_sim::Counters* counters) {
#if ASCENDC_CPU_DEBUG
    const RulesTurn turn;
#endif
    Core c(launch, block, counters);
#if ASCENDC_CPU_DEBUG
    turn.begin(c);
#endif
    int32_t stopped = 0;
    try {
        kernel.call(args);
        c.end();
    } catch (const Stopped&) {
        stopped = 1;
    }
    launch->accesses(launch->host, block, c.accesses.data(), c.accesses.size());
    write_counts(c, kernel.name);
    return stopped;
}

}  // namespace cce

// clang-format off
#define ASCEND_SIM_KERNEL(name)                        \
    ::ascend_sim::KernelEntry {                        \
        #name, ::cce::Trampoline<&name>::args_bytes(), \
            &::cce::Trampoline<&name>::call,           \
            ::cce::Trampoline<&name>::parameter_bytes, \
            ::cce::Trampoline<&name>::parameter_count  \
    }
// clang-format on

#define ASCEND_SIM_LIBRARY(...)                                                           \
    static const ::ascend_sim::KernelEntry harness_entries[] = {__VA_ARGS__};             \
    static int32_t harness_run_block(const ::ascend_sim::Launch* launch, uint64_t kernel, \
                                     const uint8_t* args, uint32_t block,                 \
                                     ::ascend_sim::Counters* counters) {                  \
        return ::cce::run_block(harness_entries[kernel], launch, args, block, counters);  \
    }                                                                                     \
    extern "C" __attribute__((visibility("default")))                                     \
    const ::ascend_sim::KernelTable ascend_sim_kernels = {                                \
        ::ascend_sim::kInterfaceVersion, __NPU_ARCH__, harness_entries,                   \
        sizeof(harness_entries) / sizeof(harness_entries[0]), &harness_run_block};
