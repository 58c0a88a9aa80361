// Attention over keys and values of float32, with many rows of any size.
#include "attention_tiles.cuh"

TILES(f32, float)
