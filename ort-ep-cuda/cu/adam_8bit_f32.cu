// Adam with moments of 8 bits for parameters of float32.
#include "adam_8bit.cuh"

OF_ADAM_8BIT(f32, float)
