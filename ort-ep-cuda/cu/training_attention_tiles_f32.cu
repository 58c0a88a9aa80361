// Attention in training and its gradients, of float32 with heads of any size.
#include "training_attention_tiles.cuh"

TILES(f32, float)
