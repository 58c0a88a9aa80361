// Few rows of float32 by weights of 8 bits.
#include "nbits_vectors.cuh"

VECTORS(8, f32, float)
