// Programmatic dependent launch: kernels that are set up while the one before them on the stream ends.
#pragma once

// The next kernel may be set up from here on; it waits for this one before it reads what this one writes.
__device__ __forceinline__ void let_dependents_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The kernel before this one is done behind this, and what it wrote is visible.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
