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
    // Of the cube core.
    MTE2_MTE1,
    MTE1_MTE2,
    MTE1_M,
    M_MTE1,
    M_FIX,
    FIX_M,
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
        {kPipeMte2, kPipeMte1, "MTE2_MTE1"},
        {kPipeMte1, kPipeMte2, "MTE1_MTE2"},
        {kPipeMte1, kPipeM, "MTE1_M"},
        {kPipeM, kPipeMte1, "M_MTE1"},
        {kPipeM, kPipeFix, "M_FIX"},
        {kPipeFix, kPipeM, "FIX_M"},
    };
    return kTable[event];
}

// Events between pipes that a core of the other kind has.
inline void check_event_core(Block& running, int event, const Location& at, const char* who) {
    constexpr int kFirstOfCube = static_cast<int>(AscendC::HardEvent::MTE2_MTE1);
    const bool both = event == static_cast<int>(AscendC::HardEvent::S_MTE2) ||
                      event == static_cast<int>(AscendC::HardEvent::MTE2_S);
    if (!both && (event >= kFirstOfCube) != (running.core == kCube))
        running.stop("core", at, "%s<HardEvent::%s>: %s does not have both pipes", who,
                     event_pipes(event).name, core_name(running.core));
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
                           "SetFlag<HardEvent::%s>: id %d is the system's; without a TPipe use "
                           "0..5",
                           event_pipes(event).name, id);
    } else if (!((running.reserved_ids[event] | running.fetched_ids[event]) & bit)) {
        running.report("event", at,
                       "SetFlag<HardEvent::%s>: nobody allocated id %d: beside a TPipe ids come "
                       "from AllocEventID or FetchEventID",
                       event_pipes(event).name, id);
    }
}

// The pipe of this core that the API names.
inline Pipe pipe_of(Block& running, pipe_t pipe, const char* who, const Location& at) {
    const bool cube = running.core == kCube;
    switch (pipe) {
        case PIPE_V:
            if (!cube) return kPipeV;
            break;
        case PIPE_MTE3:
            if (!cube) return kPipeMte3;
            break;
        case PIPE_M:
            if (cube) return kPipeM;
            break;
        case PIPE_MTE1:
            if (cube) return kPipeMte1;
            break;
        case PIPE_FIX:
            if (cube) return kPipeFix;
            break;
        case PIPE_MTE2:
            return kPipeMte2;
        default:
            break;
    }
    running.stop("core", at, "%s: %s does not take pipe %d", who, core_name(running.core), pipe);
}

}  // namespace ascend_sim

namespace AscendC {

template <HardEvent event>
void SetFlag(std::int32_t id, ASCEND_SIM_HERE) {
    using namespace ascend_sim;
    Block& running = block();
    constexpr int index = static_cast<int>(event);
    check_event_core(running, index, at, "SetFlag");
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
    check_event_core(running, index, at, "WaitFlag");
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
    const bool vector = pipe == PIPE_V;
    const Pipe counted = vector ? kPipeV : kPipeS;
    running.count({"", at, counted, running.issued[counted]},
                  vector ? "PipeBarrier<PIPE_V>" : "PipeBarrier", 0);
    if constexpr (pipe == PIPE_ALL) {
        Clock all;
        for (std::uint8_t p = 0; p < kPipes; ++p) all.epoch[p] = running.issued[p];
        for (const Clock& clock : running.seen) all.join(clock);
        for (Clock& clock : running.seen) clock = all;
    } else {
        const Pipe own = pipe_of(running, pipe, "PipeBarrier", at);
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
