// Products of float64.
#include "gemm_few.cuh"

PRODUCTS_OF_FEW(f64, double)
SMALL_PRODUCTS(f64, double)
