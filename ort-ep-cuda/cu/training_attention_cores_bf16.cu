// Attention in training and its gradients, of bfloat16 on tensor cores.
// compute: 80 90
#include "training_attention_cores.cuh"

CORES(bf16, __nv_bfloat16)
