// Products of float16 by warpgroups.
// compute: 90a
#include "gemm_warpgroups.cuh"

GROUP_PRODUCTS(f16, __half)
