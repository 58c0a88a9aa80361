// Few rows of float16 by weights of 4 bits.
#include "nbits_vectors.cuh"

VECTORS(4, f16, __half)
