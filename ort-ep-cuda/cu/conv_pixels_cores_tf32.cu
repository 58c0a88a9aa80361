// Convolutions of float32 as TF32 with the channels last on tensor cores.
// compute: 80 90
#include "conv_pixels_cores.cuh"

PIXEL_CORES(tf32, float)
