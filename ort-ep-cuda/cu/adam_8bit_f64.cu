// Adam with moments of 8 bits for parameters of float64.
#include "adam_8bit.cuh"

OF_ADAM_8BIT(f64, double)
