// Convolutions of bfloat16.
#include "conv.cuh"

CONVOLUTIONS(bf16, __nv_bfloat16)
