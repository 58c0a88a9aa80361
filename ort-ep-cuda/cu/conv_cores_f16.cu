// Convolutions of float16 on tensor cores.
// compute: 80 90
#include "conv_cores.cuh"

CORES(f16, __half)
