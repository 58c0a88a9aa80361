// Attention in training and its gradients, of float16 on tensor cores.
// compute: 80 90
#include "training_attention_cores.cuh"

CORES(f16, __half)
