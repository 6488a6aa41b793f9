// Kernels with one fault each. The line of the fault ends in `FAULT name`, for the test to find it.
#include "kernel_operator.h"

using namespace AscendC;

namespace {

constexpr uint32_t kElements = 64;
using In = TQue<TPosition::VECIN, 1>;
using Out = TQue<TPosition::VECOUT, 1>;

// Global tensors over both arguments.
struct Globals {
    GlobalTensor<float> x, y;
    Globals(GM_ADDR from, GM_ADDR to, uint64_t elements = 1024) {
        x.SetGlobalBuffer((__gm__ float*)from, elements);
        y.SetGlobalBuffer((__gm__ float*)to, elements);
    }
};

DataCopyExtParams run_of(uint32_t elements) {
    return {1, static_cast<uint32_t>(elements * sizeof(float)), 0, 0, 0};
}

}  // namespace

#define KERNEL(name)                                                         \
    extern "C" __global__ __aicore__ void name([[maybe_unused]] GM_ADDR x, \
                                               [[maybe_unused]] GM_ADDR y)

KERNEL(queue_over_capacity) {
    TPipe pipe;
    In in;
    pipe.InitBuffer(in, 2, 100 * 1024);  // FAULT queue_over_capacity
}

KERNEL(sum_over_capacity) {
    TPipe pipe;
    In in;
    TBuf<TPosition::VECCALC> scratch;
    pipe.InitBuffer(in, 2, 64 * 1024);
    pipe.InitBuffer(scratch, 60 * 1024);  // FAULT sum_over_capacity
}

KERNEL(misaligned_operand) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> scratch;
    pipe.InitBuffer(scratch, 1024);
    LocalTensor<float> t = scratch.Get<float>();
    Duplicate(t, 1.0f, kElements);
    Adds(t[kElements + 1], t, 1.0f, kElements);  // FAULT misaligned_operand
}

KERNEL(misaligned_copy) {
    TPipe pipe;
    Globals g(x, y);
    In in;
    pipe.InitBuffer(in, 1, 1024);
    LocalTensor<float> t = in.AllocTensor<float>();
    DataCopyPad(t[3], g.x, run_of(8), {});  // FAULT misaligned_copy
}

KERNEL(reads_unwritten) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> scratch;
    pipe.InitBuffer(scratch, 1024);
    LocalTensor<float> t = scratch.Get<float>();
    Muls(t[kElements], t, 2.0f, kElements);  // FAULT reads_unwritten
}

KERNEL(reads_past_what_was_loaded) {
    TPipe pipe;
    Globals g(x, y);
    In in;
    TBuf<TPosition::VECCALC> scratch;
    pipe.InitBuffer(in, 1, 1024);
    pipe.InitBuffer(scratch, 1024);
    LocalTensor<float> t = in.AllocTensor<float>();
    DataCopyPad(t, g.x, run_of(32), {});
    in.EnQue(t);
    t = in.DeQue<float>();
    Adds(scratch.Get<float>(), t, 1.0f, kElements);  // FAULT reads_past_what_was_loaded
    in.FreeTensor(t);
}

KERNEL(stores_padding) {
    TPipe pipe;
    Globals g(x, y);
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> through;
    pipe.InitBuffer(through, 1, 1024);
    LocalTensor<float> t = through.AllocTensor<float>();
    DataCopyPad(t, g.x, run_of(5), {});
    through.EnQue(t);
    t = through.DeQue<float>();
    DataCopyPad(g.y, t, run_of(8));  // FAULT stores_padding
    through.FreeTensor(t);
}

KERNEL(stores_computed_padding) {
    TPipe pipe;
    Globals g(x, y);
    In in;
    Out out;
    pipe.InitBuffer(in, 1, 1024);
    pipe.InitBuffer(out, 1, 1024);
    LocalTensor<float> a = in.AllocTensor<float>();
    DataCopyPad(a, g.x, run_of(5), {});
    in.EnQue(a);
    a = in.DeQue<float>();
    LocalTensor<float> b = out.AllocTensor<float>();
    Adds(b, a, 1.0f, 8);
    in.FreeTensor(a);
    out.EnQue(b);
    b = out.DeQue<float>();
    DataCopyPad(g.y, b, run_of(8));  // FAULT stores_computed_padding
    out.FreeTensor(b);
}

KERNEL(reads_past_tensor) {
    TPipe pipe;
    Globals g(x, y, 100);
    In in;
    pipe.InitBuffer(in, 1, 1024);
    LocalTensor<float> t = in.AllocTensor<float>();
    DataCopy(t, g.x[64], kElements);  // FAULT reads_past_tensor
}

KERNEL(reads_past_allocation) {
    TPipe pipe;
    GlobalTensor<float> g;
    g.SetGlobalBuffer((__gm__ float*)x);
    In in;
    pipe.InitBuffer(in, 1, 1024);
    LocalTensor<float> t = in.AllocTensor<float>();
    DataCopy(t, g[1000], kElements);  // FAULT reads_past_allocation
}

KERNEL(writes_past_tensor) {
    TPipe pipe;
    Globals g(x, y, 60);
    Out out;
    pipe.InitBuffer(out, 1, 1024);
    LocalTensor<float> t = out.AllocTensor<float>();
    Duplicate(t, 1.0f, kElements);
    out.EnQue(t);
    t = out.DeQue<float>();
    DataCopy(g.y, t, kElements);  // FAULT writes_past_tensor
}

KERNEL(writes_to_null) {
    TPipe pipe;
    GlobalTensor<float> g;
    g.SetGlobalBuffer((__gm__ float*)nullptr, 64);
    Out out;
    pipe.InitBuffer(out, 1, 1024);
    LocalTensor<float> t = out.AllocTensor<float>();
    Duplicate(t, 1.0f, kElements);
    out.EnQue(t);
    t = out.DeQue<float>();
    DataCopy(g, t, kElements);  // FAULT writes_to_null
}

KERNEL(scalar_read_outside) {
    TPipe pipe;
    Globals g(x, y, 8);
    g.x.GetValue(8);  // FAULT scalar_read_outside
}

KERNEL(too_many_blocks) {
    TPipe pipe;
    Globals g(x, y);
    In in;
    pipe.InitBuffer(in, 1, 1024);
    LocalTensor<float> t = in.AllocTensor<float>();
    DataCopyExtParams params = run_of(8);
    params.blockCount = 4096u;
    DataCopyPad(t, g.x, params, {});  // FAULT too_many_blocks
}

KERNEL(length_cut_off) {
    TPipe pipe;
    Globals g(x, y);
    In in;
    pipe.InitBuffer(in, 1, 1024);
    LocalTensor<float> t = in.AllocTensor<float>();
    DataCopyParams params;
    params.blockLen = 65536 + 8;
    DataCopy(t, g.x, params);  // FAULT length_cut_off
}

KERNEL(length_of_half_an_element) {
    TPipe pipe;
    Globals g(x, y);
    In in;
    pipe.InitBuffer(in, 1, 1024);
    LocalTensor<float> t = in.AllocTensor<float>();
    DataCopyPad(t, g.x, DataCopyExtParams{1, 6, 0, 0, 0}, {});  // FAULT length_of_half_an_element
}

KERNEL(count_rounded_down) {
    TPipe pipe;
    Globals g(x, y);
    In in;
    pipe.InitBuffer(in, 1, 1024);
    LocalTensor<float> t = in.AllocTensor<float>();
    DataCopy(t, g.x, 5);  // FAULT count_rounded_down
    in.FreeTensor(t);
}

KERNEL(copy_into_scratch) {
    TPipe pipe;
    Globals g(x, y);
    TBuf<TPosition::VECCALC> scratch;
    pipe.InitBuffer(scratch, 1024);
    DataCopy(scratch.Get<float>(), g.x, kElements);  // FAULT copy_into_scratch
}

KERNEL(dequeue_before_enqueue) {
    TPipe pipe;
    In in;
    pipe.InitBuffer(in, 2, 1024);
    LocalTensor<float> t = in.AllocTensor<float>();
    t = in.DeQue<float>();  // FAULT dequeue_before_enqueue
}

KERNEL(never_freed_in_loop) {
    TPipe pipe;
    Globals g(x, y);
    In in;
    pipe.InitBuffer(in, 2, 1024);
    for (int i = 0; i < 3; ++i) {
        LocalTensor<float> t = in.AllocTensor<float>();  // FAULT never_freed_in_loop
        DataCopy(t, g.x, kElements);
        in.EnQue(t);
        t = in.DeQue<float>();
    }
}

KERNEL(never_freed) {
    TPipe pipe;
    In in;
    pipe.InitBuffer(in, 2, 1024);
    in.AllocTensor<float>();  // FAULT never_freed
}

KERNEL(never_dequeued) {
    TPipe pipe;
    In in;
    pipe.InitBuffer(in, 2, 1024);
    LocalTensor<float> t = in.AllocTensor<float>();
    in.EnQue(t);  // FAULT never_dequeued
}

KERNEL(queue_too_deep) {
    TPipe pipe;
    In in;
    pipe.InitBuffer(in, 2, 1024);
    LocalTensor<float> a = in.AllocTensor<float>();
    LocalTensor<float> b = in.AllocTensor<float>();
    in.EnQue(a);
    in.EnQue(b);  // FAULT queue_too_deep
    a = in.DeQue<float>();
    b = in.DeQue<float>();
    in.FreeTensor(a);
    in.FreeTensor(b);
}

KERNEL(freed_twice) {
    TPipe pipe;
    In in;
    pipe.InitBuffer(in, 2, 1024);
    LocalTensor<float> t = in.AllocTensor<float>();
    in.FreeTensor(t);
    in.FreeTensor(t);  // FAULT freed_twice
}

KERNEL(freed_into_wrong_queue) {
    TPipe pipe;
    In first, second;
    pipe.InitBuffer(first, 2, 1024);
    pipe.InitBuffer(second, 2, 1024);
    LocalTensor<float> t = first.AllocTensor<float>();
    second.FreeTensor(t);  // FAULT freed_into_wrong_queue
}

KERNEL(used_after_free) {
    TPipe pipe;
    Globals g(x, y);
    In in;
    TBuf<TPosition::VECCALC> scratch;
    pipe.InitBuffer(in, 1, 1024);
    pipe.InitBuffer(scratch, 1024);
    LocalTensor<float> t = in.AllocTensor<float>();
    DataCopy(t, g.x, kElements);
    in.EnQue(t);
    t = in.DeQue<float>();
    in.FreeTensor(t);
    Adds(scratch.Get<float>(), t, 1.0f, kElements);  // FAULT used_after_free
}

KERNEL(used_while_enqueued) {
    TPipe pipe;
    Globals g(x, y);
    In in;
    TBuf<TPosition::VECCALC> scratch;
    pipe.InitBuffer(in, 1, 1024);
    pipe.InitBuffer(scratch, 1024);
    LocalTensor<float> t = in.AllocTensor<float>();
    DataCopy(t, g.x, kElements);
    in.EnQue(t);
    Adds(scratch.Get<float>(), t, 1.0f, kElements);  // FAULT used_while_enqueued
    t = in.DeQue<float>();
    in.FreeTensor(t);
}

KERNEL(nine_live_tensors) {
    TPipe pipe;
    In queues[3];
    for (In& queue : queues) pipe.InitBuffer(queue, 3, 1024);
    for (In& queue : queues)
        for (int i = 0; i < 3; ++i) queue.AllocTensor<float>();  // FAULT nine_live_tensors
}

KERNEL(two_pipes) {
    TPipe pipe;
    TPipe other;  // FAULT two_pipes
}

KERNEL(queue_without_memory) {
    TPipe pipe;
    In in;
    in.AllocTensor<float>();  // FAULT queue_without_memory
}

KERNEL(blocks_write_same) {
    TPipe pipe;
    Globals g(x, y);
    Out out;
    pipe.InitBuffer(out, 1, 1024);
    LocalTensor<float> t = out.AllocTensor<float>();
    Duplicate(t, static_cast<float>(GetBlockIdx()), kElements);
    out.EnQue(t);
    t = out.DeQue<float>();
    DataCopy(g.y[GetBlockIdx() * 56], t, kElements);  // FAULT blocks_write_same
    out.FreeTensor(t);
}

KERNEL(block_reads_what_another_writes) {
    TPipe pipe;
    Globals g(x, y);
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> through;
    pipe.InitBuffer(through, 1, 1024);
    LocalTensor<float> t = through.AllocTensor<float>();
    DataCopy(t, g.x[GetBlockIdx() * kElements], kElements);
    through.EnQue(t);
    t = through.DeQue<float>();
    const auto next = g.x[(GetBlockIdx() + 1) * kElements];
    DataCopy(next, t, kElements);  // FAULT block_reads_what_another_writes
    through.FreeTensor(t);
}

KERNEL(no_flag_before_compute) {
    TPipe pipe;
    Globals g(x, y);
    TBuf<TPosition::VECIN> buffer;
    pipe.InitBuffer(buffer, 1024);
    LocalTensor<float> t = buffer.Get<float>();
    DataCopy(t, g.x, kElements);
    Adds(t, t, 1.0f, kElements);  // FAULT no_flag_before_compute
}

KERNEL(wrong_flag_before_compute) {
    TPipe pipe;
    const auto id = pipe.FetchEventID<HardEvent::MTE2_V>();
    Globals g(x, y);
    TBuf<TPosition::VECIN> buffer;
    pipe.InitBuffer(buffer, 1024);
    LocalTensor<float> t = buffer.Get<float>();
    // The flag is set before the copy that it should follow.
    SetFlag<HardEvent::MTE2_V>(id);
    DataCopy(t, g.x, kElements);
    WaitFlag<HardEvent::MTE2_V>(id);
    Adds(t, t, 1.0f, kElements);  // FAULT wrong_flag_before_compute
}

KERNEL(no_flag_before_store) {
    TPipe pipe;
    Globals g(x, y);
    TBuf<TPosition::VECOUT> buffer;
    pipe.InitBuffer(buffer, 1024);
    LocalTensor<float> t = buffer.Get<float>();
    Duplicate(t, 1.0f, kElements);
    DataCopy(g.y, t, kElements);  // FAULT no_flag_before_store
}

KERNEL(store_of_input_queue) {
    TPipe pipe;
    Globals g(x, y);
    In in;
    pipe.InitBuffer(in, 1, 1024);
    LocalTensor<float> t = in.AllocTensor<float>();
    DataCopy(t, g.x, kElements);
    in.EnQue(t);
    t = in.DeQue<float>();
    Adds(t, t, 1.0f, kElements);
    DataCopy(g.y, t, kElements);  // FAULT store_of_input_queue
    in.FreeTensor(t);
}

KERNEL(no_flag_before_reload) {
    TPipe pipe;
    const auto id = pipe.FetchEventID<HardEvent::MTE2_V>();
    Globals g(x, y);
    TBuf<TPosition::VECIN> buffer;
    TBuf<TPosition::VECCALC> scratch;
    pipe.InitBuffer(buffer, 1024);
    pipe.InitBuffer(scratch, 1024);
    LocalTensor<float> t = buffer.Get<float>();
    for (int tile = 0; tile < 2; ++tile) {
        DataCopy(t, g.x[tile * kElements], kElements);  // FAULT no_flag_before_reload
        SetFlag<HardEvent::MTE2_V>(id);
        WaitFlag<HardEvent::MTE2_V>(id);
        Adds(scratch.Get<float>(), t, 1.0f, kElements);
        PipeBarrier<PIPE_V>();
    }
}

KERNEL(no_flag_before_rewrite) {
    TPipe pipe;
    const auto id = pipe.FetchEventID<HardEvent::V_MTE3>();
    Globals g(x, y);
    TBuf<TPosition::VECOUT> buffer;
    pipe.InitBuffer(buffer, 1024);
    LocalTensor<float> t = buffer.Get<float>();
    for (int tile = 0; tile < 2; ++tile) {
        Duplicate(t, 1.0f, kElements);  // FAULT no_flag_before_rewrite
        SetFlag<HardEvent::V_MTE3>(id);
        WaitFlag<HardEvent::V_MTE3>(id);
        DataCopy(g.y[tile * kElements], t, kElements);
    }
}

KERNEL(copies_into_same_bytes) {
    TPipe pipe;
    Globals g(x, y);
    In in;
    pipe.InitBuffer(in, 1, 1024);
    LocalTensor<float> t = in.AllocTensor<float>();
    DataCopy(t, g.x, kElements);
    DataCopy(t, g.x[kElements], kElements);  // FAULT copies_into_same_bytes
    in.FreeTensor(t);
}

KERNEL(reloads_what_it_stored) {
    TPipe pipe;
    Globals g(x, y);
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> through;
    pipe.InitBuffer(through, 2, 1024);
    for (int step = 0; step < 2; ++step) {
        LocalTensor<float> t = through.AllocTensor<float>();
        DataCopy(t, g.x[step * kElements], kElements);  // FAULT reloads_what_it_stored
        through.EnQue(t);
        t = through.DeQue<float>();
        DataCopy(g.x[(step + 1) * kElements], t, kElements);
        through.FreeTensor(t);
    }
}

KERNEL(dependent_vectors) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> scratch;
    pipe.InitBuffer(scratch, 1024);
    LocalTensor<float> t = scratch.Get<float>();
    Duplicate(t, 1.0f, kElements);
    Adds(t, t, 1.0f, kElements);  // FAULT dependent_vectors
}

// The second instruction reads the tensor too, which must not hide that the first did.
KERNEL(vector_write_over_vector_read) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> scratch, result;
    pipe.InitBuffer(scratch, 1024);
    pipe.InitBuffer(result, 1024);
    LocalTensor<float> t = scratch.Get<float>();
    Duplicate(t, 1.0f, kElements);
    PipeBarrier<PIPE_V>();
    Adds(result.Get<float>(), t, 1.0f, kElements);
    Adds(t, t, 1.0f, kElements);  // FAULT vector_write_over_vector_read
}

KERNEL(scalar_read_of_vector_result) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> scratch;
    pipe.InitBuffer(scratch, 1024);
    LocalTensor<float> t = scratch.Get<float>();
    Duplicate(t, 1.0f, kElements);
    t.GetValue(3);  // FAULT scalar_read_of_vector_result
}

KERNEL(scalar_read_of_loaded) {
    TPipe pipe;
    Globals g(x, y);
    TBuf<TPosition::VECIN> buffer;
    pipe.InitBuffer(buffer, 1024);
    LocalTensor<float> t = buffer.Get<float>();
    DataCopy(t, g.x, kElements);
    t.GetValue(3);  // FAULT scalar_read_of_loaded
}

KERNEL(vector_read_of_scalar) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> scratch, result;
    pipe.InitBuffer(scratch, 32);
    pipe.InitBuffer(result, 32);
    LocalTensor<float> t = scratch.Get<float>();
    for (uint32_t i = 0; i < 8; ++i) t.SetValue(i, 1.0f);
    Adds(result.Get<float>(), t, 1.0f, 8);  // FAULT vector_read_of_scalar
}

KERNEL(vector_write_over_scalar_read) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> scratch;
    pipe.InitBuffer(scratch, 1024);
    LocalTensor<float> t = scratch.Get<float>();
    const auto id = pipe.FetchEventID<HardEvent::V_S>();
    Duplicate(t, 1.0f, kElements);
    SetFlag<HardEvent::V_S>(id);
    WaitFlag<HardEvent::V_S>(id);
    t.GetValue(3);
    PipeBarrier<PIPE_V>();
    Duplicate(t, 2.0f, kElements);  // FAULT vector_write_over_scalar_read
}

KERNEL(load_over_scalar) {
    TPipe pipe;
    Globals g(x, y);
    TBuf<TPosition::VECIN> buffer;
    pipe.InitBuffer(buffer, 1024);
    LocalTensor<float> t = buffer.Get<float>();
    t.SetValue(0, 1.0f);
    DataCopy(t, g.x, kElements);  // FAULT load_over_scalar
}

KERNEL(store_of_scalar) {
    TPipe pipe;
    Globals g(x, y);
    TBuf<TPosition::VECOUT> buffer;
    pipe.InitBuffer(buffer, 1024);
    LocalTensor<float> t = buffer.Get<float>();
    for (uint32_t i = 0; i < 8; ++i) t.SetValue(i, 1.0f);
    DataCopy(g.y, t, 8);  // FAULT store_of_scalar
}

KERNEL(scalar_write_over_stored) {
    TPipe pipe;
    Globals g(x, y);
    TBuf<TPosition::VECOUT> buffer;
    pipe.InitBuffer(buffer, 1024);
    LocalTensor<float> t = buffer.Get<float>();
    const auto id = pipe.FetchEventID<HardEvent::V_MTE3>();
    Duplicate(t, 1.0f, kElements);
    SetFlag<HardEvent::V_MTE3>(id);
    WaitFlag<HardEvent::V_MTE3>(id);
    DataCopy(g.y, t, kElements);
    t.SetValue(0, 2.0f);  // FAULT scalar_write_over_stored
}

// A scalar access orders what it touches, not the other pipes.
KERNEL(no_flag_beside_a_scalar) {
    TPipe pipe;
    Globals g(x, y);
    TBuf<TPosition::VECIN> buffer;
    TBuf<TPosition::VECCALC> other;
    pipe.InitBuffer(buffer, 1024);
    pipe.InitBuffer(other, 32);
    LocalTensor<float> t = buffer.Get<float>();
    DataCopy(t, g.x, kElements);
    LocalTensor<float> word = other.Get<float>();
    word.SetValue(0, g.x.GetValue(0));
    word.GetValue(0);
    Adds(t, t, 1.0f, kElements);  // FAULT no_flag_beside_a_scalar
}

KERNEL(scalars_in_one_line) {
    TPipe pipe;
    Globals g(x, y);
    g.y.SetValue(GetBlockIdx() * 8, 1.0f);  // FAULT scalars_in_one_line
}

KERNEL(event_id_not_allocated) {
    TPipe pipe;
    SetFlag<HardEvent::V_MTE3>(0);  // FAULT event_id_not_allocated
    WaitFlag<HardEvent::V_MTE3>(0);
}

KERNEL(event_id_of_the_system) {
    SetFlag<HardEvent::V_MTE3>(7);  // FAULT event_id_of_the_system
    WaitFlag<HardEvent::V_MTE3>(7);
}

KERNEL(wait_without_set) {
    TPipe pipe;
    const auto id = pipe.FetchEventID<HardEvent::MTE2_V>();
    WaitFlag<HardEvent::MTE2_V>(id);  // FAULT wait_without_set
}

KERNEL(set_without_wait) {
    TPipe pipe;
    const auto id = pipe.FetchEventID<HardEvent::V_MTE3>();
    SetFlag<HardEvent::V_MTE3>(id);  // FAULT set_without_wait
}

KERNEL(set_twice) {
    TPipe pipe;
    const auto id = pipe.FetchEventID<HardEvent::V_MTE3>();
    SetFlag<HardEvent::V_MTE3>(id);
    SetFlag<HardEvent::V_MTE3>(id);  // FAULT set_twice
    WaitFlag<HardEvent::V_MTE3>(id);
}

KERNEL(event_id_out_of_range) {
    TPipe pipe;
    SetFlag<HardEvent::V_MTE3>(8);  // FAULT event_id_out_of_range
}

KERNEL(event_id_of_queue) {
    TPipe pipe;
    In in;
    pipe.InitBuffer(in, 1, 1024);
    LocalTensor<float> t = in.AllocTensor<float>();
    in.EnQue(t);
    SetFlag<HardEvent::MTE2_V>(0);  // FAULT event_id_of_queue
    WaitFlag<HardEvent::MTE2_V>(0);
    t = in.DeQue<float>();
    in.FreeTensor(t);
}

KERNEL(overlapping_operands) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> scratch;
    pipe.InitBuffer(scratch, 1024);
    LocalTensor<float> t = scratch.Get<float>();
    Duplicate(t, 1.0f, 128);
    PipeBarrier<PIPE_V>();
    Adds(t[8], t, 1.0f, kElements);  // FAULT overlapping_operands
}

KERNEL(overlapping_repeats) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> scratch;
    pipe.InitBuffer(scratch, 4096);
    LocalTensor<float> t = scratch.Get<float>();
    Duplicate(t, 1.0f, 512);
    PipeBarrier<PIPE_V>();
    // Repeat 1 reads what repeat 0 wrote.
    Adds(t[64], t, 1.0f, 64, 2, {1, 1, 8, 8});  // FAULT overlapping_repeats
}

KERNEL(too_many_repeats) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> scratch;
    pipe.InitBuffer(scratch, 100 * 1024);
    LocalTensor<float> t = scratch.Get<float>();
    const uint32_t repeats = 300;
    Duplicate(t, 1.0f, 64, repeats, 1, 8);  // FAULT too_many_repeats
}

KERNEL(stride_cut_off) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> scratch;
    pipe.InitBuffer(scratch, 100 * 1024);
    LocalTensor<float> t = scratch.Get<float>();
    Duplicate(t, 1.0f, 64);
    BinaryRepeatParams params;
    params.dstRepStride = 264u;
    Add(t[64], t, t, 64, 1, params);  // FAULT stride_cut_off
}

KERNEL(mask_above_limit) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> scratch;
    pipe.InitBuffer(scratch, 1024);
    LocalTensor<float> t = scratch.Get<float>();
    Duplicate(t, 1.0f, 65, 1, 1, 8);  // FAULT mask_above_limit
}

KERNEL(writes_past_buffer) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> first, second;
    pipe.InitBuffer(first, 128);
    pipe.InitBuffer(second, 1024);
    Duplicate(first.Get<float>(), 1.0f, kElements);  // FAULT writes_past_buffer
}

KERNEL(gathers_between_elements) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> scratch, indices;
    pipe.InitBuffer(scratch, 1024);
    pipe.InitBuffer(indices, 1024);
    LocalTensor<float> t = scratch.Get<float>();
    LocalTensor<uint32_t> offsets = indices.Get<uint32_t>();
    Duplicate(t, 1.0f, kElements);
    Duplicate(offsets, 6u, kElements);
    PipeBarrier<PIPE_V>();
    Gather(t[128], t, offsets, 0, 8);  // FAULT gathers_between_elements
}

KERNEL(gather_repeats_wrap) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> scratch, indices;
    constexpr uint32_t kCount = 16384;
    pipe.InitBuffer(scratch, kCount * sizeof(float) + 1024);
    pipe.InitBuffer(indices, kCount * sizeof(uint32_t));
    LocalTensor<float> t = scratch.Get<float>();
    LocalTensor<uint32_t> offsets = indices.Get<uint32_t>();
    Duplicate(t, 1.0f, kElements);
    Duplicate(offsets, 0u, static_cast<int32_t>(kCount));
    PipeBarrier<PIPE_V>();
    Gather(t[kElements], t, offsets, 0, kCount);  // FAULT gather_repeats_wrap
}

KERNEL(gather_into_source) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> scratch, indices;
    pipe.InitBuffer(scratch, 1024);
    pipe.InitBuffer(indices, 1024);
    LocalTensor<float> t = scratch.Get<float>();
    LocalTensor<uint32_t> offsets = indices.Get<uint32_t>();
    Duplicate(t, 1.0f, 128);
    Duplicate(offsets, 36u, kElements);
    PipeBarrier<PIPE_V>();
    // Only element 9 of the source is read, and written as the second of the destination.
    Gather(t[8], t, offsets, 0, 8);  // FAULT gather_into_source
}

KERNEL(gather_into_offsets) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> scratch, indices;
    pipe.InitBuffer(scratch, 1024);
    pipe.InitBuffer(indices, 1024);
    LocalTensor<float> t = scratch.Get<float>();
    LocalTensor<uint32_t> offsets = indices.Get<uint32_t>();
    Duplicate(t, 0.0f, kElements);
    Duplicate(offsets, 0u, kElements);
    PipeBarrier<PIPE_V>();
    Gather(offsets.ReinterpretCast<float>()[8], t, offsets, 0, 16);  // FAULT gather_into_offsets
}

KERNEL(undocumented_rounding) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> scratch, result;
    pipe.InitBuffer(scratch, 1024);
    pipe.InitBuffer(result, 1024);
    LocalTensor<float> t = scratch.Get<float>();
    LocalTensor<bfloat16_t> r = result.Get<bfloat16_t>();
    Duplicate(t, 1.0f, kElements);
    Cast(r, t, RoundMode::CAST_NONE, kElements);  // FAULT undocumented_rounding
}

KERNEL(atomic_left_on) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> scratch;
    pipe.InitBuffer(scratch, 1024);
    SetAtomicAdd<float>();
    Duplicate(scratch.Get<float>(), 1.0f, kElements);  // FAULT atomic_left_on
}

// Of kernels with a cube core. Both kinds of core run them.
#define MIX_KERNEL(name) \
    KERNEL(name) {       \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
#define END_KERNEL }

MIX_KERNEL(vector_work_on_the_cube_core)
TPipe pipe;
if ASCEND_IS_AIC {
    TBuf<TPosition::VECCALC> scratch;
    pipe.InitBuffer(scratch, 256);  // FAULT vector_work_on_the_cube_core
}
END_KERNEL

MIX_KERNEL(cube_memory_on_a_vector_core)
TPipe pipe;
if ASCEND_IS_AIV {
    TBuf<TPosition::A1> rows;
    pipe.InitBuffer(rows, 1024);  // FAULT cube_memory_on_a_vector_core
}
END_KERNEL

MIX_KERNEL(l0b_over_capacity)
TPipe pipe;
if ASCEND_IS_AIC {
    TBuf<TPosition::B2> right;
    pipe.InitBuffer(right, 64 * 1024 + 512);  // FAULT l0b_over_capacity
}
END_KERNEL

MIX_KERNEL(product_from_l1)
TPipe pipe;
if ASCEND_IS_AIC {
    TBuf<TPosition::A1> left;
    TBuf<TPosition::B2> right;
    TBuf<TPosition::CO1> sums;
    pipe.InitBuffer(left, 512);
    pipe.InitBuffer(right, 512);
    pipe.InitBuffer(sums, 1024);
    const MmadParams sizes(16, 16, 16, 0, false, true);
    Mmad(sums.Get<float>(), left.Get<half>(), right.Get<half>(), sizes);  // FAULT product_from_l1
}
END_KERNEL

MIX_KERNEL(product_of_nothing)
TPipe pipe;
if ASCEND_IS_AIC {
    TBuf<TPosition::A2> left;
    TBuf<TPosition::B2> right;
    TBuf<TPosition::CO1> sums;
    pipe.InitBuffer(left, 512);
    pipe.InitBuffer(right, 512);
    pipe.InitBuffer(sums, 1024);
    const MmadParams sizes(16, 16, 16, 0, false, true);
    Mmad(sums.Get<float>(), left.Get<half>(), right.Get<half>(), sizes);  // FAULT product_of_nothing
}
END_KERNEL

MIX_KERNEL(rows_of_fifteen_columns)
TPipe pipe;
if ASCEND_IS_AIC {
    TBuf<TPosition::CO1> sums;
    pipe.InitBuffer(sums, 1024);
    GlobalTensor<half> to;
    to.SetGlobalBuffer((__gm__ half*)y, 256);
    Fixpipe(to, sums.Get<float>(),  // FAULT rows_of_fifteen_columns
            FixpipeParamsV220(15, 16, 16, 16, false, QuantMode_t::F322F16, 0, 1, 0, 0, 0));
}
END_KERNEL

MIX_KERNEL(one_vector_core_sets_the_flag)
if ASCEND_IS_AIV {
    if (GetSubBlockIdx() == 0) CrossCoreSetFlag<2, PIPE_MTE3>(3);
}
if ASCEND_IS_AIC {
    CrossCoreWaitFlag(3);  // FAULT one_vector_core_sets_the_flag
}
END_KERNEL

MIX_KERNEL(a_flag_beyond_fifteen)
if ASCEND_IS_AIC {
    CrossCoreSetFlag<2, PIPE_FIX>(16);  // FAULT a_flag_beyond_fifteen
}
END_KERNEL

KERNEL(a_flag_without_a_cube_core) {
    CrossCoreSetFlag<2, PIPE_MTE3>(0);  // FAULT a_flag_without_a_cube_core
}
