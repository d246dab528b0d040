// One translation unit, so that build.rs makes one fatbin.
#include "prefill_attention.cu"
#include "route.cu"
