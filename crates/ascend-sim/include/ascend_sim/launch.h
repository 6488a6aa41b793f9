// The C interface between the runtime and a compiled kernel library. Mirrored in src/abi/kernel.rs;
// the sizes are asserted on both sides.
#pragma once

#include <cstdint>

namespace ascend_sim {

constexpr std::uint32_t kInterfaceVersion = 4;

// One live device allocation. Kernels name its bytes by device address; the bytes are at `bytes`.
struct Region {
    std::uint64_t device_address;
    std::uint64_t size_bytes;
    std::uint8_t* bytes;
};

// Global memory touched by one transfer: `count` runs of `length` bytes, `stride` bytes apart.
// `seen` is what the transfer's pipe knew of all pipes when it was issued: five for each of the two
// vector cores and the cube core that share the block's number, see `Pipe` in block.h.
struct GmAccess {
    std::uint64_t start;
    std::uint64_t length;
    std::uint64_t stride;
    std::uint64_t count;
    const char* operation;
    const char* file;
    std::uint32_t line;
    std::uint32_t epoch;
    std::uint32_t seen[15];
    std::uint8_t pipe;  // core * 5 + pipe
    std::uint8_t is_write;
    std::uint8_t is_atomic;
    std::uint8_t reserved[1];
};

struct Counters {
    std::uint64_t gm_bytes_read;
    std::uint64_t gm_bytes_written;
    std::uint64_t gm_transfers_in;
    std::uint64_t gm_transfers_out;
    std::uint64_t gm_bursts_in;
    std::uint64_t gm_bursts_out;
    std::uint64_t scalar_gm_accesses;
    std::uint64_t scalar_ub_accesses;
    std::uint64_t vector_instructions;
    std::uint64_t vector_repeats;
    std::uint64_t ub_high_water_bytes;
    std::uint64_t barriers[8];  // indexed by pipe_t
    std::uint64_t cube_gm_bytes_read;     // of those above, by cube cores
    std::uint64_t cube_gm_bytes_written;  // the same
    std::uint64_t cube_instructions;
    std::uint64_t cube_multiply_adds;
    std::uint64_t cross_core_flags;
};

// What a block did `times` times: a vector instruction of `amount` repeats over elements of
// `types`, a transfer of `amount` bytes, or a barrier.
struct Counted {
    const char* what;
    const char* types;
    std::uint64_t amount;
    std::uint64_t times;
};

struct Launch {
    std::uint32_t interface_version;
    std::uint32_t block_count;
    std::uint64_t ub_capacity_bytes;
    std::uint8_t saturate;
    // Nobody gave a MIX kernel its sync address: it would read every argument eight bytes late.
    std::uint8_t late_if_mix;
    std::uint8_t reserved[6];
    const Region* regions;  // sorted by device address
    std::uint64_t region_count;
    void* host;
    void (*report)(void* host, std::uint32_t block, const char* kind, const char* file,
                   std::uint32_t line, const char* message);
    void (*accesses)(void* host, std::uint32_t block, const GmAccess* list, std::uint64_t count);
    // Called for block 0.
    void (*counted)(void* host, const Counted* list, std::uint64_t count);
};

struct KernelEntry {
    const char* name;
    std::uint64_t args_bytes;
    void (*call)(const std::uint8_t* args);
    // The bytes of each parameter; each begins at the next multiple of 8.
    const std::uint64_t* parameter_bytes;
    std::uint64_t parameter_count;
};

struct KernelTable {
    std::uint32_t interface_version;
    std::uint32_t architecture;
    const KernelEntry* entries;
    std::uint64_t entry_count;
    // Returns 0 when the block ran to its end and 1 when a violation stopped it.
    std::int32_t (*run_block)(const Launch* launch, std::uint64_t kernel, const std::uint8_t* args,
                              std::uint32_t block, Counters* counters);
};

static_assert(sizeof(Region) == 24);
static_assert(sizeof(GmAccess) == 120);
static_assert(sizeof(Counters) == 192);
static_assert(sizeof(Counted) == 32);
static_assert(sizeof(Launch) == 72);
static_assert(sizeof(KernelEntry) == 40);
static_assert(sizeof(KernelTable) == 32);

}  // namespace ascend_sim
