// Products of bfloat16 by warpgroups.
// compute: 90a
#include "gemm_warpgroups.cuh"

GROUP_PRODUCTS(bf16, __nv_bfloat16)
