// Convolutions of bfloat16 with the channels last by warpgroups.
// compute: 90a
#include "conv_pixels_warpgroups.cuh"

PIXEL_GROUPS(bf16, __nv_bfloat16)
