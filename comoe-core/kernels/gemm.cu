// gate_up and down for many tokens: one grouped GEMM over every record of a launch, of any format.
//
// x and h are BF16, sums F32. A quantised weight is a small number, which BF16 holds exactly: tensor cores sum those
// times x over one group, and the group's scale goes onto that sum. So weights are not rounded, and nothing is stored
// dequantised.
//
// A block computes one tile: up to 64 assignments of one record x 128 weight rows (gate_up: 64 gate rows and the same
// 64 up rows), 4 warps with 32 weight rows each. K goes in steps of 64 through a ring of stages in shared memory. A lane
// holds 8 neighbouring columns of every 32: which k of an mma a column is makes no difference as long as x and weights
// agree, and this way all of its loads are whole words. Order and place of every sum follow from the matrix alone, and
// mma rows are independent: a token's bits do not depend on its neighbours.
#include "mma.cuh"
#include "record.cuh"

// Assignments `first ..` of item number `item`.
struct Tile {
    uint32_t item;
    uint32_t first;
};

// BF16 rows of `stride` elements; assignment a reads row a / per_row.
struct GemmInput {
    const __nv_bfloat16* data;
    uint32_t stride;
    uint32_t per_row;
};

static_assert(sizeof(Tile) == 8 && sizeof(GemmInput) == 16, "mirrored structs");

template <int F>
struct Gemm {
    static constexpr int kTokens = 64, kRows = 128, kThreads = 128, kStages = 3;
    // Of a weight row in 32 columns.
    static constexpr int kHalf = F == BF16 ? 64 : F == INT8 ? 32 : 16;
    static constexpr int kX = kTokens * 128, kW = kRows * 2 * kHalf, kS = F == BF16 ? 0 : kRows * 16;
    // Scales in 16 bytes.
    static constexpr uint32_t kScales = F == MXFP4 ? 16 : 8;
    static constexpr int kStage = kX + kW + kS;
};

// Eight neighbouring weights of a row, without their scale: pairs of columns as an mma takes them.
template <int F>
__device__ __forceinline__ void weights8(const char* p, uint32_t (&pair)[4]) {
    if constexpr (F == BF16) {
        const uint4 v = *reinterpret_cast<const uint4*>(p);
        pair[0] = v.x, pair[1] = v.y, pair[2] = v.z, pair[3] = v.w;
    } else if constexpr (F == INT4) {
        const uint32_t w = *reinterpret_cast<const uint32_t*>(p);
        // 0x4300 is 128, whose last place is 1: with a nibble in it, 128 + n. The weight is n - 8.
        const __nv_bfloat162 zero = __floats2bfloat162_rn(136.f, 136.f);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t n = ((w >> (4 * i)) & 0x000f000fu) | 0x43004300u;
            const __nv_bfloat162 v = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&n), zero);
            pair[i] = *reinterpret_cast<const uint32_t*>(&v);
        }
    } else if constexpr (F == MXFP4) {
        const uint32_t w = *reinterpret_cast<const uint32_t*>(p);
        const __nv_bfloat162 factor = __floats2bfloat162_rn(0x1p126f, 0x1p126f);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // Exponent and mantissa where a BF16 has them, times 2^126.
            const uint32_t n = w >> (4 * i), bits = (n & 0x00070007u) << 6 | (n & 0x00080008u) << 12;
            const __nv_bfloat162 v = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&bits), factor);
            pair[i] = *reinterpret_cast<const uint32_t*>(&v);
        }
    } else {
        const uint2 w = *reinterpret_cast<const uint2*>(p);
        auto at = [](uint32_t biased, int i) {
            // A byte in the last place of 2^23.
            return __uint_as_float(__byte_perm(biased, 0x4b000000u, 0x7650 + i)) - 8388736.f;
        };
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t biased = (i < 2 ? w.x : w.y) ^ 0x80808080u;
            const __nv_bfloat162 v = __floats2bfloat162_rn(at(biased, i % 2 * 2), at(biased, i % 2 * 2 + 1));
            pair[i] = *reinterpret_cast<const uint32_t*>(&v);
        }
    }
}

template <int F, bool GATE_UP>
__device__ __forceinline__ void grouped_gemm(const Item* items, const uint32_t* assignments, const Tile* tiles,
                                             const Record& rec, const GemmInput& in, const Activation act, void* out,
                                             uint32_t out_stride) {
    using G = Gemm<F>;
    extern __shared__ uint4 shared[];
    char* const stages = reinterpret_cast<char*>(shared);
    const Tile tile = tiles[blockIdx.y];
    const Item item = items[tile.item];
    const char* src = reinterpret_cast<const char*>(item.src);
    const uint32_t* ids = assignments + item.first + tile.first;
    const uint32_t count = min(uint32_t(G::kTokens), item.count - tile.first);
    const uint32_t tid = threadIdx.x, warp = tid / 32, g = tid % 32 / 4, t = tid % 4;

    const Matrix& m0 = GATE_UP ? rec.gate : rec.down;
    const uint32_t rows = m0.rows, cols = m0.cols, steps = (cols + 63) / 64;
    const uint32_t row0 = blockIdx.x * (GATE_UP ? G::kRows / 2 : G::kRows);
    // Row r of the tile: the first 16 of every 32 are gate rows, the others the up rows beside them.
    auto matrix_of = [&](uint32_t r) -> const Matrix& { return GATE_UP && r & 16 ? rec.up : m0; };
    auto row_of = [&](uint32_t r) { return row0 + (GATE_UP ? r / 32 * 16 + r % 16 : r); };

    // A thread copies one chunk of 8 columns of four rows of x.
    const __nv_bfloat16* x_row[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t r = tid / 8 + 16 * i;
        x_row[i] = r < count ? in.data + size_t(ids[r] / in.per_row) * in.stride : nullptr;
    }
    auto load = [&](uint32_t step) {
        char* stage = stages + step % G::kStages * G::kStage;
        const uint32_t c = tid % 8, col = step * 64 + 8 * c;
        const uint32_t there = col < cols ? min(16u, 2 * (cols - col)) : 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t r = tid / 8 + 16 * i, bytes = x_row[i] ? there : 0;
            const void* from = bytes ? static_cast<const void*>(x_row[i] + col) : in.data;
            copy16(stage + c / 4 * (G::kX / 2) + r * 64 + c % 4 * 16, from, bytes);
        }
        constexpr uint32_t kChunks = G::kHalf / 8;  // of a row in a step
#pragma unroll
        for (uint32_t i = 0; i < kChunks; i++) {
            const uint32_t at = tid + i * G::kThreads, r = at / kChunks, k = at % kChunks;
            const uint32_t row = row_of(r), byte = step * 2 * G::kHalf + 16 * k;
            const Matrix& m = matrix_of(r);
            const bool ok = row < rows && byte < m.row_bytes;
            const char* from = ok ? src + m.weights + uint64_t(row) * m.row_bytes + byte : src;
            char* to = stage + G::kX + k / (kChunks / 2) * (G::kW / 2) + r * G::kHalf + k % (kChunks / 2) * 16;
            copy16(to, from, ok ? 16 : 0);
        }
        if constexpr (F != BF16) {
            // The 16 bytes of scales among which this step's are.
            const uint32_t row = row_of(tid), byte = ((step * 64) >> rec.group_shift) / G::kScales * 16;
            const Matrix& m = matrix_of(tid);
            const bool ok = row < rows && byte < m.scale_row_bytes;
            const char* from = ok ? src + m.scales + uint64_t(row) * m.scale_row_bytes + byte : src;
            copy16(stage + G::kX + G::kW + tid * 16, from, ok ? 16 : 0);
        }
    };

    float acc[4][4][4] = {}, part[4][4][4] = {};
    const uint32_t live = (count + 15) / 16;
#pragma unroll
    for (int s = 0; s < G::kStages - 1; s++) {
        if (s < steps) load(s);
        copies_end_group();
    }
    for (uint32_t step = 0; step < steps; step++) {
        copies_wait<G::kStages - 2>();
        // What this step reads has arrived for all, and what the next load overwrites has been read by all.
        __syncthreads();
        if (step + G::kStages - 1 < steps) load(step + G::kStages - 1);
        copies_end_group();

        const char* stage = stages + step % G::kStages * G::kStage;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t w[4][4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const char* row = stage + G::kX + half * (G::kW / 2) + (warp * 32 + n * 8 + g) * G::kHalf;
                weights8<F>(row + t * (G::kHalf / 4), w[n]);
            }
#pragma unroll
            for (int m = 0; m < 4; m++) {
                if (m >= live) continue;
                const char* x = stage + half * (G::kX / 2) + (m * 16 + g) * 64 + t * 16;
                const uint4 low = *reinterpret_cast<const uint4*>(x);
                const uint4 high = *reinterpret_cast<const uint4*>(x + 8 * 64);
                const uint32_t a0[4] = {low.x, high.x, low.y, high.y}, a1[4] = {low.z, high.z, low.w, high.w};
                auto& sum = F == BF16 ? acc[m] : part[m];
#pragma unroll
                for (int n = 0; n < 4; n++) mma(sum[n], a0, w[n][0], w[n][1]);
#pragma unroll
                for (int n = 0; n < 4; n++) mma(sum[n], a1, w[n][2], w[n][3]);
            }
            if constexpr (F != BF16) {
                const uint32_t done = step * 64 + 32 * (half + 1);
                if ((done & ((1u << rec.group_shift) - 1)) == 0 || (half == 1 && step + 1 == steps)) {
                    const uint32_t group = (done - 1) >> rec.group_shift;
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        const char* scales = stage + G::kX + G::kW + (warp * 32 + n * 8 + 2 * t) * 16;
                        const float s0 = scale_at<F>(scales, group % G::kScales);
                        const float s1 = scale_at<F>(scales + 16, group % G::kScales);
#pragma unroll
                        for (int m = 0; m < 4; m++) {
                            if (m >= live) continue;
#pragma unroll
                            for (int i = 0; i < 4; i++) {
                                acc[m][n][i] = __fmaf_rn(part[m][n][i], i % 2 ? s1 : s0, acc[m][n][i]);
                                part[m][n][i] = 0.f;
                            }
                        }
                    }
                }
            }
        }
    }

    // Two neighbouring columns of one row at a time.
    auto bias = [&](uint64_t at, uint32_t row) {
        return rec.has_bias && row < rows ? reinterpret_cast<const float*>(src + at)[row] : 0.f;
    };
#pragma unroll
    for (int m = 0; m < 4; m++) {
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const uint32_t r = m * 16 + g + 8 * side;
            if (r >= count) continue;
            const size_t at = size_t(ids[r]) * out_stride;
#pragma unroll
            for (int n = 0; n < (GATE_UP ? 2 : 4); n++) {
                const uint32_t row = row0 + (GATE_UP ? warp * 16 : warp * 32) + n * 8 + 2 * t;
                if (row >= rows) continue;
                float v[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    v[i] = acc[m][n][2 * side + i];
                    if constexpr (GATE_UP) {
                        const float up = acc[m][n + 2][2 * side + i];
                        v[i] = activate(act, v[i] + bias(rec.gate_bias, row + i), up + bias(rec.up_bias, row + i));
                    } else {
                        v[i] += bias(rec.down_bias, row + i);
                    }
                }
                if constexpr (GATE_UP) {
                    __nv_bfloat16* h = static_cast<__nv_bfloat16*>(out) + at + row;
                    h[0] = __float2bfloat16_rn(v[0]);
                    if (row + 1 < rows) h[1] = __float2bfloat16_rn(v[1]);
                } else {
                    float* y = static_cast<float*>(out) + at + row;
                    y[0] = v[0];
                    if (row + 1 < rows) y[1] = v[1];
                }
            }
        }
    }
}

// Grid (rows / 64 or 128, tiles); h is [assignments, out_stride] in BF16, partial [assignments, hidden] in F32.
#define GEMM(NAME, F)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128, 2) gemm_gate_up_##NAME(                                         \
        const Item* items, const uint32_t* assignments, const Tile* tiles, const Record rec, const GemmInput in,      \
        const Activation act, void* h, uint32_t out_stride) {                                                         \
        grouped_gemm<F, true>(items, assignments, tiles, rec, in, act, h, out_stride);                                \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128, 2) gemm_down_##NAME(                                            \
        const Item* items, const uint32_t* assignments, const Tile* tiles, const Record rec, const GemmInput in,      \
        const Activation act, void* partial, uint32_t out_stride) {                                                   \
        grouped_gemm<F, false>(items, assignments, tiles, rec, in, act, partial, out_stride);                         \
    }

GEMM(bf16, BF16)
GEMM(int8, INT8)
GEMM(int4, INT4)
GEMM(mxfp4, MXFP4)

// x as the GEMM reads it: BF16, rows of `stride` elements. With weights there is a row for each assignment, times its
// weight; else one for each row of x. Grid (rows).
extern "C" __global__ void gemm_round(const Input in, uint32_t cols, uint32_t stride, __nv_bfloat16* out) {
    const uint32_t row = in.row_weights ? blockIdx.x / in.per_row : blockIdx.x;
    const float weight = in.row_weights ? in.row_weights[blockIdx.x] : 1.f;
    for (uint32_t col = threadIdx.x; col < cols; col += blockDim.x) {
        const size_t i = size_t(row) * cols + col;
        float v;
        switch (in.dtype) {
            case DT_BF16: v = __bfloat162float(static_cast<const __nv_bfloat16*>(in.data)[i]); break;
            case DT_F16: v = __half2float(static_cast<const __half*>(in.data)[i]); break;
            default: v = static_cast<const float*>(in.data)[i];
        }
        out[size_t(blockIdx.x) * stride + col] = __float2bfloat16_rn(v * weight);
    }
}
