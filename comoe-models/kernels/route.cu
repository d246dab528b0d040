// Top-k routing on the device: one warp per token.
//
// score = softmax over all experts, or sigmoid of each; an expert is chosen by score + bias (DeepSeek-V3's correction
// bias, arXiv 2412.19437, section 2.1.2), its weight is the score without the bias, normalised over the chosen where
// asked, and scaled. Equal keys: the lowest id wins. Sums run in a fixed order, so a token's result does not depend on
// its neighbours.
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

enum Scoring : uint32_t { SOFTMAX = 0, SIGMOID = 1 };

__device__ __forceinline__ float logit_at(const void* p, uint32_t dtype, size_t i) {
    switch (dtype) {
        case 1: return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
        case 2: return __half2float(static_cast<const __half*>(p)[i]);
        default: return static_cast<const float*>(p)[i];
    }
}

__device__ __forceinline__ float warp_max(float v) {
    for (int o = 16; o; o /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
    return v;
}

__device__ __forceinline__ float warp_sum(float v) {
    for (int o = 16; o; o /= 2) v += __shfl_xor_sync(0xffffffffu, v, o);
    return v;
}

// logits [tokens, experts] -> ids, weights [tokens, k]; grid: tokens, block: one warp; shared: 8 bytes an expert.
// A logit that is NaN or +inf, or a token without any score, makes *error 1 + token (of any one such token); its ids
// are still within range.
extern "C" __global__ void __launch_bounds__(32) route(const void* logits, uint32_t dtype, const float* bias,
                                                       uint32_t experts, uint32_t k, uint32_t scoring,
                                                       uint32_t normalise, float scale, uint32_t* ids, float* weights,
                                                       uint32_t* error) {
    extern __shared__ float shared[];
    float *score = shared, *key = shared + experts;
    const uint32_t token = blockIdx.x, lane = threadIdx.x;

    bool broken = false;
    float greatest = -INFINITY;
    for (uint32_t e = lane; e < experts; e += 32) {
        const float v = logit_at(logits, dtype, size_t(token) * experts + e);
        broken |= !(v < INFINITY);
        score[e] = v;
        greatest = fmaxf(greatest, v);
    }
    broken = __any_sync(0xffffffffu, broken);
    greatest = warp_max(greatest);
    float sum = 0.f;
    for (uint32_t e = lane; e < experts; e += 32) {
        score[e] = scoring == SOFTMAX ? expf(score[e] - greatest) : 1.f / (1.f + expf(-score[e]));
        sum += score[e];
    }
    sum = warp_sum(sum);
    for (uint32_t e = lane; e < experts; e += 32) {
        if (scoring == SOFTMAX) score[e] /= sum;
        key[e] = score[e] + (bias ? bias[e] : 0.f);
    }
    __syncwarp();

    float chosen_sum = 0.f;
    for (uint32_t j = 0; j < k; j++) {
        // Every lane's own best (a NaN key never wins against a number), then the warp's.
        float best = -INFINITY;
        uint32_t id = 0xffffffffu;
        for (uint32_t e = lane; e < experts; e += 32) {
            if (key[e] > best || (id == 0xffffffffu && key[e] == best)) {
                best = key[e];
                id = e;
            }
        }
        for (int o = 16; o; o /= 2) {
            const float other = __shfl_xor_sync(0xffffffffu, best, o);
            const uint32_t other_id = __shfl_xor_sync(0xffffffffu, id, o);
            if (other > best || (other == best && other_id < id)) {
                best = other;
                id = other_id;
            }
        }
        // Only a token that has been reported as broken can have nothing left to choose.
        const uint32_t safe = id < experts ? id : j % experts;
        chosen_sum += score[safe];
        if (lane == 0) {
            ids[size_t(token) * k + j] = safe;
            weights[size_t(token) * k + j] = score[safe];
        }
        __syncwarp();
        if (lane == 0) key[safe] = __int_as_float(0x7fc00000);  // NaN: taken
        __syncwarp();
    }
    if (lane == 0) {
        const float factor = normalise ? scale / chosen_sum : scale;
        if (broken || !isfinite(factor * chosen_sum)) *error = 1 + token;
        for (uint32_t j = 0; j < k; j++) weights[size_t(token) * k + j] *= factor;
    }
}
