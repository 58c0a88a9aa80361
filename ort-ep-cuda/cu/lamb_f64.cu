// LAMB for parameters of float64.
#include "lamb.cuh"

OF_LAMB(f64, double)
