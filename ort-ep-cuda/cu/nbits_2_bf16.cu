// Few rows of bfloat16 by weights of 2 bits.
#include "nbits_vectors.cuh"

VECTORS(2, bf16, __nv_bfloat16)
