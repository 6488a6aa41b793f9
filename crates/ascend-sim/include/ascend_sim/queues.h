// TPipe, queues and TBuf: who owns which range of the unified buffer, and the flags that queue
// calls raise. EnQue sets the forward event, DeQue waits for it; FreeTensor sets the release event
// and the next AllocTensor of the same block waits for that.
#pragma once

#include "tensors.h"

namespace ascend_sim {

inline const char* position_name(AscendC::TPosition position) {
    static constexpr const char* kNames[] = {"GM",  "A1",  "A2",    "B1",     "B2",      "C1", "C2",
                                             "CO1", "CO2", "VECIN", "VECOUT", "VECCALC", "MAX"};
    return kNames[static_cast<int>(position)];
}

// The memory that a position stands for.
constexpr Space space_of(AscendC::TPosition position) {
    using AscendC::TPosition;
    switch (position) {
        case TPosition::A1:
        case TPosition::B1:
        case TPosition::C1:
            return kL1;
        case TPosition::A2:
            return kL0A;
        case TPosition::B2:
            return kL0B;
        case TPosition::CO1:
            return kL0C;
        default:
            return kUb;
    }
}

struct QueueEvents {
    int forward, release;
};

constexpr QueueEvents queue_events(AscendC::TPosition source, AscendC::TPosition target) {
    using AscendC::HardEvent;
    using AscendC::TPosition;
    if (source == TPosition::VECIN && target == TPosition::VECOUT)
        return {static_cast<int>(HardEvent::MTE2_MTE3), static_cast<int>(HardEvent::MTE3_MTE2)};
    if (source == TPosition::GM)
        return {static_cast<int>(HardEvent::MTE2_V), static_cast<int>(HardEvent::V_MTE2)};
    return {static_cast<int>(HardEvent::V_MTE3), static_cast<int>(HardEvent::MTE3_V)};
}

constexpr int kMaxLivePerPosition = 8;

// The bookkeeping of one queue, without its element type.
class QueueCore {
public:
    void initialise(AscendC::TPosition position, QueueEvents events, std::int32_t depth,
                    std::int32_t index) {
        position_ = position;
        events_ = events;
        depth_ = depth;
        index_ = index;
    }

    std::int32_t take(const char* call, const Location& at) {
        Block& running = block();
        QueueState& queue = state(call, at);
        const std::size_t count = queue.buffers.size();
        check_live(running, queue, call, at);
        for (std::size_t step = 0; step < count; ++step) {
            const std::int32_t slot = queue.buffers[(queue.cursor + step) % count];
            Buffer& buffer = running.buffers[slot];
            if (buffer.state != BufferState::kFree) continue;
            queue.cursor = static_cast<std::uint32_t>((queue.cursor + step + 1) % count);
            buffer.state = BufferState::kAllocated;
            buffer.last = at;
            ++buffer.generation;
            if (buffer.release_id >= 0) {
                running.seen[event_pipes(buffer.release_event).to].join(buffer.release);
                running.queue_ids[buffer.release_event] &=
                    static_cast<std::uint8_t>(~(1u << buffer.release_id));
                buffer.release_id = -1;
            }
            std::memset(running.state.data() + buffer.start, kNeverWritten, buffer.size_bytes);
            std::memset(running.ub.data() + buffer.start, 0xff, buffer.size_bytes);
            return slot;
        }
        running.stop("queue", at,
                     "%s: all %zu blocks of %s queue %d are in use (the oldest since line %u): "
                     "FreeTensor is missing and the device would hang",
                     call, count, queue.position, index_,
                     running.buffers[queue.buffers[queue.cursor]].last.line);
    }

    void push(const UbView& view, int forward, const char* call, const Location& at) {
        Block& running = block();
        QueueState& queue = state(call, at);
        Buffer& buffer = owned(view, call, at);
        if (buffer.state == BufferState::kEnqueued)
            running.stop("queue", at, "%s: this block of %s queue %d is enqueued already (line %u)",
                         call, queue.position, index_, buffer.last.line);
        if (buffer.state == BufferState::kFree)
            running.stop("queue", at,
                         "%s: this block of %s queue %d is free: AllocTensor is missing", call,
                         queue.position, index_);
        if (depth_ > 0 && queue.fifo.size() >= static_cast<std::size_t>(depth_))
            running.report("queue", at,
                           "%s: %zu tensors wait in %s queue %d of depth %d: the queue is too "
                           "shallow or a DeQue is missing",
                           call, queue.fifo.size() + 1, queue.position, index_, depth_);
        buffer.state = BufferState::kEnqueued;
        buffer.last = at;
        buffer.forward = completed(running, event_pipes(forward).from);
        buffer.forward_event = forward;
        buffer.forward_id = take_event_id(running, forward, running.queue_ids, at, call);
        queue.fifo.push_back(view.buffer);
    }

    std::int32_t pop(int forward, const char* call, const Location& at) {
        Block& running = block();
        QueueState& queue = state(call, at);
        if (queue.fifo.empty())
            running.stop("queue", at, "%s: %s queue %d is empty: EnQue is missing before it", call,
                         queue.position, index_);
        const std::int32_t slot = queue.fifo.front();
        queue.fifo.erase(queue.fifo.begin());
        Buffer& buffer = running.buffers[slot];
        if (buffer.forward_event != forward)
            running.report("queue", at,
                           "%s: waits for HardEvent::%s but the EnQue at line %u set HardEvent::%s",
                           call, event_pipes(forward).name, buffer.last.line,
                           event_pipes(buffer.forward_event).name);
        running.seen[event_pipes(forward).to].join(buffer.forward);
        running.queue_ids[buffer.forward_event] &=
            static_cast<std::uint8_t>(~(1u << buffer.forward_id));
        buffer.state = BufferState::kDequeued;
        buffer.last = at;
        return slot;
    }

    void release(const UbView& view, const char* call, const Location& at) {
        Block& running = block();
        QueueState& queue = state(call, at);
        Buffer& buffer = owned(view, call, at);
        if (buffer.state == BufferState::kFree || buffer.generation != view.generation)
            running.stop("queue", at, "%s: this block of %s queue %d was freed already (line %u)",
                         call, queue.position, index_, buffer.last.line);
        if (buffer.state == BufferState::kEnqueued)
            running.stop(
                "queue", at,
                "%s: this block of %s queue %d is still enqueued (line %u): DeQue is missing", call,
                queue.position, index_, buffer.last.line);
        buffer.state = BufferState::kFree;
        buffer.last = at;
        buffer.release = completed(running, event_pipes(events_.release).from);
        buffer.release_event = events_.release;
        buffer.release_id = take_event_id(running, events_.release, running.queue_ids, at, call);
    }

    UbView view(std::int32_t slot) const {
        const Buffer& buffer = block().buffers[slot];
        return UbView{buffer.start, buffer.size_bytes, slot, buffer.generation};
    }

    QueueState& state(const char* call, const Location& at) const {
        if (index_ < 0)
            block().stop("queue", at, "%s: the queue has no memory: InitBuffer is missing", call);
        return block().queues[index_];
    }

    AscendC::TPosition position() const { return position_; }
    const QueueEvents& events() const { return events_; }

private:
    AscendC::TPosition position_ = AscendC::TPosition::MAX;
    QueueEvents events_{0, 0};
    std::int32_t depth_ = 0;
    std::int32_t index_ = -1;

    Buffer& owned(const UbView& view, const char* call, const Location& at) const {
        Block& running = block();
        if (view.buffer < 0 || running.buffers[view.buffer].queue != index_)
            running.stop("queue", at,
                         "%s: the tensor (%s) belongs to another queue than %s queue %d", call,
                         running.describe(view).c_str(), position_name(position_), index_);
        return running.buffers[view.buffer];
    }

    void check_live(Block& running, const QueueState& queue, const char* call,
                    const Location& at) const {
        int live = 0;
        for (const Buffer& buffer : running.buffers) {
            if (buffer.queue < 0 || buffer.state == BufferState::kFree) continue;
            live += running.queues[buffer.queue].position_id == queue.position_id;
        }
        if (live >= kMaxLivePerPosition)
            running.stop("queue", at,
                         "%s: %d tensors of position %s are allocated already, the limit is %d",
                         call, live, queue.position, kMaxLivePerPosition);
    }
};

}  // namespace ascend_sim

namespace AscendC {

class TPipe;

template <TPosition source, TPosition target, std::int32_t depth, auto mask = 0>
class TQueBind {
public:
    template <class T>
    LocalTensor<T> AllocTensor(ASCEND_SIM_HERE) {
        static_assert(depth != 0, "a queue of depth 0 takes AllocTensor(tensor)");
        return tensor<T>(core_.take("AllocTensor", at));
    }

    template <class T>
    void AllocTensor(LocalTensor<T>& result, ASCEND_SIM_HERE) {
        static_assert(depth == 0, "AllocTensor(tensor) is for queues of depth 0");
        result = tensor<T>(core_.take("AllocTensor", at));
    }

    template <class T>
    bool EnQue(const LocalTensor<T>& queued, ASCEND_SIM_HERE) {
        core_.push(queued.view(), core_.events().forward, "EnQue", at);
        return true;
    }

    template <TPosition from, TPosition to, class T>
    bool EnQue(const LocalTensor<T>& queued, ASCEND_SIM_HERE) {
        core_.push(queued.view(), ascend_sim::queue_events(from, to).forward, "EnQue", at);
        return true;
    }

    template <class T>
    LocalTensor<T> DeQue(ASCEND_SIM_HERE) {
        static_assert(depth != 0, "a queue of depth 0 takes DeQue(tensor)");
        return tensor<T>(core_.pop(core_.events().forward, "DeQue", at));
    }

    template <class T>
    void DeQue(LocalTensor<T>& result, ASCEND_SIM_HERE) {
        static_assert(depth == 0, "DeQue(tensor) is for queues of depth 0");
        result = tensor<T>(core_.pop(core_.events().forward, "DeQue", at));
    }

    template <TPosition from, TPosition to, class T>
    LocalTensor<T> DeQue(ASCEND_SIM_HERE) {
        return tensor<T>(core_.pop(ascend_sim::queue_events(from, to).forward, "DeQue", at));
    }

    template <class T>
    void FreeTensor(LocalTensor<T>& freed, ASCEND_SIM_HERE) {
        core_.release(freed.view(), "FreeTensor", at);
    }

    bool VacantInQue(ASCEND_SIM_HERE) {
        return core_.state("VacantInQue", at).fifo.size() < static_cast<std::size_t>(depth);
    }
    bool HasTensorInQue(ASCEND_SIM_HERE) { return !core_.state("HasTensorInQue", at).fifo.empty(); }
    std::int32_t GetTensorCountInQue(ASCEND_SIM_HERE) {
        return static_cast<std::int32_t>(core_.state("GetTensorCountInQue", at).fifo.size());
    }

    void FreeAllEvent(ASCEND_SIM_HERE) {
        ascend_sim::Block& running = ascend_sim::block();
        for (const std::int32_t slot : core_.state("FreeAllEvent", at).buffers) {
            ascend_sim::Buffer& buffer = running.buffers[slot];
            if (buffer.release_id < 0) continue;
            running.queue_ids[buffer.release_event] &=
                static_cast<std::uint8_t>(~(1u << buffer.release_id));
            running.seen[ascend_sim::event_pipes(buffer.release_event).to].join(buffer.release);
            buffer.release_id = -1;
        }
    }

private:
    friend class TPipe;
    ascend_sim::QueueCore core_;

    // The position that a block is filled from or copied to; it gives the queue its name.
    static constexpr TPosition kPosition = source == TPosition::GM ? target : source;

    template <class T>
    LocalTensor<T> tensor(std::int32_t slot) const {
        const ascend_sim::UbView view = core_.view(slot);
        return LocalTensor<T>(view, static_cast<std::uint32_t>(view.size_bytes / sizeof(T)),
                              kPosition);
    }
};

template <TPosition position>
struct QueEnds {
    static_assert(position == TPosition::VECIN || position == TPosition::VECOUT,
                  "the simulator has queues at VECIN and VECOUT");
    static constexpr TPosition source =
        position == TPosition::VECIN ? TPosition::GM : TPosition::VECOUT;
    static constexpr TPosition target =
        position == TPosition::VECIN ? TPosition::VECIN : TPosition::GM;
};

template <TPosition position, std::int32_t depth, auto mask = 0>
class TQue : public TQueBind<QueEnds<position>::source, QueEnds<position>::target, depth, mask> {};

template <TPosition position>
class TBuf {
public:
    template <class T>
    LocalTensor<T> Get(ASCEND_SIM_HERE) const {
        return GetWithOffset<T>(size_bytes(at) / sizeof(T), 0, at);
    }

    template <class T>
    LocalTensor<T> Get(std::uint32_t elements, ASCEND_SIM_HERE) const {
        return GetWithOffset<T>(elements, 0, at);
    }

    template <class T>
    LocalTensor<T> GetWithOffset(std::uint32_t elements, std::uint32_t offset_bytes,
                                 ASCEND_SIM_HERE) const {
        ascend_sim::Block& running = ascend_sim::block();
        const std::uint32_t size = size_bytes(at);
        if (offset_bytes % ascend_sim::kGranuleBytes != 0)
            running.stop("ub-misaligned", at,
                         "TBuf::GetWithOffset: offset %u is not a multiple of 32 bytes",
                         offset_bytes);
        if (std::uint64_t{elements} * sizeof(T) + offset_bytes > size)
            running.stop("tensor-bounds", at,
                         "TBuf::Get: %llu bytes at offset %u do not fit TBuf %d of %u bytes",
                         static_cast<unsigned long long>(std::uint64_t{elements} * sizeof(T)),
                         offset_bytes, slot_, size);
        const ascend_sim::Buffer& buffer = running.buffers[slot_];
        return LocalTensor<T>({buffer.start + offset_bytes, buffer.size_bytes - offset_bytes, slot_,
                               buffer.generation},
                              elements, position);
    }

private:
    friend class TPipe;
    std::int32_t slot_ = -1;

    std::uint32_t size_bytes(const ascend_sim::Location& at) const {
        if (slot_ < 0) ascend_sim::block().stop("queue", at, "TBuf::Get: InitBuffer is missing");
        return ascend_sim::block().buffers[slot_].size_bytes;
    }
};

class TPipe {
public:
    explicit TPipe(ASCEND_SIM_HERE) {
        ascend_sim::Block& running = ascend_sim::block();
        if (running.live_pipes++ != 0)
            running.stop("queue", at, "TPipe: another TPipe is alive in this block");
    }
    TPipe(const TPipe&) = delete;
    TPipe& operator=(const TPipe&) = delete;
    ~TPipe() { Destroy(); }

    void Destroy() {
        if (!alive_) return;
        alive_ = false;
        --ascend_sim::block().live_pipes;
    }

    template <TPosition source, TPosition target, std::int32_t depth, auto mask>
    bool InitBuffer(TQueBind<source, target, depth, mask>& queue, std::uint8_t number,
                    std::uint32_t length, ASCEND_SIM_HERE) {
        using namespace ascend_sim;
        using Queue = TQueBind<source, target, depth, mask>;
        Block& running = block();
        if (number == 0 || length == 0)
            running.stop("ub-capacity", at,
                         "InitBuffer: %u blocks of %u bytes; both must be positive", number,
                         length);
        const std::int32_t index = static_cast<std::int32_t>(running.queues.size());
        QueueState state{position_name(Queue::kPosition),
                         static_cast<int>(Queue::kPosition),
                         at,
                         {},
                         {},
                         0,
                         depth};
        for (std::uint32_t i = 0; i < number; ++i)
            state.buffers.push_back(carve(length, index, BufferState::kFree, kUb, at));
        running.queues.push_back(std::move(state));
        queue.core_.initialise(Queue::kPosition, queue_events(source, target), depth, index);
        return true;
    }

    template <TPosition position>
    bool InitBuffer(TBuf<position>& buffer, std::uint32_t length, ASCEND_SIM_HERE) {
        if (length == 0)
            ascend_sim::block().stop("ub-capacity", at, "InitBuffer: a TBuf of 0 bytes");
        buffer.slot_ = carve(length, -1, ascend_sim::BufferState::kScratch,
                             ascend_sim::space_of(position), at);
        return true;
    }

    template <HardEvent event>
    TEventID AllocEventID(ASCEND_SIM_HERE) {
        ascend_sim::Block& running = ascend_sim::block();
        return static_cast<TEventID>(ascend_sim::take_event_id(
            running, static_cast<int>(event), running.reserved_ids, at, "AllocEventID"));
    }

    template <HardEvent event>
    void ReleaseEventID(TEventID id, ASCEND_SIM_HERE) {
        ascend_sim::Block& running = ascend_sim::block();
        std::uint8_t& held = running.reserved_ids[static_cast<int>(event)];
        if (id < 0 || id >= ascend_sim::kEventIds || !(held & (1u << id)))
            running.stop("event", at, "ReleaseEventID<HardEvent::%s>(%d): the id is not reserved",
                         ascend_sim::event_pipes(static_cast<int>(event)).name, id);
        held &= static_cast<std::uint8_t>(~(1u << id));
    }

    template <HardEvent event>
    TEventID FetchEventID() {
        return FetchEventID(event);
    }

    TEventID FetchEventID(HardEvent event, ASCEND_SIM_HERE) {
        ascend_sim::Block& running = ascend_sim::block();
        const int index = static_cast<int>(event);
        const int id =
            ascend_sim::take_event_id(running, index, running.reserved_ids, at, "FetchEventID");
        running.reserved_ids[index] &= static_cast<std::uint8_t>(~(1u << id));
        running.fetched_ids[index] |= static_cast<std::uint8_t>(1u << id);
        return static_cast<TEventID>(id);
    }

private:
    bool alive_ = true;

    static std::int32_t carve(std::uint32_t length, std::int32_t queue,
                              ascend_sim::BufferState state, ascend_sim::Space space,
                              const ascend_sim::Location& at) {
        using namespace ascend_sim;
        Block& running = block();
        const std::uint64_t size =
            (std::uint64_t{length} + kGranuleBytes - 1) / kGranuleBytes * kGranuleBytes;
        if (running.buffers.size() >= kMaxBuffers)
            running.stop("ub-capacity", at,
                         "InitBuffer: a kernel has at most %u blocks over all queues and TBufs",
                         kMaxBuffers);
        if ((space == kUb) == (running.core == kCube))
            running.stop("core", at, "InitBuffer: %s has no %s", core_name(running.core),
                         kSpaceNames[space]);
        std::uint32_t& top = running.pool_top[space];
        if (top + size > running.capacity(space))
            running.stop("ub-capacity", at,
                         "InitBuffer: %llu bytes more than the %u in use exceed the %s of %llu "
                         "bytes",
                         static_cast<unsigned long long>(size), top,
                         space == kUb ? "unified buffer" : kSpaceNames[space],
                         static_cast<unsigned long long>(running.capacity(space)));
        Buffer buffer{};
        buffer.start = kSpaceStart[space] + top;
        buffer.size_bytes = static_cast<std::uint32_t>(size);
        buffer.queue = queue;
        buffer.state = state;
        buffer.last = at;
        buffer.forward_id = -1;
        buffer.release_id = -1;
        running.buffers.push_back(buffer);
        top += static_cast<std::uint32_t>(size);
        if (space == kUb)
            running.counters.ub_high_water_bytes =
                std::max<std::uint64_t>(running.counters.ub_high_water_bytes, top);
        return static_cast<std::int32_t>(running.buffers.size() - 1);
    }
};

}  // namespace AscendC
