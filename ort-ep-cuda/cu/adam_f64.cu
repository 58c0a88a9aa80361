// Adam for parameters of float64.
#include "adam.cuh"

OF_ADAM(f64, double)
