// One translation unit, so that build.rs makes one fatbin.
#include "combine.cu"
#include "dequant.cu"
#include "gemm.cu"
#include "gemv.cu"
#include "one_token.cu"
#include "one_token_int4.cu"
#include "resolve.cu"
#include "peers.cu"
