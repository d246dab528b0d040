// What all kernels of this crate share. Everything is reached by address; a kernel's arguments come in one struct by
// value, mirrored field by field in src/cuda/.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

enum Dtype : uint32_t { DT_F32 = 0, DT_BF16 = 1, DT_F16 = 2, DT_I8 = 3 };

constexpr uint32_t kAll = 0xffffffffu;

// Programmatic dependent launch: the next kernel may be set up from here on. It reads nothing of ours before its own
// wait_for_previous.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Everything that the kernels before this one wrote is visible behind this; before it, only weights may be read and
// nothing written. Every thread of every kernel passes it, so that no kernel ends before those in front of it.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }

template <typename E>
__device__ __forceinline__ E from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) { return v; }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }
template <>
__device__ __forceinline__ __half from_float<__half>(float v) { return __float2half_rn(v); }

// `v` as E has it.
template <typename E>
__device__ __forceinline__ float as(float v) { return to_float(from_float<E>(v)); }

// `v` as the dtype has it.
__device__ __forceinline__ float rounded(float v, uint32_t dtype) {
    switch (dtype) {
        case DT_BF16: return __bfloat162float(__float2bfloat16_rn(v));
        case DT_F16: return __half2float(__float2half_rn(v));
        default: return v;
    }
}

__device__ __forceinline__ float load_as_float(const void* p, uint32_t dtype, size_t i) {
    switch (dtype) {
        case DT_BF16: return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
        case DT_F16: return __half2float(static_cast<const __half*>(p)[i]);
        default: return static_cast<const float*>(p)[i];
    }
}

__device__ __forceinline__ void store_from_float(void* p, uint32_t dtype, size_t i, float v) {
    switch (dtype) {
        case DT_BF16: static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(v); break;
        case DT_F16: static_cast<__half*>(p)[i] = __float2half_rn(v); break;
        default: static_cast<float*>(p)[i] = v;
    }
}

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Two values of a 16-bit type in one word.
__device__ __forceinline__ float2 two_floats(uint32_t w, uint32_t dtype) {
    if (dtype == DT_BF16) return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u));
    const __half2 h = *reinterpret_cast<const __half2*>(&w);
    return __half22float2(h);
}

// Element `j` of eight in registers, which is not known before the kernel runs.
__device__ __forceinline__ float pick(const float (&v)[8], int j) {
    float f = v[0];
#pragma unroll
    for (int k = 1; k < 8; k++) f = k == j ? v[k] : f;
    return f;
}
__device__ __forceinline__ void put(float (&v)[8], int j, float f) {
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = k == j ? f : v[k];
}

// Eight neighbours from element `i` on, of which those from `end` on are zero. 16-byte loads where they are aligned; the
// other way is a loop, since code that is jumped over costs a kernel of a few microseconds as much as code that runs: it
// finds its instructions in no cache near it.
template <typename E>
__device__ __forceinline__ void load8(const E* p, size_t i, size_t end, float (&v)[8]) {
    const E* at = p + i;
    if (i + 8 <= end && reinterpret_cast<uintptr_t>(at) % 16 == 0) {
        constexpr int kLoads = sizeof(E) / 2;
        uint4 raw[kLoads];
#pragma unroll
        for (int l = 0; l < kLoads; l++) raw[l] = reinterpret_cast<const uint4*>(at)[l];
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = to_float(reinterpret_cast<const E*>(raw)[j]);
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = 0.f;
#pragma unroll 1
    for (int j = 0; j < 8 && i + j < end; j++) put(v, j, to_float(at[j]));
}

template <typename E>
__device__ __forceinline__ void store8(E* p, size_t i, size_t end, const float (&v)[8]) {
    E* at = p + i;
    if (i + 8 <= end && reinterpret_cast<uintptr_t>(at) % 16 == 0) {
        constexpr int kStores = sizeof(E) / 2;
        __align__(16) E raw[8];
#pragma unroll
        for (int j = 0; j < 8; j++) raw[j] = from_float<E>(v[j]);
#pragma unroll
        for (int l = 0; l < kStores; l++) reinterpret_cast<uint4*>(at)[l] = reinterpret_cast<const uint4*>(raw)[l];
        return;
    }
#pragma unroll 1
    for (int j = 0; j < 8 && i + j < end; j++) at[j] = from_float<E>(pick(v, j));
}

// The same of elements of a type that is known when the kernel runs.
__device__ __forceinline__ void load8(const void* p, uint32_t dtype, size_t i, size_t end, float (&v)[8]) {
    const bool wide = dtype == DT_F32;
    const char* at = static_cast<const char*>(p) + i * (wide ? 4 : 2);
    if (i + 8 <= end && reinterpret_cast<uintptr_t>(at) % 16 == 0) {
        const uint4 a = *reinterpret_cast<const uint4*>(at);
        uint4 b = a;
        if (wide) b = *reinterpret_cast<const uint4*>(at + 16);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 f = two_floats(word(a, j), dtype);
            v[2 * j] = f.x;
            v[2 * j + 1] = f.y;
        }
        if (wide) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                v[j] = __uint_as_float(word(a, j));
                v[4 + j] = __uint_as_float(word(b, j));
            }
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = 0.f;
#pragma unroll 1
    for (int j = 0; j < 8 && i + j < end; j++) put(v, j, load_as_float(p, dtype, i + j));
}

__device__ __forceinline__ void store8(void* p, uint32_t dtype, size_t i, size_t end, const float (&v)[8]) {
    const bool wide = dtype == DT_F32;
    char* at = static_cast<char*>(p) + i * (wide ? 4 : 2);
    if (i + 8 <= end && reinterpret_cast<uintptr_t>(at) % 16 == 0) {
        if (wide) {
            reinterpret_cast<float4*>(at)[0] = make_float4(v[0], v[1], v[2], v[3]);
            reinterpret_cast<float4*>(at)[1] = make_float4(v[4], v[5], v[6], v[7]);
            return;
        }
        uint32_t w[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const __nv_bfloat162 b = __floats2bfloat162_rn(v[2 * j], v[2 * j + 1]);
            const __half2 h = __floats2half2_rn(v[2 * j], v[2 * j + 1]);
            w[j] = dtype == DT_BF16 ? *reinterpret_cast<const uint32_t*>(&b) : *reinterpret_cast<const uint32_t*>(&h);
        }
        *reinterpret_cast<uint4*>(at) = make_uint4(w[0], w[1], w[2], w[3]);
        return;
    }
#pragma unroll 1
    for (int j = 0; j < 8 && i + j < end; j++) store_from_float(p, dtype, i + j, pick(v, j));
}

// Weights and cached keys: read once, and asked for here, not where they are first needed.
__device__ __forceinline__ uint4 load_stream(const void* p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

// Numbers whose order is that of floats, -0 as 0, from 1 on; 0 is less than any.
__device__ __forceinline__ uint32_t ordered(float v) {
    const uint32_t bits = __float_as_uint(v + 0.f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(uint32_t v) {
    return __uint_as_float(v & 0x80000000u ? v & 0x7fffffffu : ~v);
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int o = 16; o; o /= 2) v = fmaxf(v, __shfl_xor_sync(kAll, v, o));
    return v;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int o = 16; o; o /= 2) v += __shfl_xor_sync(kAll, v, o);
    return v;
}

// The sum over the block in every thread, by warps; `scratch` has one float per warp and is free again after the next barrier.
__device__ __forceinline__ float block_sum(float v, float* scratch) {
    const uint32_t lane = threadIdx.x % 32;
    v = warp_sum(v);
    if (lane == 0) scratch[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_sum(lane < blockDim.x / 32 ? scratch[lane] : 0.f);
}

// exp-based activations in F32, as candle's unary kernels compute them.
__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
