// INT8 KV caches and steps of many tokens: a prompt's keys or values go in, and cached rows come out as the whole numbers
// that they are, for products whose scales are applied outside.
#include "int8_row.cuh"

struct KeepArgs {
    const void* from;  // [heads, tokens, width] of dtype, rows without gaps
    int8_t* q;         // [heads, capacity, width]
    __half* scales;    // [heads, capacity]
    uint64_t from_head_stride, from_row_stride;  // in elements
    uint32_t tokens, width, capacity, position, dtype, pad;
};
static_assert(sizeof(KeepArgs) == 64, "mirrored structs");

// grid: (tokens / 4 rounded up, heads); block: four warps, a row each.
extern "C" __global__ void __launch_bounds__(128) keep_int8(const __grid_constant__ KeepArgs a) {
    const uint32_t token = blockIdx.x * 4 + threadIdx.x / 32, head = blockIdx.y;
    if (token >= a.tokens) return;
    const size_t from = head * a.from_head_stride + token * a.from_row_stride;
    const size_t row = size_t(head) * a.capacity + a.position + token;
    auto value = [&](uint32_t i) { return load_as_float(a.from, a.dtype, from + i); };
    keep_int8_row(value, a.width, a.q + row * a.width, a.scales + row);
}

struct IntegersArgs {
    const int8_t* q;  // [heads, rows, width]
    void* out;        // the same without gaps, of dtype
    uint64_t head_stride, row_stride;  // in elements
    uint32_t rows, width, dtype, pad;
};
static_assert(sizeof(IntegersArgs) == 48, "mirrored structs");

// grid: (rows x pieces of 8 columns / 256 rounded up, heads).
extern "C" __global__ void __launch_bounds__(256) int8_integers(const __grid_constant__ IntegersArgs a) {
    const uint32_t pieces = (a.width + 7) / 8;
    const size_t piece = size_t(blockIdx.x) * blockDim.x + threadIdx.x, row = piece / pieces;
    const uint32_t col = 8 * uint32_t(piece % pieces), head = blockIdx.y;
    if (row >= a.rows) return;
    const int8_t* q = a.q + head * a.head_stride + row * a.row_stride + col;
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = col + i < a.width ? float(q[i]) : 0.f;
    const size_t to = (head * size_t(a.rows) + row) * a.width;
    store8(a.out, a.dtype, to + col, to + a.width, v);
}
