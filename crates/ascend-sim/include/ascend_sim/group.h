// A cube core and its two vector cores: who runs, and the flags between them.
//
// The cores run in turns, on a thread each: one runs until it waits for a flag that is not set, or
// ends. So a launch has one course, and what the order of turns hides is found by clocks: a flag
// carries what its pipe had completed, and accesses of global memory by two cores without a flag
// between them are reported as those of two pipes are.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>

#include "sync.h"

namespace ascend_sim {

constexpr int kCrossFlags = 16;           // ids of each core
constexpr std::size_t kMostCrossSets = 15;  // of an id that are not waited for

class Group {
public:
    // What a core does: its number is known to the group. Blocks until it is the core's turn.
    void enter(Core core) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return turn_ == core; });
    }

    // The core has run to its end, or was stopped.
    void leave(Core core, bool stopped) {
        const std::lock_guard<std::mutex> lock(mutex_);
        state_[core] = State::kEnded;
        stopped_ |= stopped;
        pass(core);
    }

    void set(Block& running, std::uint32_t id, Pipe pipe, const Location& at) {
        const Clock clock = completed(running, pipe).sent_by(running.core);
        const std::lock_guard<std::mutex> lock(mutex_);
        if (running.core == kCube) {
            push(running, kVector0, id, clock, at);
            push(running, kVector1, id, clock, at);
            return;
        }
        // The cube core's flag is set once both vector cores have set it.
        arrived_[running.core][id].push_back(clock);
        auto& other = arrived_[running.core == kVector0 ? kVector1 : kVector0][id];
        auto& own = arrived_[running.core][id];
        if (own.size() > kMostCrossSets)
            running.report("cross-core", at,
                           "CrossCoreSetFlag(%u): %zu sets of this core that the other vector core "
                           "has not joined",
                           id, own.size());
        if (other.empty()) return;
        Clock both = own.front();
        both.join(other.front());
        own.pop_front();
        other.pop_front();
        push(running, kCube, id, both, at);
    }

    void wait(Block& running, std::uint32_t id, const Location& at) {
        std::unique_lock<std::mutex> lock(mutex_);
        const Core core = running.core;
        while (flags_[core][id].empty()) {
            state_[core] = State::kWaiting;
            pass(core);
            changed_.wait(lock, [&] { return turn_ == core; });
            if (flags_[core][id].empty() && hung_) {
                // Where a core was stopped, what it would have set is missing, too.
                if (stopped_) throw BlockStopped{};
                stopped_ = true;
                running.stop("cross-core", at,
                             "CrossCoreWaitFlag(%u) on %s: no core sets this flag any more: the "
                             "device would hang",
                             id, core_name(core));
            }
        }
        state_[core] = State::kReady;
        const Clock clock = flags_[core][id].front();
        flags_[core][id].pop_front();
        // dav-2201 keeps back every instruction after it.
        for (Clock& seen : running.seen) seen.receive(clock, core);
    }

    // After all cores: flags that are still set.
    void check_end(Block& running) {
        if (stopped_) return;
        for (std::uint32_t id = 0; id < kCrossFlags; ++id) {
            for (int core = 0; core < kCores; ++core) {
                const std::size_t left = flags_[core][id].size() + arrived_[core][id].size();
                if (left != 0)
                    running.report("cross-core", running.last,
                                   "kernel end: flag %u of %s is set %zu times more than it was "
                                   "waited for; the next kernel would find it",
                                   id, core_name(static_cast<std::uint8_t>(core)), left);
            }
        }
    }

private:
    enum class State : std::uint8_t { kReady, kWaiting, kEnded };

    std::mutex mutex_;
    std::condition_variable changed_;
    Core turn_ = kCube;
    State state_[kCores] = {};
    bool hung_ = false;
    bool stopped_ = false;
    std::deque<Clock> flags_[kCores][kCrossFlags];
    std::deque<Clock> arrived_[kCores][kCrossFlags];

    void push(Block& running, Core to, std::uint32_t id, const Clock& clock, const Location& at) {
        auto& flag = flags_[to][id];
        flag.push_back(clock);
        if (flag.size() > kMostCrossSets)
            running.report("cross-core", at,
                           "CrossCoreSetFlag(%u): %zu sets that %s has not waited for; the counter "
                           "of a flag holds %zu",
                           id, flag.size(), core_name(to), kMostCrossSets);
        if (state_[to] == State::kWaiting) state_[to] = State::kReady;
    }

    // Gives the turn to the next core that can go on. If all wait, each gets it to find that out.
    void pass(Core from) {
        for (const State wanted : {State::kReady, State::kWaiting}) {
            for (int step = 1; step <= kCores; ++step) {
                const int next = (from + step) % kCores;
                if (state_[next] != wanted) continue;
                hung_ |= wanted == State::kWaiting;
                turn_ = static_cast<Core>(next);
                changed_.notify_all();
                return;
            }
        }
    }
};

inline Group& group_of(Block& running, const char* who, const Location& at, std::uint32_t id) {
    if (running.group == nullptr)
        running.stop("cross-core", at,
                     "%s: the kernel runs on vector cores alone; state KERNEL_TYPE_MIX_AIC_1_2",
                     who);
    if (id >= kCrossFlags)
        running.stop("cross-core", at, "%s: flag %u is outside 0..15", who, id);
    return *running.group;
}

}  // namespace ascend_sim

namespace AscendC {

// Mode 2: the cube core to both vector cores, or both to it.
template <std::uint8_t modeId, pipe_t pipe>
void CrossCoreSetFlag(std::uint16_t flagId, ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    static_assert(modeId == 2,
                  "the simulator models flags between a cube core and its vector cores");
    static_assert(pipe != PIPE_S && pipe != PIPE_ALL, "the flag is set after a pipe's work");
    Block& running = block();
    Group& group = group_of(running, "CrossCoreSetFlag", at, flagId);
    running.last = at;
    ++running.counters.cross_core_flags;
    group.set(running, flagId, pipe_of(running, pipe, "CrossCoreSetFlag", at), at);
}

template <std::uint8_t modeId = 0, pipe_t pipe = PIPE_S>
void CrossCoreWaitFlag(std::uint16_t flagId, ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    Group& group = group_of(running, "CrossCoreWaitFlag", at, flagId);
    running.last = at;
    group.wait(running, flagId, at);
}

}  // namespace AscendC
