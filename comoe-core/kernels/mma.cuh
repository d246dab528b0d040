// Tensor cores and asynchronous copies to shared memory, as every GPU since Ampere has them.
#pragma once
#include <cstdint>

// c += a b: a 16 x 16 and b 16 x 8 in BF16, c in F32. A lane (g = lane / 4, t = lane % 4) holds of a the rows g and
// g + 8 at k = 2t, 2t + 1 (a0, a1) and 2t + 8, 2t + 9 (a2, a3); of b column g at the same k (b0, b1); of c the columns
// 2t, 2t + 1 of row g (c0, c1) and of row g + 8 (c2, c3).
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes to shared memory, of which `bytes` are read and the rest is zero.
__device__ __forceinline__ void copy16(char* to, const void* from, uint32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void copies_end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `LEFT` of this thread's groups are under way.
template <int LEFT>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
