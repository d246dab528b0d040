// The residual stream between two blocks: adds what a block gave, norms the sum for the next one. One block a token.
//
// Rounded where candle's kernels round, which hold every intermediate tensor in the model's dtype: delta * delta_scale,
// the sum, the sum * sum_scale. The norm takes the rounded sum and is F32 inside.
#include "common.cuh"

struct NormArgs {
    const void* x;       // [tokens] rows of `width`, `x_stride` apart
    const void* delta;   // [tokens, width], or null
    void* sum;           // [tokens, width], or null
    const void* weight;  // [width], or null: ones
    const void* bias;    // [width], or null
    void* normed;        // [tokens] rows of `width`, `normed_stride` apart, or null
    uint32_t x_stride, normed_stride, width, dtype;
    uint32_t centred;  // 0: RMS norm, 1: layer norm
    float eps, delta_scale, sum_scale;
};
static_assert(sizeof(NormArgs) == 80, "mirrored structs");

// Columns that a thread keeps in registers, in pieces of 8.
constexpr int kPieces = 2;

extern "C" __global__ void __launch_bounds__(1024) add_norm(const __grid_constant__ NormArgs a) {
    __shared__ float scratch[2][32];
    const size_t token = blockIdx.x;
    const uint32_t dt = a.dtype, width = a.width;
    let_next_start();
    float w[kPieces][8];
#pragma unroll
    for (int p = 0; p < kPieces; p++) {
        const uint32_t col = 8 * (p * blockDim.x + threadIdx.x);
        if (col < width && a.weight && a.normed) load8(a.weight, dt, col, width, w[p]);
    }
    wait_for_previous();

    float v[kPieces][8], sum = 0.f, squares = 0.f;
#pragma unroll
    for (int p = 0; p < kPieces; p++) {
        const uint32_t col = 8 * (p * blockDim.x + threadIdx.x);
        if (col >= width) break;
        const size_t x_row = token * a.x_stride, row = token * width;
        load8(a.x, dt, x_row + col, x_row + width, v[p]);
        if (a.delta) {
            float d[8];
            load8(a.delta, dt, row + col, row + width, d);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                if (a.delta_scale != 1.f) d[i] = rounded(d[i] * a.delta_scale, dt);
                v[p][i] = rounded(v[p][i] + d[i], dt);
            }
        }
        if (a.sum_scale != 1.f) {
#pragma unroll
            for (int i = 0; i < 8; i++) v[p][i] = rounded(v[p][i] * a.sum_scale, dt);
        }
        if (a.sum) store8(a.sum, dt, row + col, row + width, v[p]);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            sum += v[p][i];
            squares = __fmaf_rn(v[p][i], v[p][i], squares);
        }
    }
    if (a.normed == nullptr) return;
    squares = block_sum(squares, scratch[0]) / float(width);
    float mean = 0.f;
    if (a.centred) {
        mean = block_sum(sum, scratch[1]) / float(width);
        squares -= mean * mean;
    }
    const float scale = rsqrtf(squares + a.eps);
#pragma unroll
    for (int p = 0; p < kPieces; p++) {
        const uint32_t col = 8 * (p * blockDim.x + threadIdx.x);
        if (col >= width) break;
        float b[8];
        if (a.bias) load8(a.bias, dt, col, width, b);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[p][i] = (v[p][i] - mean) * scale;
            if (a.weight) v[p][i] *= w[p][i];
            if (a.bias) v[p][i] += b[i];
        }
        const size_t row = token * a.normed_stride;
        store8(a.normed, dt, row + col, row + width, v[p]);
    }
}
