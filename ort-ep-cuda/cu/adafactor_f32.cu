// Adafactor for parameters of float32.
#include "adafactor.cuh"

ADAFACTOR(f32, float)
