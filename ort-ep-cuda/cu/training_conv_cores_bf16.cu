// Gradients of convolutions by their filters, of bfloat16, on tensor cores.
// compute: 80 90
#include "training_conv_cores.cuh"

GRADIENTS(bf16, __nv_bfloat16)
