// Large products of bfloat16 by warpgroups and tensor maps.
// compute: 90a
#include "gemm_maps.cuh"

MAP_PRODUCTS(bf16, __nv_bfloat16)
