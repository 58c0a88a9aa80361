// Products of float32 as TF32 on tensor cores.
// compute: 80 90
#include "gemm_cores.cuh"

CORE_PRODUCTS(tf32, float)
