// Products of float16, on tensor cores where the device has them for it.
#include "gemm_cores.cuh"
#include "gemm_few.cuh"

PRODUCTS_OF_FEW(f16, __half)
#if __CUDA_ARCH__ >= 800
CORE_PRODUCTS(f16, __half)
#else
SMALL_PRODUCTS(f16, __half)
// With half as many registers some would be in memory.
LARGE_PRODUCTS(f16, __half, 1)
#endif
