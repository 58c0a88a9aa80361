// Attention over keys and values of bfloat16, with many rows of any size.
#include "attention_tiles.cuh"

TILES(bf16, __nv_bfloat16)
