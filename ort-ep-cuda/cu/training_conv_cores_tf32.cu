// Gradients of convolutions by their filters, of float32 as TF32, on tensor cores.
// compute: 80 90
#include "training_conv_cores.cuh"

GRADIENTS(tf32, float)
