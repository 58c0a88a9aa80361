// Convolutions of bfloat16 with the channels last on tensor cores.
// compute: 80 90
#include "conv_pixels_cores.cuh"
#include "conv_pixels_rows.cuh"

PIXEL_CORES(bf16, __nv_bfloat16)
PIXEL_ROWS(bf16, __nv_bfloat16)
