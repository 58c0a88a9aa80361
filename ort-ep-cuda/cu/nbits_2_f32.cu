// Few rows of float32 by weights of 2 bits.
#include "nbits_vectors.cuh"

VECTORS(2, f32, float)
