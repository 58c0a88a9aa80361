// Convolutions of float16.
#include "conv.cuh"

CONVOLUTIONS(f16, __half)
