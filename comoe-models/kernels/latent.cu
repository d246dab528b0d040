// Latent attention (DeepSeek-V2, arXiv 2405.04434) around its attention: what is kept of a token, queries that look
// straight at it, and values made from what they saw. Rounded to the dtype where candle's kernels write a tensor; the
// order of every sum follows from the widths alone.
#include "common.cuh"

struct LatentArgs {
    const void* compressed;  // [tokens, latent + rope]
    const void* norm;        // [latent]
    const void* queries;     // [tokens, heads, nope + rope]
    const void* to_keys;     // [heads, nope, latent]
    const void *cos, *sin;   // [rope_rows, rope / 2]
    void* cache;             // [capacity, latent + rope]
    void* q;                 // result [heads, tokens, latent + rope]
    const uint32_t* position;
    uint32_t* error;
    uint32_t heads, tokens, latent, nope, rope, rope_rows, capacity, neighbours, dtype;
    float eps;
};
static_assert(sizeof(LatentArgs) == 120, "mirrored structs");

constexpr uint32_t kLatentThreads = 128;

// The i-th of a row of `rope` elements at `at`, rotated.
__device__ __forceinline__ float rotated(const LatentArgs& a, const void* p, size_t at, uint32_t i, uint32_t position) {
    const uint32_t half = a.rope / 2, dt = a.dtype;
    const uint32_t pair = a.neighbours ? i / 2 : i % half;
    const bool second = a.neighbours ? i % 2 : i >= half;
    const float x = load_as_float(p, dt, at + (a.neighbours ? 2 * pair : pair));
    const float y = load_as_float(p, dt, at + (a.neighbours ? 2 * pair + 1 : pair + half));
    const float c = load_as_float(a.cos, dt, size_t(position) * half + pair);
    const float s = load_as_float(a.sin, dt, size_t(position) * half + pair);
    const float v = second ? rounded(x * s, dt) + rounded(y * c, dt) : rounded(x * c, dt) - rounded(y * s, dt);
    return rounded(v, dt);
}

// grid: tokens; block: kLatentThreads. The latent under its norm and the rotated key go to the cache.
extern "C" __global__ void __launch_bounds__(kLatentThreads) latent_append(const __grid_constant__ LatentArgs a) {
    __shared__ float sums[kLatentThreads / 32];
    let_next_start();
    wait_for_previous();
    const uint32_t token = blockIdx.x, position = *a.position + token, width = a.latent + a.rope;
    if (position >= a.capacity || position >= a.rope_rows) {
        if (threadIdx.x == 0) *a.error = 1 + token;
        return;
    }
    const size_t from = size_t(token) * width, to = size_t(position) * width;
    float squares = 0.f;
    for (uint32_t i = threadIdx.x; i < a.latent; i += kLatentThreads) {
        const float v = load_as_float(a.compressed, a.dtype, from + i);
        squares = __fmaf_rn(v, v, squares);
    }
    const float scale = rsqrtf(block_sum(squares, sums) / float(a.latent) + a.eps);
    for (uint32_t i = threadIdx.x; i < a.latent; i += kLatentThreads) {
        const float v = scale * load_as_float(a.compressed, a.dtype, from + i);
        store_from_float(a.cache, a.dtype, to + i, v * load_as_float(a.norm, a.dtype, i));
    }
    for (uint32_t i = threadIdx.x; i < a.rope; i += kLatentThreads) {
        store_from_float(a.cache, a.dtype, to + a.latent + i, rotated(a, a.compressed, from + a.latent, i, position));
    }
}

// grid: (latent / kLatentThreads rounded up, heads, tokens); block: kLatentThreads; shared: nope floats.
extern "C" __global__ void __launch_bounds__(kLatentThreads) latent_queries(const __grid_constant__ LatentArgs a) {
    extern __shared__ float q[];
    let_next_start();
    wait_for_previous();
    const uint32_t head = blockIdx.y, token = blockIdx.z, column = blockIdx.x * kLatentThreads + threadIdx.x;
    const size_t from = (size_t(token) * a.heads + head) * (a.nope + a.rope);
    const size_t to = (size_t(head) * a.tokens + token) * (a.latent + a.rope);
    for (uint32_t i = threadIdx.x; i < a.nope; i += kLatentThreads) q[i] = load_as_float(a.queries, a.dtype, from + i);
    __syncthreads();
    if (column < a.latent) {
        float sum = 0.f;
        size_t at = size_t(head) * a.nope * a.latent + column;
#pragma unroll 8
        for (uint32_t i = 0; i < a.nope; i++, at += a.latent) sum = __fmaf_rn(q[i], load_as_float(a.to_keys, a.dtype, at), sum);
        store_from_float(a.q, a.dtype, to + column, sum);
    }
    // The caller has made sure that the position is in the tables: what has no room there is reported by the append.
    const uint32_t position = min(*a.position + token, a.rope_rows - 1);
    if (blockIdx.x == 0) {
        for (uint32_t i = threadIdx.x; i < a.rope; i += kLatentThreads) {
            store_from_float(a.q, a.dtype, to + a.latent + i, rotated(a, a.queries, from + a.nope, i, position));
        }
    }
}

struct ValuesArgs {
    const void* seen;       // [tokens, heads, latent]
    const void* to_values;  // [heads, values, latent]
    void* out;              // [tokens, heads, values]
    uint32_t heads, latent, values, dtype;
};
static_assert(sizeof(ValuesArgs) == 40, "mirrored structs");

// grid: (values / 4 rounded up, heads, tokens); block: four warps, a value each.
extern "C" __global__ void __launch_bounds__(128) latent_values(const __grid_constant__ ValuesArgs a) {
    let_next_start();
    wait_for_previous();
    const uint32_t lane = threadIdx.x % 32, value = blockIdx.x * 4 + threadIdx.x / 32, head = blockIdx.y;
    if (value >= a.values) return;
    const size_t row = (size_t(head) * a.values + value) * a.latent;
    const size_t of = size_t(blockIdx.z) * a.heads + head;
    float sum = 0.f;
    for (uint32_t i = 8 * lane; i < a.latent; i += 256) {
        float w[8], x[8];
        load8(a.to_values, a.dtype, row + i, row + a.latent, w);
        load8(a.seen, a.dtype, of * a.latent + i, (of + 1) * a.latent, x);
#pragma unroll
        for (int j = 0; j < 8; j++) sum = __fmaf_rn(w[j], x[j], sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) store_from_float(a.out, a.dtype, of * a.values + value, sum);
}
