// Products of integers of 64 bits, which wrap.
#include "gemm_few.cuh"

PRODUCTS_OF_FEW(i64, int64)
SMALL_PRODUCTS(i64, int64)
