// Adam for parameters of float32.
#include "adam.cuh"

OF_ADAM(f32, float)
