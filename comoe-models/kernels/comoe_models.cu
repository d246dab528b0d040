// One translation unit, so that build.rs makes one fatbin.
#include "route.cu"
