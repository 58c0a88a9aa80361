// Many rows of float32 by weights of few bits.
#include "nbits_tiles.cuh"

TILES(f32, float)
