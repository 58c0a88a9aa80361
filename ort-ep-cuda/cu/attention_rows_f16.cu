// Attention over keys and values of float16, with few rows.
#include "attention_rows.cuh"

FEW_ROWS(f16, __half)
