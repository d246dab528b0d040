// gate_up and down for few tokens: a record is read once, dequantised in registers and multiplied with every token
// that chose it.
//
// Exact and deterministic: weights become f16 (INT4, INT8, MXFP4: small numbers) or stay BF16, activations are split into
// two f16 (scaled per token by a power of two, so nothing overflows) or three BF16 that add up to the F32 value, so
// every product on the tensor cores is exact; sums are F32, scaled per group. The order of every sum depends on the
// matrix's shape alone: a (token, expert) pair gives the same bits whatever else is in the launch. Compiled with
// -fmad=false, so that no instantiation contracts what another does not.
//
// Mapping: a block owns 16 gate and 16 up rows (gate_up) or 32 rows (down) of one item. An mma's 8 columns are 4
// chunks x 2 parts of ONE token: B is block diagonal, so a thread's accumulators hold the dot product of its own 16
// byte chunk (inside one scale group) with the two parts, and need just its own scale.
#include "read.cuh"

__device__ __forceinline__ uint32_t sub_half2(uint32_t v, uint32_t offset) {
    const __half2 r = __hsub2(*reinterpret_cast<__half2*>(&v), *reinterpret_cast<__half2*>(&offset));
    return *reinterpret_cast<const uint32_t*>(&r);
}

__device__ __forceinline__ uint32_t mul_half2(uint32_t v, uint32_t factor) {
    const __half2 r = __hmul2(*reinterpret_cast<__half2*>(&v), *reinterpret_cast<__half2*>(&factor));
    return *reinterpret_cast<const uint32_t*>(&r);
}

// Columns 8p .. 8p + 8 of a chunk as four pairs.
template <int F>
__device__ __forceinline__ void unpack(const uint4& chunk, int p, uint32_t (&out)[4]) {
    if constexpr (F == INT4) {
        const uint32_t w = word(chunk, p);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // 1024 + n as f16, less 1032: n - 8.
            out[i] = sub_half2(((w >> (4 * i)) & 0x000f000fu) | 0x64006400u, 0x64086408u);
        }
    } else if constexpr (F == MXFP4) {
        const uint32_t w = word(chunk, p);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // Exponent and mantissa where an f16 has them, times 2^14.
            const uint32_t pair = w >> (4 * i), bits = (pair & 0x00070007u) << 9 | (pair & 0x00080008u) << 12;
            out[i] = mul_half2(bits, 0x74007400u);
        }
    } else if constexpr (F == INT8) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            // 1024 + (q + 128) as f16, less 1152: q.
            const uint32_t w = word(chunk, 2 * p + i) ^ 0x80808080u;
            out[2 * i] = sub_half2(__byte_perm(w, 0x64646464u, 0x4140), 0x64806480u);
            out[2 * i + 1] = sub_half2(__byte_perm(w, 0x64646464u, 0x4342), 0x64806480u);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) out[i] = word(chunk, i);
    }
}

template <int F>
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
    if constexpr (F == BF16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}

// Eight values as parts that add up to them (times `scale`, where there is one): part i goes to `to + i * stride`.
template <int F>
__device__ __forceinline__ void split8(const float (&v)[8], float scale, uint16_t* to, uint32_t stride) {
    __align__(16) uint16_t part[3][8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if constexpr (F == BF16) {
            const __nv_bfloat16 hi = __float2bfloat16_rn(v[i]);
            const float rest = v[i] - __bfloat162float(hi);
            const __nv_bfloat16 mid = __float2bfloat16_rn(rest);
            part[0][i] = __bfloat16_as_ushort(hi);
            part[1][i] = __bfloat16_as_ushort(mid);
            part[2][i] = __bfloat16_as_ushort(__float2bfloat16_rn(rest - __bfloat162float(mid)));
        } else {
            const float scaled = v[i] * scale;
            const __half hi = __float2half_rn(scaled);
            part[0][i] = __half_as_ushort(hi);
            part[1][i] = __half_as_ushort(__float2half_rn(scaled - __half2float(hi)));
        }
    }
#pragma unroll
    for (int p = 0; p < Traits<F>::kParts; p++) {
        *reinterpret_cast<uint4*>(to + p * stride) = *reinterpret_cast<const uint4*>(part[p]);
    }
}

// The power of two that brings the greatest magnitude (its bits) to 2^14 .. 2^15.
__device__ __forceinline__ int prescale_exponent(uint32_t max_bits) {
    if (max_bits == 0) return 0;
    const int e = int(max_bits >> 23) - 127;
    return min(126, 14 - e);
}

__device__ __forceinline__ float exp2_int(int e) { return __int_as_float((e + 127) << 23); }

// One launch's block: rows of the item blockIdx.y. `segment` is how many steps (of 8 chunks) of x are staged at a
// time, a multiple of the warps in the block, so that step s belongs to warp s % warps however x is cut.
template <int F, int T, bool GATE_UP>
__device__ __forceinline__ void expert_gemv(const Item* items, const uint32_t* assignments, const Record& rec,
                                            const Input& in, const Activation act, uint32_t segment, float* out) {
    constexpr int kCols = Traits<F>::kCols, kParts = Traits<F>::kParts, kPieces = kCols / 8;
    extern __shared__ uint4 shared[];
    const Item item = items[blockIdx.y];
    if (item.count == 0) return;

    const Matrix& m0 = GATE_UP ? rec.gate : rec.down;
    const Matrix& m1 = GATE_UP ? rec.up : rec.down;
    const uint32_t row0[2] = {GATE_UP ? blockIdx.x * 16 : blockIdx.x * 32,
                              GATE_UP ? blockIdx.x * 16 : blockIdx.x * 32 + 16};
    const uint32_t rows = m0.rows, cols = m0.cols, chunks = m0.row_bytes / 16, steps = (chunks + 7) / 8;
    const uint32_t warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t g = lane / 4, c = lane % 4;

    // Shared memory: x parts [T][kParts][x_stride], scales [2 * 16][scale_stride] bytes, sums [warps][T][2][16], the
    // greatest magnitudes [T][warps].
    const uint32_t segment_cols = segment * 8 * kCols, x_stride = segment_cols + 8;
    const uint32_t scale_stride = m0.scale_row_bytes + 16;
    uint16_t* xs = reinterpret_cast<uint16_t*>(shared);
    char* scales = reinterpret_cast<char*>(xs + T * kParts * x_stride);
    float* sums = reinterpret_cast<float*>(scales + (F == BF16 ? 0 : 32 * scale_stride));
    uint32_t* maxima = reinterpret_cast<uint32_t*>(sums + warps * T * 32);

    uint64_t offset[2][2];
    bool valid[2][2];
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t row = row0[m] + g + 8 * h;
            valid[m][h] = row < rows;
            offset[m][h] = (m == 0 ? m0 : m1).weights + uint64_t(row) * m0.row_bytes;
        }
    }
    const char* src = reinterpret_cast<const char*>(item.src);
    char* dst = reinterpret_cast<char*>(item.dst);
    if (dst != nullptr && threadIdx.x == 0) reading_begins(items + blockIdx.y);

    for (uint32_t base = 0; base < item.count; base += T) {
        const uint32_t tokens = min(uint32_t(T), item.count - base);
        const bool through = dst != nullptr && base == 0;
        // What was read through is read from its slot from then on: this thread wrote it.
        const char* from = dst != nullptr && base > 0 ? dst : src;

        auto load = [&](uint4 (&to)[2][2][2], uint32_t step) {
#pragma unroll
            for (int u = 0; u < 2; u++) {
                const uint32_t chunk = (2 * step + u) * 4 + c;
#pragma unroll
                for (int m = 0; m < 2; m++) {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        to[u][m][h] = make_uint4(0, 0, 0, 0);
                        if (valid[m][h] && chunk < chunks) {
                            to[u][m][h] = load_chunk(from + offset[m][h] + chunk * 16);
                        }
                    }
                }
            }
        };
        auto store = [&](const uint4 (&what)[2][2][2], uint32_t step) {
#pragma unroll
            for (int u = 0; u < 2; u++) {
                const uint32_t chunk = (2 * step + u) * 4 + c;
#pragma unroll
                for (int m = 0; m < 2; m++) {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        if (valid[m][h] && chunk < chunks) {
                            *reinterpret_cast<uint4*>(dst + offset[m][h] + chunk * 16) = what[u][m][h];
                        }
                    }
                }
            }
        };

        uint4 now[2][2][2], next[2][2][2];
        load(now, warp);

        // While those are under way: the scales, then x.
        if (F != BF16 && base == 0) {
            const uint32_t per_row = m0.scale_row_bytes / 16;
            for (uint32_t i = threadIdx.x; i < 32 * per_row; i += blockDim.x) {
                const uint32_t r = i / per_row, piece = i % per_row, m = r / 16;
                const uint32_t row = (m == 0 ? row0[0] : row0[1]) + r % 16;
                if (row < rows) {
                    const uint64_t at = (m == 0 ? m0 : m1).scales + uint64_t(row) * m0.scale_row_bytes + piece * 16;
                    const uint4 v = load_chunk(src + at);
                    *reinterpret_cast<uint4*>(scales + r * scale_stride + piece * 16) = v;
                    if (through) *reinterpret_cast<uint4*>(dst + at) = v;
                } else {
                    *reinterpret_cast<uint4*>(scales + r * scale_stride + piece * 16) = make_uint4(0, 0, 0, 0);
                }
            }
        }
        if constexpr (F != BF16) {
#pragma unroll
            for (int t = 0; t < T; t++) {
                if (t >= tokens) break;
                uint32_t greatest = 0;
                with_row<GATE_UP>(in, assignments[item.first + base + t], cols, [&](const auto row) {
#pragma unroll 2
                    for (uint32_t k = 8 * threadIdx.x; k < cols; k += 8 * blockDim.x) {
                        float v[8];
                        row.load8(k, v);
#pragma unroll
                        for (int i = 0; i < 8; i++) greatest = max(greatest, __float_as_uint(v[i]) & 0x7fffffffu);
                    }
                });
                greatest = __reduce_max_sync(0xffffffffu, greatest);
                if (lane == 0) maxima[t * warps + warp] = greatest;
            }
            __syncthreads();
        }
        int exponent[T];
#pragma unroll
        for (int t = 0; t < T; t++) {
            exponent[t] = 0;
            if (F != BF16 && t < tokens) {
                uint32_t greatest = 0;
                for (uint32_t w = 0; w < warps; w++) greatest = max(greatest, maxima[t * warps + w]);
                exponent[t] = prescale_exponent(greatest);
            }
        }

        float acc[T][2][2];
#pragma unroll
        for (int t = 0; t < T; t++) acc[t][0][0] = acc[t][0][1] = acc[t][1][0] = acc[t][1][1] = 0.f;

        for (uint32_t start = 0; start < steps; start += segment) {
            const uint32_t end = min(steps, start + segment), first_col = start * 8 * kCols;
            if (start > 0) __syncthreads();  // the last segment's readers are done
#pragma unroll
            for (int t = 0; t < T; t++) {
                if (t >= tokens) break;
                uint16_t* to = xs + t * kParts * x_stride;
                const float scale = exp2_int(exponent[t]);
                with_row<GATE_UP>(in, assignments[item.first + base + t], cols, [&](const auto row) {
                    for (uint32_t k = 8 * threadIdx.x; k < (end - start) * 8 * kCols; k += 8 * blockDim.x) {
                        float v[8];
                        row.load8(first_col + k, v);
                        split8<F>(v, scale, to + k, x_stride);
                    }
                });
            }
            __syncthreads();

            for (uint32_t step = start + warp; step < end; step += warps) {
                if (step + warps < steps) load(next, step + warps);
                if (through) store(now, step);
#pragma unroll
                for (int u = 0; u < 2; u++) {
                    const uint32_t chunk = (2 * step + u) * 4 + c;
                    float part[T][2][4];
#pragma unroll
                    for (int t = 0; t < T; t++) {
#pragma unroll
                        for (int i = 0; i < 4; i++) part[t][0][i] = part[t][1][i] = 0.f;
                    }
#pragma unroll
                    for (int p = 0; p < kPieces; p++) {
                        uint32_t a[2][2][4];
#pragma unroll
                        for (int m = 0; m < 2; m++) {
                            unpack<F>(now[u][m][0], p, a[m][0]);
                            unpack<F>(now[u][m][1], p, a[m][1]);
                        }
                        // B's row block c has values in the two columns of chunk c and zeros elsewhere.
                        const bool mine = lane / 8 == c;
                        const uint32_t which = g % 2;
                        const uint16_t* at = xs + which * x_stride + (chunk * kCols - first_col) + 8 * p;
#pragma unroll
                        for (int t = 0; t < T; t++) {
                            if (t >= tokens) break;
                            uint4 b = make_uint4(0, 0, 0, 0);
                            if (mine) b = *reinterpret_cast<const uint4*>(at + t * kParts * x_stride);
#pragma unroll
                            for (int m = 0; m < 2; m++) {
                                mma<F>(part[t][m], a[m][0][0], a[m][1][0], a[m][0][1], a[m][1][1], b.x, b.y);
                                mma<F>(part[t][m], a[m][0][2], a[m][1][2], a[m][0][3], a[m][1][3], b.z, b.w);
                            }
                            if constexpr (F == BF16) {
                                uint4 low = make_uint4(0, 0, 0, 0);
                                if (mine && which == 0) {
                                    low = *reinterpret_cast<const uint4*>(at + (t * kParts + 2) * x_stride);
                                }
#pragma unroll
                                for (int m = 0; m < 2; m++) {
                                    mma<F>(part[t][m], a[m][0][0], a[m][1][0], a[m][0][1], a[m][1][1], low.x, low.y);
                                    mma<F>(part[t][m], a[m][0][2], a[m][1][2], a[m][0][3], a[m][1][3], low.z, low.w);
                                }
                            }
                        }
                    }
#pragma unroll
                    for (int m = 0; m < 2; m++) {
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            float scale = 1.f;
                            if constexpr (F != BF16) {
                                const uint32_t group = (chunk * kCols) >> rec.group_shift;
                                scale = 0.f;
                                if (chunk < chunks) {
                                    scale = scale_at<F>(scales + (m * 16 + g + 8 * h) * scale_stride, group);
                                }
                            }
#pragma unroll
                            for (int t = 0; t < T; t++) {
                                acc[t][m][h] =
                                    __fmaf_rn(scale, part[t][m][2 * h] + part[t][m][2 * h + 1], acc[t][m][h]);
                            }
                        }
                    }
                }
#pragma unroll
                for (int i = 0; i < 8; i++) now[i / 4][i / 2 % 2][i % 2] = next[i / 4][i / 2 % 2][i % 2];
            }
        }

#pragma unroll
        for (int t = 0; t < T; t++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float v = acc[t][i / 2][i % 2];
                v += __shfl_xor_sync(0xffffffffu, v, 1);
                v += __shfl_xor_sync(0xffffffffu, v, 2);
                if (c == 0) sums[((warp * T + t) * 2 + i / 2) * 16 + g + 8 * (i % 2)] = v;
            }
        }
        __syncthreads();

#pragma unroll
        for (int t = 0; t < T; t++) {
            if (t >= tokens) break;
            const uint32_t a = assignments[item.first + base + t];
            const float unscale = exp2_int(-exponent[t]);
            auto total = [&](uint32_t m, uint32_t r) {
                float v = 0.f;
                for (uint32_t w = 0; w < warps; w++) v += sums[((w * T + t) * 2 + m) * 16 + r];
                return v * unscale;
            };
            for (uint32_t i = threadIdx.x; i < (GATE_UP ? 16 : 32); i += blockDim.x) {
                const uint32_t row = row0[0] + i;
                if (row >= rows) continue;
                if constexpr (GATE_UP) {
                    float gate = total(0, i), up = total(1, i);
                    if (rec.has_bias) {
                        gate += reinterpret_cast<const float*>(src + rec.gate_bias)[row];
                        up += reinterpret_cast<const float*>(src + rec.up_bias)[row];
                    }
                    out[size_t(a) * rows + row] = activate(act, gate, up);
                } else {
                    float v = total(i / 16, i % 16);
                    if (rec.has_bias) v += reinterpret_cast<const float*>(src + rec.down_bias)[row];
                    out[size_t(a) * rows + row] = v;
                }
            }
        }
        if (!GATE_UP && through) {
            const uint64_t stride = uint64_t(gridDim.x) * blockDim.x * 16;
            for (uint64_t at = rec.tail + (uint64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 16; at < rec.bytes;
                 at += stride) {
                *reinterpret_cast<uint4*>(dst + at) = load_chunk(src + at);
            }
        }
        __syncthreads();  // sums, maxima and x are reused
        if (through && threadIdx.x == 0) reading_ends(items + blockIdx.y);
    }
}

// T tokens share one pass over a record; more take several passes. The second number is the least count of blocks a
// multiprocessor holds: one token is what decode is made of and must hide latency.
#define GEMV(NAME, F, T, BLOCKS)                                                                                   \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) gate_up_##NAME##_t##T(                                  \
        const Item* items, const uint32_t* assignments, const Record rec, const Input in, const Activation act,       \
        uint32_t segment, float* h) {                                                                                 \
        expert_gemv<F, T, true>(items, assignments, rec, in, act, segment, h);                                        \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) down_##NAME##_t##T(                                     \
        const Item* items, const uint32_t* assignments, const Record rec, const Input in, const Activation act,       \
        uint32_t segment, float* partial) {                                                                           \
        expert_gemv<F, T, false>(items, assignments, rec, in, act, segment, partial);                                 \
    }

GEMV(bf16, BF16, 1, 2)
GEMV(bf16, BF16, 4, 1)
GEMV(int8, INT8, 1, 2)
GEMV(int8, INT8, 4, 1)
GEMV(int4, INT4, 1, 2)
GEMV(int4, INT4, 4, 1)
GEMV(mxfp4, MXFP4, 1, 2)
GEMV(mxfp4, MXFP4, 4, 1)
