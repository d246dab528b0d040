// gate_up and down for one token over INT4 records with groups of 64 weights or more. One F32 multiplication per weight
// takes longer than reading the record, so here integer tensor cores multiply, and exactly: 64 columns of x become
// integers of 31 bits times a power of two, cut into four signed digits of 8 bits, a column of B each.
//
// mma.m16n8k32 wants of lane 4 r + q the rows r and r + 8. Which columns of the matrix its k means is ours to say as
// long as x agrees: a lane's own 16 bytes (32 weights) of each row are the k of four multiplications, so weights go
// from memory to the tensor core without a shuffle. Lanes q = 0, 1 and q = 2, 3 then have different groups of 64
// columns, and B's eight columns are four digits of one and four digits of the other, zero where it is not theirs.
//
// Sums are exact per 64 columns, then F32; their order depends on the matrix's shape alone, as in one_token.cu. x is
// rounded to 2^-30 of the greatest of its 64 columns.
#include "early.cuh"
#include "read.cuh"

// What a warp multiplies at a time: 256 columns, 128 bytes of each row, in two chunks of 64 bytes.
constexpr uint32_t kBatchCols = 256;
// Warps that share rows, each with every such batch: part of the order of summation.
constexpr uint32_t kGateUpSlots = 8, kDownSlots = 3;

// A batch of x for one warp.
struct __align__(16) Digits {
    // [chunk][q][digit][word of the weights][nibbles 0, 2, 4, 6 or 1, 3, 5, 7], four words apart for the banks' sake.
    uint32_t of[2][4][36];
    int32_t zero[4][4];  // [64 columns][digit]: what a zero-point of 8 adds, negated
};
static_assert(sizeof(Digits) == 1216, "mirrored in src/backend/cuda/kernels/one_token.rs");

// The bytes i of a, b, c and d as word i.
__device__ __forceinline__ void transpose_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t (&to)[4]) {
    const uint32_t low0 = __byte_perm(a, b, 0x5140), low1 = __byte_perm(c, d, 0x5140);
    const uint32_t high0 = __byte_perm(a, b, 0x7362), high1 = __byte_perm(c, d, 0x7362);
    to[0] = __byte_perm(low0, low1, 0x5410);
    to[1] = __byte_perm(low0, low1, 0x7632);
    to[2] = __byte_perm(high0, high1, 0x5410);
    to[3] = __byte_perm(high0, high1, 0x7632);
}

// A warp stages a batch, of which each lane has eight columns. Returns by what this lane's digits are to be multiplied.
__device__ __forceinline__ float stage_digits(const float (&v)[8], uint32_t lane, Digits& to) {
    // As integers, magnitudes keep their order, infinity and NaN included.
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) most = max(most, __float_as_uint(v[i]) & 0x7fffffffu);
#pragma unroll
    for (int step = 1; step < 8; step *= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
    // Below 2^(exponent - 126). Tiny x has an exponent with room for both powers of two.
    const uint32_t exponent = max(most >> 23, 64u);
    const float shift = __uint_as_float((283 - min(exponent, 254u)) << 23);
    // x that is not finite must show.
    const float back = __uint_as_float(exponent == 255 ? 0x7fffffffu : (exponent - 29) << 23);

    uint32_t d[8];
#pragma unroll
    for (int i = 0; i < 8; i++) d[i] = (uint32_t(__float2int_rn(v[i] * shift)) + 0x00808080u) ^ 0x00808080u;
    // The columns in the order of the nibbles.
    uint32_t even[4], odd[4];
    transpose_bytes(d[0], d[4], d[1], d[5], even);
    transpose_bytes(d[2], d[6], d[3], d[7], odd);
    uint32_t sum[4];
    uint32_t* at = &to.of[lane / 16][lane % 16 / 4][lane % 4 * 2];
#pragma unroll
    for (int p = 0; p < 4; p++) {
        *reinterpret_cast<uint2*>(at + 8 * p) = make_uint2(even[p], odd[p]);
        sum[p] = __dp4a(int(odd[p]), 0x01010101, __dp4a(int(even[p]), 0x01010101, 0));
    }
    // Two sums a word: of 64 digits they fit 16 bits.
    uint32_t pair[2] = {sum[0] + (sum[1] << 16), sum[2] + (sum[3] << 16)};
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
        pair[0] += __shfl_xor_sync(0xffffffffu, pair[0], step);
        pair[1] += __shfl_xor_sync(0xffffffffu, pair[1], step);
    }
    if (lane % 8 == 0) {
        const int s0 = int16_t(pair[0]), s2 = int16_t(pair[1]);
        const int s1 = int16_t((pair[0] - uint32_t(s0)) >> 16), s3 = int16_t((pair[1] - uint32_t(s2)) >> 16);
        *reinterpret_cast<int4*>(to.zero[lane / 8]) = make_int4(-8 * s0, -8 * s1, -8 * s2, -8 * s3);
    }
    return back;
}

// c += a b, of unsigned weights and signed digits.
__device__ __forceinline__ void mma_digits(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                           uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A lane's 2 T rows: T of each of two ranges, `stride` rows apart, of which `left` exist.
template <int T>
struct Int4Rows {
    const char* record;
    uint32_t weights[2], scales[2];  // of the first row, in the record
    uint32_t row_bytes, scale_row_bytes, cols, group_shift, left[2], q;

    static constexpr uint32_t kStride = 8;

    __device__ __forceinline__ void place(int i, const Matrix& m, uint32_t row) {
        weights[i] = uint32_t(m.weights) + row * m.row_bytes;
        scales[i] = uint32_t(m.scales) + row * m.scale_row_bytes;
        row_bytes = m.row_bytes;
        scale_row_bytes = m.scale_row_bytes;
        cols = m.cols;
        left[i] = row < m.rows ? m.rows - row : 0;
    }

    // [chunk][t][range], and the scale of the 64 columns 4 * batch + q of each row.
    __device__ __forceinline__ void load(uint32_t batch, uint4 (&w)[2][T][2], uint16_t (&s)[T][2]) const {
        const uint32_t group = (batch * 4 + q) >> (group_shift - 6);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const uint32_t at = batch * 128 + c * 64 + q * 16;
#pragma unroll
            for (int t = 0; t < T; t++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    w[c][t][i] = make_uint4(0, 0, 0, 0);
                    if (t * kStride < left[i] && at < row_bytes) {
                        w[c][t][i] = load_chunk(record + (weights[i] + t * kStride * row_bytes + at));
                    }
                }
            }
        }
#pragma unroll
        for (int t = 0; t < T; t++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                s[t][i] = 0;
                if (t * kStride < left[i] && (batch * 4 + q) * 64 < cols) {
                    asm volatile("ld.global.u16 %0, [%1];"
                                 : "=h"(s[t][i])
                                 : "l"(record + (scales[i] + t * kStride * scale_row_bytes + 2 * group))
                                 : "memory");
                }
            }
        }
    }
};

// Adds a batch's products; `back` is what stage_digits returned. Lanes with an odd q have the upper two digits, of which
// a unit is 2^16.
template <int T>
__device__ __forceinline__ void multiply_digits(uint4 (&w)[2][T][2], const uint16_t (&s)[T][2], float back,
                                                const Digits& x, uint32_t lane, float (&acc)[T][2]) {
    const uint32_t q = lane % 4;
    const float mine = __shfl_sync(0xffffffffu, back, 8 * q);
    float scale[T][2];
#pragma unroll
    for (int t = 0; t < T; t++) {
#pragma unroll
        for (int i = 0; i < 2; i++) scale[t][i] = __half2float(__ushort_as_half(s[t][i])) * mine;
    }
    // One after the other: interleaved by the compiler they would need more registers than there are.
#pragma unroll 1
    for (int c = 0; c < 2; c++) {
        uint4 b[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
        if (q / 2 == lane / 16) {
            const uint4* at = reinterpret_cast<const uint4*>(&x.of[c][q][lane / 4 % 4 * 8]);
            b[0] = at[0];
            b[1] = at[1];
        }
        const int2 zero = *reinterpret_cast<const int2*>(&x.zero[2 * c + q / 2][q % 2 * 2]);
#pragma unroll
        for (int t = 0; t < T; t++) {
            int sum[4] = {zero.x, zero.y, zero.x, zero.y};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint32_t w0 = word(w[0][t][0], j), w1 = word(w[0][t][1], j);
                const uint4& of = b[j / 2];
                mma_digits(sum, w0 & 0x0f0f0f0fu, w1 & 0x0f0f0f0fu, (w0 >> 4) & 0x0f0f0f0fu, (w1 >> 4) & 0x0f0f0f0fu,
                           j % 2 ? of.z : of.x, j % 2 ? of.w : of.y);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float of = __shfl_sync(0xffffffffu, scale[t][i], (lane & ~3u) | (2 * c + q / 2));
                acc[t][i] = __fmaf_rn(float(sum[2 * i] + 256 * sum[2 * i + 1]), of, acc[t][i]);
            }
            w[0][t][0] = w[1][t][0];
            w[0][t][1] = w[1][t][1];
        }
    }
}

// Sums over the four lanes of a row.
__device__ __forceinline__ float sum_digits(float v, uint32_t lane) {
    if (lane % 2) v *= 65536.f;
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

// Copies bytes (a multiple of 16) as thread `thread` of `threads`, several pieces under way: host memory is far.
__device__ __forceinline__ void copy_bytes(const char* from, char* to, uint32_t bytes, uint32_t thread,
                                           uint32_t threads) {
    constexpr int kPieces = 2;
    const uint32_t step = threads * 16;
#pragma unroll 1
    for (uint32_t at = thread * 16; at < bytes; at += kPieces * step) {
        uint4 v[kPieces];
#pragma unroll
        for (int i = 0; i < kPieces; i++) {
            if (at + i * step < bytes) v[i] = load_chunk(from + at + i * step);
        }
#pragma unroll
        for (int i = 0; i < kPieces; i++) {
            if (at + i * step < bytes) *reinterpret_cast<uint4*>(to + at + i * step) = v[i];
        }
    }
}

// Rows row0 .. row0 + rows of a matrix and their scales, from an item's src to its dst; from where it is staged, if they are
// there.
__device__ __forceinline__ void copy_rows(const Item& item, const Matrix& m, uint32_t row0, uint32_t rows,
                                          uint32_t thread, uint32_t threads) {
    if (row0 >= m.rows) return;
    const uint32_t count = min(rows, m.rows - row0);
    auto copy = [&](uint64_t at, uint32_t bytes) {
        const uint64_t from = at + bytes <= item.ready ? item.staged : item.src;
        copy_bytes(reinterpret_cast<const char*>(from + at), reinterpret_cast<char*>(item.dst + at), bytes, thread,
                   threads);
    };
    copy(m.weights + uint64_t(row0) * m.row_bytes, count * m.row_bytes);
    copy(m.scales + uint64_t(row0) * m.scale_row_bytes, count * m.scale_row_bytes);
}

// h of 8 T rows of the item blockIdx.y, which eight warps share.
template <int T>
__device__ __forceinline__ void one_token_gate_up_digits(const Item* items, const uint32_t* assignments,
                                                         const Record& rec, const Input& in, const Activation act,
                                                         float* h) {
    __shared__ Digits digits[kGateUpSlots];
    __shared__ float sums[kGateUpSlots][2 * T][8];
    __shared__ uint32_t assignment;
    wait_for_previous();
    let_dependents_start();
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t rows = rec.gate.rows, cols = rec.gate.cols, row0 = blockIdx.x * (8 * T);
    const uint32_t batches = (cols + kBatchCols - 1) / kBatchCols;
    Item item = load_item(items + blockIdx.y);
    float v[8];
    auto load_x = [&](uint32_t batch, float weight) {
        with_row<true>(Input{in.data, nullptr, in.dtype, 1}, 0, cols, [&](auto row) {
            row.weight = weight;
            row.load8(batch * kBatchCols + 8 * lane, v);
        });
    };
    // With the item, which it does not need but for a weight on the input.
    if (in.row_weights == nullptr) load_x(warp, 1.f);
    if (item.count == 0) return;
    if (item.dst) {
        if (threadIdx.x == 0) reading_begins(items + blockIdx.y);
        copy_rows(item, rec.gate, row0, 8 * T, threadIdx.x, blockDim.x);
        copy_rows(item, rec.up, row0, 8 * T, threadIdx.x, blockDim.x);
        __syncthreads();
        if (threadIdx.x == 0) reading_ends(items + blockIdx.y);
        item.src = item.dst;
    }
    Int4Rows<T> mine;
    mine.record = reinterpret_cast<const char*>(item.src);
    mine.q = lane % 4;
    mine.group_shift = rec.group_shift;
    mine.place(0, rec.gate, row0 + lane / 4);
    mine.place(1, rec.up, row0 + lane / 4);
#pragma unroll 1
    for (uint32_t n = 0; n < item.count; n++) {
#pragma unroll 1
        for (uint32_t batch = warp; batch < batches; batch += kGateUpSlots) {
            uint4 w[2][T][2];
            uint16_t s[T][2];
            if (in.row_weights || n > 0 || batch != warp) {
                load_x(batch, in.row_weights ? in.row_weights[assignments[item.first + n]] : 1.f);
            }
            mine.load(batch, w, s);
            __syncwarp();  // the last batch's readers are done
            const float back = stage_digits(v, lane, digits[warp]);
            if (threadIdx.x == 0 && batch == 0) assignment = assignments[item.first + n];
            __syncwarp();
            float acc[T][2] = {};
            multiply_digits<T>(w, s, back, digits[warp], lane, acc);
#pragma unroll
            for (int t = 0; t < T; t++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float sum = sum_digits(acc[t][i], lane);
                    float& to = sums[warp][T * i + t][lane / 4];
                    if (lane % 4 == 0) to = batch == warp ? sum : to + sum;
                }
            }
        }
        __syncthreads();
        const uint32_t row = row0 + lane;
        if (warp == 0 && lane < 8 * T && row < rows) {
            // All asked for before the first is added.
            float gates[kGateUpSlots], ups[kGateUpSlots], gate = 0.f, up = 0.f;
#pragma unroll
            for (uint32_t i = 0; i < kGateUpSlots; i++) {
                gates[i] = i < batches ? sums[i][lane / 8][lane % 8] : 0.f;
                ups[i] = i < batches ? sums[i][T + lane / 8][lane % 8] : 0.f;
            }
#pragma unroll
            for (uint32_t i = 0; i < kGateUpSlots; i++) {
                gate += gates[i];
                up += ups[i];
            }
            if (rec.has_bias) {
                const char* bias = reinterpret_cast<const char*>(items[blockIdx.y].src);
                gate += reinterpret_cast<const float*>(bias + rec.gate_bias)[row];
                up += reinterpret_cast<const float*>(bias + rec.up_bias)[row];
            }
            h[size_t(assignment) * rows + row] = activate(act, gate, up);
        }
        if (n + 1 < item.count) __syncthreads();  // sums may be written anew
    }
}

// The 16 rows from 16 * blockIdx.x on of every item. kDownSlots warps share an item's.
__device__ __forceinline__ void one_token_down_digits(const Item* items, const uint32_t* assignments, const Record& rec,
                                                      const float* h, uint32_t len, const Output& out) {
    constexpr uint32_t kTeam = 32 * kDownSlots;
    extern __shared__ uint4 shared[];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const uint32_t team = warp / kDownSlots, slot = warp % kDownSlots, teams = warps / kDownSlots;
    Digits& digits = reinterpret_cast<Digits*>(shared)[warp];
    // [assignment, or team where sums are not combined][slot][row]
    float* sums = reinterpret_cast<float*>(reinterpret_cast<Digits*>(shared) + warps);
    const uint32_t rows = rec.down.rows, cols = rec.down.cols, row0 = blockIdx.x * 16;
    const uint32_t batches = (cols + kBatchCols - 1) / kBatchCols;
    const auto sync_team = [&] { asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(kTeam) : "memory"); };
    let_dependents_start();

#pragma unroll 1
    for (uint32_t n = team; n < len; n += teams) {
        Item item = load_item(items + n);
        if (item.count == 0) continue;
        if (item.dst) {
            const uint32_t thread = threadIdx.x % kTeam;
            if (thread == 0) reading_begins(items + n);
            copy_rows(item, rec.down, row0, 16, thread, kTeam);
            // Biases and padding, spread over the blocks.
#pragma unroll 1
            for (uint64_t at = rec.tail + (uint64_t(blockIdx.x) * kTeam + thread) * 16; at < rec.bytes;
                 at += uint64_t(gridDim.x) * kTeam * 16) {
                *reinterpret_cast<uint4*>(item.dst + at) = load_chunk(reinterpret_cast<const char*>(item.src) + at);
            }
            sync_team();
            if (thread == 0) reading_ends(items + n);
            item.src = item.dst;
        }
        Int4Rows<1> mine;
        mine.record = reinterpret_cast<const char*>(item.src);
        mine.q = lane % 4;
        mine.group_shift = rec.group_shift;
        mine.place(0, rec.down, row0 + lane / 4);
        mine.place(1, rec.down, row0 + 8 + lane / 4);
#pragma unroll 1
        for (uint32_t i = 0; i < item.count; i++) {
            const uint32_t a = assignments[item.first + i];
            float* to = sums + ((out.y ? a : team) * kDownSlots + slot) * 16;
            if (slot >= batches && lane < 16) to[lane] = 0.f;
#pragma unroll 1
            for (uint32_t batch = slot; batch < batches; batch += kDownSlots) {
                uint4 w[2][1][2];
                uint16_t s[1][2];
                mine.load(batch, w, s);
                wait_for_previous();  // for h
                float v[8];
                Row<float>{h + size_t(a) * cols, 1.f, cols}.load8(batch * kBatchCols + 8 * lane, v);
                __syncwarp();  // the last batch's readers are done
                const float back = stage_digits(v, lane, digits);
                __syncwarp();
                float acc[1][2] = {};
                multiply_digits<1>(w, s, back, digits, lane, acc);
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float sum = sum_digits(acc[0][r], lane);
                    const uint32_t row = row0 + 8 * r + lane / 4;
                    if (lane % 4 == 0) {
                        if (batch > slot) {
                            sum += to[8 * r + lane / 4];
                        } else if (slot == 0 && rec.has_bias && row < rows) {
                            sum += reinterpret_cast<const float*>(items[n].src + rec.down_bias)[row];
                        }
                        to[8 * r + lane / 4] = sum;
                    }
                }
            }
            if (out.y == nullptr) {
                sync_team();
                if (slot == 0 && lane < 16 && row0 + lane < rows) {
                    float v = to[lane];
#pragma unroll
                    for (uint32_t k = 1; k < kDownSlots; k++) v += to[16 * k + lane];
                    out.put(size_t(a) * rows + row0 + lane, v);
                }
                sync_team();
            }
        }
    }
    // What this kernel writes, and that it ends, must come after all of the previous one, whatever there was to do.
    wait_for_previous();
    if (out.y == nullptr) return;
    // Lane j has the weight of expert j, asked for before the slowest warp is waited for. 1 changes no bit.
    const auto weights_from = [&](uint32_t j) {
        return out.weights && j + lane < out.top_k ? out.weights[j + lane] : 1.f;
    };
    float weight = warp == 0 ? weights_from(0) : 1.f;
    __syncthreads();
    if (warp > 0) return;
    float sum = 0.f;
#pragma unroll 4
    for (uint32_t j = 0; j < out.top_k; j++) {
        if (j > 0 && j % 32 == 0) weight = weights_from(j);
        const float* of = sums + j * kDownSlots * 16 + lane % 16;
        float v = of[0];
#pragma unroll
        for (uint32_t k = 1; k < kDownSlots; k++) v += of[16 * k];
        sum = __fmaf_rn(__shfl_sync(0xffffffffu, weight, j % 32), v, sum);
    }
    if (lane < 16 && row0 + lane < rows) store_from_float(out.y, out.dtype, row0 + lane, sum);
}

extern "C" __global__ void __launch_bounds__(32 * kGateUpSlots, 3)
    one_token_gate_up_int4_digits(const Item* items, const uint32_t* assignments, const Record rec, const Input in,
                                  const Activation act, float* h) {
    one_token_gate_up_digits<2>(items, assignments, rec, in, act, h);
}

extern "C" __global__ void __launch_bounds__(8 * 32 * kDownSlots, 1)
    one_token_down_int4_digits(const Item* items, const uint32_t* assignments, const Record rec, const float* h,
                               uint32_t len, const Output out) {
    one_token_down_digits(items, assignments, rec, h, len, out);
}
