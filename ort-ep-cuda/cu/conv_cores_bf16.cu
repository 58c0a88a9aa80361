// Convolutions of bfloat16 on tensor cores.
// compute: 80 90
#include "conv_cores.cuh"

CORES(bf16, __nv_bfloat16)
