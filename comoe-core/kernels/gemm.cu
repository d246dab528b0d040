// gate_up and down for many tokens: a grouped GEMM over BF16 records (stored so, or dequantised on load). Operands
// are BF16 (x and h are rounded), sums F32.
//
// A block computes 64 assignments x 64 weight rows (gate_up: 32 gate rows and the 32 up rows beside them) of one item;
// 4 warps, 32 x 32 each, K in steps of 32 through shared memory, the next step's loads under way meanwhile.
#include <mma.h>

#include "record.cuh"

namespace wmma = nvcuda::wmma;

__device__ __forceinline__ float load_as_float(const void* p, uint32_t dtype, size_t i) {
    switch (dtype) {
        case DT_BF16: return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
        case DT_F16: return __half2float(static_cast<const __half*>(p)[i]);
        default: return static_cast<const float*>(p)[i];
    }
}

__device__ __forceinline__ float input_at(const Input& in, uint32_t assignment, uint32_t cols, uint32_t col) {
    const float v = load_as_float(in.data, in.dtype, size_t(assignment / in.per_row) * cols + col);
    return in.row_weights ? v * in.row_weights[assignment] : v;
}

template <bool GATE_UP>
__device__ __forceinline__ void grouped_gemm(const Item* items, const uint32_t* assignments, const Record& rec,
                                             const Input& in, const Activation act, float* out) {
    constexpr int kTile = 64, kStep = 32, kStride = kStep + 8, kOutStride = kTile + 4, kThreads = 128;
    const Item item = items[blockIdx.z];
    const uint32_t first = blockIdx.y * kTile;
    if (first >= item.count) return;
    const uint32_t count = min(uint32_t(kTile), item.count - first);

    __shared__ __align__(128) __nv_bfloat16 a_tile[kTile * kStride];
    __shared__ __align__(128) __nv_bfloat16 b_tile[kTile * kStride];
    __shared__ __align__(128) float c_tile[kTile * kOutStride];
    __shared__ uint32_t ids[kTile];

    const Matrix& m0 = GATE_UP ? rec.gate : rec.down;
    const Matrix& m1 = GATE_UP ? rec.up : rec.down;
    constexpr uint32_t kHalf = GATE_UP ? kTile / 2 : kTile;
    const uint32_t row0 = blockIdx.x * kHalf, rows = m0.rows, cols = m0.cols;
    const char* src = reinterpret_cast<const char*>(item.src);
    if (threadIdx.x < kTile) ids[threadIdx.x] = threadIdx.x < count ? assignments[item.first + first + threadIdx.x] : 0;
    __syncthreads();

    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, wy = warp / 2 * 32, wx = warp % 2 * 32;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> acc[2][2];
    for (auto& row : acc) {
        for (auto& fragment : row) wmma::fill_fragment(fragment, 0.f);
    }

    float a_next[kTile * kStep / kThreads];
    uint4 b_next[2];
    auto load = [&](uint32_t k0) {
#pragma unroll
        for (int i = 0; i < kTile * kStep / kThreads; i++) {
            const uint32_t r = warp + 4 * i, k = k0 + lane;
            a_next[i] = r < count && k < cols ? input_at(in, ids[r], cols, k) : 0.f;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t at = threadIdx.x + i * kThreads, r = at / 4, byte = (k0 + at % 4 * 8) * 2;
            const Matrix& m = GATE_UP && r >= kHalf ? m1 : m0;
            const uint32_t row = row0 + r % kHalf;
            b_next[i] = make_uint4(0, 0, 0, 0);
            if (row < rows && byte < m.row_bytes) {
                b_next[i] = *reinterpret_cast<const uint4*>(src + m.weights + uint64_t(row) * m.row_bytes + byte);
            }
        }
    };

    load(0);
    for (uint32_t k0 = 0; k0 < cols; k0 += kStep) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kTile * kStep / kThreads; i++) {
            a_tile[(warp + 4 * i) * kStride + lane] = __float2bfloat16_rn(a_next[i]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t at = threadIdx.x + i * kThreads;
            *reinterpret_cast<uint4*>(&b_tile[at / 4 * kStride + at % 4 * 8]) = b_next[i];
        }
        __syncthreads();
        if (k0 + kStep < cols) load(k0 + kStep);
#pragma unroll
        for (int k = 0; k < kStep; k += 16) {
            wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> a[2];
            wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::col_major> b[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                wmma::load_matrix_sync(a[i], &a_tile[(wy + 16 * i) * kStride + k], kStride);
                wmma::load_matrix_sync(b[i], &b_tile[(wx + 16 * i) * kStride + k], kStride);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int j = 0; j < 2; j++) wmma::mma_sync(acc[i][j], a[i], b[j], acc[i][j]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            wmma::store_matrix_sync(&c_tile[(wy + 16 * i) * kOutStride + wx + 16 * j], acc[i][j], kOutStride,
                                    wmma::mem_row_major);
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < count * kHalf; i += kThreads) {
        const uint32_t t = i / kHalf, r = i % kHalf, row = row0 + r;
        if (row >= rows) continue;
        float v = c_tile[t * kOutStride + r];
        if constexpr (GATE_UP) {
            float up = c_tile[t * kOutStride + kHalf + r];
            if (rec.has_bias) {
                v += reinterpret_cast<const float*>(src + rec.gate_bias)[row];
                up += reinterpret_cast<const float*>(src + rec.up_bias)[row];
            }
            v = activate(act, v, up);
        } else if (rec.has_bias) {
            v += reinterpret_cast<const float*>(src + rec.down_bias)[row];
        }
        out[size_t(ids[t]) * rows + row] = v;
    }
}

// Grid (rows / 32, assignments of the largest item / 64, items).
extern "C" __global__ void __launch_bounds__(128) gemm_gate_up(const Item* items, const uint32_t* assignments,
                                                               const Record rec, const Input in, const Activation act,
                                                               float* h) {
    grouped_gemm<true>(items, assignments, rec, in, act, h);
}

// Grid (rows / 64, assignments of the largest item / 64, items).
extern "C" __global__ void __launch_bounds__(128) gemm_down(const Item* items, const uint32_t* assignments,
                                                            const Record rec, const Input in, const Activation act,
                                                            float* partial) {
    grouped_gemm<false>(items, assignments, rec, in, act, partial);
}
