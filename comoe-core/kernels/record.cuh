// What every kernel of this crate knows: where the parts of a record lie, which records a launch reads, and how
// activations are encoded. The structs are mirrored in src/backend/cuda/kernels.rs.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

enum Format : int { BF16 = 0, INT8 = 1, INT4 = 2, MXFP4 = 3 };
enum DType : uint32_t { DT_F32 = 0, DT_BF16 = 1, DT_F16 = 2 };
enum ActKind : uint32_t { ACT_SILU = 0, ACT_GELU_TANH = 1, ACT_SWIGLU_CLAMPED = 2 };

// One record of a launch and the assignments (t * top_k + j) that it serves: `assignments[first .. first + count]`.
// Where `dst` is not 0, what is read from `src` is also written there (read-through), and the record's first `ready` bytes
// may be read from `staged` instead, which is nearer; items with count 0 are skipped.
struct Item {
    uint64_t src;
    uint64_t dst;
    uint64_t staged;
    uint32_t first;
    uint32_t count;
    uint32_t ready;
    uint32_t unused;
    uint64_t span;  // where the time is taken down in which it is read through; 0: it is not
};

struct Matrix {
    uint64_t weights;
    uint64_t scales;
    uint32_t rows;
    uint32_t cols;
    uint32_t row_bytes;
    uint32_t scale_row_bytes;
};

struct Record {
    Matrix gate;
    Matrix up;
    Matrix down;
    uint64_t gate_bias;
    uint64_t up_bias;
    uint64_t down_bias;
    uint64_t tail;  // end of the down scales: biases and padding follow
    uint64_t bytes;
    uint32_t has_bias;
    uint32_t group_shift;  // log2 of the group size
};

struct Activation {
    uint32_t kind;
    float limit;
    float alpha;
};

// What a matrix is multiplied with.
struct Input {
    const void* data;           // [rows, cols] of `dtype`
    const float* row_weights;   // per assignment, or null
    uint32_t dtype;
    uint32_t per_row;           // assignments per row: top_k for x, 1 for h
};

// E8M0: 2^(byte - 127).
__device__ __forceinline__ float power_of_two(uint32_t byte) {
    return __uint_as_float(byte == 0 ? 1u << 22 : byte << 23);
}

// The scale of a group of a row.
template <int F>
__device__ __forceinline__ float scale_at(const char* scales, uint32_t group) {
    if constexpr (F == MXFP4) {
        return power_of_two(reinterpret_cast<const uint8_t*>(scales)[group]);
    } else {
        return __half2float(reinterpret_cast<const __half*>(scales)[group]);
    }
}

__device__ __forceinline__ void store_from_float(void* p, uint32_t dtype, size_t i, float v) {
    switch (dtype) {
        case DT_BF16: static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(v); break;
        case DT_F16: static_cast<__half*>(p)[i] = __float2half_rn(v); break;
        default: static_cast<float*>(p)[i] = v;
    }
}

__device__ __forceinline__ float sigmoid(float v) { return 1.f / (1.f + expf(-v)); }

__device__ __forceinline__ float activate(const Activation act, float g, float u) {
    switch (act.kind) {
        case ACT_GELU_TANH:
            return 0.5f * g * (1.f + tanhf(0.7978845608028654f * (g + 0.044715f * g * g * g))) * u;
        case ACT_SWIGLU_CLAMPED:
            // NaN must stay NaN, which fminf and fmaxf would drop.
            g = g > act.limit ? act.limit : g;
            u = u > act.limit ? act.limit : (u < -act.limit ? -act.limit : u);
            return (u + 1.f) * g * sigmoid(act.alpha * g);
        default: return g / (1.f + expf(-g)) * u;
    }
}

// As src/backend/cuda/kernels.rs counts them.
static_assert(sizeof(Item) == 48 && sizeof(Matrix) == 32 && sizeof(Record) == 144, "mirrored structs");
static_assert(sizeof(Input) == 24 && sizeof(Activation) == 12, "mirrored structs");
