// LFM2's short convolution, one thread a channel: gated inputs go to the cache, and each is convolved with those of the
// positions before it. Rounded to the dtype where candle's kernels write a tensor, newest tap first.
#include "common.cuh"

struct ConvArgs {
    const void* parts;  // [tokens, 3 width]: b, c, x
    const void* taps;   // [width, n], oldest first
    const void* bias;   // [width], or null
    void* cache;        // [capacity, width] of gated inputs
    void* out;          // [tokens, width]
    const uint32_t* position;
    uint32_t* error;
    uint32_t width, n, tokens, capacity, dtype, pad;
};
static_assert(sizeof(ConvArgs) == 80, "mirrored structs");

extern "C" __global__ void __launch_bounds__(128) short_conv(const __grid_constant__ ConvArgs a) {
    let_next_start();
    wait_for_previous();
    const uint32_t channel = blockIdx.x * 128 + threadIdx.x, dt = a.dtype;
    if (channel >= a.width) return;
    for (uint32_t t = 0; t < a.tokens; t++) {
        const uint32_t position = *a.position + t;
        if (position >= a.capacity) {
            if (channel == 0) *a.error = 1 + t;
            return;
        }
        const size_t parts = size_t(t) * 3 * a.width + channel;
        const float b = load_as_float(a.parts, dt, parts), c = load_as_float(a.parts, dt, parts + a.width);
        const float gated = rounded(b * load_as_float(a.parts, dt, parts + 2 * a.width), dt);
        store_from_float(a.cache, dt, size_t(position) * a.width + channel, gated);
        float sum = 0.f;
        for (uint32_t i = 0; i < a.n && i <= position; i++) {
            const float v = i ? load_as_float(a.cache, dt, size_t(position - i) * a.width + channel) : gated;
            const float term = rounded(v * load_as_float(a.taps, dt, size_t(channel) * a.n + a.n - 1 - i), dt);
            sum = i ? rounded(sum + term, dt) : term;
        }
        if (a.bias) sum = rounded(sum + load_as_float(a.bias, dt, channel), dt);
        store_from_float(a.out, dt, size_t(t) * a.width + channel, c * sum);
    }
}
