// Sums of gradients over batches for parameters of float64.
#include "accumulate.cuh"

ACCUMULATE(f64, double)
