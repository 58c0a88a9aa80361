// Few rows of float16 by weights of 8 bits.
#include "nbits_vectors.cuh"

VECTORS(8, f16, __half)
