// Takes down when records are read through and brought ahead, where somebody asked for that (src/backend/cuda/spans.rs), by the
// clock that all of a GPU's multiprocessors share, in ns.
#pragma once
#include "record.cuh"

struct Span {
    unsigned long long begin;  // when the first began; all ones: nobody has yet
    unsigned long long end;    // when the last was done
    uint32_t record;
    uint32_t bytes;            // over the link
    uint32_t staged;           // bytes of the record that had been brought ahead
    uint32_t request;          // 0: it was read; else a block's part in bringing a layer's guesses, of which `record` is the
                               // likeliest, and this its request's number
};

// The spans follow.
struct SpanLog {
    uint32_t taken;  // may be more than there is room for
    uint32_t room;
    uint32_t unused[6];
};
// As src/backend/cuda/span_log.rs counts them.
static_assert(sizeof(Span) == 32 && sizeof(SpanLog) == 32, "mirrored structs");

__device__ __forceinline__ unsigned long long gpu_time() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
    return ns;
}

// A place for one span; null where nobody asked, or there is no more room.
__device__ __forceinline__ Span* take_span(SpanLog* log) {
    if (log == nullptr) return nullptr;
    const uint32_t at = atomicAdd(&log->taken, 1u);
    return at < log->room ? reinterpret_cast<Span*>(log + 1) + at : nullptr;
}

// Loaded anew by each who asks, so that nothing is kept for it where nobody did.
__device__ __forceinline__ Span* span_of(const Item* item) {
    uint64_t at;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(at) : "l"(&item->span) : "memory");
    return reinterpret_cast<Span*>(at);
}

// Around the reading of an item with a `dst`, by one thread of each block or warp that has a part in it.
__device__ __forceinline__ void reading_begins(const Item* item) {
    if (Span* span = span_of(item)) atomicMin(&span->begin, gpu_time());
}
__device__ __forceinline__ void reading_ends(const Item* item) {
    if (Span* span = span_of(item)) atomicMax(&span->end, gpu_time());
}
