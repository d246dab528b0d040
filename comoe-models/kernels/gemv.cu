// y = x W^T + bias for few tokens: what is left of a dense layer when the weights' bytes are all that counts.
//
// A warp takes kRows rows of W and every `slices`-th pass (32 lanes times 16 bytes) over their columns; it asks for
// kDepth passes ahead, the first ones before the kernel in front has ended. x lies in shared memory as F32, each
// lane's columns where it finds them without a bank conflict. The order of every sum follows from W's shape alone: a
// lane's columns ascending, then lanes, then slices; so a token's bits do not depend on how many are multiplied.
#include "common.cuh"

struct GemvArgs {
    const void* x;       // [tokens, inputs] of x_dtype
    const char* weights;  // [outputs] rows, row_bytes apart
    const char* scales;   // I8: [outputs] rows of f16, scale_row_bytes apart; else unused
    const void* bias;    // [outputs] of y_dtype, or null
    void* y;             // [tokens, outputs] of y_dtype
    uint32_t inputs, outputs, tokens, x_dtype, y_dtype, row_bytes, scale_row_bytes;
    uint32_t slices;   // 1, 2 or 4
    uint32_t segment;  // passes of x in shared memory at a time, a multiple of kDepth * slices
    uint32_t pad;
};
static_assert(sizeof(GemvArgs) == 80, "mirrored structs");

constexpr int kRows = 4, kWarps = 8;

template <int F>
struct WeightTraits {
    static constexpr int kCols = F == DT_F32 ? 4 : F == DT_I8 ? 16 : 8, kQuads = kCols / 4, kBytes = 16 / kCols;
    static constexpr int kPassCols = 32 * kCols;
};

// Passes asked for ahead, with T tokens: fewer where sums need the registers, or x the shared memory.
template <int F, int T>
constexpr int kDepth = T <= 2 ? 4 : F == DT_I8 && T == 8 ? 1 : 2;

// The sum over the warp of each of four values: lane l ends with that of value l % 4.
__device__ __forceinline__ float sum_four(const float (&v)[4], uint32_t lane) {
    const bool two = lane & 2, one = lane & 1;
    const float a = (two ? v[2] : v[0]) + __shfl_xor_sync(kAll, two ? v[0] : v[2], 2);
    const float b = (two ? v[3] : v[1]) + __shfl_xor_sync(kAll, two ? v[1] : v[3], 2);
    float s = (one ? b : a) + __shfl_xor_sync(kAll, one ? a : b, 1);
#pragma unroll
    for (int o = 4; o < 32; o *= 2) s += __shfl_xor_sync(kAll, s, o);
    return s;
}

template <int F>
__device__ __forceinline__ void quad_of(const uint4& w, int q, float (&out)[4]) {
    if constexpr (F == DT_F32) {
#pragma unroll
        for (int i = 0; i < 4; i++) out[i] = __uint_as_float(word(w, i));
    } else if constexpr (F == DT_I8) {
        const uint32_t v = word(w, q) ^ 0x80808080u;
        // 2^23 + (q + 128), less as much: q.
#pragma unroll
        for (int i = 0; i < 4; i++) out[i] = __uint_as_float(__byte_perm(v, 0x4b000000u, 0x7440 + i)) - 8388736.f;
    } else {
        const float2 a = two_floats(word(w, 2 * q), F), b = two_floats(word(w, 2 * q + 1), F);
        out[0] = a.x;
        out[1] = a.y;
        out[2] = b.x;
        out[3] = b.y;
    }
}

// Where a matrix's lanes look for the four columns of x from `col` on, T tokens a pass.
template <int F, int T>
__device__ __forceinline__ float4& staged(float4* xs, uint32_t col, uint32_t t) {
    using W = WeightTraits<F>;
    const uint32_t pass = col / W::kPassCols, chunk = col % W::kPassCols / W::kCols, quad = col % W::kCols / 4;
    return xs[((pass * T + t) * W::kQuads + quad) * 32 + chunk];
}

// ALIGNED: rows of W begin at multiples of 16 bytes.
template <int F, int T, bool ALIGNED>
__device__ __forceinline__ void gemv(const GemvArgs& a) {
    using W = WeightTraits<F>;
    constexpr int D = kDepth<F, T>;
    extern __shared__ float4 xs[];  // [segment][T][kQuads][32]
    __shared__ float sums[kWarps][T][kRows];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, slices = a.slices;
    const uint32_t slice = warp % slices, row0 = (blockIdx.x * (kWarps / slices) + warp / slices) * kRows;
    const uint32_t passes = (a.inputs + W::kPassCols - 1) / W::kPassCols, first = blockIdx.y * T;
    const uint32_t tokens = min(uint32_t(T), a.tokens - first);
    let_next_start();

    uint4 w[D][kRows];
    uint16_t scales[D][kRows];
    auto load = [&](int d, uint32_t pass) {
        const uint32_t col = (pass * 32 + lane) * W::kCols;
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            w[d][r] = make_uint4(0, 0, 0, 0);
            if (row0 + r < a.outputs && col < a.inputs) {
                const char* at = a.weights + size_t(row0 + r) * a.row_bytes + size_t(col) * W::kBytes;
                if constexpr (ALIGNED || F == DT_I8) {
                    w[d][r] = load_stream(at);
                } else if constexpr (F == DT_F32) {
                    const uint32_t* e = reinterpret_cast<const uint32_t*>(at);
                    w[d][r].x = e[0];
                    if (col + 1 < a.inputs) w[d][r].y = e[1];
                    if (col + 2 < a.inputs) w[d][r].z = e[2];
                    if (col + 3 < a.inputs) w[d][r].w = e[3];
                } else {
                    const uint16_t* e = reinterpret_cast<const uint16_t*>(at);
                    uint32_t words[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        words[i] = col + 2 * i < a.inputs ? e[2 * i] : 0;
                        if (col + 2 * i + 1 < a.inputs) words[i] |= uint32_t(e[2 * i + 1]) << 16;
                    }
                    w[d][r] = make_uint4(words[0], words[1], words[2], words[3]);
                }
                if constexpr (F == DT_I8) {
                    const char* scale = a.scales + size_t(row0 + r) * a.scale_row_bytes + (col / 128) * 2;
                    asm volatile("ld.global.u16 %0, [%1];" : "=h"(scales[d][r]) : "l"(scale) : "memory");
                }
            } else if constexpr (F == DT_I8) {
                scales[d][r] = 0;
            }
        }
    };
#pragma unroll
    for (int d = 0; d < D; d++) load(d, slice + d * slices);
    wait_for_previous();

    float acc[T][kRows];
#pragma unroll
    for (int t = 0; t < T; t++) {
#pragma unroll
        for (int r = 0; r < kRows; r++) acc[t][r] = 0.f;
    }
    for (uint32_t base = 0; base < passes; base += a.segment) {
        const uint32_t end = min(passes, base + a.segment);
        if (base > 0) __syncthreads();  // the last segment's readers are done
        // Two at a time, both before the first is stored: to the compiler it might be what is read next.
        const uint32_t pieces = (end - base) * W::kPassCols / 8, all = tokens * pieces;
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i < all; i += 2 * blockDim.x) {
            float v[2][8];
            uint32_t t[2], k[2];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const uint32_t at = min(i + n * blockDim.x, all - 1);
                t[n] = T == 1 ? 0 : at / pieces;
                k[n] = 8 * (T == 1 ? at : at % pieces);
                const size_t row = size_t(first + t[n]) * a.inputs;
                load8(a.x, a.x_dtype, row + base * W::kPassCols + k[n], row + a.inputs, v[n]);
            }
#pragma unroll
            for (int n = 0; n < 2; n++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    staged<F, T>(xs, k[n] + 4 * h, t[n]) =
                        make_float4(v[n][4 * h], v[n][4 * h + 1], v[n][4 * h + 2], v[n][4 * h + 3]);
                }
            }
        }
        __syncthreads();
        for (uint32_t p = base + slice; p < end; p += D * slices) {
#pragma unroll
            for (int d = 0; d < D; d++) {
                const uint32_t pass = p + d * slices;
                if (pass >= end) break;
                const float4* x = xs + (pass - base) * T * W::kQuads * 32 + lane;
                if constexpr (F == DT_I8) {
                    float part[T][kRows];
#pragma unroll
                    for (int t = 0; t < T; t++) {
#pragma unroll
                        for (int r = 0; r < kRows; r++) part[t][r] = 0.f;
                    }
#pragma unroll
                    for (int q = 0; q < W::kQuads; q++) {
                        float f[kRows][4];
#pragma unroll
                        for (int r = 0; r < kRows; r++) quad_of<F>(w[d][r], q, f[r]);
#pragma unroll
                        for (int t = 0; t < T; t++) {
                            if (t >= tokens) break;
                            const float4 v = x[(t * W::kQuads + q) * 32];
#pragma unroll
                            for (int r = 0; r < kRows; r++) {
                                part[t][r] = __fmaf_rn(f[r][0], v.x, part[t][r]);
                                part[t][r] = __fmaf_rn(f[r][1], v.y, part[t][r]);
                                part[t][r] = __fmaf_rn(f[r][2], v.z, part[t][r]);
                                part[t][r] = __fmaf_rn(f[r][3], v.w, part[t][r]);
                            }
                        }
                    }
#pragma unroll
                    for (int r = 0; r < kRows; r++) {
                        const float scale = __half2float(__ushort_as_half(scales[d][r]));
#pragma unroll
                        for (int t = 0; t < T; t++) acc[t][r] = __fmaf_rn(scale, part[t][r], acc[t][r]);
                    }
                } else {
#pragma unroll
                    for (int q = 0; q < W::kQuads; q++) {
                        float f[kRows][4];
#pragma unroll
                        for (int r = 0; r < kRows; r++) quad_of<F>(w[d][r], q, f[r]);
#pragma unroll
                        for (int t = 0; t < T; t++) {
                            if (t >= tokens) break;
                            const float4 v = x[(t * W::kQuads + q) * 32];
#pragma unroll
                            for (int r = 0; r < kRows; r++) {
                                acc[t][r] = __fmaf_rn(f[r][0], v.x, acc[t][r]);
                                acc[t][r] = __fmaf_rn(f[r][1], v.y, acc[t][r]);
                                acc[t][r] = __fmaf_rn(f[r][2], v.z, acc[t][r]);
                                acc[t][r] = __fmaf_rn(f[r][3], v.w, acc[t][r]);
                            }
                        }
                    }
                }
                if (pass + D * slices < passes) load(d, pass + D * slices);
            }
        }
    }
#pragma unroll
    for (int t = 0; t < T; t++) {
        const float v = sum_four(acc[t], lane);
        if (lane < kRows) sums[warp][t][lane] = v;
    }
    __syncthreads();
    const uint32_t rows = kWarps / slices * kRows;
    for (uint32_t i = threadIdx.x; i < tokens * rows; i += blockDim.x) {
        const uint32_t t = i / rows, r = i % rows, row = blockIdx.x * rows + r;
        if (row >= a.outputs) continue;
        float v = 0.f;
        for (uint32_t s = 0; s < slices; s++) v += sums[r / kRows * slices + s][t][r % kRows];
        if (a.bias) v = rounded(v, a.y_dtype) + load_as_float(a.bias, a.y_dtype, row);
        store_from_float(a.y, a.y_dtype, size_t(first + t) * a.outputs + row, v);
    }
}

#define GEMV(NAME, F, T, ALIGNED)                                                                                    \
    extern "C" __global__ void __launch_bounds__(32 * kWarps, 2) gemv_##NAME(const __grid_constant__ GemvArgs a) {    \
        gemv<F, T, ALIGNED>(a);                                                                                      \
    }
#define GEMVS(NAME, F)                                                                                               \
    GEMV(NAME##_t1, F, 1, true) GEMV(NAME##_t2, F, 2, true) GEMV(NAME##_t4, F, 4, true) GEMV(NAME##_t8, F, 8, true)

GEMVS(f32, DT_F32)
GEMVS(bf16, DT_BF16)
GEMVS(f16, DT_F16)
GEMVS(int8, DT_I8)
// Of any rows; a block takes one token.
GEMV(f32_unaligned, DT_F32, 1, false)
GEMV(bf16_unaligned, DT_BF16, 1, false)
GEMV(f16_unaligned, DT_F16, 1, false)
