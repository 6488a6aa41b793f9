// Flags, barriers and event ids.
#pragma once

#include "block.h"

namespace AscendC {

using TEventID = std::int8_t;

enum class HardEvent : std::uint8_t {
    MTE2_V,
    V_MTE2,
    V_MTE3,
    MTE3_V,
    V_V,
    MTE2_MTE3,
    MTE3_MTE2,
    S_V,
    V_S,
    S_MTE2,
    MTE2_S,
    S_MTE3,
    MTE3_S,
};

enum class MemDsbT : std::uint8_t { ALL, DDR, UB, SEQ };

}  // namespace AscendC

namespace ascend_sim {

struct EventPipes {
    Pipe from, to;
    const char* name;
};

inline const EventPipes& event_pipes(int event) {
    static constexpr EventPipes kTable[kEvents] = {
        {kPipeMte2, kPipeV, "MTE2_V"},
        {kPipeV, kPipeMte2, "V_MTE2"},
        {kPipeV, kPipeMte3, "V_MTE3"},
        {kPipeMte3, kPipeV, "MTE3_V"},
        {kPipeV, kPipeV, "V_V"},
        {kPipeMte2, kPipeMte3, "MTE2_MTE3"},
        {kPipeMte3, kPipeMte2, "MTE3_MTE2"},
        {kPipeS, kPipeV, "S_V"},
        {kPipeV, kPipeS, "V_S"},
        {kPipeS, kPipeMte2, "S_MTE2"},
        {kPipeMte2, kPipeS, "MTE2_S"},
        {kPipeS, kPipeMte3, "S_MTE3"},
        {kPipeMte3, kPipeS, "MTE3_S"},
    };
    return kTable[event];
}

// The clock that holds after every access that `pipe` has started is complete.
inline Clock completed(Block& running, Pipe pipe) {
    Clock clock = running.seen[pipe];
    clock.epoch[pipe] = running.issued[pipe];
    return clock;
}

// Takes a free one of the event's eight ids, or stops the block: the device would hang.
inline int take_event_id(Block& running, int event, std::uint8_t* holders, const Location& at,
                         const char* who) {
    const std::uint8_t held = running.reserved_ids[event] | running.queue_ids[event];
    for (int id = 0; id < kEventIds; ++id) {
        if (held & (1u << id)) continue;
        holders[event] |= static_cast<std::uint8_t>(1u << id);
        return id;
    }
    running.stop("event", at,
                 "%s: all %d ids of HardEvent::%s are held by queue blocks and AllocEventID", who,
                 kEventIds, event_pipes(event).name);
}

constexpr int kFirstSystemId = 6;  // 6 and 7 are the system's where the kernel chooses its ids

inline void require_event_id(Block& running, int event, std::int32_t id, const Location& at,
                             const char* who) {
    if (id < 0 || id >= kEventIds)
        running.stop("event", at, "%s<HardEvent::%s>: id %d is outside 0..7", who,
                     event_pipes(event).name, id);
}

// Who chose the id: with a TPipe it hands them out, without one the kernel has those below 6.
inline void check_event_owner(Block& running, int event, std::int32_t id, const Location& at) {
    const unsigned bit = 1u << id;
    if (running.queue_ids[event] & bit) {
        running.report("event", at,
                       "SetFlag<HardEvent::%s>: id %d is held by a queue; take one with "
                       "AllocEventID or FetchEventID",
                       event_pipes(event).name, id);
    } else if (running.live_pipes == 0) {
        if (id >= kFirstSystemId)
            running.report("event", at,
                           "SetFlag<HardEvent::%s>: id %d is the system's; without a TPipe use 0..5",
                           event_pipes(event).name, id);
    } else if (!((running.reserved_ids[event] | running.fetched_ids[event]) & bit)) {
        running.report("event", at,
                       "SetFlag<HardEvent::%s>: nobody allocated id %d: beside a TPipe ids come "
                       "from AllocEventID or FetchEventID",
                       event_pipes(event).name, id);
    }
}

}  // namespace ascend_sim

namespace AscendC {

template <HardEvent event>
void SetFlag(std::int32_t id, ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    constexpr int index = static_cast<int>(event);
    require_event_id(running, index, id, at, "SetFlag");
    check_event_owner(running, index, id, at);
    Flag& flag = running.flags[index][id];
    if (flag.set)
        running.report("event", at,
                       "SetFlag<HardEvent::%s>(%d): the flag set at line %u was not waited for",
                       event_pipes(index).name, id, flag.at.line);
    flag.set = true;
    flag.at = at;
    flag.clock = completed(running, event_pipes(index).from);
}

template <HardEvent event>
void WaitFlag(std::int32_t id, ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    constexpr int index = static_cast<int>(event);
    require_event_id(running, index, id, at, "WaitFlag");
    Flag& flag = running.flags[index][id];
    if (!flag.set)
        running.stop("event", at,
                     "WaitFlag<HardEvent::%s>(%d): no SetFlag came before; the device would hang",
                     event_pipes(index).name, id);
    flag.set = false;
    running.seen[event_pipes(index).to].join(flag.clock);
}

template <pipe_t pipe>
void PipeBarrier(ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    if constexpr (pipe == PIPE_S) running.stop("event", at, "PipeBarrier<PIPE_S> is not accepted");
    ++running.counters.barriers[pipe];
    running.count(pipe == PIPE_V ? "PipeBarrier<PIPE_V>" : "PipeBarrier", "", 0);
    if constexpr (pipe == PIPE_ALL) {
        Clock all;
        for (std::uint8_t p = 0; p < kPipes; ++p) all.epoch[p] = running.issued[p];
        for (Clock& clock : running.seen) clock = all;
    } else if constexpr (pipe == PIPE_V || pipe == PIPE_MTE2 || pipe == PIPE_MTE3) {
        constexpr Pipe own = pipe == PIPE_V ? kPipeV : pipe == PIPE_MTE2 ? kPipeMte2 : kPipeMte3;
        running.seen[own].epoch[own] = running.issued[own];
    }
}

template <MemDsbT = MemDsbT::ALL>
void DataSyncBarrier(ASCEND_SIM_HERE) {
    (void)at;
    ascend_sim::Block& running = ascend_sim::block();
    for (std::uint8_t pipe = 0; pipe < ascend_sim::kPipes; ++pipe)
        running.seen[ascend_sim::kPipeS].join(
            ascend_sim::completed(running, static_cast<ascend_sim::Pipe>(pipe)));
}

}  // namespace AscendC
