// Attention over keys and values of float32, with few rows.
#include "attention_rows.cuh"

FEW_ROWS(f32, float)
