// What GPUs hand to each other, four bytes at a time: behind each lies the number of the step that it belongs to, and both
// are written and read as one. Whoever waits for a word reads it until it has the step's number, so what is handed over
// needs no fence before it, no count behind it, and one journey instead of two.
#pragma once
#include <cstdint>

__device__ __forceinline__ void put_word(uint64_t* at, uint32_t value, uint32_t step) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(uint64_t(step) << 32 | value) : "memory");
}

__device__ __forceinline__ uint64_t get_word(const uint64_t* at) {
    uint64_t word;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
    return word;
}

__device__ __forceinline__ bool is_of(uint64_t word, uint32_t step) { return uint32_t(word >> 32) == step; }

// Steps are counted from 1, also when they begin anew: memory that nobody has written to has 0.
__device__ __forceinline__ uint32_t step_after(uint32_t step) { return step == 0xffffffffu ? 1 : step + 1; }
