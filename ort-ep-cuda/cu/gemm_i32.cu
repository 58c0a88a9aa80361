// Products of integers of 32 bits, which wrap.
#include "gemm_few.cuh"

PRODUCTS_OF_FEW(i32, int)
SMALL_PRODUCTS(i32, int)
LARGE_PRODUCTS(i32, int, LARGE_BLOCKS)
