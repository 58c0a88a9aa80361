// Large products of float16 by warpgroups and tensor maps.
// compute: 90a
#include "gemm_maps.cuh"

MAP_PRODUCTS(f16, __half)
