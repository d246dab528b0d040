// Top-k routing on the device: one warp per token. What src/blocks/router.rs does on the host.
//
// Logits become scores; experts are chosen by score, or by score + bias (DeepSeek-V3's correction bias, arXiv
// 2412.19437, section 2.1.2), where asked among the best groups only; weights are the chosen scores without the bias,
// normalised and scaled. Equal keys: the lowest id wins. Sums run in a fixed order, so a token's result does not depend
// on its neighbours.
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

// The first of the greatest of `key`, NaNs aside; kAll where there is none.
__device__ __forceinline__ uint32_t best_of(const float* key, uint32_t n, uint32_t lane, float& best) {
    best = -INFINITY;
    uint32_t id = kAll;
#pragma unroll 4
    for (uint32_t e = lane; e < n; e += 32) {
        const float v = key[e];
        if (v > best || (id == kAll && v == best)) {
            best = v;
            id = e;
        }
    }
    // Numbers whose order is that of floats; -0 counts as 0, and what has nothing is below all.
    const uint32_t bits = __float_as_uint(best + 0.f);
    const uint32_t rank = id == kAll ? 0 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    const uint32_t top = __reduce_max_sync(kAll, rank);
    id = __reduce_min_sync(kAll, rank == top ? id : kAll);
    best = __uint_as_float(top & 0x80000000u ? top & 0x7fffffffu : ~top);
    return id;
}

// Puts the keys of all but the best groups below every other key. A lane judges a group.
__device__ __forceinline__ void drop_groups(const RouteArgs& a, float* key, float* judged, uint32_t lane) {
    const uint32_t size = a.experts / a.groups;
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
        float best;
        const uint32_t g = best_of(judged, a.groups, lane, best);
        if (lane == 0 && g != kAll) judged[g] = __int_as_float(0x7fc00000);  // NaN: kept
        __syncwarp();
    }
    for (uint32_t e = lane; e < a.groups * size; e += 32) {
        if (judged[e / size] == judged[e / size]) key[e] = -INFINITY;
    }
    __syncwarp();
}

// Grid: tokens, block: one warp; shared: 8 bytes an expert, 4 a group and 4 a choice. A logit that is NaN or +inf, or a
// token without any score, makes *error 1 + token (of any one such token); its ids are still within range.
extern "C" __global__ void __launch_bounds__(32) route(const __grid_constant__ RouteArgs a) {
    extern __shared__ float shared[];
    const uint32_t experts = a.experts, k = a.k;
    float *score = shared, *key = shared + experts, *judged = key + experts, *chosen = judged + a.groups;
    const uint32_t token = blockIdx.x, lane = threadIdx.x;
    let_next_start();
    wait_for_previous();

    bool broken = false;
    float greatest = -INFINITY;
    for (uint32_t e = lane; e < experts; e += 32) {
        const float v = load_as_float(a.logits, a.dtype, size_t(token) * experts + e);
        broken |= !(v < INFINITY);
        score[e] = key[e] = v;
        greatest = fmaxf(greatest, v);
    }
    broken = __any_sync(kAll, broken);
    greatest = warp_max(greatest);
    broken |= !(greatest > -INFINITY);
    if (a.scoring == SOFTMAX) {
        float sum = 0.f;
        for (uint32_t e = lane; e < experts; e += 32) {
            score[e] = expf(score[e] - greatest);
            sum += score[e];
        }
        sum = warp_sum(sum);
        for (uint32_t e = lane; e < experts; e += 32) key[e] = score[e] /= sum;
    } else if (a.scoring == SIGMOID) {
        // The order of sigmoids is that of logits, which do not saturate: keys stay logits where nothing is added.
        for (uint32_t e = lane; e < experts; e += 32) {
            score[e] = sigmoid(score[e]);
            if (a.bias || a.groups) key[e] = score[e];
        }
    }
    if (a.bias) {
        for (uint32_t e = lane; e < experts; e += 32) key[e] += a.bias[e];
    }
    __syncwarp();
    if (a.groups) drop_groups(a, key, judged, lane);

    uint32_t* ids = a.ids + size_t(token) * k;
    for (uint32_t j = 0; j < k; j++) {
        float best;
        const uint32_t id = best_of(key, experts, lane, best);
        // Only a token that has been reported as broken can have nothing left to choose.
        const uint32_t safe = id < experts ? id : j % experts;
        float weight = score[safe];
        if (a.scoring == SPARSE_MIXER) {
            // A softmax over what is left and near the best, relative to the larger of the two; the best's term is 1.
            float sum = 0.f;
            for (uint32_t e = lane; e < experts; e += 32) {
                const float l = key[e];
                if (l > -INFINITY && best - l <= a.tolerance * fmaxf(fabsf(l), best)) sum += expf(l - best);
            }
            weight = 1.f / warp_sum(sum);
        }
        __syncwarp();
        if (lane == 0) {
            const size_t row = a.given ? (*a.position + token - a.first) % a.rows : 0;
            ids[j] = a.given ? a.given[row * a.row_stride + j] : safe;
            chosen[j] = weight;
            key[safe] = __int_as_float(0x7fc00000);  // NaN: taken
        }
        __syncwarp();
    }

    if (a.scoring == SOFTMAX_OF_CHOSEN) {
        float top = -INFINITY, sum = 0.f;
        for (uint32_t j = 0; j < k; j++) top = fmaxf(top, chosen[j]);
        for (uint32_t j = 0; j < k; j++) sum += expf(chosen[j] - top);
        __syncwarp();
        for (uint32_t j = lane; j < k; j += 32) chosen[j] = expf(chosen[j] - top) / sum;
        __syncwarp();
    }
    float divisor = 1.f;
    if (a.normalise) {
        float sum = 0.f;
        for (uint32_t j = 0; j < k; j++) sum += chosen[j];
        divisor = a.normalise == 1 ? sum + a.eps : fmaxf(sum, a.eps);
    }
    for (uint32_t j = lane; j < k; j += 32) {
        float w = chosen[j] / divisor * a.scale;
        if (a.expert_scale) w *= a.expert_scale[ids[j]];
        w = rounded(w, a.weights_dtype);
        broken |= !isfinite(w);
        a.weights[size_t(token) * k + j] = w;
    }
    if (__any_sync(kAll, broken) && lane == 0) *a.error = 1 + token;
}
