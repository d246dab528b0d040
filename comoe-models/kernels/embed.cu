// Where a decode step begins and ends: the rows of its tokens, and the hand-over to the next step.
#include "common.cuh"

struct EmbedArgs {
    const uint32_t* ids;  // [tokens]
    const void* table;    // [vocab, width] of dtype
    void* out;            // [tokens, width]
    uint32_t* error;
    uint32_t vocab, width, dtype;
    float scale;
};
static_assert(sizeof(EmbedArgs) == 48, "mirrored structs");

extern "C" __global__ void __launch_bounds__(128) embed(const __grid_constant__ EmbedArgs a) {
    const uint32_t col = 8 * (blockIdx.x * blockDim.x + threadIdx.x), token = blockIdx.y;
    let_next_start();
    wait_for_previous();
    if (col >= a.width) return;
    const uint32_t id = a.ids[token];
    float v[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    if (id < a.vocab) {
        const size_t row = size_t(id) * a.width;
        load8(a.table, a.dtype, row + col, row + a.width, v);
    } else if (col == 0) {
        *a.error = 1 + token;
    }
    if (a.scale != 1.f) {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] *= a.scale;
    }
    const size_t to = size_t(token) * a.width;
    store8(a.out, a.dtype, to + col, to + a.width, v);
}

struct AdvanceArgs {
    const uint32_t* token;   // what was sampled
    const uint32_t* errors;  // [errors_len], or null
    uint32_t* input;         // the next step's token
    uint32_t* position;      // the next step's position
    uint32_t* step;          // steps so far
    uint32_t* history;       // ids by position, or null
    const uint32_t* missed;  // records that the experts' cache has missed so far, or null
    uint32_t* ring;          // [ring_len] (token, 1 + first error set, missed), page-locked host memory
    uint32_t ring_len, history_len, errors_len, pad;
};
static_assert(sizeof(AdvanceArgs) == 80, "mirrored structs");

// One warp. A step with an error is told and leaves all else as it is, so that it can be run again.
extern "C" __global__ void __launch_bounds__(32) advance(const __grid_constant__ AdvanceArgs a) {
    let_next_start();
    wait_for_previous();
    uint32_t error = kAll;
    for (uint32_t i = threadIdx.x; a.errors && i < a.errors_len; i += 32) {
        if (a.errors[i]) error = min(error, i);
    }
    error = __reduce_min_sync(kAll, error) + 1;
    if (threadIdx.x != 0) return;
    const uint32_t token = *a.token, step = *a.step, missed = a.missed ? *a.missed : 0;
    volatile uint32_t* entry = a.ring + 3 * (step % a.ring_len);
    entry[0] = token;
    entry[1] = error;
    entry[2] = missed;
    if (error) return;
    *a.step = step + 1;
    const uint32_t position = *a.position + 1;
    *a.position = position;
    *a.input = token;
    if (a.history && position < a.history_len) a.history[position] = token;
}
