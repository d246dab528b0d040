// From a layer's q, k and v projections to queries and to rows of the KV cache, one warp for a head of a token: clipped,
// normed, rotated, queries scaled by their position, keys and values appended where the device says the sequence ends.
//
// Rounded to the dtype wherever candle's kernels write an intermediate tensor, within the rotation too, so that a model
// run op by op on the GPU gives nearly the same.
#include "int8_row.cuh"

struct HeadsArgs {
    const void* qkv;  // [tokens, (heads + 2 kv_heads) head_dim], or without the values where those are the keys
    const void *q_weight, *k_weight;  // [head_dim], or null: ones
    const void *cos, *sin;            // [rope_rows, rope_dim / 2] of dtype, or null
    void* q;                          // [heads, tokens, head_dim]
    void *k, *v;                      // the caches: kv_heads blocks of rows
    __half *k_scales, *v_scales;      // [kv_heads, capacity], for INT8 caches
    const uint32_t* position;         // where the first token goes
    uint32_t* error;
    uint64_t k_head_stride, v_head_stride;  // in elements, as the next two
    uint32_t k_row_stride, v_row_stride, heads, kv_heads, head_dim, tokens, capacity, dtype;
    uint32_t int8;              // the cache's rows, else of dtype
    uint32_t norm;              // of q and k; 0: none, 1: before the rotation, 2: behind it
    uint32_t v_norm;            // whether v is normed
    uint32_t rope_dim;          // elements of a head that rotate, or 0
    uint32_t rope_rows;
    uint32_t neighbours;        // pairs (2i, 2i + 1), else (i, i + rope_dim / 2)
    uint32_t values_are_keys;
    float eps, v_eps;
    float clip;                 // infinity: none
    float period, slope;        // of the queries' temperature; a period of 0: none
};
static_assert(sizeof(HeadsArgs) == 192, "mirrored structs");

constexpr uint32_t kHeadWarps = 4;

// `v` as E has it.
template <typename E>
__device__ __forceinline__ float as(float v) { return to_float(from_float<E>(v)); }

// RMS norm of a row in shared memory.
template <typename E>
__device__ __forceinline__ void norm_row(float* row, uint32_t n, const E* weight, float eps) {
    const uint32_t lane = threadIdx.x % 32;
    float squares = 0.f;
#pragma unroll 4
    for (uint32_t i = lane; i < n; i += 32) squares = __fmaf_rn(row[i], row[i], squares);
    const float scale = rsqrtf(warp_sum(squares) / float(n) + eps);
#pragma unroll 4
    for (uint32_t i = lane; i < n; i += 32) {
        const float v = scale * row[i];
        row[i] = as<E>(weight ? v * to_float(weight[i]) : v);
    }
    __syncwarp();
}

template <typename E>
__device__ __forceinline__ void split_head(const HeadsArgs& a, float* rows) {
    const uint32_t lane = threadIdx.x % 32, head = blockIdx.x * kHeadWarps + threadIdx.x / 32, token = blockIdx.y;
    const uint32_t d = a.head_dim;
    float* row = rows + threadIdx.x / 32 * d;
    if (head >= a.heads + 2 * a.kv_heads) return;

    const uint32_t which = uint32_t(head >= a.heads) + uint32_t(head >= a.heads + a.kv_heads);
    const uint32_t own = which == 0 ? head : (head - a.heads) % a.kv_heads;
    const uint32_t columns = a.heads + (a.values_are_keys ? 1 : 2) * a.kv_heads;
    const uint32_t column = which == 2 && a.values_are_keys ? a.heads + own : head;
    // Asked for before anything is waited for: the position, the head, the norm's weights.
    const E* from = static_cast<const E*>(a.qkv) + (size_t(token) * columns + column) * d;
    const E* weight = static_cast<const E*>(which == 0 ? a.q_weight : a.k_weight);
    const uint32_t start = *a.position;
    if (which < 2 && a.norm && weight && 4 * lane < d) {
        asm volatile("prefetch.global.L1 [%0];" ::"l"(weight + 4 * lane) : "memory");
    }
#pragma unroll 4
    for (uint32_t i = lane; i < d; i += 32) {
        const float v = to_float(from[i]);
        row[i] = v > a.clip ? a.clip : v < -a.clip ? -a.clip : v;  // NaN stays
    }
    const uint32_t position = start + token;
    if (position < token || position >= a.capacity || (a.rope_dim && position >= a.rope_rows)) {
        if (lane == 0) *a.error = 1 + token;
        return;
    }
    __syncwarp();
    if (which == 2) {
        if (a.v_norm) norm_row<E>(row, d, nullptr, a.v_eps);
    } else {
        if (a.norm == 1) norm_row<E>(row, d, weight, a.eps);
        const uint32_t half = a.rope_dim / 2;
        const E *cos = static_cast<const E*>(a.cos) + size_t(position) * half;
        const E* sin = static_cast<const E*>(a.sin) + size_t(position) * half;
#pragma unroll 4
        for (uint32_t i = lane; i < half; i += 32) {
            const uint32_t low = a.neighbours ? 2 * i : i, high = a.neighbours ? 2 * i + 1 : i + half;
            const float c = to_float(cos[i]), s = to_float(sin[i]), x = row[low], y = row[high];
            row[low] = as<E>(as<E>(x * c) - as<E>(y * s));
            row[high] = as<E>(as<E>(x * s) + as<E>(y * c));
        }
        __syncwarp();
        if (a.norm == 2) norm_row<E>(row, d, weight, a.eps);
    }
    if (which == 0) {
        float factor = 1.f;
        if (a.period > 0.f) {
            factor = as<E>(log1pf(floorf((float(position) + 1.f) / a.period)) * a.slope + 1.f);
        }
        const size_t to = (size_t(head) * a.tokens + token) * d;
        E* q = static_cast<E*>(a.q) + to;
#pragma unroll 4
        for (uint32_t i = lane; i < d; i += 32) q[i] = from_float<E>(row[i] * factor);
        return;
    }
    void* cache = which == 1 ? a.k : a.v;
    const size_t to = which == 1 ? own * a.k_head_stride + size_t(position) * a.k_row_stride
                                 : own * a.v_head_stride + size_t(position) * a.v_row_stride;
    if (!a.int8) {
#pragma unroll 4
        for (uint32_t i = lane; i < d; i += 32) static_cast<E*>(cache)[to + i] = from_float<E>(row[i]);
        return;
    }
    __half* scale = (which == 1 ? a.k_scales : a.v_scales) + size_t(own) * a.capacity + position;
    keep_int8_row([&](uint32_t i) { return row[i]; }, d, static_cast<int8_t*>(cache) + to, scale);
}

extern "C" __global__ void __launch_bounds__(32 * kHeadWarps)
    split_norm_rope_append(const __grid_constant__ HeadsArgs a) {
    extern __shared__ float rows[];
    let_next_start();
    wait_for_previous();
    switch (a.dtype) {
        case DT_BF16: split_head<__nv_bfloat16>(a, rows); break;
        case DT_F16: split_head<__half>(a, rows); break;
        default: split_head<float>(a, rows);
    }
}
