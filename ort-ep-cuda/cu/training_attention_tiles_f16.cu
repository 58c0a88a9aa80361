// Attention in training and its gradients, of float16 with heads of any size.
#include "training_attention_tiles.cuh"

TILES(f16, __half)
