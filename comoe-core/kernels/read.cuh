// What the two GEMVs share: how a piece of 16 bytes of a record is read, and a row of x or h.
#pragma once
#include "spans.cuh"

template <int F>
struct Traits;
template <>
struct Traits<BF16> {
    static constexpr int kCols = 8, kParts = 3;
};
template <>
struct Traits<INT8> {
    static constexpr int kCols = 16, kParts = 2;
};
template <>
struct Traits<INT4> {
    static constexpr int kCols = 32, kParts = 2;
};
template <>
struct Traits<MXFP4> {
    static constexpr int kCols = 32, kParts = 2;
};

// Volatile keeps these loads ahead of the barrier behind which x is staged: they are what takes long.
__device__ __forceinline__ uint4 load_chunk(const char* p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }

// One row of x or h, zero behind its end.
template <typename E>
struct Row {
    const E* data;
    float weight;
    uint32_t cols;

    // Columns col .. col + 8, with 16 byte loads where the row allows them.
    __device__ __forceinline__ void load8(uint32_t col, float (&v)[8]) const {
        if (reinterpret_cast<uintptr_t>(data) % 16 == 0 && col + 8 <= cols) {
            constexpr int kLoads = sizeof(E) / 2;
            uint4 raw[kLoads];
#pragma unroll
            for (int i = 0; i < kLoads; i++) raw[i] = reinterpret_cast<const uint4*>(data + col)[i];
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = to_float(reinterpret_cast<const E*>(raw)[i]) * weight;
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = col + i < cols ? to_float(data[col + i]) * weight : 0.f;
        }
    }
};

// Calls `f` with the row of an assignment. h is always F32.
template <bool ANY_TYPE, typename Fn>
__device__ __forceinline__ void with_row(const Input& in, uint32_t assignment, uint32_t cols, Fn f) {
    const size_t at = size_t(assignment / in.per_row) * cols;
    const float weight = ANY_TYPE && in.row_weights ? in.row_weights[assignment] : 1.f;
    if (ANY_TYPE && in.dtype == DT_BF16) {
        f(Row<__nv_bfloat16>{static_cast<const __nv_bfloat16*>(in.data) + at, weight, cols});
    } else if (ANY_TYPE && in.dtype == DT_F16) {
        f(Row<__half>{static_cast<const __half*>(in.data) + at, weight, cols});
    } else {
        f(Row<float>{static_cast<const float*>(in.data) + at, weight, cols});
    }
}
