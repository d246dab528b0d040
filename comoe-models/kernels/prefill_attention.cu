// Attention of many queries over the KV cache, on tensor cores, without a matrix of scores: Dao 2023
// (FlashAttention-2, arXiv 2307.08691). Memory beside the result: none.
//
// A block takes 64 queries of one head, 16 a warp, and walks the keys that they see in tiles of 64 that begin at
// multiples of 64, the next tile's copies under way meanwhile. Running maximum and sum of a row are F32, probabilities
// are rounded to BF16 for the product with values, as candle's path does. A row's bits depend on its position and on
// what it sees: keys that it does not see, in tiles that others need, add nothing to it exactly.
//
// An INT8 cache's whole numbers are exact in BF16, so tiles are made of them, and a key's scale goes onto its scores and
// its value's onto its probabilities: attention is of the numbers that decoding reads, nothing is rounded besides.
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace prefill {

constexpr int kQueries = 64, kKeys = 64, kThreads = 128;

struct Args {
    const __nv_bfloat16* q;  // [heads, tokens, D], heads `q_head` elements apart
    const void* k;  // [kv_heads, position + tokens, D] of BF16 or INT8, heads `k_head`, rows `k_row` elements apart
    const void* v;
    const __half *k_scales, *v_scales;  // of INT8: [kv_heads, position + tokens], heads `scale_head` elements apart
    const float* sinks;  // [heads]: a logit that takes part in the softmax and brings no value; or null
    __nv_bfloat16* out;  // [tokens, heads * D]
    uint64_t q_head, k_head, k_row, v_head, v_row, scale_head;
    float scale;
    uint32_t tokens, position, group;  // heads per key head
    uint32_t mask, mask_size;          // 0 causal, 1 the last `mask_size`, 2 those of the chunk of `mask_size`
};

static_assert(sizeof(Args) == 128, "mirrored struct");

__device__ __forceinline__ uint32_t first_seen(const Args& a, uint32_t position) {
    if (a.mask == 1) return position + 1 > a.mask_size ? position + 1 - a.mask_size : 0;
    return a.mask == 2 ? position - position % a.mask_size : 0;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes, of which `bytes` are read and the rest is zero.
__device__ __forceinline__ void copy_chunk(char* to, const void* from, uint32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
}

// Four 8 x 8 matrices whose rows the lanes point at, eight lanes each.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const char* row) {
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(row))
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(row))
                     : "memory");
    }
}

__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float exp2_fast(float v) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

__device__ __forceinline__ uint32_t pack(float a, float b) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&v);
}

// Four signed bytes as BF16.
__device__ __forceinline__ uint2 integers(uint32_t bytes) {
    float f[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // 2^23 + 128 + the byte.
        f[i] = __uint_as_float(__byte_perm(bytes ^ 0x80808080u, 0x4b000000u, 0x7440 + i)) - 8388736.f;
    }
    return make_uint2(pack(f[0], f[1]), pack(f[2], f[3]));
}

template <int D, bool INT8>
__device__ __forceinline__ void attend(const Args& a) {
    constexpr int kChunks = D / 8, kTile = kKeys * D * 2, kBytes = INT8 ? 1 : 2, kCopies = D * kBytes / 16;
    // Tiles in BF16, keys and values: two of each in turn, or one, behind it the next one's bytes, and scales.
    constexpr int kRaw = kKeys * D;
    extern __shared__ uint4 prefill_shared[];
    char* const shared = reinterpret_cast<char*>(prefill_shared);
    const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
    // Late queries see most keys: theirs are the blocks that start first.
    const uint32_t block = (gridDim.x - 1 - blockIdx.x) * kQueries, head = blockIdx.y, kv = head / a.group;
    const uint32_t row = block + warp * 16 + g;  // and row + 8
    const uint32_t block_end = min(block + kQueries, a.tokens);
    const char* k = static_cast<const char*>(a.k) + kv * a.k_head * kBytes;
    const char* v = static_cast<const char*>(a.v) + kv * a.v_head * kBytes;
    float* const scales = reinterpret_cast<float*>(shared + 2 * kTile + 2 * kRaw);  // keys', then values'
    static_assert(kThreads == 2 * kKeys, "a thread a scale");
    const __half* own_scale = (tid < kKeys ? a.k_scales : a.v_scales) + kv * a.scale_head;
    float next_scale = 0.f;

    uint32_t q[D / 16][4];
#pragma unroll
    for (int d = 0; d < D / 16; d++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t r = row + i % 2 * 8;
            const __nv_bfloat16* at = a.q + head * a.q_head + size_t(r) * D + d * 16 + 2 * t + i / 2 * 8;
            q[d][i] = r < a.tokens ? *reinterpret_cast<const uint32_t*>(at) : 0;
        }
    }

    const uint32_t begin = first_seen(a, a.position + block) / kKeys * kKeys, end = a.position + block_end;
    const uint32_t tiles = (end - begin + kKeys - 1) / kKeys;
    // A chunk lies where its number and its row's differ, so that eight rows at one column are in eight banks.
    auto place = [](uint32_t r, uint32_t chunk) { return (r * kChunks + (chunk ^ (r & 7))) * 16; };
    auto load = [&](uint32_t tile) {
        char* to = shared + (INT8 ? 2 * kTile : tile % 2 * (2 * kTile));
#pragma unroll
        for (int i = 0; i < kKeys * kCopies / kThreads; i++) {
            const uint32_t at = tid + i * kThreads, r = at / kCopies, chunk = at % kCopies;
            const uint32_t key = begin + tile * kKeys + r, bytes = key < end ? 16 : 0;
            const uint32_t where = INT8 ? 16 * at : place(r, chunk);
            const size_t from = bytes ? key : begin;
            copy_chunk(to + where, k + from * a.k_row * kBytes + chunk * 16, bytes);
            copy_chunk(to + (INT8 ? kRaw : kTile) + where, v + from * a.v_row * kBytes + chunk * 16, bytes);
        }
        if constexpr (INT8) {
            const uint32_t key = begin + tile * kKeys + tid % kKeys;
            next_scale = key < end ? __half2float(own_scale[key]) : 0.f;
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };

    constexpr float kLog2e = 1.4426950408889634f;
    const float scale = a.scale * kLog2e;
    const float sink = a.sinks ? a.sinks[head] * kLog2e : 0.f;
    float o[D / 8][4] = {};
    float most[2], sum[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        most[i] = a.sinks ? sink : -INFINITY;
        // Each of a row's four lanes has a quarter of the sum.
        sum[i] = a.sinks && t == 0 ? 1.f : 0.f;
    }

    load(0);
    for (uint32_t tile = 0; tile < tiles; tile++) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        // This tile has arrived for all, and the other buffer has been read by all.
        __syncthreads();
        if constexpr (INT8) {
#pragma unroll
            for (int i = 0; i < 2 * kKeys * kCopies / kThreads; i++) {
                const uint32_t at = tid + i * kThreads, r = at / kCopies, chunk = at % kCopies;
                const uint4 raw = *reinterpret_cast<const uint4*>(shared + 2 * kTile + 16 * at);
                const uint2 w[4] = {integers(raw.x), integers(raw.y), integers(raw.z), integers(raw.w)};
                char* to = shared + r / kKeys * kTile;
                auto put = [&](uint32_t chunk, uint2 low, uint2 high) {
                    *reinterpret_cast<uint4*>(to + place(r % kKeys, chunk)) = make_uint4(low.x, low.y, high.x, high.y);
                };
                put(2 * chunk, w[0], w[1]);
                put(2 * chunk + 1, w[2], w[3]);
            }
            scales[tid] = next_scale;
            __syncthreads();
        }
        if (tile + 1 < tiles) load(tile + 1);
        const char* keys = shared + (INT8 ? 0 : tile % 2 * (2 * kTile));
        const char* values = keys + kTile;

        float s[kKeys / 8][4] = {};
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
#pragma unroll
            for (int n = 0; n < kKeys / 16; n++) {
                uint32_t b[4];
                const uint32_t r = n * 16 + lane / 16 * 8 + lane % 8, chunk = 2 * d + lane / 8 % 2;
                load_matrices<false>(b, keys + place(r, chunk));
                multiply(s[2 * n], q[d], b[0], b[1]);
                multiply(s[2 * n + 1], q[d], b[2], b[3]);
            }
        }
        if constexpr (INT8) {
#pragma unroll
            for (int n = 0; n < kKeys / 8; n++) {
                const float2 f = *reinterpret_cast<const float2*>(scales + n * 8 + 2 * t);
                s[n][0] *= f.x, s[n][1] *= f.y, s[n][2] *= f.x, s[n][3] *= f.y;
            }
        }

        const uint32_t from = begin + tile * kKeys, least = a.position + block + warp * 16;
        // Does any of the warp's rows not see all of the tile?
        if (from + kKeys - 1 > least || from < first_seen(a, least + 15)) {
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const uint32_t position = a.position + row + 8 * side, first = first_seen(a, position);
#pragma unroll
                for (int n = 0; n < kKeys / 8; n++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const uint32_t key = from + n * 8 + 2 * t + i;
                        if (key > position || key < first) s[n][2 * side + i] = -INFINITY;
                    }
                }
            }
        }
#pragma unroll
        for (int side = 0; side < 2; side++) {
            float top = -INFINITY;
#pragma unroll
            for (int n = 0; n < kKeys / 8; n++) top = fmaxf(top, fmaxf(s[n][2 * side], s[n][2 * side + 1]));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            const float now = fmaxf(most[side], top * scale), base = now == -INFINITY ? 0.f : now;
            const float shrink = exp2_fast(most[side] - base);
            most[side] = now;
            float added = 0.f;
#pragma unroll
            for (int n = 0; n < kKeys / 8; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float& p = s[n][2 * side + i];
                    p = exp2_fast(__fmaf_rn(p, scale, -base));
                    added += p;
                }
            }
            sum[side] = __fmaf_rn(sum[side], shrink, added);
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                o[n][2 * side] *= shrink;
                o[n][2 * side + 1] *= shrink;
            }
        }
        if constexpr (INT8) {
#pragma unroll
            for (int n = 0; n < kKeys / 8; n++) {
                const float2 f = *reinterpret_cast<const float2*>(scales + kKeys + n * 8 + 2 * t);
                s[n][0] *= f.x, s[n][1] *= f.y, s[n][2] *= f.x, s[n][3] *= f.y;
            }
        }

#pragma unroll
        for (int n = 0; n < kKeys / 16; n++) {
            const uint32_t p[4] = {pack(s[2 * n][0], s[2 * n][1]), pack(s[2 * n][2], s[2 * n][3]),
                                   pack(s[2 * n + 1][0], s[2 * n + 1][1]), pack(s[2 * n + 1][2], s[2 * n + 1][3])};
#pragma unroll
            for (int d = 0; d < D / 16; d++) {
                uint32_t b[4];
                const uint32_t r = n * 16 + lane / 8 % 2 * 8 + lane % 8, chunk = 2 * d + lane / 16;
                load_matrices<true>(b, values + place(r, chunk));
                multiply(o[2 * d], p, b[0], b[1]);
                multiply(o[2 * d + 1], p, b[2], b[3]);
            }
        }
    }

    const size_t width = size_t(gridDim.y) * D;
#pragma unroll
    for (int side = 0; side < 2; side++) {
        float total = sum[side];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        const uint32_t r = row + 8 * side;
        if (r >= a.tokens) continue;
        const float factor = 1.f / total;
        __nv_bfloat16* out = a.out + r * width + head * D;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            *reinterpret_cast<uint32_t*>(out + n * 8 + 2 * t) =
                pack(o[n][2 * side] * factor, o[n][2 * side + 1] * factor);
        }
    }
}

}  // namespace prefill

// Grid (tokens / 64, heads), 128 threads, 512 D bytes of shared memory, or 384 D + 512 for INT8.
#define PREFILL_ATTENTION(NAME, D, INT8)                                                                             \
    extern "C" __global__ void __launch_bounds__(128) prefill_attention_##NAME##D(const prefill::Args args) {        \
        prefill::attend<D, INT8>(args);                                                                              \
    }
PREFILL_ATTENTION(, 64, false)
PREFILL_ATTENTION(, 128, false)
PREFILL_ATTENTION(int8_, 64, true)
PREFILL_ATTENTION(int8_, 128, true)
