// What a branch of the graph learns of routing (correlate.cu), and what `resolve` leaves for it.
#pragma once
#include <cstdint>

// Assignments of a step, at most.
constexpr uint32_t kMostChosen = 1024;

// What a step of one layer chose. `resolve` writes it and the branch reads it, which is joined before the layer's next step.
struct Chosen {
    uint32_t fresh;  // not learned from yet; a step that is run again is not
    uint32_t unused[3];
    uint32_t ids[kMostChosen];  // [tokens, top_k]
};
static_assert(sizeof(Chosen) == 16 + 4 * kMostChosen, "as src/backend/cuda/correlate.rs counts it");

// Of a step of `assignments` assignments, of which thread t has the t-th.
__device__ __forceinline__ void leave_chosen(Chosen& chosen, uint32_t id, uint32_t t, uint32_t assignments, bool fresh) {
    if (t < assignments) chosen.ids[t] = id;
    if (t == 0 && fresh) chosen.fresh = 1;
}
