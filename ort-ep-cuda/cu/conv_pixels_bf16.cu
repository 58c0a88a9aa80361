// Convolutions of bfloat16 with the channels last.
#include "conv_pixels.cuh"

PIXEL_CONVOLUTIONS(bf16, __nv_bfloat16)
