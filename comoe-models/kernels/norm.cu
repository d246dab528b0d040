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

// The residual stream behind a block, from column `col` on; stored where it belongs if `keep`.
template <typename E>
__device__ __forceinline__ void load_sum(const NormArgs& a, size_t token, uint32_t col, bool keep, float (&v)[8]) {
    const size_t x_row = token * a.x_stride, row = token * a.width;
    float d[8];
    load8(static_cast<const E*>(a.x), x_row + col, x_row + a.width, v);
    if (a.delta) {
        load8(static_cast<const E*>(a.delta), row + col, row + a.width, d);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (a.delta_scale != 1.f) d[i] = as<E>(d[i] * a.delta_scale);
            v[i] = as<E>(v[i] + d[i]);
        }
    }
    if (a.sum_scale != 1.f) {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = as<E>(v[i] * a.sum_scale);
    }
    if (keep && a.sum) store8(static_cast<E*>(a.sum), row + col, row + a.width, v);
}

// P: columns that a thread keeps in registers, in pieces of 8.
template <typename E, int P>
__device__ __forceinline__ void add_norm(const NormArgs& a) {
    __shared__ float scratch[2][32];
    const size_t token = blockIdx.x;
    const uint32_t width = a.width;
    const E *weight = static_cast<const E*>(a.weight), *bias = static_cast<const E*>(a.bias);
    let_next_start();
    float w[P][8];
#pragma unroll
    for (int p = 0; p < P; p++) {
        const uint32_t col = 8 * (p * blockDim.x + threadIdx.x);
        if (col < width && weight && a.normed) load8(weight, col, width, w[p]);
    }
    wait_for_previous();

    float v[P][8], sum = 0.f, squares = 0.f;
#pragma unroll
    for (int p = 0; p < P; p++) {
        const uint32_t col = 8 * (p * blockDim.x + threadIdx.x);
        if (col >= width) break;
        load_sum<E>(a, token, col, true, v[p]);
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
    for (int p = 0; p < P; p++) {
        const uint32_t col = 8 * (p * blockDim.x + threadIdx.x);
        if (col >= width) break;
        float b[8];
        if (bias) load8(bias, col, width, b);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[p][i] = (v[p][i] - mean) * scale;
            if (weight) v[p][i] *= w[p][i];
            if (bias) v[p][i] += b[i];
        }
        const size_t row = token * a.normed_stride;
        store8(static_cast<E*>(a.normed), row + col, row + width, v[p]);
    }
}

// Up to 8 * P * 1024 columns.
#define ADD_NORM(NAME, E, P)                                                                                         \
    extern "C" __global__ void __launch_bounds__(1024) add_norm_##NAME(const __grid_constant__ NormArgs a) {         \
        add_norm<E, P>(a);                                                                                           \
    }

ADD_NORM(f32, float, 1)
ADD_NORM(bf16, __nv_bfloat16, 1)
ADD_NORM(f16, __half, 1)
ADD_NORM(f32_wide, float, 2)
ADD_NORM(bf16_wide, __nv_bfloat16, 2)
ADD_NORM(f16_wide, __half, 2)
