// Learns which experts of a layer follow which of the layer before, and guesses the next layer's: policy and arithmetic are
// those of src/predict/correlation.rs, operation by operation, so that host and device learn and guess the same bits.
#include "ahead.cuh"
#include "correlate.cuh"

constexpr uint32_t kLearners = 256, kMostRanked = 32;
// Beyond this weight a table is scaled down.
constexpr float kRescale = 1e12f;

// The step that was learned from last, whose experts the next one follows.
struct Learner {
    unsigned long long tokens;  // that were learned from in all
    uint32_t layer;             // ordinal, or kNone
    uint32_t rows;
    uint32_t top_k;
    uint32_t steps;  // since the host knew all of this
    uint32_t ids[kMostChosen];
};

struct Correlate {
    Chosen* chosen;            // of this layer
    Learner* learner;
    float* weight;             // of this layer's next observation
    float* totals;             // [before] how often each expert of the layer before was chosen
    float* counts;             // [before, experts] and each of this layer's with it
    const float* next_totals;  // the same of the next layer
    const float* next_counts;
    uint32_t* ranked;          // [kMostRanked] guesses for the next layer, likeliest first; kNone: no more
    uint32_t layer;            // ordinal
    uint32_t layers;
    uint32_t rows;             // tokens of the step
    uint32_t top_k;
    uint32_t before;           // experts of the layer before; of the first layer's, the last one
    uint32_t experts;
    uint32_t next_experts;
    uint32_t guesses;          // most guesses; 0: none are made
    float decay;               // weight of an observation relative to the one before
    uint32_t unused;
};
static_assert(sizeof(Correlate) == 104 && sizeof(Learner) == 24 + 4 * kMostChosen, "mirrored structs");

// For every id of a row how often it is there, at its first place, and 0 at the others.
__device__ __forceinline__ void count_repeats(const uint32_t* ids, uint32_t n, uint32_t* times) {
    for (uint32_t i = threadIdx.x; i < n; i += kLearners) {
        uint32_t count = 0;
        bool first = true;
        for (uint32_t o = 0; o < n; o++) {
            count += ids[o] == ids[i];
            first &= o >= i || ids[o] != ids[i];
        }
        times[i] = first ? count : 0;
    }
}

// Sums are made as on the host, one observation after the other.
__device__ __forceinline__ void add(float* cell, uint32_t times, float weight) {
    float value = *cell;
    for (; times > 0; times--) value += weight;
    *cell = value;
}

// One block.
extern "C" __global__ void __launch_bounds__(kLearners) correlate(const Correlate c) {
    extern __shared__ float scores[];  // [next_experts]
    __shared__ uint32_t from[kMostChosen], to[kMostChosen], from_times[kMostChosen], to_times[kMostChosen];
    __shared__ float scale[kMostChosen];
    __shared__ uint32_t ranked[kMostRanked], known;
    const uint32_t t = threadIdx.x, k = c.top_k;
    if (!c.chosen->fresh) {
        // Run again, with the rest of its token. The layer behind the last one that was learned from is still to come, and
        // what was guessed for it stands; others have been.
        if (c.guesses > 0 && t < kMostRanked && c.learner->layer != c.layer) c.ranked[t] = kNone;
        return;
    }
    if (t < kMostRanked) ranked[t] = kNone;
    if (t == 0) known = 0;
    __syncthreads();

    if (c.guesses > 0) {
        // The mean of the rows of what was chosen, each divided by the times that it was.
        for (uint32_t j = t; j < k; j += kLearners) {
            to[j] = c.chosen->ids[j];
            scale[j] = c.next_totals[to[j]];
            if (scale[j] > 0.f) atomicAdd(&known, 1u);
        }
        __syncthreads();
        for (uint32_t j = t; j < k; j += kLearners) {
            if (scale[j] > 0.f) scale[j] = 1.f / (scale[j] * float(known));
        }
        __syncthreads();
        for (uint32_t e = t; e < c.next_experts; e += kLearners) {
            float score = 0.f;
#pragma unroll 8
            for (uint32_t j = 0; j < k; j++) {
                if (scale[j] > 0.f) score += c.next_counts[size_t(to[j]) * c.next_experts + e] * scale[j];
            }
            scores[e] = score;
        }
        __syncthreads();
        for (uint32_t e = t; e < c.next_experts; e += kLearners) {
            const float score = scores[e];
            if (score <= 0.f) continue;
            uint32_t rank = 0;
            for (uint32_t o = 0; o < c.next_experts; o++) rank += scores[o] > score || (scores[o] == score && o < e);
            if (rank < c.guesses) ranked[rank] = e;
        }
        __syncthreads();
        if (t < kMostRanked) c.ranked[t] = ranked[t];
    }

    Learner& last = *c.learner;
    const uint32_t last_k = last.top_k;
    // Within several tokens the one before has not come to the last layer yet. A layer that computed fewer tokens than the
    // one before did so for the last ones.
    const bool follows = last.layer == (c.layer > 0 ? c.layer : c.layers) - 1 && (c.layer > 0 || c.rows == 1);
    const uint32_t pairs = follows ? min(last.rows, c.rows) : 0;
    const uint32_t observed = c.layer == 0 && c.rows == 1 ? 1 : pairs;
    float weight = *c.weight;
    for (uint32_t p = 0; p < observed; p++) {
        if (p < pairs) {
            __syncthreads();
            for (uint32_t j = t; j < last_k; j += kLearners) from[j] = last.ids[(last.rows - pairs + p) * last_k + j];
            for (uint32_t i = t; i < k; i += kLearners) to[i] = c.chosen->ids[(c.rows - pairs + p) * k + i];
            __syncthreads();
            count_repeats(from, last_k, from_times);
            count_repeats(to, k, to_times);
            __syncthreads();
            for (uint32_t cell = t; cell < last_k * k; cell += kLearners) {
                const uint32_t j = cell / k, i = cell % k, times = from_times[j] * to_times[i];
                if (times > 0) add(&c.counts[size_t(from[j]) * c.experts + to[i]], times, weight);
            }
            for (uint32_t j = t; j < last_k; j += kLearners) {
                if (from_times[j] > 0) add(&c.totals[from[j]], from_times[j], weight);
            }
        }
        weight *= c.decay;
        if (weight > kRescale) {
            __syncthreads();
            for (size_t cell = t; cell < size_t(c.before) * c.experts; cell += kLearners) c.counts[cell] /= kRescale;
            for (uint32_t e = t; e < c.before; e += kLearners) c.totals[e] /= kRescale;
            weight /= kRescale;
        }
    }
    __syncthreads();
    for (uint32_t a = t; a < c.rows * k; a += kLearners) last.ids[a] = c.chosen->ids[a];
    if (t == 0) {
        *c.weight = weight;
        if (c.layer == 0) last.tokens += c.rows;
        last.layer = c.layer;
        last.rows = c.rows;
        last.top_k = k;
        last.steps += 1;
        c.chosen->fresh = 0;
    }
}
