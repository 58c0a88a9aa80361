// Products of bfloat16, on tensor cores where the device has them for it.
#include "gemm_cores.cuh"
#include "gemm_few.cuh"

PRODUCTS_OF_FEW(bf16, __nv_bfloat16)
#if __CUDA_ARCH__ >= 800
CORE_PRODUCTS(bf16, __nv_bfloat16)
#else
SMALL_PRODUCTS(bf16, __nv_bfloat16)
// With half as many registers some would be in memory.
LARGE_PRODUCTS(bf16, __nv_bfloat16, 1)
#endif
