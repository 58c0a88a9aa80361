// Few rows of bfloat16 by weights of 4 bits.
#include "nbits_vectors.cuh"

VECTORS(4, bf16, __nv_bfloat16)
