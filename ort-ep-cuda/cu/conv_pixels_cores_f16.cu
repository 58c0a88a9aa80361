// Convolutions of float16 with the channels last on tensor cores.
// compute: 80 90
#include "conv_pixels_cores.cuh"
#include "conv_pixels_rows.cuh"

PIXEL_CORES(f16, __half)
PIXEL_ROWS(f16, __half)
