// Dequant on load: a record of any format becomes a BF16 record of the same expert.
#include "spans.cuh"

__device__ __forceinline__ uint32_t pack_bf16(float a, float b) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&v);
}

// The number of an E2M1 code, the low four bits: exponent and mantissa where an f32 has them, times 2^126.
__device__ __forceinline__ float e2m1(uint32_t code) {
    return __uint_as_float((code & 7) << 22 | (code & 8) << 28) * 0x1p126f;
}

// Eight columns from 8 * piece on.
template <int F>
__device__ __forceinline__ uint4 dequant8(const char* row, const char* scales, uint32_t piece, uint32_t cols,
                                          uint32_t group_shift) {
    if constexpr (F == BF16) {
        return *reinterpret_cast<const uint4*>(row + size_t(piece) * 16);
    } else {
        const uint32_t col = piece * 8;
        const float scale = scale_at<F>(scales, col >> group_shift);
        float v[8];
        if constexpr (F == INT4) {
            const uint32_t w = reinterpret_cast<const uint32_t*>(row)[piece];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[2 * i] = float(int((w >> (4 * i)) & 15) - 8) * scale;
                v[2 * i + 1] = float(int((w >> (16 + 4 * i)) & 15) - 8) * scale;
            }
        } else if constexpr (F == MXFP4) {
            const uint32_t w = reinterpret_cast<const uint32_t*>(row)[piece];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[2 * i] = e2m1(w >> (4 * i)) * scale;
                v[2 * i + 1] = e2m1(w >> (16 + 4 * i)) * scale;
            }
        } else {
            const uint2 w = reinterpret_cast<const uint2*>(row)[piece];
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = float(int8_t((i < 4 ? w.x : w.y) >> (8 * (i % 4)))) * scale;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (col + i >= cols) v[i] = 0.f;  // padding of a record is zero
        }
        return make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
    }
}

// One row of gate, up or down, in this order; the last one is biases and padding.
template <int F>
__device__ __forceinline__ void dequant_row(const Item& item, const Record& from, const Record& to, uint32_t row) {
    const char* src = reinterpret_cast<const char*>(item.src);
    char* dst = reinterpret_cast<char*>(item.dst);
    const uint32_t inner = from.gate.rows;
    if (row == 2 * inner + from.down.rows) {
        // Biases follow in the same order, so they lie equally far behind `tail` in both layouts.
        const uint64_t biases = from.has_bias ? from.down_bias + 4ull * from.down.rows - from.tail : 0;
        for (uint64_t at = threadIdx.x * 4; at < to.bytes - to.tail; at += blockDim.x * 4) {
            *reinterpret_cast<uint32_t*>(dst + to.tail + at) =
                at < biases ? *reinterpret_cast<const uint32_t*>(src + from.tail + at) : 0u;
        }
        return;
    }
    const Matrix *a = &from.gate, *b = &to.gate;
    if (row >= 2 * inner) {
        row -= 2 * inner;
        a = &from.down;
        b = &to.down;
    } else if (row >= inner) {
        row -= inner;
        a = &from.up;
        b = &to.up;
    }
    const char* weights = src + a->weights + uint64_t(row) * a->row_bytes;
    const char* scales = src + a->scales + uint64_t(row) * a->scale_row_bytes;
    uint4* out = reinterpret_cast<uint4*>(dst + b->weights + uint64_t(row) * b->row_bytes);
    for (uint32_t piece = threadIdx.x; piece < b->row_bytes / 16; piece += blockDim.x) {
        out[piece] = dequant8<F>(weights, scales, piece, a->cols, from.group_shift);
    }
}

// Items' records from `src` (laid out as `from`) to `dst` (laid out as `to`, BF16); grid (up to 2 I + H + 1, items).
template <int F>
__device__ __forceinline__ void dequant(const Item* items, const Record& from, const Record& to) {
    const Item item = items[blockIdx.y];
    if (item.dst == 0) return;
    const bool tells = threadIdx.x % 32 == 0;
    if (tells) reading_begins(items + blockIdx.y);
    const uint32_t rows = 2 * from.gate.rows + from.down.rows + 1;
    for (uint32_t row = blockIdx.x; row < rows; row += gridDim.x) dequant_row<F>(item, from, to, row);
    if (tells) reading_ends(items + blockIdx.y);
}

extern "C" __global__ void dequant_bf16(const Item* items, const Record from, const Record to) {
    dequant<BF16>(items, from, to);
}
extern "C" __global__ void dequant_int8(const Item* items, const Record from, const Record to) {
    dequant<INT8>(items, from, to);
}
extern "C" __global__ void dequant_int4(const Item* items, const Record from, const Record to) {
    dequant<INT4>(items, from, to);
}
extern "C" __global__ void dequant_mxfp4(const Item* items, const Record from, const Record to) {
    dequant<MXFP4>(items, from, to);
}
