// The standard's optimizers for parameters of float64.
#include "standard.cuh"

STANDARD(f64, double)
