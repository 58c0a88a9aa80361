// Attention over keys and values of float16, with many rows of any size.
#include "attention_tiles.cuh"

TILES(f16, __half)
