// Adafactor for parameters of float64.
#include "adafactor.cuh"

ADAFACTOR(f64, double)
