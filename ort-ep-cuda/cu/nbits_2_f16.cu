// Few rows of float16 by weights of 2 bits.
#include "nbits_vectors.cuh"

VECTORS(2, f16, __half)
