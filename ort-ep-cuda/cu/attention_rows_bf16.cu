// Attention over keys and values of bfloat16, with few rows.
#include "attention_rows.cuh"

FEW_ROWS(bf16, __nv_bfloat16)
