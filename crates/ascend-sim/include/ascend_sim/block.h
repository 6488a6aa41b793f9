// The state of one running block: its unified buffer, what is known about every byte of it, and how
// violations leave the kernel.
//
// Ordering. Every instruction runs on one pipe and gets that pipe's next epoch. `seen[p][q]` is the
// last epoch of pipe q whose memory accesses are known to be complete for instructions that pipe p
// starts from now on; flags, queues and barriers raise it. An access is ordered after an earlier
// one when its pipe has seen that epoch. The buffer remembers the last write and the last read by
// each pipe for every 32-byte granule.
#pragma once

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "launch.h"

namespace ascend_sim {

struct Location {
    const char* file;
    std::uint32_t line;
    static constexpr Location here(const char* file = __builtin_FILE(),
                                   std::uint32_t line = __builtin_LINE()) {
        return {file, line};
    }
};

#define ASCEND_SIM_HERE ::ascend_sim::Location at = ::ascend_sim::Location::here()

// The pipes of a core. What computes has one number on both kinds of core, and what writes out.
enum Pipe : std::uint8_t {
    kPipeS,
    kPipeV,
    kPipeMte2,
    kPipeMte3,
    kPipeMte1,
    kPipes,
    kPipeM = kPipeV,
    kPipeFix = kPipeMte3,
};

// The cores of a block: a vector core; or two, and the cube core that works with them.
enum Core : std::uint8_t { kVector0, kVector1, kCube, kCores };

inline const char* core_name(std::uint8_t core) {
    static constexpr const char* kNames[] = {"vector core 0", "vector core 1", "the cube core"};
    return kNames[core];
}

inline const char* pipe_name(std::uint8_t pipe, std::uint8_t core) {
    static constexpr const char* kNames[][kPipes] = {{"S", "V", "MTE2", "MTE3", "MTE1"},
                                                     {"S", "M", "MTE2", "FIX", "MTE1"}};
    return kNames[core == kCube][pipe];
}

constexpr std::uint32_t kGranuleBytes = 32;
constexpr std::uint32_t kMaxBuffers = 64;

// The memories of a core. Those of a cube core follow one another in its address space here.
enum Space : std::uint8_t { kUb, kL1, kL0A, kL0B, kL0C, kSpaces };
constexpr std::uint32_t kL1Bytes = 512 * 1024;
constexpr std::uint32_t kL0ABytes = 64 * 1024;
constexpr std::uint32_t kL0BBytes = 64 * 1024;
constexpr std::uint32_t kL0CBytes = 128 * 1024;
constexpr std::uint32_t kSpaceStart[] = {0, 0, kL1Bytes, kL1Bytes + kL0ABytes,
                                         kL1Bytes + kL0ABytes + kL0BBytes};
constexpr std::uint32_t kCubeBytes = kSpaceStart[kL0C] + kL0CBytes;
constexpr const char* kSpaceNames[] = {"UB", "L1", "L0A", "L0B", "L0C"};

// What is known about a byte of these memories.
enum ByteState : std::uint8_t { kNeverWritten = 0, kDefined = 1, kUnspecified = 2 };

// `epoch` is of the pipes of the core that holds the clock, `others` of the other cores' pipes.
struct Clock {
    std::uint32_t epoch[kPipes] = {};
    std::uint32_t others[kCores][kPipes] = {};
    void join(const Clock& other) {
        for (int pipe = 0; pipe < kPipes; ++pipe) {
            epoch[pipe] = std::max(epoch[pipe], other.epoch[pipe]);
            for (int core = 0; core < kCores; ++core)
                others[core][pipe] = std::max(others[core][pipe], other.others[core][pipe]);
        }
    }
    // What the clock of `core` says to another core.
    Clock sent_by(Core core) const {
        Clock clock = *this;
        for (int pipe = 0; pipe < kPipes; ++pipe) {
            clock.others[core][pipe] = std::max(others[core][pipe], epoch[pipe]);
            clock.epoch[pipe] = 0;
        }
        return clock;
    }
    // `clock` as `core` takes it from another core.
    void receive(const Clock& clock, Core core) {
        join(clock);
        for (int pipe = 0; pipe < kPipes; ++pipe)
            epoch[pipe] = std::max(epoch[pipe], others[core][pipe]);
    }
};

struct Granule {
    std::uint32_t write_epoch = 0;
    std::uint32_t write_line = 0;
    const char* write_file = nullptr;
    std::uint32_t read_epoch[kPipes] = {};
    std::uint32_t earlier_read_epoch[kPipes] = {};  // of the instruction before that one
    std::uint32_t read_line[kPipes] = {};
    const char* read_file[kPipes] = {};
    std::uint32_t earlier_read_line[kPipes] = {};
    const char* earlier_read_file[kPipes] = {};
    std::uint8_t write_pipe = 0;
};

// What a core's memories hold, and what is known about it. The thread that runs blocks keeps them:
// to make them anew takes longer than most blocks run.
struct Memories {
    std::vector<std::uint8_t> ub;
    std::vector<std::uint8_t> state;
    std::vector<Granule> granules;
    std::size_t touched = 0;  // granules from this one on are as they were made

    Granule& granule(std::size_t g) {
        touched = std::max(touched, g + 1);
        return granules[g];
    }

    // As nobody has written them yet.
    Memories& of(std::size_t bytes) {
        ub.assign(bytes, 0xff);
        state.assign(bytes, kNeverWritten);
        std::fill_n(granules.begin(), touched, Granule{});
        touched = 0;
        granules.resize(bytes / kGranuleBytes + 1);
        return *this;
    }
};

struct Op {
    const char* name;
    Location at;
    Pipe pipe;
    std::uint32_t epoch;
    const char* types = "";
};

enum class BufferState : std::uint8_t { kFree, kAllocated, kEnqueued, kDequeued, kScratch };

// One block of a queue, or a TBuf.
struct Buffer {
    std::uint32_t start;
    std::uint32_t size_bytes;
    std::int32_t queue;  // -1 for a TBuf
    std::uint32_t generation;
    BufferState state;
    Location last;
    Clock forward;
    Clock release;
    int forward_event, forward_id;
    int release_event, release_id;
};

// A range of the unified buffer that a tensor refers to.
struct UbView {
    std::uint32_t start = 0;
    std::uint32_t size_bytes = 0;  // to the end of the tensor's buffer
    std::int32_t buffer = -1;
    std::uint32_t generation = 0;
};

// A range of global memory that a tensor refers to.
struct GmView {
    std::uint64_t start = 0;
    std::uint64_t size_bytes = 0;
    bool bounded = false;
};

// The trace of the first block of each launch, if ASCEND_SIM_TRACE names a file: a line for its
// kernel, then one for each instruction and barrier in the order of the program. A line has the
// pipe and the epoch, the amount (see `Counted`), what the pipe knew of all pipes (see `GmAccess`),
// what it is, and the types.
inline std::FILE* trace_file() {
    static std::FILE* const file = [] {
        const char* path = std::getenv("ASCEND_SIM_TRACE");
        return path == nullptr ? nullptr : std::fopen(path, "a");
    }();
    return file;
}

// Thrown to leave a kernel whose next step has no defined meaning.
struct BlockStopped {};

struct QueueState {
    const char* position;
    int position_id;
    Location at;
    std::vector<std::int32_t> buffers;
    std::vector<std::int32_t> fifo;
    std::uint32_t cursor;
    std::int32_t depth;
};

constexpr int kEvents = 19;
constexpr int kEventIds = 8;

struct Flag {
    bool set = false;
    Location at{};
    Clock clock;
};

class Group;

// A kernel for a cube core with two vector cores began to run as one for vector cores alone.
struct MixRequested {};

class Block {
public:
    const Launch& launch;
    const std::uint32_t index;  // GetBlockIdx
    const Core core;
    Group* const group;  // of the cores that work together; null for vector cores alone
    Counters& counters;
    Memories& memories;
    std::vector<std::uint8_t>& ub;
    std::vector<std::uint8_t>& state;
    std::vector<Buffer> buffers;
    std::vector<QueueState> queues;
    std::vector<GmAccess>& accesses;
    std::map<std::tuple<std::string_view, std::string_view, std::uint64_t>, std::uint64_t> counted;
    Clock seen[kPipes];
    std::uint32_t issued[kPipes] = {};
    Flag flags[kEvents][kEventIds];
    std::uint8_t reserved_ids[kEvents] = {};  // bit set of ids held by AllocEventID
    std::uint8_t fetched_ids[kEvents] = {};   // bit set of ids that FetchEventID has returned
    std::uint8_t queue_ids[kEvents] = {};     // bit set of ids held by queue blocks
    std::uint32_t pool_top[kSpaces] = {};  // bytes in use
    int live_pipes = 0;
    Location last{"", 0};
    bool counter_mode = false;
    std::uint64_t mask_high = ~std::uint64_t{0};
    std::uint64_t mask_low = ~std::uint64_t{0};
    bool atomic_add = false;

    Block(const Launch& the_launch, std::uint32_t block, Core the_core, Group* the_group,
          Counters& the_counters, std::vector<GmAccess>& the_accesses, Memories& the_memories)
        : launch(the_launch),
          index(block),
          core(the_core),
          group(the_group),
          counters(the_counters),
          memories(the_memories.of(
              (the_core == kCube ? kCubeBytes : the_launch.ub_capacity_bytes) + kGranuleBytes)),
          ub(memories.ub),
          state(memories.state),
          accesses(the_accesses) {}

    // The block of the launch.
    std::uint32_t launch_block() const { return group == nullptr ? index : index / share(); }

    // Bytes of a memory.
    std::uint64_t capacity(Space space) const {
        constexpr std::uint32_t kBytes[] = {0, kL1Bytes, kL0ABytes, kL0BBytes, kL0CBytes};
        return space == kUb ? launch.ub_capacity_bytes : kBytes[space];
    }

    // The memory that an address is in.
    Space space_of(std::uint32_t address) const {
        if (core != kCube) return kUb;
        int space = kL1;
        while (space < kL0C && address >= kSpaceStart[space + 1]) ++space;
        return static_cast<Space>(space);
    }

    void report(const char* kind, const Location& at, const char* format, ...)
        __attribute__((format(printf, 4, 5))) {
        va_list arguments;
        va_start(arguments, format);
        report_list(kind, at, format, arguments);
        va_end(arguments);
    }

    [[noreturn]] void stop(const char* kind, const Location& at, const char* format, ...)
        __attribute__((format(printf, 4, 5))) {
        va_list arguments;
        va_start(arguments, format);
        report_list(kind, at, format, arguments);
        va_end(arguments);
        throw BlockStopped{};
    }

    // Counts for the list of block 0, and writes to its trace. Kinds and types are distinguished by
    // their text.
    void count(const Op& op, const char* what, std::uint64_t amount) {
        if (index != 0) return;
        ++counted[{what, op.types, amount}];
        std::FILE* const file = trace_file();
        if (file == nullptr) return;
        std::fprintf(file, "%d %u %llu", core * kPipes + op.pipe, op.epoch,
                     static_cast<unsigned long long>(amount));
        const Clock known = seen[op.pipe].sent_by(core);
        for (int pipe = 0; pipe < kCores * kPipes; ++pipe)
            std::fprintf(file, " %u", (&known.others[0][0])[pipe]);
        std::fprintf(file, " %s|%s\n", what, op.types);
    }

    // Only one kind of core has the pipe and the memories of an instruction.
    Op begin_on(bool cube, const char* name, const Location& at, Pipe pipe,
                const char* types = "") {
        if (cube != (core == kCube))
            stop("core", at, "%s: only a %s core has this instruction, this is %s", name,
                 cube ? "cube" : "vector", core_name(core));
        return begin(name, at, pipe, types);
    }

    Op begin(const char* name, const Location& at, Pipe pipe, const char* types = "") {
        last = at;
        // What the hardware orders by itself: scalar code, and on 3510 vector instructions with
        // each other. What a compiler may add (auto-sync) is not relied upon.
        const bool in_order = pipe == kPipeS || (pipe == kPipeV && __NPU_ARCH__ == 3510);
        if (in_order) seen[pipe].epoch[pipe] = issued[pipe];
        return Op{name, at, pipe, ++issued[pipe], types};
    }

    std::string describe(const UbView& view) const {
        if (view.buffer < 0) return "a tensor that no queue or TBuf handed out";
        const Buffer& buffer = buffers[view.buffer];
        char text[256];
        if (buffer.queue < 0) {
            std::snprintf(text, sizeof text, "TBuf %d", view.buffer);
        } else {
            const QueueState& queue = queues[buffer.queue];
            const auto slot = std::find(queue.buffers.begin(), queue.buffers.end(), view.buffer) -
                              queue.buffers.begin();
            std::snprintf(text, sizeof text, "%s queue %d (initialised at line %u) block %d",
                          queue.position, buffer.queue, queue.at.line, static_cast<int>(slot));
        }
        return text;
    }

    // Bounds and lifetime of `bytes` bytes at `offset` of the tensor; returns the buffer offset.
    std::uint32_t locate(const Op& op, const UbView& view, std::int64_t offset, std::uint64_t bytes,
                         const char* role) {
        if (view.buffer < 0)
            stop("tensor-bounds", op.at, "%s: %s is a tensor without memory", op.name, role);
        const Buffer& buffer = buffers[view.buffer];
        if (buffer.state == BufferState::kEnqueued || buffer.state == BufferState::kFree ||
            (buffer.queue >= 0 && buffer.generation != view.generation)) {
            const bool enqueued =
                buffer.state == BufferState::kEnqueued && buffer.generation == view.generation;
            report("tensor-lifetime", op.at,
                   "%s: %s of %s is used %s (last queue call on it at line %u)", op.name, role,
                   describe(view).c_str(),
                   enqueued ? "between EnQue and DeQue" : "after FreeTensor", buffer.last.line);
        }
        const std::int64_t start = static_cast<std::int64_t>(view.start) + offset;
        if (start < buffer.start ||
            start + bytes > std::uint64_t{buffer.start} + buffer.size_bytes) {
            stop("tensor-bounds", op.at,
                 "%s: %s touches bytes [%lld, %lld) of %s, which has %u bytes", op.name, role,
                 static_cast<long long>(start - buffer.start),
                 static_cast<long long>(start - buffer.start + bytes), describe(view).c_str(),
                 buffer.size_bytes);
        }
        return static_cast<std::uint32_t>(start);
    }

    void require_aligned(const Op& op, const UbView& view, std::int64_t offset, const char* role,
                         std::uint32_t alignment = kGranuleBytes) {
        const std::int64_t start = static_cast<std::int64_t>(view.start) + offset;
        if (start % alignment != 0) {
            const Space space = space_of(view.start);
            stop("ub-misaligned", op.at,
                 "%s: %s starts at %s byte %lld (%s), which is not a multiple of %u", op.name, role,
                 kSpaceNames[space], static_cast<long long>(start - kSpaceStart[space]),
                 describe(view).c_str(), alignment);
        }
    }

    // True when every byte is defined. Bytes never written are reported, unless what is known of
    // them moves with them.
    bool read(const Op& op, const UbView& view, std::int64_t offset, std::uint64_t bytes,
              const char* role, std::uint32_t* where, bool moved = false) {
        const std::uint32_t start = locate(op, view, offset, bytes, role);
        *where = start;
        if (bytes == 0) return true;
        for (std::uint32_t g = start / kGranuleBytes; g <= (start + bytes - 1) / kGranuleBytes;
             ++g) {
            Granule& granule = memories.granule(g);
            if (granule.write_epoch > seen[op.pipe].epoch[granule.write_pipe] &&
                granule.write_epoch != own(op, granule))
                report_order(op, view, role, g, "reads", "wrote", granule.write_pipe,
                             granule.write_file, granule.write_line);
            if (granule.read_epoch[op.pipe] == op.epoch) continue;
            granule.earlier_read_epoch[op.pipe] = granule.read_epoch[op.pipe];
            granule.earlier_read_line[op.pipe] = granule.read_line[op.pipe];
            granule.earlier_read_file[op.pipe] = granule.read_file[op.pipe];
            granule.read_epoch[op.pipe] = op.epoch;
            granule.read_line[op.pipe] = op.at.line;
            granule.read_file[op.pipe] = op.at.file;
        }
        const std::uint8_t* states = state.data() + start;
        const bool defined = all_defined(states, bytes);
        if (!defined && !moved) {
            const std::uint8_t* unwritten =
                std::find(states, states + bytes, static_cast<std::uint8_t>(kNeverWritten));
            if (unwritten != states + bytes) {
                report("ub-undefined-read", op.at,
                       "%s: %s reads byte %lld of %s, which nothing has written since it was "
                       "allocated",
                       op.name, role,
                       static_cast<long long>(start + (unwritten - states) -
                                              buffers[view.buffer].start),
                       describe(view).c_str());
            }
        }
        return defined;
    }

    std::uint32_t write(const Op& op, const UbView& view, std::int64_t offset, std::uint64_t bytes,
                        const char* role, ByteState becomes) {
        const std::uint32_t start = locate(op, view, offset, bytes, role);
        if (bytes == 0) return start;
        for (std::uint32_t g = start / kGranuleBytes; g <= (start + bytes - 1) / kGranuleBytes;
             ++g) {
            Granule& granule = memories.granule(g);
            // Readers first: the message that helps most names the missing release.
            for (std::uint8_t pipe = 0; pipe < kPipes; ++pipe) {
                // An instruction that works in place has read the granule itself: the one before
                // it counts.
                const bool own = pipe == op.pipe && granule.read_epoch[pipe] == op.epoch;
                const std::uint32_t epoch =
                    own ? granule.earlier_read_epoch[pipe] : granule.read_epoch[pipe];
                if (epoch > seen[op.pipe].epoch[pipe])
                    report_order(
                        op, view, role, g, "overwrites", "read", pipe,
                        own ? granule.earlier_read_file[pipe] : granule.read_file[pipe],
                        own ? granule.earlier_read_line[pipe] : granule.read_line[pipe]);
            }
            if (granule.write_epoch > seen[op.pipe].epoch[granule.write_pipe] &&
                granule.write_epoch != own(op, granule))
                report_order(op, view, role, g, "overwrites", "wrote", granule.write_pipe,
                             granule.write_file, granule.write_line);
            granule.write_epoch = op.epoch;
            granule.write_pipe = op.pipe;
            granule.write_file = op.at.file;
            granule.write_line = op.at.line;
        }
        std::memset(state.data() + start, becomes, bytes);
        return start;
    }

    // The host address of `bytes` bytes at a device address, inside the tensor and one allocation.
    std::uint8_t* global(const Op& op, const GmView& view, std::int64_t offset, std::uint64_t bytes,
                         const char* role, bool write) {
        const std::uint64_t start = view.start + static_cast<std::uint64_t>(offset);
        const char* action = write ? "writes" : "reads";
        if (view.bounded &&
            (offset < 0 || static_cast<std::uint64_t>(offset) + bytes > view.size_bytes)) {
            stop("gm-out-of-bounds", op.at,
                 "%s: %s %s bytes [%lld, %lld) of a global tensor of %llu bytes", op.name, role,
                 action, static_cast<long long>(offset),
                 static_cast<long long>(offset + static_cast<std::int64_t>(bytes)),
                 static_cast<unsigned long long>(view.size_bytes));
        }
        const Region* end = launch.regions + launch.region_count;
        if (cached_ == nullptr || start < cached_->device_address ||
            start - cached_->device_address >= cached_->size_bytes) {
            cached_ = std::upper_bound(launch.regions, end, start,
                                       [](std::uint64_t address, const Region& region) {
                                           return address < region.device_address;
                                       });
            cached_ = cached_ == launch.regions ? nullptr : cached_ - 1;
        }
        if (cached_ == nullptr || start + bytes < start ||
            start + bytes > cached_->device_address + cached_->size_bytes) {
            const Region* near = cached_;
            stop("gm-out-of-bounds", op.at,
                 "%s: %s %s device bytes [0x%llx, 0x%llx), which no live allocation holds (%s "
                 "0x%llx, %llu bytes)",
                 op.name, role, action, static_cast<unsigned long long>(start),
                 static_cast<unsigned long long>(start + bytes),
                 near ? "the one before starts at" : "there is none below",
                 static_cast<unsigned long long>(near ? near->device_address : 0),
                 static_cast<unsigned long long>(near ? near->size_bytes : 0));
        }
        return cached_->bytes + (start - cached_->device_address);
    }

    void record(const Op& op, std::uint64_t start, std::uint64_t length, std::uint64_t stride,
                std::uint64_t count, bool write) {
        if (count > 1 && stride == length) {
            length *= count;
            count = 1;
        }
        GmAccess access{};
        access.start = start;
        access.length = length;
        access.stride = stride;
        access.count = count;
        access.operation = op.name;
        access.file = op.at.file;
        access.line = op.at.line;
        access.epoch = op.epoch;
        const Clock known = seen[op.pipe].sent_by(core);
        std::copy(&known.others[0][0], &known.others[0][0] + kCores * kPipes, access.seen);
        access.pipe = static_cast<std::uint8_t>(core * kPipes + op.pipe);
        access.is_write = write;
        access.is_atomic = write && atomic_add;
        accesses.push_back(access);
    }

private:
    const Region* cached_ = nullptr;
    std::map<std::pair<std::string, std::uint32_t>, std::uint32_t> reported_;

    // Blocks of the launch's index in `index`.
    std::uint32_t share() const { return core == kCube ? 1 : 2; }

    static bool all_defined(const std::uint8_t* states, std::uint64_t bytes) {
        constexpr std::uint64_t kEightDefined = 0x0101010101010101u * kDefined;
        std::uint64_t byte = 0;
        for (; byte + 8 <= bytes; byte += 8) {
            std::uint64_t eight;
            std::memcpy(&eight, states + byte, sizeof eight);
            if (eight != kEightDefined) return false;
        }
        for (; byte < bytes; ++byte)
            if (states[byte] != kDefined) return false;
        return true;
    }

    // The epoch of the running instruction when it wrote the granule itself.
    static std::uint32_t own(const Op& op, const Granule& granule) {
        return granule.write_pipe == op.pipe ? op.epoch : 0;
    }

    void report_order(const Op& op, const UbView& view, const char* role, std::uint32_t granule,
                      const char* action, const char* earlier, std::uint8_t pipe, const char* file,
                      std::uint32_t line) {
        char remedy[128];
        if (pipe == op.pipe) {
            std::snprintf(remedy, sizeof remedy, "PipeBarrier<PIPE_%s> is missing",
                          pipe_name(pipe, core));
        } else {
            std::snprintf(remedy, sizeof remedy,
                          "EnQue/DeQue or SetFlag/WaitFlag<HardEvent::%s_%s> is missing",
                          pipe_name(pipe, core), pipe_name(op.pipe, core));
        }
        const Space space = space_of(granule * kGranuleBytes);
        report("ordering", op.at,
               "%s: %s %s %s byte %u (%s) on pipe %s, not ordered after line %u%s%s which %s it on "
               "pipe %s: %s",
               op.name, role, action, kSpaceNames[space],
               granule * kGranuleBytes - kSpaceStart[space], describe(view).c_str(),
               pipe_name(op.pipe, core), line,
               file && file != op.at.file ? " of " : "", file && file != op.at.file ? file : "",
               earlier, pipe_name(pipe, core), remedy);
    }

    void report_list(const char* kind, const Location& at, const char* format, va_list arguments) {
        // One report per kind and line and block: a fault in a loop is one fault.
        if (reported_[{kind, at.line}]++ != 0) return;
        char message[1024];
        std::vsnprintf(message, sizeof message, format, arguments);
        launch.report(launch.host, launch_block(), kind, at.file, at.line, message);
    }
};

inline thread_local Block* g_block = nullptr;

inline Block& block() { return *g_block; }

inline bool on_cube_core() { return block().core == kCube; }

inline void require_task_type(int type) {
    const bool mix = block().group != nullptr;
    if (type != 0 && __NPU_ARCH__ != 2201)
        block().stop("core", block().last,
                     "the kernel wants a cube core: the simulator has that of dav-2201 only");
    if (type != 0 && !mix) throw MixRequested{};
    if (type == 0 && mix)
        block().stop("core", block().last, "the kernel states two task types");
}

}  // namespace ascend_sim

namespace AscendC {

// With a cube core, blocks are counted by its two vector cores apart.
inline std::int64_t GetBlockIdx() { return ascend_sim::block().index; }
inline std::int64_t GetBlockNum() { return ascend_sim::block().launch.block_count; }
inline std::int64_t GetTaskRatio() {
    const ascend_sim::Block& running = ascend_sim::block();
    return running.group != nullptr && running.core != ascend_sim::kCube ? 2 : 1;
}
inline std::int64_t GetSubBlockNum() { return GetTaskRatio(); }
inline std::int64_t GetSubBlockIdx() {
    const ascend_sim::Block& running = ascend_sim::block();
    return running.core == ascend_sim::kVector1 ? 1 : 0;
}

}  // namespace AscendC
