// Few rows of float32 by weights of 4 bits.
#include "nbits_vectors.cuh"

VECTORS(4, f32, float)
