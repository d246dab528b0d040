// What surrounds the experts' matrices: the weighted sum over a token's experts, the gather of opaque records, and small
// things from the host.
#include "record.cuh"

// y[t] = sum over j, in order, of weights[t * k + j] * partial[t * k + j]; grid (columns / 256, tokens).
// `weights` may be null: all ones (the weight went onto the input).
extern "C" __global__ void combine(const float* partial, const float* weights, uint32_t top_k, uint32_t hidden,
                                   uint32_t dtype, void* y) {
    const uint32_t col = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    if (col >= hidden) return;
    float sum = 0.f;
    for (uint32_t j = 0; j < top_k; j++) {
        const size_t a = size_t(token) * top_k + j;
        const float v = partial[a * hidden + col];
        sum = weights ? __fmaf_rn(weights[a], v, sum) : sum + v;
    }
    store_from_float(y, dtype, size_t(token) * hidden + col, sum);
}

// out[a] = the first `bytes` of the record of assignment a; grid (pieces of 4 KiB, items).
extern "C" __global__ void gather(const Item* items, const uint32_t* assignments, uint64_t bytes, char* out) {
    const Item item = items[blockIdx.y];
    const char* src = reinterpret_cast<const char*>(item.src);
    const uint64_t from = uint64_t(blockIdx.x) * 4096, to = min(bytes, from + 4096);
    for (uint32_t i = 0; i < item.count; i++) {
        char* dst = out + assignments[item.first + i] * bytes;
        if (bytes % 16 == 0) {
            for (uint64_t at = from + threadIdx.x * 16; at < to; at += blockDim.x * 16) {
                *reinterpret_cast<uint4*>(dst + at) = *reinterpret_cast<const uint4*>(src + at);
            }
        } else {
            for (uint64_t at = from + threadIdx.x; at < to; at += blockDim.x) dst[at] = src[at];
        }
    }
}

// Copies `pieces` of 16 bytes from page-locked memory. A copy engine would do it behind whatever records are on their way.
extern "C" __global__ void pull(const uint4* from, uint4* to, uint32_t pieces) {
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < pieces; i += gridDim.x * blockDim.x) to[i] = from[i];
}
