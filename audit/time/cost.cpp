// What PTO-ISA's cycle model says of a trace: reads an instruction and an amount a line, writes its
// cycles a line. A line of a kernel's name begins anew. Compiled with the model's own headers.
#include <pto/costmodel/runtime_stub.hpp>

#include <cstdint>
#include <fstream>
#include <iostream>
#include <map>
#include <string>

namespace {

// Calls of the model, whose cost depends on the amount alone: repeats `n`, or bytes.
void* const p = nullptr;
const float one = 1;
using Call = void (*)(std::uint64_t n);
#define CALL(name, ...) {#name, [](std::uint64_t n) { name(__VA_ARGS__); }}
#define UNARY(name) CALL(name, p, p, n, 1, 1, 8, 8)
#define SCALAR(name) CALL(name, p, p, one, n, 1, 1, 8, 8)
#define BINARY(name) CALL(name, p, p, p, n, 1, 1, 1, 8, 8, 8)
const std::map<std::string, Call> kCalls = {
    BINARY(vadd),
    BINARY(vsub),
    BINARY(vmul),
    BINARY(vdiv),
    BINARY(vor),
    SCALAR(vadds),
    SCALAR(vmuls),
    SCALAR(vshl),
    CALL(vshr, p, p, 1, n, 1, 1, 8, 8, false),
    UNARY(vsqrt),
    UNARY(vexp),
    UNARY(vcopy),
    UNARY(vconv_bf162f32),
    UNARY(vconv_f162f32),
    UNARY(vconv_f322bf16r),
    UNARY(vconv_f322f16r),
    UNARY(vconv_s162f32),
    UNARY(vconv_f322s32r),
    UNARY(vconv_s322s16),
    CALL(vector_dup, p, one, n, 1, 1, 8, 8),
    CALL(vcadd, p, p, n, 1, 1, 8, false),
    CALL(vbrcb, p, p, 1, 8, n),
    CALL(vgather, p, p, 0, 8, n),
    CALL(copy_gm_to_ubuf_align_b16, p, p, 0, 1, n, 0, 0, 0, 0),
    CALL(copy_ubuf_to_gm_align_b16, p, p, 0, 1, n, 0, 0, 0, 0),
    CALL(copy_gm_to_cbuf_multi_nd2nz_b16, p, p, 0, 1, 1, n / 2, 0, 0, 0, 0, 0),
    CALL(load_cbuf_to_ca, p, p, 0, n / 512, 1, 0, false),
    CALL(load_cbuf_to_cb, p, p, 0, n / 512, 1, 0, 0, false, 0),
    // Rows of 16 columns of 2 bytes.
    CALL(copy_matrix_cc_to_gm, p, p, n / 32 << 16 | 16 << 4, 0),
    // Products of 16 x 16 with columns of 16.
    CALL(mad, static_cast<float*>(p), static_cast<std::uint16_t*>(p),
         static_cast<std::uint16_t*>(p), 16, 16, n / 256, 0, false, false, false),
    // The model has none: a product and a sum.
    {"vmla",
     [](std::uint64_t n) {
         vmul(p, p, p, n, 1, 1, 1, 8, 8, 8);
         vadd(p, p, p, n, 1, 1, 1, 8, 8, 8);
     }},
    {"pipe_barrier", [](std::uint64_t) { pipe_barrier(PIPE_V); }},
    {"wait_flag", [](std::uint64_t) { wait_flag(PIPE_V, PIPE_MTE3, 0); }},
};

}  // namespace

int main(int, char** arguments) {
    std::ifstream trace(arguments[1]);
    std::string name;
    std::uint64_t amount;
    while (trace >> name) {
        if (name == "kernel") {
            pto::mocker::ResetTrace();
            pto::mocker::BeginPtoInstr(name);
            continue;
        }
        trace >> amount;
        const auto call = kCalls.find(name);
        if (call == kCalls.end()) {
            std::cerr << "no instruction " << name << " in cost.cpp\n";
            return 1;
        }
        const auto& kernel = pto::mocker::GetTrace().executed_pto.back();
        const std::uint64_t before = kernel.total_cycles;
        call->second(amount);
        std::cout << kernel.total_cycles - before << '\n';
    }
}
