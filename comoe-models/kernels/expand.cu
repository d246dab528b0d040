// An INT8 matrix as the model's dtype has it, for products of many tokens.
#include "common.cuh"

struct ExpandArgs {
    const char* weights;  // rows of q, row_bytes apart
    const char* scales;   // rows of f16, scale_row_bytes apart; one for 128 columns
    void* out;            // [rows, inputs] of dtype
    uint64_t row_bytes, scale_row_bytes;
    uint32_t rows, inputs, dtype, pad;
};
static_assert(sizeof(ExpandArgs) == 56, "mirrored structs");

// Eight columns a thread: rows of q are padded to 16 bytes, so eight of them are always there.
extern "C" __global__ void __launch_bounds__(256) expand_int8(const __grid_constant__ ExpandArgs a) {
    const uint32_t pieces = (a.inputs + 7) / 8;
    const size_t piece = size_t(blockIdx.x) * blockDim.x + threadIdx.x, row = piece / pieces;
    const uint32_t col = 8 * uint32_t(piece % pieces);
    if (row >= a.rows) return;
    const uint2 q = *reinterpret_cast<const uint2*>(a.weights + row * a.row_bytes + col);
    const float scale = __half2float(*reinterpret_cast<const __half*>(a.scales + row * a.scale_row_bytes + col / 128 * 2));
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = scale * float(int8_t((i < 4 ? q.x : q.y) >> (8 * (i % 4))));
    store8(a.out, a.dtype, row * a.inputs + col, (row + 1) * a.inputs, v);
}
