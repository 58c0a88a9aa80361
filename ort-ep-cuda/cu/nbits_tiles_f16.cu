// Many rows of float16 by weights of few bits, on tensor cores where the device has them for it.
#include "nbits_tiles.cuh"

#if __CUDA_ARCH__ >= 800
CORES(f16, __half)
#else
TILES(f16, __half)
#endif
