// LAMB for parameters of float32.
#include "lamb.cuh"

OF_LAMB(f32, float)
