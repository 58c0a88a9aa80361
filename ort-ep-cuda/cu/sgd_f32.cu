// Stochastic gradient descent for parameters of float32.
#include "sgd.cuh"

SGD(f32, float)
