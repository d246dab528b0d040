// gate_up and down for one token: what decode is made of. Here time is latency and bandwidth, so warps work alone, ask
// for whole rows (a lane takes every 32nd piece of 16 bytes, so a warp reads 512 contiguous bytes at a time, which is
// what the host link wants too) and ask for the next pieces of all their rows before they multiply the present ones.
//
// Sums are F32 fused multiply-adds of exact weights, scaled per group; their order depends on the matrix's shape
// alone: a result has the same bits wherever the record lies, whatever else is in the launch and in which order. They
// are not the bits of gemv.cu, so a caller chooses by its count of tokens, never by what is resident.
#include "read.cuh"
#include "words.cuh"

// x of a chunk (a lane's piece of 16 bytes) is staged as kQuads groups of four columns.
template <int F>
struct Chunk {
    static constexpr int kCols = Traits<F>::kCols, kQuads = kCols / 4;
};

// Where an INT4 weight lies when it becomes a float, as a power of two: x is divided by it.
__device__ __forceinline__ float int4_unshift(int i) {
    constexpr float kUnshift[8] = {1.f, 0x1p-16f, 0x1p-4f, 0x1p-4f, 0x1p-8f, 0x1p-8f, 0x1p-12f, 0x1p-12f};
    return kUnshift[i];
}

// Bits of `w` under `mask`, from `shift` on, less 8, times 2^shift.
template <int SHIFT>
__device__ __forceinline__ float int4_at(uint32_t w) {
    // One instruction, which the compiler would make two: (w & mask) | 2^23 as a float.
    uint32_t v;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(w), "n"(15u << SHIFT), "r"(0x4b000000u));
    return __uint_as_float(v) - (8388608.f + float(8u << SHIFT));
}

// Adds word p of a chunk times its columns of x (as staged).
template <int F>
__device__ __forceinline__ float dot_word(uint32_t w, const float* x, float sum) {
    if constexpr (F == INT4) {
        const uint32_t high = w >> 16;
        sum = __fmaf_rn(int4_at<0>(w), x[0], sum);
        sum = __fmaf_rn(int4_at<16>(w), x[1], sum);
        sum = __fmaf_rn(int4_at<4>(w), x[2], sum);
        sum = __fmaf_rn(int4_at<4>(high), x[3], sum);
        sum = __fmaf_rn(int4_at<8>(w), x[4], sum);
        sum = __fmaf_rn(int4_at<8>(high), x[5], sum);
        sum = __fmaf_rn(int4_at<12>(w), x[6], sum);
        return __fmaf_rn(int4_at<12>(high), x[7], sum);
    } else if constexpr (F == MXFP4) {
        // Twice the magnitudes as bytes: 0, 1, 2, 3, 4, 6, 8, 12. Columns 0, 2, 4, 6 and 1, 3, 5, 7.
        const uint32_t codes = w & 0x77777777u;
        const uint32_t bytes[2] = {__byte_perm(0x03020100u, 0x0c080604u, codes),
                                   __byte_perm(0x03020100u, 0x0c080604u, codes >> 16)};
#pragma unroll
        for (int c = 0; c < 8; c++) {
            const int nibble = c / 2 + 4 * (c % 2);
            const float twice = __uint_as_float(__byte_perm(bytes[c % 2], 0x4b000000u, 0x7440 + c / 2)) - 8388608.f;
            const uint32_t sign = (w << (28 - 4 * nibble)) & 0x80000000u;
            sum = __fmaf_rn(__uint_as_float(__float_as_uint(twice) ^ sign), x[c], sum);
        }
        return sum;
    } else if constexpr (F == INT8) {
        w ^= 0x80808080u;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // 2^23 + (q + 128), less as much: q.
            const float q = __uint_as_float(__byte_perm(w, 0x4b000000u, 0x7440 + i)) - 8388736.f;
            sum = __fmaf_rn(q, x[i], sum);
        }
        return sum;
    } else {
        sum = __fmaf_rn(__uint_as_float(w << 16), x[0], sum);
        return __fmaf_rn(__uint_as_float(w & 0xffff0000u), x[1], sum);
    }
}

// Lane l looks for four columns of its chunk at [pass][quad][l ^ swizzle(quad)]: neither that nor stage8 meets a bank
// twice.
template <int F>
__device__ __forceinline__ uint32_t swizzle(uint32_t quad) {
    return F == INT4 || F == MXFP4 ? quad & 6 : F == INT8 ? quad / 2 * 4 : 0;
}

// Eight columns of x, from `col` (a multiple of 8) on, to where the lanes that need them look.
template <int F>
__device__ __forceinline__ void stage8(const float (&v)[8], uint32_t col, float4* xs) {
    constexpr int kCols = Chunk<F>::kCols, kQuads = Chunk<F>::kQuads;
    const uint32_t chunk = col / kCols, quad = col % kCols / 4;
    float4* to = xs + ((chunk / 32) * kQuads + quad) * 32 + (chunk % 32 ^ swizzle<F>(quad));
    float s[8];
#pragma unroll
    for (int i = 0; i < 8; i++) s[i] = F == INT4 ? v[i] * int4_unshift(i) : v[i];
    to[0] = make_float4(s[0], s[1], s[2], s[3]);
    to[32] = make_float4(s[4], s[5], s[6], s[7]);
}

// A warp stages its own x of one pass. All loads are asked for before the first is waited for.
template <int F>
__device__ __forceinline__ void stage_pass(const Row<float>& x, uint32_t pass, uint32_t lane, float4* xs) {
    constexpr uint32_t kTimes = 32 * Chunk<F>::kCols / 256;
    const uint32_t first = pass * 32 * Chunk<F>::kCols + 8 * lane;
    float v[kTimes][8];
    if (reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.cols % 8 == 0) {
        float4 raw[kTimes][2];
#pragma unroll
        for (uint32_t i = 0; i < kTimes; i++) {
            raw[i][0] = raw[i][1] = make_float4(0.f, 0.f, 0.f, 0.f);
            if (first + 256 * i < x.cols) {
                const float4* at = reinterpret_cast<const float4*>(x.data + first + 256 * i);
                raw[i][0] = at[0];
                raw[i][1] = at[1];
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < kTimes; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                v[i][4 * j] = raw[i][j].x;
                v[i][4 * j + 1] = raw[i][j].y;
                v[i][4 * j + 2] = raw[i][j].z;
                v[i][4 * j + 3] = raw[i][j].w;
            }
        }
    } else {
#pragma unroll
        for (uint32_t i = 0; i < kTimes; i++) {
            x.load8(first + 256 * i, v[i]);
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < kTimes; i++) stage8<F>(v[i], 8 * lane + 256 * i, xs);
}

// A warp's rows of one record: R / M consecutive rows of each of M matrices, `left` of which exist.
template <int F, int R, int M>
struct Rows {
    static constexpr int kEach = R / M;
    const char* from;
    char* to;  // or null
    uint64_t weights[M], scales[M];
    uint32_t row_bytes, scale_row_bytes, left, lane;

    __device__ __forceinline__ void place(int i, const Matrix& m, uint32_t row) {
        weights[i] = m.weights + uint64_t(row) * m.row_bytes;
        scales[i] = m.scales + uint64_t(row) * m.scale_row_bytes;
        row_bytes = m.row_bytes;
        scale_row_bytes = m.scale_row_bytes;
        left = row < m.rows ? m.rows - row : 0;
    }
    __device__ __forceinline__ bool valid(int r) const { return r % kEach < left; }

    // Calls `f(r, where it begins in the record)` for every row; `first` has the first of each matrix.
    template <typename Fn>
    __device__ __forceinline__ void each(const uint64_t (&first)[M], uint32_t stride, Fn f) const {
#pragma unroll
        for (int m = 0; m < M; m++) {
            if constexpr (R <= 4) {
#pragma unroll
                for (int r = 0; r < kEach; r++) f(m * kEach + r, first[m] + uint32_t(r) * stride);
            } else {
                // One after the other, here and now: kept from pass to pass they would take most registers.
                uint64_t row = first[m];
                asm volatile("" : "+l"(row));
#pragma unroll
                for (int r = 0; r < kEach; r++, row += stride) f(m * kEach + r, row);
            }
        }
    }

    __device__ __forceinline__ void load(uint4 (&w)[R], uint32_t pass) const {
        const uint32_t at = (pass * 32 + lane) * 16;
        each(weights, row_bytes, [&](int r, uint64_t row) {
            w[r] = make_uint4(0, 0, 0, 0);
            if (valid(r) && at < row_bytes) w[r] = load_chunk(from + row + at);
        });
    }

    __device__ __forceinline__ void store(const uint4 (&w)[R], uint32_t pass) const {
        const uint32_t at = (pass * 32 + lane) * 16;
        each(weights, row_bytes, [&](int r, uint64_t row) {
            if (valid(r) && at < row_bytes) *reinterpret_cast<uint4*>(to + row + at) = w[r];
        });
    }

    // Scales of a lane's word.
    static constexpr uint32_t kPerLane = F == MXFP4 ? 4 : 2;

    // Scales 32 * kPerLane * part .. 32 * kPerLane * (part + 1) of every row.
    __device__ __forceinline__ void load_scales(uint32_t (&s)[R], uint32_t part) const {
        const uint32_t at = (part * 32 + lane) * 4;
        each(scales, scale_row_bytes, [&](int r, uint64_t row) {
            s[r] = 0;
            if (F != BF16 && valid(r) && at < scale_row_bytes) {
                asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(s[r]) : "l"(from + row + at) : "memory");
            }
        });
    }

    __device__ __forceinline__ void store_scales(const uint32_t (&s)[R], uint32_t part) const {
        const uint32_t at = (part * 32 + lane) * 4;
        each(scales, scale_row_bytes, [&](int r, uint64_t row) {
            if (F != BF16 && valid(r) && at < scale_row_bytes) *reinterpret_cast<uint32_t*>(to + row + at) = s[r];
        });
    }

    // Adds the present chunks' products; `xs` is x of this pass. `part` is the part of the scales in `s`.
    __device__ __forceinline__ void multiply(const uint4 (&w)[R], uint32_t (&s)[R], uint32_t& part, uint32_t pass,
                                             uint32_t group_shift, const float4* xs, float (&acc)[R]) const {
        constexpr int kPerWord = Chunk<F>::kCols / 4;
        float sum[R];
#pragma unroll
        for (int r = 0; r < R; r++) sum[r] = 0.f;
#pragma unroll
        for (int p = 0; p < 4; p++) {
            float x[kPerWord];
            if constexpr (F == BF16) {
                const float2 v = reinterpret_cast<const float2*>(xs + (p / 2) * 32 + lane)[p % 2];
                x[0] = v.x;
                x[1] = v.y;
            } else {
#pragma unroll
                for (int q = 0; q < kPerWord / 4; q++) {
                    const float4 v = xs[(p * (kPerWord / 4) + q) * 32 + (lane ^ swizzle<F>(p * (kPerWord / 4) + q))];
                    x[4 * q] = v.x;
                    x[4 * q + 1] = v.y;
                    x[4 * q + 2] = v.z;
                    x[4 * q + 3] = v.w;
                }
            }
#pragma unroll
            for (int r = 0; r < R; r++) {
                sum[r] = dot_word<F>(word(w[r], p), x, sum[r]);
                // Eight rows mixed by the compiler would need more registers than there are.
                if (R > 4 && F != BF16) asm volatile("" : "+f"(sum[r]));
            }
        }
        if constexpr (F == BF16) {
#pragma unroll
            for (int r = 0; r < R; r++) acc[r] += sum[r];
        } else {
            const uint32_t group = ((pass * 32 + lane) * Chunk<F>::kCols) >> group_shift;
            // Lanes of one pass differ by at most 32 groups, of which a part is a multiple: one part serves them all.
            const uint32_t needed = ((pass * 32 * Chunk<F>::kCols) >> group_shift) / (32 * kPerLane);
            if (needed != part) {
                part = needed;
                load_scales(s, part);
                if (to) store_scales(s, part);
            }
            const uint32_t shift = group % kPerLane * (32 / kPerLane);
#pragma unroll
            for (int r = 0; r < R; r++) {
                const uint32_t bits = __shfl_sync(0xffffffffu, s[r], group / kPerLane % 32) >> shift;
                if constexpr (F == MXFP4) {
                    // Sums are of twice the weights.
                    acc[r] = __fmaf_rn(power_of_two(bits & 0xff), sum[r] * 0.5f, acc[r]);
                } else {
                    acc[r] = __fmaf_rn(__half2float(__ushort_as_half(uint16_t(bits))), sum[r], acc[r]);
                }
            }
        }
    }
};

// Volatile: asked for here, and not where it is first needed.
__device__ __forceinline__ Item load_item(const Item* p) {
    Item item;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(item.src) : "l"(&p->src) : "memory");
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(item.dst) : "l"(&p->dst) : "memory");
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(item.staged) : "l"(&p->staged) : "memory");
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(item.first), "=r"(item.count) : "l"(&p->first) : "memory");
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(item.ready) : "l"(&p->ready) : "memory");
    return item;
}

// Sums R values (4 or 8) over the warp, by halves: lane l ends with the sum of value l % R.
template <int R>
__device__ __forceinline__ float sum_over_warp(float (&v)[R], uint32_t lane) {
#pragma unroll
    for (int half = R / 2; half > 0; half /= 2) {
        const bool upper = lane & half;
#pragma unroll
        for (int i = 0; i < half; i++) {
            const float keep = upper ? v[i + half] : v[i], give = upper ? v[i] : v[i + half];
            v[i] = keep + __shfl_xor_sync(0xffffffffu, give, half);
        }
    }
#pragma unroll
    for (int step = R; step < 32; step *= 2) v[0] += __shfl_xor_sync(0xffffffffu, v[0], step);
    return v[0];
}

// h of the rows 2 * (W * blockIdx.x + warp) and the next, of the item blockIdx.y: two gate and two up rows a warp.
template <int F, int P>
__device__ __forceinline__ void one_token_gate_up(const Item* items, const uint32_t* assignments, const Record& rec,
                                                  const Input& in, const Activation act, float* h) {
    constexpr int R = 2 * P, kQuads = Chunk<F>::kQuads;
    extern __shared__ uint4 shared[];
    float4* xs = reinterpret_cast<float4*>(shared);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const uint32_t rows = rec.gate.rows, cols = rec.gate.cols, row0 = (blockIdx.x * warps + warp) * P;
    const uint32_t passes = (rec.gate.row_bytes + 511) / 512;
    // The item is under way while x is staged, which needs it only for a weight on the input.
    const Item item = load_item(items + blockIdx.y);
    auto stage = [&](float weight) {
        with_row<true>(Input{in.data, nullptr, in.dtype, 1}, 0, cols, [&](auto row) {
            row.weight = weight;
            for (uint32_t k = 8 * threadIdx.x; k < passes * 32 * Chunk<F>::kCols; k += 8 * blockDim.x) {
                float v[8];
                row.load8(k, v);
                stage8<F>(v, k, xs);
            }
        });
    };
    if (in.row_weights == nullptr) stage(1.f);
    if (item.count == 0) return;

    Rows<F, R, 2> mine;
    mine.from = reinterpret_cast<const char*>(item.src);
    mine.to = reinterpret_cast<char*>(item.dst);
    mine.lane = lane;
    mine.place(0, rec.gate, row0);
    mine.place(1, rec.up, row0);
    for (uint32_t i = 0; i < item.count; i++) {
        uint4 now[R], next[R];
        uint32_t scales[R], part = 0;
        if (mine.to && threadIdx.x == 0) reading_begins(items + blockIdx.y);
        mine.load(now, 0);
        mine.load_scales(scales, 0);
        if (passes > 1) mine.load(next, 1);

        const uint32_t a = assignments[item.first + i];
        if (in.row_weights) stage(in.row_weights[a]);
        __syncthreads();

        if (mine.to) mine.store_scales(scales, 0);
        float acc[R];
#pragma unroll
        for (int r = 0; r < R; r++) acc[r] = 0.f;
        for (uint32_t pass = 0; pass < passes; pass++) {
            if (mine.to) mine.store(now, pass);
            mine.multiply(now, scales, part, pass, rec.group_shift, xs + pass * kQuads * 32, acc);
#pragma unroll
            for (int r = 0; r < R; r++) now[r] = next[r];
            if (pass + 2 < passes) mine.load(next, pass + 2);
        }
        float gate = sum_over_warp<R>(acc, lane), up = __shfl_sync(0xffffffffu, gate, (lane + P) % 32);
        const uint32_t row = row0 + lane;
        if (lane < P && row < rows) {
            if (rec.has_bias) {
                const char* src = reinterpret_cast<const char*>(item.src);
                gate += reinterpret_cast<const float*>(src + rec.gate_bias)[row];
                up += reinterpret_cast<const float*>(src + rec.up_bias)[row];
            }
            h[size_t(a) * rows + row] = activate(act, gate, up);
        }
        // What was read through is read from its slot from then on: this lane wrote it.
        if (mine.to) mine.from = mine.to;
        __syncthreads();  // x may be staged anew
        if (mine.to && threadIdx.x == 0) reading_ends(items + blockIdx.y);
        mine.to = nullptr;
    }
}

// Where down's results go: `y`, weighted and added up over the token's experts, or, where that is null, `partial`.
struct Output {
    float* partial;        // [assignments, hidden]
    const float* weights;  // [top_k], or null: all ones
    void* y;               // [hidden] of `dtype`
    const uint32_t* step;  // not null: `partial` is words of this step, for another GPU
    uint32_t dtype;
    uint32_t top_k;

    __device__ __forceinline__ void put(size_t at, float v) const {
        if (step) {
            put_word(reinterpret_cast<uint64_t*>(partial) + at, __float_as_uint(v), *step);
        } else {
            partial[at] = v;
        }
    }
};
static_assert(sizeof(Output) == 40, "mirrored structs");

// R rows from R * blockIdx.x on of every item, a warp an item at a time.
template <int F, int R>
__device__ __forceinline__ void one_token_down(const Item* items, const uint32_t* assignments, const Record& rec,
                                               const float* h, uint32_t len, const Output& out) {
    constexpr int kQuads = Chunk<F>::kQuads, kPassCols = 32 * Chunk<F>::kCols;
    extern __shared__ uint4 shared[];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    // Shared memory: x of a pass per warp, then sums [top_k][R].
    float4* xs = reinterpret_cast<float4*>(shared) + warp * kQuads * 32;
    float* sums = reinterpret_cast<float*>(reinterpret_cast<float4*>(shared) + warps * kQuads * 32);
    const uint32_t rows = rec.down.rows, cols = rec.down.cols, row0 = blockIdx.x * R;
    const uint32_t passes = (rec.down.row_bytes + 511) / 512;

    for (uint32_t n = warp; n < len; n += warps) {
        const Item item = items[n];
        if (item.count == 0) continue;
        Rows<F, R, 1> mine;
        mine.from = reinterpret_cast<const char*>(item.src);
        mine.to = reinterpret_cast<char*>(item.dst);
        mine.lane = lane;
        mine.place(0, rec.down, row0);
        for (uint32_t i = 0; i < item.count; i++) {
            uint4 now[R];
            uint32_t scales[R], part = 0;
            if (mine.to && lane == 0) reading_begins(items + n);
            mine.load(now, 0);
            mine.load_scales(scales, 0);
            const uint32_t a = assignments[item.first + i];
            const Row<float> x{h + size_t(a) * cols, 1.f, cols};
            float acc[R];
#pragma unroll
            for (int r = 0; r < R; r++) acc[r] = 0.f;
            for (uint32_t pass = 0; pass < passes; pass++) {
                __syncwarp();  // the last pass's readers are done
                stage_pass<F>(x, pass, lane, xs);
                __syncwarp();
                if (mine.to) {
                    if (pass == 0) mine.store_scales(scales, 0);
                    mine.store(now, pass);
                }
                mine.multiply(now, scales, part, pass, rec.group_shift, xs, acc);
                if (pass + 1 < passes) mine.load(now, pass + 1);
            }
            float v = sum_over_warp<R>(acc, lane);
            if (lane < R && row0 + lane < rows) {
                if (rec.has_bias) v += reinterpret_cast<const float*>(item.src + rec.down_bias)[row0 + lane];
                if (out.y) {
                    sums[a * R + lane] = v;
                } else {
                    out.put(size_t(a) * rows + row0 + lane, v);
                }
            }
            if (mine.to) {
                // Biases and padding, spread over the blocks.
                for (uint64_t at = rec.tail + (uint64_t(blockIdx.x) * 32 + lane) * 16; at < rec.bytes;
                     at += uint64_t(gridDim.x) * 512) {
                    *reinterpret_cast<uint4*>(mine.to + at) = load_chunk(mine.from + at);
                }
                __syncwarp();
                if (lane == 0) reading_ends(items + n);
                mine.from = mine.to;
                mine.to = nullptr;
            }
        }
    }
    if (out.y == nullptr) return;
    __syncthreads();
    if (threadIdx.x < R && row0 + threadIdx.x < rows) {
        float sum = 0.f;
        for (uint32_t j = 0; j < out.top_k; j++) {
            const float v = sums[j * R + threadIdx.x];
            sum = out.weights ? __fmaf_rn(out.weights[j], v, sum) : sum + v;
        }
        store_from_float(out.y, out.dtype, row0 + threadIdx.x, sum);
    }
}

#ifndef ONE_TOKEN_HARNESS
#define ONE_TOKEN(NAME, F)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256, 3) one_token_gate_up_##NAME(                                    \
        const Item* items, const uint32_t* assignments, const Record rec, const Input in, const Activation act,       \
        float* h) {                                                                                                   \
        one_token_gate_up<F, 2>(items, assignments, rec, in, act, h);                                                 \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256, 2) one_token_down_##NAME(                                       \
        const Item* items, const uint32_t* assignments, const Record rec, const float* h, uint32_t len,               \
        const Output out) {                                                                                           \
        one_token_down<F, 8>(items, assignments, rec, h, len, out);                                                   \
    }

ONE_TOKEN(bf16, BF16)
ONE_TOKEN(int8, INT8)
ONE_TOKEN(int4, INT4)
ONE_TOKEN(mxfp4, MXFP4)
#endif
