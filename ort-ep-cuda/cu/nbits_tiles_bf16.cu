// Many rows of bfloat16 by weights of few bits, on tensor cores where the device has them for it.
#include "nbits_tiles.cuh"

#if __CUDA_ARCH__ >= 800
CORES(bf16, __nv_bfloat16)
#else
TILES(bf16, __nv_bfloat16)
#endif
