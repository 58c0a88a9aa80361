// The standard's optimizers for parameters of float32.
#include "standard.cuh"

STANDARD(f32, float)
