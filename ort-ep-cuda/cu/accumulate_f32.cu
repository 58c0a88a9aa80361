// Sums of gradients over batches for parameters of float32.
#include "accumulate.cuh"

ACCUMULATE(f32, float)
