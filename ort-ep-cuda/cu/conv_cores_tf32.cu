// Convolutions of float32 as TF32 on tensor cores.
// compute: 80 90
#include "conv_cores.cuh"

CORES(tf32, float)
