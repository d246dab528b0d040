// Top-k routing on the device: one warp per token. What src/blocks/router.rs does on the host.
//
// Logits become scores; experts are chosen by score, or by score + bias (DeepSeek-V3's correction bias, arXiv
// 2412.19437, section 2.1.2), where asked among the best groups only; weights are the chosen scores without the bias,
// normalised and scaled. Equal keys: the lowest id wins. A lane keeps its experts' keys in registers, as numbers whose order
// is theirs, so that a choice is two instructions of the warp. Sums run in a fixed order, so a token's result does not
// depend on its neighbours.
#include "common.cuh"

enum Scoring : uint32_t { SOFTMAX = 0, SIGMOID = 1, SOFTMAX_OF_CHOSEN = 2, SPARSE_MIXER = 3 };

struct RouteArgs {
    const void* logits;         // [tokens, experts] of dtype
    const float* bias;          // [experts], or null
    const float* expert_scale;  // [experts], or null
    uint32_t* ids;              // [tokens, k]
    float* weights;             // [tokens, k]
    uint32_t* error;
    const uint32_t* given;      // [rows] of k experts, row_stride apart, that are taken instead; or null
    const uint32_t* position;   // with `given`: row (position + token - first) % rows
    uint32_t dtype, experts, k, scoring;
    float tolerance;            // of the sparse mixer, doubled
    uint32_t groups, keep, by_best_two;  // groups of 0: none
    uint32_t normalise;         // 0: no, 1: by the sum plus `eps`, 2: by the sum, at least `eps`
    float eps, scale;
    uint32_t weights_dtype;     // that weights are rounded to
    uint32_t rows, row_stride, first, pad;
};
static_assert(sizeof(RouteArgs) == 128, "mirrored structs");

// Puts the keys of all but the best groups below every other key. A lane judges a group. Out of the way of the many routers
// that have none.
__device__ __noinline__ void drop_groups(const RouteArgs& a, float* key, float* judged) {
    const uint32_t size = a.experts / a.groups, lane = threadIdx.x;
    for (uint32_t g = lane; g < a.groups; g += 32) {
        float best = -INFINITY, second = -INFINITY;
        for (uint32_t e = g * size; e < (g + 1) * size; e++) {
            if (key[e] > best) {
                second = best;
                best = key[e];
            } else if (key[e] > second) {
                second = key[e];
            }
        }
        judged[g] = a.by_best_two ? best + second : best;
    }
    __syncwarp();
    for (uint32_t i = 0; i < a.keep; i++) {
        uint32_t best = 0, id = kAll;
        for (uint32_t g = lane; g < a.groups; g += 32) {
            const uint32_t v = judged[g] == judged[g] ? ordered(judged[g]) : 0;
            if (v > best) {
                best = v;
                id = g;
            }
        }
        const uint32_t top = __reduce_max_sync(kAll, best);
        id = __reduce_min_sync(kAll, best == top ? id : kAll);
        if (lane == 0 && id != kAll) judged[id] = __int_as_float(0x7fc00000);  // NaN: kept
        __syncwarp();
    }
    for (uint32_t e = lane; e < a.experts; e += 32) {
        if (judged[e / size] == judged[e / size]) key[e] = -INFINITY;
    }
    __syncwarp();
}

// R: experts of a lane, every 32nd.
template <int R>
__device__ __forceinline__ void route(const RouteArgs& a) {
    extern __shared__ float shared[];
    const uint32_t experts = a.experts, k = a.k, token = blockIdx.x, lane = threadIdx.x;
    float *score = shared, *chosen = shared + experts;
    uint32_t* id_of = reinterpret_cast<uint32_t*>(chosen + k);
    let_next_start();
    wait_for_previous();
    // Asked for with the logits.
    const uint32_t position = a.given ? *a.position : 0;
    float v[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
        const uint32_t e = lane + 32 * r;
        v[r] = e < experts ? load_as_float(a.logits, a.dtype, size_t(token) * experts + e) : -INFINITY;
    }
    bool broken = false;
    float greatest = -INFINITY;
#pragma unroll
    for (int r = 0; r < R; r++) {
        broken |= !(v[r] < INFINITY);
        greatest = fmaxf(greatest, v[r]);
    }
    greatest = unordered(__reduce_max_sync(kAll, ordered(greatest)));
    broken = __any_sync(kAll, broken) || !(greatest > -INFINITY);
    // The order of sigmoids is that of logits, which do not saturate: keys stay logits where nothing is added.
    const bool scored = a.scoring == SOFTMAX || (a.scoring == SIGMOID && (a.bias || a.groups));
    float sum = 0.f;
    uint32_t key[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
        const float logit = v[r];
        if (a.scoring == SOFTMAX) {
            v[r] = expf(logit - greatest);
            sum += v[r];
        } else if (a.scoring == SIGMOID) {
            v[r] = sigmoid(logit);
        }
        key[r] = lane + 32 * r < experts ? ordered(scored ? v[r] : logit) : 0;
    }
    if (a.scoring == SOFTMAX) {
        sum = warp_sum(sum);
#pragma unroll
        for (int r = 0; r < R; r++) {
            v[r] /= sum;
            key[r] = lane + 32 * r < experts ? ordered(v[r]) : 0;
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        if (lane + 32 * r < experts) score[lane + 32 * r] = v[r];
    }
    if (a.bias || a.groups) {
        float* keys = reinterpret_cast<float*>(id_of + k);
#pragma unroll
        for (int r = 0; r < R; r++) {
            const uint32_t e = lane + 32 * r;
            if (e < experts) keys[e] = unordered(key[r]) + (a.bias ? a.bias[e] : 0.f);
        }
        __syncwarp();
        if (a.groups) drop_groups(a, keys, keys + experts);
#pragma unroll
        for (int r = 0; r < R; r++) {
            if (lane + 32 * r < experts) key[r] = ordered(keys[lane + 32 * r]);
        }
    }

#pragma unroll 1
    for (uint32_t j = 0; j < k; j++) {
        uint32_t best = key[0], id = lane;
#pragma unroll
        for (int r = 1; r < R; r++) {
            if (key[r] > best) {
                best = key[r];
                id = lane + 32 * r;
            }
        }
        const uint32_t top = __reduce_max_sync(kAll, best);
        if (a.scoring == SPARSE_MIXER) {
            // A softmax over what is left and near the best, relative to the larger of the two; the best's term is 1.
            const float most = unordered(top);
            float near = 0.f;
#pragma unroll
            for (int r = 0; r < R; r++) {
                const float l = unordered(key[r]);
                if (key[r] > 0 && l > -INFINITY && most - l <= a.tolerance * fmaxf(fabsf(l), most)) near += expf(l - most);
            }
            near = warp_sum(near);
            if (lane == 0) chosen[j] = 1.f / near;
        }
        bool mine = best == top;
        if (__popc(__ballot_sync(kAll, mine)) > 1) mine = id == __reduce_min_sync(kAll, mine ? id : kAll);
        if (mine) {
            // Only a token that has been reported as broken can have nothing left to choose.
            id_of[j] = top > 0 ? id : j;
#pragma unroll
            for (int r = 0; r < R; r++) {
                if (id == lane + 32 * r) key[r] = 0;
            }
        }
    }
    __syncwarp();

    // Choice j is lane j's.
    auto over_choices = [&](auto f) {
#pragma unroll 1
        for (uint32_t j = lane; j < k; j += 32) f(j);
    };
    if (a.scoring != SPARSE_MIXER) over_choices([&](uint32_t j) { chosen[j] = score[id_of[j]]; });
    if (a.scoring == SOFTMAX_OF_CHOSEN) {
        float top = -INFINITY, all = 0.f;
        over_choices([&](uint32_t j) { top = fmaxf(top, chosen[j]); });
        top = warp_max(top);
        over_choices([&](uint32_t j) { all += chosen[j] = expf(chosen[j] - top); });
        all = warp_sum(all);
        over_choices([&](uint32_t j) { chosen[j] /= all; });
    }
    float divisor = 1.f;
    if (a.normalise) {
        float all = 0.f;
        over_choices([&](uint32_t j) { all += chosen[j]; });
        all = warp_sum(all);
        divisor = a.normalise == 1 ? all + a.eps : fmaxf(all, a.eps);
    }
    const size_t row = (position + token - a.first) % a.rows * a.row_stride;
    over_choices([&](uint32_t j) {
        const uint32_t id = a.given ? a.given[row + j] : id_of[j];
        float w = chosen[j] / divisor * a.scale;
        if (a.expert_scale) w *= a.expert_scale[id];
        w = rounded(w, a.weights_dtype);
        broken |= !isfinite(w);
        a.ids[size_t(token) * k + j] = id;
        a.weights[size_t(token) * k + j] = w;
    });
    if (__any_sync(kAll, broken) && lane == 0) *a.error = 1 + token;
}

// Grid: tokens, block: one warp; shared: 8 bytes an expert and a choice each, 4 a group. Up to E experts. A logit that is NaN or
// +inf, or a token without any score, makes *error 1 + token (of any one such token); its ids are still within range.
#define ROUTE(E)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(32) route_##E(const __grid_constant__ RouteArgs a) { route<E / 32>(a); }

ROUTE(128)
ROUTE(256)
ROUTE(512)
ROUTE(1024)
