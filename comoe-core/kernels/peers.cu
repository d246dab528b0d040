// Layer steps that several GPUs share. The first hands x, ids and weights to every other one (member), each computes the
// results of the assignments whose experts it owns, and the first sums all of them up.
//
// What is handed over lies in memory that both sides see: the receiver's own where GPUs reach each other's memory, else
// page-locked host memory. Behind it stands a count that grows by one a step; its receiver waits for it, no longer than
// `deadline`. Who is late is told to the host, and everything behind it stops.
#include "early.cuh"
#include "record.cuh"

// As src/backend/cuda/kernels/peers.rs counts them.
constexpr uint32_t kMostMembers = 7;
// Parts of an inbox, in bytes from its start: ids and weights have room for the most assignments of a step.
constexpr uint32_t kInboxIds = 256, kInboxWeights = kInboxIds + 4 * 1024, kInboxX = kInboxWeights + 4 * 1024;

struct Hand {
    const void* x;
    uint64_t x_bytes;       // rounded up to 16 where x lies at such a multiple
    uint64_t inbox[kMostMembers];
    const uint32_t* handed; // steps before this one
    uint32_t* awaited;      // with this one
    uint32_t members;
    uint32_t unused;
};

struct Take {
    uint64_t inbox;
    void* x;                // where x is copied to; null: it is read from the inbox
    uint64_t x_bytes;
    uint32_t* step;         // steps before this one; with it, behind this kernel
    uint64_t deadline;      // ns
};

struct Sum {
    const float* own;       // [tokens * top_k, hidden]: results of the first GPU
    uint64_t parts[kMostMembers];  // the same of each member
    uint64_t done[kMostMembers];   // its count of steps
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
};
static_assert(sizeof(Hand) == 96 && sizeof(Take) == 40 && sizeof(Sum) == 216, "mirrored structs");

__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Whether a count has reached `step` in time. What was written before it is visible then.
__device__ __forceinline__ bool reaches(const uint32_t* count, uint32_t step, uint64_t deadline) {
    const uint64_t begun = nanoseconds();
    for (;;) {
        uint32_t now;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(now) : "l"(count) : "memory");
        if (int32_t(now - step) >= 0) return true;
        if (nanoseconds() - begun > deadline) return false;
    }
}

__device__ __forceinline__ void publish(uint32_t* count, uint32_t step) {
    asm volatile("fence.acq_rel.sys; st.release.sys.global.u32 [%0], %1;" ::"l"(count), "r"(step) : "memory");
}

__device__ __forceinline__ void copy16(const void* from, void* to, uint64_t bytes) {
    const uint64_t pieces = (bytes + 15) / 16;
    for (uint64_t i = threadIdx.x; i < pieces; i += blockDim.x) {
        static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
    }
}

// On the first GPU: block 0 is its own resolve, block 1 + m hands the step to member m.
extern "C" __global__ void __launch_bounds__(1024) resolve_lead(const Resolve r, const Hand h) {
    if (blockIdx.x == 0) {
        resolve_block(r);
        if (threadIdx.x == 0) *h.awaited = *h.handed + 1;
        return;
    }
    let_dependents_start();
    wait_for_previous();
    char* inbox = reinterpret_cast<char*>(h.inbox[blockIdx.x - 1]);
    for (uint32_t a = threadIdx.x; a < r.assignments; a += blockDim.x) {
        reinterpret_cast<uint32_t*>(inbox + kInboxIds)[a] = r.ids[a];
        reinterpret_cast<float*>(inbox + kInboxWeights)[a] = r.weights[a];
    }
    if (reinterpret_cast<uint64_t>(h.x) % 16 == 0) {
        copy16(h.x, inbox + kInboxX, h.x_bytes);
    } else {
        // A row of a tensor whose rows are no multiple of 16 bytes.
        for (uint64_t i = threadIdx.x; i < h.x_bytes / 2; i += blockDim.x) {
            reinterpret_cast<uint16_t*>(inbox + kInboxX)[i] = static_cast<const uint16_t*>(h.x)[i];
        }
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) publish(reinterpret_cast<uint32_t*>(inbox), *h.handed + 1);
}

// On a member: ids and weights of `r` are those of the inbox.
extern "C" __global__ void __launch_bounds__(1024) resolve_member(const Resolve r, const Take t) {
    __shared__ bool late;
    let_dependents_start();
    wait_for_previous();
    if (threadIdx.x == 0) {
        const uint32_t step = *t.step + 1, kind = r.fault->kind;
        *t.step = step;
        late = kind == FAULT_LATE || !reaches(reinterpret_cast<const uint32_t*>(t.inbox), step, t.deadline);
        if (late && kind == FAULT_NONE) tell_host(r, Fault{FAULT_LATE, r.layer, 0, 0});
    }
    __syncthreads();
    if (!late && t.x) copy16(reinterpret_cast<const char*>(t.inbox) + kInboxX, t.x, t.x_bytes);
    resolve_block(r);
}

// On a member, behind its results.
extern "C" __global__ void member_done(uint32_t* done, const uint32_t* step) {
    let_dependents_start();
    wait_for_previous();
    publish(done, *step);
}

// On the first GPU: the sum of `combine`, over results of all. Grid (columns / 256, tokens).
extern "C" __global__ void __launch_bounds__(256) combine_all(const Sum s) {
    __shared__ bool late;
    let_dependents_start();
    wait_for_previous();
    if (threadIdx.x == 0) {
        const uint32_t step = *s.awaited;
        late = false;
        for (uint32_t m = 0; m < s.members && !late; m++) {
            late = *reinterpret_cast<volatile uint32_t*>(&s.fault->kind) == FAULT_LATE ||
                   !reaches(reinterpret_cast<const uint32_t*>(s.done[m]), step, s.deadline);
            if (late && atomicCAS(&s.fault->kind, FAULT_NONE, FAULT_LATE) == FAULT_NONE) {
                s.fault->layer = s.host->layer = s.layer;
                s.fault->value = s.host->value = 1 + m;
                __threadfence_system();
                s.host->kind = FAULT_LATE;
            }
        }
        if (blockIdx.x == 0 && blockIdx.y == 0) *s.handed = step;
    }
    __syncthreads();
    const uint32_t col = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    if (col >= s.hidden) return;
    float sum = 0.f;
    for (uint32_t j = 0; j < s.top_k; j++) {
        const size_t a = size_t(token) * s.top_k + j;
        const uint32_t id = s.ids[a], owner = id < s.experts ? s.owner[id] : 0;
        const float* of = owner == 0 ? s.own : reinterpret_cast<const float*>(s.parts[owner - 1]);
        sum = __fmaf_rn(s.factors[a], of[a * s.hidden + col], sum);
    }
    store_from_float(s.y, s.dtype, size_t(token) * s.hidden + col, late ? __int_as_float(0x7fffffff) : sum);
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
