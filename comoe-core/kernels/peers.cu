// Layer steps that several GPUs share. The first hands x, ids and weights to every other one (member), each computes the
// results of the assignments whose experts it owns, and the first sums all of them up.
//
// What is handed over lies in memory that both sides see: the receiver's own where GPUs reach each other's memory, else
// page-locked host memory. It is handed over in words (words.cuh), for which the receiver waits no longer than `deadline`.
// A member says when it has taken what it was handed, and only then is it handed the next step. Who is late is told to
// the host, and everything behind it stops.
#include "early.cuh"
#include "record.cuh"
#include "words.cuh"

// As src/backend/cuda/kernels/peers.rs counts them.
constexpr uint32_t kMostMembers = 7;
// Where a member has ids and weights of the most assignments of a step, in bytes, and x behind them.
constexpr uint32_t kCopyWeights = 4 * 1024, kCopyX = 8 * 1024;
// Words that a thread asks for before it waits for the first of them.
constexpr uint32_t kAtOnce = 8;

struct Hand {
    const void* x;
    uint64_t x_bytes;
    uint64_t inbox[kMostMembers];  // words: ids, weights, x
    const uint32_t* handed;        // number of the step before this one
    uint32_t* awaited;             // of this one
    uint32_t members;
    uint32_t unused;
};

struct Take {
    const uint64_t* inbox;
    char* copy;             // of what comes: ids, weights and x
    uint64_t x_bytes;
    uint32_t* step;         // number of the step before this one; of this one, behind this kernel
    uint32_t* taken;        // the same, for the first GPU
    uint64_t deadline;      // ns
};

struct Back {
    const float* partial;   // [tokens * top_k, hidden]
    uint64_t* words;        // as many
    const uint32_t* ids;    // [tokens * top_k]
    const uint32_t* numbers; // [experts of the layer] number on this device, or kNone
    const uint32_t* step;
    const Fault* fault;
    uint32_t experts;
    uint32_t hidden;
};

struct Sum {
    const float* own;       // [tokens * top_k, hidden]: results of the first GPU
    uint64_t parts[kMostMembers];  // the same of each member, in words
    uint64_t taken[kMostMembers];  // the last step that it has taken
    const uint32_t* ids;    // [tokens * top_k]
    const uint32_t* owner;  // [experts of the layer] 0: the first GPU, else 1 + member
    const float* factors;   // [tokens * top_k]
    uint32_t* handed;
    const uint32_t* awaited;
    Fault* fault;
    volatile Fault* host;
    void* y;                // [tokens, hidden]
    uint64_t deadline;      // ns
    uint32_t members;
    uint32_t experts;
    uint32_t top_k;
    uint32_t hidden;
    uint32_t dtype;
    uint32_t layer;
    uint32_t is_near;       // parts lie in this GPU's memory
    uint32_t unused;
};
static_assert(sizeof(Hand) == 96 && sizeof(Take) == 48 && sizeof(Back) == 56 && sizeof(Sum) == 224, "mirrored structs");

// Whether a wait has lasted too long. Asks for the time now and then.
struct Patience {
    uint64_t deadline, begun;
    uint32_t polls;

    __device__ __forceinline__ explicit Patience(uint64_t ns) : deadline(ns), begun(0), polls(0) {}
    __device__ __forceinline__ bool ends() {
        if (++polls % 16 != 0) return false;
        uint64_t now;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (polls == 16) begun = now;
        return now - begun > deadline;
    }
};

__device__ __forceinline__ uint32_t get_count(const uint32_t* count) {
    uint32_t now;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(now) : "l"(count) : "memory");
    return now;
}

// Word `i` of x, whose rows may begin at any even address.
__device__ __forceinline__ uint32_t word_of(const void* x, uint64_t bytes, uint64_t i) {
    const char* at = static_cast<const char*>(x) + 4 * i;
    if (reinterpret_cast<uint64_t>(x) % 4 == 0 && 4 * i + 4 <= bytes) return *reinterpret_cast<const uint32_t*>(at);
    const uint32_t low = *reinterpret_cast<const uint16_t*>(at);
    return 4 * i + 4 <= bytes ? low | uint32_t(*reinterpret_cast<const uint16_t*>(at + 2)) << 16 : low;
}

// On the first GPU: block 0 is its own resolve, block 1 + m hands the step to member m.
extern "C" __global__ void __launch_bounds__(1024) resolve_lead(const Resolve r, const __grid_constant__ Hand h) {
    if (blockIdx.x == 0) {
        resolve_block(r, r.ids, r.weights);
        if (threadIdx.x == 0) *h.awaited = step_after(*h.handed);
        return;
    }
    let_dependents_start();
    wait_for_previous();
    uint64_t* inbox = reinterpret_cast<uint64_t*>(h.inbox[blockIdx.x - 1]);
    const uint32_t step = step_after(*h.handed), n = r.assignments, words = 2 * n + uint32_t((h.x_bytes + 3) / 4);
    for (uint32_t first = threadIdx.x; first < words; first += kAtOnce * blockDim.x) {
        uint32_t word[kAtOnce];
#pragma unroll
        for (uint32_t k = 0; k < kAtOnce; k++) {
            const uint32_t i = first + k * blockDim.x;
            if (i >= words) continue;
            word[k] = i < n       ? r.ids[i]
                      : i < 2 * n ? __float_as_uint(r.weights[i - n])
                                  : word_of(h.x, h.x_bytes, i - 2 * n);
        }
#pragma unroll
        for (uint32_t k = 0; k < kAtOnce; k++) {
            const uint32_t i = first + k * blockDim.x;
            if (i < words) put_word(inbox + i, word[k], step);
        }
    }
}

// On a member: ids, weights and x of its step are those of the copy.
extern "C" __global__ void __launch_bounds__(1024) resolve_member(const Resolve r, const Take t) {
    __shared__ bool late;
    __shared__ uint32_t ids[kMostAssignments];
    __shared__ float weights[kMostAssignments];
    let_dependents_start();
    wait_for_previous();
    const uint32_t step = step_after(*t.step), kind = r.fault->kind, n = r.assignments;
    const uint32_t words = 2 * n + uint32_t((t.x_bytes + 3) / 4);
    if (threadIdx.x == 0) late = kind == FAULT_LATE;
    // What is not handed over in time is nothing that could be read.
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) ids[i] = 0, weights[i] = 0.f;
    __syncthreads();
    Patience patience(t.deadline);
    for (uint32_t first = threadIdx.x; kind != FAULT_LATE && first < words; first += kAtOnce * blockDim.x) {
        uint64_t word[kAtOnce];
        bool all = false, too_late = false;
        while (!all && !too_late) {
            all = true;
#pragma unroll
            for (uint32_t k = 0; k < kAtOnce; k++) {
                const uint32_t i = first + k * blockDim.x;
                if (i < words) word[k] = get_word(t.inbox + i);
            }
#pragma unroll
            for (uint32_t k = 0; k < kAtOnce; k++) {
                if (first + k * blockDim.x < words) all &= is_of(word[k], step);
            }
            too_late = !all && patience.ends();
        }
        if (too_late) {
            late = true;
            break;
        }
#pragma unroll
        for (uint32_t k = 0; k < kAtOnce; k++) {
            const uint32_t i = first + k * blockDim.x, value = uint32_t(word[k]);
            if (i >= words) continue;
            if (i < n) ids[i] = value;
            if (i >= n && i < 2 * n) weights[i - n] = __uint_as_float(value);
            const uint32_t at = i < n ? 4 * i : i < 2 * n ? kCopyWeights + 4 * (i - n) : kCopyX + 4 * (i - 2 * n);
            *reinterpret_cast<uint32_t*>(t.copy + at) = value;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        *t.step = step;
        if (late && kind == FAULT_NONE) tell_host(r, Fault{FAULT_LATE, r.layer, 0, 0});
        // All words have been read: every thread has looked at its own before the barrier.
        if (!late) asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(t.taken), "r"(step) : "memory");
    }
    __syncthreads();
    resolve_block(r, ids, weights);
}

// On a member, behind its results of several tokens: those of its experts, in words. Grid (columns / 256, assignments).
extern "C" __global__ void __launch_bounds__(256) hand_back(const Back b) {
    let_dependents_start();
    wait_for_previous();
    const uint32_t col = blockIdx.x * blockDim.x + threadIdx.x, id = b.ids[blockIdx.y];
    // A step that was stopped has no results.
    if (col >= b.hidden || id >= b.experts || b.numbers[id] == kNone || b.fault->kind != FAULT_NONE) return;
    const size_t at = size_t(blockIdx.y) * b.hidden + col;
    put_word(b.words + at, __float_as_uint(b.partial[at]), *b.step);
}

// On the first GPU: the sum of `combine`, over results of all. Grid (columns / 256, tokens).
//
// What members hand back is waited for while the GPU's own results are made: this kernel may start as soon as its `down`
// runs, behind `resolve`, of which ids, factors, fault and counts are. What `down` writes is read behind it. Words that lie
// in host memory are asked for behind it, too: they would come over the link on which `down` reads what it misses.
extern "C" __global__ void __launch_bounds__(256) combine_all(const __grid_constant__ Sum s) {
    let_dependents_start();
    const uint32_t step = *s.awaited, kind = *reinterpret_cast<volatile uint32_t*>(&s.fault->kind);
    const uint32_t col = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    const bool counts = blockIdx.x == 0 && blockIdx.y == 0;
    const bool asks = counts && threadIdx.x < s.members && kind != FAULT_LATE;
    const uint32_t* taken = reinterpret_cast<const uint32_t*>(asks ? s.taken[threadIdx.x] : 0);
    uint32_t last = asks ? get_count(taken) : step;
    uint32_t late = 0;  // 1 + member
    Patience patience(s.deadline);
    float sum = 0.f;
    bool has_waited = false;
    for (uint32_t first = 0; first < s.top_k && col < s.hidden; first += kAtOnce) {
        const uint64_t* at[kAtOnce];
        float factor[kAtOnce], v[kAtOnce];
        uint32_t from[kAtOnce], missing = 0;
#pragma unroll
        for (uint32_t k = 0; k < kAtOnce; k++) {
            const bool is = first + k < s.top_k;
            const size_t a = size_t(token) * s.top_k + (is ? first + k : 0);
            const uint32_t id = s.ids[a];
            from[k] = is && id < s.experts ? s.owner[id] : 0;
            factor[k] = s.factors[a];
            at[k] = reinterpret_cast<const uint64_t*>(from[k] ? s.parts[from[k] - 1] : 0) + a * s.hidden + col;
            // A step that was stopped has no results.
            if (from[k] && kind == FAULT_NONE) missing |= 1u << k;
        }
        if (!s.is_near && !has_waited) {
            wait_for_previous();
            has_waited = true;
        }
        while (missing) {
            uint64_t word[kAtOnce];
#pragma unroll
            for (uint32_t k = 0; k < kAtOnce; k++) {
                if (missing >> k & 1) word[k] = get_word(at[k]);
            }
#pragma unroll
            for (uint32_t k = 0; k < kAtOnce; k++) {
                if ((missing >> k & 1) && is_of(word[k], step)) {
                    v[k] = __uint_as_float(uint32_t(word[k]));
                    missing &= ~(1u << k);
                }
            }
            if (missing && patience.ends()) {
#pragma unroll
                for (uint32_t k = 0; k < kAtOnce; k++) late = !late && (missing >> k & 1) ? from[k] : late;
                break;
            }
        }
        if (!has_waited) wait_for_previous();
        has_waited = true;
        if (kind != FAULT_NONE || late) {
            sum = __int_as_float(0x7fffffff);
            break;
        }
#pragma unroll
        for (uint32_t k = 0; k < kAtOnce; k++) {
            if (first + k < s.top_k && !from[k]) {
                v[k] = s.own[(size_t(token) * s.top_k + first + k) * s.hidden + col];
            }
        }
#pragma unroll
        for (uint32_t k = 0; k < kAtOnce; k++) {
            if (first + k < s.top_k) sum = __fmaf_rn(factor[k], v[k], sum);
        }
    }
    // Whatever there was to do: what this kernel writes, and that it ends, comes behind all of the one before it.
    if (!has_waited) wait_for_previous();
    while (asks && int32_t(last - step) < 0 && !late) {
        last = get_count(taken);
        if (patience.ends()) late = 1 + threadIdx.x;
    }
    if (late && atomicCAS(&s.fault->kind, FAULT_NONE, FAULT_LATE) == FAULT_NONE) {
        s.fault->layer = s.host->layer = s.layer;
        s.fault->value = s.host->value = late;
        __threadfence_system();
        s.host->kind = FAULT_LATE;
    }
    if (counts && threadIdx.x == 0) *s.handed = step;
    if (col < s.hidden) store_from_float(s.y, s.dtype, size_t(token) * s.hidden + col, sum);
}

// Rows of `cols` floats that a list names, as `rows` rows in a row (pack), or the other way (else). Grid (columns / 256, rows).
extern "C" __global__ void move_rows(const float* from, float* to, const uint32_t* list, uint32_t rows, uint32_t cols,
                                     uint32_t pack) {
    const uint32_t col = blockIdx.x * blockDim.x + threadIdx.x;
    if (col >= cols) return;
    for (uint32_t row = blockIdx.y; row < rows; row += gridDim.y) {
        const size_t named = list[row];
        to[(pack ? row : named) * cols + col] = from[(pack ? named : row) * cols + col];
    }
}
