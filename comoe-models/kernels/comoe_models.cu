// One translation unit, so that build.rs makes one fatbin.
#include "attend.cu"
#include "embed.cu"
#include "gate.cu"
#include "gemv.cu"
#include "heads.cu"
#include "norm.cu"
#include "route.cu"
#include "sample.cu"
