// Element-wise pieces of a feed-forward part. Rounded where candle's kernels round.
#include "common.cuh"

struct GateArgs {
    const void* x;  // [tokens, 2 width]: gates, then what they multiply
    void* y;        // [tokens, width]
    uint32_t width, dtype;
    uint32_t activation;  // 0: silu, 1: gelu (tanh)
    uint32_t pad;
};
static_assert(sizeof(GateArgs) == 32, "mirrored structs");

__device__ __forceinline__ float activated(uint32_t kind, float x) {
    if (kind == 0) return x / (1.f + expf(-x));
    // sqrt(2 / pi); Hendrycks, Gimpel 2016, arXiv 1606.08415
    return 0.5f * x * (1.f + tanhf(0.7978845608028654f * x * (1.f + 0.044715f * x * x)));
}

extern "C" __global__ void __launch_bounds__(128) gate(const __grid_constant__ GateArgs a) {
    const uint32_t col = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
    const size_t token = blockIdx.y, row = token * 2 * a.width;
    let_next_start();
    wait_for_previous();
    if (col >= a.width) return;
    float g[8], u[8];
    load8(a.x, a.dtype, row + col, row + a.width, g);
    load8(a.x, a.dtype, row + a.width + col, row + 2 * size_t(a.width), u);
#pragma unroll
    for (int i = 0; i < 8; i++) g[i] = rounded(activated(a.activation, g[i]), a.dtype) * u[i];
    store8(a.y, a.dtype, token * a.width + col, (token + 1) * a.width, g);
}

struct AddGatedArgs {
    const void* x;     // [tokens, width]
    const void* y;     // [tokens, width]
    const void* gate;  // [tokens], or null: ones
    void* out;         // [tokens, width]
    uint32_t width, dtype;
};
static_assert(sizeof(AddGatedArgs) == 40, "mirrored structs");

// out = x + sigmoid(gate) y
extern "C" __global__ void __launch_bounds__(128) add_gated(const __grid_constant__ AddGatedArgs a) {
    const uint32_t col = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
    const size_t token = blockIdx.y, row = token * a.width, end = row + a.width;
    let_next_start();
    wait_for_previous();
    if (col >= a.width) return;
    float x[8], y[8];
    load8(a.x, a.dtype, row + col, end, x);
    load8(a.y, a.dtype, row + col, end, y);
    if (a.gate) {
        const float gate = rounded(sigmoid(load_as_float(a.gate, a.dtype, token)), a.dtype);
#pragma unroll
        for (int i = 0; i < 8; i++) y[i] = rounded(y[i] * gate, a.dtype);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] += y[i];
    store8(a.out, a.dtype, row + col, end, x);
}
