// Products of float32.
#include "gemm_few.cuh"

PRODUCTS_OF_FEW(f32, float)
SMALL_PRODUCTS(f32, float)
LARGE_PRODUCTS(f32, float, LARGE_BLOCKS)
