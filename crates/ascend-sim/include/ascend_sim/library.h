// Included last by the generated wrapper of a kernel source: unpacks launch arguments, runs one
// block and exports the table that the runtime looks for.
#pragma once

#include <array>
#include <memory>
#include <thread>
#include <tuple>

#include "group.h"
#include "queues.h"
#include "vector_engine.h"

namespace ascend_sim {

// Arguments follow one another, each at the next multiple of 8.
constexpr std::uint64_t kArgumentAlignment = 8;
constexpr std::uint64_t align_argument(std::uint64_t offset) {
    return (offset + kArgumentAlignment - 1) / kArgumentAlignment * kArgumentAlignment;
}

template <auto kernel>
struct Trampoline;

template <class... Arguments, void (*kernel)(Arguments...)>
struct Trampoline<kernel> {
    static_assert((std::is_trivially_copyable_v<Arguments> && ...),
                  "kernel arguments are plain data");

    static constexpr std::uint64_t args_bytes() {
        std::uint64_t offset = 0;
        ((offset = align_argument(offset) + sizeof(Arguments)), ...);
        return align_argument(offset);
    }

    // One more than there are: no array is empty.
    static constexpr std::uint64_t parameter_bytes[] = {sizeof(Arguments)..., 0};
    static constexpr std::uint64_t parameter_count = sizeof...(Arguments);

    static void call(const std::uint8_t* args) {
        std::uint64_t offset = 0;
        const auto next = [&](auto identity) {
            using T = typename decltype(identity)::type;
            offset = align_argument(offset);
            T value;
            std::memcpy(&value, args + offset, sizeof value);
            offset += sizeof value;
            return value;
        };
        // Braces fix the order of evaluation.
        std::tuple<Arguments...> unpacked{next(Identity<Arguments>{})...};
        std::apply(kernel, unpacked);
    }
};

inline void check_block_end(Block& running, const Location& at) {
    for (const Buffer& buffer : running.buffers) {
        if (buffer.queue < 0 || buffer.state == BufferState::kFree) continue;
        const QueueState& queue = running.queues[buffer.queue];
        running.report(
            "queue", buffer.last,
            "kernel end: a tensor of %s queue %d is still %s since line %u: %s is missing",
            queue.position, buffer.queue,
            buffer.state == BufferState::kEnqueued ? "enqueued" : "allocated", buffer.last.line,
            buffer.state == BufferState::kEnqueued ? "DeQue" : "FreeTensor");
    }
    for (int event = 0; event < kEvents; ++event) {
        for (int id = 0; id < kEventIds; ++id) {
            const Flag& flag = running.flags[event][id];
            if (flag.set)
                running.report("event", flag.at,
                               "kernel end: SetFlag<HardEvent::%s>(%d) was not waited for; the "
                               "next kernel would find it set",
                               event_pipes(event).name, id);
        }
        if (running.reserved_ids[event] != 0)
            running.report("event", at,
                           "kernel end: an id of HardEvent::%s from AllocEventID was not released",
                           event_pipes(event).name);
    }
    if (running.atomic_add)
        running.report("dma-parameter", at,
                       "kernel end: SetAtomicAdd is still on; call DisableDmaAtomic");
    if (running.counter_mode)
        running.report("vector-parameter", at, "kernel end: the mask mode is still Counter");
    if (running.live_pipes != 0) running.report("queue", at, "kernel end: a TPipe is still alive");
}

// Runs the kernel on one core, which has to be `g_block`. Whether a violation stopped it.
inline bool run_core(const KernelEntry& entry, const std::uint8_t* args, Block& running) {
    try {
        entry.call(args);
        check_block_end(running, running.last);
        return false;
    } catch (const BlockStopped&) {
    } catch (const std::exception& error) {
        running.report("simulator", running.last, "a C++ exception left the kernel: %s",
                       error.what());
    }
    return true;
}

using Accesses = std::vector<GmAccess>;

inline void send_accesses(const Launch* launch, std::uint32_t index, const Accesses& accesses) {
    launch->accesses(launch->host, index, accesses.data(), accesses.size());
}

inline void send_counted(const Launch* launch, const Block& running, std::vector<Counted>& list) {
    for (const auto& [key, times] : running.counted) {
        const auto& [what, types, amount] = key;
        list.push_back({what.data(), types.data(), amount, times});
    }
}

inline thread_local Memories t_memories[kCores];

// A cube core and its two vector cores, in turns on a thread each.
inline std::int32_t run_group(const KernelEntry& entry, const Launch* launch,
                              const std::uint8_t* args, std::uint32_t index, Counters* counters) {
    Group group;
    Accesses accesses;
    std::array<std::unique_ptr<Block>, kCores> cores;
    bool stopped = false;
    for (int core = 0; core < kCores; ++core)
        cores[core] = std::make_unique<Block>(
            *launch, core == kCube ? index : 2 * index + static_cast<std::uint32_t>(core),
            static_cast<Core>(core), &group, *counters, accesses, t_memories[core]);
    std::array<std::thread, kCores> threads;
    for (int core = 0; core < kCores; ++core) {
        threads[core] = std::thread([&, core] {
            group.enter(static_cast<Core>(core));
            g_block = cores[core].get();
            const bool core_stopped = run_core(entry, args, *cores[core]);
            stopped |= core_stopped;
            g_block = nullptr;
            group.leave(static_cast<Core>(core), core_stopped);
        });
    }
    for (std::thread& thread : threads) thread.join();
    group.check_end(*cores[kCube]);
    send_accesses(launch, index, accesses);
    if (index == 0) {
        std::vector<Counted> list;
        send_counted(launch, *cores[kVector0], list);
        send_counted(launch, *cores[kCube], list);
        launch->counted(launch->host, list.data(), list.size());
    }
    return stopped;
}

inline std::int32_t run_block_of(const KernelEntry* entries, const Launch* launch,
                                 std::uint64_t kernel, const std::uint8_t* args,
                                 std::uint32_t index, Counters* counters) {
    if (index == 0 && trace_file() != nullptr)
        std::fprintf(trace_file(), "%s\n", entries[kernel].name);
    try {
        Accesses accesses;
        Block running(*launch, index, kVector0, nullptr, *counters, accesses, t_memories[kVector0]);
        g_block = &running;
        const bool stopped = run_core(entries[kernel], args, running);
        g_block = nullptr;
        send_accesses(launch, index, accesses);
        if (index == 0) {
            std::vector<Counted> list;
            send_counted(launch, running, list);
            launch->counted(launch->host, list.data(), list.size());
        }
        return stopped;
    } catch (const MixRequested&) {
        // Nothing has happened: the task type is the first statement of a kernel.
        g_block = nullptr;
        if (launch->late_if_mix) {
            // The kernel is not run with shifted arguments: it could end the host's process.
            if (index == 0)
                launch->report(
                    launch->host, index, "sync-address", "", 0,
                    "a kernel of cube and vector cores is launched without its sync address: the "
                    "binary has no variable for it, so the kernel takes the first eight bytes of "
                    "its arguments for it and reads every argument eight bytes late. Launch it by "
                    "aclrtKernelArgsInit, Append and Finalize, and aclrtLaunchKernelWithConfig");
            return 1;
        }
        return run_group(entries[kernel], launch, args, index, counters);
    }
}

}  // namespace ascend_sim

#define ASCEND_SIM_KERNEL(name)                               \
    ::ascend_sim::KernelEntry {                               \
        #name, ::ascend_sim::Trampoline<&name>::args_bytes(), \
            &::ascend_sim::Trampoline<&name>::call,           \
            ::ascend_sim::Trampoline<&name>::parameter_bytes, \
            ::ascend_sim::Trampoline<&name>::parameter_count  \
    }

#define ASCEND_SIM_LIBRARY(...)                                                             \
    static const ::ascend_sim::KernelEntry ascend_sim_entries[] = {__VA_ARGS__};            \
    static std::int32_t ascend_sim_run_block(                                               \
        const ::ascend_sim::Launch* launch, std::uint64_t kernel, const std::uint8_t* args, \
        std::uint32_t index, ::ascend_sim::Counters* counters) {                            \
        return ::ascend_sim::run_block_of(ascend_sim_entries, launch, kernel, args, index,  \
                                          counters);                                        \
    }                                                                                       \
    extern "C" __attribute__((visibility("default")))                                       \
    const ::ascend_sim::KernelTable ascend_sim_kernels = {                                  \
        ::ascend_sim::kInterfaceVersion, __NPU_ARCH__, ascend_sim_entries,                  \
        sizeof(ascend_sim_entries) / sizeof(ascend_sim_entries[0]), &ascend_sim_run_block};
