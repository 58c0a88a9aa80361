// Few rows of bfloat16 by weights of 8 bits.
#include "nbits_vectors.cuh"

VECTORS(8, bf16, __nv_bfloat16)
