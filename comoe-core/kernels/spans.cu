// The GPU's clock, for the host.
#include "spans.cuh"

extern "C" __global__ void tell_time(unsigned long long* ns) { *ns = gpu_time(); }
