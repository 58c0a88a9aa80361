// Convolutions of float32.
#include "conv.cuh"

CONVOLUTIONS(f32, float)
