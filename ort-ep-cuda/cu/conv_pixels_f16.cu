// Convolutions of float16 with the channels last.
#include "conv_pixels.cuh"

PIXEL_CONVOLUTIONS(f16, __half)
