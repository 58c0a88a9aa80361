// Convolutions of bfloat16 with the channels last on tensor cores.
// compute: 80 90
#include "conv_pixels_cores.cuh"

PIXEL_CORES(bf16, __nv_bfloat16)
