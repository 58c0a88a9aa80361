// Gradients of convolutions by their filters, of float16, on tensor cores.
// compute: 80 90
#include "training_conv_cores.cuh"

GRADIENTS(f16, __half)
