// Attention of few tokens over a KV cache (flash-decoding). The sequence is cut into pieces of kPiece keys, wherever
// it ends; a block makes one piece's softmax and weighted sum of values for up to G query heads of a key head, so keys
// and values are read once for these; a second kernel adds the pieces up in a fixed order. A token's bits depend on
// its queries and on the rows it sees: not on other tokens, the cache's capacity or how many blocks there are.
#include "common.cuh"

struct AttendArgs {
    const void* q;  // [heads, tokens, key_width] of dtype
    const void *k, *v;
    const __half *k_scales, *v_scales;  // [kv_heads, capacity], of an INT8 cache
    const float* sinks;                 // [heads], or null
    const uint32_t* position;           // of the first token
    void* out;                          // [tokens, heads * value_width] of dtype
    float* sums;                        // [tokens, heads, pieces, value_width]
    float2* tops;                       // [tokens, heads, pieces]: greatest score, sum of exponentials
    uint32_t* error;
    uint64_t k_head_stride, v_head_stride;  // in elements, as the next two
    uint32_t k_row_stride, v_row_stride, heads, kv_heads, key_width, value_width, tokens, capacity, dtype;
    uint32_t mask;    // 0: causal, 1: the last `span` keys, 2: those of a chunk of `span`
    uint32_t span;
    uint32_t reach;   // positions are below this
    uint32_t pieces;  // that a token can see
    uint32_t vectors;  // whether every row can be read 16 bytes at a time (8 of an INT8 row)
    float scale;
    uint32_t pad;
};
static_assert(sizeof(AttendArgs) == 168, "mirrored structs");

constexpr int kPiece = 64, kAttendWarps = 8, kKeys = kPiece / kAttendWarps, kCombineWarps = 16;

__device__ __forceinline__ uint32_t first_seen(const AttendArgs& a, uint32_t position) {
    if (a.mask == 1) return position + 1 > a.span ? position + 1 - a.span : 0;
    if (a.mask == 2) return position - position % a.span;
    return 0;
}

// Eight elements of a cached row as they lie there.
template <int F>
struct Eight {
    static constexpr int kWords = F == DT_F32 ? 8 : F == DT_I8 ? 2 : 4, kSize = F == DT_F32 ? 4 : F == DT_I8 ? 1 : 2;
    uint32_t w[kWords];

    __device__ __forceinline__ void load(const void* base, size_t at, uint32_t col, uint32_t width, bool vectors) {
#pragma unroll
        for (int i = 0; i < kWords; i++) w[i] = 0;
        if (col >= width) return;
        const char* p = static_cast<const char*>(base) + at * kSize;
        if (!vectors) {
            // A loop: see load8 in common.cuh.
            constexpr uint32_t kEach = 4 / kSize;
            const uint32_t n = min(8u, width - col);
#pragma unroll 1
            for (uint32_t i = 0; i < n; i++) {
                uint32_t e;
                if constexpr (F == DT_F32) {
                    e = reinterpret_cast<const uint32_t*>(p)[i];
                } else if constexpr (F == DT_I8) {
                    e = reinterpret_cast<const uint8_t*>(p)[i];
                } else {
                    e = reinterpret_cast<const uint16_t*>(p)[i];
                }
                e <<= 8 * kSize * (i % kEach);
#pragma unroll
                for (uint32_t k = 0; k < kWords; k++) w[k] |= k == i / kEach ? e : 0;
            }
        } else if constexpr (F == DT_I8) {
            asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p) : "memory");
        } else {
#pragma unroll
            for (int h = 0; h < kWords / 4; h++) {
                const uint4 x = load_stream(p + 16 * h);
#pragma unroll
                for (int i = 0; i < 4; i++) w[4 * h + i] = word(x, i);
            }
        }
    }

    __device__ __forceinline__ void floats(float (&f)[8]) const {
        if constexpr (F == DT_F32) {
#pragma unroll
            for (int i = 0; i < 8; i++) f[i] = __uint_as_float(w[i]);
        } else if constexpr (F == DT_I8) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const uint32_t v = w[i / 4] ^ 0x80808080u;
                f[i] = __uint_as_float(__byte_perm(v, 0x4b000000u, 0x7440 + i % 4)) - 8388736.f;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 t = two_floats(w[i], F);
                f[2 * i] = t.x;
                f[2 * i + 1] = t.y;
            }
        }
    }
};

// A lane's columns of G queries, all loads under way before the first is waited for.
template <int C, int G, typename E>
__device__ __forceinline__ void load_queries(const AttendArgs& a, uint32_t head0, uint32_t heads, uint32_t token,
                                             uint32_t column, uint32_t lanes, float (&q)[G][C][8]) {
    constexpr int kLoads = sizeof(E) / 2;
    const E* from = static_cast<const E*>(a.q);
    if (a.key_width % 8 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
        uint4 raw[G][C][kLoads];
#pragma unroll
        for (int g = 0; g < G; g++) {
            // An idle head reads the first one's row, a lane beyond the row its beginning.
            const E* row = from + (size_t(head0 + (g < heads ? g : 0)) * a.tokens + token) * a.key_width;
#pragma unroll
            for (int c = 0; c < C; c++) {
                const uint32_t col = (c * lanes + column) * 8;
#pragma unroll
                for (int l = 0; l < kLoads; l++) {
                    raw[g][c][l] = reinterpret_cast<const uint4*>(row + (col < a.key_width ? col : 0))[l];
                }
            }
        }
#pragma unroll
        for (int g = 0; g < G; g++) {
#pragma unroll
            for (int c = 0; c < C; c++) {
                const bool there = g < heads && (c * lanes + column) * 8 < a.key_width;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    q[g][c][i] = there ? to_float(reinterpret_cast<const E*>(raw[g][c])[i]) : 0.f;
                }
            }
        }
        return;
    }
#pragma unroll
    for (int g = 0; g < G; g++) {
        const size_t row = (size_t(head0 + g) * a.tokens + token) * a.key_width;
#pragma unroll
        for (int c = 0; c < C; c++) {
            const uint32_t col = (c * lanes + column) * 8;
            load8(from, row + col, row + (g < heads ? max(col, a.key_width) : col), q[g][c]);
        }
    }
}

// L lanes share a row, each with C pieces of 8 columns; G heads.
template <int F, int L, int C, int G>
__device__ __forceinline__ void attend(const AttendArgs& a) {
    constexpr int kAtOnce = 32 / L, kTurns = kKeys / kAtOnce, kWidth = L * C * 8;
    // Everything in registers before the first use, where it fits.
    constexpr int kHeld = C * Eight<F>::kWords * kTurns <= 32 ? kTurns : 1;
    // Values, too, are asked for before the keys are used, where there are registers for both.
    constexpr bool kAhead = kHeld == kTurns && G <= 4 && C * Eight<F>::kWords * kTurns <= 16;
    extern __shared__ float4 piece_shared[];
    float* sums = reinterpret_cast<float*>(piece_shared);  // [kAttendWarps][G][kWidth]
    __shared__ __align__(16) float scores[kPiece][G];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane / L, column = lane % L;
    const uint32_t group = a.heads / a.kv_heads, blocks = (group + G - 1) / G;
    const uint32_t kv = blockIdx.y / blocks, head0 = kv * group + blockIdx.y % blocks * G;
    const uint32_t heads = min(uint32_t(G), (kv + 1) * group - head0), token = blockIdx.z;
    let_next_start();
    wait_for_previous();
    // Queries and position are asked for together. They are of the cache's type, where that is none of its own.
    float q[G][C][8];
    if constexpr (F == DT_BF16) {
        load_queries<C, G, __nv_bfloat16>(a, head0, heads, token, column, L, q);
    } else if constexpr (F == DT_F16) {
        load_queries<C, G, __half>(a, head0, heads, token, column, L, q);
    } else if (F == DT_F32 || a.dtype == DT_F32) {
        load_queries<C, G, float>(a, head0, heads, token, column, L, q);
    } else if (a.dtype == DT_BF16) {
        load_queries<C, G, __nv_bfloat16>(a, head0, heads, token, column, L, q);
    } else {
        load_queries<C, G, __half>(a, head0, heads, token, column, L, q);
    }
    const uint32_t position = *a.position + token;
    if (position < token || position >= a.reach) {
        if (threadIdx.x == 0) *a.error = 1 + token;
        return;
    }
    const uint32_t first = first_seen(a, position), first_piece = first / kPiece;
    const uint32_t count = position / kPiece - first_piece + 1;
    if (blockIdx.x >= count) return;

    for (uint32_t piece = blockIdx.x; piece < count; piece += gridDim.x) {
        const uint32_t key0 = (first_piece + piece) * kPiece + warp * kKeys + part;
        auto seen = [&](uint32_t key) { return key >= first && key <= position; };
        auto fetch = [&](Eight<F>(&to)[C], bool keys, int turn) {
            const uint32_t key = key0 + turn * kAtOnce;
            const void* base = keys ? a.k : a.v;
            const size_t row = keys ? kv * a.k_head_stride + size_t(key) * a.k_row_stride
                                    : kv * a.v_head_stride + size_t(key) * a.v_row_stride;
#pragma unroll
            for (int c = 0; c < C; c++) {
                const uint32_t col = (c * L + column) * 8;
                to[c].load(base, row + col, seen(key) ? col : kAll, keys ? a.key_width : a.value_width, a.vectors);
            }
        };
        Eight<F> rows[kHeld][C], values[kAhead ? kHeld : 1][C];
        if (kHeld == kTurns) {
#pragma unroll
            for (int i = 0; i < kTurns; i++) fetch(rows[i % kHeld], true, i);
        }
        if constexpr (kAhead) {
#pragma unroll
            for (int i = 0; i < kTurns; i++) fetch(values[i], false, i);
        }
#pragma unroll
        for (int turn = 0; turn < kTurns; turn++) {
            const uint32_t key = key0 + turn * kAtOnce;
            if (kHeld != kTurns) fetch(rows[0], true, turn);
            float dot[G];
#pragma unroll
            for (int g = 0; g < G; g++) dot[g] = 0.f;
#pragma unroll
            for (int c = 0; c < C; c++) {
                float f[8];
                rows[turn % kHeld][c].floats(f);
#pragma unroll
                for (int g = 0; g < G; g++) {
#pragma unroll
                    for (int i = 0; i < 8; i++) dot[g] = __fmaf_rn(q[g][c][i], f[i], dot[g]);
                }
            }
            // Over the row's lanes, by halves: each ends with one head.
            int o = L / 2;
#pragma unroll
            for (int n = G / 2; n > 0; n /= 2, o /= 2) {
                const bool upper = column & o;
#pragma unroll
                for (int i = 0; i < n; i++) {
                    const float keep = upper ? dot[i + n] : dot[i], give = upper ? dot[i] : dot[i + n];
                    dot[i] = keep + __shfl_xor_sync(kAll, give, o);
                }
            }
#pragma unroll
            for (; o > 0; o /= 2) dot[0] += __shfl_xor_sync(kAll, dot[0], o);
            if (column % (L / G) == 0) {
                float s = -INFINITY;
                if (seen(key)) {
                    s = dot[0] * a.scale;
                    if (F == DT_I8) s *= __half2float(a.k_scales[size_t(kv) * a.capacity + key]);
                }
                scores[key % kPiece][column / (L / G)] = s;
            }
        }
        if (kHeld == kTurns && !kAhead) {
#pragma unroll
            for (int i = 0; i < kTurns; i++) fetch(rows[i % kHeld], false, i);
        }
        __syncthreads();
        for (uint32_t g = warp; g < heads; g += kAttendWarps) {
            float s[kPiece / 32], top = -INFINITY, sum = 0.f;
#pragma unroll
            for (int i = 0; i < kPiece / 32; i++) {
                s[i] = scores[32 * i + lane][g];
                // A score that is NaN makes everything NaN, as it should.
                top = s[i] > top || s[i] != s[i] ? s[i] : top;
            }
            top = warp_max(top);
#pragma unroll
            for (int i = 0; i < kPiece / 32; i++) {
                s[i] = expf(s[i] - top);
                sum += s[i];
                if (F == DT_I8) {
                    const uint32_t key = (first_piece + piece) * kPiece + 32 * i + lane;
                    s[i] *= seen(key) ? __half2float(a.v_scales[size_t(kv) * a.capacity + key]) : 0.f;
                }
                scores[32 * i + lane][g] = s[i];
            }
            sum = warp_sum(sum);
            if (lane == 0) {
                a.tops[(size_t(token) * a.heads + head0 + g) * a.pieces + piece] = make_float2(top, sum);
            }
        }
        __syncthreads();

        float acc[G][C][8];
#pragma unroll
        for (int g = 0; g < G; g++) {
#pragma unroll
            for (int c = 0; c < C; c++) {
#pragma unroll
                for (int i = 0; i < 8; i++) acc[g][c][i] = 0.f;
            }
        }
#pragma unroll
        for (int turn = 0; turn < kTurns; turn++) {
            const uint32_t key = key0 + turn * kAtOnce;
            if (kHeld != kTurns) fetch(rows[0], false, turn);
            float p[G];
#pragma unroll
            for (int g = 0; g < G; g++) p[g] = scores[key % kPiece][g];
#pragma unroll
            for (int c = 0; c < C; c++) {
                float f[8];
                if constexpr (kAhead) {
                    values[turn][c].floats(f);
                } else {
                    rows[turn % kHeld][c].floats(f);
                }
#pragma unroll
                for (int g = 0; g < G; g++) {
#pragma unroll
                    for (int i = 0; i < 8; i++) acc[g][c][i] = __fmaf_rn(p[g], f[i], acc[g][c][i]);
                }
            }
        }
#pragma unroll
        for (int g = 0; g < G; g++) {
#pragma unroll
            for (int c = 0; c < C; c++) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
#pragma unroll
                    for (int o = L; o < 32; o *= 2) acc[g][c][i] += __shfl_xor_sync(kAll, acc[g][c][i], o);
                }
                if (part == 0) {
                    float4* to = reinterpret_cast<float4*>(sums + (warp * G + g) * kWidth + (c * L + column) * 8);
                    to[0] = make_float4(acc[g][c][0], acc[g][c][1], acc[g][c][2], acc[g][c][3]);
                    to[1] = make_float4(acc[g][c][4], acc[g][c][5], acc[g][c][6], acc[g][c][7]);
                }
            }
        }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < heads * a.value_width; i += blockDim.x) {
            const uint32_t g = i / a.value_width, col = i % a.value_width;
            float v = 0.f;
#pragma unroll
            for (int w = 0; w < kAttendWarps; w++) v += sums[(w * G + g) * kWidth + col];
            a.sums[((size_t(token) * a.heads + head0 + g) * a.pieces + piece) * a.value_width + col] = v;
        }
        __syncthreads();  // scores and sums are reused
    }
}

// Adds up the pieces: 32 columns of a head of a token. Piece i belongs to warp i % kCombineWarps, ascending; then warps.
extern "C" __global__ void __launch_bounds__(32 * kCombineWarps)
    attend_combine(const __grid_constant__ AttendArgs a) {
    __shared__ float values[kCombineWarps][32], weights[kCombineWarps];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x, token = blockIdx.y;
    const uint32_t col = blockIdx.z * 32 + lane;
    let_next_start();
    wait_for_previous();
    const uint32_t position = *a.position + token;
    if (position < token || position >= a.reach) return;
    const uint32_t count = position / kPiece - first_seen(a, position) / kPiece + 1;
    const size_t row = (size_t(token) * a.heads + head) * a.pieces;
    const float2* tops = a.tops + row;
    const float* sums = a.sums + row * a.value_width + min(col, a.value_width - 1);
    const float sink = a.sinks ? a.sinks[head] : -INFINITY;

    float top = sink;
    for (uint32_t i = lane; i < count; i += 32) {
        const float t = tops[i].x;
        top = t > top || t != t ? t : top;
    }
    top = warp_max(top);
    float value = 0.f, weight = 0.f;
#pragma unroll 8
    for (uint32_t i = warp; i < count; i += kCombineWarps) {
        const float2 t = tops[i];
        const float f = expf(t.x - top);
        weight = __fmaf_rn(f, t.y, weight);
        value = __fmaf_rn(f, sums[size_t(i) * a.value_width], value);
    }
    values[warp][lane] = value;
    if (lane == 0) weights[warp] = weight;
    __syncthreads();
    if (warp == 0 && col < a.value_width) {
        value = weight = 0.f;
        for (int w = 0; w < kCombineWarps; w++) {
            value += values[w][lane];
            weight += weights[w];
        }
        if (a.sinks) weight += expf(sink - top);
        const size_t at = (size_t(token) * a.heads + head) * a.value_width + col;
        store_from_float(a.out, a.dtype, at, value / weight);
    }
}

// Up to L * C * 8 columns of keys and values.
#define ATTEND(NAME, F, L, C, G)                                                                                     \
    extern "C" __global__ void __launch_bounds__(32 * kAttendWarps, C == 1 ? 2 : 1)                                  \
        attend_##NAME##_##L##x##C##_g##G(const __grid_constant__ AttendArgs a) {                                     \
        attend<F, L, C, G>(a);                                                                                       \
    }
#define ATTENDS(NAME, F)                                                                                             \
    ATTEND(NAME, F, 8, 1, 8) ATTEND(NAME, F, 16, 1, 1) ATTEND(NAME, F, 16, 1, 4) ATTEND(NAME, F, 32, 1, 4)           \
    ATTEND(NAME, F, 32, 2, 4) ATTEND(NAME, F, 32, 3, 2)

ATTENDS(f32, DT_F32)
ATTENDS(bf16, DT_BF16)
ATTENDS(f16, DT_F16)
ATTENDS(int8, DT_I8)
