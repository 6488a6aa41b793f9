// Kernels without a fault: what the simulator must say nothing about.
#include "kernel_operator.h"

using namespace AscendC;

struct AddTiling {
    uint32_t elements;
    uint32_t tile;
};

// y = x + x + 1 over tiles, double-buffered, with a tail.
extern "C" __global__ __aicore__ void add_tiles(GM_ADDR x, GM_ADDR y, AddTiling tiling) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> in;
    TQue<TPosition::VECOUT, 1> out;
    pipe.InitBuffer(in, 2, tiling.tile * sizeof(float));
    pipe.InitBuffer(out, 2, tiling.tile * sizeof(float));
    GlobalTensor<float> source, target;
    source.SetGlobalBuffer((__gm__ float*)x, tiling.elements);
    target.SetGlobalBuffer((__gm__ float*)y, tiling.elements);
    const uint32_t step = static_cast<uint32_t>(GetBlockNum()) * tiling.tile;
    const uint32_t begin = static_cast<uint32_t>(GetBlockIdx()) * tiling.tile;
    for (uint32_t first = begin; first < tiling.elements; first += step) {
        const uint32_t left = tiling.elements - first;
        const uint32_t count = left < tiling.tile ? left : tiling.tile;
        DataCopyExtParams copy{1, static_cast<uint32_t>(count * sizeof(float)), 0, 0, 0};
        DataCopyPadExtParams<float> pad{false, 0, 0, 0.0f};
        LocalTensor<float> a = in.AllocTensor<float>();
        DataCopyPad(a, source[first], copy, pad);
        in.EnQue(a);
        a = in.DeQue<float>();
        LocalTensor<float> b = out.AllocTensor<float>();
        Add(b, a, a, count);
        PipeBarrier<PIPE_V>();
        Adds(b, b, 1.0f, count);
        in.FreeTensor(a);
        out.EnQue(b);
        b = out.DeQue<float>();
        DataCopyPad(target[first], b, copy);
        out.FreeTensor(b);
    }
}

// In place and by hand: flags instead of queues, bf16 through f32, a scalar kept in a TBuf.
extern "C" __global__ __aicore__ void scale_in_place(GM_ADDR data, float factor,
                                                     uint32_t elements) {
    TPipe pipe;
    TBuf<TPosition::VECIN> narrow_buffer;
    TBuf<TPosition::VECCALC> wide_buffer;
    pipe.InitBuffer(narrow_buffer, elements * sizeof(bfloat16_t));
    pipe.InitBuffer(wide_buffer, elements * sizeof(float));
    GlobalTensor<bfloat16_t> global;
    global.SetGlobalBuffer((__gm__ bfloat16_t*)data + GetBlockIdx() * elements, elements);
    LocalTensor<bfloat16_t> narrow = narrow_buffer.Get<bfloat16_t>();
    LocalTensor<float> wide = wide_buffer.Get<float>();
    const auto loaded = pipe.AllocEventID<HardEvent::MTE2_V>();
    const auto computed = pipe.AllocEventID<HardEvent::V_MTE3>();
    DataCopy(narrow, global, elements);
    SetFlag<HardEvent::MTE2_V>(loaded);
    WaitFlag<HardEvent::MTE2_V>(loaded);
    Cast(wide, narrow, RoundMode::CAST_NONE, elements);
    PipeBarrier<PIPE_V>();
    Muls(wide, wide, factor, elements);
    PipeBarrier<PIPE_V>();
    Cast(narrow, wide, RoundMode::CAST_RINT, elements);
    SetFlag<HardEvent::V_MTE3>(computed);
    WaitFlag<HardEvent::V_MTE3>(computed);
    DataCopy(global, narrow, elements);
    pipe.ReleaseEventID<HardEvent::MTE2_V>(loaded);
    pipe.ReleaseEventID<HardEvent::V_MTE3>(computed);
}
