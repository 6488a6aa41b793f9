// One vector core as the intrinsics see it: unified buffer, mask, flags, and what each pipe knows
// of the others. Instructions run at once, in program order. Order between pipes is checked with
// vector clocks on granules of the unified buffer, so that a flag or barrier that neither the
// kernel nor the vendor's queues set is a violation.
#pragma once

#include <asm/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "ascend_sim/launch.h"  // of the simulator, which loads the kernels

namespace cce {

constexpr uint32_t kUbBytes = (__NPU_ARCH__ == 3510 ? 256 : 192) * 1024;
// Behind the buffer, so that an address that is wrong by a little is a violation and not a crash.
constexpr uint32_t kGuardBytes = 64 * 1024;
constexpr uint32_t kGranule = 32;
constexpr int kFlagIds = 8;
constexpr int kBufferIds = 32;
// Violations of a kind that a block reports: the first ones tell what is wrong.
constexpr int kReported = 4;

// The pipes of a vector core, in the order of the simulator's interface.
enum Unit : uint8_t { kS, kV, kMte2, kMte3, kUnits };
inline const char* unit_name(int unit) {
    static const char* const names[] = {"S", "V", "MTE2", "MTE3"};
    return names[unit];
}

// For each pipe, how many of its instructions are known to be complete.
struct Clock {
    uint32_t epoch[kUnits] = {};
    void join(const Clock& other) {
        for (int u = 0; u < kUnits; ++u) epoch[u] = std::max(epoch[u], other.epoch[u]);
    }
};

// Who touched 32 bytes of the unified buffer last.
struct Granule {
    uint32_t write_epoch = 0, read_epoch[kUnits] = {};
    uint8_t write_unit = 0;
    const char* write_op = "";
    const char* read_op[kUnits] = {};
};

struct Flag {
    bool set = false;
    Clock clock;
};

// Thrown where a block cannot go on.
struct Stopped {};

struct Core;
// No destructor: one that runs as a thread ends would keep the library loaded after it was closed.
inline thread_local Core* g_core = nullptr;

struct Core {
    const ascend_sim::Launch* launch;
    ascend_sim::Counters* counters;
    uint32_t index;
    // NaN, as the simulator fills memory.
    std::vector<uint8_t> memory = std::vector<uint8_t>(kUbBytes + kGuardBytes, 0xff);
    uint8_t* ub = memory.data();
    std::vector<uint8_t> defined = std::vector<uint8_t>(kUbBytes);
    std::vector<Granule> granules = std::vector<Granule>(kUbBytes / kGranule + 1);
    std::vector<ascend_sim::GmAccess> accesses;
    Clock seen[kUnits];
    uint32_t issued[kUnits] = {};
    Flag flags[kUnits][kUnits][kFlagIds];
    Clock buffer_ids[kBufferIds];  // dav-3510: what the last holder of an id had completed
    int held[kBufferIds] = {};
    // What an earlier kernel may have left: a kernel has to set its own.
    bool counter_mode = false;
    uint64_t mask_high = 0x5555, mask_low = 0x3333;
    uint64_t compare_mask[2] = {};
    uint64_t ctrl, pad_value = 0, gathered = 0;
#if ASCENDC_CPU_DEBUG
    uint32_t gather_from = 0;  // an address of the host does not fit the instruction
#endif
    uint64_t ub_top = 0;
    std::map<std::string, uint64_t> issued_by_name;
    std::map<std::string, int> reported;

    Core(const ascend_sim::Launch* of, uint32_t block, ascend_sim::Counters* of_block)
        : launch(of), counters(of_block), index(block), ctrl(of->saturate ? 0 : 1ull << 48) {
        g_core = this;
        syscall(SYS_arch_prctl, ARCH_SET_GS, ub);
    }
    Core(const Core&) = delete;
    ~Core() {
        syscall(SYS_arch_prctl, ARCH_SET_GS, nullptr);
        g_core = nullptr;
    }

    void report(const char* kind, const char* format, ...) __attribute__((format(printf, 3, 4))) {
        va_list arguments;
        va_start(arguments, format);
        if (reported[kind]++ < kReported) send(kind, format, arguments);
        va_end(arguments);
    }
    [[noreturn]] void stop(const char* kind, const char* format, ...)
        __attribute__((format(printf, 3, 4))) {
        va_list arguments;
        va_start(arguments, format);
        send(kind, format, arguments);
        va_end(arguments);
        throw Stopped{};
    }

    // Counts an instruction; its number on its pipe.
    uint32_t issue(Unit unit, const char* name) {
        ++issued_by_name[name];
        if (unit == kV) ++counters->vector_instructions;
        // Vector instructions of dav-3510 wait for each other by themselves.
        if (unit == kS || (unit == kV && __NPU_ARCH__ == 3510))
            seen[unit].epoch[unit] = issued[unit];
        return ++issued[unit];
    }

    void check(const char* op, const char* role, int64_t at, uint64_t bytes) {
        if (at < 0 || at + bytes > kUbBytes)
            stop("tensor-bounds", "%s: %s touches UB bytes [%ld, %ld)", op, role, long(at),
                 long(at + bytes));
        ub_top = std::max<uint64_t>(ub_top, at + bytes);
    }
    void ub_read(const char* op, Unit unit, uint32_t epoch, const char* role, int64_t at,
                 uint64_t bytes, bool wants_defined = true) {
        if (bytes == 0) return;
        check(op, role, at, bytes);
        for (uint64_t g = at / kGranule; g <= (at + bytes - 1) / kGranule; ++g) {
            Granule& granule = granules[g];
            unordered_write(op, unit, epoch, "reads", g);
            granule.read_epoch[unit] = epoch;
            granule.read_op[unit] = op;
        }
        if (wants_defined && std::memchr(defined.data() + at, 0, bytes) != nullptr)
            report("ub-undefined-read", "%s: %s reads UB bytes that nothing wrote, in [%ld, %ld)",
                   op, role, long(at), long(at + bytes));
    }
    void ub_write(const char* op, Unit unit, uint32_t epoch, const char* role, int64_t at,
                  uint64_t bytes) {
        if (bytes == 0) return;
        check(op, role, at, bytes);
        for (uint64_t g = at / kGranule; g <= (at + bytes - 1) / kGranule; ++g) {
            Granule& granule = granules[g];
            for (int by = 0; by < kUnits; ++by) {
                const bool same = by == unit && granule.read_epoch[by] == epoch;
                if (granule.read_epoch[by] > seen[unit].epoch[by] && !same)
                    report("ordering", "%s (%s) overwrites UB %lu read by %s (%s) without order",
                           op, unit_name(unit), g * kGranule, granule.read_op[by], unit_name(by));
            }
            unordered_write(op, unit, epoch, "overwrites", g);
            granule.write_epoch = epoch;
            granule.write_unit = unit;
            granule.write_op = op;
        }
        std::memset(defined.data() + at, 1, bytes);
    }

    // Where the bytes of global memory are that lie at a device address.
    uint8_t* gm(const char* op, uint64_t at, uint64_t bytes, bool write) {
        const ascend_sim::Region* const end = launch->regions + launch->region_count;
        const ascend_sim::Region* region = std::upper_bound(
            launch->regions, end, at,
            [](uint64_t a, const ascend_sim::Region& r) { return a < r.device_address; });
        // `at + bytes` may wrap around.
        if (region == launch->regions || bytes > region[-1].size_bytes ||
            at - region[-1].device_address > region[-1].size_bytes - bytes)
            stop("gm-out-of-bounds",
                 "%s %s device bytes [0x%lx, 0x%lx), which no live allocation holds", op,
                 write ? "writes" : "reads", at, at + bytes);
        return region[-1].bytes + (at - region[-1].device_address);
    }
    // `count` runs of `length` bytes of global memory, `stride` bytes apart.
    void note_gm(const char* op, Unit unit, uint32_t epoch, uint64_t start, uint64_t length,
                 uint64_t stride, uint64_t count, bool is_write) {
        if (count == 0) return;
        ascend_sim::GmAccess access{};
        access.start = start;
        access.length = length;
        access.stride = stride;
        access.count = count;
        access.operation = op;
        access.file = "vendor-headers";
        access.epoch = epoch;
        access.pipe = unit;
        access.is_write = is_write;
        std::copy(std::begin(seen[unit].epoch), std::end(seen[unit].epoch), access.seen);
        accesses.push_back(access);
    }

    Clock completed(Unit unit) const {
        Clock clock = seen[unit];
        clock.epoch[unit] = issued[unit];
        return clock;
    }
    void set(Unit from, Unit to, int id) {
        Flag& flag = flag_of("set_flag", from, to, id);
        if (flag.set)
            report("event", "set_flag(%s, %s, %d): already set", unit_name(from), unit_name(to),
                   id);
        flag.set = true;
        flag.clock = completed(from);
    }
    void wait(Unit from, Unit to, int id) {
        Flag& flag = flag_of("wait_flag", from, to, id);
        // The vendor's destructors wait too; where the block is stopping, they wait for nothing.
        if (!flag.set && std::uncaught_exceptions() > 0) return;
        if (!flag.set)
            stop("event", "wait_flag(%s, %s, %d): never set, the device would hang",
                 unit_name(from), unit_name(to), id);
        flag.set = false;
        if (to != kS) return seen[to].join(flag.clock);
        // What the scalar unit knows, everything that it issues afterwards knows.
        for (Clock& clock : seen) clock.join(flag.clock);
    }
    void barrier_all() {
        Clock all;
        std::copy(std::begin(issued), std::end(issued), all.epoch);
        for (Clock& clock : seen) clock = all;
    }
    void end() {
        for (int from = 0; from < kUnits; ++from)
            for (int to = 0; to < kUnits; ++to)
                for (int id = 0; id < kFlagIds; ++id)
                    if (flags[from][to][id].set)
                        report("event",
                               "kernel end: flag (%s, %s, %d) is still set; the next kernel would "
                               "find it",
                               unit_name(from), unit_name(to), id);
        if (counter_mode) report("vector-parameter", "kernel end: the mask mode is still Counter");
        counters->ub_high_water_bytes = ub_top;
    }

private:
    void send(const char* kind, const char* format, va_list arguments)
        __attribute__((format(printf, 3, 0))) {
        char text[700];
        std::vsnprintf(text, sizeof text, format, arguments);
        launch->report(launch->host, index, kind, "vendor-headers", 0, text);
    }
    void unordered_write(const char* op, Unit unit, uint32_t epoch, const char* verb, uint64_t g) {
        const Granule& granule = granules[g];
        const bool same = granule.write_unit == unit && granule.write_epoch == epoch;
        if (granule.write_epoch > seen[unit].epoch[granule.write_unit] && !same)
            report("ordering", "%s (%s) %s UB %lu written by %s (%s) without order", op,
                   unit_name(unit), verb, g * kGranule, granule.write_op,
                   unit_name(granule.write_unit));
    }
    Flag& flag_of(const char* call, Unit from, Unit to, int id) {
        if (id < 0 || id >= kFlagIds)
            stop("event", "%s(%s, %s, %d): id out of range", call, unit_name(from), unit_name(to),
                 id);
        return flags[from][to][id];
    }
};

inline Core& core() { return *g_core; }

}  // namespace cce

[[noreturn]] inline void cce_absent(const char* name) {
    cce::core().stop("absent-intrinsic", "%s was called, which the harness does not implement",
                     name);
}
