// Convolutions of float16 with the channels last by warpgroups.
// compute: 90a
#include "conv_pixels_warpgroups.cuh"

PIXEL_GROUPS(f16, __half)
