// A row of a KV cache in INT8. The CPU's `quantise` (src/blocks/int8.rs) gives the same bytes.
#pragma once
#include "common.cuh"

// The least f16 that is not below v.
__device__ __forceinline__ __half scale_not_below(float v) {
    const __half near = __float2half_rn(v);
    return __half2float(near) < v ? __ushort_as_half(__half_as_ushort(near) + 1) : near;
}

// Keeps `value(column)` for `n` columns, by one warp: q, and the least scale that clips nothing. A row that INT8 cannot
// hold, for a NaN in it or a magnitude of 8.3 million or more, becomes NaN as a whole.
template <typename Value>
__device__ __forceinline__ void keep_int8_row(Value value, uint32_t n, int8_t* q, __half* scale) {
    const uint32_t lane = threadIdx.x % 32;
    float largest = 0.f;
    bool broken = false;
    for (uint32_t i = lane; i < n; i += 32) {
        const float v = value(i);
        largest = fmaxf(largest, fabsf(v));
        broken |= v != v;
    }
    __half s = scale_not_below(warp_max(largest) / 127.f);
    if (__any_sync(kAll, broken) || !(__half2float(s) < INFINITY)) s = __ushort_as_half(0x7e00);
    const float divisor = __half2float(s);
    for (uint32_t i = lane; i < n; i += 32) {
        const float r = divisor > 0.f ? rintf(value(i) / divisor) : 0.f;
        q[i] = int8_t(fminf(fmaxf(r, -127.f), 127.f));
    }
    if (lane == 0) *scale = s;
}
