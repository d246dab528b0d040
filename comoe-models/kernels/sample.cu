// The next token from a row of logits: what src/sampler.rs does on the host, step by step in its order.
//
// One kernel whose blocks wait for each other; a block keeps a stretch of the vocabulary in shared memory. Weights are
// exp((logit - greatest) / temperature) in F64, as the host has them, kept in units of 2^-44: sums of integers do not
// depend on their order, so blocks may add into one histogram, and a token is found by narrowing down the bins of
// histograms. A token lighter than half a unit is never drawn. Against the host's sums, in F64 one after the other,
// a boundary differs by about 1e-12 of the total.
#include "common.cuh"

constexpr uint32_t kBins = 2048, kBinBits = 11, kSampleThreads = 512;
constexpr uint64_t kUnit = 1ull << 44;

// Zero between launches: the last block out cleans up.
struct SampleScratch {
    unsigned long long arrived, best;
    uint32_t left, broken;
    unsigned long long histogram[3][kBins];
};
static_assert(sizeof(SampleScratch) == 24 + 3 * 8 * kBins, "mirrored structs");

struct SampleArgs {
    const void* logits;        // [vocab] of dtype
    const uint32_t* history;   // ids by position, or null
    const uint32_t* position;  // history holds *position + ahead ids, or as many as it has room for
    const double* uniforms;    // [uniforms_len] numbers in 0..1, used by *step
    const uint32_t* step;
    uint32_t* token;
    uint32_t* error;
    SampleScratch* scratch;
    double inverse_temperature, top_p, min_p;
    uint32_t vocab, dtype, ahead, window, uniforms_len, history_len;
    uint32_t top_k;  // 0: all
    uint32_t chunk;  // ids of a block
    uint32_t stored;  // whether there is shared memory for their weights
    uint32_t greedy;
    float logit_scale, logit_cap, penalty;  // a cap of 0: none; a penalty of 1: none
    uint32_t pad;
};
static_assert(sizeof(SampleArgs) == 144, "mirrored structs");

struct Sampling {
    const SampleArgs& a;
    float* values;                 // [chunk]
    unsigned long long* weights;   // [chunk], where stored
    uint32_t* parts;               // [3][kBins]: sums of 15 bits of the weights each
    uint32_t first, count;         // ids of this block
    uint32_t passes;
    float top;
    uint32_t top_key, cut_key, cut_id;  // kept: keys above the cut's, and at it ids up to the cut's
    uint64_t least;                     // weight that is kept

    __device__ __forceinline__ uint64_t compute_weight(float l) const {
        const double p = exp((double(l) - double(top)) * a.inverse_temperature);
        return uint64_t(__double2ll_rn(p * double(kUnit)));
    }
    __device__ __forceinline__ uint64_t weight(uint32_t i) const {
        return a.stored ? weights[i] : compute_weight(values[i]);
    }

    // Every block gets here before any goes on.
    __device__ void meet() {
        passes++;
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            atomicAdd(&a.scratch->arrived, 1ull);
            const unsigned long long all = uint64_t(passes) * gridDim.x;
            unsigned long long seen;
            do {
                asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(seen) : "l"(&a.scratch->arrived) : "memory");
            } while (seen < all);
            __threadfence();
        }
        __syncthreads();
    }

    // One pass: `f(i, key)` says in which bin the kept token i of this block counts, or kAll; weights are 1 where `ones`.
    // Then the bin in which the sum in ascending order exceeds the goal, which becomes relative to it. `goal_of(total)`
    // gives the goal on the first pass of a search. False where the goal is not reached.
    template <typename Bin, typename Goal>
    __device__ bool narrow(bool ones, bool first_pass, Bin f, Goal goal_of, uint64_t& goal, uint32_t& bin,
                           uint64_t& in_bin) {
        __shared__ unsigned long long warp_sums[kSampleThreads / 32], found[2];
        __shared__ uint32_t found_bin;
        for (uint32_t b = threadIdx.x; b < 3 * kBins; b += blockDim.x) parts[b] = 0;
        __syncthreads();
        if (threadIdx.x == 0) found_bin = kAll;  // nobody reads the last pass's any more
        for (uint32_t round = 0; round < count; round += blockDim.x) {
            const uint32_t i = round + threadIdx.x;
            uint64_t w = 0;
            uint32_t b = kAll;
            if (i < count) {
                const uint32_t key = ordered(values[i]);
                const bool kept = key > cut_key || (key == cut_key && first + i <= cut_id);
                if (kept) w = weight(i);
                if (w > 0 && w >= least) b = f(i, key);
                if (b >= kBins) w = 0;
            }
            // Neighbours often share a bin: one of them adds for all. (44 bits and five more for the sum of 32.)
            const uint32_t lane = threadIdx.x % 32, some = __ballot_sync(kAll, w > 0);
            if (some == 0) continue;
            const uint32_t leader = __ffs(some) - 1;
            const uint32_t leading = __shfl_sync(kAll, b, leader);
            const bool alike = __all_sync(kAll, w == 0 || b == leading);
            if (ones) w = w > 0;
            if (alike) {
                const uint32_t low = __reduce_add_sync(kAll, uint32_t(w) & 0x7fff);
                const uint32_t middle = __reduce_add_sync(kAll, uint32_t(w >> 15) & 0x7fff);
                const uint32_t high = __reduce_add_sync(kAll, uint32_t(w >> 30));
                if (lane == leader) {
                    atomicAdd(parts + b, low);
                    if (!ones) {
                        atomicAdd(parts + kBins + b, middle);
                        atomicAdd(parts + 2 * kBins + b, high);
                    }
                }
            } else if (w > 0) {
                atomicAdd(parts + b, uint32_t(w) & 0x7fff);
                if (!ones) {
                    atomicAdd(parts + kBins + b, uint32_t(w >> 15) & 0x7fff);
                    atomicAdd(parts + 2 * kBins + b, uint32_t(w >> 30));
                }
            }
        }
        __syncthreads();
        // The one that no block reads or adds to now is cleaned for the next pass.
        unsigned long long* mine = a.scratch->histogram[passes % 3];
        unsigned long long* next = a.scratch->histogram[(passes + 1) % 3];
        for (uint32_t b = threadIdx.x; b < kBins; b += blockDim.x) {
            const uint64_t sum = parts[b] + (uint64_t(parts[kBins + b]) << 15) + (uint64_t(parts[2 * kBins + b]) << 30);
            if (sum) atomicAdd(mine + b, static_cast<unsigned long long>(sum));
            if (b % gridDim.x == blockIdx.x) next[b] = 0;
        }
        meet();
        constexpr uint32_t kEach = kBins / kSampleThreads;
        unsigned long long v[kEach], sum = 0;
#pragma unroll
        for (uint32_t j = 0; j < kEach; j++) {
            v[j] = __ldcg(mine + threadIdx.x * kEach + j);
            sum += v[j];
        }
        unsigned long long inclusive = sum;
        const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int o = 1; o < 32; o *= 2) {
            const unsigned long long other = __shfl_up_sync(kAll, inclusive, o);
            if (lane >= o) inclusive += other;
        }
        if (lane == 31) warp_sums[warp] = inclusive;
        __syncthreads();
        unsigned long long before = inclusive - sum, total = 0;
        for (uint32_t w = 0; w < kSampleThreads / 32; w++) {
            if (w < warp) before += warp_sums[w];
            total += warp_sums[w];
        }
        if (first_pass) goal = goal_of(total);
        if (before <= goal && goal < before + sum) {
#pragma unroll
            for (uint32_t j = 0; j < kEach; j++) {
                if (goal < before + v[j]) {
                    found_bin = threadIdx.x * kEach + j;
                    found[0] = before;
                    found[1] = v[j];
                    break;
                }
                before += v[j];
            }
        }
        __syncthreads();
        bin = found_bin;
        if (bin == kAll) return false;
        goal -= found[0];
        in_bin = found[1];
        return true;
    }

    // The kept token, by rank or by id, at which the sum exceeds the goal. As a cut, its id may be any that keeps it.
    template <typename Goal>
    __device__ bool search(bool by_rank, bool is_cut, bool ones, Goal goal_of, uint32_t& key, uint32_t& id) {
        uint64_t goal = 0, in_bin = 0;
        uint32_t bin, low = 0;
        bool first_pass = true;
        if (by_rank) {
            // Below this a weight is less than half a unit.
            const float lowest = float(double(top) - 31.5 / a.inverse_temperature);
            const uint32_t range = top_key - ordered(lowest) + 1;
            int shift = max(0, 32 - __clz(range) - int(kBinBits)), above = 32;
            while (true) {
                const bool found = narrow(
                    ones, first_pass,
                    [&](uint32_t, uint32_t k) {
                        const uint32_t rank = top_key - k;
                        if (above < 32 && rank >> above != low >> above) return kAll;
                        return (rank - low) >> shift;
                    },
                    goal_of, goal, bin, in_bin);
                if (!found) return false;
                first_pass = false;
                low += bin << shift;
                if (shift == 0) break;
                above = shift;
                shift = max(0, shift - int(kBinBits));
            }
            key = top_key - low;
            // For a cut it does not matter which id a logit has that only one token has.
            if (is_cut && in_bin == (ones ? 1 : compute_weight(unordered(key)))) {
                id = kAll;
                return true;
            }
        } else {
            key = 0;
        }
        const uint32_t equal = key;
        low = 0;
        int shift = max(0, 32 - __clz(a.vocab) - int(kBinBits)), above = 32;
        while (true) {
            const bool found = narrow(
                ones, first_pass,
                [&](uint32_t i, uint32_t k) {
                    const uint32_t at = first + i;
                    if ((by_rank && k != equal) || (above < 32 && at >> above != low >> above)) return kAll;
                    return (at - low) >> shift;
                },
                goal_of, goal, bin, in_bin);
            if (!found) return false;
            first_pass = false;
            low += bin << shift;
            if (shift == 0) break;
            above = shift;
            shift = max(0, shift - int(kBinBits));
        }
        id = low;
        return true;
    }
};

extern "C" __global__ void __launch_bounds__(kSampleThreads) sample(const __grid_constant__ SampleArgs a) {
    extern __shared__ unsigned long long sample_shared[];
    __shared__ unsigned long long reduced[kSampleThreads / 32];
    __shared__ uint32_t reduced_broken[kSampleThreads / 32], last;
    // Shared memory: parts of bins, then weights where stored, values, and one bit an id.
    unsigned long long* weights = sample_shared + kBins * 3 / 2;
    float* values = reinterpret_cast<float*>(weights + (a.stored ? a.chunk : 0));
    uint32_t* occurred = reinterpret_cast<uint32_t*>(values + a.chunk);
    const uint32_t first = min(a.vocab, blockIdx.x * a.chunk), count = min(a.chunk, a.vocab - first);
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    let_next_start();
    wait_for_previous();

    if (a.penalty != 1.f) {
        for (uint32_t i = threadIdx.x; i < (a.chunk + 31) / 32; i += blockDim.x) occurred[i] = 0;
        __syncthreads();
        const uint32_t ids = min(*a.position + a.ahead, a.history_len), from = ids - min(ids, a.window);
        for (uint32_t i = from + threadIdx.x; i < ids; i += blockDim.x) {
            const uint32_t at = a.history[i] - first;
            if (at < count) atomicOr(occurred + at / 32, 1u << (at % 32));
        }
        __syncthreads();
    }
    unsigned long long best = 0;
    uint32_t broken = 0;
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
        float l = load_as_float(a.logits, a.dtype, first + i);
        if (a.logit_scale != 1.f) l *= a.logit_scale;
        if (a.logit_cap != 0.f) l = tanhf(l / a.logit_cap) * a.logit_cap;
        if (!(l < INFINITY)) broken = max(broken, ~(first + i));
        if (a.penalty != 1.f && (occurred[i / 32] >> (i % 32) & 1)) l = l > 0.f ? l / a.penalty : l * a.penalty;
        l += 0.f;  // no -0
        values[i] = l;
        const unsigned long long mine = uint64_t(ordered(l)) << 32 | ~(first + i);
        best = mine > best ? mine : best;
    }
#pragma unroll
    for (int o = 16; o; o /= 2) {
        const unsigned long long other = __shfl_xor_sync(kAll, best, o);
        best = other > best ? other : best;
    }
    broken = __reduce_max_sync(kAll, broken);
    if (lane == 0) {
        reduced[warp] = best;
        reduced_broken[warp] = broken;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (uint32_t w = 1; w < kSampleThreads / 32; w++) {
            best = reduced[w] > best ? reduced[w] : best;
            broken = max(broken, reduced_broken[w]);
        }
        atomicMax(&a.scratch->best, best);
        if (broken) atomicMax(&a.scratch->broken, broken);
    }
    Sampling s{a, values, weights, reinterpret_cast<uint32_t*>(sample_shared), first, count, 0, 0.f, 0, 0, kAll, 0};
    s.meet();
    best = __ldcg(&a.scratch->best);
    broken = __ldcg(&a.scratch->broken);
    uint32_t token = ~uint32_t(best);
    s.top_key = uint32_t(best >> 32);
    s.top = unordered(s.top_key);
    if (broken || !(s.top > -INFINITY)) {
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            *a.error = broken ? 1 + ~broken : 1;
            *a.token = 0;
        }
    } else {
        if (!a.greedy) {
            if (a.stored) {
                for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) weights[i] = s.compute_weight(values[i]);
                __syncthreads();
            }
            uint32_t key, id;
            if (a.top_k && a.top_k < a.vocab) {
                const uint64_t goal = a.top_k - 1;
                if (s.search(true, true, true, [&](uint64_t) { return goal; }, key, id)) {
                    s.cut_key = key;
                    s.cut_id = id;
                }
            }
            if (a.top_p < 1.0) {
                auto goal = [&](uint64_t total) {
                    const double wanted = ceil(a.top_p * double(total));
                    return wanted < 1.0 ? 0 : min(uint64_t(wanted), total) - 1;
                };
                if (s.search(true, true, false, goal, key, id)) {
                    s.cut_key = key;
                    s.cut_id = id;
                }
            }
            s.least = uint64_t(ceil(a.min_p * double(kUnit)));
            const double uniform = a.uniforms[*a.step % a.uniforms_len];
            // A nucleus is drawn from by rank, all else by id, as on the host.
            auto goal = [&](uint64_t total) { return min(uint64_t(uniform * double(total)), total - 1); };
            if (s.search(a.top_p < 1.0, false, false, goal, key, id)) token = id;
        }
        if (blockIdx.x == 0 && threadIdx.x == 0) *a.token = token;
    }
    // The last block out leaves the scratch as it was found.
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(&a.scratch->left, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    if (!a.greedy) {
        for (uint32_t i = threadIdx.x; i < 3 * kBins; i += blockDim.x) (&a.scratch->histogram[0][0])[i] = 0;
    }
    if (threadIdx.x == 0) {
        a.scratch->arrived = a.scratch->best = 0;
        a.scratch->left = a.scratch->broken = 0;
    }
}
