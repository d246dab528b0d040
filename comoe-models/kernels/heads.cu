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

// What a lane keeps of the norm's weights and of the rotation's angles, so that they are there when they are needed: of rows
// up to 128. Wider ones read the rest where they use it.
constexpr int kHeld = 4, kHeldPairs = kHeld / 2;

// RMS norm of a row in shared memory, whose weights from `weight` on (null: ones) are in `held` as far as they fit.
template <typename E>
__device__ __forceinline__ void norm_row(float* row, uint32_t n, const E* weight, const float (&held)[kHeld], float eps) {
    const uint32_t lane = threadIdx.x % 32;
    float squares = 0.f;
#pragma unroll 4
    for (uint32_t i = lane; i < n; i += 32) squares = __fmaf_rn(row[i], row[i], squares);
    const float scale = rsqrtf(warp_sum(squares) / float(n) + eps);
    auto apply = [&](uint32_t i, float w) {
        const float v = scale * row[i];
        row[i] = as<E>(weight ? v * w : v);
    };
#pragma unroll
    for (int j = 0; j < kHeld; j++) {
        if (lane + 32 * j < n) apply(lane + 32 * j, held[j]);
    }
#pragma unroll 1
    for (uint32_t i = lane + 32 * kHeld; i < n; i += 32) apply(i, weight ? to_float(weight[i]) : 1.f);
    __syncwarp();
}

template <typename E>
__device__ __forceinline__ void split_head(const HeadsArgs& a, float* rows) {
    const uint32_t lane = threadIdx.x % 32, head = blockIdx.x * kHeadWarps + threadIdx.x / 32, token = blockIdx.y;
    const uint32_t d = a.head_dim;
    float* row = rows + threadIdx.x / 32 * d;
    if (head >= a.heads + 2 * a.kv_heads) {
        wait_for_previous();
        return;
    }
    const uint32_t which = uint32_t(head >= a.heads) + uint32_t(head >= a.heads + a.kv_heads);
    const uint32_t own = which == 0 ? head : (head - a.heads) % a.kv_heads;
    const uint32_t columns = a.heads + (a.values_are_keys ? 1 : 2) * a.kv_heads;
    const uint32_t column = which == 2 && a.values_are_keys ? a.heads + own : head;
    const E* weight = static_cast<const E*>(which == 0 ? a.q_weight : a.k_weight);
    const bool normed = which < 2 && a.norm;
    float weights[kHeld];
#pragma unroll
    for (int j = 0; j < kHeld; j++) {
        weights[j] = normed && weight && lane + 32 * j < d ? to_float(weight[lane + 32 * j]) : 1.f;
    }
    wait_for_previous();
    // Asked for together: the position and the head; then, with the position, the angles.
    const E* from = static_cast<const E*>(a.qkv) + (size_t(token) * columns + column) * d;
    const uint32_t position = *a.position + token;
    auto clipped = [&](float v) { return v > a.clip ? a.clip : v < -a.clip ? -a.clip : v; };  // NaN stays
    // All before the first is stored: to the compiler `row` might be what is read next.
    float first[kHeld];
#pragma unroll
    for (int j = 0; j < kHeld; j++) first[j] = lane + 32 * j < d ? to_float(from[lane + 32 * j]) : 0.f;
#pragma unroll
    for (int j = 0; j < kHeld; j++) {
        if (lane + 32 * j < d) row[lane + 32 * j] = clipped(first[j]);
    }
#pragma unroll 1
    for (uint32_t i = lane + 32 * kHeld; i < d; i += 32) row[i] = clipped(to_float(from[i]));
    if (position < token || position >= a.capacity || (a.rope_dim && position >= a.rope_rows)) {
        if (lane == 0) *a.error = 1 + token;
        return;
    }
    const uint32_t half = which < 2 ? a.rope_dim / 2 : 0;
    const E *cos = static_cast<const E*>(a.cos) + size_t(position) * half;
    const E* sin = static_cast<const E*>(a.sin) + size_t(position) * half;
    float c[kHeldPairs], s[kHeldPairs];
#pragma unroll
    for (int j = 0; j < kHeldPairs; j++) {
        c[j] = lane + 32 * j < half ? to_float(cos[lane + 32 * j]) : 1.f;
        s[j] = lane + 32 * j < half ? to_float(sin[lane + 32 * j]) : 0.f;
    }
    __syncwarp();
    // Once, since code is short that way: a norm before the rotation, the rotation, or a norm behind it.
    const uint32_t when = which == 2 ? a.v_norm : a.norm;
#pragma unroll 1
    for (uint32_t turn = 1; turn <= 2; turn++) {
        if (when == turn) norm_row<E>(row, d, which == 2 ? nullptr : weight, weights, which == 2 ? a.v_eps : a.eps);
        if (turn == 2) break;
        auto rotate = [&](uint32_t i, float c, float s) {
            const uint32_t low = a.neighbours ? 2 * i : i, high = a.neighbours ? 2 * i + 1 : i + half;
            const float x = row[low], y = row[high];
            row[low] = as<E>(as<E>(x * c) - as<E>(y * s));
            row[high] = as<E>(as<E>(x * s) + as<E>(y * c));
        };
#pragma unroll
        for (int j = 0; j < kHeldPairs; j++) {
            if (lane + 32 * j < half) rotate(lane + 32 * j, c[j], s[j]);
        }
#pragma unroll 1
        for (uint32_t i = lane + 32 * kHeldPairs; i < half; i += 32) rotate(i, to_float(cos[i]), to_float(sin[i]));
        __syncwarp();
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
    switch (a.dtype) {
        case DT_BF16: split_head<__nv_bfloat16>(a, rows); break;
        case DT_F16: split_head<__half>(a, rows); break;
        default: split_head<float>(a, rows);
    }
}
