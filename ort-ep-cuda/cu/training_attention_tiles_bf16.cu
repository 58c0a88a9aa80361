// Attention in training and its gradients, of bfloat16 with heads of any size.
#include "training_attention_tiles.cuh"

TILES(bf16, __nv_bfloat16)
