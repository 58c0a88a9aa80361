// Convolutions of float32 with the channels last.
#include "conv_pixels.cuh"

PIXEL_CONVOLUTIONS(f32, float)
